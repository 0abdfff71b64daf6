"""A Flux.2 klein folder in diffusers layout, or as mflux saves it: its configurations and load plans, all checked
before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import data_folder, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import bad, is_file
from qwenimg.common.base.text import clean
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.flux2.known import SMALL_FILES
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.networks.denoisers import flux2_dit, flux2_names
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.encoders import language_names, qwen3
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import flux2_vae, flux2_vae_names
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import find_config, open_tokenizer
from qwenimg.common.parts.open_file import open_part, stored_shape
from qwenimg.common.parts.small_files import find_tokenizer
from qwenimg.common.prompts import qwen
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import flow_match
from qwenimg.common.sampling.flow_match import FlowMatchConfig
from qwenimg.common.weights.plan import closed_on_failure

TAPS = (9, 18, 27)
"""The layers of the text encoder behind which states are taken. No file of a model states them."""


def _with_taps(data: Mapping[str, Any]) -> dict[str, Any]:
    return qwen3.fields(data) | {"taps": TAPS}


NETWORKS: dict[str, Network] = {
    "transformer": flux2_dit.NETWORK,
    "text_encoder": replace(qwen3.NETWORK, fields=_with_taps),
    "vae": flux2_vae.NETWORK,
}
LAYOUTS = {
    "transformer": flux2_names.LAYOUTS,
    "text_encoder": replace(language_names.QWEN3, network=NETWORKS["text_encoder"]),
    "vae": flux2_vae_names.LAYOUTS,
}
FITS = (
    Fit(
        "the transformer wants text states of {} channels, the text encoder makes {}",
        lambda configs: configs["transformer"].joint_attention_dim,
        lambda configs: [configs["text_encoder"].state_size],
    ),
    Fit(
        "the transformer takes {} channels, the VAE's latents have {} in patches",
        lambda configs: configs["transformer"].in_channels,
        lambda configs: [configs["vae"].patch_channels],
    ),
)
_SCHEDULER = "scheduler/scheduler_config.json"


def open_folder(folder: Path, options: LoadOptions) -> Checkpoint:
    """Read every configuration and header of `folder` and check them against the manifests. Parts that `options` has
    elsewhere are read from there; a file has the configuration of the model's own part. Raises ModelError and
    UsageError."""
    tokenizer = find_tokenizer(folder, options.tokenizer, SMALL_FILES)
    index = folder / "model_index.json"
    known = None if is_file(index) else model_of(folder / "transformer")
    distilled = is_distilled(index if known is None else data_folder(known) / index.name)
    configs = {name: _config(folder / name, known) for name in NETWORKS}
    _check_klein(folder, configs["transformer"])
    with closed_on_failure() as keep:
        components = {}
        for name in NETWORKS:
            place = options.part(name) or folder / name
            components[name] = open_part(LAYOUTS[name], place, configs[name], name, for_rewrite=options.for_rewrite)
            keep(components[name].plan)
        _check_klein(folder, components["transformer"].config)  # which may be from elsewhere
    return Checkpoint(
        source=folder,
        components=components,
        tokenizers={"text_encoder": open_tokenizer(tokenizer, qwen.load, components["text_encoder"].config)},
        scheduler=_scheduler(folder, known),
        distilled=distilled,
    )


def _config(folder: Path, known: str | None) -> Any:
    """Return the configuration of the part in `folder`, or that of the `known` model. Raise ModelError."""
    name, network = folder.name, NETWORKS[folder.name]
    return find_config(network, [folder], partial(known_configs.read, known, name, network) if known else None)


def _scheduler(folder: Path, known: str | None) -> FlowMatchConfig:
    """Return the noise levels of the model in `folder`, or those of the `known` model. Raise ModelError."""
    path = folder / _SCHEDULER
    if known is not None and not is_file(path):
        path = data_folder(known) / _SCHEDULER
    return flow_match.read_config(read_json(path), path)


def model_of(transformer: Path) -> str:
    """Return the name of the published model that the transformer in a folder or file is of: of the size that its width
    is nearer to, and distilled unless its name says `base`. Raises ModelError."""
    models = (known_configs.read(f"flux2-klein-{size}", "transformer", flux2_dit.NETWORK) for size in ("4b", "9b"))
    small, large = (model.dim for model in models)
    width, *_ = stored_shape(LAYOUTS["transformer"], transformer, "x_embedder.weight") or (small,)
    size = "4b" if width - small < large - width else "9b"
    return f"flux2-klein-{'base-' if 'base' in display_name(transformer).lower() else ''}{size}"


def is_distilled(index: Path) -> bool:
    """Return whether the model of `index`, a model_index.json, draws in few steps without guidance. Raises
    ModelError."""
    value = read_json(index).get("is_distilled", False)
    if not isinstance(value, bool):
        raise bad(index, f"'is_distilled' is {clean(value, 40)}; expected true or false")
    return value


def _check_klein(folder: Path, dit: Flux2Config) -> None:
    """Raise ModelError for the transformer of FLUX.2 dev."""
    if dit.guidance_embeds:
        raise ModelError(
            f"{clean(folder)}: the transformer is guidance-distilled (guidance_embeds), as FLUX.2 dev's is; "
            "FLUX.2 klein is supported"
        )
