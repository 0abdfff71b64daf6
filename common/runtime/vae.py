"""The VAE on an engine, the same for every family: two halves, each loaded when it is first used and known to fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.runtime import memory
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import VAE
from qwenimg.common.runtime.probe import first_non_finite
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.weights.storage import BYTES

TILE = 64  # latents a side of a tile where the preset asks for tiles, at most


class VAEHalves:
    """`width`: channels of the encoder's first level; `make_room` frees what it can where too few are free."""

    def __init__(self, runtime: Runtime, component: Component, width: int, make_room: Callable[[int], None]):
        self.runtime, self.engine, self.make_room = runtime, runtime.engine, make_room
        self.component, self.config, self.width = component, component.config, width
        self.itemsize = BYTES[runtime.precision.compute_dtype("vae")]
        self._halves: dict[str, VAE] = {}
        self._checked = False  # the decoder's weights

    def encoder(self) -> VAE:
        return self._half("encoder", lambda name: not decodes(name))

    def decoder(self) -> VAE:
        return self._half("decoder", decodes)

    def free(self) -> None:
        self._halves.clear()

    def _half(self, half: str, wanted: Callable[[str], bool]) -> VAE:
        if half not in self._halves:
            component = self._part(wanted)
            self.make_room(self.runtime.weight_bytes(component))
            self._halves[half] = self.runtime.open(component, f"vae {half}")
        return self._halves[half]

    def decoding(self, shape: tuple[int, int], beside: int) -> dict[str, int]:
        """The fewest bytes for decoding latents of `shape`, `beside` what the model keeps, by what takes them."""
        buffers, scores = self.engine.decode_buffers, self.engine.score_bytes
        least = memory.decode_least(self.config, *shape, self.itemsize, buffers, scores)
        height, width = (side * self.config.scale for side in shape)
        weights = self.runtime.weight_bytes(self.component)
        return {f"decoding a picture of {width}x{height}": beside + weights + least}

    def check_encoding(self, height: int, across: int) -> None:
        """Raises DoesNotFit where the encoder's first level does not fit for so many pixels."""
        need = int(self.engine.decode_buffers * self.width * height * across * self.itemsize)
        self.runtime.check_fit(f"encoding a picture of {across}x{height}", need)

    def encode(self, pixels: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Mean and deviation [1, z, h, w] in the VAE's own statistics of pixels [1, 3, H, W]. Raises DoesNotFit and
        NumericsError."""
        encoder = self.encoder()
        self.check_encoding(pixels.shape[2], pixels.shape[3])
        with self.runtime.clock.timed("encode image"):
            moments = encoder.encode(pixels)
        self._check_finite(moments, "vae encoder", lambda: encoder.encode(pixels))
        mean, log_variance = np.split(moments, 2, axis=1)
        return mean, np.exp(0.5 * np.clip(log_variance, -30, 20))

    def decode(self, z: NDArray[np.float32]) -> NDArray[Any]:
        """Pixels [1, 3, H, W], about -1 to 1, all finite, of latents in the VAE's own statistics; in tiles where the
        whole does not fit. Raises DoesNotFit and NumericsError."""
        decoder, engine = self.decoder(), self.engine
        engine.release()
        height, width = z.shape[2:]
        free, buffers = engine.free_memory(), engine.decode_buffers
        tile = memory.decode_tile(self.config, height, width, self.itemsize, free, buffers)
        if self.runtime.choice.tiled and max(height, width) > TILE:
            tile = min(tile or TILE, TILE)
        tiled = "" if tile is None else f" in tiles of {tile * self.config.scale} pixels"
        self.runtime.notify("stage", f"decoding{tiled}")
        with self.runtime.clock.timed("decode"):
            pixels = decoder.decode(z, tile)
        self._check_finite(pixels, "vae", lambda: decoder.decode(z, tile))
        return pixels

    def check_weights(self) -> None:
        """Of what decodes, once, before it is loaded. Raises ModelError."""
        if "decoder" not in self._halves and not self._checked:
            self.runtime.check_weights(self._part(decodes), "vae decoder")
        self._checked = True

    def _part(self, wanted: Callable[[str], bool]) -> Component:
        return replace(self.component, plan=self.component.plan.only(wanted))

    def _check_finite(self, made: NDArray[Any], title: str, again: Callable[[], NDArray[Any]]) -> None:
        """Raises Overflow."""
        if not np.isfinite(made).all():
            found = first_non_finite(self.engine, lambda: self.engine.array(again()))
            raise self.runtime.overflow(title, "vae", found)


def decodes(name: str) -> bool:
    """Whether decoding needs the parameter `name` of a VAE, and encoding does not."""
    return name.startswith(("decoder.", "post_quant_conv."))
