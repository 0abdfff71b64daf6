"""Qwen-Image as a row of data."""

from __future__ import annotations

from fractions import Fraction

from qwenimg.common.families.family import Family
from qwenimg.common.families.qwen_image import lora_names, mflux
from qwenimg.common.families.qwen_image.checkpoint import REFUSED, open_folder
from qwenimg.common.families.qwen_image.describe_file import describe_file, part_of
from qwenimg.common.families.qwen_image.model import QwenImage
from qwenimg.common.families.qwen_image.precision import KIND
from qwenimg.common.families.qwen_image.published import published
from qwenimg.common.families.qwen_image.small_files import small_files
from qwenimg.common.networks import qwen_dit, qwen_vae, qwen_vl
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Runtime

TEMPLATE = Template(
    text="<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n",
    dropped=34,
    limit=1024,
    seen=512,
)
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
    return QwenImage(runtime, checkpoint, TEMPLATE)


def _defaults(checkpoint: Checkpoint) -> Defaults:
    return Defaults(trained=SIZES if checkpoint["transformer"].config.dim == PUBLISHED_WIDTH else {})


FAMILY = Family(
    name="qwen-image",
    title="Qwen-Image",
    pipelines=frozenset({"QwenImagePipeline"}),
    refused=REFUSED,
    networks=(qwen_dit.NETWORK, qwen_vl.NETWORK, qwen_vae.NETWORK),
    denoiser="transformer",
    components=(("transformer",), ("text_encoder",), ("vae",)),
    precision=KIND,
    published=published,
    options=QwenImage.options,
    choices=frozenset({"transformer", "text_encoder", "vae", "tokenizer"}),
    open=open_folder,
    reads_folder=mflux.layout,
    reads_names=mflux.are_names,
    describe_file=describe_file,
    model=_model,
    lora_names=lora_names.names,
    small_files=small_files,
    defaults=_defaults,
    described=lambda folder: "Qwen-Image, text to image",
    part=part_of,
    parts_alone=True,
)
