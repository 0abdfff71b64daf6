"""Stable Diffusion 3 and 3.5 as a row of data."""

from __future__ import annotations

import re
from pathlib import Path

from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.family import Family
from qwenimg.common.families.part_file import CLIP_G, CLIP_L, KL_VAE, ModelFile, PartFile, TinyVAEFile
from qwenimg.common.families.part_file import T5 as T5_FILE
from qwenimg.common.families.sd3.checkpoint import FITS, NETWORKS, OPENING
from qwenimg.common.families.sd3.describe_file import LARGE_LAYERS, TURBO, is_model, model_of, reads, variant
from qwenimg.common.families.sd3.known import LARGE, LARGE_TURBO, MEDIUM, SD3_MEDIUM
from qwenimg.common.families.sd3.model import SD3
from qwenimg.common.families.sd3.texts import PADS, T5
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.networks.denoisers import sd3_names
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.small_files import padded_tokenizers
from qwenimg.common.precision.precision import PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.loras.lora_metadata import LoraBase

KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "rms_norm": "RMSNorm, gain included",
        **PLACES,
        "final_norm": "norm_out, its modulation and proj_out; the prediction stays float32 for the sampler "
        "(switchable)",
        "modulation": "the embeddings of time and pooled text, and every block's shift, scale and gate",
        "residual": "the residual streams of transformer and text encoders, from the convolution of patches and from "
        "context_embedder on, which start them",
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"(pos_embed\.proj|context_embedder)\."),
    },
)
"""Measured against float64 on three full-width blocks of SD 3.5 medium with random bfloat16 weights, normalized mean
square error of the velocity in bfloat16 and in float16: everything low 3.2e-5, 5.2e-7; the places in float32 1.2e-6,
1.8e-8; without that of the modulation 4.8e-6, 7.4e-8, of the final norm 9.9e-6, 1.8e-7, of the residual streams 2.1e-5,
3.4e-7. In float16 no input is scaled, since the reference clips none. Not measured on real weights."""


def _described(folder: Path) -> str:
    """Return the purpose of a folder, and whether it has T5."""
    return "Stable Diffusion 3, text to image" + ("" if is_file(folder / T5 / "config.json") else ", without T5")


def _small_files(checkpoint: Checkpoint) -> dict[str, dict[str, object]]:
    """Return the small files of a model, which may lack T5."""
    files = known_configs.small_files(SD3_MEDIUM.name)
    if T5 not in checkpoint.tokenizers:
        files["model_index.json"] |= {T5: [None, None], "tokenizer_3": [None, None]}
    return files | padded_tokenizers(checkpoint, PADS)


def _defaults(checkpoint: Checkpoint) -> Defaults:
    """Return the defaults of a variant, which its layers show; of the distilled one, its name."""
    config: SD3Config = checkpoint["transformer"].config
    if TURBO in checkpoint.source.name.lower():
        return Defaults(**LARGE_TURBO.usual)
    if config.num_layers == LARGE_LAYERS:
        return Defaults(**LARGE.usual)
    return Defaults(**(MEDIUM if config.dual_attention_layers else SD3_MEDIUM).usual)


FAMILY = Family(
    name="sd3",
    title="Stable Diffusion 3",
    pipelines=frozenset(
        {"StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"}
    ),
    refused={
        "StableDiffusion3": "is a Stable Diffusion 3 model with a ControlNet, which this version does not support"
    },
    components=(("transformer",), ("text_encoder", "text_encoder_2", T5), ("vae",)),
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    load_options=frozenset({"transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "vae", "tokenizer"}),
    open=OPENING.open,
    files=(
        ModelFile(
            title="Stable Diffusion 3",
            parts=(*NETWORKS,),
            is_in=is_model,
            is_opened=reads,
            open=OPENING.open_inside,
            variant=lambda path, parts: variant(path, parts["transformer"].config),
            fits=FITS,
        ),
        PartFile(
            option="transformer",
            title="Stable Diffusion 3's transformer",
            layouts=sd3_names.LAYOUTS,
            variant=variant,
            use="--transformer FILE --text-encoder CLIP-L --text-encoder CLIP-G --text-encoder T5 --vae FILE",
        ),
        T5_FILE,
        CLIP_L,
        CLIP_G,
        KL_VAE,
        TinyVAEFile(names=("taesd3",)),
    ),
    model_of=lambda transformer, options: model_of(transformer),
    models={"": SD3},
    small_files=_small_files,
    lora_base=lambda checkpoint: LoraBase(architecture="stable-diffusion-3", version="sd3"),
    defaults=_defaults,
    tiny_vae=lambda checkpoint: "taesd3",
    described=_described,
    training=TrainingRow(layers=re.compile(r"transformer_blocks\.\d+\.(?:attn2?|ff|ff_context)\..+")),
)
