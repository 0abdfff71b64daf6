"""The block `writing` of a passport: a text encoder reads a fixed text and the tokens after it, one by one, as it does
when it writes. The scores of each next token are compared with float64, and in float32 the tokens that it writes.

The float64 scores are computed layer by layer on the whole text, without kept keys and values, by the positions of the
whole: whatever keeps, cuts and continues them is not in the reference. The text has a place for a picture, whose slots
are random numbers, and is longer than what is read at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.networks.encoders import decoder
from qwenimg.common.networks.encoders.decoder import HEAD, DecoderConfig, text_table
from qwenimg.common.networks.encoders.vision_tower import PicturePlace
from qwenimg.common.numbers.noise import TorchCPUGenerator, sha256
from qwenimg.common.numbers.rounding import nearest
from qwenimg.common.parity import constants, parity
from qwenimg.common.parity.blocks import ComponentPolicy
from qwenimg.common.parity.judged import compared
from qwenimg.common.parity.passport.passport import MAX_GAIN, Figure, RecordedWriting
from qwenimg.common.parity.sample import projected
from qwenimg.common.parts.texts import levels
from qwenimg.common.parts.texts.states import layer_bytes
from qwenimg.common.parts.texts.writers import text_encoder
from qwenimg.common.precision.precision import Precision
from qwenimg.common.prompts.chat import ChatTokenizer
from qwenimg.common.prompts.rewriting import INSTRUCTIONS
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Engine, WritingEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.runtime.traced import TINY, Values, leaves

NAME = "writing"
LENGTH = 544  # tokens that are read first: more than 512, which are read at once
FOLLOWING = 24  # tokens after them, one by one
PLACE = PicturePlace(500, 4, 6)  # across those 512
DEEP = 2  # slots of the picture: for the start, and to be added after the first layer
HIGHEST = 8  # scores of each next token that are kept
_MODEL = Block(name="model", paths=re.compile(""))
_FEED_FORWARD = 3  # arrays of the feed-forward's width, which is gated
Scores = NDArray[np.float32]  # [FOLLOWING V]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The tokens that are read first, the picture's slots [DEEP slots C], and the tokens after them."""

    ids: list[int]
    slots: NDArray[np.float32]
    following: list[int]

    @property
    def sha256(self) -> str:
        return sha256(np.array([*self.ids, *self.following], np.int64))


