"""Going on under the next policy where a value is beyond the one that a picture was begun in.

A picture that is made so is bit for bit the one that the policy of its recipe makes alone: its texts, its steps and its
decoding are all of that policy. Only where a VAE falls back that encoded nothing, the latents stay, and are decoded
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from qwenimg.common.pipeline.diffusion_model import DiffusionModel, renew
from qwenimg.common.precision.ladder import higher, holding
from qwenimg.common.precision.precision import parse
from qwenimg.common.runtime.probe import Overflow
from qwenimg.common.weights.not_finite import TooLarge

T = TypeVar("T")
Cause: TypeAlias = "Overflow | TooLarge"
CAUSES = (Overflow, TooLarge)


@dataclass(frozen=True, kw_only=True)
class Climb:
    part: str  # of the model: text, transformer or vae
    policy: str
    line: str  # what is said of it


class Fallback:
    """`wanted`: else every overflow ends the run. `tf32`: whether this device has no float32 to climb to."""

    def __init__(self, model: DiffusionModel, *, wanted: bool, tf32: bool):
        self.model, self.wanted, self.tf32 = model, wanted, tf32

    def after(self, error: Cause) -> Climb:
        """What to go on with. Raises `error` where there is nothing, or nothing is wanted."""
        above = self._above(error) if self.wanted else None
        if above is None or (self.tf32 and above.startswith("fp32")):
            raise error
        return Climb(part=error.part, policy=above, line=f"{error.what}; --fallback goes on with --precision {above}")

    def _above(self, error: Cause) -> str | None:
        precision = self.model.runtime.precision
        if isinstance(error, Overflow):
            return higher(precision, error.part, error.operation)
        return holding(precision, error.part, error.entry.name, error.entry.residency)

    def climb(self, climb: Climb, warnings: list[str]) -> None:
        """Takes the policy, for this picture and those that follow, and tells so."""
        runtime = self.model.runtime
        kind, before = runtime.precision.kind, runtime.choice
        runtime.precision = parse(climb.policy, on_gpu=runtime.engine.on_gpu, kind=kind)
        said = f"{before.fallback}; {climb.line}" if before.fallback else climb.line
        runtime.choice = replace(before, precision=climb.policy, fallback=said)
        renew(self.model, climb.part)
        runtime.notify("warning", climb.line)
        warnings.append(climb.line)

    def calling(self, call: Callable[[], T], warnings: list[str]) -> T:
        """The result of `call` under the first policy that holds it."""
        while True:
            try:
                return call()
            except CAUSES as error:
                climb = self.after(error)
            self.climb(climb, warnings)  # here, where the error no longer keeps what it failed on
