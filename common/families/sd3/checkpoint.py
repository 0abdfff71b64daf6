"""A Stable Diffusion 3 model: a folder in diffusers layout or one file, with parts that may be elsewhere.

All is checked before a weight is read. The third text encoder, T5, may be absent."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad, closed_on_error, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families.fits import Configs, Fit
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.sd3 import single_file
from qwenimg.common.families.sd3.texts import PADS, T5
from qwenimg.common.networks.denoisers import sd3_dit, sd3_names
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import (
    find_config,
    is_absent,
    on_paper,
    open_component,
    open_tokenizer,
    read_config,
    with_given,
)
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.parts.texts import clip_files, t5_files
from qwenimg.common.parts.texts.clip_tokenizer import find_clip_tokenizer
from qwenimg.common.parts.texts.t5_tokenizer import find_t5_tokenizer
from qwenimg.common.prompts import clip as clip_tokenizer
from qwenimg.common.prompts import t5 as t5_tokenizer
from qwenimg.common.request.parts import LEFT_OUT
from qwenimg.common.runtime.checkpoint import Checkpoint, Component, TokenizerFiles
from qwenimg.common.sampling import flow_match

NETWORKS: Mapping[str, Network] = {
    "transformer": sd3_dit.NETWORK,
    "text_encoder": clip.NETWORK,
    "text_encoder_2": clip.NETWORK,
    T5: t5.NETWORK,
    "vae": kl_vae.NETWORK,
}


def _clips(configs: Configs) -> list[CLIPConfig]:
    return [configs[name] for name in ("text_encoder", "text_encoder_2")]


FITS = (
    Fit(
        "the transformer wants a pooled text of {} channels, the CLIPs make {}",
        lambda configs: configs["transformer"].pooled_projection_dim,
        lambda configs: [sum(clip.projection_dim or 0 for clip in _clips(configs))],
    ),
    Fit(
        "the transformer wants text states of {} channels, T5 makes {}",
        lambda configs: configs["transformer"].joint_attention_dim,
        lambda configs: [configs[T5].hidden_size] if T5 in configs else [],
    ),
    Fit(
        "the transformer wants text states of {} channels, the CLIPs make {}",
        lambda configs: configs["transformer"].joint_attention_dim,
        lambda configs: [
            max(configs["transformer"].joint_attention_dim, sum(clip.hidden_size for clip in _clips(configs)))
        ],
    ),
    Fit(
        "the transformer takes {} channels, the VAE's latents have {}",
        lambda configs: configs["transformer"].in_channels,
        lambda configs: [configs["vae"].latent_channels],
    ),
    Fit(
        "the transformer makes {} channels, the VAE's latents have {}",
        lambda configs: configs["transformer"].out_channels,
        lambda configs: [configs["vae"].latent_channels],
    ),
)


def open_checkpoint(path: Path, options: LoadOptions) -> Checkpoint:
    """Open the model in the folder or file `path`, with the parts that `options` has elsewhere. Raises ModelError and
    UsageError."""
    if is_file(path):
        return _open_file(path, options)
    if options.tokenizer is not None and is_folder(path / "tokenizer"):
        raise UsageError(f"--tokenizer is for a model that has none; {clean(path, 80)} has its own")
    return _open_folder(path, options)


def _open_folder(folder: Path, options: LoadOptions) -> Checkpoint:
    scheduler = folder / "scheduler" / "scheduler_config.json"
    names = [name for name in NETWORKS if _is_wanted(name, options, is_file(folder / T5 / "config.json"))]
    components: dict[str, Component] = {}
    with ExitStack() as stack:
        for name in names:
            network, place = NETWORKS[name], folder / name
            if _may_be_given(name, options) and not _has_weights(place):
                config = find_config(network, [place], partial(_published, name))
                components[name] = on_paper(network, config, "float32")
                continue
            config = read_config(network, place)
            components[name] = open_component(network, place, config, name, for_rewrite=options.for_rewrite)
            stack.callback(components[name].plan.close)
        checkpoint = Checkpoint(
            source=folder,
            components=components,
            tokenizers={},
            scheduler=flow_match.read_config(read_json(scheduler), scheduler),
        )
        checkpoint = _with_parts(checkpoint, options)
        stack.pop_all()
    near = options.part("transformer") or folder  # tokenizers of a folder without them are looked for beside its files
    return _with_tokenizers(checkpoint, None if is_folder(folder / "tokenizer") else near, options)


def _open_file(path: Path, options: LoadOptions) -> Checkpoint:
    """Open the model in one file, with the chosen tokenizers or those that are on this machine."""
    opened = single_file.open_file(path, for_rewrite=options.for_rewrite)
    names = [name for name in NETWORKS if _is_wanted(name, options, T5 in opened)]
    components = {name: opened.get(name) or on_paper(NETWORKS[name], _published(name), "float32") for name in names}
    checkpoint = Checkpoint(
        source=path,
        components=components,
        tokenizers={},
        scheduler=known_configs.scheduler("sd3-medium"),
    )
    return _with_tokenizers(_with_parts(checkpoint, options), path, options)


def _is_wanted(name: str, options: LoadOptions, has_t5: bool) -> bool:
    """Return whether the model has the component `name`: all but T5, which may be absent, given or left out."""
    if name != T5:
        return True
    given = [path for part, path in options.parts.items() if part.startswith("text_encoder")]
    return LEFT_OUT not in given and (has_t5 or any(map(t5_files.is_t5, given)))


def _may_be_given(name: str, options: LoadOptions) -> bool:
    """Return whether the user may give the component `name`: any text encoder, until the given files are read."""
    given = [part for part, path in options.parts.items() if path != LEFT_OUT]
    return name in given or ("text" in name and any("text" in part for part in given))


def _has_weights(folder: Path) -> bool:
    return is_folder(folder) and any(path.suffix == ".safetensors" for path in folder.iterdir())


def _published(name: str) -> Any:
    """Return the published configuration of a component that the model lacks; for a transformer, SD 3 medium's."""
    return known_configs.read("sd3-medium", name, NETWORKS[name])


