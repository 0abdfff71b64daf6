"""Chroma as a row of data."""

from __future__ import annotations

import re
from dataclasses import replace

from qwenimg.common.families.chroma.checkpoint import FITS, NETWORKS, OPENING
from qwenimg.common.families.chroma.known import HD
from qwenimg.common.families.chroma.model import Chroma
from qwenimg.common.families.family import Family
from qwenimg.common.families.part_file import KL_VAE, T5, PartFile, TinyVAEFile, whole_model
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.networks.denoisers import chroma_names
from qwenimg.common.parts import flux_blocks, known_configs
from qwenimg.common.request.request import Defaults

KIND = replace(
    flux_blocks.KIND,
    places={
        **flux_blocks.KIND.places,
        "final_norm": "proj_out; the prediction stays float32 for the sampler (switchable)",
        "modulation": "the approximator, which makes every block's shift, scale and gate",
        "timestep": "the timestep and its sinusoids (switchable: `rounded` is what diffusers does in half precision)",
    },
    keys={**flux_blocks.KIND.keys, "final_norm": re.compile(r"proj_out\.")},
)


FAMILY = Family(
    name="chroma",
    title="Chroma",
    pipelines=frozenset({"ChromaPipeline", "ChromaImg2ImgPipeline", "ChromaInpaintPipeline"}),
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    open=OPENING.open,
    files=(
        whole_model("Chroma", OPENING, FITS),
        PartFile(option="transformer", title="Chroma's transformer", layouts=chroma_names.LAYOUTS),
        T5,
        KL_VAE,
        TinyVAEFile(names=("taef1",)),
    ),
    model_of=lambda transformer, options: HD.name,
    models={"": Chroma},
    small_files=lambda checkpoint: known_configs.small_files(HD.name),
    defaults=lambda checkpoint: Defaults(**HD.usual),
    tiny_vae=lambda checkpoint: "taef1",
    described=lambda folder: "Chroma, text to image",
    training=TrainingRow(layers=flux_blocks.LEARNING),
)
