"""A Qwen-Image-2.1 folder in diffusers layout, with parts elsewhere or not: its configurations and load plans, all
checked before a weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.found_once import found_once
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.qwen_image_21.known import SMALL_FILES
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import qwen21_dit, qwen21_names
from qwenimg.common.networks.encoders import language_names, qwen3_vl, qwen3_vl_vision, vision_tower
from qwenimg.common.networks.encoders.qwen3_vl_vision import Qwen3VLVisionConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import qwen21_vae
from qwenimg.common.parts.components import find_config, open_component, open_tokenizer
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.parts.small_files import find_tokenizer
from qwenimg.common.parts.texts import towers
from qwenimg.common.parts.texts.towers import language_first
from qwenimg.common.prompts import qwen
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.sampling import flow_match
from qwenimg.common.weights.plan import LoadPlan, closed_on_failure

NETWORKS: dict[str, Network] = {
    "transformer": qwen21_dit.NETWORK,
    "text_encoder": qwen3_vl_vision.NETWORK,
    "vae": qwen21_vae.NETWORK,
}
LAYOUTS = {"transformer": qwen21_names.LAYOUTS, "text_encoder": language_names.QWEN3_VL}
FITS = (
    Fit(
        "the transformer wants text states of {} channels, the text encoder makes {}",
        lambda configs: configs["transformer"].context_in_dim,
        lambda configs: [configs["text_encoder"].state_size],
    ),
    Fit(
        "the transformer takes {} channels, the VAE's latents have {}",
        lambda configs: configs["transformer"].in_channels,
        lambda configs: [configs["vae"].z_dim],
    ),
)
SAMPLE_SIGMAS = "sample_sigmas"  # in model_index.json: noise levels that the model was distilled for


def open_folder(folder: Path, options: LoadOptions) -> Checkpoint:
    """Read every configuration and header of `folder` and check them against the manifests. Parts that `options` has
    elsewhere are read from there; one without a configuration has that of the model's own part. Raises ModelError and
    UsageError."""
    scheduler = folder / "scheduler" / "scheduler_config.json"
    places, tower = {name: options.part(name) or folder / name for name in NETWORKS}, options.part("text_encoder_2")
    if tower is not None:
        places["text_encoder"], tower = language_first(places["text_encoder"], tower, is_tower)
    networks = NETWORKS | {"text_encoder": text_encoder(places["text_encoder"], tower)}
    configs = {name: find_config(network, [places[name], folder / name]) for name, network in networks.items()}
    tokenizer = find_tokenizer(folder, options.tokenizer, SMALL_FILES)
    components = {}
    with closed_on_failure() as keep:
        for name, network in networks.items():
            components[name] = _opened(
                name, network, places[name], configs[name], tower, for_rewrite=options.for_rewrite
            )
            keep(components[name].plan)
    config = flow_match.read_config(read_json(scheduler), scheduler)
    fixed = sample_sigmas(folder / "model_index.json")
    return Checkpoint(
        source=folder,
        components=components,
        tokenizers={"text_encoder": open_tokenizer(tokenizer, qwen.load, configs["text_encoder"])},
        scheduler=replace(config, sample_sigmas=fixed),
        distilled=bool(fixed),
    )


def _opened(
    name: str, network: Network, place: Path, config: Any, tower: Path | None, *, for_rewrite: bool
) -> Component:
    """Open the part `name`, of the text encoder also the file of its vision `tower`. Raise ModelError."""
    if name not in LAYOUTS:
        return open_component(network, place, config, name, for_rewrite=for_rewrite)
    beside = tower if isinstance(config, Qwen3VLVisionConfig) else None
    layouts = replace(LAYOUTS[name], network=network)
    return open_part(layouts, place, config, name, for_rewrite=for_rewrite, beside=beside)


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


def text_encoder(place: Path, tower: Path | None = None) -> Network:
    """Return the network of the text encoder at `place`: with its vision tower if the files have it, or if `tower`, a
    file, is it. Raises ModelError."""
    if tower is not None:
        return qwen3_vl_vision.NETWORK
    for path in find_files(place).files:
        header = peek(path)
        if is_tower(header):
            raise bad(path, "is a vision tower alone: give its language model too, as a second --text-encoder FILE")
        if any((qwen3_vl_vision.rename(key) or "").startswith(vision_tower.PREFIX) for key in header.tensors):
            return qwen3_vl_vision.NETWORK
    return qwen3_vl.NETWORK


@found_once
def _without_tower(plan: LoadPlan) -> LoadPlan:
    return plan.only(lambda name: not name.startswith(vision_tower.PREFIX))


def without_tower(text: Component) -> Component:
    """Return the part of a text encoder that prompts without pictures need."""
    return replace(text, network=qwen3_vl.NETWORK.name, plan=_without_tower(text.plan))
