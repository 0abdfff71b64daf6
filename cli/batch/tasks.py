"""The pictures of a file of requests, each with a key: a hash of all that decides its pixels."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from qwenimg.cli.batch.contents import Contents
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.base.version import __version__
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.jobs.image_options import Options, plain
from qwenimg.common.jobs.job import NO_FILES, InputFiles, Inputs, Job, jobs_of
from qwenimg.common.jobs.naming import slug
from qwenimg.common.jobs.prompt_file import Line
from qwenimg.common.prompts.wildcards import TEMPLATES, Wildcards
from qwenimg.common.request import outpaint_text
from qwenimg.common.request.request import Defaults

_SHARDS = (("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"), ("RANK", "WORLD_SIZE"))
_NAME = 40  # bytes of a prompt in the name of a file


@dataclass(frozen=True, kw_only=True)
class BatchTask:
    """One picture."""

    key: str  # SHA-256: the same for the same pixels
    job: Job  # of one image

    @property
    def name(self) -> str:
        """The name of the picture's file."""
        return f"{slug(self.job.prompt, _NAME)}-{self.key[:16]}.png"


def model_identity(opening: LoadOptions) -> tuple[dict[str, Any], Defaults]:
    """Return everything besides a request that decides the pixels, as plain JSON; and the model's defaults. Raises
    QwenimgError for a model that does not open."""
    from qwenimg.common.formats.fingerprint import fingerprint
    from qwenimg.common.hub.open_model import open_files

    with closing(open_files(opening)) as files:
        parts = dict(files.checkpoint.components)
        prints = {name: fingerprint(part.plan.files) for name, part in sorted(parts.items()) if part.plan.files}
        refining = files.refiner.name if files.refiner is not None else ""
        defaults = files.defaults()
        name = files.path.name
    words = {key: str(opening.value(key)) for key in ("backend", "precision", "preset", "fallback", "quantize")}
    return words | {"model": name, "files": prints, "refiner": refining, "version": __version__}, defaults


def tasks_of(
    lines: Sequence[Line],
    identity: dict[str, Any],
    defaults: Defaults,
    wildcards: Wildcards,
    options: Options | None = None,
    files: InputFiles = NO_FILES,
    inputs: Inputs | None = None,
    contents: Contents = lambda options: {},
) -> tuple[list[BatchTask], list[ModelError]]:
    """Return the pictures of all lines, each key once, with the texts that seeds choose, and the errors of lines. A
    line without a seed has one that follows from its options, so that the next run has the same. defaults: of the
    model. options: used where a line has none. files: of each picture, with `inputs` decoded. contents: hashes of the
    files that options name. Raises UsageError for `options`."""
    times: Counter[str] = Counter()  # that the same request without a seed was read
    decisive, images = identity | _hashes(files), () if inputs is None else inputs.images

    def complete(options: Options) -> dict[str, Any]:
        return {**_complete(options, defaults, images), **contents(options)}

    def chance(rest: Options) -> int:
        request = _hash([complete(rest), decisive])
        times[request] += 1
        return int(_hash([request, times[request]])[:8], 16) % (2**32 - 10_000)

    jobs, faults = jobs_of(options or {}, lines, wildcards, chance, files=files, most=math.inf)
    keys: dict[str, BatchTask] = {}
    for job in jobs:
        key = _hash([complete(job.options), decisive, job.seed])
        keys.setdefault(key, BatchTask(key=key, job=job))
    return list(keys.values()), faults


def shard_of(tasks: Sequence[BatchTask], shard: tuple[int, int]) -> list[BatchTask]:
    """Return the pictures of shard (i, n), counted from 0. A picture's shard follows from its key alone."""
    index, count = shard
    return [task for task in tasks if int(task.key, 16) % count == index]


def parse_shard(text: str | None) -> tuple[int, int]:
    """Parse `i/n`, i from 0. Without a text, return the shard that SLURM or a launcher such as torchrun sets in the
    environment, else (0, 1). Raises UsageError."""
    if text is None:
        for index, count in _SHARDS:
            if index in os.environ and count in os.environ:
                first = _number("SLURM_ARRAY_TASK_MIN", "0") if index.startswith("SLURM") else 0
                return parse_shard(f"{_number(index) - first}/{os.environ[count]}")
        return 0, 1
    index_text, _, count_text = text.partition("/")
    if not (index_text.isdecimal() and count_text.isdecimal() and len(text) < 20):
        raise UsageError(f"--shard {text[:40]!r} is not i/n, such as 0/4, counted from 0")
    index_, count_ = int(index_text), int(count_text)
    if not index_ < count_:
        raise UsageError(f"--shard {text}: shards are 0/{count_text} to {max(count_ - 1, 0)}/{count_text}")
    return index_, count_


def _number(name: str, default: str = "") -> int:
    """Parse a number in an environment variable."""
    text = os.environ.get(name, default)
    if not (text.isdecimal() and len(text) < 10):
        raise UsageError(f"{name} is {clean(text, 40)!r} in the environment: expected a number; give --shard I/N")
    return int(text)


def _hashes(files: InputFiles) -> dict[str, Any]:
    named = {"image": files.images, "mask": () if files.mask is None else (files.mask,)}
    return {
        name: [hashlib.sha256(one).hexdigest() for one in data if isinstance(one, bytes)]
        for name, data in named.items()
        if data
    }


def _complete(options: Options, defaults: Defaults, images: Sequence[Any]) -> dict[str, Any]:
    """Fill in the model's defaults, and return the options as plain JSON. images: the pictures that give the size."""
    values = {name: value for name, value in plain(options).items() if name not in TEMPLATES.values()}
    aspect = values.pop("aspect", None)
    if isinstance(aspect, Fraction):
        values["width"], values["height"] = defaults.size(aspect)
    else:
        values |= outpaint_text.sides(options, images)
        part, sides = values.get("only_masked") is not None, (values.get("width"), values.get("height"))
        values["width"], values["height"] = defaults.sides(*sides, images, only_masked=part)
    usual: dict[str, Any] = {"negative_prompt": defaults.negative_prompt}
    if not values.get("few_steps"):  # else it has its own
        usual |= {"steps": defaults.steps, "guidance": defaults.guidance}
    return usual | {name: float(value) if name == "guidance" else value for name, value in values.items()}


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
