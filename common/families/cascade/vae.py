"""Stable Cascade's VAE on an engine: its decoder alone."""

from __future__ import annotations

from qwenimg.common.families.cascade import memory
from qwenimg.common.memory.memory import MAX_VALUES
from qwenimg.common.networks.vaes.paella_vae import WIDER
from qwenimg.common.parts.vae import LARGE, VAEHalves, standardized
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.residents import Residents


class PaellaHalves(VAEHalves):
    """The decoder, for latents that are multiplied by the scale of the VAE."""

    def __init__(self, residents: Residents, component: Component):
        statistics = standardized([0.0], [component.config.scale_factor])
        super().__init__(residents, component, 0, statistics, samples=False)

    def _decoding(self, shape: tuple[int, int], rows: int | None) -> int:
        return memory.decode_bytes(self.config, *shape, self.itemsize, rows)

    def _required(self, shape: tuple[int, int]) -> int:
        return self._decoding(shape, None)

    def _operations(self, rows: int, columns: int) -> float:
        return memory.decode_operations(self.component.plan.shapes, self.config, rows, columns)

    def _is_whole(self, shape: tuple[int, int]) -> bool:
        tiled = self.runtime.choice.wishes.tiled and max(shape) > LARGE
        widest = max(4**i * width for i, width in enumerate(reversed(self.config.widths)))
        return not tiled and shape[0] * shape[1] * WIDER * widest < MAX_VALUES
