"""OpenAI's API of images: /v1/images/generations, /v1/images/edits and /v1/models.

There is no usage, for nothing is billed. A stream tells its steps in comments, and its partial pictures are previews at
the size of the picture.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from qwenimg.cli.serve.apis import answers, body
from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.serve.json_answer import JsonAnswer
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.workers.messages import PictureDrawn
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.job import InputFiles

MOST = 10  # pictures of a request
IGNORED = ("user", "quality", "style", "moderation", "safety_identifier", "output_compression", "input_fidelity")
_SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
# The only values of fields that have no other meaning here.
_ONLY = {"response_format": ("b64_json",), "background": ("auto", "opaque"), "partial_images": (0, 1, 2, 3)}
_FILES = ("image", "mask", body.CONTROL_IMAGE)
_FIELDS = ("model", "n", "stream", "deadline", "output_format", *IGNORED, *_ONLY, *_FILES)
_ECHOED = ("seed", "steps", "guidance", "sampler", "warnings")


class ImagesApi:
    """The routes, over a dispatcher."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings, created: int) -> None:
        self.dispatcher, self.settings, self.created = dispatcher, settings, created

    def routes(self) -> list[Route]:
        """Return the routes, with and without the prefix /v1."""
        rows = (
            ("/images/generations", self.generate, "POST"),
            ("/images/edits", self.edit, "POST"),
            ("/models", self.models, "GET"),
            ("/models/{name}", self.model, "GET"),
        )
        return [Route(f"/v1{path}", endpoint, methods=[method]) for path, endpoint, method in rows]

    async def models(self, request: HttpRequest) -> Response:
        """List the served models."""
        names = [*self.settings.models, *self.settings.aliases]
        return JsonAnswer({"object": "list", "data": [self._row(name) for name in names]})

    async def model(self, request: HttpRequest) -> Response:
        """Describe one model."""
        name = request.path_params["name"]
        body.model_named(name, self.settings)
        return JsonAnswer(self._row(name))

    def _row(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "qwenimg"}

    async def generate(self, request: HttpRequest) -> Response:
        """Draw pictures of a prompt."""
        data = await body.json_object(request)
        files = InputFiles(controls=body.pictures(data, body.CONTROL_IMAGE))
        return await self._answer(request, data, "image_generation", files)

    async def edit(self, request: HttpRequest) -> Response:
        """Draw pictures that start from one, or see several, given as a form."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise HttpError(415, "the content type is multipart/form-data here", code="content_type")
        try:
            async with request.form(max_files=20, max_fields=200) as form:
                data, files = await _parts(form)
                json.dumps([*data.items()], ensure_ascii=False).encode()  # a charset can make what is no character
        except HTTPException as error:  # of the parser
            raise HttpError(400, f"the form cannot be read: {error.detail}") from None
        except UnicodeError:
            raise HttpError(400, "the form cannot be read: its texts are not UTF-8") from None
        return await self._answer(request, data, "image_edit", files)

    async def _answer(self, request: HttpRequest, data: Mapping[str, Any], kind: str, files: InputFiles) -> Response:
        data = dict(data)
        stream = data.pop("stream", None)
        if (text := str(stream).lower()) not in ("true", "false", "none"):
            raise HttpError(400, f"stream is {clean(text, 40)!r}: give true or false", param="stream")
        streams = text == "true"
        partial = data.get("partial_images", 0)
        job = self._job(request, data, files)
        job.partial = int(partial) if streams else 0
        job.preview_suffix = job.suffix if job.partial else ""
        await self.dispatcher.submit(job)
        if streams:
            return answers.EventStream(self._stream(job, kind), self.dispatcher.streams)
        await answers.wait(self.dispatcher, job, request)
        answer = {"created": int(time.time()), "data": [_image(drawn) for drawn in job.pictures]}
        return JsonAnswer(answer | _about(job))

    def _job(self, request: HttpRequest, data: dict[str, Any], files: InputFiles) -> ImageJob:
        model = body.model_named(data.pop("model", next(iter(self.settings.models))), self.settings)
        suffix = self._suffix(data)
        _check_fixed(data)
        deadline = deadline_of(data, self.settings)
        if data.get("size") == "auto":
            del data["size"]
        if "n" in data:
            data["num_images"] = _count(data.pop("n"))
        return ImageJob(
            model=model,
            spec=body.job_of(body.options(data, _FIELDS), self.settings, files, most=MOST),
            suffix=suffix,
            kind="images",
            client=client_of(request),
            deadline=deadline,
        )

    def _suffix(self, data: dict[str, Any]) -> str:
        name = data.pop("output_format", "png")
        if not isinstance(name, str) or name not in _SUFFIXES:
            raise HttpError(400, f"output_format is one of {', '.join(_SUFFIXES)}", param="output_format")
        return _SUFFIXES[name]

    async def _stream(self, job: ImageJob, kind: str) -> AsyncIterator[str]:
        """Yield server-sent events: a comment for each step, the partial pictures, `completed` for each picture, or an
        error."""
        try:
            sent, seen = 0, Counter[int]()  # partial ones, by pictures
            async with aclosing(answers.events(job)) as news:
                async for event in news:
                    if event is None or event.name == "step":
                        yield ": waiting\n\n" if event is None else f": step {job.step}/{job.steps}\n\n"
                    if event is not None and "preview" in event.data:
                        yield answers.event_line(_partial(job, event.data, kind, seen), f"{kind}.partial_image")
                    for drawn in job.pictures[sent:]:
                        about = {"type": f"{kind}.completed", "created_at": int(time.time())}
                        yield answers.event_line(about | _image(drawn) | _about(job), f"{kind}.completed")
                    sent = len(job.pictures)
            if (fault := job.error) is not None:
                yield answers.event_line(
                    {"error": {"message": fault.text, "type": fault.kind, "param": fault.param, "code": fault.code}},
                    "error",
                )
        finally:
            self.dispatcher.cancel(job)  # nothing, if it has ended


def _partial(job: ImageJob, step: Mapping[str, Any], kind: str, seen: Counter[int]) -> dict[str, Any]:
    """Return the event of a preview, and count it."""
    index = seen[step["picture"]]
    seen[step["picture"]] += 1
    about = {"type": f"{kind}.partial_image", "created_at": int(time.time()), "partial_image_index": index}
    return about | {"b64_json": step["preview"]} | _about(job)


def client_of(request: HttpRequest) -> str:
    """Return the address of the client; "" for this machine."""
    host = "" if request.client is None else request.client.host
    return "" if host in ("127.0.0.1", "::1", "testclient") else host


def deadline_of(data: dict[str, Any], settings: Settings) -> float:
    """Remove `deadline` (seconds) from `data`; it is at most the server's."""
    seconds = body.number(data.pop("deadline", settings.deadline), float)
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
        raise HttpError(400, "deadline is a number of seconds above 0", param="deadline")
    return min(float(seconds), settings.deadline)