# Tokenizers


def _with_tokenizers(checkpoint: Checkpoint, near: Path | None, options: LoadOptions) -> Checkpoint:
    """Return `checkpoint` with its folder's tokenizers, or with the chosen ones or those that are on this machine, the
    nearest to the file `near`. Raise ModelError, and close it then."""
    with closed_on_error(checkpoint):
        texts = {name: part.config for name, part in checkpoint.texts.items()}
        tokenizers = {
            name: _of_folder(checkpoint.source, name, config) if near is None else _of_file(near, name, config, options)
            for name, config in texts.items()
        }
    return replace(checkpoint, tokenizers=tokenizers)


def _of_folder(folder: Path, name: str, config: Any) -> TokenizerFiles:
    load = t5_tokenizer.load if name == T5 else clip_tokenizer.load
    return open_tokenizer(folder / name.replace("text_encoder", "tokenizer"), load, config)


def _of_file(path: Path, name: str, config: Any, options: LoadOptions) -> TokenizerFiles:
    if name == T5:
        return open_tokenizer(find_t5_tokenizer(path, config.vocab_size, options.tokenizer), t5_tokenizer.load, config)
    folder = find_clip_tokenizer(path, config.vocab_size, options.tokenizer, options.refined_tokenizer)
    return open_tokenizer(folder, partial(clip_tokenizer.load, pad=PADS[name]), config)


# Parts in other folders or files


def _with_parts(checkpoint: Checkpoint, options: LoadOptions) -> Checkpoint:
    """Return `checkpoint` with the parts of `options`, checked to belong together. Raise ModelError and UsageError, and
    close it then."""
    given = {part: path for part, path in options.parts.items() if path != LEFT_OUT}
    return with_given(checkpoint, given, partial(_opened, for_rewrite=options.for_rewrite), _check)


def _opened(checkpoint: Checkpoint, part: str, path: Path, *, for_rewrite: bool) -> tuple[str, Component]:
    """Open one of PARTS, and return its name in the model; a text encoder's name shows in its tensors."""
    if part == "transformer":
        return part, open_part(sd3_names.LAYOUTS, path, checkpoint[part].config, part, for_rewrite=for_rewrite)
    if part == "vae":
        return part, open_part(kl_vae_names.LAYOUTS, path, checkpoint[part].config, part, for_rewrite=for_rewrite)
    if t5_files.is_t5(path):
        return T5, t5_files.open_t5(path, T5, for_rewrite=for_rewrite)
    clips = {name: text for name, text in checkpoint.components.items() if name != T5}
    return clip_files.open_text(replace(checkpoint, components=clips), path)


def _check(checkpoint: Checkpoint) -> None:
    """Check that the components of a model are there, and its CLIPs those of SD 3. Raise ModelError."""
    components, source = checkpoint.components, checkpoint.source
    if absent := [name for name, part in components.items() if is_absent(part)]:
        options = " ".join(f"--{'text-encoder' if 'text' in name else name} FILE" for name in absent)
        without = " (or --text-encoder none, to draw without T5)" if T5 in absent else ""
        raise bad(
            source,
            f"lacks {', '.join(absent)}: add {options}{without}, or give a file or folder that has the whole model",
        )
    if any(components[name].config.projection_dim is None for name in ("text_encoder", "text_encoder_2")):
        raise ModelError(f"{clean(source)}: a text encoder has no projection; SD 3 takes CLIPTextModelWithProjection")
