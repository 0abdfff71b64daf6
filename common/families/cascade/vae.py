"""Stable Cascade's VAE on an engine, which decodes alone, and the encoder of pictures in the place of its encoder."""

from __future__ import annotations

import numpy as np

from qwenimg.common.families.cascade import memory, sizes
from qwenimg.common.memory.memory import MAX_VALUES
from qwenimg.common.networks.vaes import effnet
from qwenimg.common.networks.vaes.paella_vae import WIDER
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.vae import LARGE, Float32, VAEHalves, standardized
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Split, Stage


class PaellaHalves(VAEHalves):
    """The decoder, for latents that are multiplied by the scale of the VAE, and the encoder of a picture's embedding,
    which no decoder reads."""

    def __init__(self, residents: Residents, component: Component, encoder: Component | None):
        """encoder: None for a model that draws from text alone."""
        statistics = standardized([0.0], [component.config.scale_factor])
        super().__init__(residents, component, 0, statistics, samples=False)
        if encoder is not None:
            self._parts["encoder"] = encoder

    def sides(self, height: int, width: int) -> tuple[int, int]:
        return sizes.embedding_side(height), sizes.embedding_side(width)

    def encoding(self, shape: LatentShape) -> Stage:
        """Return the stage that encodes an embedding of `shape`, of a whole picture: its channels are weighed by their
        means."""
        encoder, sides = self._parts["encoder"], (effnet.SCALE * shape.rows, effnet.SCALE * shape.columns)
        peak = memory.encode_bytes(encoder.config, *sides, self.itemsize, self.engine.workspace)
        return Stage(
            name="encode",
            resident="vae encoder",
            component=encoder,
            splits=(Split(activations=self.runtime.call_bytes(encoder, peak)),),
            title=f"encoding a picture of {sides[1]}x{sides[0]}",
            wanted=peak,
        )

    def encode(self, pixels: Float32) -> tuple[Float32, Float32]:
        """Return the embedding of pixels [1, 3, H, W] in -1..1, and no deviation."""
        values = sizes.seen(pixels)
        rows, columns = (side // effnet.SCALE for side in values.shape[2:])
        encoder, _ = self.residents.acquire(self.encoding(LatentShape(1, rows, columns)))
        with self.runtime.clock.timed("encode image"):
            embedding = encoder.encode(values)
        self._check_finite(embedding, "vae encoder", lambda: encoder.encode(values))
        return embedding, np.zeros_like(embedding)

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
