"""The recipe of an image, stored in its file: JSON for us, A1111 text for other tools, and an AI mark in XMP.

A recipe is read back only from our own JSON. The A1111 text is for viewers and other programs: there, a prompt that
contains "Steps: 1, Seed: 2" cannot be told apart from the fields.
"""

# No `from __future__ import annotations`: with it, Recipe.__required_keys__ would not know NotRequired.

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any, NotRequired, TypedDict, cast

from qwenimg.common.base.hf_cache import REPO
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean
from qwenimg.common.numbers import variation
from qwenimg.common.prompts.wildcards import TEMPLATES
from qwenimg.common.request import lora_text, names
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.parts import PARTS
from qwenimg.common.request.request import OPTIONS
from qwenimg.common.sampling.table import SAMPLERS

FORMAT = 1
MAX_TEXT = 2_000  # characters of any other text
MAX_ITEMS = 200  # items of a list or a table
MAX_JSON = 5_000_000  # characters; two prompts of the largest size, \u-escaped, fit


class Recipe(TypedDict):
    """All that determines an image, as plain JSON. More or fewer keys, or another meaning, are another `format`.

    Besides these it has the values of a `Request` that were changed or used, such as `strength` (see
    `Option.recorded`), and for each given part of PARTS the name of the folder or file of its weights."""

    format: int  # 1
    version: str  # of qwenimg
    model: str  # a hub id or the last name of a folder or file, see `model_label`
    backend: str  # mlx, cuda or cpu
    device: str  # shown in messages
    precision: dict[str, str]  # component -> dtype, and FP32 place -> dtype
    versions: dict[str, str]  # python, numpy, torch or mlx, ...
    rng: str  # where the noise came from: torch-cpu
    prompt: str
    negative_prompt: str
    seed: int
    width: int  # pixels, as asked for
    height: int
    steps: int
    guidance: float
    sampler: str  # a name of `qwenimg samplers`
    schedule: str  # of the noise levels: model, karras, ...
    sigmas_sha256: str  # of the schedule, float32 little-endian
    noise_sha256: str  # of the initial noise, float32 little-endian
    tf32: bool  # True: float32 products may have been rounded to TF32
    warnings: list[str]
    created: NotRequired[str]  # ISO 8601, UTC
    image_sha256: NotRequired[str]  # of the initial image's pixels, 8 bit
    more_images_sha256: NotRequired[list[str]]  # of the others that the model sees
    mask_sha256: NotRequired[str]
    lora_fingerprints: NotRequired[list[str]]  # of the files of `lora`, in its order
    lora_sha256: NotRequired[list[str]]  # of the same files, each without its header
    embedding_sha256: NotRequired[list[str]]  # of the files of `embedding`, in its order
    control_fingerprints: NotRequired[list[str]]  # of the networks of `control`, in its order
    control_sha256: NotRequired[list[str]]  # of their pictures' pixels, 8 bit, before a preprocessor
    model_sha256: NotRequired[str]  # of the denoiser's file, or the model's, if it is a single one
    license: NotRequired[str]  # of a known model, if it limits what may be done
    refiner: NotRequired[str]  # its name, in the form of `model`
    fingerprints: NotRequired[dict[str, str]]  # of files that were given as a path, see `fingerprint`
    tokenizer: NotRequired[str]  # the folder's name, if one was given
    variant: NotRequired[str]  # of models whose files are alike, if it was given
    prediction: NotRequired[str]  # eps, v or x0, if it was given
    quantize: NotRequired[str]  # the bits of quantized weights, if there are any
    step_cache_effect: NotRequired[str]  # model calls that were cached, seconds saved, PSNR
    hires_with_sha256: NotRequired[str]  # of the file of the upscaler
    original_prompt: NotRequired[str]  # that a language model rewrote to `prompt`
    rewriting: NotRequired[dict[str, str]]  # how it did so
    template: NotRequired[str]  # that the seed chose `prompt` from
    negative_template: NotRequired[str]  # likewise


# Keys besides the options of a request, which have their own bounds.
_TEXTS = (
    "version",
    "model",
    "backend",
    "device",
    "rng",
    "created",
    "license",
    "refiner",
    *PARTS,
    "tokenizer",
    "prediction",
    "variant",
    "quantize",
    "step_cache_effect",
)
_PREDICTIONS = ("eps", "v", "x0")
_TABLES = ("precision", "versions", "fingerprints", "rewriting")
_HASHES = ("sigmas_sha256", "noise_sha256", "image_sha256", "mask_sha256", "model_sha256", "hires_with_sha256")
_LISTS = (
    "lora_fingerprints",
    "lora_sha256",
    "embedding_sha256",
    "more_images_sha256",
    "control_fingerprints",
    "control_sha256",
)
_HUB_FILE = re.compile(rf"{REPO}(/[\w-][\w.-]*)+\.(safetensors|gguf)", re.ASCII)
_TAG_ENDS = re.compile(r"[<>:,\"\s]+")  # characters that end the name of a LoRA in a tag, or in the list of hashes
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)

