"""T5's tokenizer against SentencePiece and transformers, on a model trained here; planted faults, and hostile files."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import spiece_files as files
from support.refusals import refused
from support.scripts import SYLLABLES, TROUBLE, texts
from tokenizers import normalizers, pre_tokenizers

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.prompts import charsmap, t5
from qwenimg.common.prompts.check import MAX_CHARACTERS
from qwenimg.common.prompts.t5 import T5Tokenizer

COUNT = 2000
TIES = 0.005  # of the texts: two ways of the same score, between which float32 and float64 choose; measured 0.0015
PROMPT_WITHIN = 2.0  # CPU seconds; the slowest measured here takes 0.05
# Signs that NFKC replaces, with marks behind them, which transformers drops
MARKS = ["\u2078\u0618", "a \u00bd\u0301 b", "\ufb01\u0323", "\u2460\u20dd x", "\u3392\u0300", "\u00e9\u0323\u0301"]
WIDE = ["\uff1c/s\uff1e a", "\uff1cextra_id_0\uff1eb", "c \uff1cunk\uff1e", "a\u2028b\u0085c\u200b d", "<unk>x<pad> y"]
# transformers splits words at these blanks, which SentencePiece does not know as such, and replaces characters in a
# cluster (a letter with its marks, an emoji of several) by another rule: of a cluster it may drop parts.
NOT_ALIKE = {
    "\u0085",
    "\u2028",
    "\u200d",
    "\u0301",
    "\u200b",
    "\ufeff",
    "\u0327",
    "\u0328",
    "\u0308",
    "\uff9e",
    "\u11a8",
    "\u0323",
}


@pytest.fixture(scope="module", params=["nmt_nfkc", "nfkc"])
def raw(request: pytest.FixtureRequest) -> bytes:
    return files.trained(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write_spiece(tmp_path_factory.mktemp("spiece"), files.trained())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers saves it."""
    return files.write_tokenizer_json(tmp_path_factory.mktemp("saved"), files.trained())


@pytest.fixture(scope="module")
def ours(folder: Path) -> T5Tokenizer:
    return t5.load(folder)


# Against transformers


def wrong(tokenizer: T5Tokenizer, theirs: Any) -> list[str]:
    """The texts whose ids are others than those of transformers."""
    every = [*texts(COUNT), *TROUBLE, *MARKS, *WIDE]
    return [text for text in every if [*tokenizer.words(text), tokenizer.eos] != theirs(text)["input_ids"]]


@pytest.mark.sample(0)
def test_equal_to_transformers(raw: bytes, tmp_path: Path) -> None:
    """By both files, and by one of transformers 4, which has other parts around the same pieces."""
    theirs = files.hugging_face(raw)
    files.write_spiece(tmp_path / "spiece", raw)
    saved = files.write_tokenizer_json(tmp_path / "saved", raw)
    (tmp_path / "old").mkdir()
    older = json.dumps(files.older(files.tokenizer_json(saved)))
    (tmp_path / "old" / "tokenizer.json").write_text(older, encoding="utf-8")
    for name in ("spiece", "saved", "old"):
        different = wrong(t5.load(tmp_path / name), theirs)
        print(f"{name}: {len(SYLLABLES)} scripts, {len(different)} of {COUNT} texts differ")
        assert not different, ascii(different[0])


@pytest.mark.sample(0)
def test_equal_to_sentencepiece(ours: T5Tokenizer) -> None:
    """But for clusters of characters, which the tokenizers library replaces as a whole."""
    model, tokenizer = files.processor(files.trained()), ours
    alike = [text for text in texts(COUNT) if not set(text) & NOT_ALIKE]
    ties = 0
    for text in alike:
        mine, theirs = tokenizer.words(text), model.encode(text)
        if mine != theirs:
            scores = [sum(map(model.get_score, ids)) for ids in (mine, theirs)]
            assert abs(scores[0] - scores[1]) < 1e-5 * abs(scores[0]) and sorted(mine) == sorted(theirs), ascii(text)
            ties += 1
    ids = [id for text in alike for id in tokenizer.words(text)]
    print(f"{len(alike)} texts, {len(ids)} tokens, {ids.count(2)} unknown; ties {ties}")
    assert len(alike) > COUNT // 2 and ties <= TIES * COUNT and ids.count(2) > 100


