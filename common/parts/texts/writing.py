"""Texts that a language model writes: several at once, token by token, by the model that a family encodes prompts with
or by another one.

Texts are rows of one batch. A row leaves when its text ends, and the next one joins: each is the text that it would be
alone, up to the rounding of the backend's products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import ModelError
from qwenimg.common.networks.encoders.vision_tower import PicturePlace
from qwenimg.common.numbers.next_token import Decoding, next_token
from qwenimg.common.parts.texts.picture_texts import SeenPicture, patches_of, slots_of, vision_bytes
from qwenimg.common.parts.texts.states import RESIDENT, layer_bytes
from qwenimg.common.pictures.patches import PictureForm
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.prompts import written_text
from qwenimg.common.prompts.chat import LONGEST, Chat, ChatTokenizer, Turn
from qwenimg.common.prompts.check import check_text
from qwenimg.common.prompts.rewriting import OURS, Protocol
from qwenimg.common.runtime import text_store
from qwenimg.common.runtime.checkpoint import Component, TokenizerFiles
from qwenimg.common.runtime.engine import Array, WritingEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.weights import quantize

ROWS = 8  # texts at once
_AROUND = 64  # tokens of a template
_FEED_FORWARD = 3  # arrays of the feed-forward's width, which is gated

Opening: TypeAlias = Sequence[tuple[Array, Array]]
"""The keys and values of each layer for the first tokens of texts."""
Show: TypeAlias = Callable[[int, str], None]
"""Is called with the number of a text and what was added to it."""
Ended: TypeAlias = "Callable[[int, Written], None]"
"""Is called with the number of a text, and all of it."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """An instruction, and a question with the pictures that it is about; earlier questions, with their answers and the
    number of their pictures, which come first."""

    system: str
    user: str
    pictures: tuple[SeenPicture, ...] = ()
    earlier: tuple[Turn, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Written:
    """A text that a model has written."""

    text: str  # one line
    whole: str  # as it came
    tokens: int
    cut: bool  # True: it was ended at the limit of tokens or of time, and then at the end of its last sentence


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A conversation as ids, with the pictures' places among them."""

    ids: list[int]
    opening: tuple[int, ...] = ()  # the first ids, which are the same for all questions with its instruction
    places: list[PicturePlace] = field(default_factory=list)
    pictures: tuple[SeenPicture, ...] = ()


