"""Continuation under the next wider policy after a value that the present one cannot represent.

Such an image is bit for bit the one that the policy in its recipe makes alone: its texts, its steps and its decoding
all run under that policy. Only if a VAE overflows that encoded nothing, the latents stay and are decoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel, renew
from qwenimg.common.precision.ladder import higher, holding
from qwenimg.common.precision.precision import parse
from qwenimg.common.runtime.probe import Overflow
from qwenimg.common.weights.values import TooLarge

T = TypeVar("T")
Cause: TypeAlias = "Overflow | TooLarge"
CAUSES = (Overflow, TooLarge)


@dataclass(frozen=True, kw_only=True)
class WiderPolicy:
    """The next wider policy after an overflow."""

    part: str  # the part of the model: text, transformer or vae
    policy: str
    line: str  # the message


class Fallback:
    """The option `--fallback`. Without `wanted`, an overflow ends the run. `tf32`: float32 is not exact on this
    device."""

    def __init__(self, model: DiffusionModel, *, wanted: bool, tf32: bool):
        self.model, self.wanted, self.tf32 = model, wanted, tf32

    def next_policy(self, error: Cause) -> WiderPolicy:
        """Return the next wider policy after `error`. Raises `error` if there is none, or fallback is not wanted."""
        above = self._above(error) if self.wanted else None
        if above is None or (self.tf32 and above.startswith("fp32")):
            raise error
        return WiderPolicy(
            part=error.part, policy=above, line=f"{error.what}; --fallback goes on with --precision {above}"
        )

    def _above(self, error: Cause) -> str | None:
        precision = self.model.runtime.precision
        if isinstance(error, Overflow):
            return higher(precision, error.part, error.operation)
        return holding(precision, error.part, error.entry.name, error.entry.residency)

    def adopt(self, wider: WiderPolicy) -> None:
        """Set the policy, for this image and later ones, and report it."""
        runtime = self.model.runtime
        kind, before = runtime.precision.kind, runtime.choice
        runtime.precision = parse(wider.policy, on_gpu=runtime.engine.on_gpu, kind=kind)
        lines = f"{before.fallback}; {wider.line}" if before.fallback else wider.line
        runtime.choice = replace(before, precision=wider.policy, fallback=lines)
        renew(self.model, wider.part)
        runtime.notify("warning", wider.line)

    def retried(self, call: Callable[[], T]) -> T:
        """Return the result of `call` under the first policy that can represent it."""
        while True:
            try:
                return call()
            except CAUSES as error:
                wider = self.next_policy(error)
            self.adopt(wider)  # outside the handler, where the error no longer holds its arrays
