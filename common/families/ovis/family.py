"""Ovis-Image as a row of data."""

from __future__ import annotations

from dataclasses import replace

from qwenimg.common.families.family import Family
from qwenimg.common.families.ovis.checkpoint import FITS, NETWORKS, OPENING
from qwenimg.common.families.ovis.known import IMAGE
from qwenimg.common.families.ovis.model import Ovis
from qwenimg.common.families.part_file import KL_VAE, QWEN3, PartFile, TinyVAEFile, whole_model
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.networks.denoisers import ovis_names
from qwenimg.common.parts import flux_blocks, known_configs
from qwenimg.common.request.request import Defaults

KIND = replace(
    flux_blocks.KIND,
    places={
        **flux_blocks.KIND.places,
        "modulation": "the embedding of the time, and every block's shift, scale and gate",
        "timestep": "the timestep and its sinusoids (switchable: `rounded` is what diffusers does in half precision)",
    },
)
"""The factors are FLUX.1's. Measured with random weights alone: that says what arithmetic costs, and nothing about how
large published weights make values."""


FAMILY = Family(
    name="ovis",
    title="Ovis-Image",
    pipelines=frozenset({"OvisImagePipeline"}),
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    open=OPENING.open,
    files=(
        whole_model("Ovis-Image", OPENING, FITS),
        PartFile(option="transformer", title="Ovis-Image's transformer", layouts=ovis_names.LAYOUTS),
        QWEN3,
        KL_VAE,
        TinyVAEFile(names=("taef1",)),
    ),
    model_of=lambda transformer, options: IMAGE.name,
    models={"": Ovis},
    small_files=lambda checkpoint: known_configs.small_files(IMAGE.name),
    defaults=lambda checkpoint: Defaults(**IMAGE.usual),
    tiny_vae=lambda checkpoint: "taef1",
    described=lambda folder: "Ovis-Image, text to image",
    training=TrainingRow(layers=flux_blocks.LEARNING),
)
