"""Whole texts of the loop that writes against transformers' `generate`, in float32 on both backends: alone, several of
unequal prompts at once, with stops and penalties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.policies import FP32
from support.tiny_edit import louder
from support.tiny_model import tiny_text_encoder
from tiny_tokenizer import write_tiny_tokenizer

from qwenimg import backends
from qwenimg.common.networks.encoders.qwen import QWEN2_5_VL
from qwenimg.common.numbers.next_token import Decoding
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.parts.texts import levels
from qwenimg.common.parts.texts.writing import ROWS, Conversation, Writer, Written
from qwenimg.common.prompts import qwen
from qwenimg.common.prompts.chat import CHATML
from qwenimg.common.runtime.checkpoint import TokenizerFiles
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime

TOKENS = 64
DISTINCT = 20
PROMPTS = [
    f"a {color} circle " + count * "on a blue square " for count, color in enumerate(["red", "green", "pink"] * 4)
]


@pytest.fixture(scope="module")
def model() -> Any:
    return louder(tiny_text_encoder())


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_encoder")
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tiny_tokenizer(folder / "tokenizer")
    return folder


def writer(folder: Path, backend: str) -> Writer:
    part = levels.writing(open_component(QWEN2_5_VL, folder, read_config(QWEN2_5_VL, folder), "it"))
    runtime = Runtime(backends.load(backend), FP32, lambda kind, text: None)
    return Writer(Residents(runtime), part, TokenizerFiles(path=folder / "tokenizer", read=qwen.load), CHATML)


def asked(prompts: list[str]) -> list[Conversation]:
    return [Conversation(system="Make it better.", user=prompt) for prompt in prompts]


def theirs(model: Any, made: Writer, conversation: Conversation, **more: Any) -> list[int]:
    """transformers' tokens up to the one that ends the text, or of the limit."""
    ids, tokenizer = made.asked(conversation).ids, made.tokenizer
    never = sorted(set(range(model.config.text_config.vocab_size)) - tokenizer.word_ids - made.stops)
    given = {"do_sample": False, "max_new_tokens": TOKENS, "suppress_tokens": never, "eos_token_id": sorted(made.stops)}
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **given | more
        )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens[:-1] if tokens[-1] in made.stops else tokens


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.sample(1)
def test_texts_are_those_of_transformers(model: Any, folder: Path, backend: str, penalty: float) -> None:
    made, distinct = writer(folder, backend), set[int]()
    how = Decoding(limit=TOKENS, penalty=penalty, penalizes_prompt=True)
    texts = made.write(asked(PROMPTS), how)
    assert len(PROMPTS) > ROWS
    lengths = list[int]()
    for conversation, text in zip(asked(PROMPTS), texts, strict=True):
        tokens = theirs(model, made, conversation, repetition_penalty=penalty)
        assert (text.whole, text.tokens) == (made.tokenizer.text(tokens), len(tokens))
        assert text.cut == (len(tokens) == TOKENS)
        distinct |= set(tokens)
        lengths.append(len(tokens))
    print(f"{backend}, penalty {penalty}: {len(PROMPTS)} texts of {sorted(lengths)} tokens, {len(distinct)} distinct")
    assert len(distinct) >= DISTINCT


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_texts_that_are_drawn_together_are_those_of_each_alone(folder: Path, backend: str) -> None:
    how = Decoding(limit=24, temperature=0.9, top_k=30, top_p=0.9, penalty=1.1, seed=11)
    made = writer(folder, backend)
    together = made.write(asked(PROMPTS), how)
    alone: list[Written] = [made.write(asked([prompt]), how)[0] for prompt in PROMPTS]
    same = sum(one == other for one, other in zip(together, alone, strict=True))
    print(f"{backend}: {same} of {len(alone)} texts are equal, {len({one.text for one in alone})} different")
    assert together == alone and len({one.text for one in alone}) > 3


def test_backends_draw_the_same_texts_in_float32(folder: Path) -> None:
    how = Decoding(limit=24, temperature=0.9, top_k=30, seed=2)
    texts = [writer(folder, backend).write(asked(PROMPTS[:4]), how) for backend in ("cpu", "mlx")]
    assert texts[0] == texts[1]
