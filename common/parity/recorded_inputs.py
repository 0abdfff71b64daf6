"""The options with which a recorded model was opened, compared with the options of a check."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.parity.passport.passport import Model, RecordedControl
from qwenimg.common.pipeline.controls import Controls
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.loras import Loras, in_cache
from qwenimg.common.request.parts import PARTS, components_of

_OPTIONS = {"quantize": "-q", "prediction": "--prediction", "lora": "--lora"}
_FILES = (*PARTS, "lora")


def completed(
    recorded: Model, opening: LoadOptions, loras: tuple[Lora, ...], find: Callable[[str], Path | None]
) -> tuple[LoadOptions, tuple[Lora, ...]]:
    """Return `opening` and `loras` completed from the record: bits, prediction, and the files that `find` and the cache
    have. Raises UsageError for an option that was not recorded, is missing, or has another value. `check_files`
    compares contents later."""
    paths = {part: path for part, name in recorded.parts.items() if (path := opening.parts.get(part) or find(name))}
    whole = replace(
        opening,
        parts={**opening.parts, **paths},
        quantize=opening.quantize or recorded.quantize or None,
        prediction=opening.prediction or cast(Any, recorded.prediction) or None,
    )
    if not loras and all(in_cache(one.source) for one in recorded.loras):
        loras = recorded.loras
    _check_options(recorded, {name: whole.value(name) for name in (*PARTS, "quantize", "prediction")} | {"lora": loras})
    return whole, loras


def _check_options(recorded: Model, given: Mapping[str, Any]) -> None:
    """Check that the options `given`, by their names, are the recorded ones."""
    options = {
        **recorded.parts,
        "quantize": recorded.quantize,
        "prediction": recorded.prediction,
        "lora": recorded.lora,
    }
    for name in (*PARTS, *_OPTIONS):
        then, now = options.get(name, ""), given[name] or ""
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        if then and not now:
            raise UsageError(f"the passport was recorded with {option} {clean(then, 80)}; give the same")
        if now and not then:
            raise UsageError(f"the passport was recorded without {option}; leave it out")
        if name not in _FILES and then != now:
            raise UsageError(f"the passport was recorded with {option} {clean(then, 40)}, not {clean(now, 40)}")


def check_files(recorded: Model, others: Collection[str], files: Loras, loras: Sequence[Lora]) -> None:
    """Raise ModelError if components (`others`) have other files than the recorded ones, or LoRAs other files or
    strengths."""
    for part, name in recorded.parts.items():
        if not components_of([part]).isdisjoint(others):
            option = f"--{part.replace('_', '-')}"
            raise ModelError(f"{option}: these weights are not those of {clean(name, 60)}, which were recorded")
    here: Any = files.recorded(loras)
    shown, prints = here.get("lora", ""), tuple(here.get("lora_fingerprints", ()))
    scales = [[f"{one.scale:g}" for one in each] for each in (loras, recorded.loras)]
    if prints != recorded.lora_fingerprints or scales[0] != scales[1]:
        raise ModelError(
            f"--lora {clean(shown, 80)}: another file or strength than was recorded, {clean(recorded.lora, 80)}"
        )


def check_embeddings(recorded: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Compare the embeddings of the recorded prompts with those `here`: SHA-256 of files by name. Raises UsageError for
    a missing one, and ModelError for another file."""
    for name, mark in recorded.items():
        if name not in here:
            raise UsageError(f"the passport was recorded with --embedding {clean(name, 60)}; give it as NAME=FILE")
        if here[name] != mark:
            raise ModelError(f"--embedding {clean(name, 60)}: another file than was recorded")
    for name in here.keys() - recorded.keys():
        raise UsageError(f"embedding {clean(name, 60)} is in the prompt, which was recorded as a word; rename its file")


def networks(
    recorded: Sequence[RecordedControl], names: Sequence[str], controls: Controls, find: Callable[[str], Path | None]
) -> tuple[str, ...]:
    """Return, for each recorded control, the name of its network on this machine: one of `names` with the recorded
    files, else what `find` finds. Raises UsageError for a missing or a superfluous name, and ModelError for other
    files."""
    for name in names:
        if not recorded:
            raise UsageError("the passport was recorded without --control; leave it out")
        if ";" in name or "=" in name:
            raise UsageError(f"--control {clean(name, 60)}: the passport has the picture; give the network alone")
    by_print = {controls.fingerprint(name): name for name in names}
    by_print |= {one.fingerprint: "" for one in recorded if not one.name}  # the model itself
    for mark, name in by_print.items():
        if name and mark not in {one.fingerprint for one in recorded}:
            then = ", ".join(dict.fromkeys(clean(one.name, 60) for one in recorded))
            raise ModelError(f"--control {clean(Path(name).name, 60)}: another network than was recorded, {then}")
    for one in recorded:
        if one.fingerprint not in by_print and (path := find(one.name)) is not None:
            by_print[controls.fingerprint(str(path))] = str(path)
        if one.fingerprint not in by_print:
            raise UsageError(f"the passport was recorded with --control {clean(one.name, 60)}; give the same")
    return tuple(by_print[one.fingerprint] for one in recorded)
