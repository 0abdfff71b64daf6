"""Qwen-Image as a row of data."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from qwenimg.common.base.config import read_json
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.family import ControlFiles, Family
from qwenimg.common.families.part_file import ModelFile, PartFile, TinyVAEFile
from qwenimg.common.families.qwen_image import control_files, references, variants
from qwenimg.common.families.qwen_image.checkpoint import FITS, NETWORKS, OPENING, networks
from qwenimg.common.families.qwen_image.describe_file import QwenPart, is_model
from qwenimg.common.families.qwen_image.edit import QwenImageEdit
from qwenimg.common.families.qwen_image.layered import AREAS, QwenImageLayered
from qwenimg.common.families.qwen_image.model import QwenImage
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.networks.denoisers import qwen_controlnet, qwen_patches
from qwenimg.common.networks.encoders import qwen_vl_vision
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import on_paper, read_config
from qwenimg.common.precision.precision import PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint

_BLOCK = r"transformer_blocks\.\d+\."
KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "norm_out, its modulation and proj_out; the prediction stays float32 for the sampler "
        "(switchable)",
        "modulation": "the timestep embedding and every block's shift, scale and gate",
        "residual": "the residual streams of transformer and text encoder, from img_in and txt_in on, which start them",
        "timestep": "the timestep and its sinusoid (switchable: `rounded` is what diffusers does in half precision)",
        "rope": "RoPE tables, made in float64, and the rotation",
        "softmax": PLACES["softmax"],
        "rms_norm": "RMSNorm, gain included",
        "guidance": "classifier-free guidance and its norms",
        "scheduler": PLACES["scheduler"],
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"(img_in|txt_in|controlnet_x_embedder)\."),
    },
    # Activations reach 2e7 in the streams, which stay float32; these scale the inputs and outputs of the products.
    scales={
        re.compile(_BLOCK + r"attn\.(to_[qkv]|add_[qkv]_proj|attend)"): 2.0**-3,
        re.compile(_BLOCK + r"attn\.(to_out\.0|to_add_out)"): 2.0**-4,
        re.compile(_BLOCK + r"(img|txt)_mlp\.net\.(0\.proj|2)"): 2.0**-5,
        re.compile(r"controlnet_blocks\.\d+"): 2.0**-10,  # they take the stream itself
    },
    texts={"fp16": "bfloat16"},  # Qwen2.5-VL's activations are beyond float16 too
    rounds_time=True,
)
"""Why the three switchable places exist (measured against float64 on two full-width blocks with bfloat16 weights,
normalized mean square error, docs/measured/precision.md): everything in bfloat16 4.5e-5; residual stream and
modulation in float32 1.7e-5; the head as well 6.7e-6. They spare roundings, not overflow: bfloat16 has float32's
range."""


PUBLISHED_WIDTH = 3072
"""The width of the published transformer, also without some of its layers. A toy is narrower."""


# Width and height in pixels that it was trained for, by aspect
SIZES = {
    Fraction(1, 1): (1328, 1328),
    Fraction(16, 9): (1664, 928),
    Fraction(9, 16): (928, 1664),
    Fraction(4, 3): (1472, 1104),
    Fraction(3, 4): (1104, 1472),
    Fraction(3, 2): (1584, 1056),
    Fraction(2, 3): (1056, 1584),
}


def _published(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return a known model with the networks of its variant, which its name tells: `folder` is the same for all."""
    kind = variants.of_name(checkpoint.source.name) or variants.TEXT
    for part, network in networks(kind).items():
        config = variants.of_kind(read_config(network, folder / part), kind)
        if network is not NETWORKS[part] or config != checkpoint[part].config:
            checkpoint = checkpoint.with_part(part, on_paper(network, config, "bfloat16"))
    return replace(checkpoint, variant=kind.name)


def _defaults(checkpoint: Checkpoint) -> Defaults:
    kind = variants.VARIANTS[checkpoint.variant]
    if kind.edits:
        return Defaults(strength=1.0, edited=references.AREA)
    if kind.layered:
        return Defaults(width=640, height=640, strength=1.0, edited=AREAS[0])
    return Defaults(trained=SIZES if checkpoint["transformer"].config.dim == PUBLISHED_WIDTH else {})


def _described(folder: Path) -> str:
    """Return the purpose of a folder, or of one without configurations."""
    index, transformer = folder / "model_index.json", folder / "transformer" / "config.json"
    if not (is_file(index) and is_file(transformer)):
        return (variants.of_name(folder.name) or variants.TEXT).title
    config = read_json(transformer)
    flags = bool(config.get("zero_cond_t")), bool(config.get("use_layer3d_rope"))
    return variants.of_pipeline(str(read_json(index).get("_class_name")), *flags).title


FAMILY = Family(
    name="qwen-image",
    title="Qwen-Image",
    pipelines=variants.PIPELINES,
    precision=KIND,
    parts=NETWORKS,
    other_networks=(qwen_vl_vision.NETWORK,),
    fits=FITS,
    published=_published,
    load_options=frozenset({"transformer", "text_encoder", "text_encoder_2", "vae", "tokenizer", "variant"}),
    open=OPENING.open,
    files=(
        PartFile(
            option="control",
            title=lambda header: control_files.described(header.tensors),
            network=qwen_controlnet.NETWORK,
            is_in=lambda header: control_files.is_control(header.tensors),
            use="-m qwen-image --control FILE=PICTURE",
        ),
        ModelFile(
            title="Qwen-Image",
            parts=(*NETWORKS,),
            is_in=is_model,
            open=OPENING.open_parts,
            fits=FITS,
        ),
        *(QwenPart(option=part) for part in NETWORKS),
        TinyVAEFile(names=("taew2_1",)),
    ),
    models={
        "": QwenImage,
        **{kind.name: QwenImageEdit for kind in variants.VARIANTS.values() if kind.edits},
        variants.LAYERED.name: QwenImageLayered,
    },
    small_files=lambda checkpoint: known_configs.small_files("qwen-image"),
    class_name=lambda checkpoint: variants.VARIANTS[checkpoint.variant].pipeline,
    defaults=_defaults,
    control=ControlFiles(
        open=control_files.open_control,
        networks=(qwen_controlnet.NETWORK, qwen_patches.NETWORK),
        published=control_files.published,
        names_lora=control_files.names_control,
    ),
    tiny_vae=lambda checkpoint: "taew2_1",
    described=_described,
    model_of=lambda transformer, options: "qwen-image",
    training=TrainingRow(
        layers=re.compile(r"transformer_blocks\.\d+\.(?:attn\..+|(?:img|txt)_mlp\..+)"),
        refusal=lambda checkpoint: "draws several layers" if variants.VARIANTS[checkpoint.variant].layered else "",
    ),
)
