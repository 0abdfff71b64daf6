"""Our own API: jobs that outlive their client, the gallery of their pictures, and the lists for the page's form."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from qwenimg.cli.serve.apis import answers, body
from qwenimg.cli.serve.apis.images_api import client_of, deadline_of
from qwenimg.cli.serve.apis.training_api import TrainingApi
from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.serve.journal import GalleryPicture, Journal
from qwenimg.cli.serve.json_answer import JsonAnswer
from qwenimg.cli.serve.public import named
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.serve.training_options import TRAINING
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import OpenFile, in_memory
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.image_options import plain
from qwenimg.common.jobs.job import InputFiles

MOST = 100  # pictures of a job
_FIELDS = ("kind", "model", "deadline", "image", "mask", body.CONTROL_IMAGE)  # beside the options of a picture
LISTED = 100  # jobs or pictures of one answer
_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp"}
_FOREVER = "private, max-age=31536000, immutable"


class JobsApi:
    """The routes, over a dispatcher and its journal."""

    def __init__(self, dispatcher: Dispatcher, journal: Journal, settings: Settings) -> None:
        self.dispatcher, self.journal, self.settings = dispatcher, journal, settings
        self.trainings = TrainingApi(dispatcher, journal, settings)

    def routes(self) -> list[Route]:
        rows = (
            ("/jobs", self.list_jobs, "GET"),
            ("/jobs", self.add_job, "POST"),
            ("/jobs/{id}", self.job, "GET"),
            ("/jobs/{id}", self.cancel, "DELETE"),
            ("/jobs/{id}/events", self.events, "GET"),
            ("/events", self.all_events, "GET"),
            ("/pictures", self.list_pictures, "GET"),
            ("/pictures/{id}", self.picture, "GET"),
            ("/pictures/{id}", self.remove, "DELETE"),
            ("/pictures/{id}/recipe", self.recipe, "GET"),
            ("/pictures/{id}/options", self.options, "GET"),
            ("/pictures/{id}/thumbnail", self.thumbnail, "GET"),
            ("/recipe", self.read_recipe, "POST"),
            ("/schema", self.schema, "GET"),
            ("/models", self.models, "GET"),
        )
        routes = [Route(f"/api{path}", endpoint, methods=[method]) for path, endpoint, method in rows]
        return [*routes, *self.trainings.routes()]

    # Jobs

    async def add_job(self, request: HttpRequest) -> Response:
        """Store a job and add it to the queue."""
        data = await body.json_object(request)
        kind = data.pop("kind", "drawing")
        if kind not in ("drawing", TRAINING):
            raise HttpError(400, f"kind is {clean(kind, 40)}; choose drawing or {TRAINING}", param="kind")
        job = self.trainings.job(data, request) if kind == TRAINING else self._drawing(data, request)
        await self.dispatcher.submit(job)
        return JsonAnswer(await self._described(job.id), 202, headers={"location": f"/api/jobs/{job.id}"})

    def _drawing(self, data: dict[str, Any], request: HttpRequest) -> ImageJob:
        """Return the job of a request for pictures. Raises HttpError."""
        model = body.model_named(data.pop("model", next(iter(self.settings.models))), self.settings)
        deadline = deadline_of(data, self.settings)
        images, controls = body.pictures(data, "image"), body.pictures(data, body.CONTROL_IMAGE)
        mask = body.picture_bytes(data.pop("mask"), "mask") if "mask" in data else None
        if mask is not None and not (images or controls):
            raise HttpError(400, "a mask needs the image that it belongs to", param="mask")
        files = InputFiles(images=images, mask=mask, controls=controls)
        return ImageJob(
            model=model,
            spec=body.job_of(body.options(data, _FIELDS), self.settings, files, most=MOST),
            preview_suffix=".jpg",
            kind="job",
            client=client_of(request),
            deadline=deadline,
        )

    async def list_jobs(self, request: HttpRequest) -> Response:
        """List the newest jobs."""
        before = {job.id: job for job in self.dispatcher.jobs}  # see `_described`
        rows = await self.journal.reading(self.journal.jobs, _number(request, "limit", LISTED, LISTED))
        return JsonAnswer({"jobs": [self._live(row, before.get(row["id"])) for row in rows]})

    async def job(self, request: HttpRequest) -> Response:
        """Describe a job."""
        return JsonAnswer(await self._described(request.path_params["id"]))

    async def cancel(self, request: HttpRequest) -> Response:
        """End a job that has not ended."""
        name = request.path_params["id"]
        await self._described(name)
        if (job := self.dispatcher.job(name)) is not None:
            self.dispatcher.cancel(job)
        return JsonAnswer(await self._described(name))

    async def events(self, request: HttpRequest) -> Response:
        """Stream the events of a job."""
        about = await self._described(request.path_params["id"])
        answers.check_listeners(self.dispatcher)
        return answers.EventStream(self._news(about["id"]), self.dispatcher.streams)

    async def _news(self, name: str) -> AsyncIterator[str]:
        """Yield the job's present state, then every event up to its end."""
        job = self.dispatcher.job(name)
        if job is None:
            now = await self._described(name)
            yield answers.event_line(now, "job")
            yield answers.event_line({"state": now["state"]}, "end")
            return
        async with aclosing(answers.events(job)) as news:
            yield answers.event_line(await self._described(name), "job")
            async for event in news:
                yield ": waiting\n\n" if event is None else answers.event_line(event.data, event.name)

    async def all_events(self, request: HttpRequest) -> Response:
        """Stream the events of all jobs, with their ids."""
        answers.check_listeners(self.dispatcher)
        return answers.EventStream(self._all_news(), self.dispatcher.streams)

    async def _all_news(self) -> AsyncIterator[str]:
        """Yield the unfinished jobs, again whenever a job begins or ends, and every other event."""
        async with aclosing(answers.all_events(self.dispatcher)) as news:
            yield answers.event_line({"jobs": await self._unfinished()}, "jobs")
            async for pair in news:
                if pair is None:
                    yield ": waiting\n\n"
                elif pair[1].name in ("state", "end"):
                    ended = {"ended": await self._described(pair[0].id)} if pair[1].name == "end" else {}
                    yield answers.event_line({"jobs": await self._unfinished()} | ended, "jobs")
                else:
                    yield answers.event_line({"id": pair[0].id} | pair[1].data, pair[1].name)

    async def _unfinished(self) -> list[dict[str, Any]]:
        """Return the running and the waiting jobs, in the order of the queue."""
        jobs = [*self.dispatcher.drawing, *self.dispatcher.waiting]
        return [await self._described(job.id) for job in jobs if job.is_kept]

    async def _described(self, name: str) -> dict[str, Any]:
        """Return a job for clients."""
        job = self.dispatcher.job(name)  # before its row is read: a job that ends meanwhile has its last state
        row = await self.journal.reading(self.journal.job, name)
        if row is None:
            raise HttpError(404, "there is no job of this id", code="not_found")
        return self._live(row, job)

    def _live(self, row: dict[str, Any], job: ImageJob | None = None) -> dict[str, Any]:
        """Add the progress of a job to its row of the journal. job: found before the row was read, so that a job that
        ends meanwhile has its last state."""
        settings = self.settings
        shown = {"lora": settings.loras, "embedding": settings.embeddings, "control": settings.controls}
        shown |= dict.fromkeys(("hires_with", "upscale_with"), settings.upscalers)
        for option, files in shown.items():
            if option in row["request"]:  # the paths of files are not shown
                value = row["request"][option]
                many = isinstance(value, list)  # of a training
                row["request"][option] = [named(str(one), files) for one in value] if many else named(str(value), files)
        job = self.dispatcher.job(row["id"]) or job
        row["kind"] = TRAINING if row["request"].get("kind") == TRAINING else "drawing"
        if job is None:
            return row
        if job.ended.is_set():
            about = {"state": job.state, "ended": job.finished}
            return row | about | {"error": None if job.error is None else job.error.text}
        now: dict[str, Any] = {"state": job.state, "position": self.dispatcher.position(job)}
        if job.state == "waiting" and (behind := self.dispatcher.behind(job)):
            now["behind"] = [{"id": one.id, "kind": TRAINING, "left": one.progress.left} for one in behind]
        if job.training is not None:
            return row | now | {"step": job.step, "steps": job.steps} | job.progress.described()
        if job.preview:
            now["preview"] = base64.b64encode(job.preview).decode()
        return row | now | {"picture": job.index, "step": job.step, "steps": job.steps}

    # The gallery

    async def list_pictures(self, request: HttpRequest) -> Response:
        """List pictures, the newest first. before: the value of `next` in the previous answer."""
        before = _number(request, "before", 0, 2**62)
        limit = _number(request, "limit", LISTED, LISTED)
        pictures, after = await self.journal.reading(self.journal.pictures, before or None, limit)
        return JsonAnswer({"pictures": [kept.described() for kept in pictures], "next": after})

    async def picture(self, request: HttpRequest) -> Response:
        """Send a picture's file."""
        file = self._file(await self._kept(request))
        return FileResponse(file, media_type=_TYPES[file.suffix], headers={"cache-control": _FOREVER})

    async def thumbnail(self, request: HttpRequest) -> Response:
        """Send a small JPEG of a picture."""
        data = await self.journal.reading(self.journal.thumbnail, await self._kept(request))
        if not data:
            raise HttpError(404, "this picture has no thumbnail", code="not_found")
        return Response(data, media_type="image/jpeg", headers={"cache-control": _FOREVER})

    async def options(self, request: HttpRequest) -> Response:
        """Send the options that draw a picture of the gallery again."""
        file = self._file(await self._kept(request))
        return JsonAnswer(await asyncio.to_thread(options_in, file))

    async def read_recipe(self, request: HttpRequest) -> Response:
        """Read the recipe in a picture that is sent, ours or another program's, as options of a job."""
        data = await body.json_object(request)
        file = body.picture_bytes(data.get("image"), "image")
        return JsonAnswer(await asyncio.to_thread(sent_recipe, file))

    async def recipe(self, request: HttpRequest) -> Response:
        """Send a picture's recipe."""
        return JsonAnswer((await self._kept(request)).recipe)

    async def remove(self, request: HttpRequest) -> Response:
        """Remove a picture and its file."""
        kept = await self._kept(request)
        with suppress(OSError):
            await self.journal.writing(self.journal.remove, kept)
        return Response(status_code=204)

    def _file(self, kept: GalleryPicture) -> Path:
        file = self.journal.file(kept)
        if file is None:
            raise HttpError(404, "the file of this picture is gone", code="not_found")
        return file

    async def _kept(self, request: HttpRequest) -> GalleryPicture:
        kept = await self.journal.reading(self.journal.picture, request.path_params["id"])
        if kept is None:
            raise HttpError(404, "there is no picture of this id", code="not_found")
        return kept

    # For a page

    async def schema(self, request: HttpRequest) -> Response:
        """Send the JSON Schema of the options of a picture."""
        if not self.dispatcher.schema:
            raise self.dispatcher.not_ready()
        return JsonAnswer(dict(self.dispatcher.schema))

    async def models(self, request: HttpRequest) -> Response:
        """List the served models with their defaults, and the facts of open ones."""
        is_open = {w.model.name: w.model for w in self.dispatcher.workers if w.model is not None}
        rows = [
            {"id": name}
            | ({"defaults": self.dispatcher.defaults[name]} if name in self.dispatcher.defaults else {})
            | ({key: value for key, value in asdict(is_open[name]).items() if key != "name"} if name in is_open else {})
            for name in self.settings.models
        ]
        lists = ("loras", "embeddings", "controls", "adapters", "upscalers")
        others = {name: [*getattr(self.settings, name)] for name in lists}
        return JsonAnswer({"models": rows, **others, "trains": bool(self.settings.training)})


