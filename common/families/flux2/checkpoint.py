"""A Flux.2 klein folder in diffusers layout: its configurations and load plans, all checked before a weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, is_file
from qwenimg.common.base.text import clean
from qwenimg.common.families.choices import Choices
from qwenimg.common.families.flux2 import vae_file
from qwenimg.common.families.flux2.known import SMALL_FILES
from qwenimg.common.families.flux2.transformer_file import FILE
from qwenimg.common.networks.denoisers import flux2_dit
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.networks.encoders.qwen3 import Qwen3Config
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import flux2_vae
from qwenimg.common.networks.vaes.flux2_vae import Flux2VAEConfig
from qwenimg.common.parts.components import open_component, open_tokenizer, read_config
from qwenimg.common.parts.small_files import find_tokenizer
from qwenimg.common.prompts import qwen
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.sampling import flow_match
from qwenimg.common.weights.plan import closed_on_failure

TAPS = (9, 18, 27)
"""The layers of the text encoder behind which states are taken."""
NETWORKS: dict[str, Network] = {
    "transformer": flux2_dit.NETWORK,
    "text_encoder": qwen3.NETWORK,
    "vae": flux2_vae.NETWORK,
}


def open_folder(folder: Path, choices: Choices) -> Checkpoint:
    """Read every configuration and header of `folder` and check them against the manifests. Parts that `choices` has
    elsewhere are read from there; a file has the configuration of the model's own part. Raises ModelError and
    UsageError."""
    tokenizer = find_tokenizer(folder, choices.tokenizer, SMALL_FILES)
    index, scheduler = folder / "model_index.json", folder / "scheduler" / "scheduler_config.json"
    distilled = is_distilled(index)
    configs: dict[str, Any] = {name: read_config(network, folder / name) for name, network in NETWORKS.items()}
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
        scheduler=flow_match.read_config(read_json(scheduler), scheduler),
        distilled=distilled,
    )


def _open_part(name: str, path: Path, own: Any, whole: bool) -> Component:
    """Open one of NETWORKS from a folder or file. `own`: the configuration of the model's own. Raise ModelError."""
    if name == "transformer":
        return FILE.open(path, own, whole=whole)
    if name == "vae":
        return vae_file.open_vae(path, own, whole=whole)
    network = NETWORKS[name]
    config = read_config(network, path) if is_file(path / "config.json") else own
    return open_component(network, path, with_taps(path, config), name, whole=whole)


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
