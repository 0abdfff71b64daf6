"""Qwen-Image as a row of data."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from qwenimg.common.base.config import read_json
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.family import Family
from qwenimg.common.families.qwen_image import control_files, lora_names, mflux, references, variants
from qwenimg.common.families.qwen_image.checkpoint import open_folder
from qwenimg.common.families.qwen_image.describe_file import describe_file, part_of
from qwenimg.common.families.qwen_image.edit import QwenImageEdit
from qwenimg.common.families.qwen_image.layered import AREAS, QwenImageLayered
from qwenimg.common.families.qwen_image.model import QwenImage
from qwenimg.common.families.qwen_image.precision import KIND
from qwenimg.common.families.qwen_image.published import published
from qwenimg.common.families.qwen_image.small_files import small_files
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.encoders import qwen_vl, qwen_vl_vision
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Runtime

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


def _model(runtime: Runtime, checkpoint: Checkpoint, refiner: Checkpoint | None) -> QwenImage:
    assert refiner is None
    kind = variants.VARIANTS[checkpoint.variant]
    cls = QwenImageEdit if kind.edits else QwenImageLayered if kind.layered else QwenImage
    return cls(runtime, checkpoint, kind)


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
    networks=(qwen_dit.NETWORK, qwen_vl.NETWORK, qwen_vae.NETWORK, qwen_vl_vision.NETWORK),
    denoiser="transformer",
    components=(("transformer",), ("text_encoder",), ("vae",)),
    precision=KIND,
    published=published,
    options=QwenImageLayered.options,
    choices=frozenset({"transformer", "text_encoder", "text_encoder_2", "vae", "tokenizer", "variant"}),
    open=open_folder,
    reads_folder=mflux.layout,
    reads_names=mflux.are_names,
    describe_file=describe_file,
    model=_model,
    lora_names=lora_names.names,
    small_files=small_files,
    class_name=lambda checkpoint: variants.VARIANTS[checkpoint.variant].pipeline,
    defaults=_defaults,
    control=control_files.open_control,
    published_control=control_files.published,
    described=_described,
    part=part_of,
    model_of=lambda transformer, choices: "qwen-image",
)