# https://iptc.org/std/photometadata, "Digital Source Type"
XMP = """\
<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/">
  <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
    <rdf:Description rdf:about=""
        xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
        xmlns:xmp="http://ns.adobe.com/xap/1.0/">
      <Iptc4xmpExt:DigitalSourceType>http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia</Iptc4xmpExt:DigitalSourceType>
      <xmp:CreatorTool>qwenimg</xmp:CreatorTool>
    </rdf:Description>
  </rdf:RDF>
</x:xmpmeta>
<?xpacket end="r"?>
"""


def model_label(given: str) -> str:
    """Return `given` if it is a name, a hub id (`owner/name`) or a file of one, else the last name of the path."""
    deep = given.count("/") > 1 and not _HUB_FILE.fullmatch(given)
    is_path = given.startswith(("/", "~", ".")) or deep or given.endswith("/") or "\\" in given
    return PurePath(given.replace("\\", "/")).name if is_path else given


# Writing


def a1111_parameters(recipe: Recipe) -> str:
    """Return the recipe in the grammar of AUTOMATIC1111's PNG info, which many tools and viewers read.

    LoRAs stand in the prompt as tags, and in `Lora hashes` with the first 12 digits of the hash of their data;
    embeddings in `TI hashes` with those of the whole file; the model's file has the first 10 digits of its hash."""
    rng, loras = recipe["rng"], _lora_tags(recipe)
    model_hash = {"Model hash": recipe["model_sha256"][:10]} if "model_sha256" in recipe else {}
    hashes = ", ".join(f"{name}: {sha256[:12]}" for name, _, sha256 in loras if sha256)
    fields = {
        "Steps": str(recipe["steps"]),
        "Sampler": SAMPLERS[recipe["sampler"]].title if recipe["sampler"] in SAMPLERS else recipe["sampler"],
        "Schedule type": recipe["schedule"].capitalize(),
        "CFG scale": f"{recipe['guidance']:.12g}",
        "Seed": str(recipe["seed"]),
        "Size": f"{recipe['width']}x{recipe['height']}",
        **model_hash,
        "Model": model_label(recipe["model"]),
        "RNG": "CPU" if rng == "torch-cpu" else rng,
        **_variation_fields(cast(Mapping[str, Any], recipe)),
        **({"Lora hashes": hashes} if hashes else {}),
        **({"TI hashes": inversions} if (inversions := _inversion_hashes(recipe)) else {}),
        **_picture_fields(cast(Mapping[str, Any], recipe)),
        **({"Template": recipe["template"]} if "template" in recipe else {}),
        **({"Negative Template": recipe["negative_template"]} if "negative_template" in recipe else {}),
        "Version": f"qwenimg {recipe['version']}",
    }
    negative = recipe["negative_prompt"].strip()
    prompt = " ".join([recipe["prompt"], *(f"<lora:{name}:{strength:g}>" for name, strength, _ in loras)])
    lines = [prompt, *([f"Negative prompt: {negative}"] if negative else [])]
    return "\n".join([*lines, ", ".join(f"{name}: {_quoted(value)}" for name, value in fields.items())])


def _variation_fields(recipe: Mapping[str, Any]) -> dict[str, str]:
    if not recipe.get("variation"):
        return {}
    turned = variation.parse(recipe["variation"])
    return {"Variation seed": str(turned.seed), "Variation seed strength": f"{turned.strength:.12g}"}


