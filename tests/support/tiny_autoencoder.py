"""Tiny VAEs with random weights, in the layouts of their authors, ComfyUI and diffusers; and what they compute, written
a second time: in float64, from the published code of TAESD and TAEHV, with numpy alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from qwenimg.common.networks.vaes import tiny_vae, tiny_video_vae
from qwenimg.common.networks.vaes.tiny_vae import TinyVAEConfig
from qwenimg.common.networks.vaes.tiny_video_vae import TinyVideoVAEConfig

Weights = dict[str, np.ndarray]


def config(channels: int, levels: int = 4, width: int = 8, *, pooled: bool = False, patch: int = 1) -> TinyVAEConfig:
    """A small one: levels that differ in their blocks."""
    return TinyVAEConfig(
        latent_channels=channels,
        encoder_block_out_channels=(width,) * levels,
        decoder_block_out_channels=(width,) * levels,
        num_encoder_blocks=(1, 2, 1, 2)[:levels],
        num_decoder_blocks=(2, 1, 2, 1)[:levels],
        pooled=pooled,
        patch=patch,
    )


def video_config(channels: int, levels: int = 3) -> TinyVideoVAEConfig:
    pools, grows = {3: ((2, 2, 1), (1, 2, 2)), 2: ((2, 1), (1, 2))}[levels]
    return TinyVideoVAEConfig(
        latent_channels=channels, width=6, widths=(12, 10, 8, 6)[: levels + 1], pools=pools, grows=grows
    )


def weights(made: TinyVAEConfig | TinyVideoVAEConfig, seed: int = 0) -> Weights:
    """Random weights in the manifest's names, large enough that no layer is lost."""
    network = tiny_vae.NETWORK if isinstance(made, TinyVAEConfig) else tiny_video_vae.NETWORK
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * (prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.2)).astype(np.float32)
        + np.float32(name.endswith("pool.1.weight"))
        for name, shape in network.manifest(made).items()
    }


def authors(named: Weights, half: str) -> Weights:
    """One half in a file of its authors."""
    start, first = f"{half}.layers.", int(half == "decoder")
    found = (
        (name.removeprefix(start).partition("."), value) for name, value in named.items() if name.startswith(start)
    )
    return {f"{int(place) + first}.{rest}": value for (place, _, rest), value in found}


def write_authors(folder: Path, name: str, named: Weights, halves: tuple[str, ...] = ("encoder", "decoder")) -> Path:
    """Write a file for each half, and return the last one's."""
    folder.mkdir(parents=True, exist_ok=True)
    for half in halves:
        save_file(authors(named, half), folder / f"{name}_{half}.safetensors")
    return folder / f"{name}_{halves[-1]}.safetensors"


def write_whole(path: Path, named: Weights, starts: Mapping[str, str], **more: np.ndarray) -> Path:
    """Write both halves in one file, each behind its start."""
    tensors = {f"{starts[half]}{name}": value for half in starts for name, value in authors(named, half).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors | more, path)
    return path


def latents_of(model: Path) -> tuple[int, int]:
    """The channels of the latents of the model in that folder, and the levels of its own VAE."""
    own = json.loads((model / "vae" / "config.json").read_text())
    return own.get("latent_channels") or own["z_dim"], len(own.get("block_out_channels") or own["dim_mult"])


def write_for(
    folder: Path, name: str, model: Path, halves: tuple[str, ...] = ("encoder", "decoder")
) -> tuple[Path, Any, Weights]:
    """Write a tiny VAE of the latents of the model in the folder `model`, and return its path, its configuration and
    its weights."""
    channels, levels = latents_of(model)
    if name == "taew2_1":
        video = video_config(channels, levels - 1)
        return write_video(folder, name, named := weights(video)), video, named
    made = config(channels, levels, pooled=name == "taef2", patch=2 if name == "taef2" else 1)
    return write_authors(folder, name, named := weights(made), halves), made, named


def write_video(folder: Path, name: str, named: Weights) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def diffusers_model(made: TinyVAEConfig, named: Weights) -> Any:
    import torch
    from diffusers import AutoencoderTiny

    names = ("latent_channels", "encoder_block_out_channels", "decoder_block_out_channels", "num_encoder_blocks",
             "num_decoder_blocks")  # fmt: skip
    model = AutoencoderTiny(**{name: getattr(made, name) for name in names})
    model.load_state_dict({name: torch.from_numpy(value) for name, value in named.items()})
    return model.eval()


# Float64


def conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, stride: int = 1) -> np.ndarray:
    """[F I h w] with [O I k k], padded by half the kernel."""
    size = weight.shape[2]
    padded = np.pad(x, ((0, 0), (0, 0), (size // 2,) * 2, (size // 2,) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(2, 3))[:, :, ::stride, ::stride]
    y = np.einsum("fihwkl,oikl->fohw", windows, weight.astype(np.float64), optimize=True)
    return y if bias is None else y + bias[:, None, None]


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def doubled(x: np.ndarray) -> np.ndarray:
    return x.repeat(2, axis=2).repeat(2, axis=3)


class Layers:
    """The tensors of one half by their places, as its authors' list has them, the decoder's from 1 on."""

    def __init__(self, tensors: Weights) -> None:
        self.tensors = {name: value.astype(np.float64) for name, value in tensors.items()}

    def conv(self, x: np.ndarray, name: str, stride: int = 1) -> np.ndarray:
        return conv(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"), stride)

    def block(self, x: np.ndarray, place: int, past: np.ndarray | None = None) -> np.ndarray:
        if f"{place}.pool.0.weight" in self.tensors:
            gate = self.conv(x, f"{place}.pool.0")
            grouped = gate.reshape(len(gate), 4, -1)
            spread = (grouped - grouped.mean(-1, keepdims=True)) / np.sqrt(grouped.var(-1, keepdims=True) + 1e-5)
            gain, shift = (self.tensors[f"{place}.pool.1.{leaf}"][:, None, None] for leaf in ("weight", "bias"))
            x = x + self.conv(relu(spread.reshape(gate.shape) * gain + shift), f"{place}.pool.3")
        y = x if past is None else np.concatenate((x, past), axis=1)
        y = self.conv(relu(self.conv(relu(self.conv(y, f"{place}.conv.0")), f"{place}.conv.2")), f"{place}.conv.4")
        return relu(y + x)


def taesd_decoded(made: TinyVAEConfig, named: Weights, z: np.ndarray) -> np.ndarray:
    layers, place = Layers(authors(named, "decoder")), 3
    x = relu(layers.conv(np.tanh(z.astype(np.float64) / 3) * 3, "1"))
    for level, count in enumerate(made.num_decoder_blocks):
        for _ in range(count):
            x, place = layers.block(x, place), place + 1
        if level + 1 < len(made.num_decoder_blocks):
            x, place = layers.conv(doubled(x), str(place + 1)), place + 2
    return 2 * layers.conv(x, str(place)) - 1


def taesd_encoded(made: TinyVAEConfig, named: Weights, pixels: np.ndarray) -> np.ndarray:
    layers, place, x = Layers(authors(named, "encoder")), 0, (pixels.astype(np.float64) + 1) / 2
    for level, count in enumerate(made.num_encoder_blocks):
        x, place = layers.conv(x, str(place), stride=2 if level else 1), place + 1
        for _ in range(count):
            x, place = layers.block(x, place), place + 1
    return layers.conv(x, str(place))


def before(x: np.ndarray) -> np.ndarray:
    return np.concatenate((np.zeros_like(x[:1]), x[:-1]))


def half_of(named: Weights, half: str) -> Weights:
    return {name.removeprefix(f"{half}."): value for name, value in named.items() if name.startswith(f"{half}.")}


def taehv_decoded(made: TinyVideoVAEConfig, named: Weights, z: np.ndarray) -> np.ndarray:
    """All frames of a video of one latent, of which the last is kept; not clamped."""
    layers, place = Layers(half_of(named, "decoder")), 3
    x = relu(layers.conv(np.tanh(z.astype(np.float64) / 3) * 3, "1"))
    for grow in made.grows:
        for _ in range(3):
            x, place = layers.block(x, place, before(x)), place + 1
        x = layers.conv(doubled(x), f"{place + 1}.conv")
        x = x.reshape(len(x) * grow, -1, *x.shape[2:])
        x, place = layers.conv(x, str(place + 2)), place + 3
    x = 2 * layers.conv(relu(x), str(place + 1)) - 1
    return x[prod(made.grows) - 1 :]


def taehv_encoded(made: TinyVideoVAEConfig, named: Weights, pixels: np.ndarray) -> np.ndarray:
    """The latent of a video of one frame, which is padded to as many as become one."""
    layers, place = Layers(half_of(named, "encoder")), 2
    x = relu(layers.conv(np.repeat((pixels.astype(np.float64) + 1) / 2, prod(made.pools), axis=0), "0"))
    for pool in made.pools:
        x = layers.conv(x.reshape(len(x) // pool, -1, *x.shape[2:]), f"{place}.conv")
        x, place = layers.conv(x, str(place + 1), stride=2), place + 2
        for _ in range(3):
            x, place = layers.block(x, place, before(x)), place + 1
    return layers.conv(x, str(place))
