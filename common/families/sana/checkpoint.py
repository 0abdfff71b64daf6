"""Rows from which a SANA is opened: its networks, its noise levels, and the published model that one without
configurations is like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.opening import SCHEDULER, Opening, Source
from qwenimg.common.families.sana.known import SMALL_FILES, of_config, of_name
from qwenimg.common.networks.denoisers import sana_dit, sana_names
from qwenimg.common.networks.encoders import language_names
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import dc_vae, dc_vae_names
from qwenimg.common.parts import known_configs
from qwenimg.common.prompts import language
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import flow_solvers

NETWORKS: dict[str, Network] = {
    "transformer": sana_dit.NETWORK,
    "text_encoder": replace(language_names.GEMMA_2.network, stated={"taps": ()}),  # states behind the final norm
    "vae": dc_vae.NETWORK,
}
LAYOUTS = {
    "transformer": sana_names.LAYOUTS,
    "text_encoder": language_names.GEMMA_2,
    "vae": dc_vae_names.LAYOUTS,
}
FITS = (
    fits.text_states(
        lambda configs: configs["text_encoder"].state_size, lambda configs: configs["transformer"].caption_channels
    ),
    fits.LATENTS,
)


def known_of(source: Source) -> KnownModel:
    """Return the known model that a model is of, by the name of its transformer's file, or its own."""
    return of_name(display_name(source.given.get("transformer", source.path)))


def _levels(source: Source) -> Any:
    path = source.small_file(SCHEDULER)
    return flow_solvers.read_config(read_json(path, infinities=True), path)


def _complete(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the levels of its transformer's kind: its file may be given to a folder of another."""
    config, has = checkpoint["transformer"].config, isinstance(checkpoint.scheduler, flow_solvers.TrigFlowConfig)
    if config.guidance_embeds == has:
        return checkpoint
    return replace(checkpoint, scheduler=known_configs.scheduler(of_config(config).name))


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: known_of(source).name,
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES, language.load),
    levels=_levels,
    complete=_complete,
)
