"""Write common/data/operations.json: the multiplications and additions of an image by each known model, by which
`qwenimg` knows the first row of a forecast without opening all models.

    python tools/write_operations.py

Counted from published configurations, in so much memory that nothing is divided into tiles: an image takes at least as
many.
"""

from __future__ import annotations

import json
from dataclasses import replace

from qwenimg.backends.paper import on_paper
from qwenimg.common.base.config import data_folder
from qwenimg.common.families import catalog
from qwenimg.common.hub import forecast
from qwenimg.common.precision.machines import machine

ROOM = 2**40  # bytes


def counted() -> dict[str, list[float]]:
    """Return the operations of each row of the forecast, by the name of the model."""
    measured = replace(on_paper("auto", None, machine("h100")), free=ROOM, rate=lambda *_: 1e12)  # counts fewest
    rows = dict[str, list[float]]()
    for known in catalog.KNOWN.values():
        if known.repo is not None and known.name not in forecast.NO_MODELS:
            rows[known.name] = [float(f"{0.999 * one.operations:.3e}") for one in forecast.of_model(known, measured)]
    return rows


if __name__ == "__main__":
    data_folder(forecast.OPERATIONS).write_text(json.dumps(counted(), indent=1) + "\n", encoding="utf-8")
