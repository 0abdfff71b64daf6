"""A Z-Image folder in diffusers layout: its configurations and load plans, all checked before a weight is read."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.families.choices import Choices
from qwenimg.common.networks import kl_vae, qwen3, zimage_dit
from qwenimg.common.networks.kl_vae import KLVAEConfig
from qwenimg.common.networks.qwen3 import Qwen3Config
from qwenimg.common.networks.zimage_dit import ZImageConfig
from qwenimg.common.parts.components import open_component, open_tokenizer, read_config
from qwenimg.common.prompts import qwen
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import flow_match
from qwenimg.common.weights.plan import closed_on_failure

_NETWORKS = {"transformer": zimage_dit.NETWORK, "text_encoder": qwen3.NETWORK, "vae": kl_vae.NETWORK}


def open_folder(folder: Path, choices: Choices) -> Checkpoint:
    """Read every configuration and header of `folder` and check them against the manifests. Raises ModelError."""
    configs = {name: read_config(network, folder / name) for name, network in _NETWORKS.items()}
    _check_fit(folder, configs["transformer"], configs["text_encoder"], configs["vae"])
    scheduler = folder / "scheduler" / "scheduler_config.json"
    components = {}
    with closed_on_failure() as keep:
        for name, network in _NETWORKS.items():
            components[name] = open_component(network, folder / name, configs[name], name, whole=choices.whole)
            keep(components[name].plan)
    return Checkpoint(
        source=folder,
        components=components,
        tokenizers={"text_encoder": open_tokenizer(folder / "tokenizer", qwen.load, configs["text_encoder"])},
        scheduler=flow_match.read_config(read_json(scheduler), scheduler),
    )


def _check_fit(folder: Path, dit: ZImageConfig, text: Qwen3Config, vae: KLVAEConfig) -> None:
    """Check that the components of a folder belong together. Raise ModelError."""
    if dit.cap_feat_dim != text.hidden_size:
        raise ModelError(
            f"{clean(folder)}: the transformer wants text states of {dit.cap_feat_dim} channels, the text encoder "
            f"makes {text.hidden_size}"
        )
    if dit.in_channels != vae.latent_channels:
        raise ModelError(
            f"{clean(folder)}: the transformer takes {dit.in_channels} channels, the VAE's latents have "
            f"{vae.latent_channels}"
        )
