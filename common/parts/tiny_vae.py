"""A tiny VAE in a folder or in files: both halves in one, or each in a file of its own beside the other.

A file is safetensors, or what `torch.save` writes. Its tensors show the network and the latents' channels, and not
which model's latents they are: that is in the file's name alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.config import parse, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import cached_name
from qwenimg.common.base.safe_files import absolute, bad, closed_on_error, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import open_weights
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import tiny_vae, tiny_vae_names, tiny_video_vae
from qwenimg.common.networks.vaes.tiny_vae import TinyVAEConfig
from qwenimg.common.networks.vaes.tiny_vae_names import HALVES, IGNORED, TinyModel
from qwenimg.common.networks.vaes.tiny_video_vae import TinyVideoVAEConfig
from qwenimg.common.parts.components import component, read_config
from qwenimg.common.parts.open_file import check_known
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import Place, plan_places
from qwenimg.common.weights.plan import closed_on_failure, stored_uses

NETWORKS = (tiny_vae.NETWORK, tiny_video_vae.NETWORK)
SUFFIXES = (".safetensors", ".pth", ".pt")
MOST_FILES = 1000  # of a folder, that are looked at
_HALF = re.compile("encoder|decoder", re.IGNORECASE)


def is_tiny(part: Component) -> bool:
    """Return whether a VAE is a tiny one."""
    return part.network in {network.name for network in NETWORKS}


def has_encoder(part: Component) -> bool:
    """Return whether the encoder of a VAE is here."""
    return any(name.startswith("encoder.") for name in part.plan.entries)


def is_tiny_at(path: Path) -> bool:
    """Return whether a tiny VAE is in the folder or file `path`; False for one that cannot be read."""
    try:
        if not is_folder(path):
            return is_file(path) and _is_tiny_file(path)
        config = path / "config.json"
        if is_file(config):
            return read_json(config).get("_class_name") == tiny_vae.CLASS_NAME
        return not is_file(path / "model_index.json") and next(_tiny_files(path), None) is not None
    except ModelError:
        return False


def is_in(header: Header) -> bool:
    """Return whether a file with this header has a tiny VAE, or a half of one."""
    return tiny_vae_names.is_video(header.tensors) or tiny_vae_names.find_layout(header.tensors) is not None


def _is_tiny_file(path: Path) -> bool:
    header = open_weights(path)
    with closing(header.file):
        return is_in(header)


def _tiny_files(folder: Path) -> Iterator[Path]:
    """Yield the files of tiny VAEs in a folder. Files that cannot be read are left out."""
    try:
        entries = sorted(islice(folder.iterdir(), MOST_FILES))
    except OSError:
        return
    for path in entries:
        try:
            if path.suffix.lower() in SUFFIXES and is_file(path) and _is_tiny_file(path):
                yield path
        except ModelError:
            continue


# Opening


def open_tiny(path: Path, patch: int = 1) -> Component:
    """Open the tiny VAE in the folder or file `path`, with its other half in the file beside it. patch: of the
    sampler's latents. Raises ModelError."""
    if not is_folder(path):
        return _open_files(_with_half_beside(path), patch, None)
    if is_file(path / "config.json"):
        return _open_files(list(find_files(path).files), patch, read_config(tiny_vae.NETWORK, path))
    files = list(_tiny_files(path))
    if not files:
        raise bad(path, "holds no file of a tiny VAE")
    if len(files) > 2 or (len(files) == 2 and _other_half(files[0]) != files[1]):
        raise bad(path, f"holds {len(files)} files of tiny VAEs: give the one to use")
    return _open_files(files, patch, None)


def _with_half_beside(path: Path) -> list[Path]:
    """Return a file, and the one beside it with its other half if it has one half alone."""
    header = open_weights(path)
    with closing(header.file):
        layout = tiny_vae_names.find_layout(header.tensors)
        alone = layout is not None and len(layout.halves(header.tensors)) == 1
    other = _other_half(path) if alone else None
    return [path] if other is None else [path, other]


def _other_half(path: Path) -> Path | None:
    """Return the file of the other half beside `path`, by its name; None if there is none."""
    match = _HALF.search(path.stem)
    if match is None:
        return None
    word = HALVES[1 - HALVES.index(match[0].lower())]
    stem = f"{path.stem[: match.start()]}{word}{path.stem[match.end() :]}"
    for suffix in dict.fromkeys((path.suffix, *SUFFIXES)):
        other = path.with_name(stem + suffix)
        try:
            if is_file(other) and _is_tiny_file(other):
                return other
        except ModelError:
            continue
    return None


