"""The levels of a language model in the files of a text encoder: its layers, to encode; with its head, to write; with
its vision tower too, to describe pictures. A text encoder is opened with what its family needs. For more, its files are
planned again, so that only the stage that needs a level counts and loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.found_once import found_once
from qwenimg.common.base.safe_files import OpenFile, is_file
from qwenimg.common.base.text import clean
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.encoders import decoder, qwen3_vl_vision, qwen_vl_vision
from qwenimg.common.networks.encoders.decoder import HEAD, DecoderConfig
from qwenimg.common.networks.encoders.qwen import Qwen3VLConfig, QwenVLConfig
from qwenimg.common.networks.encoders.vision_tower import TowerConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import read_config
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.plan import Entry, LoadPlan

_CURE = "give a whole one by --text-encoder or --with"
_HEADS = (f".{HEAD}", ".output.weight")  # ends of names, of transformers and mlx-vlm, and of llama.cpp
_TOWERS = (".visual.", ".vision_tower.", ".v.blk.")


@dataclass(frozen=True, kw_only=True)
class _Seeing:
    """The network of a language model with its vision tower, and files that have all of it."""

    network: Network
    whole: str


_SEEING = {
    QwenVLConfig: _Seeing(
        network=qwen_vl_vision.NETWORK,
        whole="the folder text_encoder of Qwen-Image and ComfyUI's qwen_2.5_vl_7b have both head and vision tower",
    ),
    Qwen3VLConfig: _Seeing(
        network=qwen3_vl_vision.NETWORK,
        whole="the folder text_encoder of Qwen-Image-2.1 has both head and vision tower",
    ),
}


def alone(text: Component) -> Component:
    """Return the part of a language model that prompts without pictures need."""
    config = replace(text.config, writes=False)
    return replace(text, network=decoder.NETWORK.name, config=config, plan=_only(text.plan, config))


@found_once
def _only(plan: LoadPlan, config: DecoderConfig) -> LoadPlan:
    used = decoder.used(config, decoder.manifest(config))
    return plan.only(lambda name: name in used)


def writing(text: Component) -> Component:
    """Return a language model with its head and all of its layers, and with its vision tower if it has that. Raises
    ModelError for another text encoder, and for one whose files have no head."""
    config = _config(text, "cannot write a text")
    if config.writes:
        return text
    if not config.tie_word_embeddings and not _has(text, lambda key: f".{key}".endswith(_HEADS)):
        raise ModelError(f"{_place(text)}: has no head ({HEAD}), by which it would write a text: {_whole(config)}")
    return _planned_again(text, None, replace(config, writes=True))


def describing(text: Component) -> Component:
    """Return a language model with its head and its vision tower. Raises ModelError for one without."""
    config = _config(text, "cannot describe a picture")
    if isinstance(config, TowerConfig):
        return writing(text)
    seeing = _seeing(config)
    if seeing is None:
        raise ModelError(
            f"{_place(text)}: is a language model that sees no pictures; those of Qwen-Image and Qwen-Image-2.1 do: "
            f"{_CURE}"
        )
    if not _has(text, lambda key: any(start in f".{key}" for start in _TOWERS)):
        cure = "add its mmproj file as a second --text-encoder" if _paths(text)[:1][0].suffix == ".gguf" else ""
        raise ModelError(
            f"{_place(text)}: has no vision tower, by which it would see a picture: {cure or _whole(config)}"
        )
    writing(text)  # which says what else it lacks
    found = _vision_config(seeing.network, _paths(text))
    return _planned_again(text, seeing.network, replace(found, writes=True))


def _vision_config(network: Network, paths: Iterable[Path]) -> Any:
    """Return the configuration in the folder of the files; for files without one, that of the published model."""
    for folder in dict.fromkeys(path.parent for path in paths):
        if is_file(folder / "config.json") and read_json(folder / "config.json").get(network.key) == network.kind:
            return read_config(network, folder)
    return network.config()


def _config(text: Component, fault: str) -> DecoderConfig:
    """Return the configuration of a language model. Raise ModelError for another text encoder."""
    if not isinstance(text.config, DecoderConfig):
        kind = text.network.partition("_")[0].upper()
        able = "those of Qwen-Image and Qwen-Image-2.1 do"
        raise ModelError(f"{_place(text)}: is a text encoder of type {kind}, which {fault}; {able}: {_CURE}")
    return text.config


def _seeing(config: DecoderConfig) -> _Seeing | None:
    return next((one for kind, one in _SEEING.items() if isinstance(config, kind)), None)


def _whole(config: DecoderConfig) -> str:
    """Return the cure for files that lack a part."""
    seeing = _seeing(config)
    return f"{_CURE}; {seeing.whole}" if seeing else f"{_CURE}, such as the folder text_encoder of the published model"


def _paths(text: Component) -> list[Path]:
    return [file.path for file in text.plan.files]


def _place(text: Component) -> str:
    return clean(next(iter(_paths(text)), text.network))


def _has(text: Component, is_it: Callable[[str], bool]) -> bool:
    """Return whether the files have a tensor with such a name; True for a model on paper."""
    paths = _paths(text)
    return not paths or any(is_it(key) for path in paths for key in peek(path).tensors)


def _planned_again(text: Component, network: Network | None, config: DecoderConfig) -> Component:
    assert text.reopen is not None, f"{text.network} was not opened by `open_part` or `open_component`"
    made = _more(text.plan, text.reopen, network, config, text.quantization)
    return replace(text, network=made.network, config=made.config, plan=made.plan)


@found_once
def _more(
    plan: LoadPlan,
    reopen: Callable[[Any, Any], Component],
    network: Network | None,
    config: DecoderConfig,
    quantization: str,
) -> Component:
    """Return the component for `config`, with the entries of `plan` where it has them: LoRAs are in those. It reads
    from the files of `plan`, and is closed with it."""
    made = reopen(network, config)
    made.plan.close()
    if quantization:
        made = made.quantized(quantization)
    files = {file.path: file for file in plan.files}
    entries = {name: plan.entries.get(name) or _reading(entry, files) for name, entry in made.plan.entries.items()}
    return replace(made, plan=replace(made.plan, entries=entries, files=plan.files))


def _reading(entry: Entry, files: dict[Path, OpenFile]) -> Entry:
    """Return an entry that reads from `files`; one on paper has none."""
    pieces = tuple(piece._replace(file=files.get(piece.file.path, piece.file)) for piece in entry.source.pieces)
    return replace(entry, source=entry.source._replace(pieces=pieces))
