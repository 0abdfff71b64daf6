"""OpenAI's API of chats, as far as a writer of prompts needs it: /v1/chat/completions.

An instruction and a question with pictures in, after earlier questions and their answers, and one text out, whole or as
a stream. There are no tools, and no address is ever fetched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from qwenimg.cli.serve.apis import answers, body
from qwenimg.cli.serve.apis.images_api import deadline_of
from qwenimg.cli.serve.apis.texts_api import MOST_CHARACTERS, checked_text, text_job, whole_number, written
from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.serve.json_answer import JsonAnswer
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.workers.messages import TextWritten, Writing
from qwenimg.common.base.text import clean
from qwenimg.common.prompts.chat import Turn

MOST_MESSAGES = 64
MOST_STOPS, MOST_STOP = 4, 100  # texts that end an answer, and characters of one
MOST_TOKENS = 1 << 31  # that a request may name; the model's own limit is lower, and holds
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
    "reasoning_effort", "verbosity",
)  # fmt: skip
# The only values of fields that have no other meaning here.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}
FIELDS = (
    "model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "seed", "stop", "deadline", *_ONLY, *IGNORED,
)  # fmt: skip
_OF_MESSAGE = ("role", "content", "name")


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A request that was read."""

    name: str  # of the model, as the client calls it
    job: ImageJob
    streams: bool
    counts: bool  # True: a stream ends with the numbers of tokens


