"""Writes the table of known models in docs/models.md: what each is for, its size, license and memory.

python tools/write_models.py

The memory is that of a plan for a Mac at the model's own size, computed from published configurations; nothing in it
depends on the machine that writes it.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from dataclasses import replace

import numpy as np
from doc_tables import table, write

from qwenimg.backends.paper import on_paper
from qwenimg.common.base.amounts import size_text
from qwenimg.common.families.catalog import BUILT_IN, CONTROLS, KNOWN
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.forecast import NO_MODELS, PROMPT
from qwenimg.common.hub.open_model import plan_pipeline
from qwenimg.common.pictures.pixels import HALF
from qwenimg.common.pipeline.fit_options import plan_memory
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.precision.machines import machine
from qwenimg.common.runtime.runtime import Change

PAGE, BLOCK = "models.md", "models"
MEMORY = ("in 16 bits", "8 bits", "4 bits")
HEADS = ("name", "what it is for", "size", "steps", "download", *MEMORY, "edits", "control", "LoRAs", "license")
MACHINE, MUCH = "m4-max", 64 * 10**9  # bytes that are free
BITS = (None, "8", "4")


def rows() -> list[tuple[str, ...]]:
    """Return a line for each known model, the smallest download first."""
    models = sorted(KNOWN.values(), key=lambda known: known.bytes)
    return [_row(known) for known in models if known.name not in NO_MODELS]


def _row(known: KnownModel) -> tuple[str, ...]:
    size = f"{known.width}x{known.height}"
    download = size_text(known.bytes) if known.bytes else "comes with qwenimg"
    with closing(_planned(known, MUCH)) as pipe:
        model, grey = pipe.model, np.full((1024, 1024, 3), HALF, np.uint8)
        picture = {} if model.inputs.most == 0 else {"image": grey, "strength": 1}
        request = pipe.check(PROMPT, **model.inputs.placeholder() | picture)
        sees = model.inputs.seen(request) or model.inputs.mask.is_input
        edits, control, loras = (
            "yes" if has else "no" for has in (sees, _is_controlled(known, pipe), pipe.loras.names)
        )
    peaks, name = map(size_text, _peaks(known)), f"`{known.name}`"
    return name, known.about, size, str(known.steps), download, *peaks, edits, control, loras, known.license


def _is_controlled(known: KnownModel, pipe: Pipeline) -> bool:
    """Return whether a control network is known that fits a model: those are for text to image."""
    families = {piece.controls for piece in CONTROLS}
    if pipe.model.inputs.control:
        return True
    return known is not BUILT_IN and known.family in families and pipe.model.checkpoint.variant in ("", "text")


def _peaks(known: KnownModel) -> list[int]:
    """Return the peak for each of BITS, in the smallest memory that an image fits into as a whole: in more, more stays
    for the next."""
    return [_least(known, bits) for bits in BITS]


def _least(known: KnownModel, bits: str | None) -> int:
    free, peak = 0, 1
    while peak > free:
        free, peak = peak, _peak(known, peak, bits)
    return peak


def _peak(known: KnownModel, free: int, bits: str | None) -> int:
    """Return the bytes of an image where so many are free."""
    with closing(_planned(known, free)) as pipe:
        model = pipe.model if bits is None else pipe.model.variant(Change(quantize=bits))
        return plan_memory(model, pipe.check(PROMPT, **pipe.model.inputs.placeholder()), counted=False).largest.peak


def _planned(known: KnownModel, free: int) -> Pipeline:
    engine = replace(on_paper("auto", MUCH, machine(MACHINE)), free=free)
    return plan_pipeline(LoadOptions(model=known.name), engine)[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as empty:  # a model that is here would give its own figures
        os.environ["HF_HUB_CACHE"] = empty
        write(PAGE, BLOCK, table(HEADS, rows()))


if __name__ == "__main__":
    main()
