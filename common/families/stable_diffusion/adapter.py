"""T2I-Adapters of Stable Diffusion in a folder or a file, and their memory in a run."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Literal

from qwenimg.common.base.safe_files import bad, closed_on_error
from qwenimg.common.networks.denoisers import t2i_adapter, t2i_adapter_names
from qwenimg.common.networks.denoisers.t2i_adapter import SOFT, XL, T2IAdapterConfig
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.parts.components import config_at
from qwenimg.common.parts.control_net import ControlNet
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.runtime.checkpoint import Checkpoint

_BUFFERS = 4  # arrays of the first body in memory at its peak, beside the picture's patches


def open_adapter(path: Path, checkpoint: Checkpoint, refused: Mapping[str, str]) -> ControlNet:
    """Open the T2I-Adapter in the folder or file `path` for a model. `refused` as for `read_config`. Raises
    ModelError."""
    like = T2IAdapterConfig(channels=checkpoint["unet"].config.block_out_channels)
    config: T2IAdapterConfig = config_at(t2i_adapter.NETWORK, path, like, refused)
    component = open_part(t2i_adapter_names.LAYOUTS, path, config, "T2I-Adapter")
    config = component.config
    order: Literal["grey", "rgb"] = "grey" if config.in_channels == 1 else "rgb"
    net = ControlNet(name="", component=component, picture=order, multiple=config.downscale_factor)
    with closed_on_error(net):
        _check_fit(path, config, checkpoint["unet"].config, checkpoint["vae"].config.scale)
    return net


def _check_fit(path: Path, config: T2IAdapterConfig, base: UNetConfig, scale: int) -> None:
    """Raise ModelError for an adapter whose features are not of the sizes of the UNet's results."""
    ours, places = config.features(scale), _places(base)
    if len(ours) not in (len(places) - 1, len(places)) or ours != places[: len(ours)]:
        made = "SDXL" if config.adapter_type == XL else "Stable Diffusion 1.x"
        widths = ", ".join(str(width) for width, _ in ours)
        theirs = ", ".join(str(width) for width in base.block_out_channels)
        raise bad(
            path, f"is a T2I-Adapter for {made}, with features of {widths} channels; the model's UNet has {theirs}"
        )


def _places(base: UNetConfig) -> list[tuple[int, int]]:
    """Return the channels of each result of a UNet that takes a feature, and how often its sides are halves: of the
    down blocks and of the mid block."""
    blocks = [(level.width, i + (level.resampled and not level.depth)) for i, level in enumerate(base.down)]
    return [*blocks, (base.mid.width, len(blocks) - 1)]


def scales(config: T2IAdapterConfig, scale: float, *, weakened: bool) -> list[float]:
    """Return the factor of each feature: the `scale`, or where the prompt leads less of it for the first ones."""
    count = len(config.bodies)
    shares = [SOFT[max(0, i + len(SOFT) - count)] for i in range(count)]
    return [scale * share for share in shares] if weakened else [scale] * count


def activations(config: T2IAdapterConfig, pixels: int) -> int:
    """Return the bytes that an adapter takes for a picture of so many `pixels`."""
    first = pixels // config.downscale_factor**2
    return 4 * (2 * pixels * config.in_channels + _BUFFERS * first * config.channels[0])


def kept_bytes(config: T2IAdapterConfig, pixels: int, branches: int) -> int:
    """Return the bytes of the features of a picture of so many `pixels`, and of their scaled copies."""
    values = sum(width * -(-pixels // 4**halved) for width, halved in config.features(1))
    return int(4 * values * (1 + branches))


def count_operations(net: ControlNet, pixels: int) -> float:
    """Return the operations of an adapter for a picture of so many `pixels`."""
    config: T2IAdapterConfig = net.component.config
    first, shapes = pixels / config.downscale_factor**2, net.component.plan.shapes
    return float(sum(2.0 * prod(shape) * first / 4 ** _halved(config, name) for name, shape in shapes.items()))


def _halved(config: T2IAdapterConfig, name: str) -> int:
    parts = name.split(".")
    body = int(parts[2]) if parts[1] == "body" else 0
    return sum(1 for _, _, halves in config.bodies[: body + 1] if halves)
