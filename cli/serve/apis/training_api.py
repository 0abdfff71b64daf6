"""Trainings of LoRAs: their jobs, their samples, and the folder in which they are."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from qwenimg.cli.client_folder import Folder
from qwenimg.cli.lora_training import SUFFIX
from qwenimg.cli.serve.apis import body
from qwenimg.cli.serve.apis.images_api import client_of
from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.serve.journal import Journal
from qwenimg.cli.serve.json_answer import JsonAnswer
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.serve.training_options import TRAINING, parse_training, training_job
from qwenimg.cli.workers.training import places
from qwenimg.common.base.errors import QwenimgError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.request import lora_text

LISTED = 200  # folders, and LoRAs
_SAMPLE = re.compile(r"[0-9]{7,9}-[0-9]{1,3}")
_FRESH = {"cache-control": "no-cache"}


class TrainingApi:
    """The routes, over a dispatcher and its journal."""

    def __init__(self, dispatcher: Dispatcher, journal: Journal, settings: Settings) -> None:
        self.dispatcher, self.journal, self.settings = dispatcher, journal, settings

    def routes(self) -> list[Route]:
        return [
            Route("/api/training", self.list_all, methods=["GET"]),
            Route("/api/training/{name}", self.lora, methods=["GET"]),
            Route("/api/jobs/{id}/samples/{name}", self.sample, methods=["GET"]),
        ]

    async def list_all(self, request: HttpRequest) -> Response:
        """List the folders of pictures, and the LoRAs."""
        return JsonAnswer(await asyncio.to_thread(listed, self._folder()))

    async def lora(self, request: HttpRequest) -> Response:
        """Send the file of a LoRA."""
        name = request.path_params["name"].removesuffix(SUFFIX)
        file = await asyncio.to_thread(_file, self._folder(), f"{name}{SUFFIX}")
        return FileResponse(file, media_type="application/octet-stream", filename=file.name, headers=_FRESH)

    async def sample(self, request: HttpRequest) -> Response:
        """Send a sample of a training."""
        row = await self.journal.reading(self.journal.job, request.path_params["id"])
        name = request.path_params["name"]
        about = {} if row is None else row["request"]
        if about.get("kind") != TRAINING or not isinstance(about.get("output"), str) or not _SAMPLE.fullmatch(name):
            raise HttpError(404, "there is no sample of this name", code="not_found")
        file = await asyncio.to_thread(_file, self._folder(), f"{about['output']}.run/samples/{name}.png")
        return FileResponse(file, media_type="image/png", headers=_FRESH)

    def _folder(self) -> Folder:
        if not self.settings.training:
            text = "no LoRAs are trained here; start the server with --training FOLDER, where pictures and results are"
            raise HttpError(403, text, param="kind", code="no_training")
        try:
            return Folder(Path(self.settings.training))
        except QwenimgError as error:
            self.dispatcher.say(f"error: {error}")
            raise HttpError(503, "the folder of trainings cannot be used; the server's log says why") from None

    def job(self, data: dict[str, Any], request: HttpRequest) -> ImageJob:
        """Return the job of a request. Raises HttpError."""
        folder = self._folder()
        model = body.model_named(data.pop("model", next(iter(self.settings.models))), self.settings)
        options = parse_training(data)
        job = training_job(model, options, str(folder.path), client=client_of(request))
        assert job.training is not None
        try:
            found = places(job.training)
            loras = lora_text.parse(tuple(options["lora"]))
        except UsageError as error:
            raise HttpError(400, folder.public(str(error)), param=_param(str(error))) from None
        named = [str(one) for one in body.loras(loras, self.settings)]
        job.training = replace(job.training, options=options | {"lora": named})
        self._check_output(options, found.output)
        return job

    def _check_output(self, options: Mapping[str, Any], file: Path) -> None:
        """Raise HttpError if the name of the LoRA is taken: by another file that is served, or by another job."""
        name = options["output"]
        if self.settings.loras.get(name, str(file)) != str(file):
            text = f"output: another LoRA is served as {clean(name, 60)}; give another name"
            raise HttpError(400, text, param="output")
        for other in self.dispatcher.unfinished:
            if other.training is not None and other.training.options["output"].casefold() == name.casefold():
                text = f"output: a job that has not ended trains {clean(name, 60)} already; cancel it, or give another"
                raise HttpError(409, text, param="output", code="output_taken")


def listed(folder: Folder) -> dict[str, list[str]]:
    """Return the names of the folders of pictures and of the LoRAs in a folder."""
    found = sorted(path for path in folder.path.glob("*") if not path.name.startswith("."))
    folders = [path.name for path in found if path.is_dir() and path.suffix != ".run"]
    loras = [path.stem for path in found if path.suffix == SUFFIX and path.is_file()]
    return {"folders": folders[:LISTED], "loras": loras[:LISTED]}


def _file(folder: Folder, name: str) -> Path:
    """Return the path of a regular file. Raises HttpError."""
    try:
        path = folder.inside(name, "name", "a file")
    except UsageError:
        path = None
    if path is None or not path.is_file():
        raise HttpError(404, "there is no file of this name", code="not_found")
    return path


def _param(text: str) -> str:
    """Return the field that a refusal begins with."""
    return re.split(r"\W", text.removeprefix("--"), maxsplit=1)[0]
