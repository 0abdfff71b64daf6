"""Texts of ten scripts, of few syllables each, so that a tokenizer learns from them; and texts that cause trouble."""

from __future__ import annotations

import random

SYLLABLES = {
    "Latin": "ka lo mi re st an ing er the é ü ñ qu ck",
    "Cyrillic": "пре ка ла ми сто ев ий ть ё щи й",
    "Greek": "κα λο μι ρε στ αν ος ή ώς",
    "Arabic": "كا لو مي ري ست ان ال ة ؤ",
    "Hebrew": "כא לו מי רי סת ים ה ות",
    "Devanagari": "का लो मि रे स्त अं ना है क्ष",
    "Thai": "กา โล มิ เร สต ำ นั่ ที่",
    "Hangul": "가 로 미 레 은 는 다 한국",
    "Han": "红 色 的 圆 在 左 边 星 星 夜",
    "Kana": "か ろ ミ レ スト ん が パ ー",
}
PUNCTUATION = (" ", " ", " ", " ", ", ", ". ", "  ", "-", "!", "\n", "\t", " (", ") ", ":1.3 ", "; ", "…")
# What a normalizer changes, or a program trips over.
TROUBLE = (
    "ﬁ", "①", "㌔", "Ａ", "\u3000", "\u00a0", "½", "™", "ﷺ", "e\u0301", "\u0301\u0302\u0303", "\u1100\u1161\u11a8", "é",
    "\u200b", "\u200d", "\ufeff", "\ufffd", "\u0000", "\u0007", "\u00ad", "👍🏽", "👩‍👩‍👧", "🇩🇪", "𝔘", "\U0010ffff",
    "ß", "İ", "ǅ", "\u2028", "\u0085", "ｶﾞ", "ą̈", "</", "<unk", "~", "„", "№", "Ⅷ", "\u1680", "e\u0323\u0302",
)  # fmt: skip


def words(rng: random.Random, script: str, count: int) -> str:
    """A text of this script."""
    syllables = SYLLABLES[script].split()
    text = ""
    for _ in range(count):
        text += "".join(rng.choices(syllables, k=rng.randint(1, 4))) + rng.choice(PUNCTUATION)
    return text


def corpus(count: int, seed: int = 1) -> list[str]:
    """Texts to learn from, one line each."""
    rng = random.Random(seed)
    return [words(rng, script, 12).replace("\n", " ") for _ in range(count) for script in SYLLABLES]


def texts(count: int, seed: int = 2) -> list[str]:
    """Texts of one script or of several, every third with trouble in it, and some of nothing else."""
    rng, made = random.Random(seed), []
    for i in range(count):
        parts = [words(rng, rng.choice(list(SYLLABLES)), rng.randint(0, 6)) for _ in range(rng.randint(1, 3))]
        if i % 3 == 0:
            parts += rng.choices(TROUBLE, k=rng.randint(1, 5))
            rng.shuffle(parts)
        if i % 17 == 0:
            parts = ["".join(chr(_character(rng)) for _ in range(rng.randint(1, 40)))]
        made.append("".join(parts).upper() if i % 11 == 0 else "".join(parts))
    return made


def _character(rng: random.Random) -> int:
    """Any character but a surrogate."""
    code = rng.choice(
        (rng.randrange(0x250), rng.randrange(0x300, 0x370), rng.randrange(0x3000), rng.randrange(0x110000))
    )
    return code if not 0xD800 <= code < 0xE000 else 0x41
