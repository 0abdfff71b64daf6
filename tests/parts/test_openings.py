"""The keys and values of an instruction on the disk: the same bits with and without them, and files that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.test_text_store import BAD
from support import tiny_language
from support.cli_runner import cli

from qwenimg import backends
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.numbers.next_token import Decoding
from qwenimg.common.parts.language_models import open_language_model
from qwenimg.common.parts.texts.writers import other_writer
from qwenimg.common.parts.texts.writing import Conversation, Writer, Written
from qwenimg.common.precision.precision import bases
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.text_store import TextStore

SYSTEM = "Decide what the prompt leaves open, and keep its subject. " * 3
PROMPTS = ("a red cat", "two dogs in the snow", "一只猫")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_language.write(tmp_path_factory.mktemp("language model"), "gemma 2")


class Watched:
    """A writer whose encoder is watched: the openings that it computes, and the scores of the first tokens."""

    def __init__(self, folder: Path, store: Path | None, backend: str = "cpu", precision: str = "fp32"):
        self.said = list[str]()
        runtime = Runtime(backends.load(backend), bases(KIND)[precision], lambda kind, text: self.said.append(text))
        if store is not None:
            runtime.prompts = TextStore(runtime.notify, store)
        model = open_language_model(folder)
        parts = model.component, model.tokenizer, model.chat, model.stops
        self.writer: Writer = other_writer(Residents(runtime), *parts)
        self.computed, self.scores = list[int](), list[np.ndarray]()

    def write(self, system: str = SYSTEM) -> list[Written]:
        asked = [Conversation(system=system, user=prompt) for prompt in PROMPTS]
        how = Decoding(limit=12, temperature=0.9, seed=3)
        encoder, _ = self.writer.residents.acquire(self.writer.stage(asked, how, keeps=True))
        opening, begin, numpy = encoder.opening, encoder.begin, self.writer.runtime.engine.numpy

        def computed(ids: Sequence[int]) -> Any:
            self.computed.append(len(ids))
            return opening(ids)

        def begun(*given: Any) -> Any:
            scores = begin(*given)
            self.scores.append(numpy(scores))
            return scores

        encoder.opening, encoder.begin = computed, begun
        return self.writer.write(asked, how)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.sample(2)
def test_texts_are_the_same_bits_with_and_without_the_disk(
    folder: Path, tmp_path: Path, backend: str, precision: str
) -> None:
    runs = [Watched(folder, store, backend, precision) for store in (None, tmp_path, tmp_path)]
    texts = [run.write() for run in runs]
    assert texts[0] == texts[1] == texts[2] and len({one.whole for one in texts[0]}) == len(PROMPTS)
    for run in runs:
        assert len(run.scores) == len(PROMPTS)
        assert all(np.array_equal(*pair) for pair in zip(run.scores, runs[0].scores, strict=True))
    [file] = tmp_path.iterdir()
    tokens = sum(len(runs[0].writer.asked(Conversation(system=SYSTEM, user=one)).ids) for one in PROMPTS)
    print(f"{backend} {precision}: of {tokens} tokens {runs[0].computed} are those of the instruction, from the disk "
          f"{runs[2].computed}; {file.stat().st_size:,} bytes")  # fmt: skip
    assert len(runs[0].computed) == len(runs[1].computed) == 1 and runs[2].computed == []
    assert not any("ignored" in line for run in runs for line in run.said)


def test_another_instruction_precision_or_backend_has_keys_of_its_own(folder: Path, tmp_path: Path) -> None:
    changes: list[dict[str, str]] = [{}, {"precision": "bf16"}, {"backend": "mlx"}]
    for count, change in enumerate(changes, 1):
        run = Watched(folder, tmp_path, **change)
        run.write()
        assert len(run.computed) == 1 and len(list(tmp_path.iterdir())) == count
    run = Watched(folder, tmp_path)
    run.write(f"{SYSTEM}!")
    assert len(run.computed) == 1 and len(list(tmp_path.iterdir())) == len(changes) + 1


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.sample(1)
def test_a_wrong_file_is_a_line_and_is_written_again(folder: Path, tmp_path: Path, kind: str) -> None:
    right = Watched(folder, tmp_path).write()
    [file] = tmp_path.iterdir()
    BAD[kind](file, file.read_bytes())
    run = Watched(folder, tmp_path)
    assert run.write() == right and len(run.computed) == 1
    [line] = [line for line in run.said if "ignored" in line]
    print(kind, line)
    assert line.isprintable()


def test_the_command_keeps_them_where_it_is_asked_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = ("rewrite", "a red cat", "--with", str(folder), "--limit", "9", "--backend", "cpu", "--quiet")
    plain = cli(*asked)
    place = tmp_path / "qwenimg" / "prompts"
    assert plain.code == 0 and not place.exists(), plain.err
    for _ in range(2):
        assert cli(*asked, "--cache-prompts").out == plain.out
        assert len(list(place.iterdir())) == 1