def _picture_fields(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields about an initial image and its mask."""
    padding, fill = recipe.get("only_masked"), recipe.get("mask_fill")
    content = next((there for there, ours in names.FILLS_THERE.items() if ours == fill), None)
    values = {
        "Denoising strength": recipe.get("strength"),
        **_hires_fields(recipe),
        "Mask blur": recipe.get("mask_blur"),
        "Mask mode": "Inpaint not masked" if recipe.get("mask_mode") == "outside" else None,
        "Inpaint area": None if padding is None else "Only masked",
        "Masked area padding": padding,
        "Masked content": content,
    }
    return {
        name: f"{value:.12g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
        if value is not None
    }


def _hires_fields(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields about the second pass, whose strength has the name of an initial image's, and whose steps are
    those that are run."""
    factor = recipe.get("hires")
    if factor is None:
        return {}
    steps, strength, name = recipe.get("hires_steps", recipe["steps"]), recipe["hires_strength"], recipe["hires_with"]
    there = next((there for there, ours in names.ENLARGERS_THERE.items() if ours == name), PurePath(name).stem)
    return {
        "Denoising strength": float(strength),
        "Hires upscale": float(factor),
        "Hires steps": names.steps_run(steps, strength),
        "Hires upscaler": there,
    }


def recorded_loras(recipe: Mapping[str, Any]) -> tuple[Lora, ...]:
    """Return the LoRAs that a recipe, or a passport, names. Raises UsageError."""
    return lora_text.parse(recipe.get("lora", ""), files=False)


def _lora_tags(recipe: Recipe) -> list[tuple[str, float, str]]:
    """Return each LoRA's file name without characters that a tag cannot have, its strength, and its hash or ""."""
    loras = recorded_loras(recipe)
    hashes = [*recipe.get("lora_sha256", []), *("" for _ in loras)]
    named = (_TAG_ENDS.sub("_", PurePath(one.source).name.removesuffix(".safetensors")) for one in loras)
    return [(name, one.scale, sha256) for name, one, sha256 in zip(named, loras, hashes, strict=False)]


def _inversion_hashes(recipe: Mapping[str, Any]) -> str:
    """Return the names of embeddings, each with the start of its file's hash."""
    pairs = zip(recorded_embeddings(recipe), recipe.get("embedding_sha256", []), strict=False)
    return ", ".join(f"{_TAG_ENDS.sub('_', name)}: {sha256[:12]}" for name, sha256 in pairs)


def recorded_embeddings(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of embeddings that a recipe has."""
    return tuple(name for part in recipe.get("embedding", "").split(";") if (name := part.strip()))


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if re.search(r"[,:\n]", value) else value


def png_text(recipe: Recipe) -> dict[str, str]:
    """Return the texts of an image: `parameters` for other tools, and `qwenimg`, ASCII JSON that keeps any text
    exactly.

    The names of models contain no path; `warnings` and the rest are stored unchanged."""
    names: dict[str, str] = {
        key: model_label(str(recipe.get(key))) for key in ("model", "refiner", *PARTS) if key in recipe
    }
    written = {**recipe, **names}
    return {"parameters": a1111_parameters(recipe), "qwenimg": json.dumps(written, allow_nan=False)}


# Reading


def recipe_from_texts(texts: Mapping[str, str], path: Path) -> Recipe:
    """Return the recipe in an image's `texts`. Raises ModelError that names `path`."""
    text = texts.get("qwenimg")
    if text is None:
        raise bad(path, "has no recipe; only a picture that qwenimg wrote with its metadata has one")
    if len(text) > MAX_JSON:
        raise bad(path, f"its recipe has {len(text):,} characters; at most {MAX_JSON:,} are read")
    return check_recipe(strict_json(text.encode(), path, depth=2, values=4 * MAX_ITEMS), path)


def check_recipe(value: object, path: Path) -> Recipe:
    """Return `value` if it is a recipe with the right keys, types and bounds. Raises ModelError that names `path`."""
    if not isinstance(value, dict) or type(value.get("format")) is not int:
        raise bad(path, "its recipe is not an object with an integer `format`")
    if value["format"] > FORMAT:
        raise bad(
            path,
            f"made by a newer version of qwenimg (recipe format {value['format']}, "
            f"this one reads {FORMAT}); update qwenimg",
        )
    missing = sorted(Recipe.__required_keys__ - value.keys())
    options = {one.name: one for one in OPTIONS.values() if one.recorded}
    unknown = sorted(value.keys() - Recipe.__annotations__.keys() - options.keys() - PARTS.keys())
    if value["format"] != FORMAT or missing or unknown:
        keys = clean(", ".join([*(f"no {k}" for k in missing), *(f"unknown {k}" for k in unknown)]), 100)
        raise bad(path, f"its recipe is not of format {FORMAT} ({keys or value['format']})")
    for key, item in value.items():
        fault = options[key].fault(item) if key in options else _fault(key, item)
        if fault:
            raise bad(path, f"its recipe has a bad {key}: expected {fault}")
    reals = {key: float(value[key]) for key, one in options.items() if one.kind is float and key in value}
    return cast(Recipe, value | reals)


def _fault(key: str, value: object) -> str | None:
    """Return what `value` should have been, or None if it is right."""
    if key in _TEXTS and not _is_text(value):
        return f"a text of at most {MAX_TEXT:,} characters"
    if key in (*TEMPLATES.values(), "original_prompt"):
        return OPTIONS["prompt"].fault(value)
    if key == "prediction" and value not in _PREDICTIONS:
        return f"one of {', '.join(_PREDICTIONS)}"
    if key == "tf32":
        return None if isinstance(value, bool) else "true or false"
    if key in _HASHES:
        return None if isinstance(value, str) and _SHA256.fullmatch(value) else "64 hexadecimal digits"
    if key in _TABLES:
        return None if isinstance(value, dict) and _are_texts([*value, *value.values()]) else "an object of short texts"
    if key in _LISTS:
        right = isinstance(value, list) and _are_texts(value) and all(_SHA256.fullmatch(one) for one in value)
        return None if right else "a list of hashes, 64 hexadecimal digits each"
    if key == "warnings":
        return None if isinstance(value, list) and _are_texts(value) else "a list of short texts"
    return "a time in ISO 8601" if key == "created" and not _is_time(cast(str, value)) else None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _are_texts(values: list[object]) -> bool:
    return len(values) <= MAX_ITEMS and all(_is_text(value) for value in values)


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
