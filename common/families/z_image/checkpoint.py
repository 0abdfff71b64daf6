"""A Z-Image folder in diffusers layout, or as mflux saves it, with parts elsewhere: its configurations and load plans,
all checked before a weight is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from qwenimg.common.base.config import data_folder, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.z_image.known import SMALL_FILES, TURBO, of_name
from qwenimg.common.networks.denoisers import zimage_dit, zimage_names
from qwenimg.common.networks.encoders import language_names, qwen3
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts import known_configs, merged_file
from qwenimg.common.parts.components import find_config, open_tokenizer
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.parts.small_files import find_tokenizer
from qwenimg.common.prompts import qwen
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.sampling import flow_match
from qwenimg.common.sampling.flow_match import FlowMatchConfig
from qwenimg.common.weights.plan import closed_on_failure

NETWORKS = {"transformer": zimage_dit.NETWORK, "text_encoder": qwen3.NETWORK, "vae": kl_vae.NETWORK}
LAYOUTS = {
    "transformer": zimage_names.LAYOUTS,
    "text_encoder": language_names.QWEN3,
    "vae": kl_vae_names.LAYOUTS,
}

FITS = (
    Fit(
        "the transformer wants text states of {} channels, the text encoder makes {}",
        lambda configs: configs["transformer"].cap_feat_dim,
        lambda configs: [configs["text_encoder"].hidden_size],
    ),
    Fit(
        "the transformer takes {} channels, the VAE's latents have {}",
        lambda configs: configs["transformer"].in_channels,
        lambda configs: [configs["vae"].latent_channels],
    ),
)
_SCHEDULER = "scheduler/scheduler_config.json"


def open_folder(folder: Path, options: LoadOptions) -> Checkpoint:
    """Read every configuration and header of `folder`, or of the file of a whole model, and check them against the
    manifests. Parts that `options` has elsewhere are read from there. Raises ModelError and UsageError."""
    has_index = is_file(folder / "model_index.json")
    tokenizer = find_tokenizer(folder, options.tokenizer, SMALL_FILES)
    components = open_parts(folder, options)
    with closed_on_failure() as keep:
        for part in components.values():
            keep(part.plan)
        return Checkpoint(
            source=folder,
            components=components,
            tokenizers={"text_encoder": open_tokenizer(tokenizer, qwen.load, components["text_encoder"].config)},
            scheduler=_scheduler(folder, has_index=has_index),
        )


def open_parts(folder: Path, options: LoadOptions | None = None) -> dict[str, Component]:
    """Open the parts of the model in `folder`, or in one file, or from where `options` has them. Raises ModelError."""
    options, components = options or LoadOptions(), {}
    if is_file(folder):
        merged_file.check_parts(folder, options.parts)
    with closed_on_failure() as keep:
        for name in NETWORKS:
            components[name] = _opened(name, folder, options, published=not is_file(folder / "model_index.json"))
            keep(components[name].plan)
    return components


def purpose(folder: Path) -> str:
    """Return the model in `folder`, which the shift of its noise levels tells, and its purpose."""
    try:
        levels = _scheduler(folder, has_index=is_file(folder / "model_index.json"))
    except ModelError:  # opening the folder says why
        return "Z-Image, text to image"
    return f"{'Z-Image-Turbo' if is_turbo(levels) else 'Z-Image'}, text to image"


def is_turbo(levels: FlowMatchConfig) -> bool:
    """Return whether `levels` are the noise levels of Turbo: nothing else in its files tells it from the base model."""
    return bool(levels.shift == known_configs.scheduler(TURBO.name).shift)


def _opened(name: str, folder: Path, options: LoadOptions, *, published: bool) -> Component:
    """Open one part, from its place in `options` or from `folder`, which may have the published configurations alone.
    Raise ModelError."""
    network, elsewhere, merged = NETWORKS[name], options.part(name), is_file(folder)
    place = elsewhere or (folder if merged else folder / name)
    known = partial(known_configs.read, TURBO.name, name, network)
    config = find_config(network, [place, folder / name], known if published else None)
    return open_part(LAYOUTS[name], place, config, name, for_rewrite=options.for_rewrite)


def _scheduler(folder: Path, *, has_index: bool) -> FlowMatchConfig:
    """Return the noise levels of the model in `folder`; of one without a configuration, those of its name. Raise
    ModelError."""
    path = folder / _SCHEDULER
    if not has_index and not is_file(path):
        path = data_folder(of_name(display_name(folder)).name) / _SCHEDULER
    return flow_match.read_config(read_json(path), path)
