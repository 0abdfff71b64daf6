"""Prompts for CLIP as users of Stable Diffusion write them: weights in brackets, and more than 77 tokens.

Grammar and effects follow the AUTOMATIC1111 web UI, for which prompts are shared:

- `(word)` is 1.1 times the weight, `[word]` 1 / 1.1 times, `(word:1.3)` 1.3 times; they nest and multiply;
- a backslash makes a bracket, or a backslash, plain text; before anything else it is left out;
- an opening bracket that is never closed reaches to the end; a closing one without its opening is plain text;
- round and square brackets are paired apart from each other, so that they may cross;
- a prompt is cut into chunks of 75 tokens; each has its own start and end token and is padded to 77;
- BREAK ends a chunk, within brackets too (where the web UI takes it for a word of a negative weight);
- an embedding (`inversion`) that does not fit into the rest of a chunk begins a new one;
- the states of all chunks follow each other; the pooled vector is the first chunk's;
- a token's state is multiplied by its weight, then the chunk by one number that restores the mean over all its tokens
  and channels (the web UI's emphasis mode "Original"). Start, end and padding have weight 1.

Schedules such as `[a:b:0.5]` are read before (`scheduled`), and AND before these (`composed`). Not done: moving a
chunk's end back to a comma.

A prompt without brackets and backslashes, of at most 75 tokens, gives exactly the ids of diffusers' pipelines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.prompts.clip import CLIPTokenizer
from qwenimg.common.prompts.inversion import pieces

LENGTH = 77  # of a chunk, with start and end token
MAX_CHUNKS = 40  # 3,000 tokens: each chunk's states are seen by every attention layer in every step
MAX_WEIGHT = 100.0  # brackets by the thousand must not overflow

_FACTOR = {"(": 1.1, "[": 1 / 1.1}
_OPENING = {")": "(", "]": "["}
_BREAK = re.compile(r"\bBREAK\b")
# A weight before a closing bracket, an escaped character, a bracket, or plain text.
_TOKEN = re.compile(
    r":\s*(?P<weight>[+-]?(?:\d{1,6}(?:\.\d{0,12})?|\.\d{1,12}))\s*\)|\\(?P<escaped>[\\()\[\]])|[()\[\]]|[^\\()\[\]:]+|.",
    re.DOTALL,
)


class Vector(NamedTuple):
    """A vector of an embedding in a prompt."""

    embedding: int  # its number in the prompt
    row: int


Array: TypeAlias = Any  # of a backend
Token = tuple["int | Vector", float]  # an id or a vector, with its weight


@dataclass(frozen=True)
class Chunk:
    """Ids with start token, end token and padding, and the weight of each. `vectors`: the positions at which a vector
    of an embedding takes the place of a token's, whose id is the start token's there."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    vectors: tuple[tuple[int, Vector], ...] = ()


def parse(prompt: str) -> list[list[tuple[str, float]]]:
    """Split `prompt` at BREAK, and each section into parts of one weight each, without brackets and weights. No text is
    an error."""
    sections: list[list[tuple[str, float]]] = [[]]
    for token, weight in _weights(prompt):
        texts = [token["escaped"]] if token["escaped"] else _BREAK.split(token[0].removeprefix("\\"))
        for i, text in enumerate(texts):
            text = text.lstrip() if i else text
            sections += [[]] if i else []
            _append(sections[-1], text.rstrip() if i + 1 < len(texts) else text, weight)
    return sections


def _append(parts: list[tuple[str, float]], text: str, weight: float) -> None:
    if parts and parts[-1][1] == weight:
        text = parts.pop()[0] + text
    if text:
        parts.append((text, weight))


def prompt_chunks(
    tokenizers: Sequence[CLIPTokenizer], prompt: str, embeddings: Sequence[int] = ()
) -> list[list[Chunk]]:
    """Split `prompt` for each tokenizer into chunks; all get as many as the longest needs, so that the states can be
    joined. embeddings: the number of vectors of each that is marked in the prompt. Raises UsageError for a prompt that
    is too long or not Unicode text."""
    rows = [chunks(tokenizer, prompt, embeddings) for tokenizer in tokenizers]
    count = max(map(len, rows))
    return [row + [_chunk(tokenizer, [])] * (count - len(row)) for tokenizer, row in zip(tokenizers, rows, strict=True)]


def chunks(tokenizer: CLIPTokenizer, prompt: str, embeddings: Sequence[int] = ()) -> list[Chunk]:
    """Split `prompt` into one or more chunks. embeddings: see `prompt_chunks`. Raises UsageError."""
    *first, last = (
        [run for text, weight in parts for run in _runs(tokenizer, text, weight, embeddings)] for parts in parse(prompt)
    )
    size, sections = LENGTH - 2, [*first, last] if last or not first else first
    count = sum(len(run) for runs in sections for run in runs)
    if count > MAX_CHUNKS * size:
        raise UsageError(f"the prompt has {count} tokens, the limit is {MAX_CHUNKS * size}. Shorten it.")
    rows = [tokens for runs in sections for tokens in _filled(runs, size)]
    if len(rows) > MAX_CHUNKS:
        raise UsageError(
            f"the prompt has {len(rows)} chunks with its BREAKs, the limit is {MAX_CHUNKS}. Leave some out."
        )
    return [_chunk(tokenizer, tokens) for tokens in rows]