FAULTS: dict[str, Callable[[Any], None]] = {
    "no text is replaced": lambda tokenizer: setattr(tokenizer, "normalizer", None),
    "words begin with nothing": lambda tokenizer: setattr(
        tokenizer, "pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="never")
    ),
    "other blanks divide no words": lambda tokenizer: setattr(
        tokenizer, "pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="always")
    ),
    "marks are kept": lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.NFKC()),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(0)
def test_faults_are_seen(folder: Path, fault: str) -> None:
    tokenizer = t5.load(folder)
    FAULTS[fault](tokenizer._tokenizer)
    different = wrong(tokenizer, files.hugging_face(files.trained()))
    print(f"{fault}: {len(different)} texts")
    assert different


def by_hand(tmp_path: Path, pieces: list[tuple[str, float]], text: str) -> list[str]:
    """The pieces of `text`, the same by SentencePiece."""
    raw = files.model(pieces)
    model = files.processor(raw)
    ids = t5.load(files.write_spiece(tmp_path, raw)).words(text)
    assert ids == model.encode(text)
    return [model.id_to_piece(id) for id in ids]


def test_an_unknown_character_is_ten_below_the_lowest_score(tmp_path: Path) -> None:
    pieces = [("▁", -1.0), ("a", 3.0), ("ab", -15.0)]
    assert by_hand(tmp_path, pieces, "ab aba c") == ["▁", "ab", "▁", "ab", "a", "▁", "<unk>"]


def test_of_two_ways_with_one_score_the_longer_piece_comes_last(tmp_path: Path) -> None:
    assert by_hand(tmp_path, [("▁", -1.0), ("a", -2.0), ("aa", -3.0)], "aaa") == ["▁", "a", "aa"]


@pytest.mark.parametrize(
    "text", ["a </s> ka lo", "</s>", "<pad>ka<unk> lo", " <extra_id_0>ka<extra_id_99> ", "<extra_id_100>"]
)
def test_special_tokens_in_a_text(saved: Path, ours: T5Tokenizer, text: str) -> None:
    theirs = files.hugging_face(files.trained())(text)["input_ids"]
    assert [*ours.words(text), 1] == [*t5.load(saved).words(text), 1] == theirs


@pytest.mark.parametrize("length", [1, 2, 8, 77])
def test_padding_and_truncation(saved: Path, length: int) -> None:
    theirs, mine = files.hugging_face(files.trained()), t5.load(saved)
    for text in ("", "  ", "ka lo mi", "红色的圆在左边 " * 30):
        filled = mine.padded(text, length)
        expected = theirs(text, padding="max_length", max_length=length, truncation=True)["input_ids"]
        assert list(filled.ids) == expected and filled.ids.count(1) == 1
        assert filled.lost == max(0, len(theirs(text)["input_ids"]) - length)


def test_extra_ids_follow_the_pieces(ours: T5Tokenizer) -> None:
    count = files.processor(files.trained()).get_piece_size()
    assert ours.words("<extra_id_99><extra_id_0>") == [count, count + 99] and ours.largest_id == count + 99
    ours.check_vocabulary(count + 100)
    assert f"has the token id {count + 99}, but the text encoder has {count + 99} embeddings" in refused(
        ours.check_vocabulary, count + 99
    )


# Prompts

