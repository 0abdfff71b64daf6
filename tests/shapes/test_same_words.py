"""Words that people write and training never shows: read as the word that means the same, and drawn as it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training import folder as train_folder
from training import tokenizer as bpe

from qwenimg.common.families.qwen_image.variants import DRAWS as TEMPLATE
from qwenimg.common.prompts import qwen
from qwenimg.common.shapes import builtin, words
from qwenimg.common.shapes.gate import gate_prompts
from qwenimg.common.shapes.words import SAME_AS, parse

PROMPTS = ("一个红色的星", "两颗星", "红星", "一个紫色的星在左边", "蓝色的星和红色的圆")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_read_as_the_other_word(prompt: str):
    assert parse(prompt) == parse(prompt.replace("星", "星星"))
    assert not parse(prompt).unknown and parse(prompt).things[0].shape == "star"


def test_longer_words_stay_what_they_are():
    for word in ("星星", "五角星", "星形"):
        assert [thing.shape for thing in parse(f"一个红色的{word}").things] == ["star"], word


def test_data_and_vocabulary_do_not_have_them():
    """A word more would be another tokenizer and other captions, so another model."""
    assert not SAME_AS.keys() & words.vocabulary()
    tokens = train_folder.vocabulary()
    path = builtin.folder() / "tokenizer" / "tokenizer.json"
    assert path.read_bytes() == bpe.files(tokens)[path.name]
    tokenizer = qwen.load(path.parent)
    of_words = {tokens.ids[bpe.spelled(word)] for word in SAME_AS}
    asked = {token for one in gate_prompts() for token in TEMPLATE.fill(tokenizer, one.prompt).ids}
    assert not of_words & asked  # so the gate's figures are of these weights too


def test_the_built_in_model_has_one_embedding_for_both():
    tokens = train_folder.vocabulary()
    stored = load_file(builtin.folder() / "text_encoder" / "model.safetensors")["model.embed_tokens.weight"]
    for word, other in SAME_AS.items():
        a, b = (stored[tokens.ids[bpe.spelled(text)]] for text in (word, other))
        assert torch.equal(a, b), word
    assert len(np.unique(stored.float().numpy(), axis=0)) >= len(stored) - len(SAME_AS)


def test_a_training_writes_them_alike():
    tokens = train_folder.vocabulary()
    before = torch.arange(tokens.size * 2.0).view(-1, 2)
    after = train_folder.same_tokens(before, tokens)
    changed = (before != after).any(dim=1).nonzero().flatten().tolist()
    assert changed == [tokens.ids[bpe.spelled(word)] for word in SAME_AS]
    assert after[changed[0]].tolist() == before[tokens.ids[bpe.spelled("星星")]].tolist()
