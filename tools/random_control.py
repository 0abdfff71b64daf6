"""A folder of Qwen-Image with a control network beside its parts, with random weights, for measurements."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from random_qwen import DIT, write_qwen
from wide_checkpoint import write_part

from qwenimg.common.networks.denoisers import qwen_controlnet
from qwenimg.common.networks.denoisers.qwen_controlnet import QwenControlNetConfig

CONTROL = QwenControlNetConfig(num_layers=2, num_attention_heads=8, joint_attention_dim=1024)


def write_controlled(folder: Path) -> None:
    """Write a model, and its control network and the network's picture in a folder of their own."""
    place = folder / "controlnet"
    write_part(place, qwen_controlnet.NETWORK, CONTROL)
    Image.new("RGB", (512, 512), (40, 90, 200)).save(place / "picture.png")
    write_qwen(folder, DIT)


def controlled(path: Path) -> str:
    """Return the control of runs of the model at `path`, if it has one."""
    net = path / "controlnet"
    return f"{net}={net}/picture.png" if net.exists() else ""
