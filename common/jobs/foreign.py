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
from qwenimg.common.request.request import OPTIONS
from qwenimg.common.sampling import table

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
_HUB_ID = re.compile(REPO)
_TAG = re.compile(r"<(?:lora|lyco|lycoris|hypernet)\s*:[^<>]{0,200}>", re.IGNORECASE)


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
    embeddings: dict[str, str] = field(default_factory=dict)  # the start of the hash of each, by its name
    upscaler: str | None = None  # the name of the file that enlarges between two passes
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
        self.fields[key] = self._without_tags(value) if isinstance(value, str) else one.converted(value)

    def text(self, name: str, value: object, limit: int) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise self.fault(name, f"a text of at most {limit:,} characters")
        return value

    def _without_tags(self, prompt: str) -> str:
        tags = _TAG.findall(prompt)
        self.left_out += tags
        return _TAG.sub("", prompt).strip() if tags else prompt

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
        text = self.text("model", name, 1_000).rstrip("/\\")
        if not _HUB_ID.fullmatch(text) or _SUFFIX.search(text):
            text = re.split(r"[/\\]", text)[-1]
        self.model = _SUFFIX.sub("", text) or None

    def note_clip_skip(self, name: str, layers: int) -> None:
        if layers > 0:
            advice = f"for Stable Diffusion 1 it is --clip-skip {layers}, SDXL leaves out its last layer anyway"
            self.notes.append(f"{name} is not applied: {advice}")


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
