"""Repetition of an image from its recipe, ours or another program's."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import OpenFile, bad, open_source
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.image_options import Options
from qwenimg.common.jobs.job import Job
from qwenimg.common.prompts.templates import escaped
from qwenimg.common.prompts.wildcards import TEMPLATES
from qwenimg.common.request import outpaint_text
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.names import ENLARGERS, is_upscaler
from qwenimg.common.request.parts import PARTS
from qwenimg.common.request.request import OPTIONS

if TYPE_CHECKING:
    from qwenimg.common.jobs.foreign import Foreign
    from qwenimg.common.request.control_text import Control
    from qwenimg.common.request.recipe import Recipe

NAMES = ("model", "refiner", *PARTS)  # files that a recipe names and does not contain
_PICTURES = ("image_sha256", "more_images_sha256", "mask_sha256")
USED = (
    *_PICTURES,
    "refiner",
    *PARTS,
    "prediction",
    "variant",
    "lora",
    "embedding",
    "quantize",
    "control",
    "hires_with",
)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The settings of an image's recipe."""

    options: Options
    model: str | None  # None: only -m gives it
    precision: str
    noise_given: bool = False  # its noise came from --latents, so that its seed has no meaning
    noise_sha256: str | None = None
    loras: tuple[Lora, ...] = ()  # as its recipe names them
    lora_hashes: tuple[str, ...] = ()  # the starts of the hashes of their data, or "", from another program
    lora_fingerprints: tuple[str, ...] = ()  # of these, in their order
    embeddings: tuple[str, ...] = ()  # the names of those that its prompts have
    embedding_sha256: tuple[str, ...] = ()  # of their files, in their order; the starts of them from another program
    upscaler_sha256: str | None = None  # of the file of `hires_with`
    enlarged_by: int | None = None  # how many times the upscaler of another program's recipe made the picture larger
    controls: tuple[Control, ...] = ()  # of another program's recipe, without their pictures
    control_hashes: tuple[str, ...] = ()  # of its control networks and of their pictures, in their order
    fingerprints: dict[str, str] = field(default_factory=dict)  # by those of NAMES that were given as a path
    used: dict[str, str]  # its other inputs, by the names in USED
    foreign_model: str | None = None  # another program's name of the model
    messages: tuple[str, ...] = ()  # differences from another program's recipe


def read_replay(source: Path | OpenFile) -> Replay:
    """Read the recipe in the image at a path or in an open file, ours or another program's, or a workflow of ComfyUI.
    Closes the file. Raises ModelError."""
    from qwenimg.common.jobs.foreign_read import is_workflow, read_foreign, read_workflow
    from qwenimg.common.pictures.texts import read_texts
    from qwenimg.common.request.loras import in_cache
    from qwenimg.common.request.recipe import recipe_from_texts, recorded_embeddings, recorded_loras

    source = open_source(source)
    if is_workflow(source):
        with closing(source):
            return _foreign_replay(read_workflow(source), source.path)
    texts = read_texts(source)
    path = source.path
    foreign = None if "qwenimg" in texts else read_foreign(texts, path)
    if foreign is not None:
        return _foreign_replay(foreign, path)
    recipe = recipe_from_texts(texts, path)
    values = dict[str, Any](recipe)
    options = {name: values[name] for name, one in OPTIONS.items() if one.recorded and name in values}
    options["seed"] = str(recipe["seed"])
    if recipe["guidance"] <= 1:  # it was not used, and is not recorded
        del options["negative_prompt"]
    options |= _escaped(options)
    used = {key: str(values[key]) for key in USED if key in values}
    if is_upscaler(used.get("hires_with", ENLARGERS[0])):
        del options["hires_with"]  # its file is found by its name
    else:
        used.pop("hires_with", None)
    if "outpaint" in options:
        try:
            options["outpaint"] = outpaint_text.parse(options["outpaint"])
        except UsageError as error:
            raise bad(path, f"its recipe has a bad outpaint: {error}") from None
    options.pop("lora", None)  # a path in a picture is never opened
    options.pop("control", None)  # its pictures are files
    options.pop("embedding", None)  # found by the names and the hashes
    loras = recorded_loras(recipe)
    if loras and all(in_cache(one.source) for one in loras):
        options["lora"] = loras
        del used["lora"]
    return Replay(
        options=options,
        model=recipe["model"],
        precision=recipe["precision"].get("name", "auto"),
        noise_given=recipe["rng"] == "given",
        noise_sha256=recipe["noise_sha256"],
        fingerprints=recipe.get("fingerprints", {}),
        used=used,
        loras=loras,
        lora_fingerprints=tuple(recipe.get("lora_fingerprints", ())),
        embeddings=recorded_embeddings(values),
        embedding_sha256=tuple(recipe.get("embedding_sha256", ())),
        upscaler_sha256=recipe.get("hires_with_sha256"),
        control_hashes=_control_hashes(recipe),
    )