def _open_files(paths: list[Path], patch: int, config: TinyVAEConfig | None) -> Component:
    """Open a tiny VAE in one file, or its halves in two. Raises ModelError."""
    with closed_on_failure() as keep:
        parts = []
        for path in paths:
            parts.append(_open_file(path, patch, config))
            keep(parts[-1].plan)
        first, *others = parts
        for other in others:
            first = _joined(paths[-1], first, other)
    if not any(name.startswith("decoder.") for name in first.plan.entries):
        raise bad(paths[0], "is the encoder of a tiny VAE alone: put its decoder's file beside it, or give that")
    return first


def _joined(path: Path, first: Component, second: Component) -> Component:
    """Return both halves of a tiny VAE as one. Raises ModelError if they do not belong together."""
    latents = [one.config.latent_channels for one in (first, second)]
    if latents[0] != latents[1] or first.plan.entries.keys() & second.plan.entries.keys():
        raise bad(path, f"is no other half of its neighbour: latents of {latents[1]} channels, and {latents[0]} there")
    encoder, decoder = sorted((first, second), key=has_encoder, reverse=True)
    fields = {name: getattr(encoder.config, name) for name in ("encoder_block_out_channels", "num_encoder_blocks")}
    try:
        config = replace(decoder.config, **fields, pooled=encoder.config.pooled or decoder.config.pooled)
    except ModelError as error:
        raise bad(path, str(error)) from None
    plan = replace(
        decoder.plan,
        entries=encoder.plan.entries | decoder.plan.entries,
        files=(*encoder.plan.files, *decoder.plan.files),
        known=encoder.plan.known | decoder.plan.known,
    )
    return component(tiny_vae.NETWORK, config, plan)


def _open_file(path: Path, patch: int, config: TinyVAEConfig | None) -> Component:
    header = open_weights(path)
    with closed_on_error(header.file):
        names = header.tensors
        network, made = _config(header)
        if network is tiny_video_vae.NETWORK:
            manifest = network.manifest(made)
            if not any(name.startswith("encoder.") for name in names):
                manifest = {name: shape for name, shape in manifest.items() if name.startswith("decoder.")}
            places = {name: Place(name) for name in manifest}
        else:
            layout = tiny_vae_names.find_layout(names)
            assert layout is not None, path
            halves = layout.halves(names)
            made = replace(config or made, patch=patch, pooled=made.pooled)
            manifest = {n: s for n, s in network.manifest(made).items() if n.startswith(tuple(f"{h}." for h in halves))}
            places = {name: Place(layout.stored(name)) for name in manifest}
        plan = plan_places(header, "tiny VAE", places, manifest, stored_uses(manifest))
        check_known(path, [key for key in names if key not in plan.known and key not in IGNORED], "a tiny VAE")
    return component(network, made, plan)


def _config(header: Header) -> tuple[Network, Any]:
    """Return the network of an open file, and the configuration that its shapes show. Raises ModelError."""
    shapes, path = {name: tensor.shape for name, tensor in header.tensors.items()}, header.file.path
    if tiny_vae_names.is_video(shapes):
        fields = tiny_vae_names.video_config_of(shapes)
        return tiny_video_vae.NETWORK, parse(TinyVideoVAEConfig, fields, source=path)
    layout = tiny_vae_names.find_layout(shapes)
    if layout is None:
        raise bad(path, "holds no tiny VAE: expected the names of TAESD or TAEHV, or diffusers'")
    return tiny_vae.NETWORK, parse(TinyVAEConfig, tiny_vae_names.config_of(layout, shapes), source=path)


# The model whose latents it takes


def model_named(path: Path) -> TinyModel | None:
    """Return the published tiny VAE that the folder or file `path` is by its name, or None."""
    return tiny_vae_names.model_named(_name(path))


def _name(path: Path) -> str:
    """Return the part of a path that may have a tiny VAE's name: of a folder in the cache the repository's, of a file
    with a plain name its folder's."""
    place = absolute(path)
    own = place.stem if tiny_vae_names.model_named(place.stem) or tiny_vae_names.other_named(place.stem) else ""
    return own or cached_name(place) or (place.name if is_folder(place) else place.parent.name)


def title(config: Any) -> str:
    """Return the title of a tiny VAE, for `info` and messages: what its tensors show."""
    return f"a tiny VAE ({kind(config)}) for latents of {config.latent_channels} channels"