async def _parts(form: FormData) -> tuple[dict[str, Any], InputFiles]:
    """Split a form into texts and files."""
    texts, files = dict[str, Any](), dict[str, list[bytes]]()
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            files.setdefault(name.removesuffix("[]"), []).append(await value.read())
        elif name in texts:
            raise HttpError(400, "this field occurs twice", param=name[:40])
        else:
            texts[name] = value
    images, masks, controls = (files.pop(name, []) for name in _FILES)
    if files:
        raise body.unknown_field(next(iter(files)), _FILES, "file")
    if not images:
        raise HttpError(400, "an image is missing", param="image")
    body.check_count(len(images), "image")
    body.check_count(len(controls), body.CONTROL_IMAGE)
    if len(masks) > 1:
        raise HttpError(400, f"{len(masks)} masks; there is one at most", param="mask")
    mask = masks[0] if masks else None
    return texts, InputFiles(images=tuple(images), mask=mask, mask_alpha=True, controls=tuple(controls))


def _count(value: object) -> int:
    """Return the number of pictures that `n` asks for. Raises HttpError."""
    count = body.number(value, int)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST:
        raise HttpError(400, f"n is {clean(value, 40)}; choose 1 to {MOST}", param="n")
    return count


def _check_fixed(data: dict[str, Any]) -> None:
    """Remove known fields without an effect here from `data`. Raises HttpError if their value asks for something
    else."""
    for name in IGNORED:
        data.pop(name, None)
    for name, values in _ONLY.items():
        value = data.pop(name, values[0])
        if value not in values and value not in [*map(str, values)]:
            raise HttpError(400, f"{name} is {' or '.join(map(str, values))} here", param=name)


def _image(drawn: PictureDrawn) -> dict[str, Any]:
    echo = {name: drawn.recipe[name] for name in _ECHOED if drawn.recipe.get(name) not in (None, [])}
    if "template" in drawn.recipe:
        echo["revised_prompt"] = drawn.recipe["prompt"]
    return {"b64_json": base64.b64encode(drawn.data).decode()} | echo


def _about(job: ImageJob) -> dict[str, Any]:
    """Return the fields of a response that describe all its pictures."""
    formats = {suffix: name for name, suffix in _SUFFIXES.items()}
    width, height = job.size
    size = f"{width}x{height}" if width else None
    return {"background": "opaque", "output_format": formats[job.suffix], "quality": "auto", "size": size}
