"""The check of shortcuts on a device, for `qwenimg doctor`: a small picture of the built-in model takes all of them."""

from __future__ import annotations

from qwenimg.common.families import catalog
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.open_model import ignore, open_pipeline
from qwenimg.common.parity.shortcuts import Check, watch
from qwenimg.common.runtime.engine import Engine

SIDE, STEPS = 64, 3
REUSED = 0.5  # --step-cache of a run so short that it would compute every call whole with less


def check_shortcuts(engine: Engine) -> Check:
    """Draw a small picture on `engine` in 8 bits with a step cache, compiled where that can save time. Return what its
    shortcuts differ by. Raises QwenimgError."""
    compiler = engine.compiler()
    compiled = "on" if compiler.share and not compiler.missing else "off"
    options = LoadOptions(model=catalog.BUILT_IN.name, quantize="8", compile=compiled)
    with open_pipeline(options, lambda: engine, ignore) as pipe:
        check = watch(pipe)
        pipe("a red circle", seed=0, width=SIDE, height=SIDE, steps=STEPS, step_cache=REUSED)
        return check
