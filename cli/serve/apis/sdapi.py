"""The part of AUTOMATIC1111's API that its clients call: /sdapi/v1."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from qwenimg.cli.serve.apis import answers, body, sd_control, sd_extras, sd_fields
from qwenimg.cli.serve.apis.images_api import client_of
from qwenimg.cli.serve.apis.texts_api import caption, text_job, written
from qwenimg.cli.serve.dispatcher import Dispatcher
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.image_job import ImageJob
from qwenimg.cli.serve.json_answer import JsonAnswer
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.workers.messages import Enlarging
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import in_memory
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.foreign import LIKE_THE_MODELS, SCHEDULES, known_sampler, plain
from qwenimg.common.jobs.image_options import Options
from qwenimg.common.jobs.job import InputFiles, Job
from qwenimg.common.numbers.variation import parse
from qwenimg.common.request import names
from qwenimg.common.request.controlnet_names import MODULES
from qwenimg.common.request.recipe import Recipe, png_text
from qwenimg.common.sampling.schedules import SCHEDULES as OURS
from qwenimg.common.sampling.table import SAMPLERS

PREFIX = "/sdapi/v1"
MOST = 16  # pictures of a request
# Lists that clients ask for and that are empty here.
EMPTY: Mapping[str, Any] = {
    "sd-vae": [],
    "hypernetworks": [],
    "prompt-styles": [],
    "face-restorers": [],
    "script-info": [],
    "memory": {"ram": {}, "cuda": {}},
    "cmd-flags": {},
}
INTERROGATORS = ("clip", "deepdanbooru")
CONTROLNET = ("version", "model_list", "module_list")  # of its extension, which has routes of its own
_PICTURES = ("init_images", "mask", "alwayson_scripts")  # fields with pictures, which an answer does not repeat
_NAMES = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "width": "width",
    "height": "height",
    "steps": "steps",
    "cfg_scale": "guidance",
    "seed": "seed",
}


class SdApi:
    """The routes of A1111's API. `chosen`: the model that its clients have set."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self.dispatcher, self.settings = dispatcher, settings
        self.chosen = next(iter(settings.models))

    def routes(self) -> list[Route]:
        rows = {
            "txt2img": self.txt2img,
            "img2img": self.img2img,
            "interrupt": self.interrupt,
            "skip": self.skip,
            "png-info": self.png_info,
            "extra-single-image": self.extra_single_image,
            "extra-batch-images": self.extra_batch_images,
            "interrogate": self.interrogate,
            "options": self.set_options,
            "refresh-checkpoints": self.nothing,
        }
        gets = {
            "options": self.options,
            "progress": self.progress,
            "samplers": self.samplers,
            "schedulers": self.schedulers,
            "sd-models": self.models,
            "loras": self.loras,
            "embeddings": self.embeddings,
            "scripts": self.scripts,
            "upscalers": self.upscalers,
            "latent-upscale-modes": self.latent_upscale_modes,
        }
        routes = [Route(f"{PREFIX}/{path}", endpoint, methods=["POST"]) for path, endpoint in rows.items()]
        routes += [Route(f"{PREFIX}/{path}", endpoint, methods=["GET"]) for path, endpoint in gets.items()]
        routes += [Route(f"{PREFIX}/{path}", self.empty, methods=["GET"]) for path in EMPTY]
        routes += [Route(f"/controlnet/{path}", self.controlnet, methods=["GET"]) for path in CONTROLNET]
        return [*routes, Route("/internal/ping", self.nothing, methods=["GET"])]

    # Pictures

    async def txt2img(self, request: HttpRequest) -> Response:
        """Draw pictures of a prompt."""
        return await self._answer(request, await body.json_object(request), (), None)

    async def img2img(self, request: HttpRequest) -> Response:
        """Draw pictures from an initial one."""
        data = await body.json_object(request)
        images = data.get("init_images")
        if not isinstance(images, list) or not 1 <= len(images) <= body.IMAGES:
            text = f"init_images is a list of one picture, for models that see several at most {body.IMAGES}"
            raise HttpError(400, text, param="init_images")
        mask = None if data.get("mask") in (None, "") else body.picture_bytes(data["mask"], "mask")
        return await self._answer(request, data, [body.picture_bytes(one, "init_images") for one in images], mask)

    async def _answer(
        self, request: HttpRequest, data: dict[str, Any], images: Sequence[bytes], mask: bytes | None
    ) -> Response:
        sd_fields.check(data, with_image=bool(images))
        name, options = sd_fields.overrides(data)
        values = self._values(data, with_image=bool(images)) | options
        values |= sd_fields.mask_options(data, masked=mask is not None) if images else sd_fields.second_pass(data)
        model = self._model(name)
        controls = sd_control.units(data.get("alwayson_scripts", {}), images)
        if controls.controls:
            values["control"] = list(controls.controls)
        if controls.mode != "balanced":
            values["control_mode"] = controls.mode
        files = InputFiles(images=tuple(images), mask=mask, controls=controls.pictures)
        job = ImageJob(
            model=model,
            spec=body.job_of(body.options(values), self.settings, files, most=MOST),
            preview_suffix=".jpg",
            kind="sdapi",
            client=client_of(request),
            deadline=self.settings.deadline,
        )
        await self.dispatcher.submit(job)
        if not data.get("override_settings_restore_afterwards", True):
            self.chosen = model
        await answers.wait(self.dispatcher, job, request)
        kept = ("init_images", "mask") if data.get("include_init_images") is True else ()
        sent = {name: value for name, value in data.items() if name in kept or name not in _PICTURES}
        pictures = [base64.b64encode(drawn.data).decode() for drawn in job.pictures]
        return JsonAnswer({"images": pictures, "parameters": sent, "info": json.dumps(_info(job))})

    async def extra_single_image(self, request: HttpRequest) -> Response:
        """Make a picture larger."""
        data = await body.json_object(request)
        picture = body.picture_bytes(data.get("image"), "image")
        made = await self._enlarged(request, sd_extras.enlarging(data, self.settings), picture)
        return JsonAnswer({"html_info": "", "image": made})

    async def extra_batch_images(self, request: HttpRequest) -> Response:
        """Make pictures larger, one after the other."""
        data = await body.json_object(request)
        listed = data.get("imageList")
        if not isinstance(listed, list) or not 1 <= len(listed) <= body.IMAGES:
            raise HttpError(400, f"imageList is a list of 1 to {body.IMAGES} pictures", param="imageList")
        pictures = [one.get("data") if isinstance(one, dict) else None for one in listed]
        files = [body.picture_bytes(one, "imageList") for one in pictures]
        how = sd_extras.enlarging(data, self.settings)
        made = [await self._enlarged(request, how, one) for one in files]
        return JsonAnswer({"html_info": "", "images": made})

    async def _enlarged(self, request: HttpRequest, how: Enlarging | None, picture: bytes) -> str:
        """Return the larger picture in base64."""
        if how is None:
            return base64.b64encode(picture).decode()
        job = ImageJob(
            model=self.chosen,
            spec=Job(options={"prompt": ""}, seeds=(0,), files=InputFiles(images=(picture,))),
            kind="sdapi",
            client=client_of(request),
            deadline=self.settings.deadline,
            enlarging=how,
        )
        await self.dispatcher.submit(job)
        await answers.wait(self.dispatcher, job, request)
        return base64.b64encode(job.pictures[0].data).decode()

    async def interrogate(self, request: HttpRequest) -> Response:
        """Describe a picture: as there by a caption (`clip`), or by tags (`deepdanbooru`)."""
        data = await body.json_object(request)
        if (how := data.get("model", "clip")) not in INTERROGATORS:
            text = f"model is {clean(how, 40)}; choose clip, for a caption, or deepdanbooru, for tags"
            raise HttpError(400, text, param="model")
        picture = body.picture_bytes(data.get("image"), "image")
        writing = caption(tags=how == "deepdanbooru")
        job = text_job(self.chosen, writing, [picture], request, self.settings.deadline, of_sdapi=True)
        return JsonAnswer({"caption": (await written(self.dispatcher, job, request)).text})

    def _values(self, data: Mapping[str, Any], *, with_image: bool) -> Options:
        """Translate the fields in `data` to our options."""
        values = {ours: data[name] for name, ours in _NAMES.items() if name in data}
        if with_image and "denoising_strength" in data:
            values["strength"] = data["denoising_strength"]
        counts = [body.number(data.get(name, 1), int) for name in ("batch_size", "n_iter")]
        if not all(type(count) is int and count >= 1 for count in counts):
            raise HttpError(400, "batch_size and n_iter are whole numbers from 1 on", param="batch_size")
        if counts[0] * counts[1] > 1:
            values["num_images"] = counts[0] * counts[1]
        values |= _sampler(data.get("sampler_name") or data.get("sampler_index"), data.get("scheduler"))
        sd_fields.check_eta(data, values.get("sampler"))
        return values | sd_fields.variation(data)

    def _model(self, name: object) -> str:
        """Find a served model by its name or its title, which clients may shorten."""
        return self.chosen if name in (None, "") else body.model_named(name, self.settings)

    async def interrupt(self, request: HttpRequest) -> Response:
        """Stop the running jobs of this API. Their finished pictures are returned."""
        return self._halted(skip=False)

    async def skip(self, request: HttpRequest) -> Response:
        """Stop the picture that is being drawn, and continue with the next picture of its job."""
        return self._halted(skip=True)

    def _halted(self, *, skip: bool) -> Response:
        for job in self._mine():
            self.dispatcher.halt(job, skip=skip)
        return JsonAnswer({})

    def _mine(self) -> list[ImageJob]:
        return [job for job in self.dispatcher.drawing if job.kind == "sdapi"]

    async def progress(self, request: HttpRequest) -> Response:
        """Report the progress of this API's running job."""
        drawing = self._mine()
        waiting = [job for job in self.dispatcher.waiting if job.kind == "sdapi"]
        job = drawing[0] if drawing else None
        spent = 0.0 if job is None else time.monotonic() - job.arrived
        share = 0.0 if job is None else job.share
        state = {
            "skipped": False,
            "interrupted": False,
            "stopping_generation": False,
            "job": "" if job is None else job.kind,
            "job_count": len(drawing) + len(waiting),
            "job_timestamp": time.strftime("%Y%m%d%H%M%S", time.localtime(job.created)) if job else "0",
            "job_no": 0,
            "sampling_step": 0 if job is None else job.step,
            "sampling_steps": 0 if job is None else job.steps,
        }
        left = spent * (1 - share) / share if share else 0.0
        skips = request.query_params.get("skip_current_image", "").lower() in ("true", "1")
        preview = base64.b64encode(job.preview).decode() if job and job.preview and not skips else None
        return JsonAnswer(
            {"progress": share, "eta_relative": left, "state": state, "current_image": preview, "textinfo": None}
        )

    async def png_info(self, request: HttpRequest) -> Response:
        """Return the recipe in a picture, as A1111's text."""
        data = await body.json_object(request)
        texts = await asyncio.to_thread(_texts, body.picture_bytes(data.get("image"), "image"))
        return JsonAnswer({"info": texts.get("parameters", ""), "items": texts, "parameters": {}})

    # Lists

    async def options(self, request: HttpRequest) -> Response:
        """Return the settings that clients read."""
        return JsonAnswer(
            {
                "sd_model_checkpoint": self.chosen,
                "sd_checkpoint_hash": "",
                "samples_format": "png",
                "CLIP_stop_at_last_layers": 1,
                "sd_vae": "Automatic",
            }
        )

    async def set_options(self, request: HttpRequest) -> Response:
        """Set the model; other settings are ignored."""
        data = await body.json_object(request)
        try:
            self.chosen = self._model(data.get("sd_model_checkpoint"))
        except HttpError as fault:  # clients take a 404 for a missing route
            raise HttpError(400, fault.text, param="sd_model_checkpoint", code=fault.code) from None
        return JsonAnswer(None)

    async def models(self, request: HttpRequest) -> Response:
        """List the served models."""
        rows = [
            {"title": name, "model_name": name, "hash": None, "sha256": None, "filename": name, "config": None}
            for name in self.settings.models
        ]
        return JsonAnswer(rows)

    async def loras(self, request: HttpRequest) -> Response:
        """List the served LoRAs."""
        return JsonAnswer([{"name": n, "alias": n, "path": n, "metadata": {}} for n in self.settings.loras])

    async def embeddings(self, request: HttpRequest) -> Response:
        """List the served embeddings, those that cannot be read as skipped."""
        about = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None}
        sizes = self.settings.embedding_sizes
        loaded = {name: about | {"shape": width, "vectors": count} for name, (width, count) in sizes.items()}
        others = self.settings.embeddings.keys() - sizes.keys()
        skipped = {name: about | {"shape": 0, "vectors": 0} for name in sorted(others)}
        return JsonAnswer({"loaded": loaded, "skipped": skipped})

    async def upscalers(self, request: HttpRequest) -> Response:
        """List what enlarges pixels: resampling, and the served upscalers."""
        about = {"model_name": None, "model_path": None, "model_url": None}
        plain = [name for name, ours in names.ENLARGERS_THERE.items() if not ours.startswith(names.LATENT)]
        every = dict.fromkeys(("None", *plain, *self.settings.upscalers))
        return JsonAnswer([{"name": name, "scale": 1.0 if name == "None" else 4.0} | about for name in every])

    async def latent_upscale_modes(self, request: HttpRequest) -> Response:
        """List what enlarges latents."""
        modes = [name for name, ours in names.ENLARGERS_THERE.items() if ours.startswith(names.LATENT)]
        return JsonAnswer([{"name": name} for name in modes])

    async def scripts(self, request: HttpRequest) -> Response:
        """List the scripts: clients look there for ControlNet."""
        names = [sd_control.NAME, f"{sd_control.NAME} m2m"] if self.settings.controls else []
        return JsonAnswer({"txt2img": names, "img2img": names})

    async def controlnet(self, request: HttpRequest) -> Response:
        """List the served control networks and the preprocessors, and the version of the extension's API."""
        about = {"version": 2, "model_list": [*self.settings.controls], "module_list": [*MODULES]}
        return JsonAnswer(about)

    async def samplers(self, request: HttpRequest) -> Response:
        """List the samplers under A1111's names."""
        rows = [{"name": one.title, "aliases": [one.name, f"k_{one.name}"], "options": {}} for one in SAMPLERS.values()]
        return JsonAnswer(rows)

    async def schedulers(self, request: HttpRequest) -> Response:
        """List the schedules."""
        names = ("automatic", *OURS)
        about = {"aliases": None, "default_rho": -1, "need_inner_model": False}
        return JsonAnswer([{"name": name, "label": name.replace("_", " ").title()} | about for name in names])

    async def empty(self, request: HttpRequest) -> Response:
        """Return an empty list."""
        return JsonAnswer(EMPTY[request.url.path.removeprefix(f"{PREFIX}/")])

    async def nothing(self, request: HttpRequest) -> Response:
        """Return an empty object."""
        return JsonAnswer({})