def _escaped(options: Options) -> Options:
    """Return the prompts among `options`, which are chosen already, as templates of themselves."""
    return {name: escaped(options[name]) for name in TEMPLATES if name in options}


def _control_hashes(recipe: Recipe) -> tuple[str, ...]:
    return (*recipe.get("control_fingerprints", ()), *recipe.get("control_sha256", ()))


def _foreign_replay(foreign: Foreign, path: Path) -> Replay:
    """Return the settings of another program's recipe. Raises ModelError if it cannot be followed."""
    from qwenimg.common.jobs.foreign import known_model

    if foreign.refused is not None:
        raise bad(path, f"its recipe of {foreign.program} is not plain: {foreign.refused}")
    seed = {"seed": str(foreign.fields["seed"])} if "seed" in foreign.fields else {}
    options = foreign.fields | seed
    if "negative_prompt" in options and options.get("guidance", 2) <= 1:  # it was not used
        del options["negative_prompt"]
    options |= _escaped(options)
    model = None if foreign.model is None else known_model(foreign.model)
    if model is not None and os.path.lexists(model):  # a name of unknown origin never opens a path
        model = None
    needs = {"image_sha256": foreign.picture, "mask_sha256": foreign.mask}
    files = {
        "hires_with": foreign.upscaler,
        "upscale_with": foreign.enlarger,
        "lora": "; ".join(map(str, foreign.loras)) or None,
        "control": "; ".join(map(str, foreign.controls)) or None,
    }
    return Replay(
        options=options,
        model=model,
        precision="auto",
        used={key: "" for key, needed in needs.items() if needed} | {key: name for key, name in files.items() if name},
        foreign_model=foreign.model or "",
        messages=tuple(foreign.messages()),
        loras=tuple(foreign.loras),
        lora_hashes=tuple(foreign.lora_hashes.get(one.source, "") for one in foreign.loras),
        controls=tuple(foreign.controls),
        enlarged_by=foreign.enlarged_by,
        embeddings=tuple(foreign.embeddings),
        embedding_sha256=tuple(foreign.embeddings.values()),
    )


def check_model(replay: Replay, given: str | None) -> None:
    """Raise ModelError if neither -m nor the recipe names a model."""
    if given is None and replay.model is None:
        name = clean(replay.foreign_model, 60)
        what = f"calls its model {name!r}, which is no name here" if name else "names no model"
        raise ModelError(f"--from: that picture's recipe {what}; say with -m which model makes it")


def differences(replay: Replay | None, job: Job, recipe: Recipe) -> list[str]:
    """Return why a repeated image differs from the original: a line for each input that is not the same now."""
    if replay is None or replay.noise_sha256 is None or replay.options.get("seed") != str(job.seed):
        return []
    lines, now = [], dict[str, Any](recipe)
    same = all(replay.options.get(name) == job.get(name) for name in ("width", "height", "variation"))
    if same and recipe["noise_sha256"] != replay.noise_sha256:
        lines.append("the noise is not that of the picture given to --from")
    prints = recipe.get("fingerprints", {})
    for key in NAMES:
        if key in prints and replay.fingerprints.get(key, prints[key]) != prints[key]:
            option = "-m" if key == "model" else f"--{key.replace('_', '-')}"
            lines.append(f"the weights given to {option} are not those of the picture given to --from")
    if replay.lora_fingerprints != tuple(recipe.get("lora_fingerprints", ())):
        lines.append("the LoRAs are not those of the picture given to --from")
    if sorted(replay.embedding_sha256) != sorted(recipe.get("embedding_sha256", ())):
        lines.append("the embeddings are not those of the picture given to --from")
    if replay.upscaler_sha256 != recipe.get("hires_with_sha256"):
        lines.append("what --hires-with has is not that of the picture given to --from")
    if replay.control_hashes != _control_hashes(recipe):
        lines.append("what --control has is not that of the picture given to --from")
    for key, option in (("image_sha256", "-i"), ("more_images_sha256", "the next -i"), ("mask_sha256", "--mask")):
        if key in replay.used and replay.used[key] != str(now.get(key)):
            lines.append(f"the picture given to {option} is not that of the picture given to --from")
    return lines
