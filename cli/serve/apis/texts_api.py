"""Texts of a model's language model: /api/rewrite for a better prompt, /api/describe for a picture; and what the APIs
of texts have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from qwenimg.cli.serve.apis import answers, body
from qwenimg.cli.serve.apis.images_api import client_of, deadline_of
from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.serve.json_answer import JsonAnswer
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.workers.messages import TextWritten, Writing
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.job import InputFiles, Job
from qwenimg.common.prompts import describing

MOST_CHARACTERS = 100_000  # of all texts of a request
MOST_PICTURES = 8  # of a text
_REWRITE = ("model", "deadline", "prompt", "image", "language", "seed")
_DESCRIBE = ("model", "deadline", "image", "language", "tags", "ask")


class TextsApi:
    """The routes, over a dispatcher."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self.dispatcher, self.settings = dispatcher, settings

    def routes(self) -> list[Route]:
        return [
            Route("/api/rewrite", self.rewrite, methods=["POST"]),
            Route("/api/describe", self.describe, methods=["POST"]),
        ]

    async def rewrite(self, request: HttpRequest) -> Response:
        """Send a better prompt, for a picture or for an edit of pictures."""
        data = await self._fields(request, _REWRITE)
        prompt, pictures = checked_text(data.get("prompt", ""), "prompt"), body.pictures(data, "image")
        if not prompt.strip():
            raise HttpError(400, "a prompt is missing", param="prompt")
        seed = None if "seed" not in data else whole_number(data["seed"], "seed", 0, 2**63 - 1)
        language = _language(data)
        return await self._answer(
            request, data, Writing(task="rewrite", language=language, seed=seed), pictures, prompt=prompt
        )

    async def describe(self, request: HttpRequest) -> Response:
        """Send a caption or tags of a picture, or the answer to a question about it."""
        data = await self._fields(request, _DESCRIBE)
        pictures, question = body.pictures(data, "image"), checked_text(data.get("ask", ""), "ask")
        if len(pictures) != 1:
            raise HttpError(400, "image is one picture in base64", param="image")
        tags = data.get("tags", False)
        if not isinstance(tags, bool):
            raise HttpError(400, "tags is true or false", param="tags")
        if tags and question:
            raise HttpError(400, "tags and ask are given; give one", param="ask")
        return await self._answer(request, data, caption(tags, question, _language(data)), pictures)

    async def _fields(self, request: HttpRequest, known: Sequence[str]) -> dict[str, Any]:
        data = await body.json_object(request)
        for name in data:
            if name not in known:
                raise body.unknown_field(name, known)
        return data

    async def _answer(
        self,
        request: HttpRequest,
        data: dict[str, Any],
        writing: Writing,
        pictures: Sequence[bytes],
        prompt: str = "",
    ) -> Response:
        model = body.model_named(data.pop("model", next(iter(self.settings.models))), self.settings)
        deadline = deadline_of(data, self.settings)
        job = text_job(model, writing, pictures, request, deadline, prompt=prompt)
        made = await written(self.dispatcher, job, request)
        note = {"note": made.note} if made.note else {}
        return JsonAnswer({"text": made.text, "model": model, "tokens": made.tokens, "cut": made.cut} | note)


def caption(tags: bool, question: str = "", language: str = "en") -> Writing:
    """Return the order for a text about a picture."""
    return Writing(task="tags" if tags else "caption", language=language or "en", question=question)


def text_job(
    model: str,
    writing: Writing,
    pictures: Sequence[bytes],
    request: HttpRequest,
    deadline: float,
    *,
    prompt: str = "",
    of_sdapi: bool = False,
) -> ImageJob:
    """Return the job of a text about `pictures`, or about `prompt`. Raises HttpError for too many pictures."""
    if len(pictures) > MOST_PICTURES:
        raise HttpError(400, f"{len(pictures)} pictures; at most {MOST_PICTURES} are seen", param="image")
    return ImageJob(
        model=model,
        spec=Job(options={"prompt": prompt}, seeds=(0,), files=InputFiles(images=tuple(pictures))),
        kind="sdapi" if of_sdapi else "texts",
        client=client_of(request),
        deadline=deadline,
        writing=replace(writing, sees=bool(pictures)),
    )


async def written(dispatcher: Dispatcher, job: ImageJob, request: HttpRequest) -> TextWritten:
    """Return the text of a job once it is written. Raises HttpError."""
    await dispatcher.submit(job)
    await answers.wait(dispatcher, job, request)
    if job.written is None:  # it was halted
        return TextWritten(id=job.id, text=job.text.strip(), prompt_tokens=0, tokens=0, cut=True)
    return job.written


def checked_text(value: object, name: str) -> str:
    """Return a text of a request. Raises HttpError for a value that is none, or that is too long."""
    if not isinstance(value, str):
        raise HttpError(400, f"{name} is not a text", param=name)
    if len(value) > MOST_CHARACTERS:
        raise HttpError(400, f"{name} has {len(value)} characters; at most {MOST_CHARACTERS} are read", param=name)
    return value


def whole_number(value: object, name: str, least: int, most: int) -> int:
    """Return a whole number of a request. Raises HttpError."""
    number = body.number(value, int)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise HttpError(400, f"{name} is {clean(value, 40)}; choose {least} to {most}", param=name)
    return number


def _language(data: Mapping[str, Any]) -> str:
    language = data.get("language", "")
    if language not in ("", *describing.LANGUAGES):
        text = f"language is {clean(language, 40)}; choose one of {', '.join(describing.LANGUAGES)}"
        raise HttpError(400, text, param="language")
    return str(language)
