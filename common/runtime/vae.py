"""The VAE on an engine, the same for every family: two halves, each loaded when it is first used and known to fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.found_once import found_once
from qwenimg.common.memory import bands, operations
from qwenimg.common.memory.needs import Needs
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import VAE
from qwenimg.common.runtime.probe import first_non_finite
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.weights.plan import LoadPlan

LARGE = 64  # latents a side, of more than which a picture is decoded in bands where the preset asks for that


class VAEHalves:
    """`width`: channels of the encoder's first level; `make_room` frees what it can where so many bytes are not free,
    but for the component of that name, and returns those that then are."""

    def __init__(self, runtime: Runtime, component: Component, width: int, make_room: Callable[[int, str], int]):
        self.runtime, self.engine, self.make_room = runtime, runtime.engine, make_room
        self.component, self.config, self.width = component, component.config, width
        self._halves: dict[str, VAE] = {}
        self._parts = {half: replace(component, plan=plan) for half, plan in halves(component.plan).items()}
        self._checked = False  # the decoder's weights

    @property
    def itemsize(self) -> int:
        return BYTES[self.runtime.precision.compute_dtype("vae")]

    def encoder(self, activations: int = 0) -> VAE:
        """Once there is room for it, where that can be made, and for so many bytes beside it."""
        return self._half("encoder", activations)

    def decoder(self, activations: int = 0) -> VAE:
        return self._half("decoder", activations)

    def free(self, kept: str = "") -> None:
        """What is loaded, but for the component named `kept`."""
        there = len(self._halves)
        self._halves = {half: vae for half, vae in self._halves.items() if _named(half) == kept}
        if len(self._halves) < there:
            self.engine.release()

    @property
    def names(self) -> list[str]:
        """Of its halves, as components of a run."""
        return [_named(half) for half in self._parts]

    @property
    def loaded(self) -> dict[str, int]:
        """Bytes of the halves that are in memory, by name."""
        return {_named(half): self.runtime.weight_bytes(self._parts[half]) for half in self._halves}

    def _half(self, half: str, activations: int) -> VAE:
        if half not in self._halves:
            component = self._parts[half]
            self.make_room(self.runtime.weight_bytes(component) + activations, _named(half))
            self._halves[half] = self.runtime.open(component, _named(half))
        else:
            self.make_room(activations, _named(half))
        return self._halves[half]

    # Beforehand

    def add_encoding(self, needs: Needs, shape: tuple[int, int]) -> None:
        """Adds the stage in which a picture of latents of `shape` is encoded."""
        height, width = (side * self.config.scale for side in shape)
        weights = {"vae encoder": self.runtime.weight_bytes(self._parts["encoder"])}
        needs.make_room(weights, self._least_encoding(height, width))
        rows = self._encode_rows(height, width, needs.left(weights))
        activations, title = self._encoding(height, width, rows), f"encoding a picture of {width}x{height}"
        needs.add("encode", title, weights, activations, stays=True, about=_about(rows))

    def add_decoding(self, needs: Needs, shape: tuple[int, int]) -> None:
        """Adds the stage in which latents of `shape` are decoded: whole, or in bands where that does not fit."""
        height, width = (side * self.config.scale for side in shape)
        weights = {"vae decoder": self.runtime.weight_bytes(self._parts["decoder"])}
        needs.make_room(weights, self._least(shape))
        rows = self._decode_rows(shape, needs.left(weights))
        activations, title = self._decoding(shape, rows), f"decoding a picture of {width}x{height}"
        needs.add("decode", title, weights, activations, about=_about(rows))
        needs.decoding = operations.decoder(self.component.plan, *shape)

    def _decoding(self, shape: tuple[int, int], rows: int | None) -> int:
        """Return the bytes of activations."""
        own_memory = self.engine.facts.own_memory
        return bands.decode_bytes(self.config, *shape, self.itemsize, self.engine.workspace, rows, own_memory)

    def _least(self, shape: tuple[int, int]) -> int:
        """Return the fewest bytes of activations, whole or in the smallest bands."""
        return min(self._decoding(shape, rows) for rows in (None, bands.ROWS[-1]))

    def _decode_rows(self, shape: tuple[int, int], free: int) -> int | None:
        """Return the rows of a band with so many bytes free, None for the whole."""
        whole = bands.decode_whole(self.config, *shape, self.itemsize, free, self.engine.workspace)
        if whole and not (self.runtime.choice.wishes.tiled and max(shape) > LARGE):
            return None
        return bands.band_rows(lambda rows: self._decoding(shape, rows), free)

    def _encoding(self, height: int, width: int, rows: int | None) -> int:
        """Return the bytes of activations."""
        own_memory = self.engine.facts.own_memory
        return bands.encode_bytes(self.width, height, width, self.itemsize, self.engine.workspace, rows, own_memory)

    def _least_encoding(self, height: int, width: int) -> int:
        """Return the fewest bytes of activations, whole or in the smallest bands."""
        return min(self._encoding(height, width, rows) for rows in (None, bands.ROWS[-1]))

    def _encode_rows(self, height: int, width: int, free: int) -> int | None:
        """Return the rows of a band with so many bytes free, None for the whole."""
        if self._encoding(height, width, None) <= free:
            return None
        return bands.band_rows(lambda rows: self._encoding(height, width, rows), free)

    # The run

    def encode(self, pixels: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Mean and deviation [1, z, h, w] in the VAE's own statistics of pixels [1, 3, H, W]. Raises DoesNotFit and
        NumericsError."""
        height, width = pixels.shape[2:]
        encoder = self.encoder(self._least_encoding(height, width))
        rows = self._encode_rows(height, width, self.make_room(0, _named("encoder")))
        self.runtime.check_fit(f"encoding a picture of {width}x{height}", self._encoding(height, width, rows))
        if rows is not None:
            self.runtime.notify("stage", f"encoding the picture {_about(rows)}")
        with self.runtime.clock.timed("encode image"):
            moments = encoder.encode(pixels, rows)
        self._check_finite(moments, "vae encoder", lambda: encoder.encode(pixels, rows))
        mean, log_variance = np.split(moments, 2, axis=1)
        return mean, np.exp(0.5 * np.clip(log_variance, -30, 20))

    def decode(self, z: NDArray[np.float32]) -> NDArray[Any]:
        """Pixels [1, 3, H, W], about -1 to 1, all finite, of latents in the VAE's own statistics; in bands where the
        whole does not fit. Raises DoesNotFit and NumericsError."""
        shape = (z.shape[2], z.shape[3])
        decoder = self.decoder(self._least(shape))
        self.engine.release()
        rows = self._decode_rows(shape, self.make_room(0, _named("decoder")))
        self.runtime.notify("stage", f"decoding {_about(rows)}".rstrip())
        with self.runtime.clock.timed("decode"):
            pixels = decoder.decode(z, rows)
        self._check_finite(pixels, "vae", lambda: decoder.decode(z, rows))
        return pixels

    def check_weights(self) -> None:
        """Of what decodes, once, before it is loaded. Raises ModelError."""
        if "decoder" not in self._halves and not self._checked:
            self.runtime.check_weights(self._parts["decoder"], "vae decoder")
        self._checked = True

    def _check_finite(self, made: NDArray[Any], title: str, again: Callable[[], NDArray[Any]]) -> None:
        """Raises Overflow."""
        if not np.isfinite(made).all():
            found = first_non_finite(self.engine, lambda: self.engine.array(again()))
            raise self.runtime.overflow(title, "vae", found)


def _named(half: str) -> str:
    return f"vae {half}"


def _about(rows: int | None) -> str:
    """Return how an image is made to fit, as a stage says it."""
    return "" if rows is None else f"in bands of {rows} rows"


@found_once
def halves(plan: LoadPlan) -> dict[str, LoadPlan]:
    return {"decoder": plan.only(decodes), "encoder": plan.only(lambda name: not decodes(name))}


def decodes(name: str) -> bool:
    """Whether decoding needs the parameter `name` of a VAE, and encoding does not."""
    return name.startswith(("decoder.", "post_quant_conv."))
