"""FLUX.3 Image Klein as a row of data."""

from __future__ import annotations

import re
from pathlib import Path

from qwenimg.common.base.config import model_index, read_json
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.family import Family
from qwenimg.common.families.flux3 import references
from qwenimg.common.families.flux3.checkpoint import FITS, LAYOUTS, NETWORKS, OPENING, distilled, model_of
from qwenimg.common.families.flux3.known import BASE, KLEIN, LICENSE
from qwenimg.common.families.flux3.model import Flux3
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.part_file import FLUX_2_VAE, QWEN3_VL, PartFile, TinyVAEFile
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.networks.denoisers.flux3_dit import Flux3Config
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import ROTARY_PLACES, DenoiserKind, block_scales
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint

_BASE, _DISTILLED = "Flux3ModularPipeline", "Flux3DistilledModularPipeline"
_BLOCKS = r"(?:mode_blocks\.\w+|txt_mode_blocks|single_transformer_blocks)\.\d+\."
KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "final_norm": "norm_out, its modulation, proj_out; the prediction stays float32 for the sampler (switchable)",
        "modulation": "the embeddings of times and the shift, scale and gate of all blocks",
        "residual": "the residual streams of transformer and text encoder, from x_embedders and context_embedder on",
        **ROTARY_PLACES,
    },
    prefers=("bf16", "fp16"),
    without_units="fp16-upcast",
    keys={
        "final_norm": re.compile(r"(norm_out|proj_out)\."),
        "residual": re.compile(r"(x_embedders\.\w+|context_embedder)\."),
        "modulation": re.compile(r"(target_)?timestep_embedder\.|(early|single)_stream_modulations"),
    },
    scales=block_scales(_BLOCKS + r"attn\.", _BLOCKS + r"ff\.linear_(in|out)"),
    in_4_bits="by others' measurements this model draws grain and other designs in 4 bits, and neither in 6: -q 6",
)
"""Under fp16 the streams are float32, and products are scaled by FLUX.2's factors. Measured with random weights alone:
that says what arithmetic costs, and nothing about how large published weights make values."""


def _like(checkpoint: Checkpoint) -> KnownModel:
    return KLEIN if checkpoint.distilled else BASE


def _variant(path: Path, config: Flux3Config) -> str:
    """Return the published model that a transformer is of."""
    return KLEIN.title if config.flow_map else BASE.title


def _not_trained(checkpoint: Checkpoint) -> str:
    return f"{KLEIN.name} is distilled: train {BASE.name}, whose LoRAs it takes too" if checkpoint.distilled else ""


def _described(folder: Path) -> str:
    index = model_index(folder)  # a folder of mflux has none
    named = is_file(index) and read_json(index).get("_class_name") == _BASE
    base = " base" if named or (not is_file(index) and model_of(folder / "transformer") == BASE.name) else ""
    return f"FLUX.3 Image Klein{base}, text and reference images to image; license: {LICENSE}"


FAMILY = Family(
    name="flux3",
    title="FLUX.3 Image Klein",
    pipelines=frozenset({_BASE, _DISTILLED}),
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    published=lambda checkpoint, folder: distilled(checkpoint),
    open=OPENING.open,
    files=(
        PartFile(option="transformer", title="FLUX.3's transformer", layouts=LAYOUTS["transformer"], variant=_variant),
        FLUX_2_VAE,
        QWEN3_VL,
        TinyVAEFile(names=("taef2",)),
    ),
    model_of=lambda transformer, options: model_of(transformer),
    models={"": Flux3},
    # an image is a reference, and the run starts from noise
    defaults=lambda checkpoint: Defaults(
        **_like(checkpoint).usual, strength=1.0, mask_strength=0.8, fitted=references.fitted
    ),
    tiny_vae=lambda checkpoint: "taef2",
    described=_described,
    small_files=lambda checkpoint: known_configs.small_files(_like(checkpoint).name),
    training=TrainingRow(
        # no blocks of references, which a picture to learn from does not have
        layers=re.compile(r"(?:mode_blocks\.image|txt_mode_blocks|single_transformer_blocks)\.\d+\.(?:attn|ff)\..+"),
        refusal=_not_trained,
    ),
)