def sent_recipe(data: bytes) -> dict[str, Any]:
    """Return `options_in` an uploaded file."""
    return options_in(in_memory("image", data))


def options_in(file: Path | OpenFile) -> dict[str, Any]:
    """Return the options that draw the picture in a file again, and notes about what will differ."""
    from qwenimg.common.jobs.replay import read_replay

    try:
        replay = read_replay(file)
    except ModelError as error:
        raise HttpError(400, f"this picture {str(error).partition(': ')[2]}", param="image") from None
    inputs = {
        "image_sha256": "a picture",
        "mask_sha256": "a mask",
        "lora": "a LoRA",
        "embedding": "an embedding",
        "control": "a control",
        "hires_with": "an upscaler",
        "upscale_with": "an upscaler",
    }
    needs = []
    for key, what in inputs.items():
        if key in replay.used:
            named = (
                f" ({clean(replay.used[key], 200)})" if replay.foreign_model is not None and replay.used[key] else ""
            )
            needs.append(f"It was drawn with {what}{named}: give it again.")
    return {"options": plain(replay.options), "model": replay.model, "notes": [*needs, *replay.messages]}


def _number(request: HttpRequest, name: str, usual: int, most: int) -> int:
    """Parse a number of the query."""
    text = request.query_params.get(name)
    if text is None:
        return usual
    if not text.isdecimal() or len(text) > 18 or not 1 <= int(text) <= most:
        raise HttpError(400, f"{name} is a whole number from 1 to {most}", param=name)
    return int(text)
