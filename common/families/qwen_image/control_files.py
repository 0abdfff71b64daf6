"""Control networks for Qwen-Image in a folder or a file: the kind, the configuration, and the plan of weights; and
LoRAs of In-Context-Control."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from qwenimg.common.base.config import parse
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.safe_files import bad, closed_on_error, is_file, open_regular
from qwenimg.common.families.description import listed
from qwenimg.common.families.qwen_image.variants import LAYERED, TEXT, VARIANTS
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.denoisers import qwen_controlnet, qwen_patches
from qwenimg.common.networks.denoisers.qwen_controlnet import QwenControlNetConfig
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.denoisers.qwen_patches import QwenPatchesConfig
from qwenimg.common.networks.layout import Shapes, shape_of
from qwenimg.common.parts.components import on_paper, open_component, read_config
from qwenimg.common.parts.control_net import Controller, ControlLora, ControlNet, check_sizes
from qwenimg.common.runtime.checkpoint import Checkpoint

_CONTROLNET = "controlnet_x_embedder.weight"
_PATCHES = "controlnet_blocks.0.y_rms.weight"
_QWEN = "txt_norm.weight"  # which no ControlNet of another family has
# Tensors of other families' control networks, and the families.
_OTHERS = {
    "controlnet_mid_block.weight": "Stable Diffusion",
    "controlnet_cond_embedding.conv_in.weight": "Stable Diffusion",
    "control_model.middle_block_out.0.weight": "Stable Diffusion",
    "pos_embed_input.proj.weight": "Stable Diffusion 3",
    _CONTROLNET: "FLUX.1",
    "control_all_x_embedder.2-1.weight": "Z-Image",
}
_REFUSED = {
    "Flux": "is a ControlNet of FLUX.1, and the model is Qwen-Image",
    "SD3": "is a ControlNet of Stable Diffusion 3, and the model is Qwen-Image",
    "ControlNet": "is a ControlNet of Stable Diffusion, and the model is Qwen-Image",
    "Z": "is a ControlNet of Z-Image, and the model is Qwen-Image",
}
_MASK_CHANNELS = 4  # of the published networks that take a mask
# The published ControlNets: their layers, and channels of a mask; and the patches: their channels of a mask
_CONTROLNETS = {
    "qwen-image-controlnet-union": (5, 0),
    "qwen-image-controlnet-inpainting": (6, _MASK_CHANNELS),
}
_PATCHES_OF = {
    "qwen-image-patches-canny": 0,
    "qwen-image-patches-depth": 0,
    "qwen-image-patches-inpaint": _MASK_CHANNELS,
}
_LORA = "qwen-image-in-context-control-union"
_NAMED = re.compile(r"in[-_ ]?context[-_ ]?control", re.IGNORECASE)  # in the path of such a LoRA
_PROMPT = "Context_Control. "  # the start of the prompts that it was trained with
_BLOCK = re.compile(r"(?:transformer|controlnet)_blocks\.(\d+)\.")


def is_control(tensors: Mapping[str, object]) -> bool:
    """Return whether a file with these tensors is a control network for Qwen-Image."""
    return _PATCHES in tensors or (_CONTROLNET in tensors and _QWEN in tensors)


def described(tensors: Mapping[str, object]) -> str:
    """Return the kind of a control network with these tensors, in words."""
    kind = "patches" if _PATCHES in tensors else "blocks of a ControlNet"
    layers = len({match[1] for name in tensors if (match := _BLOCK.match(name))})
    return f"a control network for Qwen-Image, {layers} {kind}"


def names_control(path: Path) -> bool:
    """Return whether the path of a LoRA names In-Context-Control."""
    return _NAMED.search(str(path.absolute())) is not None


def open_control(path: Path, checkpoint: Checkpoint) -> Controller:
    """Open the control network or LoRA in the folder or file `path` for a model. Raises ModelError and UsageError."""
    if checkpoint.variant != TEXT.name:
        title, _, _ = VARIANTS[checkpoint.variant].title.partition(",")
        why = f"{title} takes a picture of edges, depth or a pose as it is: give it with -i"
        if checkpoint.variant == LAYERED.name:
            why = f"{title} takes a picture apart"
        raise UsageError(f"--control is for Qwen-Image, text to image; {why}")
    like: QwenDiTConfig = checkpoint["transformer"].config
    shapes = _shapes(path)
    if any(".lora_" in name for name in shapes):  # whether it fits the model is seen when it is read as a LoRA
        return ControlLora(name="", file=open_regular(find_files(path).files[0]), prompt=_PROMPT)
    if _PATCHES in shapes:
        net = _patches(path, shapes, like)
    else:
        has_config = is_file(path / "config.json")
        config = read_config(qwen_controlnet.NETWORK, path, _REFUSED) if has_config else None
        _check_is_ours(path, shapes)
        net = _controlnet(path, config or _config(path, shapes, like))
    with closed_on_error(net):
        _check_fit(path, net, like)
    return net


def published(name: str) -> Controller | None:
    """Return the control network or LoRA known as `name`, without its files; None for another name."""
    if name == _LORA:
        return ControlLora(name="", file=None, prompt=_PROMPT)
    if name in _CONTROLNETS:
        layers, extra = _CONTROLNETS[name]
        config = QwenControlNetConfig(num_layers=layers, extra_condition_channels=extra)
        component = on_paper(qwen_controlnet.NETWORK, config, "bfloat16")
        return ControlNet(name="", component=component, mask="needed" if extra else "none", samples=True)
    if name in _PATCHES_OF:
        extra = _PATCHES_OF[name]
        component = on_paper(qwen_patches.NETWORK, QwenPatchesConfig(picture_channels=64 + extra), "bfloat16")
        return ControlNet(name="", component=component, mask="optional" if extra else "none")
    return None


def _shapes(path: Path) -> Shapes:
    """Return the shapes of the tensors of all files at `path`. Raises ModelError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in find_files(path).files:
        shapes |= {name: tensor.shape for name, tensor in peek(file).tensors.items()}
    return shapes


