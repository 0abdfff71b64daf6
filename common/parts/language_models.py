"""A language model that writes, in a folder or file of its own, whatever image model it writes for.

Its chat template is one of ours: the one in its files is a program, and not run. `generation_config.json` is data: its
numbers are checked, and its other keys are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, closed_on_error, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.formats.headers import open_header, peek
from qwenimg.common.networks.encoders import decoder_kinds
from qwenimg.common.networks.encoders.decoder_metadata import network_of
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.prompts import language
from qwenimg.common.prompts.chat import Chat
from qwenimg.common.prompts.chats import find_chat
from qwenimg.common.prompts.language import LanguageTokenizer
from qwenimg.common.runtime.checkpoint import Component, TokenizerFiles

TITLE = "language model"
CONFIG, GENERATION = "config.json", "generation_config.json"
MAX_STOPS = 64


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The choice of tokens that the files of a model recommend. 1 is a number without effect; top_k 0: all tokens."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """An opened language model. stops: the ids that end an answer, of its chat template and of its files. The plan of
    its component holds its files open until `close`."""

    component: Component
    tokenizer: TokenizerFiles
    chat: Chat
    stops: tuple[int, ...]
    generation: Generation

    def close(self) -> None:
        self.component.plan.close()


def open_language_model(path: Path, like: Path | None = None, vocabulary: Path | None = None) -> LanguageModel:
    """Open a folder with config.json, weights and tokenizer, a file of weights beside these, or a GGUF file. Raises
    ModelError in one line for anything else. like, vocabulary: for a file alone, the folders of a config.json and of a
    tokenizer."""
    file = _gguf_in(path) if is_folder(path) else path
    if file is not None and peek(file).format == "GGUF":
        return _of_gguf(file)
    folder = like or (path if is_folder(path) else path.parent)
    if not is_file(folder / CONFIG):
        raise bad(folder, "holds no config.json: give the folder of a language model, or its GGUF file")
    data = read_json(folder / CONFIG)
    try:
        network = decoder_kinds.network(str(data.get("model_type")))
    except ModelError as error:
        raise bad(folder / CONFIG, str(error)) from None
    config = replace(read_config(network, folder), writes=True)
    tokenizer = language.load(vocabulary or _vocabulary(folder))
    generation, stops = _generation(folder / GENERATION, config.vocab_size)
    stops += _ids(data.get("eos_token_id"), folder / CONFIG, config.vocab_size)
    return _opened(network, path, config, tokenizer, generation, stops)


def _of_gguf(path: Path) -> LanguageModel:
    header = open_header(path)
    with closed_on_error(header.file):
        network, fields = network_of(header)
        config = parse(network.config, {**fields, "writes": True}, source=path)
        tokenizer = language.of_gguf(header)
        end = header.metadata.get("tokenizer.ggml.eos_token_id", "")
    header.file.close()
    stops = _ids(int(end) if end.isdecimal() and len(end) < 10 else None, path, config.vocab_size)
    return _opened(network, path, config, tokenizer, Generation(), stops)


def _opened(
    network: Network,
    path: Path,
    config: Any,
    tokenizer: LanguageTokenizer,
    generation: Generation,
    stops: tuple[int, ...],
) -> LanguageModel:
    tokenizer.check_vocabulary(config.vocab_size)
    chat = find_chat(network.kind, tokenizer)
    every = frozenset(stops) | chat.stop_ids(tokenizer)
    if not every:
        raise bad(tokenizer.file, f"has no token that ends an answer of the chat template {chat.name}")
    component = open_component(network, path, config, TITLE)
    return LanguageModel(
        component=component,
        tokenizer=TokenizerFiles(path=tokenizer.file, read=lambda _: tokenizer),
        chat=chat,
        stops=tuple(sorted(every)),
        generation=generation,
    )


def _vocabulary(folder: Path) -> Path:
    """Return the folder with the tokenizer: the model's own, or the one beside it, under its name or a text encoder's
    usual one."""
    beside = (folder.parent / f"{folder.name}_tokenizer", folder.parent / "tokenizer")
    places = (folder, folder / "tokenizer", *beside)
    found = (place for place in places if any(is_file(place / name) for name in language.FILES))
    return next(found, folder)


def _gguf_in(folder: Path) -> Path | None:
    """Return the only GGUF file of a folder without other weights, or None. Raises ModelError for several."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise bad(folder, f"cannot be listed: {error.strerror}") from None
    files = [name for name in names if name.endswith(".gguf")]
    if not files or any(name.endswith(".safetensors") for name in names):
        return None
    if len(files) > 1:
        raise bad(folder, f"holds {len(files)} GGUF files: give the path of one, such as {clean(files[0], 60)}")
    return folder / files[0]


# generation_config.json


def _generation(file: Path, size: int) -> tuple[Generation, tuple[int, ...]]:
    """Return how texts are drawn, and the ids that end one, of a vocabulary of `size`. Raises ModelError."""
    if not is_file(file):
        return Generation(), ()
    data = read_json(file)
    made = Generation(
        do_sample=_flag(file, data, "do_sample"),
        temperature=_within(file, data, "temperature", 0, 2, 1),
        top_k=int(_within(file, data, "top_k", 0, size, 0, whole=True)),
        top_p=_within(file, data, "top_p", 0, 1, 1),
        repetition_penalty=_within(file, data, "repetition_penalty", 0.5, 2, 1),
    )
    if made.top_p == 0:
        raise bad(file, "top_p is 0; expected a number above 0, up to 1")
    return made, _ids(data.get("eos_token_id"), file, size)


def _flag(file: Path, data: Mapping[str, object], key: str) -> bool:
    value = data.get(key)
    if value is not None and not isinstance(value, bool):
        raise bad(file, f"{key} is {clean(value, 40)}; expected true or false")
    return value is True


def _within(
    file: Path, data: Mapping[str, object], key: str, least: float, most: float, default: float, whole: bool = False
) -> float:
    value = data.get(key)
    if value is None:
        return default
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        what = "a whole number" if whole else "a number"
        raise bad(file, f"{key} is {clean(value, 40)}; expected {what} from {least:g} to {most:g}")
    return float(value)


def _ids(value: object, file: Path, size: int) -> tuple[int, ...]:
    """Return one id or several, of a vocabulary of `size`. Raises ModelError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > MAX_STOPS or not all(type(one) is int and 0 <= one < size for one in ids):
        raise bad(file, f"eos_token_id is {clean(value, 60)}; expected ids below {size}, of at most {MAX_STOPS} tokens")
    return tuple(ids)