def sdapi_answer(fault: HttpError) -> Response:
    """Return an error in A1111's form."""
    about = {"error": fault.code or fault.kind, "detail": fault.text, "body": "", "errors": fault.text}
    return JsonAnswer(about, fault.status, headers=fault.headers)


def _sampler(name: object, scheduler: object) -> Options:
    """Translate A1111's names of a sampler and a scheduler; the sampler's name may include the schedule."""
    values: Options = {}
    ending = ""
    if name not in (None, ""):
        known, ending = known_sampler(name) if isinstance(name, str) else (None, "")
        if known is None:
            raise HttpError(404, f"Sampler not found: {clean(name, 60)}", param="sampler_name")
        values["sampler"] = known
    if scheduler is not None and not isinstance(scheduler, str):
        raise HttpError(404, f"Scheduler not found: {clean(scheduler, 60)}", param="scheduler")
    wanted = plain(scheduler or "")
    wanted = ending if wanted in ("", "automatic") else wanted
    if wanted in SCHEDULES or wanted in OURS:
        values["schedule"] = SCHEDULES.get(wanted, wanted)
    elif wanted and wanted not in LIKE_THE_MODELS:
        raise HttpError(404, f"Scheduler not found: {clean(scheduler, 60)}", param="scheduler")
    return values


