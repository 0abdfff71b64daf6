"""GGUF files of language models with damaged metadata: each is refused in one line, or opened."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import tiny_language
from support.file_mutants import assert_line, campaign, damaged

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.formats.headers import open_header
from qwenimg.common.parts.language_models import open_language_model

NAMES = ("llama 3", "gemma 2", "ministral 3")


def outcome(path: Path) -> str:
    """`header` or `model`, of which it is refused; `opened`, with a prompt whose ids have embeddings."""
    try:
        open_header(path).file.close()
    except ModelError as error:
        assert_line(str(error), path.name)
        return "header"
    try:
        model = open_language_model(path)
    except ModelError as error:
        assert str(error).isprintable() and path.name in str(error) and len(str(error)) < 600, str(error)
        return "model"
    config, tokenizer = model.component.config, model.tokenizer.tokenizer
    try:
        ids = model.chat.ids(tokenizer, "Kalo.", "mire <|eot_id|></s> \U0001f98a\n")[0]
        assert max(ids) < config.vocab_size and max(model.stops) < config.vocab_size
        assert tokenizer.text(ids) is not None
        assert config.num_hidden_layers == 3  # as many as there are tensors of
    except UsageError:
        pass
    finally:
        model.close()
    return "opened"


def run(folder: Path, name: str, count: int, seed: int) -> Counter[str]:
    path = tiny_language.write_gguf(folder / "m.gguf", name)
    whole, chance = path.read_bytes(), random.Random(seed)
    header = min(stored.begin for stored in open_header(path).tensors.values())
    keys = whole.index(b"tokenizer.ggml.model")  # half of the changes are in the configuration before the vocabulary
    assert outcome(path) == "opened"

    def mutants() -> Iterator[Callable[[], str]]:
        for number in range(count):
            content = damaged(whole, header if number % 2 else keys, chance)
            if content[:4] == b"GGUF":  # else a file of another format
                path.write_bytes(content)
                yield lambda: outcome(path)

    found = campaign(mutants(), seed)
    assert found.keys() >= {"header", "model", "opened"}
    return found


def test_some_mutants(tmp_path: Path) -> None:
    run(tmp_path, "gemma 2", 60, 1)


@pytest.mark.rest
@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_mutants(tmp_path: Path, name: str) -> None:
    run(tmp_path, name, 1000, 2)