class Writer:
    """Writes answers in conversations."""

    def __init__(
        self,
        residents: Residents,
        component: Component,
        tokenizer: TokenizerFiles,
        chat: Chat,
        form: PictureForm | None = None,
        stops: Sequence[int] = (),
        resident: str = RESIDENT,
        protocol: Protocol = OURS,
    ):
        """Set the parts. chat: the text around a conversation. form: in which pictures are seen, None for a model that
        sees none. stops: the tokens that end a text, if the files name some. resident: the name of the component in
        memory. protocol: how it is asked to rewrite a prompt."""
        self.residents, self.runtime, self.component = residents, residents.runtime, component
        self.chat, self.form, self.resident, self.protocol = chat, form, resident, protocol
        self._tokenizer, self._stops = tokenizer, stops
        self.seconds = math.inf  # after which a text is ended

    @property
    def tokenizer(self) -> ChatTokenizer:
        tokenizer: ChatTokenizer = self._tokenizer.tokenizer
        return tokenizer

    @property
    def sees(self) -> bool:
        """True if it sees pictures."""
        return self.form is not None and self.chat.picture is not None

    def asked(self, conversation: Conversation) -> Asked:
        """Return the ids of a conversation. Raises UsageError for a question that is too long, or no text."""
        for text in (conversation.user, *(turn.question + turn.answer for turn in conversation.earlier)):
            check_text(text)
        sizes = self._sizes(conversation.pictures)
        slots = [columns * rows for columns, rows in sizes]
        ids, starts = self.chat.ids(self.tokenizer, conversation.system, conversation.user, slots, conversation.earlier)
        places = [PicturePlace(start, rows, columns) for start, (columns, rows) in zip(starts, sizes, strict=True)]
        opening = tuple(self.chat.opening(self.tokenizer, conversation.system))
        return Asked(ids=ids, opening=opening, places=places, pictures=conversation.pictures)

    def _sizes(self, pictures: Sequence[SeenPicture]) -> list[tuple[int, int]]:
        """Return the columns and rows of slots of each picture."""
        if not pictures:
            return []
        if self.form is None or self.chat.picture is None:
            raise ModelError("this language model sees no pictures")
        return slots_of(pictures, self.component.config, self.form)

    # Writing

    def stage(self, conversations: Sequence[Conversation], how: Decoding, *, keeps: bool = False) -> Stage:
        """Return the stage that writes the answers, with as many texts at once as fit. No tokens are counted, since a
        plan may have no tokenizer. keeps: the model stays in memory."""
        lengths = [self._longest(one) for one in conversations]
        sizes = [size for one in conversations for size in self._sizes(one.pictures)]
        vision = vision_bytes(self.runtime, self.component, sizes) if sizes else 0
        most = min(ROWS, len(conversations))
        openings = sum(len(system.encode()) // 2 + _AROUND for system in {one.system for one in conversations})
        splits = tuple(self._split(max(lengths), rows, how, vision, openings) for rows in range(most, 0, -1))
        return Stage(
            name="writing", resident=self.resident, component=self._form(splits[0]), splits=splits, keeps=keeps,
            title="the text that the model writes",
        )  # fmt: skip

    def _form(self, split: Split) -> Component:
        """Return the component as it is in memory: its codes decoded while they are read, where the engine would decode
        all of them for each token, and that fits."""
        component, runtime = self.component, self.runtime
        if not runtime.engine.workspace.decoded or (plan := quantize.decoded(component.plan)) is component.plan:
            return component
        wide = replace(component, plan=plan)
        needed = runtime.weight_bytes(wide) + runtime.loading_bytes(wide) + split.needed
        return wide if needed <= runtime.budget(self.residents.weights) else component

    def _longest(self, conversation: Conversation) -> int:
        """Return the most tokens that a conversation may have: each has one byte of the question or more, and of an
        instruction, which is ours, two or more."""
        slots = sum(columns * rows for columns, rows in self._sizes(conversation.pictures))
        texts = [conversation.user, *(turn.question + turn.answer for turn in conversation.earlier)]
        asked = min(sum(len(text.encode(errors="replace")) for text in texts), LONGEST)
        return len(conversation.system.encode()) // 2 + asked + slots + len(texts) * _AROUND

    def _split(self, length: int, rows: int, how: Decoding, vision: int, openings: int) -> Split:
        """Return the split with `rows` texts of questions of `length` tokens: keys and values of every token, and in
        float32 of those of all instructions, and the scores of each row's next token, twice on the device and in
        float64 on the CPU."""
        config, value = self.component.config, BYTES[self.runtime.precision.compute_dtype("text")]
        keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        kept = rows * (length + how.limit) * keys * value + openings * keys * BYTES["float32"]
        kept += rows * 2 * config.vocab_size * BYTES["float32"]
        reading = layer_bytes(self.runtime, self.component, 1, length, _FEED_FORWARD)
        passes = float(rows + how.limit)
        return Split(activations=max(reading, vision) + kept, size=rows, passes=passes)

    def write(
        self,
        conversations: Sequence[Conversation],
        how: Decoding,
        show: Show = lambda index, text: None,
        *,
        ended: Ended = lambda index, text: None,
        keeps: bool = False,
    ) -> list[Written]:
        """Return the answer in each conversation. show: is called as texts grow; each of them is a start of the answer,
        unless that is cut. ended: is called as each one ends. Raises QwenimgError."""
        asked = [self.asked(one) for one in conversations]
        encoder, split = self.residents.acquire(self.stage(conversations, how, keeps=keeps))
        assert split.size is not None
        texts = [Text(self.tokenizer, one, how, self.stops) for one in asked]
        with self.runtime.clock.timed("write"):
            for index, text in self._grown(encoder, texts, split.size):
                if more := text.more():
                    show(index, more)
                if text.is_done:
                    ended(index, text.written())
        del encoder
        if not keeps:
            self.runtime.engine.release()
        return [text.written() for text in texts]

    def _grown(self, encoder: WritingEncoder, texts: Sequence[Text], most: int) -> Iterator[tuple[int, Text]]:
        """Yield each text with its number, when a token was added, up to `most` at once."""
        allowed, waiting, rows = self._allowed(), list(enumerate(texts)), list[tuple[int, Text]]()
        openings = dict[tuple[int, ...], Opening]()
        encoder.forget()  # rows of a call that was interrupted
        while waiting or rows:
            self.runtime.interrupt()
            if waiting and len(rows) < most:
                rows.append(waiting.pop(0))
                rows[-1][1].begun = monotonic()
                scores = self.runtime.engine.numpy(self._begun(encoder, rows[-1][1], openings))[None]
            else:
                scores = self.runtime.engine.numpy(encoder.follow([text.tokens[-1] for _, text in rows]))
            first = len(rows) - len(scores)
            for row in range(len(rows) - 1, first - 1, -1):
                index, text = rows[row]
                if not text.add(self._finite(scores[row - first]), allowed) or monotonic() - text.begun > self.seconds:
                    encoder.end(row)
                    del rows[row]
                    text.is_done = True
                yield index, text

    def _begun(self, encoder: WritingEncoder, text: Text, openings: dict[tuple[int, ...], Opening]) -> Array:
        """Return the scores of the first token of `text`. openings: of instructions that texts had before."""
        asked = text.asked
        if asked.opening not in openings:
            openings[asked.opening] = self._opening(encoder, asked.opening)
        slots = [encoder.slots(*self._patches(picture)) for picture in asked.pictures]
        given = (asked.ids, asked.places, slots, openings[asked.opening])
        scores = encoder.begin(*given)
        self.runtime.check_finite(scores, self.resident, "text", lambda: encoder.begin(*given))
        return scores

    def _opening(self, encoder: WritingEncoder, ids: Sequence[int]) -> Opening:
        """Return the keys and values of the first `ids` of texts, from the disk if encoded prompts are kept there."""
        engine, store, config = self.runtime.engine, self.runtime.prompts, self.component.config
        if store is None:
            return encoder.opening(ids)
        plans, asked = [self.runtime.load_plan(self.component)], ["opening", repr(config), *ids]
        name = text_store.key(engine.name, self.runtime.precision.name, plans, asked)
        shape = (config.num_hidden_layers, 2, 1, config.num_key_value_heads, len(ids), config.head_dim)
        found = store.get(name, [shape])
        if found is None:
            made = encoder.opening(ids)
            store.put(name, [np.stack([np.stack([engine.numpy(array) for array in pair]) for pair in made])])
            return made
        return [(engine.array(keys), engine.array(values)) for keys, values in found[0]]

    def _patches(self, picture: SeenPicture) -> tuple[NDArray[Any], int, int]:
        assert self.form is not None
        return patches_of(picture, self.component.config, self.form)

    def _finite(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        if not np.isfinite(scores).all():
            raise self.runtime.overflow(self.resident, "text", None)
        return scores

    def _allowed(self) -> NDArray[np.bool_]:
        """Return which of the head's rows [V] may follow: tokens of text, and those that end it."""
        allowed = np.zeros(self.component.config.vocab_size, np.bool_)
        allowed[[token for token in self.tokenizer.word_ids if token < len(allowed)]] = True
        allowed[list(self.stops)] = True
        return allowed

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end a text."""
        return frozenset(self._stops) or self.chat.stop_ids(self.tokenizer)


class Text:
    """A text while it is written."""

    def __init__(self, tokenizer: ChatTokenizer, asked: Asked, how: Decoding, stops: frozenset[int]):
        self.asked, self.tokens = asked, list[int]()
        self._tokenizer, self._how, self._stops = tokenizer, how, stops
        self._earlier = set(asked.ids) if how.penalizes_prompt else set[int]()
        self._shown, self._ended = "", False
        self.begun = math.inf  # by the clock
        self.is_done = False

    def add(self, scores: NDArray[np.float32], allowed: NDArray[np.bool_]) -> bool:
        """Add the next token by its `scores` [V]; return whether another one follows it."""
        token = next_token(scores, allowed, self._earlier, self._how, len(self.tokens))
        self._ended = token in self._stops
        if self._ended:
            return False
        self.tokens.append(token)
        self._earlier.add(token)
        return len(self.tokens) < self._how.limit

    def more(self) -> str:
        """Return what can be shown of the text since the last call."""
        steady = written_text.finished(self._whole) if self._ended else written_text.steady(self._whole)
        more = steady.removeprefix(self._shown)
        if not steady.startswith(self._shown):  # thoughts in the middle of a text
            return ""
        self._shown = steady
        return more

    def written(self) -> Written:
        whole = self._whole
        text = written_text.finished(whole)
        text = text if self._ended else written_text.cut_at_sentence(text)
        return Written(text=text, whole=whole, tokens=len(self.tokens), cut=not self._ended)

    @property
    def _whole(self) -> str:
        return self._tokenizer.text(self.tokens)
