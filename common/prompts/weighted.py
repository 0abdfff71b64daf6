"""Prompts for CLIP as users of Stable Diffusion write them: weights in brackets, and more than 77 tokens.

The grammar and its effects are those of the AUTOMATIC1111 web UI, for which prompts are shared:

- `(word)` is 1.1 times the weight, `[word]` 1 / 1.1 times, `(word:1.3)` 1.3 times; they nest and multiply;
- a backslash makes a bracket, or a backslash, plain text;
- an opening bracket that is never closed reaches to the end; a closing one without its opening is plain text;
- a prompt is cut into chunks of 75 tokens; each has its own start and end token and is padded to 77;
- the states of all chunks follow each other; the pooled vector is the first chunk's;
- a token's state is multiplied by its weight, then the chunk by one number that restores the mean over all its tokens
  and channels (the web UI's emphasis mode "Original"). Start, end and padding have weight 1.

Not done here: BREAK, schedules such as `[a:b:0.5]`, and moving a chunk's end back to a comma.

A prompt without brackets and backslashes, of at most 75 tokens, gives exactly the ids of diffusers' pipelines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.prompts.clip import CLIPTokenizer

LENGTH = 77  # of a chunk, with start and end token
MAX_CHUNKS = 40  # 3,000 tokens: each chunk's states are seen by every attention layer in every step
MAX_WEIGHT = 100.0  # brackets by the thousand must not overflow

_FACTOR = {"(": 1.1, "[": 1 / 1.1}
_OPENING = {")": "(", "]": "["}
# A weight before a closing bracket, an escaped character, a bracket, or plain text.
_TOKEN = re.compile(
    r":\s*(?P<weight>[+-]?(?:\d{1,6}(?:\.\d{0,12})?|\.\d{1,12}))\s*\)|\\(?P<escaped>[\\()\[\]])|[()\[\]]|[^\\()\[\]:]+|.",
    re.DOTALL,
)


@dataclass(frozen=True)
class Chunk:
    """Ids with start token, end token and padding, and the weight of each."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


def parse(prompt: str) -> list[tuple[str, float]]:
    """Split `prompt` into parts of one weight each, without brackets and weights. No text is an error."""
    tokens = list(_TOKEN.finditer(prompt))
    factors, closes = _brackets(tokens)
    parts: list[tuple[str, float]] = []
    weights = [1.0]
    for index, token in enumerate(tokens):
        if index in factors:
            weights.append(weights[-1] * factors[index])
        elif index in closes:
            del weights[-closes[index] :]
        else:
            weight = max(-MAX_WEIGHT, min(MAX_WEIGHT, weights[-1]))
            text = token["escaped"] or token[0]
            if parts and parts[-1][1] == weight:
                text = parts.pop()[0] + text
            parts.append((text, weight))
    return parts


def plain(prompt: str) -> str:
    """Return `prompt` without brackets and weights, for a text encoder that takes none."""
    return "".join(text for text, _ in parse(prompt))


def prompt_chunks(tokenizers: Sequence[CLIPTokenizer], prompt: str) -> list[list[Chunk]]:
    """Split `prompt` for each tokenizer into as many chunks as any of them needs, so that the states can be joined.
    Raises UsageError for a prompt that is too long or not Unicode text."""
    rows = [chunks(tokenizer, prompt) for tokenizer in tokenizers]
    count = max(map(len, rows))
    return [row + [_chunk(tokenizer, [])] * (count - len(row)) for tokenizer, row in zip(tokenizers, rows, strict=True)]


def chunks(tokenizer: CLIPTokenizer, prompt: str) -> list[Chunk]:
    """Split `prompt` into one or more chunks. Raises UsageError."""
    tokens = [(token, weight) for text, weight in parse(prompt) for token in tokenizer.words(text)]
    size = LENGTH - 2
    if len(tokens) > MAX_CHUNKS * size:
        raise UsageError(f"the prompt has {len(tokens)} tokens, the limit is {MAX_CHUNKS * size}. Shorten it.")
    return [_chunk(tokenizer, tokens[start : start + size]) for start in range(0, max(1, len(tokens)), size)]


def apply_weights(states: NDArray[np.float32], prompt: Sequence[Chunk]) -> NDArray[np.float32]:
    """Apply the weights to the states [chunks S C] of a prompt's chunks, and join them: [1 chunks*S C].

    A chunk without weights does not change. The mean of a chunk is restored only if weighting does not make it zero or
    change its sign."""
    parts = [_weighted(part, np.array(chunk.weights)) for part, chunk in zip(states, prompt, strict=True)]
    return np.concatenate(parts)[None]


def _weighted(states: NDArray[np.float32], weights: NDArray[np.float64]) -> NDArray[np.float32]:
    if (weights == 1).all():
        return states
    wide = states.astype(np.float64)
    weighted = wide * weights[:, None]
    before, after = float(wide.mean()), float(weighted.mean())
    scale = before / after if before * after > 0 else 1.0
    return (weighted * scale).astype(np.float32)


def _chunk(tokenizer: CLIPTokenizer, tokens: Sequence[tuple[int, float]]) -> Chunk:
    padding = LENGTH - 2 - len(tokens)
    ids = (tokenizer.bos, *(token for token, _ in tokens), tokenizer.eos, *[tokenizer.pad] * padding)
    return Chunk(ids, (1.0, *(weight for _, weight in tokens), 1.0, *[1.0] * padding))


def _brackets(tokens: Sequence[re.Match[str]]) -> tuple[dict[int, float], dict[int, int]]:
    """Return the factor of each opening bracket, and how many brackets each closing one closes: open ones inside
    too."""
    factors: dict[int, float] = {}
    closes: dict[int, int] = {}
    opened: list[int] = []
    counts: Counter[str] = Counter()  # of `opened`, by kind: saves a search without a match
    for index, kind, weight in _kinds(tokens):
        if kind in _FACTOR:
            factors[index] = _FACTOR[kind]
            opened.append(index)
            counts[kind] += 1
        elif counts[_OPENING[kind]]:
            depth = next(d for d, i in enumerate(reversed(opened), 1) if tokens[i][0] == _OPENING[kind])
            if weight is not None:
                factors[opened[-depth]] = weight
            counts.subtract(tokens[i][0] for i in opened[-depth:])
            del opened[-depth:]
            closes[index] = depth
    return factors, closes


def _kinds(tokens: Sequence[re.Match[str]]) -> Iterator[tuple[int, str, float | None]]:
    """Yield (index, bracket, weight) of the tokens that are brackets."""
    for index, token in enumerate(tokens):
        if token["weight"] is not None:
            yield index, ")", float(token["weight"])
        elif token[0] in "()[]":
            yield index, token[0], None
