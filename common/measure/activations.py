"""How large the activations of each block are, and a sample of what each gives: an observer of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine

MOST = 1 << 14  # values of a sample
PARTS = {"text": "text encoder", "transformer": "denoiser", "vae": "VAE"}  # by the role of a component


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """What was seen of one block. `largest` is infinite or NaN where a value was."""

    part: str  # text encoder, denoiser or VAE
    name: str  # `transformer_blocks.3`
    largest: float = 0.0
    at: str = ""  # where it was largest: `attn.to_out.0, linear`
    values: NDArray[Any] | None = None  # of its last result in the first step, at most MOST
    errors: Mapping[str, float] = field(default_factory=dict)  # relative L2 of those, by the policy it is against

    @property
    def key(self) -> tuple[str, str]:
        return self.part, self.name

    def distance(self, other: Block | None) -> float | None:
        """Relative L2 from `other`'s values; None where one of the two has none that are comparable."""
        if other is None or self.values is None or other.values is None or self.values.shape != other.values.shape:
            return None
        wide = other.values.astype(np.float64)
        size = np.linalg.norm(wide)
        found = float(np.linalg.norm(self.values - wide) / size) if size else 0.0
        return found if math.isfinite(found) else None


class Blocks:
    """Called with every operation. Which part an operation is of, its parameter's path says; one without is of the
    block before it."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint):
        self.engine = engine
        self._parts = {
            name.rpartition(".")[0]: PARTS[component.role]
            for component in checkpoint.components.values()
            for name in component.plan.entries
        }
        # Of a network with kernels, all arrays with four axes are images.
        self._pictures = {
            PARTS[component.role]
            for component in checkpoint.components.values()
            if any(len(entry.shape) == 4 for entry in component.plan.entries.values())
        }
        self._blocks: dict[tuple[str, str], Block] = {}
        self._closed: set[tuple[str, str]] = set()  # whose sample is taken
        self._key = ("", "")

    def __call__(self, operation: str, path: str, result: Array) -> None:
        if path in self._parts:
            self._enter(self._parts[path], block_of(path))
        if not self._key[0]:
            return
        before = self._blocks[self._key]
        size = self.engine.largest(result)
        if not size <= before.largest and math.isfinite(before.largest):
            inside = path.removeprefix(before.name).lstrip(".")
            before = replace(before, largest=size, at=f"{inside}, {operation}" if inside else operation)
        if self._key not in self._closed:
            image = before.part in self._pictures and len(result.shape) == 4
            before = replace(before, values=self.engine.sampled(result, MOST, image))
        self._blocks[self._key] = before

    def end_of_first(self) -> None:
        """From here on no sample is taken of what was seen already."""
        self._closed |= self._blocks.keys()
        self._key = ("", "")

    def found(self) -> list[Block]:
        """In the order in which they were entered."""
        return list(self._blocks.values())

    def _enter(self, part: str, name: str) -> None:
        key = self._key = (part, name)
        if key not in self._closed and key in self._blocks:  # in the order of the last time that it is entered
            self._blocks[key] = self._blocks.pop(key)
        self._blocks.setdefault(key, Block(part=part, name=name))


def block_of(path: str) -> str:
    """`transformer_blocks.3` of `transformer_blocks.3.attn.to_q`, and two names of a path without a number."""
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1] if numbered else parts[:2])
