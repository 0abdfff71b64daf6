"""A recipe of another program: its fields under our names, and the names of those without an equivalent here.

It comes from a file of unknown origin: every value must have the type and bounds of our own recipe. A model's name is
only a name, and never opened as a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import REPO
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.families import catalog
from qwenimg.common.jobs.image_options import Options
from qwenimg.common.request import control_text, lora_text
from qwenimg.common.request.control_text import Control
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.names import CONTROL_MODES
from qwenimg.common.request.request import OPTIONS
from qwenimg.common.sampling import table

A1111 = "AUTOMATIC1111"
PICTURE = "PICTURE"  # in place of the picture of a control, which no recipe has
MAX_NAME = 60  # characters of a name that is shown
MAX_SHOWN = 20  # fields without an equivalent that are shown

# Other programs' names of our schedules, as `plain` returns them.
SCHEDULES = {
    "karras": "karras",
    "exponential": "exponential",
    "beta": "beta",
    "sgmuniform": "sgm_uniform",
    "simple": "simple",
    "alignyoursteps": "ays",
    "ays": "ays",
    "model": "model",
}
# Evenly spaced in time, like most models' own schedules, with ends that may differ.
LIKE_THE_MODELS = ("normal", "uniform", "automatic", "ddimuniform", "ddim", "default")
_ENDINGS = ("karras", "polyexponential", "exponential", "sgmuniform", "alignyoursteps")  # in the name of a sampler

FILES = {file: known.name for known in catalog.KNOWN.values() for file in known.files}
_SUFFIX = re.compile(r"\.(safetensors|ckpt|pt|pth|bin|gguf|sft)$", re.IGNORECASE)
NO_NAMES = ("model", "diffusion_pytorch_model", "pytorch_lora_weights", "adapter_model")
"""Names of files that say nothing: their folder has the name."""
_HUB_ID = re.compile(REPO)
_TAG = re.compile(r"<((?:lora|lyco|lycoris|hypernet)\s*:[^<>]{0,200})>", re.IGNORECASE)
_STRENGTH = re.compile(r"[+-]?(?:[0-9]{1,6}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})", re.ASCII)


@dataclass(kw_only=True)
class Foreign:
    """A recipe of another program, filled while it is read."""

    program: str
    path: Path
    fields: Options = field(default_factory=dict)  # values of options, by our names
    model: str | None = None  # the program's name of the model
    left_out: list[str] = field(default_factory=list)  # fields without an equivalent here
    notes: list[str] = field(default_factory=list)  # differences in the meaning of fields
    picture: bool = False  # whether it started from an image
    mask: bool = False
    loras: list[Lora] = field(default_factory=list)  # by the names of their files, never paths
    lora_hashes: dict[str, str] = field(default_factory=dict)  # the start of the hash of the data of some, by name
    controls: list[Control] = field(default_factory=list)  # whose pictures it does not have
    embeddings: dict[str, str] = field(default_factory=dict)  # the start of the hash of each, by its name
    upscaler: str | None = None  # the name of the file that enlarges between two passes
    enlarger: str | None = None  # that of the file that makes the finished picture larger
    enlarged_by: int | None = None  # how many times; None: as many as that file's network
    refused: str | None = None  # the reason why it cannot be repeated

    def messages(self) -> list[str]:
        """Return lines for the user about differences between the recipe and an image that is generated from it
        here."""
        shown = [clean(item, MAX_NAME) for item in dict.fromkeys(self.left_out)]
        more = [f"and {len(shown) - MAX_SHOWN} more"] if len(shown) > MAX_SHOWN else []
        listed = "; ".join([*shown[:MAX_SHOWN], *more])
        left_out = [f"left out, without an equivalent here: {listed}"] if listed else []
        return [f"{self.program}'s recipe: {line}" for line in [*left_out, *dict.fromkeys(self.notes)]]

    def fault(self, name: str, expected: str) -> ModelError:
        return bad(self.path, f"its recipe of {self.program} has a bad {clean(name, 40)}: expected {expected}")

    def put(self, key: str, value: object) -> None:
        """Set a field; None leaves it out. Raises ModelError for a value of another type or out of bounds."""
        if value is None:
            return
        one = OPTIONS[key]
        if expected := one.fault(value):
            raise self.fault(key, expected)
        self.fields[key] = self._without_tags(key, value) if isinstance(value, str) else one.converted(value)

    def text(self, name: str, value: object, limit: int) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise self.fault(name, f"a text of at most {limit:,} characters")
        return value

    def _without_tags(self, key: str, prompt: str) -> str:
        """Return `prompt` without its tags, and set the LoRAs that those of AUTOMATIC1111's prompt name."""
        tags = _TAG.findall(prompt)
        for tag in tags:
            if self.program == A1111 and key == "prompt" and not tag.lower().startswith("hypernet"):
                self._put_tag(tag)
            else:
                self.left_out.append(f"<{tag}>")
        return _TAG.sub("", prompt).strip() if tags else prompt

    def _put_tag(self, tag: str) -> None:
        """Set the LoRA of `lora:NAME:STRENGTH`, `lora:NAME:OF TEXT:OF DENOISER` or `lora:NAME:te=1:unet=0.5`."""
        _, name, *rest = (part.strip() for part in tag.split(":"))
        by_name = dict(part.split("=", 1) for part in rest if "=" in part)
        plain_ones = [part for part in rest if "=" not in part]
        of_text = by_name.get("te", plain_ones[0] if plain_ones else "1")
        of_denoiser = by_name.get("unet", plain_ones[1] if len(plain_ones) > 1 else of_text)
        numbers = all(_STRENGTH.fullmatch(one) for one in (of_text, of_denoiser))
        if not numbers or not self.put_lora(name, float(of_denoiser)):
            self.left_out.append(f"<{tag}>")
            return
        if of_text != of_denoiser:
            self.note_text_strength(name, of_text)
        if by_name.keys() - {"te", "unet"} or len(plain_ones) > 2:
            self.notes.append(f"of <{clean(tag, MAX_NAME)}> the name and the strength are used")

    def note_text_strength(self, name: str, strength: object) -> None:
        shown = clean(name, 40)
        self.notes.append(
            f"LoRA {shown} has one strength here; its strength in text encoders was {clean(strength, 20)}"
        )

    def put_lora(self, name: object, strength: object = 1.0) -> bool:
        """Add a LoRA; return False for one that cannot be named here. Raises ModelError for values of other types."""
        source, scale = file_name(self.text("LoRA", name, 1_000)), self._number("strength of a LoRA", strength)
        if not source or len(self.loras) >= lora_text.MOST:
            return False
        try:
            self.loras += [Lora(source, scale)] if scale else []
        except UsageError:
            return False
        return True

    def put_control(
        self, name: object, kind: str, scale: object, start: object = 0.0, end: object = 1.0, *parts: str
    ) -> bool:
        """Add a control without its picture; return False for one that cannot be written here. kind: its preprocessor
        or kind. parts: of the model in which alone it counts. Raises ModelError for values of other types."""
        network = file_name(self.text("control network", name, 1_000)) if isinstance(name, str) else ""
        what = "strength or share of the steps of a control"
        strength, first, last = (self._number(what, one) for one in (scale, start, end))
        by_part = tuple((part, strength) for part in parts)
        if not network or len(self.controls) >= control_text.MOST:
            return False
        try:
            self.controls.append(Control(network, PICTURE, kind, 1.0 if parts else strength, first, last, by_part))
        except UsageError:
            return False
        return True

    def put_control_mode(self, mode: str) -> None:
        if mode != CONTROL_MODES[0]:  # the usual one
            self.put("control_mode", mode)

    def _number(self, name: str, value: object) -> float:
        if type(value) not in (int, float) or abs(value) > 1e9:  # type: ignore[arg-type]
            raise self.fault(name, "a number")
        return float(value)  # type: ignore[arg-type]

    def named(self) -> dict[str, str]:
        """Return the names of files, as `info` shows them."""
        larger = (
            ""
            if self.enlarger is None
            else f"{self.enlarger}{f', {self.enlarged_by} times' if self.enlarged_by else ''}"
        )
        files = {
            "model": self.model or "not named",
            "lora": "; ".join(map(str, self.loras)),
            "control": "; ".join(map(str, self.controls)),
            "embedding": "; ".join(self.embeddings),
            "hires_with": self.upscaler or "",
            "upscale_with": larger,
        }
        return {key: name for key, name in files.items() if name}

    def put_sampler(self, name: object, schedule: object = None) -> None:
        """Set sampler and schedule by their names there; the first may include the second. Raises ModelError."""
        named = "" if schedule is None else self.text("schedule", schedule, 1_000)
        if name is not None:
            known, ending = known_sampler(self.text("sampler", name, 1_000))
            named = named or ending
            if known is None:
                self.left_out.append(f"sampler {name}")
            else:
                self.fields["sampler"] = known
                if table.SAMPLERS[known].stochastic:
                    self.notes.append(f"the noise within the steps of {known} is drawn otherwise here")
        self._put_schedule(named)

    def _put_schedule(self, name: str) -> None:
        if plain(name) in LIKE_THE_MODELS:
            self.fields["schedule"] = "model"
            self.notes.append(f"its schedule {clean(name, 40)} is taken as the model's own, whose ends may differ")
        elif plain(name) in SCHEDULES:
            self.fields["schedule"] = SCHEDULES[plain(name)]
        elif name:
            self.left_out.append(f"schedule {name}")

    def put_model(self, name: object) -> None:
        """Set the model's name: the last part of a path, without a file's suffix. Raises ModelError."""
        if name is None:
            return
        self.model = file_name(self.text("model", name, 1_000)) or None

    def note_clip_skip(self, name: str, layers: int) -> None:
        if layers > 0:
            advice = f"for Stable Diffusion 1 it is --clip-skip {layers}, SDXL leaves out its last layer anyway"
            self.notes.append(f"{name} is not applied: {advice}")


