"""A real language model, SmolLM2-135M-Instruct as GGUF, against transformers on the weights that the gguf package
decodes: tokenizer, chat, and 120 of 120 tokens in float32 on both backends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import smollm2
from support.cli_runner import cli
from support.language_files import CODE, SPELLED
from support.policies import FP32
from support.scripts import TROUBLE, texts

from qwenimg import backends
from qwenimg.common.parts.language_models import LanguageModel, open_language_model

pytestmark = pytest.mark.slow

SYSTEM = "You describe pictures in one paragraph."
USER = "A red fox in the snow at sunrise. Describe this picture in detail."
COUNT = 120
NOISE = 1e-3  # of scores in float32; measured 3e-5


@pytest.fixture(scope="module")
def file(shared_folder: Path) -> Path:
    import filelock

    folder = shared_folder / "smollm2"
    folder.mkdir(exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        return smollm2.fetched(folder)


@pytest.fixture(scope="module")
def model(file: Path) -> LanguageModel:
    return open_language_model(file)


def test_tokenizer_and_chat_are_those_of_transformers(file: Path, model: LanguageModel) -> None:
    """transformers reads the tokenizer from the GGUF file by itself, but for the digits, which the published one splits
    one by one; and it runs the file's template."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), model.tokenizer.tokenizer
    library = theirs._tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    library.pre_tokenizer = pre_tokenizers.Sequence([digits, library.pre_tokenizer])
    library.encode_special_tokens = True
    every = [text for text in (*texts(1000), *TROUBLE, *CODE, *SPELLED) if text]
    wrong = [text for text in every if ours.plain(text) != library.encode(text, add_special_tokens=False).ids]
    print(f"SmolLM2: {len(every)} texts, {len(wrong)} differ")
    assert not wrong, ascii(wrong[0])
    library.encode_special_tokens = False
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert model.chat.ids(ours, SYSTEM, USER)[0] == expected
    assert 2 in model.stops


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_free_running_text(file: Path, model: LanguageModel, backend: str) -> None:
    tokenizer, part = model.tokenizer.tokenizer, model.component
    ids = model.chat.ids(tokenizer, SYSTEM, USER)[0]
    right, margins = smollm2.greedy(file, ids, COUNT)
    engine = backends.load(backend)
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    written = [int(engine.numpy(ours.begin(ids)).argmax())]
    while len(written) < COUNT:
        written.append(int(engine.numpy(ours.follow(written[-1:]))[0].argmax()))
    same = int(np.argmin([a == b for a, b in zip(written, right, strict=True)] + [False]))
    print(f"{backend}: {same} of {COUNT} tokens equal, smallest margin {min(margins):.2g}, {len(set(right))} distinct")
    print(tokenizer.text(right))
    assert len(set(right)) > 40
    assert written == right


def test_it_rewrites_a_prompt_by_the_whole_command(file: Path) -> None:
    asked = ("rewrite", "a cat on a sofa", "--with", str(file), "--precision", "fp32", "--limit", "24", "--quiet")
    texts_of = {backend: cli(*asked, "--backend", backend) for backend in ("cpu", "mlx")}
    assert all(ran.code == 0 for ran in texts_of.values()), [ran.err for ran in texts_of.values()]
    one, other = (ran.out.decode() for ran in texts_of.values())
    print(one)
    assert one == other and len(one.split()) > 3 and one.count("\n") == 1
