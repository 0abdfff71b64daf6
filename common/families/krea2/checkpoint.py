"""Rows from which a Krea 2 is opened: its networks, whether it is distilled, and the published model that one without
configurations is like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.config import INDEX, read_json
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.krea2.known import SMALL_FILES, TURBO, of_name
from qwenimg.common.families.opening import Given, Opening, Source
from qwenimg.common.networks.denoisers import krea2_dit, krea2_names
from qwenimg.common.networks.encoders import language_names, qwen
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.parts import mflux
from qwenimg.common.runtime.checkpoint import Checkpoint

TAPS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
"""The layers of the text encoder behind which states are taken. Of its files only a model_index.json states them."""
MU = 1.15  # the shift that Turbo was distilled for, at every size


NETWORKS: dict[str, Network] = {
    "transformer": krea2_dit.NETWORK,
    "text_encoder": replace(qwen.QWEN3_VL, stated={"taps": TAPS}),
    "vae": qwen_vae.NETWORK,
}
LAYOUTS = {"transformer": krea2_names.LAYOUTS, "text_encoder": language_names.QWEN3_VL}
FITS = (
    fits.text_states(lambda configs: configs["text_encoder"].state_size, lambda configs: configs["transformer"].states),
    fits.patches(lambda configs: configs["vae"].z_dim * 4),
)


def is_distilled(index: Path) -> bool:
    """Return whether `index`, a model_index.json, is of a distilled model. Raises ModelError."""
    return read_json(index).get("is_distilled") is True


def distilled(checkpoint: Checkpoint, value: bool) -> Checkpoint:
    """Return a checkpoint that knows whether it is distilled, with the noise levels of that."""
    levels = replace(checkpoint.scheduler, base_shift=MU, max_shift=MU) if value else checkpoint.scheduler
    return replace(checkpoint, distilled=value, scheduler=levels)


def known_of(source: Source) -> KnownModel:
    """Return the known model that a model is of, by the name of its transformer's file, or its own."""
    return of_name(display_name(source.given.get("transformer", source.path)))


def _given(source: Source) -> Given:
    own = {} if source.in_one_file or not mflux.in_root(source.path) else {"transformer": source.path}
    return own | dict(source.options.parts)


def _complete(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    by_index = source.has_index and "transformer" not in source.given
    return distilled(checkpoint, is_distilled(source.path / INDEX) if by_index else known_of(source) is TURBO)


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: known_of(source).name,
    given=_given,
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES),
    complete=_complete,
)