LONG = {
    "one word": "k" * MAX_CHARACTERS,
    "words": "ka lo " * (MAX_CHARACTERS // 6),
    "blanks": " " * MAX_CHARACTERS,
    "marks": "e" + "\u0301" * (MAX_CHARACTERS - 1),
    "zero bytes": "\0" * MAX_CHARACTERS,
    "unknown": "\U0010ffff\u1bc9" * (MAX_CHARACTERS // 2),
    "long replacements": "ﷺ" * (MAX_CHARACTERS // 10),
    "begins of special tokens": "<extra_id_" * (MAX_CHARACTERS // 10),
    "▁": "▁" * MAX_CHARACTERS,
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.sample(0)
def test_long_prompts_take_little_time(folder: Path, name: str) -> None:
    tokenizer, text = t5.load(folder), LONG[name]
    started = time.process_time()
    ids = tokenizer.words(text)
    taken = time.process_time() - started
    print(f"{name}: {len(ids)} tokens in {taken:.3f} s")
    assert taken < PROMPT_WITHIN and [*ids, 1] == files.hugging_face(files.trained())(text)["input_ids"]


def test_text_that_is_no_text(ours: T5Tokenizer) -> None:
    with pytest.raises(UsageError, match="a byte that is not text"):
        ours.words("a \udcff b")
    with pytest.raises(UsageError, match=f"the limit is {MAX_CHARACTERS}"):
        ours.words("a" * (MAX_CHARACTERS + 1))


# Files

GOOD = [("▁", -1.0), ("a", -2.0)]
# Words of a trie: the root leads to "a" at 0x61, a text that ends there; the place of its replacement is at 0x100.
TRIE = [0] * 0x200
TRIE[0x61] = 0x61 | 1 << 8 | (0x100 ^ 0x61) << 10
WORDS = {"outside": 0x61 | 1 << 8 | 0x3000 << 10, "far outside": 0x61 | 1 << 8 | 1 << 9 | 0x1FFFFF << 10}


def placed(place: int, **changed: int) -> list[int]:
    words = list(TRIE)
    words[0x100] = place | 1 << 31
    words[0x61] = changed.get("word", words[0x61])
    return words


def test_a_table_by_hand(tmp_path: Path) -> None:
    raw = files.model([*GOOD, ("b", -2.0)], files.normalizer(files.table(placed(1), b"\0b\0")))
    assert t5.load(files.write_spiece(tmp_path, raw)).words("aa c") == [3, 5, 5, 3, 2]


SPIECE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "lacks"),
    "no pieces": (files.model([]), "not of types 1 and 3"),
    "text": (b"not a model at all", "kind"),
    "cut in a piece": (files.trained()[:5000], "cut short or damaged"),
    "huge length": (files.model(GOOD) + files.message(1, b"x", 2**63), "claims a field of 9223372036854775808 bytes"),
    "endless number": (files.model(GOOD) + b"\xff" * 30, "does not end"),
    "group": (files.model(GOOD) + b"\x0b", "kind 3"),
    "a number for a piece": (files.model(GOOD) + files.number(1, 7), "the number 7 where a message belongs"),
    "a text for a score": (
        files.model(GOOD) + files.message(1, files.message(1, b"b") + files.message(2, b"xy")),
        "2 bytes",
    ),
    "nan": (files.model([*GOOD, ("b", float("nan"))]), "the score nan"),
    "infinite": (files.model([*GOOD, ("b", float("-inf"))]), "the score -inf"),
    "twice": (files.model([*GOOD, ("a", -3.0)]), "the piece 'a' twice"),
    "no text": (files.model([*GOOD, ("", -3.0)]), "1 to 64 characters"),
    "long text": (files.model([*GOOD, ("b" * 65, -3.0)]), "1 to 64 characters"),
    "no utf-8": (files.model([*GOOD, (b"\xff\xfe", -3.0)]), "not UTF-8"),
    "two unknown": (files.model([*GOOD, ("b", 0.0, 2)]), "one of type 2"),
    "user's own": (files.model([*GOOD, ("b", 0.0, 4)]), "not of types 1 and 3"),
    "bytes": (files.model([*GOOD, ("<0x00>", 0.0, 6)]), "not of types 1 and 3"),
    "no end": (files.model(GOOD).replace(b"</s>", b"</z>"), "no special token '</s>'"),
    "bpe": (files.model(GOOD, files.message(2, files.number(3, 2))), "model_type is 2, not 1"),
    "byte fallback": (
        files.model(GOOD, files.message(2, files.number(35, 1))),
        "byte_fallback is 1, and it has pieces for 0",
    ),
    "suffix": (files.model(GOOD, files.message(2, files.number(24, 1))), "treat_whitespace_as_suffix is 1"),
    "no prefix": (files.model(GOOD, files.normalizer(b"", files.number(3, 0))), "add_dummy_prefix is 0, not 1"),
    "blanks": (files.model(GOOD, files.normalizer(b"", files.number(4, 0))), "remove_extra_whitespaces is 0"),
    "short table": (files.model(GOOD, files.normalizer(b"\1\0")), "a trie of 0 bytes in 2 bytes"),
    "long trie": (files.model(GOOD, files.normalizer(files.table([0], b"", 4000))), "a trie of 4000 bytes in 8 bytes"),
    "odd trie": (files.model(GOOD, files.normalizer(files.table([0], b"", 3))), "a trie of 3 bytes"),
    "large table": (files.model(GOOD, files.normalizer(bytes(2**20 + 1))), "at most 1048576 are read"),
}
# Tables that are damaged where the text "a" leads
TABLES: dict[str, tuple[bytes, str]] = {
    "a place outside": (files.table(placed(77), b"b\0"), "a replacement at byte 77 of 2 that does not end"),
    "no end": (files.table(placed(0), b"b"), "at byte 0 of 1 that does not end"),
    "long": (files.table(placed(0), b"b" * 1000 + b"\0"), "at byte 0 of 1001 that does not end"),
    "no utf-8": (files.table(placed(0), b"\xff\0"), "a text that is not UTF-8"),
    "out of the trie": (files.table(placed(0, word=WORDS["outside"]), b"b\0"), "leads to word 12543"),
    "far out of it": (files.table(placed(0, word=WORDS["far outside"]), b"b\0"), "leads to word"),
    "short": (files.table([0], b"b\0"), "a trie of 1 words that leads to word"),
}


@pytest.mark.parametrize("mutant", SPIECE)
def test_hostile_spiece_model(tmp_path: Path, mutant: str) -> None:
    raw, words = SPIECE[mutant]
    assert words in refused(t5.load, files.write_spiece(tmp_path, raw)) or not raw


@pytest.mark.parametrize("mutant", TABLES)
def test_hostile_table(tmp_path: Path, mutant: str) -> None:
    table, words = TABLES[mutant]
    assert words in refused(t5.load, files.write_spiece(tmp_path, files.model(GOOD, files.normalizer(table))))


def test_a_table_that_leads_round(tmp_path: Path) -> None:
    """Each byte leads back to the word that it came from, without an end."""
    words = list(TRIE)
    words[0x61] = 0x61 | (0x61 ^ 0x61 ^ 0x61) << 10
    raw = files.model(GOOD, files.normalizer(files.table(words, b"b\0")))
    assert t5.load(files.write_spiece(tmp_path, raw)).words("a" * 500) == [3, *[4] * 500]


def test_every_cut_and_some_changed_bytes(tmp_path: Path) -> None:
    """Of a small model: one line, or a tokenizer, and no other error."""
    import random

    good = files.model(GOOD, files.message(2, files.number(3, 1)), files.normalizer(files.table(placed(1), b"\0b\0")))
    rng, outcomes = random.Random(0), {"refused": 0, "read": 0}
    cases = [good[:size] for size in range(len(good))]
    for _ in range(400):
        changed = bytearray(good)
        changed[rng.randrange(len(good) if rng.random() < 0.3 else 120)] = rng.randrange(256)
        cases.append(bytes(changed))
    for raw in cases:
        files.write_spiece(tmp_path, raw)
        try:
            t5.load(tmp_path).words("aa b </s>")
            outcomes["read"] += 1
        except ModelError as error:
            assert str(error).isprintable() and len(str(error)) < 300 and "tokenizers library" not in str(error)
            outcomes["refused"] += 1
    print(outcomes)
    assert min(outcomes.values()) > 30


@pytest.mark.sample(0)
def test_no_table_that_is_taken_makes_the_library_panic() -> None:
    """Of NFKC's with some bytes changed, over characters of two and three bytes."""
    import random

    whole, rng, taken = files.charsmap(files.trained()), random.Random(3), 0
    checked = [*texts(100), *TROUBLE, "".join(map(chr, range(1, 0xD800, 7)))]
    for _ in range(150):
        table = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            table[rng.randrange(4, len(table))] = rng.randrange(256)
        try:
            charsmap.check(bytes(table))
        except charsmap.DamagedTable:
            continue
        taken += 1
        normalizer = normalizers.Precompiled(bytes(table))
        for text in checked:
            normalizer.normalize_str(text)
    print(f"{taken} of 150 tables are taken")
    assert taken > 10


def replaced(parts: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return parts | {head: replaced(parts[head], rest, value) if rest else value}


def table_of(raw: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


TABLE = table_of(files.table(placed(1), b"\0b\0"))
METASPACE = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
HANDMADE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": id, "content": text} for id, text in enumerate(("<pad>", "</s>", "<unk>"))],
    "normalizer": TABLE,
    "pre_tokenizer": METASPACE,
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "Unigram",
        "unk_id": 2,
        "vocab": [["<pad>", 0], ["</s>", 0], ["<unk>", 0], ["▁", -1], ["b", -2.5]],
    },
}
VOCAB = HANDMADE["model"]["vocab"]
ADDED = HANDMADE["added_tokens"]
JSON: dict[str, tuple[str, Any, str]] = {
    "bpe": ("model.type", "BPE", "model.type"),
    "byte fallback": ("model.byte_fallback", True, "model.byte_fallback"),
    "dropout": ("model.dropout", 0.1, "a part that is not known, 'dropout'"),
    "no unknown": ("model.unk_id", None, "model is not that of the published tokenizer"),
    "unknown outside": ("model.unk_id", 99, "model.unk_id is 99, of 5 pieces"),
    "unknown below": ("model.unk_id", -1, "model.unk_id is -1"),
    "object": ("model.vocab", {"a": 1}, "a list of pieces with their scores"),
    "triple": ("model.vocab", [*VOCAB, ["c", 1, 2]], "a list of pieces with their scores"),
    "many": ("model.vocab", [[f"{i}", -1] for i in range(2**18 + 1)], "at most 262144 are read"),
    "twice": ("model.vocab", [*VOCAB, ["b", -3]], "the piece 'b' twice"),
    "long": ("model.vocab", [*VOCAB, ["c" * 65, -3]], "1 to 64 characters"),
    "number": ("model.vocab", [*VOCAB, [3, -3]], "1 to 64 characters ('3')"),
    "no score": ("model.vocab", [*VOCAB, ["c", None]], "the score None"),
    "true": ("model.vocab", [*VOCAB, ["c", True]], "the score True"),
    "large": ("model.vocab", [*VOCAB, ["c", 1e300]], "the score 1e+300"),
    "nothing but special": ("model.vocab", VOCAB[:3], "has no pieces"),
    "no end": ("added_tokens", ADDED[:1], "no special token '</s>'"),
    "twice added": ("added_tokens", [*ADDED, ADDED[0]], "twice there"),
    "without id": ("added_tokens", [*ADDED, {"content": "<x>"}], "gives '<x>' the id 'None'"),
    "another's id": ("added_tokens", [*ADDED, {"content": "<x>", "id": 4}], "'<x>' the id 4, which is another's"),
    "wrong id": ("added_tokens", [*ADDED, {"content": "b", "id": 3}], "the special token 'b' the id 3"),
    "same id": ("added_tokens", [*ADDED, *({"content": text, "id": 9} for text in "xy")], "two tokens the same id"),
    "single word": ("added_tokens", [*ADDED, {"content": "<x>", "id": 9, "single_word": True}], "single_word"),
    "no normalizer": ("normalizer", None, "normalizer"),
    "lower case": ("normalizer", {"type": "Sequence", "normalizers": [TABLE, {"type": "Lowercase"}]}, "normalizer"),
    "bytes": ("pre_tokenizer", {"type": "ByteLevel"}, "pre_tokenizer"),
    "no prefix": ("pre_tokenizer", METASPACE | {"add_prefix_space": False}, "pre_tokenizer"),
    "underscore": ("pre_tokenizer", {"type": "Metaspace", "replacement": "_"}, "pre_tokenizer"),
    "no base64": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "ää"}, "characters (charsmap)"),
    "no table": ("normalizer", table_of(b""), "a trie of 0 bytes in 0 bytes"),
}  # fmt: skip


def test_a_tokenizer_json_by_hand(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(HANDMADE), encoding="utf-8")
    assert t5.load(tmp_path).words("ab c</s>") == [3, 4, 4, 3, 2, 1]


@pytest.mark.parametrize("mutant", JSON)
def test_hostile_tokenizer_json(tmp_path: Path, mutant: str) -> None:
    path, value, words = JSON[mutant]
    (tmp_path / "tokenizer.json").write_text(json.dumps(replaced(HANDMADE, path, value)), encoding="utf-8")
    assert words in refused(t5.load, tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "tokenizer.json"),
        ("[]", "a JSON object"),
        (json.dumps(HANDMADE).replace("-2.5", "NaN"), "NaN"),
        (json.dumps(HANDMADE).replace("-2.5", "1e999"), "tokenizer.json"),
        (json.dumps(HANDMADE).replace('"unk_id"', '"unk_id": 2, "unk_id"'), "unk_id"),
    ],
)
def test_no_json(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    assert words in refused(t5.load, tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert "spiece.model" in refused(t5.load, tmp_path)


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.json"])
def test_what_is_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert name in refused(t5.load, tmp_path)
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    assert name in refused(t5.load, tmp_path)