def file_name(text: str) -> str:
    """Return the last part of a path without a file's suffix, or a hub id as it is; "" for one that has none."""
    text = text.rstrip("/\\")
    if not _HUB_ID.fullmatch(text) or _SUFFIX.search(text):
        *folders, text = re.split(r"[/\\]", text)
        if folders and _SUFFIX.sub("", text) in NO_NAMES:
            text = folders[-1]
    name = _SUFFIX.sub("", text).strip()
    return name if name.isprintable() and name not in (".", "..") else ""


def plain(name: str) -> str:
    """Return the letters, in lower case, and the digits of `name`."""
    return re.sub("[^a-z0-9]", "", name.lower())


def known_sampler(name: str) -> tuple[str | None, str]:
    """Return our sampler for another program's name, or None, and the schedule at the end of the name, or ""."""
    if len(name) > MAX_NAME:
        return None, ""
    ending = next((end for end in _ENDINGS if plain(name).endswith(end)), "")
    text = name.lower().replace("_", " ")
    for words in (ending, "sgm uniform", "align your steps") if ending else ():
        text = text.removesuffix(words)
    try:
        return table.find(text).name, ending
    except UsageError:
        return None, ending


def known_model(name: str) -> str | None:
    """Return the value of `-m` for the model that other programs call `name`: a known name or a hub id; else None."""
    row = catalog.find(name) or catalog.find(FILES.get(name.lower(), ""))
    return row.name if row else name if _HUB_ID.fullmatch(name) else None
