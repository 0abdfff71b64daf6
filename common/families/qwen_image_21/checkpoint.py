"""Rows from which a Qwen-Image-2.1 is opened: its networks, its vision tower, which may be in a file of its own, and
its noise levels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qwenimg.common.base.config import INDEX, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.opening import Given, Opening, Source
from qwenimg.common.families.qwen_image_21.known import SMALL_FILES, of_name
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import qwen21_dit, qwen21_names
from qwenimg.common.networks.encoders import language_names, qwen, qwen3_vl_vision, vision_tower
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import qwen21_vae
from qwenimg.common.parts.texts import towers
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import flow_match

NETWORKS: dict[str, Network] = {
    "transformer": qwen21_dit.NETWORK,
    "text_encoder": qwen3_vl_vision.NETWORK,
    "vae": qwen21_vae.NETWORK,
}
FITS = (
    fits.text_states(
        lambda configs: configs["text_encoder"].state_size, lambda configs: configs["transformer"].context_in_dim
    ),
    fits.Z_LATENTS,
)
_BLIND = NETWORKS | {"text_encoder": qwen.QWEN3_VL}
SAMPLE_SIGMAS = "sample_sigmas"  # in model_index.json: noise levels that the model was distilled for


def sample_sigmas(index: Path) -> tuple[float, ...]:
    """Return the noise levels in `index`, a model_index.json; () for a model without levels of its own. Raises
    ModelError."""
    value = read_json(index).get(SAMPLE_SIGMAS) or []
    try:
        if isinstance(value, list) and all(isinstance(level, int | float) for level in value):
            return flow_match.checked_levels(value)
        raise ModelError(f"is {clean(value, 60)}, expected a list of noise levels")
    except ModelError as error:
        raise bad(index, f"'{SAMPLE_SIGMAS}' {error}") from None


def is_tower(header: Header) -> bool:
    """Return whether a file with this header is the vision tower of Qwen3-VL alone, as llama.cpp has it."""
    return towers.is_tower(header, "qwen3vl_merger")


def _given(source: Source) -> Given:
    return towers.language_first(source.options.parts, source.path / towers.FIRST, is_tower)


def _networks(source: Source) -> dict[str, Network]:
    """Return the networks of a model: that of its text encoder is with its vision tower if the files have it. Raise
    ModelError."""
    return NETWORKS if towers.SECOND in source.given or _sees(source.place("text_encoder")) else _BLIND


def _sees(place: Path) -> bool:
    for path in find_files(place).files:
        header = peek(path)
        if is_tower(header):
            raise bad(path, "is a vision tower alone: give its language model too, as a second --text-encoder FILE")
        if any((qwen3_vl_vision.rename(key) or "").startswith(vision_tower.PREFIX) for key in header.tensors):
            return True
    return False


def _complete(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    """Return the model with the noise levels of its own."""
    fixed = sample_sigmas(source.small_file(INDEX))
    return replace(checkpoint, scheduler=replace(checkpoint.scheduler, sample_sigmas=fixed), distilled=bool(fixed))


OPENING = Opening(
    networks=NETWORKS,
    layouts={"transformer": qwen21_names.LAYOUTS, "text_encoder": language_names.QWEN3_VL},
    model=lambda source: of_name(display_name(source.path)).name,
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES),
    given=_given,
    networks_of=_networks,
    seeing=[qwen3_vl_vision.NETWORK],
    complete=_complete,
)