def apply_weights(states: NDArray[np.float32], prompt: Sequence[Chunk]) -> NDArray[np.float32]:
    """Apply the weights to the states [chunks S C] of a prompt's chunks, and join them: [1 chunks*S C].

    A chunk without weights does not change. The mean of a chunk is restored only if weighting does not make it zero or
    change its sign."""
    parts = [_weighted(part, np.array(chunk.weights)) for part, chunk in zip(states, prompt, strict=True)]
    return np.concatenate(parts)[None]


def weighted_array(states: Array, prompt: Sequence[Chunk], array: Callable[[NDArray[np.float32]], Array]) -> Array:
    """Apply the weights as `apply_weights`, to an array of a backend, which `array` makes, so that gradients pass;
    nothing is evaluated. Return the states [chunks S C]."""
    weights = np.array([chunk.weights for chunk in prompt], np.float32)[..., None]
    if (weights == 1).all():
        return states
    found = states * array(weights)
    before, after = (one.reshape(len(weights), -1).mean(axis=1).reshape(-1, 1, 1) for one in (states, found))
    restored = (before * after > 0) * 1.0
    return found * (restored * before / (restored * after + (1.0 - restored)) + (1.0 - restored))


def _weighted(states: NDArray[np.float32], weights: NDArray[np.float64]) -> NDArray[np.float32]:
    if (weights == 1).all():
        return states
    wide = states.astype(np.float64)
    weighted = wide * weights[:, None]
    before, after = float(wide.mean()), float(weighted.mean())
    scale = before / after if before * after > 0 else 1.0
    return (weighted * scale).astype(np.float32)


def _runs(tokenizer: CLIPTokenizer, text: str, weight: float, embeddings: Sequence[int]) -> Iterator[list[Token]]:
    """Yield the tokens of a text, the vectors of an embedding together and each other token alone."""
    for piece in pieces(text) if embeddings else [text]:
        if isinstance(piece, int):
            yield [(Vector(piece, row), weight) for row in range(embeddings[piece])]
        else:
            for token in tokenizer.words(piece):
                yield [(token, weight)]


def _filled(runs: Sequence[Sequence[Token]], size: int) -> list[list[Token]]:
    """Return chunks of at most `size` tokens, which tear no run."""
    rows: list[list[Token]] = [[]]
    for run in runs:
        rows += [[]] if len(rows[-1]) + len(run) > size else []
        rows[-1].extend(run)
    return rows


def _chunk(tokenizer: CLIPTokenizer, tokens: Sequence[Token]) -> Chunk:
    padding = LENGTH - 2 - len(tokens)
    known = (tokenizer.bos if isinstance(token, Vector) else token for token, _ in tokens)
    ids = (tokenizer.bos, *known, tokenizer.eos, *[tokenizer.pad] * padding)
    vectors = tuple((at, token) for at, (token, _) in enumerate(tokens, 1) if isinstance(token, Vector))
    return Chunk(ids, (1.0, *(weight for _, weight in tokens), 1.0, *[1.0] * padding), vectors)


def _weights(prompt: str) -> list[tuple[re.Match[str], float]]:
    """Return the tokens that are text, each with its weight."""
    tokens = list(_TOKEN.finditer(prompt))
    factors, closing = _brackets(tokens)
    texts: list[tuple[re.Match[str], float]] = []
    weights: dict[str, list[float]] = {"(": [1.0], "[": [1.0]}  # of all open brackets of a kind
    for index, token in enumerate(tokens):
        if index in factors:
            weights[token[0]].append(weights[token[0]][-1] * factors[index])
        elif index in closing:
            weights[closing[index]].pop()
        else:
            weight = weights["("][-1] * weights["["][-1]
            texts.append((token, 0.0 if isnan(weight) else max(-MAX_WEIGHT, min(MAX_WEIGHT, weight))))
    return texts


def _brackets(tokens: Sequence[re.Match[str]]) -> tuple[dict[int, float], dict[int, str]]:
    """Return the factor of each opening bracket, and for each closing one which bracket it closes."""
    factors: dict[int, float] = {}
    closing: dict[int, str] = {}
    opened: dict[str, list[int]] = {"(": [], "[": []}
    for index, token in enumerate(tokens):
        bracket = ")" if token["weight"] is not None else token[0]
        opening = _OPENING.get(bracket, "")
        if bracket in opened:
            opened[bracket].append(index)
            factors[index] = _FACTOR[bracket]
        elif opening and opened[opening]:
            start = opened[opening].pop()
            factors[start] = _FACTOR[opening] if token["weight"] is None else float(token["weight"])
            closing[index] = opening
    return factors, closing
