"""Recipes as text of AUTOMATIC1111's web UI, which many programs write: a prompt, `Negative prompt: ...`, and fields.

Nothing in the text marks the end of a prompt: a prompt with a line `Negative prompt: x` or `Steps: 1, Seed: 2, Size:
8x8` cannot be told apart from the fields. The last line that looks like fields is taken, and the last before it that
looks like a negative prompt, since the program writes its own lines last.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.foreign import A1111, Foreign
from qwenimg.common.numbers.seeds import MAX_SEED
from qwenimg.common.numbers.variation import Variation
from qwenimg.common.request import names
from qwenimg.common.request.controlnet_names import IP_ADAPTER, KINDS, MODULES, mode_of
from qwenimg.common.request.names import FILLS_THERE
from qwenimg.common.sampling.types import MAX_STEPS

MAX_TEXT = 500_000  # characters: two prompts of the largest size, and the fields
MAX_LINE = 200_000  # characters of the line of fields
MAX_FIELDS = 200
NEGATIVE = "Negative prompt:"
_NAME = re.compile(r"\s*(\w[\w \-/.+]{0,60}):\s*")
_BRACKET = re.compile(r'"(?:\\.|[^"\\])*"|[\[\]{}]')
_SIZE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})", re.ASCII)

_ONCE = ("Steps", "Sampler", "Schedule type", "CFG scale", "Seed", "Size", "Model", "RNG", "Clip skip")
# Fields about the origin of the image, which change nothing.
_ABOUT = (
    "Version",
    "Model hash",
    "Hashes",
    "Batch size",
    "Batch pos",
    "User",
    "Parser",
    "App",
    "Time taken",
    "Template",
    "Negative Template",
)
_TI, _LORAS = "TI hashes", "Lora hashes"
_HASH = re.compile(r"([^:,]{1,100}): *([0-9a-f]{4,64})(?:, *|$)")
# A unit of its ControlNet extension: all in one field, or in one field for each setting.
_UNIT = re.compile(r"ControlNet[ -]?([0-9]{0,2})(?: (\w.*))?", re.ASCII)
_SHARES = re.compile(r"starting/ending: \(([0-9.]{1,20}), ([0-9.]{1,20})\)", re.ASCII)
_NETWORK_HASH = re.compile(r" \[[0-9a-f]{4,64}\]$")
# Modules whose networks are of kinds that are not here.
_ELSEWHERE = ("reference", "instant_id", "revision", "pulid", "clip_vision", "shuffle", "faceswaplab")
_THRESHOLDS = ((None, None), ("100", "200"), ("100.0", "200.0"))  # of canny
_ENLARGED = ("Postprocess upscaler", "Postprocess upscale by")
_HIRES = "Hires "  # how the fields of a second pass begin
USUAL_STRENGTH = 0.75  # of a second pass, where nothing says it
_VARIATION = ("Variation seed", "Variation seed strength")
_MASKED = ("Mask blur", "Inpaint area", "Masked content", "Masked area padding", "Mask mode")


def read(text: str, path: Path) -> Foreign | None:
    """Return the recipe in `text`, or None if no line looks like fields. Raises ModelError."""
    if "Steps: " not in text:
        return None
    if len(text) > MAX_TEXT:
        raise bad(path, f"its recipe has {len(text):,} characters; at most {MAX_TEXT:,} are read")
    lines = text.replace("\r\n", "\n").strip().split("\n")
    starts = [i for i, line in enumerate(lines) if _looks_like_fields(line)]
    if not starts:
        return None
    at = starts[-1]
    recipe = Foreign(program=A1111, path=path)
    negatives = [i for i, line in enumerate(lines[:at]) if line.startswith(NEGATIVE)]
    split = negatives[-1] if negatives else at
    recipe.put("prompt", "\n".join(lines[:split]).strip())
    if negatives:
        recipe.put("negative_prompt", "\n".join(lines[split:at]).removeprefix(NEGATIVE).strip())
    if len(starts) > 1 or len(negatives) > 1:
        recipe.notes.append("several of its lines look like fields or a negative prompt; the last of each are taken")
    recipe.left_out += [line for line in lines[at + 1 :] if line.strip()]
    _put_fields(recipe, lines[at])
    return recipe


def _looks_like_fields(line: str) -> bool:
    return line.lstrip().startswith("Steps: ") and line[:MAX_LINE].count(": ") >= 3


def _put_fields(recipe: Foreign, line: str) -> None:
    if len(line) > MAX_LINE:
        raise recipe.fault("line of fields", f"at most {MAX_LINE:,} characters")
    pairs = list(fields(line))
    if len(pairs) > MAX_FIELDS:
        raise recipe.fault("line of fields", f"at most {MAX_FIELDS} fields")
    values = dict(pairs)
    for name in _ONCE:
        if sum(name == other for other, _ in pairs) > 1:
            raise recipe.fault(name, "it once")
    recipe.put("steps", number(values.get("Steps")))
    recipe.put("seed", number(values.get("Seed")))
    recipe.put("guidance", number(values.get("CFG scale")))
    _put_variation(recipe, values)
    recipe.put_sampler(values.get("Sampler"), values.get("Schedule type"))
    recipe.put_model(values.get("Model"))
    _put_size(recipe, values.get("Size"))
    _put_picture(recipe, values)
    masked = [*_put_mask(recipe, values), *_put_second_pass(recipe, values)]
    _note_noise(recipe, values.get("RNG"))
    if "Clip skip" in values:
        skip = number(values["Clip skip"])
        if type(skip) is not int or not 1 <= skip <= 100:
            raise recipe.fault("Clip skip", "an integer from 1 to 100")
        recipe.note_clip_skip(f"Clip skip {skip}", skip - 1)
    for words in ("BREAK", "AND"):
        if re.search(rf"\b{words}\b", recipe.fields.get("prompt", "")):
            recipe.notes.append(f"{words} in its prompt is drawn as a word")
    recipe.embeddings = dict(_HASH.findall(values.get(_TI, "")))
    _put_lora_hashes(recipe, values.get(_LORAS, ""))
    more = [*masked, *_put_enlarger(recipe, values), *(("Denoising strength",) if recipe.picture else ())]
    known = (*_ONCE, *_ABOUT, *_VARIATION, _TI, _LORAS, *more)
    _put_controls(recipe, [(name, value) for name, value in pairs if _UNIT.fullmatch(name)])
    rest = (pair for pair in pairs if pair[0] not in known and not _UNIT.fullmatch(pair[0]))
    recipe.left_out += [f"{name} {value}".strip() for name, value in rest]


def _put_lora_hashes(recipe: Foreign, text: str) -> None:
    """Set the hashes of the LoRAs that the prompt names; one that it does not name has no strength."""
    hashes, here = dict(_HASH.findall(text)), {one.source for one in recipe.loras}
    recipe.lora_hashes = {name: start for name, start in hashes.items() if name in here}
    recipe.left_out += [f"LoRA {name}, whose strength it does not say" for name in hashes if name not in here]


def _put_enlarger(recipe: Foreign, values: dict[str, str]) -> list[str]:
    """Set what makes the finished picture larger, and return the fields that say it."""
    name, by = (values.get(field) for field in _ENLARGED)
    factor = number(by)
    if name is None or name in names.ENLARGERS_THERE or type(factor) not in (int, float) or factor not in range(2, 17):
        return []
    recipe.enlarger, recipe.enlarged_by = names.UPSCALERS_THERE.get(name, name), int(factor)  # type: ignore[call-overload]
    return [*_ENLARGED]


def _put_controls(recipe: Foreign, pairs: list[tuple[str, str]]) -> None:
    """Set the controls of the units in `pairs`, and the mode of all."""
    units: dict[str, dict[str, str]] = {}
    for match, value in ((_UNIT.fullmatch(name), value) for name, value in pairs):
        assert match is not None
        unit, setting = units.setdefault(match[1], {}), match[2]
        if setting:
            unit[setting.lower()] = value
            continue
        unit |= {key.lower(): one for key, one in fields(value)}
        if shares := _SHARES.search(value):
            unit |= {"guidance start": shares[1], "guidance end": shares[2]}
    modes = {}
    for key, unit in units.items():
        if unit.get("enabled", "True") == "True" and (mode := _put_unit(recipe, f"ControlNet {key}".strip(), unit)):
            modes[mode] = key
    if len(modes) > 1:
        recipe.notes.append(f"its units have several control modes; {next(iter(modes))} is taken for all")
    if modes:
        recipe.put_control_mode(next(iter(modes)))


def _put_unit(recipe: Foreign, title: str, unit: dict[str, str]) -> str | None:
    """Set the control of one unit, and return its mode; None if it was left out, or is an IP-Adapter."""
    module = unit.get("module", unit.get("preprocessor", "none")).lower()
    network = _NETWORK_HASH.sub("", unit.get("model", "None"))
    scale, start, end = (number(unit.get(name, usual)) for name, usual in (
        ("weight", "1"), ("guidance start", "0"), ("guidance end", "1"),
    ))  # fmt: skip
    kind = MODULES.get(module) or KINDS.get(unit.get("union control type", "").lower(), "")
    numbers = all(type(one) in (int, float) for one in (scale, start, end))
    if module.startswith(_ELSEWHERE) or network == "None" or not numbers:
        recipe.left_out.append(f"{title} {clean(', '.join(f'{name}: {value}' for name, value in unit.items()), 50)}")
        return None
    if not recipe.put_control(network, kind, scale, start, end):
        recipe.left_out.append(f"{title} {network} {scale}")
        return None
    shown = clean(network, 40)
    if module not in MODULES and not module.startswith(IP_ADAPTER):
        recipe.notes.append(f"the picture of {shown} is one that {clean(module, 30)} made: give it as that made it")
    if MODULES.get(module) == "canny" and (unit.get("threshold a"), unit.get("threshold b")) not in _THRESHOLDS:
        recipe.notes.append(f"the thresholds of canny for {shown} are 100 and 200 here")
    if module.startswith(IP_ADAPTER):
        return None
    if unit.get("resize mode") in ("Crop and Resize", "Resize and Fill", "1", "2"):
        recipe.notes.append("the pictures of controls are stretched to the size here: give them in its proportions")
    return mode_of(unit.get("control mode", "Balanced")) or names.CONTROL_MODES[0]


def _put_variation(recipe: Foreign, values: dict[str, str]) -> None:
    seed, strength = (number(values.get(name, "0")) for name in _VARIATION)
    if type(seed) is not int or seed > MAX_SEED or not isinstance(strength, int | float) or not 0 <= strength <= 1:
        raise recipe.fault("Variation seed", "a seed and a strength from 0 to 1")
    if strength:
        recipe.put("variation", str(Variation(seed, float(strength))))


def _put_size(recipe: Foreign, size: str | None) -> None:
    if size is None:
        return
    match = _SIZE.fullmatch(size)
    if match is None:
        raise recipe.fault("Size", "width x height, such as 512x768")
    recipe.put("width", int(match[1]))
    recipe.put("height", int(match[2]))


def _put_picture(recipe: Foreign, values: dict[str, str]) -> None:
    """Set the strength of an initial image, unless it belongs to the second pass of the hires fix."""
    if "Denoising strength" in values and not any(name.startswith(_HIRES) for name in values):
        recipe.picture = True
        recipe.put("strength", number(values["Denoising strength"]))
    recipe.mask = any(name in values for name in _MASKED)


def _put_second_pass(recipe: Foreign, values: dict[str, str]) -> list[str]:
    """Set the options of the second pass, and return the fields that say them. Its steps are those that are run, as
    many as in the first pass unless a field says so."""
    factor = _factor(recipe, values)
    if factor is None:
        return []
    recipe.put("hires", factor)
    known = [name for name in ("Hires upscale", "Hires resize") if name in values]
    strength = number(values.get("Denoising strength", str(USUAL_STRENGTH)))
    recipe.put("hires_strength", strength)
    count = number(values.get("Hires steps"))
    if count is not None and (type(count) is not int or count > MAX_STEPS):
        raise recipe.fault("Hires steps", f"an integer from 0 to {MAX_STEPS}")
    run, share = count or recipe.fields.get("steps"), recipe.fields["hires_strength"]
    if run is not None and share:
        recipe.put("hires_steps", min(names.steps_for(run, share), MAX_STEPS))
    name = values.get("Hires upscaler", "Latent")
    if name in names.ENLARGERS_THERE:
        recipe.put("hires_with", names.ENLARGERS_THERE[name])
    else:
        recipe.upscaler = names.UPSCALERS_THERE.get(name, name)
    return [*known, "Denoising strength", "Hires steps", "Hires upscaler"]


def _factor(recipe: Foreign, values: dict[str, str]) -> object:
    """Return how many times as large the second pass is; None without one, or if its proportions are others."""
    if "Hires upscale" in values:
        return number(values["Hires upscale"])
    match = _SIZE.fullmatch(values.get("Hires resize", ""))
    width, height = recipe.fields.get("width"), recipe.fields.get("height")
    if match is None or width is None or height is None:
        return None
    return factor_of((width, height), (int(match[1]), int(match[2])))


def factor_of(sides: tuple[int, int], larger: tuple[int, int]) -> float | None:
    """Return the factor from `sides` to the `larger` sides (one of which may be 0), or None if the proportions
    differ."""
    factors = [after / before for before, after in zip(sides, larger, strict=True) if after and before]
    fits = (factor for factor in factors if all(
        not after or round(before * factor) == after for before, after in zip(sides, larger, strict=True)
    ))  # fmt: skip
    return next(fits, None)


def _put_mask(recipe: Foreign, values: dict[str, str]) -> list[str]:
    """Set the options of a mask, and return the fields that say them."""
    words = {
        "Mask mode": {"Inpaint masked": ("mask_mode", "inside"), "Inpaint not masked": ("mask_mode", "outside")},
        "Masked content": {there: ("mask_fill", ours) for there, ours in FILLS_THERE.items()},
    }
    known = [name for name in words if values.get(name) in words[name]]
    for name in known:
        recipe.put(*words[name][values[name]])
    if "Mask blur" in values:
        recipe.put("mask_blur", number(values["Mask blur"]))
        known.append("Mask blur")
    if values.get("Inpaint area") == "Only masked":
        recipe.put("only_masked", number(values.get("Masked area padding", "0")))
        known += ["Inpaint area", "Masked area padding"]
    return known


def _note_noise(recipe: Foreign, rng: str | None) -> None:
    """Note that the noise differs: nothing here reproduces a GPU's noise, which is that program's default."""
    if rng is None:
        recipe.notes.append("its noise was drawn on a GPU: the same seed gives another picture here")
    elif rng != "CPU":
        recipe.notes.append(f"its noise was drawn by RNG {rng[:20]!r}: the same seed gives another picture here")


def number(text: str | None) -> object:
    """Return `text` as a number for `Foreign.put` to check; any other text as it is, which `put` refuses."""
    if text is not None and re.fullmatch(r"[0-9]{1,20}", text, re.ASCII):
        return int(text)
    if text is not None and re.fullmatch(r"[0-9]{1,10}\.[0-9]{1,20}", text, re.ASCII):
        return float(text)
    return text


def fields(line: str) -> list[tuple[str, str]]:
    """Return the fields of `Name: value, Name: "a value, quoted as JSON", Name: [brackets, too]` as pairs."""
    pairs: list[tuple[str, str]] = []
    at, closes = 0, True
    while at < len(line) and len(pairs) <= MAX_FIELDS:
        match = _NAME.match(line, at)
        begin = match.end() if match else at
        end = _closing(line, begin) if closes and line[begin : begin + 1] in ("[", "{") else None
        closes = closes and not (line[begin : begin + 1] in ("[", "{") and end is None)
        value, at = _value(line, begin, end)
        if match or value:
            pairs.append((match[1] if match else "", value))
    return pairs


def _value(line: str, begin: int, end: int | None) -> tuple[str, int]:
    """Return the value at `begin`, which ends at `end` if it is a bracket, and where the next field begins."""
    if line[begin : begin + 1] == '"':
        try:
            value, end = json.JSONDecoder().raw_decode(line, begin)
            return str(value), _after_comma(line, end)
        except ValueError:
            end = None
    if end is not None:
        return line[begin:end], _after_comma(line, end)
    comma = line.find(",", begin)
    end = len(line) if comma < 0 else comma
    return line[begin:end].strip(), end + 1


def _after_comma(line: str, at: int) -> int:
    comma = line.find(",", at)
    return len(line) if comma < 0 else comma + 1


def _closing(line: str, begin: int) -> int | None:
    """Return the end of the bracket that opens at `begin`, or None."""
    depth = 0
    for match in _BRACKET.finditer(line, begin):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return None
