"""Stable Diffusion 3 and 3.5 as a row of data."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.family import Family
from qwenimg.common.families.sd3 import lora_names
from qwenimg.common.families.sd3.checkpoint import open_checkpoint
from qwenimg.common.families.sd3.describe_file import describe_file, part_of, reads
from qwenimg.common.families.sd3.model import SD3
from qwenimg.common.families.sd3.precision import KIND
from qwenimg.common.families.sd3.published import defaults, model_of, published
from qwenimg.common.families.sd3.small_files import small_files
from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.networks.denoisers import sd3_dit
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.request.parts import PARTS
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Runtime


def _model(runtime: Runtime, checkpoint: Checkpoint, refiner: Checkpoint | None) -> SD3:
    assert refiner is None
    return SD3(runtime, checkpoint)


def _described(folder: Path) -> str:
    """Return the purpose of a folder, and whether it has T5."""
    return "Stable Diffusion 3, text to image" + ("" if is_file(folder / T5 / "config.json") else ", without T5")


FAMILY = Family(
    name="sd3",
    title="Stable Diffusion 3",
    pipelines=frozenset(
        {"StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"}
    ),
    refused={
        "StableDiffusion3": "is a Stable Diffusion 3 model with a ControlNet, which this version does not support"
    },
    networks=(sd3_dit.NETWORK, clip.NETWORK, t5.NETWORK, kl_vae.NETWORK),
    denoiser="transformer",
    components=(("transformer",), ("text_encoder", "text_encoder_2", T5), ("vae",)),
    precision=KIND,
    published=published,
    options=SD3.options,
    choices=frozenset({"tokenizer", *PARTS}),
    open=open_checkpoint,
    reads_file=reads,
    describe_file=describe_file,
    part=part_of,
    model_of=lambda transformer, choices: model_of(transformer),
    model=_model,
    lora_names=lora_names.names,
    small_files=small_files,
    defaults=defaults,
    described=_described,
)
