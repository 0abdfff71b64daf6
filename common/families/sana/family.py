"""SANA and SANA-Sprint as a row of data."""

from __future__ import annotations

import re

from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families.family import Family
from qwenimg.common.families.part_file import GEMMA_2, PartFile
from qwenimg.common.families.sana.checkpoint import FITS, LAYOUTS, NETWORKS, OPENING
from qwenimg.common.families.sana.known import of_config, of_name
from qwenimg.common.families.sana.model import Sana
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import PLACES, DenoiserKind, block_scales
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint

KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "modulation": "the embeddings of time and guidance, the modulation of all blocks and their tables",
        "linear_attention": "attention to the image: ReLU of queries and keys, their sums and the quotient",
        "rms_norm": "RMSNorm, gain included",
        **PLACES,
        "final_norm": "proj_out; the prediction stays float32 for the sampler (switchable)",
        "residual": "the residual streams of transformer and text encoder, from patch_embed on",
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"proj_out\."),
        "residual": re.compile(r"patch_embed\."),
        "modulation": re.compile(r"time_embed\.|(?:transformer_blocks\.\d+\.)?scale_shift_table\."),
    },
    scales=block_scales(r"transformer_blocks\.\d+\.attn\d\.", r"transformer_blocks\.\d+\.ff\.conv_\w+"),
    texts={"fp16": "bfloat16", "fp16-upcast": "bfloat16", "fp16-plain": "bfloat16"},  # Gemma 2's exceed float16
)
"""Under fp16 the streams are float32, and products are scaled by FLUX.2's factors. Measured with random weights alone:
that says what arithmetic costs, and nothing about how large published weights make values. SANA 1.0 is published in
float16 too, SANA 1.5 and SANA-Sprint in bfloat16 alone."""


def _defaults(checkpoint: Checkpoint) -> Defaults:
    """Return those of the model's card, at the size that its transformer was trained for."""
    config = checkpoint["transformer"].config
    side = config.sample_size * checkpoint["vae"].config.scale
    return Defaults(**(of_config(config).usual | {"width": side, "height": side}))


def _not_trained(checkpoint: Checkpoint) -> str:
    is_sprint = checkpoint["transformer"].config.guidance_embeds
    return "SANA-Sprint is distilled for 1 to 4 steps: train SANA 1.5" if is_sprint else ""


FAMILY = Family(
    name="sana",
    title="SANA",
    pipelines=frozenset({"SanaPipeline", "SanaPAGPipeline", "SanaSprintPipeline", "SanaSprintImg2ImgPipeline"}),
    refused={
        "SanaControlNet": "is SANA with a control network, which this version does not read",
        "SanaVideo": "is SANA-Video, which this version does not draw with",
        "SanaImageToVideo": "is SANA-Video, which this version does not draw with",
    },
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    open=OPENING.open,
    files=(
        PartFile(
            option="transformer",
            title="SANA's transformer",
            layouts=LAYOUTS["transformer"],
            variant=lambda path, config: (
                f"{'SANA-Sprint' if config.guidance_embeds else 'SANA 1.5' if config.qk_norm else 'SANA 1.0'}, "
                f"{config.num_layers} layers of {config.dim} channels"
            ),
        ),
        GEMMA_2,
        PartFile(option="vae", title="SANA's VAE", use="-m MODEL --vae FILE", layouts=LAYOUTS["vae"]),
    ),
    model_of=lambda transformer, options: of_name(display_name(transformer)).name,
    models={"": Sana},
    defaults=_defaults,
    class_name=lambda checkpoint: (
        "SanaSprintPipeline" if checkpoint["transformer"].config.guidance_embeds else "SanaPipeline"
    ),
    described=lambda folder: f"{of_name(display_name(folder)).title}, text to image",
    small_files=lambda checkpoint: known_configs.small_files(of_config(checkpoint["transformer"].config).name),
    training=TrainingRow(
        layers=re.compile(r"transformer_blocks\.\d+\.(?:attn\d\..+|ff\.conv_(?:inverted|point))"),
        refusal=_not_trained,
    ),
)
