"""Texts that a worker writes for a client: better prompts, captions, and answers in conversations."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from qwenimg.cli.workers.messages import Draw, FromWorker, TextPart, TextWritten, Writing
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import in_memory
from qwenimg.common.prompts.describing import Asking, Task
from qwenimg.common.request.request import random_seed

if TYPE_CHECKING:
    from qwenimg.common.numbers.next_token import Decoding
    from qwenimg.common.parts.texts.describing import Describer
    from qwenimg.common.pictures.pixels import Uint8
    from qwenimg.common.prompts.chat import ChatTokenizer

USUAL, MOST = 300, 512  # tokens of a text
HELPFUL = "You are a helpful assistant."  # the instruction of a chat without one, as Qwen2.5 has it
LEAST = 1e-6  # of top-p: 0 is the likeliest token
HOT = 0.7, 20, 0.8  # temperature, top-k and top-p of a chat that asks for some of them, as Qwen3 has them


class Ended(Exception):
    """A text was ended between two tokens: by its client, or by one of its stops."""


class PartText:
    """A text as it is written: its parts are sent, up to the first of its stops. What may be the start of a stop is
    held back until the text goes on."""

    def __init__(self, send: Callable[[str], object], stops: tuple[str, ...]) -> None:
        self.text, self.is_stopped = "", False
        self._send, self._stops, self._sent = send, stops, 0

    def add(self, more: str) -> None:
        """Add the next words. Raises Ended if a stop is among them."""
        self.text += more
        found = [at for stop in self._stops if (at := self.text.find(stop)) >= 0]
        if found:
            self.text, self.is_stopped = self.text[: min(found)], True
            self._up_to(len(self.text))
            raise Ended
        starts = (n for stop in self._stops for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        self._up_to(len(self.text) - max(starts, default=0))

    def finish(self, whole: str) -> str:
        """Return the text of which `whole` is the rest too, once the rest is sent."""
        if not whole.startswith(self.text):  # it is cut
            return whole
        with suppress(Ended):
            self.add(whole[len(self.text) :])
            self._up_to(len(self.text))
        return self.text

    def _up_to(self, end: int) -> None:
        if end > self._sent:
            self._send(self.text[self._sent : end])
            self._sent = end


def written(describer: Describer, task: Draw, order: Writing, send: Callable[[FromWorker], object]) -> None:
    """Write the text of an order, and send its parts and then all of it. A text that is ended between two tokens, by
    `Ended` of the runtime's `interrupt`, is sent as far as it is. Raises QwenimgError."""
    part, begun = PartText(lambda text: send(TextPart(id=task.id, text=text)), order.stops), time.monotonic()
    if order.task == "rewrite":
        made = _rewritten(describer, task, order)
    else:
        made = _answered(describer, task, order, part)
    send(replace(made, seconds=time.monotonic() - begun))


def _rewritten(describer: Describer, task: Draw, order: Writing) -> TextWritten:
    """Return the better prompt. No part is sent before its quoted text is checked."""
    from qwenimg.common.parts.texts.describing import conversation
    from qwenimg.common.parts.texts.rewriting import Draft, rewrite

    writer, prompt = describer.writer, task.job.prompt
    draft = Draft(prompt, conversation("", "", _pictures(task)).pictures, protocol=writer.protocol)
    how = replace(writer.protocol.how, seed=random_seed() if order.seed is None else order.seed)
    count = len(writer.asked(draft.conversation).ids)
    describer.check([draft.conversation], how)
    try:
        [made] = rewrite(writer, [draft], how, lambda kind, text: None, keeps=True)
    except Ended:
        return TextWritten(id=task.id, text=prompt, prompt_tokens=count, tokens=0, cut=True)
    note = f"{made.fault}: the prompt stays as it is" if made.fault else ""
    return TextWritten(
        id=task.id, text=made.prompt, prompt_tokens=count, tokens=made.tokens, cut=made.cut and not note, note=note
    )


def _answered(describer: Describer, task: Draw, order: Writing, part: PartText) -> TextWritten:
    """Return the text about pictures, or the answer of a chat."""
    from qwenimg.common.parts.texts.describing import conversation, decoding, tidied
    from qwenimg.common.prompts.written_text import finished

    asking, limit = _asking(order), min(order.limit or (USUAL if order.task != "chat" else MOST), MOST)
    system, user = (order.system or HELPFUL, order.question) if asking is None else (asking.system, asking.user)
    asked = conversation(system, user, _pictures(task), order.earlier)
    _check(system, describer.writer.tokenizer)
    count = len(describer.writer.asked(asked).ids)
    try:
        made = describer.write(asked, decoding(limit) if asking else _decoding(order, limit), part.add)
    except Ended:
        text, cut = part.text.strip(), not part.is_stopped
        tokens = len(describer.writer.tokenizer.plain(text))
    else:
        text = part.finish(finished(made.whole)) if asking is None else tidied(made, asking).text
        tokens, cut = made.tokens, made.cut and not part.is_stopped
    return TextWritten(id=task.id, text=text, prompt_tokens=count, tokens=tokens, cut=cut)


def _check(system: str, tokenizer: ChatTokenizer) -> None:
    """Raise UsageError for an instruction of too many tokens."""
    from qwenimg.common.prompts.chat import LONGEST

    if (count := len(tokenizer.plain(system))) > LONGEST:
        raise UsageError(f"the instruction has {count:,} tokens; a language model is given at most {LONGEST:,}")


def _asking(order: Writing) -> Asking | None:
    """Return what is asked about a picture; None for a chat."""
    if order.task == "chat":
        return None
    task: Task = "tags" if order.task == "tags" else "caption"
    return Asking(task=task, language="zh" if order.language == "zh" else "en", question=order.question)


def _decoding(order: Writing, limit: int) -> Decoding:
    """Return how the words of a chat are chosen: the likeliest, unless the order has a temperature or a top-p."""
    from qwenimg.common.parts.texts.describing import decoding

    likeliest = decoding(limit)
    if order.temperature is None and order.top_p is None:
        return likeliest
    temperature, top_k, top_p = HOT
    return replace(
        likeliest,
        temperature=temperature if order.temperature is None else order.temperature,
        top_k=top_k,
        top_p=top_p if order.top_p is None else max(order.top_p, LEAST),
        seed=random_seed() if order.seed is None else order.seed,
    )


def _pictures(task: Draw) -> list[Uint8]:
    """Return the pictures of a job as they are seen: one at a time is decoded. Raises UsageError."""
    from qwenimg.common.parts.texts.describing import reduced
    from qwenimg.common.pictures.input import read_image

    pictures: list[Uint8] = []
    for number, data in enumerate(task.job.files.images, 1):
        assert isinstance(data, bytes)
        try:
            pictures.append(reduced(read_image(in_memory(f"image {number}", data))[0]))
        except ModelError as error:
            raise UsageError(str(error)) from None
    return pictures