def _info(job: ImageJob) -> dict[str, Any]:
    recipes = [cast(Recipe, drawn.recipe) for drawn in job.pictures]
    first: Mapping[str, Any] = recipes[0] if recipes else {"seed": job.spec.seed} | job.spec.options
    names = {"guidance": "cfg_scale", "sampler": "sampler_name", "model": "sd_model_name"}
    about = {
        names.get(name, name): first.get(name)
        for name in ("prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance", "sampler", "model")
    }
    return about | {
        "all_prompts": [one["prompt"] for one in recipes],
        "all_negative_prompts": [one["negative_prompt"] for one in recipes],
        "all_seeds": [one["seed"] for one in recipes],
        "all_subseeds": [_second_seed(one) for one in recipes],
        "batch_size": len(job.spec.seeds),
        "infotexts": [png_text(one)["parameters"] for one in recipes],
        "index_of_first_image": 0,
        "extra_generation_params": {},
        "warnings": [*dict.fromkeys(line for one in recipes for line in one["warnings"])],
    }


def _second_seed(recipe: Mapping[str, Any]) -> int:
    return parse(recipe["variation"]).seed if recipe.get("variation") else 0


def _texts(data: bytes) -> dict[str, str]:
    """Return the texts in a picture's file."""
    from qwenimg.common.pictures.texts import read_texts

    try:
        return read_texts(in_memory("image", data))
    except ModelError:
        raise HttpError(400, "image is no picture whose recipe can be read", param="image") from None
