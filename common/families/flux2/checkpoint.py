"""A Flux.2 klein folder in diffusers layout, or as mflux saves it: its configurations and load plans, all checked
before a weight is read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families.choices import Choices
from qwenimg.common.families.flux2 import mflux, vae_file
from qwenimg.common.families.flux2.known import SMALL_FILES
from qwenimg.common.families.flux2.networks import NETWORKS, TAPS
from qwenimg.common.families.flux2.published import Klein, model_of, variants
from qwenimg.common.families.flux2.small_files import SCHEDULER
from qwenimg.common.families.flux2.transformer_file import FILE
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config
from qwenimg.common.networks.vaes.flux2_vae import Flux2VAEConfig
from qwenimg.common.parts.components import find_config, open_component, open_tokenizer
from qwenimg.common.parts.small_files import find_tokenizer
from qwenimg.common.prompts import qwen
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.sampling import flow_match
from qwenimg.common.sampling.flow_match import FlowMatchConfig
from qwenimg.common.weights.plan import closed_on_failure


def open_folder(folder: Path, choices: Choices) -> Checkpoint:
    """Read every configuration and header of `folder` and check them against the manifests. Parts that `choices` has
    elsewhere are read from there; a file has the configuration of the model's own part. Raises ModelError and
    UsageError."""
    tokenizer = find_tokenizer(folder, choices.tokenizer, SMALL_FILES)
    index = folder / "model_index.json"
    known = None if is_file(index) else variants()[model_of(folder / "transformer")]
    distilled = is_distilled(index) if known is None else known.distilled
    published = {name: None if known is None else partial(_published, name, known) for name in NETWORKS}
    configs = {name: find_config(network, [folder / name], published[name]) for name, network in NETWORKS.items()}
    configs["text_encoder"] = with_taps(folder / "text_encoder" / "config.json", configs["text_encoder"])
    check_fit(folder, *(configs[name] for name in NETWORKS))
    with closed_on_failure() as keep:
        components = {}
        for name in NETWORKS:
            components[name] = _open_part(name, choices.part(name) or folder / name, configs[name], choices.whole)
            keep(components[name].plan)
        dit, text, vae = (components[name].config for name in NETWORKS)
        check_fit(folder, dit, text, vae)  # with parts from elsewhere
    return Checkpoint(
        source=folder,
        components=components,
        tokenizers={"text_encoder": open_tokenizer(tokenizer, qwen.load, text)},
        scheduler=_scheduler(folder, published=known is not None),
        distilled=distilled,
    )


def _published(name: str, known: Klein) -> Any:
    """Return the configuration of a part of the `known` model."""
    return {"transformer": known.transformer, "text_encoder": known.text_encoder, "vae": Flux2VAEConfig()}[name]


def _scheduler(folder: Path, *, published: bool) -> FlowMatchConfig:
    """Return the noise levels of the model in `folder`, or the published ones. Raise ModelError."""
    path = folder / "scheduler" / "scheduler_config.json"
    return flow_match.read_config(SCHEDULER if published and not is_file(path) else read_json(path), path)


def _open_part(name: str, path: Path, own: Any, whole: bool) -> Component:
    """Open one of NETWORKS from a folder or file. `own`: the configuration of the model's own. Raise ModelError."""
    if name == "transformer" and not is_folder(path):
        return FILE.open(path, own, whole=whole)
    if name == "vae" and not is_folder(path):
        return vae_file.open_vae(path, own, whole=whole)
    network = NETWORKS[name]
    config = find_config(network, [path], lambda: own)
    if name == "text_encoder":
        config = with_taps(path, config)
    marker = mflux.CHANNELS_LAST if name == "vae" else ""
    return open_component(network, path, config, name, mflux.RENAMES[name], channels_last=marker, whole=whole)


def is_distilled(index: Path) -> bool:
    """Return whether the model of `index`, a model_index.json, draws in few steps without guidance. Raises
    ModelError."""
    value = read_json(index).get("is_distilled", False)
    if not isinstance(value, bool):
        raise bad(index, f"'is_distilled' is {clean(value, 40)}; expected true or false")
    return value


def with_taps(path: Path, config: Qwen3Config) -> Qwen3Config:
    """Return `config` with the layers behind which states are taken. Raises ModelError."""
    try:
        return replace(config, taps=TAPS)
    except ModelError as error:
        raise ModelError(f"{clean(path)}: {error}") from None


def check_fit(folder: Path, dit: Flux2Config, text: Qwen3Config, vae: Flux2VAEConfig) -> None:
    """Check that the components of a folder belong together. Raise ModelError."""
    if dit.guidance_embeds:
        raise ModelError(
            f"{clean(folder)}: the transformer is told the guidance (guidance_embeds), as FLUX.2 dev's is; "
            "FLUX.2 klein is supported"
        )
    if dit.joint_attention_dim != text.state_size:
        raise ModelError(
            f"{clean(folder)}: the transformer wants text states of {dit.joint_attention_dim} channels, the text "
            f"encoder makes {len(TAPS)} times {text.hidden_size}"
        )
    if dit.in_channels != vae.patch_channels:
        raise ModelError(
            f"{clean(folder)}: the transformer takes {dit.in_channels} channels, the VAE's latents have "
            f"{vae.patch_channels} in patches"
        )