class ChatApi:
    """The route, over a dispatcher."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self.dispatcher, self.settings = dispatcher, settings

    def routes(self) -> list[Route]:
        return [Route("/v1/chat/completions", self.complete, methods=["POST"])]

    async def complete(self, request: HttpRequest) -> Response:
        """Write the next message of a conversation."""
        asked = self._asked(request, await body.json_object(request))
        if asked.streams:
            await self.dispatcher.submit(asked.job)
            return answers.EventStream(self._stream(asked), self.dispatcher.streams)
        made = await written(self.dispatcher, asked.job, request)
        message = {"role": "assistant", "content": made.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(made)}
        return JsonAnswer(_about(asked, "chat.completion") | {"choices": [choice], "usage": _usage(made)})

    def _asked(self, request: HttpRequest, data: dict[str, Any]) -> _Asked:
        for name in data:
            if name not in FIELDS:
                raise body.unknown_field(name, FIELDS)
        for name, values in _ONLY.items():
            if data.get(name, values[0]) not in values:
                shown = " or ".join(clean(value, 40) for value in values)
                raise HttpError(400, f"{name} is {shown} here", param=name, code="unsupported")
        system, question, earlier, pictures = _conversation(data.get("messages"))
        options = data.get("stream_options", {})
        if not isinstance(options, dict):
            raise HttpError(400, "stream_options is an object", param="stream_options")
        name = data.get("model", next(iter(self.settings.models)))
        model, deadline = body.model_named(name, self.settings), deadline_of(data, self.settings)
        return _Asked(
            name=name,
            job=text_job(model, _writing(data, system, question, earlier), pictures, request, deadline),
            streams=_flag(data, "stream"),
            counts=_flag(options, "include_usage"),
        )

    async def _stream(self, asked: _Asked) -> AsyncIterator[str]:
        """Yield server-sent events: the text part by part, its end, and the number of tokens if it is wanted; or an
        error."""
        job, sent = asked.job, 0
        try:
            yield _chunk(asked, {"role": "assistant", "content": ""})
            async with aclosing(answers.events(job)) as news:
                async for event in news:
                    if event is None:
                        yield ": waiting\n\n"
                    elif part := job.text[sent:]:
                        sent += len(part)
                        yield _chunk(asked, {"content": part})
            if (fault := job.error) is not None:
                about = {"message": fault.text, "type": fault.kind, "param": fault.param, "code": fault.code}
                yield answers.event_line({"error": about})
            elif job.ended.is_set() and job.written is not None:
                yield _chunk(asked, {}, _reason(job.written))
                if asked.counts:
                    yield answers.event_line(
                        _about(asked, "chat.completion.chunk") | {"choices": [], "usage": _usage(job.written)}
                    )
            yield "data: [DONE]\n\n"
        finally:
            self.dispatcher.cancel(job)  # nothing, if it has ended


def _about(asked: _Asked, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{asked.job.id}", "object": kind, "created": int(asked.job.created), "model": asked.name}


def _chunk(asked: _Asked, delta: Mapping[str, str], reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return answers.event_line(_about(asked, "chat.completion.chunk") | {"choices": [choice]})


def _reason(made: TextWritten) -> str:
    return "length" if made.cut else "stop"


def _usage(made: TextWritten) -> dict[str, int]:
    total = made.prompt_tokens + made.tokens
    return {"prompt_tokens": made.prompt_tokens, "completion_tokens": made.tokens, "total_tokens": total}


def _writing(data: Mapping[str, Any], system: str, question: str, earlier: Sequence[Turn]) -> Writing:
    limits = [whole_number(data[n], n, 1, MOST_TOKENS) for n in ("max_completion_tokens", "max_tokens") if n in data]
    stops = data.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise HttpError(400, f"stop is a text, or a list of at most {MOST_STOPS}", param="stop")
    for one in stops:
        if not isinstance(one, str) or not 0 < len(one) <= MOST_STOP:
            raise HttpError(400, f"stop: each is a text of 1 to {MOST_STOP} characters", param="stop")
    return Writing(
        task="chat",
        system=system,
        question=question,
        limit=limits[0] if limits else None,
        temperature=_number(data, "temperature", 0, 2),
        top_p=_number(data, "top_p", 0, 1),
        seed=None if "seed" not in data else whole_number(data["seed"], "seed", 0, 2**63 - 1),
        stops=tuple(stops),
        earlier=tuple(earlier),
    )


def _number(data: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    if name not in data:
        return None
    value = body.number(data[name], float)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise HttpError(400, f"{name} is {clean(value, 40)}; choose {least} to {most}", param=name)
    return float(value)


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name, False)
    if value is not None and not isinstance(value, bool):
        raise HttpError(400, f"{name} is {clean(value, 40)}: give true or false", param=name)
    return bool(value)


def _conversation(messages: object) -> tuple[str, str, list[Turn], list[bytes]]:
    """Return the instruction, the question, the earlier ones with their answers, and the pictures of all questions in
    the messages of a request. Questions that follow each other are one, as answers are. Raises HttpError."""
    if not isinstance(messages, list) or not 1 <= len(messages) <= MOST_MESSAGES:
        raise HttpError(400, f"messages is a list of 1 to {MOST_MESSAGES} messages", param="messages")
    system, earlier, pictures = list[str](), list[Turn](), list[bytes]()
    questions, replies, count = list[str](), list[str](), 0
    for index, message in enumerate(messages):
        role, text, seen = _read(message, f"messages[{index}]")
        if role == "user" and replies:
            earlier.append(Turn(_joined(questions), _joined(replies), count))
            questions, replies, count = [], [], 0
        elif role == "assistant" and not questions:
            raise HttpError(400, f"messages[{index}] is an answer without a question before it", param="messages")
        {"system": system, "user": questions, "assistant": replies}[role].append(text)
        pictures += seen
        count += len(seen)
    if not questions or replies:
        raise HttpError(400, "messages ends without a question of the user", param="messages")
    texts = [*system, *questions, *(turn.question + turn.answer for turn in earlier)]
    if (total := sum(map(len, texts))) > MOST_CHARACTERS:
        text = f"messages have {total} characters; at most {MOST_CHARACTERS} are read"
        raise HttpError(400, text, param="messages")
    return _joined(system), _joined(questions), earlier, pictures


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(texts)


def _read(message: object, where: str) -> tuple[str, str, list[bytes]]:
    """Return role, text and pictures of a message. Raises HttpError."""
    if not isinstance(message, dict):
        raise HttpError(400, f"{where} is no message", param="messages")
    role = ROLES.get(role) if isinstance(role := message.get("role"), str) else None
    if role is None:
        raise HttpError(400, f"{where}: role is one of {', '.join(ROLES)}", param="messages")
    for name in message:
        if name not in _OF_MESSAGE and message[name] is not None:
            raise HttpError(400, f"{where}: unknown field {clean(name, 40)!r}", param="messages")
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise HttpError(400, f"{where}: content is a text, or a list of parts", param="messages")
    texts, pictures = list[str](), list[bytes]()
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            texts.append(checked_text(part.get("text"), "messages"))
        elif kind == "image_url":
            pictures.append(_picture(part.get("image_url"), where))
        else:
            raise HttpError(400, f"{where}: a part of the content is of type text or image_url", param="messages")
    if pictures and role != "user":
        raise HttpError(400, f"{where}: pictures are in messages of the user", param="messages")
    return role, "\n".join(texts), pictures


def _picture(value: object, where: str) -> bytes:
    address = value.get("url") if isinstance(value, dict) else value
    if not isinstance(address, str) or not address.startswith("data:"):
        text = f"{where}: image_url has the picture itself, as data:image/png;base64,...; addresses are not fetched"
        raise HttpError(400, text, param="messages")
    return body.picture_bytes(address, "messages")
