"""Z-Image as a row of data."""

from __future__ import annotations

import re

from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families.family import ControlFiles, Family
from qwenimg.common.families.part_file import KL_VAE, QWEN3, PartFile, TinyVAEFile, whole_model
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.families.z_image import control
from qwenimg.common.families.z_image.checkpoint import FITS, NETWORKS, OPENING, is_turbo, purpose
from qwenimg.common.families.z_image.known import BASE, TURBO, of_name
from qwenimg.common.families.z_image.model import ZImage
from qwenimg.common.networks.denoisers import zimage_control, zimage_control_names, zimage_dit, zimage_names
from qwenimg.common.parts import known_configs
from qwenimg.common.precision.precision import ROTARY_PLACES, DenoiserKind
from qwenimg.common.request.request import Defaults

KIND = DenoiserKind(
    denoiser="transformer",
    places={
        "modulation": "the timestep embedding and every block's scale and gate",
        **ROTARY_PLACES,
        "final_norm": "final_layer, its modulation included; the prediction stays float32 for the sampler (switchable)",
        "residual": "the residual streams of transformer and text encoder, from the embedders and pad tokens on",
    },
    bases=("fp32", "bf16", "bf16-plain"),
    prefers=("bf16",),
    keys={
        "final_norm": re.compile(r"final_layer\."),
        "residual": re.compile(r"((control_)?x_embedder|cap_embedder\.1|x_pad_token|cap_pad_token)\."),
        "modulation": re.compile(r"t_embedder\.|.*\.adaLN_modulation\."),  # made in every step
    },
    refused={"float16": "Z-Image's activations exceed float16"},
)


FAMILY = Family(
    name="z-image",
    title="Z-Image",
    pipelines=frozenset({"ZImagePipeline"}),
    refused={"ZImage": "is a Z-Image model that edits images: this version makes them from text, and under --control"},
    precision=KIND,
    parts=NETWORKS,
    fits=FITS,
    open=OPENING.open,
    files=(
        PartFile(
            option="control",
            title="a control network for Z-Image",
            network=zimage_control.NETWORK,
            is_in=lambda header: zimage_control_names.LAYOUTS.find_in(header) is not None,
            use="-m MODEL --control FILE=PICTURE",
        ),
        whole_model("Z-Image", OPENING, FITS),
        PartFile(
            option="transformer",
            title="Z-Image's transformer",
            layouts=zimage_names.LAYOUTS,
            like=lambda: known_configs.read(TURBO.name, "transformer", zimage_dit.NETWORK),
        ),
        QWEN3,
        KL_VAE,
        TinyVAEFile(names=("taef1",)),
    ),
    model_of=lambda transformer, options: of_name(display_name(transformer)).name,
    models={"": ZImage},
    control=ControlFiles(open=control.open_control, networks=(zimage_control.NETWORK,), published=control.published),
    defaults=lambda checkpoint: Defaults(**(TURBO if is_turbo(checkpoint.scheduler) else BASE).usual),
    tiny_vae=lambda checkpoint: "taef1",
    described=purpose,
    small_files=lambda checkpoint: known_configs.small_files(BASE.name, shift=checkpoint.scheduler.shift),
    training=TrainingRow(layers=re.compile(r"layers\.\d+\.(?:attention|feed_forward)\..+"), guidance=0.0),
)
