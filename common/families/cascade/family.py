"""Stable Cascade as a row of data."""

from __future__ import annotations

import re
from pathlib import Path

from qwenimg.common.families.cascade.checkpoint import EFFNET, FITS, LAYOUTS, NETWORKS, OPENING, parts_of
from qwenimg.common.families.cascade.known import CASCADE, NAME
from qwenimg.common.families.cascade.model import NO_ENCODER, Cascade
from qwenimg.common.families.family import Family
from qwenimg.common.families.part_file import CLIP_G, ModelFile, PartFile
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults

KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "clf, the last layer; the prediction stays float32 for the sampler (switchable)",
        "modulation": "the scales and shifts of the time",
        "residual": "the residual streams of both UNets and of the text encoder, the layers that start them or lead "
        "from level to level, and those between the repetitions of a level",
        **PLACES,
        "group_norm": "the statistics of layer norms, and the lengths of channels over an image",
    },
    prefers=("bf16",),
    preferred="its authors found that the prior exceeds float16",
    keys={
        "final_norm": re.compile(r"clf\."),
        "residual": re.compile(r"embedding\.|.*_repeat_mappers\.|down_downscalers\.|up_upscalers\."),
        "modulation": re.compile(r".*\.mapper(_\w+)?\."),
    },
)


def _described(folder: Path) -> str:
    """Return the model in `folder` and its purpose."""
    return "Stable Cascade, text to image"


FAMILY = Family(
    name="cascade",
    title="Stable Cascade",
    pipelines=frozenset({"StableCascadeDecoderPipeline", "StableCascadeCombinedPipeline"}),
    refused={
        "StableCascadePriorPipeline": "is the prior of Stable Cascade alone: open the folder of its decoder, "
        "and give this one by --transformer"
    },
    components=(("decoder", "prior"), ("text_encoder",), ("vqgan", EFFNET)),
    precision=KIND,
    parts=NETWORKS,
    folders={"transformer": "prior", "vae": "vqgan"},
    fits=FITS,
    load_options=frozenset({"transformer", "text_encoder", "vae", EFFNET, "tokenizer"}),
    open=OPENING.open,
    files=(
        ModelFile(
            title="Stable Cascade",
            parts=("transformer", "decoder", "text_encoder", "vae"),
            is_in=lambda header: bool(parts_of(header)),
            open=OPENING.open_inside,
        ),
        PartFile(
            option="transformer",
            title="Stable Cascade's prior",
            layouts=LAYOUTS["transformer"],
            use="-m DECODER --transformer FILE",
        ),
        PartFile(option="vae", title="Stable Cascade's VAE", layouts=LAYOUTS["vae"], use="-m MODEL --vae FILE"),
        PartFile(
            option=EFFNET,
            title="Stable Cascade's encoder of pictures",
            layouts=LAYOUTS[EFFNET],
            use="-i PICTURE -m MODEL --effnet FILE",
            is_alone=True,
        ),
        CLIP_G,
    ),
    models={"": Cascade},
    training=TrainingRow(
        layers=re.compile(r"(?:down|up)_blocks\.\d+\.\d+\.attention\..+"),  # as its authors train them
        refusal=lambda checkpoint: "" if EFFNET in checkpoint.components else NO_ENCODER,
    ),
    small_files=lambda checkpoint: known_configs.small_files(NAME),
    defaults=lambda checkpoint: Defaults(**CASCADE.usual),
    described=_described,
)