def reading(tokenizer: ChatTokenizer, config: DecoderConfig) -> Reading:
    """Return the text for a language model: the instruction by which it rewrites prompts, as often as it takes."""
    once = tokenizer.plain(INSTRUCTIONS["draw", "en"])
    ids = (once * -(-(LENGTH + FOLLOWING) // len(once)))[: LENGTH + FOLLOWING]
    noise = TorchCPUGenerator(0).normal((DEEP, PLACE.rows * PLACE.columns, config.hidden_size))
    return Reading(ids=ids[:LENGTH], slots=nearest(noise.astype(np.float32), "bfloat16"), following=ids[LENGTH:])


def part(checkpoint: Checkpoint, precision: Precision) -> tuple[ComponentPolicy, ChatTokenizer] | None:
    """Return the text encoder with its head, and its tokenizer; None for a model whose text encoder cannot write."""
    try:
        name, component = text_encoder(checkpoint)
        written = levels.writing(component)
    except ModelError:
        return None
    return ComponentPolicy(name, written, precision), checkpoint.tokenizers[name].tokenizer


# On a backend


def read_scores(residents: Residents, policy: ComponentPolicy, text: Reading) -> Scores:
    """Return the scores of the token after `text.ids`, and after each of `text.following` but the last."""
    encoder, engine = _opened(residents, policy), residents.runtime.engine
    rows = [engine.numpy(_begun(encoder, engine, text))]
    rows += [engine.numpy(encoder.follow([token]))[0] for token in text.following[:-1]]
    encoder.forget()
    return np.stack(rows)


def write(residents: Residents, policy: ComponentPolicy, text: Reading, count: int) -> tuple[list[int], list[float]]:
    """Return `count` tokens that are written after `text.ids`, always that of the highest score, and how far it is
    above the second highest."""
    encoder, engine = _opened(residents, policy), residents.runtime.engine
    scores, tokens, margins = engine.numpy(_begun(encoder, engine, text)), list[int](), list[float]()
    while len(tokens) < count:
        tokens.append(int(np.argmax(scores)))
        margins.append(float(np.subtract(*np.sort(scores)[[-1, -2]])))
        scores = engine.numpy(encoder.follow(tokens[-1:]))[0]
    encoder.forget()
    return tokens, margins


def _opened(residents: Residents, policy: ComponentPolicy) -> WritingEncoder:
    activations = layer_bytes(residents.runtime, policy.component, 1, LENGTH, _FEED_FORWARD)
    split = Split(activations=activations, passes=float(1 + FOLLOWING))
    stage = Stage(
        name=NAME, resident=f"{policy.name} that writes", component=policy.component, splits=(split,), keeps=False
    )
    encoder: WritingEncoder = residents.acquire(stage)[0]
    return encoder


def _begun(encoder: WritingEncoder, engine: Engine, text: Reading) -> object:
    return encoder.begin(text.ids, [PLACE], [engine.array(text.slots)])


# In float64


def exact_scores(policy: ComponentPolicy, exact: Engine, text: Reading, seed: int | None = None) -> Float64:
    """Return the scores in float64 [FOLLOWING V], with one layer in memory at a time. seed: of moved weights."""
    config, blocks = policy.component.config, policy.open(exact, "float64")
    dtype = policy.precision.compute_dtype("text")

    def call(path: str, *arguments: Values | tuple[Values, ...], method: str = "") -> Float64:
        block = Block(name=NAME, paths=re.compile(re.escape(path)), method=method)
        made: Float64 = leaves(blocks.call(path, block, arguments, seed))[0].array.astype(np.float64)
        return made

    ids = [*text.ids, *text.following[:-1]]
    place = slice(PLACE.start, PLACE.start + PLACE.rows * PLACE.columns)
    table = (nearest(values.astype(np.float32), dtype) for values in text_table(config, len(ids), [PLACE]))
    rope = tuple(Values(dtype, values) for values in table)
    x = call("embed_tokens", Values("int64", np.array([ids], np.int64))) * config.embedding_scale
    x[:, place] = text.slots[0]
    for number in range(config.used_layers):
        x = call(f"layers.{number}", Values("float64", x), rope)
        if number + 1 < len(text.slots):
            x[:, place] += text.slots[number + 1]
    states = Values("float64", call("norm", Values("float64", x[:, LENGTH - 1 :])))
    tied = not config.has_head
    [scores] = call("embed_tokens", states, method="scores") if tied else call(HEAD.removesuffix(".weight"), states)
    cap = config.final_logit_softcapping
    return np.asarray(cap * np.tanh(scores / cap) if cap else scores)


# Record and check


def record(residents: Residents, policy: ComponentPolicy, tokenizer: ChatTokenizer, exact: Engine) -> RecordedWriting:
    """Return the record of what the text encoder does on the engine of `residents`."""
    text = reading(tokenizer, policy.component.config)
    wide = exact_scores(policy, exact, text)
    moved = exact_scores(policy, exact, text, seed=0)
    change = float(np.linalg.norm(moved - wide) / np.linalg.norm(wide)) / (TINY * _layers(policy) ** 0.5)
    scores = read_scores(residents, policy, text)
    highest = np.argsort(-wide, axis=1, kind="stable")[:, :HIGHEST]
    values = np.take_along_axis(wide, highest, 1)
    noise = float(np.abs(np.take_along_axis(scores, highest, 1) - values).max())
    written: tuple[int, ...] = ()
    if dtype_of(policy) == "float32":
        written = _certain(*write(residents, policy, text, FOLLOWING), noise)
    made = RecordedWriting(
        component=policy.name,
        ids=text.sha256,
        exact=_projected(wide),
        highest=tuple(tuple(map(int, row)) for row in highest),
        values=values,
        noise=noise,
        gain=min(max(1.0, change), MAX_GAIN),
        written=written,
        figure=Figure(error=0.0, allowed=0.0),
    )
    return replace(made, figure=_figure(made, policy, scores))


def judged(
    recorded: RecordedWriting, residents: Residents, policy: ComponentPolicy, tokenizer: ChatTokenizer
) -> Figure:
    """Return the figure of the engine of `residents`."""
    text = reading(tokenizer, policy.component.config)
    unknown = Figure(error=np.nan, allowed=np.nan, failures=("the text has other tokens than when it was recorded",))
    if text.sha256 != recorded.ids:
        return unknown
    found = _figure(recorded, policy, read_scores(residents, policy, text))
    if recorded.written and dtype_of(policy) == "float32":
        tokens, _ = write(residents, policy, text, len(recorded.written))
        pairs = enumerate(zip(tokens, recorded.written, strict=True), 1)
        other = next((number for number, (ours, theirs) in pairs if ours != theirs), 0)
        if other:
            why = f"of {len(tokens)} tokens that it writes, number {other} is another one"
            found = replace(found, failures=(*found.failures, why))
    return compared(found, recorded.figure, dtype_of(policy))


def _certain(tokens: Sequence[int], margins: Sequence[float], noise: float) -> tuple[int, ...]:
    """Return the tokens up to the first one that another rounding might change."""
    doubtful = (place for place, margin in enumerate(margins) if margin <= 2 * parity.RATIO * noise)
    return tuple(tokens[: next(doubtful, len(tokens))])


def _figure(recorded: RecordedWriting, policy: ComponentPolicy, scores: Scores) -> Figure:
    """Return the error of `scores`. A failure too is a highest score of another token than in float64, where the
    second highest is farther away than twice the noise: that of the backend that recorded, times the ratio by which
    another one may exceed it."""
    dtype = dtype_of(policy)
    case = parity.Case(
        component=NAME,
        dtype=dtype,
        returned="float32",
        blocks=_layers(policy),
        k=constants.limit(f"{decoder.NETWORK.name}.{_MODEL.name}", dtype) * recorded.gain,
    )
    verdict = parity.judge(case, recorded.exact, parity.Output(values=_projected(scores), dtype="float32"))
    margins = recorded.values[:, 0] - recorded.values[:, 1]
    right = np.array([row[0] for row in recorded.highest])
    clear = margins > 2 * parity.RATIO * recorded.noise
    others = int(np.count_nonzero(clear & (np.argmax(scores, axis=1) != right)))
    wrong = (f"of {int(clear.sum())} tokens with a clear score, {others} are others",) if others else ()
    reference = (f"reference: {why}" for why in verdict.reference_faults)
    return Figure(
        error=verdict.figures.relative / case.unit,
        allowed=verdict.allowed / case.unit,
        failures=(*reference, *verdict.failures, *wrong),
    )


def _layers(policy: ComponentPolicy) -> int:
    return int(policy.component.config.used_layers)


def dtype_of(policy: ComponentPolicy) -> str:
    """Return the lowest dtype in which the text encoder computes."""
    return policy.dtype(_MODEL, "", ())


def _projected(scores: NDArray[np.floating[Any]]) -> Float64:
    """Return the projections of each row [V]."""
    return np.stack([projected(row.astype(np.float64), 0) for row in scores])
