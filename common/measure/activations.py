"""An observer of a run: the largest activations of each block, and a sample of its results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine

MOST = 1 << 14  # the most values of a sample
PARTS = {"text": "text encoder", "transformer": "denoiser", "vae": "VAE"}  # by the role of a component


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockActivations:
    """The observations of one block. `largest` is infinite or NaN if a value was."""

    part: str  # text encoder, denoiser or VAE
    name: str  # `transformer_blocks.3`
    largest: float = 0.0
    at: str = ""  # the module and operation with the largest value: `attn.to_out.0, linear`
    values: NDArray[Any] | None = None  # a sample of its last result in the first step
    errors: Mapping[str, float] = field(default_factory=dict)  # relative L2 error of `values`, by reference policy

    @property
    def key(self) -> tuple[str, str]:
        return self.part, self.name

    def distance(self, other: BlockActivations | None) -> float | None:
        """Return the relative L2 distance from `other`'s values; None if the two have no values to compare."""
        if other is None or self.values is None or other.values is None or self.values.shape != other.values.shape:
            return None
        wide = other.values.astype(np.float64)
        size = np.linalg.norm(wide)
        error = float(np.linalg.norm(self.values - wide) / size) if size else 0.0
        return error if math.isfinite(error) else None


class ActivationObserver:
    """An observer of all operations. An operation belongs to the block of its parameter's path, or to the block before
    it if it has none."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint):
        self.engine = engine
        self._parts = {
            name.rpartition(".")[0]: PARTS[component.role]
            for component in checkpoint.components.values()
            for name in component.plan.entries
        }
        # In a network with kernels, all arrays with four axes are images.
        self._pictures = {
            PARTS[component.role]
            for component in checkpoint.components.values()
            if any(len(entry.shape) == 4 for entry in component.plan.entries.values())
        }
        self._blocks: dict[tuple[str, str], BlockActivations] = {}
        self._closed: set[tuple[str, str]] = set()  # blocks whose sample is taken
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
        """Finish the first step: blocks that were observed so far keep their sample."""
        self._closed |= self._blocks.keys()
        self._key = ("", "")

    def found(self) -> list[BlockActivations]:
        """Return the blocks in the order in which they were entered."""
        return list(self._blocks.values())

    def _enter(self, part: str, name: str) -> None:
        key = self._key = (part, name)
        if key not in self._closed and key in self._blocks:  # its last entry counts for the order
            self._blocks[key] = self._blocks.pop(key)
        self._blocks.setdefault(key, BlockActivations(part=part, name=name))


def block_of(path: str) -> str:
    """Return the block of a path: its start up to a number, `transformer_blocks.3`, or else its first two names."""
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1] if numbered else parts[:2])
