"""The opening of a model to repeat an image: the files that its recipe names, and those that the user gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.families.opening import Opening
from qwenimg.common.hub import resolve
from qwenimg.common.jobs.replay import Replay
from qwenimg.common.request.parts import PARTS


def with_recorded_parts(opening: Opening, replay: Replay) -> Opening:
    """Return `opening` with the parts that the recipe names by a hub id and that are in the cache."""
    given = opening.parts
    paths = {part: given.get(part) or resolve.named_part(replay.used[part]) for part in PARTS if part in replay.used}
    return replace(opening, parts={**given, **{part: path for part, path in paths.items() if path is not None}})


def replayed(opening: Opening, replay: Replay, picture: Path, *, keep_policy: bool) -> Opening:
    """Return `opening` completed from the recipe of the file `picture`: model, refiner, parts, prediction, bits, and if
    `keep_policy` the precision. Raises ModelError for a model that is not in the cache."""
    opening = with_recorded_parts(opening, replay)
    model, refiner, used = opening.model, opening.refiner, replay.used
    if model is None and replay.model is not None:
        model = _named(replay.model, "-m", picture, opening)
    if refiner is None and "refiner" in used:
        refiner = _named(used["refiner"], "--refiner", picture, Opening(offline=opening.offline))
    return replace(
        opening,
        model=model,
        refiner=refiner,
        precision=replay.precision if keep_policy else opening.precision,
        prediction=opening.prediction or cast(Any, used.get("prediction")),
        variant=opening.variant or used.get("variant"),
        quantize=opening.quantize or used.get("quantize"),
    )


def _named(name: str, option: str, picture: Path, opening: Opening) -> str:
    """Return the model to open for the recipe's `name`. Raises ModelError that asks for `option`."""
    try:
        return resolve.named(name, offline=opening.offline, without=opening.choices.elsewhere)
    except ModelError as error:
        where = clean(picture, 60)
        raise ModelError(f"{error} (the model that {where} was made with; give it with {option})") from None
