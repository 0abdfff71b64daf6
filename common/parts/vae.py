"""The VAE on an engine, the same for every family: two halves, each loaded at its first use, if it fits; and the
statistics of its latents, which the sampler does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.found_once import found_once
from qwenimg.common.base.text import clean
from qwenimg.common.memory import bands, operations
from qwenimg.common.memory.memory import decode_peak
from qwenimg.common.networks.vaes.flux2_vae import PATCH, STATISTICS
from qwenimg.common.networks.vaes.paella_vae import DECODER as PAELLA
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import tiny_memory as tiny
from qwenimg.common.parts import tiny_vae
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.probe import first_non_finite
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import DECODE, Split, Stage
from qwenimg.common.weights.plan import LoadPlan

Float32: TypeAlias = NDArray[np.float32]

LARGE = 64  # latents a side; a preset may ask to decode larger images in bands


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """The shift and the scale that are removed from a VAE's latents for the sampler: numbers, or one for each channel
    [C 1 1]. x / scale and x * (1 / scale) differ in the last bit, so the operation with the scale is stored for each
    way."""

    shift: Float32 | np.float32
    scale: Float32 | np.float32
    to_sampler: np.ufunc  # takes latents without the shift, or a deviation
    to_vae: np.ufunc


def scaled(scale: float, shift: float) -> Statistics:
    """Return the statistics of latents that are multiplied by `scale`."""
    return Statistics(shift=np.float32(shift), scale=np.float32(scale), to_sampler=np.multiply, to_vae=np.divide)


def standardized(mean: Sequence[float], std: Sequence[float]) -> Statistics:
    """Return the statistics of latents that are divided by the standard deviation of their channel."""
    shift, scale = (np.asarray(values, np.float32)[:, None, None] for values in (mean, std))
    return Statistics(shift=shift, scale=scale, to_sampler=np.divide, to_vae=np.multiply)


class VAEHalves:
    """The encoder and the decoder of a VAE, each a component of its own."""

    def __init__(
        self,
        residents: Residents,
        component: Component,
        width: int,
        statistics: Statistics,
        *,
        patch: int = 1,
        samples: bool = True,
    ):
        """Set the parts. width: channels of the encoder's first level. patch: rows of the decoder's first image in one
        of the latents, which the network itself makes patches of. samples: whether an image becomes a sample of its
        latents; else it becomes their mean."""
        self.residents, self.runtime, self.engine = residents, residents.runtime, residents.runtime.engine
        self.component, self.config, self.width = component, component.config, width
        self.statistics, self.patch, self.samples = statistics, patch, samples
        self._parts = {half: replace(component, plan=plan) for half, plan in halves(component.plan).items()}

    @property
    def itemsize(self) -> int:
        return BYTES[self.runtime.precision.compute_dtype("vae")]

    @property
    def scale(self) -> int:
        """The pixels per latent along each side."""
        return int(self.config.scale) * self.patch

    @property
    def has_encoder(self) -> bool:
        """True unless it decodes alone."""
        return bool(self._parts["encoder"].plan.entries)

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the latents of a picture of height x width."""
        return height // self.scale, width // self.scale

    # Stages

    def encoding(self, shape: LatentShape) -> Stage:
        """Return the stage that encodes an image of latents of `shape`."""
        height, width = shape.rows * self.scale, shape.columns * self.scale
        whole, *banded = (self._encoding(height, width, rows) for rows in (None, *bands.ROWS))
        return Stage(
            name="encode",
            resident="vae encoder",
            component=self._parts["encoder"],
            splits=(Split(activations=whole), *_in_bands(banded)),
            title=f"encoding a picture of {width}x{height}",
            wanted=min(whole, banded[-1]),
        )

    def decoding(self, shape: LatentShape) -> Stage:
        """Return the stage that decodes latents of `shape`, frame by frame. All steps are done by then, so it is not
        refused for activations that no longer fit, but only if the decoder is not open and its weights do not fit."""
        height, width = shape.rows * self.scale, shape.columns * self.scale
        first = (shape.rows * self.patch, shape.columns * self.patch)  # the decoder's first image
        whole, *banded = (self._decoding(first, rows) for rows in (None, *bands.ROWS))
        fits_whole = (Split(activations=whole, required=self._required(first)),) if self._is_whole(first) else ()
        return Stage(
            name=DECODE,
            resident="vae decoder",
            component=self._parts["decoder"],
            splits=(*fits_whole, *_in_bands(banded)),
            title=f"decoding a picture of {width}x{height}",
            wanted=min(whole, banded[-1]),
            checked=False,
            operations=self._operations(*first),
        )

    def _encoding(self, height: int, width: int, rows: int | None) -> int:
        """Return the bytes of activations, in bands of `rows` unless that is None."""
        own_memory = self.engine.facts.own_memory
        return bands.encode_bytes(
            self.width,
            height,
            width,
            self.itemsize,
            self.engine.workspace,
            rows,
            own_memory,
            self.config.has_shortcuts,
        )

    def _decoding(self, shape: tuple[int, int], rows: int | None) -> int:
        """Return the bytes of activations while an image is decoded: in bands of `rows`, or at once if `rows` is
        None."""
        own_memory = self.engine.facts.own_memory
        return bands.decode_bytes(self.config, *shape, self.itemsize, self.engine.workspace, rows, own_memory)

    def _required(self, shape: tuple[int, int]) -> int:
        """Return the bytes for which latents of `shape` are decoded as a whole."""
        return 2 * decode_peak(self.config, *shape, self.itemsize, self.engine.workspace)

    def _operations(self, rows: int, columns: int) -> float:
        """Return the operations of decoding an image of rows x columns latents of the network."""
        return operations.decoder(self.component.plan, rows, columns)

    def _is_whole(self, shape: tuple[int, int]) -> bool:
        """Return whether latents of `shape` may be decoded as a whole."""
        tiled = self.runtime.choice.wishes.tiled and max(shape) > LARGE
        return not tiled and bands.is_small(self.config, *shape)

    # The run

    def encode(self, pixels: Float32) -> tuple[Float32, Float32]:
        """Encode pixels [1, C, H, W] in -1..1. Return mean and deviation of the latents [1, z, h, w], in the sampler's
        scale. Raises DoesNotFit and NumericsError."""
        height, width = (side // self.scale for side in pixels.shape[2:])
        encoder, split = self.residents.acquire(self.encoding(LatentShape(1, height, width)))
        if split.about:
            self.runtime.notify("stage", f"encoding the picture {split.about}")
        with self.runtime.clock.timed("encode image"):
            moments = encoder.encode(pixels, split.size)
        self._check_finite(moments, "vae encoder", lambda: encoder.encode(pixels, split.size))
        mean, deviation = self._mean_and_deviation(moments)
        return self.normalized(mean), self.statistics.to_sampler(deviation, self.statistics.scale)

    def check_encodes(self) -> None:
        """Raise UsageError if the VAE has no encoder, so that it makes no latents of a picture."""

    def _mean_and_deviation(self, encoded: Float32) -> tuple[Float32, Float32]:
        mean, log_variance = np.split(encoded, 2, axis=1)
        return mean, np.exp(0.5 * np.clip(log_variance, -30, 20))

    def normalized(self, latents: Float32) -> Float32:
        """Return the VAE's latents in the sampler's scale."""
        normalized: Float32 = self.statistics.to_sampler(latents - self.statistics.shift, self.statistics.scale)
        return normalized

    def plain(self, latents: Float32) -> Float32:
        """Return latents in the sampler's scale as the VAE's."""
        plain: Float32 = self.statistics.to_vae(latents, self.statistics.scale) + self.statistics.shift
        return plain

    def latents(self, pixels: Float32, normal: Callable[[tuple[int, ...]], Float32] | None) -> Float32:
        """Return the latents [1, z, h, w] of pixels [1, 3, H, W]: their mean, or a sample by the noise of `normal`."""
        mean, deviation = self.encode(pixels)
        return mean if normal is None else mean + deviation * normal(mean.shape)

    def decode(self, latents: Float32) -> NDArray[Any]:
        """Decode latents in the sampler's scale to pixels [1, C, H, W], about -1 to 1, all finite; in bands if the
        whole does not fit. Raises DoesNotFit and NumericsError."""
        z = self.plain(latents)
        self.engine.release()
        decoder, split = self.residents.acquire(self.decoding(LatentShape(1, z.shape[2], z.shape[3])))
        self.runtime.notify("stage", f"decoding {split.about}".rstrip())
        with self.runtime.clock.timed("decode"):
            pixels: NDArray[Any] = decoder.decode(z, split.size)
        self._check_finite(pixels, "vae", lambda: decoder.decode(z, split.size))
        return pixels

    def check_weights(self) -> None:
        """Check the decoder's weights once before it is loaded. Raises ModelError."""
        self.residents.check_weights("vae decoder", self._parts["decoder"])

    def _check_finite(self, values: NDArray[Any], title: str, again: Callable[[], NDArray[Any]]) -> None:
        """Raise Overflow for `values`, the result of `again`, that are not finite."""
        if not np.isfinite(values).all():
            place = first_non_finite(self.engine, lambda: self.engine.array(again()))
            raise self.runtime.overflow(title, "vae", place)


class TinyHalves(VAEHalves):
    """The halves of a tiny VAE: latents are the sampler's, and made without noise. Its encoder may be missing."""

    def __init__(self, residents: Residents, component: Component):
        config = component.config
        statistics = scaled(config.scaling_factor, config.shift_factor)
        super().__init__(residents, component, 0, statistics, patch=config.patch, samples=False)

    def check_encodes(self) -> None:
        if not self.has_encoder:
            name = clean(self.component.plan.files[0].path.name, 60)
            raise UsageError(
                f"--vae {name} has a decoder alone, and a picture needs the encoder: put its encoder's file beside it, "
                "or leave --vae out"
            )

    def encode(self, pixels: Float32) -> tuple[Float32, Float32]:
        self.check_encodes()
        return super().encode(pixels)

    def _mean_and_deviation(self, encoded: Float32) -> tuple[Float32, Float32]:
        return encoded, np.zeros_like(encoded)

    def _encoding(self, height: int, width: int, rows: int | None) -> int:
        sides, own_memory = (height, width), self.engine.facts.own_memory
        return tiny.encode_bytes(self.config, *sides, self.itemsize, self.engine.workspace, rows, own_memory)

    def _decoding(self, shape: tuple[int, int], rows: int | None) -> int:
        own_memory = self.engine.facts.own_memory
        return tiny.decode_bytes(self.config, *shape, self.itemsize, self.engine.workspace, rows, own_memory)

    def _required(self, shape: tuple[int, int]) -> int:
        return self._decoding(shape, None)

    def _operations(self, rows: int, columns: int) -> float:
        return tiny.operations(self.component.plan.shapes, self.config, rows, columns)

    def _is_whole(self, shape: tuple[int, int]) -> bool:
        tiled = self.runtime.choice.wishes.tiled and max(shape) > LARGE
        return not tiled and tiny.is_small(self.config, *shape)


def scaled_halves(residents: Residents, component: Component, *, samples: bool = True) -> VAEHalves:
    """Return the halves of Stable Diffusion's VAE, or Flux's, whose latents have one scale and one shift. samples: as
    for `VAEHalves`."""
    config = component.config
    if tiny_vae.is_tiny(component):
        return TinyHalves(residents, component)
    statistics = scaled(config.scaling_factor, config.shift_factor or 0.0)
    return VAEHalves(residents, component, config.block_out_channels[0], statistics, samples=samples)


def standardized_halves(residents: Residents, component: Component, *, samples: bool = True) -> VAEHalves:
    """Return the halves of a VAE of Qwen-Image, whose latents have a mean and a standard deviation for each channel.
    samples: as for `VAEHalves`."""
    config = component.config
    if tiny_vae.is_tiny(component):
        return TinyHalves(residents, component)
    statistics = standardized(config.latents_mean, config.latents_std)
    return VAEHalves(residents, component, config.base_dim, statistics, samples=samples)


def patched_halves(residents: Residents, component: Component) -> VAEHalves:
    """Return the halves of FLUX.2's VAE, whose network has the statistics of its latents, which are patches."""
    if tiny_vae.is_tiny(component):
        return TinyHalves(residents, component)
    width, statistics = component.config.block_out_channels[0], scaled(1.0, 0.0)
    return VAEHalves(residents, component, width, statistics, patch=PATCH, samples=False)


def _in_bands(activations: Iterable[int]) -> Iterator[Split]:
    """Yield a split for each number of rows in a band."""
    for rows, size in zip(bands.ROWS, activations, strict=True):
        yield Split(activations=size, size=rows, about=f"in bands of {rows} rows")


@found_once
def halves(plan: LoadPlan) -> dict[str, LoadPlan]:
    """Return the plans of the decoder and of the encoder."""
    return {
        "decoder": plan.only(lambda name: decodes(name) or name.startswith(STATISTICS)),
        "encoder": plan.only(lambda name: not decodes(name)),
    }


def decodes(name: str) -> bool:
    """Return whether decoding needs the parameter `name` of a VAE, and encoding does not."""
    return name.startswith(("decoder.", "post_quant_conv.", *PAELLA))