def kind(config: Any) -> str:
    return "TAEHV" if isinstance(config, TinyVideoVAEConfig) else "TAESD"


def of_models(config: Any) -> str:
    """Return the models that have such latents by their channels, for a message."""
    return " or ".join(f"{one.models} ({one.name})" for one in tiny_vae_names.models_of(config)) or "no model here"


def check_sizes(path: Path, config: Any, own: Any) -> None:
    """Raise ModelError if the latents of a tiny VAE are not those of the model's `own`, by its configuration."""
    channels = getattr(own, "latent_channels", None) or own.z_dim
    listed = "`qwenimg models` lists the tiny VAEs by their models"
    if getattr(own, "input_channels", 3) != 3:
        raise bad(path, "is a tiny VAE of pictures without alpha, and the model's have alpha: leave --vae out")
    if config.latent_channels != channels:
        raise bad(path, f"is {title(config)}, and those of the model have {channels}: {listed}")
    if config.scale != own.scale:
        raise bad(path, f"makes {config.scale} pixels a side of each latent, and the model's VAE {own.scale}: {listed}")


def patch_of(own: Any) -> int:
    """Return the patch of the sampler's latents, by the configuration of the model's own VAE."""
    patch = getattr(own, "patch", None) or getattr(own, "patch_size", None) or 1
    return int(patch) if isinstance(patch, int) else int(patch[0])


def check(path: Path, part: Component, wanted: str) -> None:
    """Raise ModelError if the tiny VAE from `path` is of another model's latents. wanted: the name of the published one
    of the model."""
    model = next(one for one in tiny_vae_names.MODELS if one.name == wanted)
    give = f"for {model.models} give {wanted} (qwenimg pull {wanted})"
    pooled = getattr(part.config, "pooled", False)
    if part.network != model.network.name or pooled != model.pooled:
        raise bad(path, f"is {title(part.config)}, another network: {give}")
    named, other = model_named(path), tiny_vae_names.other_named(_name(path))
    if other is not None or (named is not None and named is not model):
        of = other or (named and named.models)
        raise bad(path, f"is by its name the tiny VAE of {of}: {give}; rename it if the name is wrong, for its tensors "
                  "do not show which it is")  # fmt: skip


def note(path: Path, config: Any) -> str | None:
    """Return the line on a tiny VAE whose name does not say of which of several models it is, or None."""
    others = [one.models for one in tiny_vae_names.models_of(config)]
    if len(others) < 2 or model_named(path) is not None:
        return None
    return (
        f"{clean(path.name, 60)}: neither its name nor its tensors show whether this tiny VAE is for "
        f"{' or '.join(others)}; another's gives wrong colours"
    )


class Described(NamedTuple):
    """The description of a tiny VAE, for `info`."""

    title: str
    models: str  # whose latents it takes, as far as its name and its tensors show it
    lines: list[str]
    fault: str | None


def described(path: Path) -> Described:
    """Describe the tiny VAE in the folder or file `path`."""
    try:
        part = open_tiny(path)
    except ModelError as error:
        return Described("a tiny VAE", "", [], str(error))
    part.plan.close()
    config, named, other = part.config, model_named(path), tiny_vae_names.other_named(_name(path))
    fits = tiny_vae_names.models_of(config)
    if other is not None or not fits:
        fault = f"is by its name the tiny VAE of {other}" if other else f"is {title(config)}"
        return Described(title(config), "", [], f"{fault}, and no model here has such latents")
    if named in fits:
        models = named.models if named is not None else ""
        lines = [f"for: {models}, by its name"]
    else:
        models = " or ".join(one.models for one in fits)
        lines = [f"for: {of_models(config)}{'; its tensors do not show of which' if len(fits) > 1 else ''}"]
    beside = [clean(file.path.name, 60) for file in part.plan.files if file.path != path and not is_folder(path)]
    if has_encoder(part):
        lines.append(f"halves: encoder and decoder{f', with {beside[0]} beside it' if beside else ''}")
    else:
        lines.append("halves: the decoder alone; pictures of -i need its encoder's file beside it")
    lines.append(f"weights: {part.plan.parameters / 1e6:,.1f} M parameters, {size_text(part.plan.nbytes)}")
    return Described(title(config), models, lines, None)


def config_in(header: Header) -> Any:
    """Return the configuration of the tiny VAE in a file with this header; None for another file, or a broken one."""
    try:
        return _config(header)[1] if is_in(header) else None
    except ModelError:
        return None