def _check_is_ours(path: Path, shapes: Shapes) -> None:
    """Raise ModelError for the file of another family's control network, or of none."""
    if is_control(shapes):
        return
    family = next((family for name, family in _OTHERS.items() if name in shapes), None)
    if family is not None:
        raise bad(path, f"is a control network of {family}, and the model is Qwen-Image")
    raise bad(path, f"is no control network of Qwen-Image; it begins with {listed(shapes)}")


def _controlnet(path: Path, config: QwenControlNetConfig) -> ControlNet:
    extra, mask_channels = config.extra_condition_channels, config.patch_size**2
    if extra not in (0, mask_channels):
        raise bad(path, f"takes {extra} channels beside the picture's; a mask has {mask_channels}")
    component = open_component(qwen_controlnet.NETWORK, path, config, "controlnet")
    return ControlNet(name="", component=component, mask="needed" if extra else "none", samples=True)


def _patches(path: Path, shapes: Shapes, like: QwenDiTConfig) -> ControlNet:
    width, channels = shape_of(path, shapes, "img_in.weight", 2)
    extra, mask_channels = channels - like.in_channels, like.patch_size**2
    if extra not in (0, mask_channels):
        expected = f"the model's have {like.in_channels}, and masks {mask_channels}"
        raise bad(path, f"takes pictures of {channels} channels; {expected}")
    sizes = {"dim": width, "picture_channels": channels, "num_layers": _layers(shapes)}
    config = parse(QwenPatchesConfig, sizes, source=path)
    component = open_component(qwen_patches.NETWORK, path, config, "controlnet")
    return ControlNet(name="", component=component, mask="optional" if extra else "none")


def _config(path: Path, shapes: Shapes, like: QwenDiTConfig) -> QwenControlNetConfig:
    """Return the configuration of a ControlNet that has none. Its sizes are those of the tensors; its axes of
    positions, which no tensor shows, are those of `like`, the model's transformer."""
    width, channels = shape_of(path, shapes, "img_in.weight", 2)
    [head_dim] = shape_of(path, shapes, "transformer_blocks.0.attn.norm_q.weight", 1)
    data = {name: value for name, value in asdict(like).items() if name != "zero_cond_t"} | {
        "in_channels": channels,
        "num_layers": _layers(shapes),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "joint_attention_dim": shape_of(path, shapes, "txt_in.weight", 2)[1],
        "extra_condition_channels": shape_of(path, shapes, _CONTROLNET, 2)[1] - channels,
    }
    return parse(QwenControlNetConfig, data, source=path)


def _layers(shapes: Shapes) -> int:
    return len({match[1] for name in shapes if (match := _BLOCK.match(name))})


def _check_fit(path: Path, net: ControlNet, like: QwenDiTConfig) -> None:
    """Raise ModelError for a network that was made for a transformer of other sizes."""
    config = net.component.config
    pairs = {"channels in its streams": (config.dim, like.dim)}
    if net.component.network == qwen_patches.NETWORK.name:
        pairs["blocks"] = (config.num_layers, like.num_layers)
    else:
        pairs["channels in a latent"] = (config.in_channels, like.in_channels)
        pairs["channels in a text"] = (config.joint_attention_dim, like.joint_attention_dim)
    check_sizes(path, "transformer", pairs)
