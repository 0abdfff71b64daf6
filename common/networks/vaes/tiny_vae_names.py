"""Tiny VAEs in files: their authors' names, ComfyUI's and diffusers', of both halves or of one; and the models whose
latents they take.

Unusual about its authors' names: a half is most often alone in a file, its tensors begin with the number of their
layer, and the decoder's begin with 1, since the bending of values is its layer 0.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from qwenimg.common.base.shape import Shape
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import tiny_vae, tiny_video_vae
from qwenimg.common.networks.vaes.tiny_vae import TinyVAEConfig
from qwenimg.common.networks.vaes.tiny_video_vae import TinyVideoVAEConfig

HALVES = ("encoder", "decoder")
IGNORED = frozenset({"vae_scale", "vae_shift"})
"""Tensors that ComfyUI saves beside the halves: the other VAE's factor and shift, which the sampler's scale has not."""
_LAYER = re.compile(r"(?P<place>\d{1,3})\.(?P<rest>.+)")


@dataclass(frozen=True, kw_only=True)
class TinyLayout:
    """One program's names: the start of each half's names, and the number of the decoder's first layer with weights."""

    names: str
    starts: Mapping[str, str]
    first: int

    def stored(self, name: str) -> str:
        """Return the name in a file of a parameter of the manifest."""
        half, _, layer, rest = name.split(".", 3)
        place = int(layer) + (self.first if half == "decoder" else 0)
        return f"{self.starts[half]}{place}.{rest}"

    def halves(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the halves that a file with these `names` has."""
        return tuple(half for half in HALVES if half in self.starts and all(s in names for s in self._signs(half)))

    def _signs(self, half: str) -> tuple[str, str]:
        first = self.first if half == "decoder" else 0
        start, block = self.starts[half], first + 2 if half == "decoder" else 1
        return f"{start}{first}.weight", f"{start}{block}.conv.0.weight"


LAYOUTS = (
    TinyLayout(names="diffusers' names", starts={"encoder": "encoder.layers.", "decoder": "decoder.layers."}, first=0),
    TinyLayout(names="its authors' names", starts={"encoder": "encoder.", "decoder": "decoder."}, first=1),
    TinyLayout(names="ComfyUI's names", starts={"encoder": "taesd_encoder.", "decoder": "taesd_decoder."}, first=1),
    TinyLayout(names="its authors' names, the decoder alone", starts={"decoder": ""}, first=1),
    TinyLayout(names="its authors' names, the encoder alone", starts={"encoder": ""}, first=1),
)
_VIDEO_SIGN = re.compile(r"(?:en|de)coder\.\d{1,3}\.conv\.weight")  # between levels, where frames become fewer or more


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The latents that a published tiny VAE takes."""

    name: str  # that its files have
    network: Network
    channels: int  # of the latents, without patches
    pooled: bool = False
    models: str  # for messages


MODELS = (
    TinyModel(name="taesdxl", network=tiny_vae.NETWORK, channels=4, models="SDXL"),
    TinyModel(name="taesd3", network=tiny_vae.NETWORK, channels=16, models="Stable Diffusion 3"),
    TinyModel(name="taesd", network=tiny_vae.NETWORK, channels=4, models="Stable Diffusion 1 and 2"),
    TinyModel(name="taef1", network=tiny_vae.NETWORK, channels=16, models="FLUX.1 and Z-Image"),
    TinyModel(name="taef2", network=tiny_vae.NETWORK, channels=32, pooled=True, models="FLUX.2"),
    TinyModel(name="taew2_1", network=tiny_video_vae.NETWORK, channels=16, models="Qwen-Image and Wan 2.1"),
)
"""A name that begins another comes after it."""
OTHERS = {
    "taesana": "Sana",
    "taehv": "Hunyuan Video",
    "taecvx": "CogVideoX",
    "taew2_2": "Wan 2.2 5B",
    "taeltx": "LTX-2",
    "taeos1": "Open-Sora",
    "taeh3": "MiniMax H3",
    "taesdv": "Stable Video Diffusion",
}
"""Tiny VAEs of models that are not here, by the start of their files' names."""


def find_layout(names: Collection[str]) -> TinyLayout | None:
    """Return the layout of a file with these `names`; None for one without a tiny VAE of pictures."""
    if is_video(names):
        return None
    return next((layout for layout in LAYOUTS if layout.halves(names)), None)


def is_video(names: Collection[str]) -> bool:
    """Return whether a file with these `names` has the tiny VAE of a video model."""
    return "decoder.1.weight" in names and any(map(_VIDEO_SIGN.fullmatch, names))


def config_of(layout: TinyLayout, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the fields of `TinyVAEConfig` that stored shapes show. A half that is not there is as its other."""
    found: dict[str, Any] = {}
    for half in layout.halves(shapes):
        layers = list(_layers(layout.starts[half], shapes))
        convs = [place for place, shape in layers if shape is not None]
        blocks = [place for place, shape in layers if shape is None]
        first, last = (next(s for p, s in layers if p == place and s is not None) for place in (convs[0], convs[-1]))
        counts = [sum(a < place < b for place in blocks) for a, b in pairwise(convs)]
        outside, inside = (first[1], last[0]) if half == "encoder" else (last[0], first[1])
        found |= {f"num_{half}_blocks": counts, f"{half}_block_out_channels": [first[0]] * len(counts)}
        found |= {"in_channels": outside, "out_channels": outside, "latent_channels": inside}
    for half, other in (HALVES, HALVES[::-1]):
        if f"num_{half}_blocks" not in found:
            found[f"num_{half}_blocks"] = found[f"num_{other}_blocks"][::-1]
            found[f"{half}_block_out_channels"] = found[f"{other}_block_out_channels"]
    return found | {"pooled": any(".pool." in name for name in shapes)}


def _layers(start: str, shapes: Mapping[str, Shape]) -> Iterator[tuple[int, Shape | None]]:
    """Yield the place of each convolution of a half with its shape, and of each block with None, in their order."""
    places: dict[int, Shape | None] = {}
    for name, shape in shapes.items():
        match = _LAYER.fullmatch(name.removeprefix(start)) if name.startswith(start) else None
        if match is None:
            continue
        if match["rest"] == "weight" and len(shape) == 4:
            places[int(match["place"])] = shape
        elif match["rest"] == "conv.0.weight":
            places.setdefault(int(match["place"]), None)
    yield from sorted(places.items())


def video_config_of(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the fields of `TinyVideoVAEConfig` that stored shapes show."""
    frames: dict[str, list[int]] = {half: [] for half in HALVES}
    widths: list[int] = []
    for place in range(1000):
        for half, axis in (("encoder", 1), ("decoder", 0)):
            shape = shapes.get(f"{half}.{place}.conv.weight")
            if shape is not None and len(shape) == 4:
                frames[half].append(shape[axis] // max(1, shape[1 - axis]))
                if half == "decoder":
                    widths.append(shape[1])
    first = shapes.get("encoder.0.weight", ())
    start = shapes.get("decoder.1.weight", ())
    end = [shapes[name][1] for name in _decoder_ends(shapes)]
    usual = TinyVideoVAEConfig()
    return {
        "in_channels": first[1] if len(first) == 4 else usual.in_channels,
        "latent_channels": start[1] if len(start) == 4 else usual.latent_channels,
        "width": first[0] if len(first) == 4 else usual.width,
        "widths": [*widths, *end[-1:]],
        "pools": frames["encoder"] or list(usual.pools),
        "grows": frames["decoder"],
    }


def _decoder_ends(shapes: Mapping[str, Shape]) -> list[str]:
    """Return the names of the decoder's convolutions outside of blocks, in their order."""
    found = {
        int(match["place"]): name
        for name, shape in shapes.items()
        if len(shape) == 4
        and name.startswith("decoder.")
        and (match := _LAYER.fullmatch(name.removeprefix("decoder.")))
        and match["rest"] == "weight"
    }
    return [found[place] for place in sorted(found)]


def model_named(text: str) -> TinyModel | None:
    """Return the published tiny VAE that a file's or a folder's name is of, or None."""
    lower = text.lower()
    return next((model for model in MODELS if model.name in lower), None)


def other_named(text: str) -> str | None:
    """Return the model that is not here whose tiny VAE a file's name is of, or None."""
    lower = text.lower()
    if "taew2_1" in lower:
        return None
    return next((title for start, title in OTHERS.items() if start in lower), None)


def fitting(network: str, channels: int, *, pooled: bool) -> tuple[TinyModel, ...]:
    """Return the published tiny VAEs with such a network."""
    return tuple(one for one in MODELS if (one.network.name, one.channels, one.pooled) == (network, channels, pooled))


def models_of(config: TinyVAEConfig | TinyVideoVAEConfig) -> tuple[TinyModel, ...]:
    """Return the published tiny VAEs with the network of this configuration."""
    if isinstance(config, TinyVideoVAEConfig):
        return fitting(tiny_video_vae.NETWORK.name, config.latent_channels, pooled=False)
    return fitting(tiny_vae.NETWORK.name, config.latent_channels, pooled=config.pooled)
