"""Rows from which a FLUX.2 klein is opened: its networks, and the published model that one without configurations is
like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.families import tokenizers
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.flux2.known import SMALL_FILES
from qwenimg.common.families.opening import INDEX, Opening, Source
from qwenimg.common.networks.denoisers import flux2_dit, flux2_names
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.encoders import language_names, qwen3
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import flux2_vae, flux2_vae_names
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.open_file import stored_shape
from qwenimg.common.runtime.checkpoint import Checkpoint

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
    "text_encoder": language_names.QWEN3,
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


def _check_klein(path: Path, config: Any) -> None:
    """Raise ModelError for the transformer of FLUX.2 dev."""
    if isinstance(config, Flux2Config) and config.guidance_embeds:
        raise ModelError(
            f"{clean(path)}: the transformer is guidance-distilled (guidance_embeds), as FLUX.2 dev's is; "
            "FLUX.2 klein is supported"
        )


def _config(source: Source, part: str, config: Any) -> Any:
    _check_klein(source.path, config)
    return config


def _complete(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    _check_klein(source.path, checkpoint["transformer"].config)  # which the tensors of a file may have shown
    return replace(checkpoint, distilled=is_distilled(source.small_file(INDEX)))


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: model_of(source.path / "transformer"),
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES),
    config=_config,
    complete=_complete,
)
