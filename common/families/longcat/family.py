"""LongCat-Image as a row of data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qwenimg.common.families.family import Family
from qwenimg.common.families.longcat import references
from qwenimg.common.families.longcat.checkpoint import (
    FITS,
    NETWORKS,
    OPENING,
    PIPELINES,
    VARIANTS,
    is_tower,
    model_of,
    networks,
    variant_in,
    variant_of,
)
from qwenimg.common.families.longcat.known import IMAGE, of_name
from qwenimg.common.families.longcat.model import LongCat, LongCatEdit
from qwenimg.common.families.part_file import KL_VAE, PartFile, TinyVAEFile, whole_model
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.networks.denoisers import longcat_names
from qwenimg.common.networks.encoders import language_names, qwen_vl_vision
from qwenimg.common.numbers import sizes
from qwenimg.common.parts import flux_blocks, known_configs
from qwenimg.common.parts.components import on_paper, read_config
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint

KIND = replace(flux_blocks.KIND, texts={"fp16": "bfloat16"})  # Qwen2.5-VL's activations are beyond float16


def _published(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return a known model with the networks of its variant."""
    variant = variant_of(of_name(checkpoint.source.name))
    network = networks(variant)["text_encoder"]
    if variant == "edit":
        config = read_config(network, folder / "text_encoder")
        checkpoint = checkpoint.with_part("text_encoder", on_paper(network, config, "bfloat16"))
    return replace(checkpoint, variant=variant)


def _defaults(checkpoint: Checkpoint) -> Defaults:
    usual = VARIANTS[checkpoint.variant].usual
    if checkpoint.variant == "text":
        return Defaults(**usual)
    return Defaults(**usual, strength=1.0, edited=references.AREA, edited_size=sizes.over_area)


FAMILY = Family(
    name="longcat",
    title="LongCat-Image",
    pipelines=frozenset(PIPELINES),
    precision=KIND,
    parts=NETWORKS,
    other_networks=(qwen_vl_vision.NETWORK,),
    published=_published,
    fits=FITS,
    load_options=frozenset({"transformer", "text_encoder", "text_encoder_2", "vae", "tokenizer", "variant"}),
    open=OPENING.open,
    files=(
        whole_model("LongCat-Image", OPENING, FITS),
        PartFile(
            option="transformer",
            title="LongCat-Image's transformer",
            layouts=longcat_names.LAYOUTS,
            variant=lambda path, config: of_name(path.name).title,
        ),
        PartFile(
            option="text_encoder",
            title="Qwen2.5-VL, a text encoder",
            use="-m MODEL --text-encoder FILE",
            layouts=language_names.QWEN2_5_VL,
            is_in=lambda header: language_names.QWEN2_5_VL.find_in(header) is not None or is_tower(header),
            is_described=False,  # Qwen-Image's row describes it
        ),
        KL_VAE,
        TinyVAEFile(names=("taef1",)),
    ),
    model_of=model_of,
    models={"": LongCat, "edit": LongCatEdit},
    small_files=lambda checkpoint: known_configs.small_files(VARIANTS[checkpoint.variant].name),
    class_name=lambda checkpoint: next(name for name, one in PIPELINES.items() if one == checkpoint.variant),
    defaults=_defaults,
    tiny_vae=lambda checkpoint: "taef1",
    described=lambda folder: (
        "LongCat-Image-Edit, edits one picture" if variant_in(folder) == "edit" else f"{IMAGE.title}, text to image"
    ),
    training=TrainingRow(layers=flux_blocks.LEARNING),
)
