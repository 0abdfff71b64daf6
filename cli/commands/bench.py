"""The command `bench`: time an image on this machine, stage by stage."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import click

from qwenimg.cli import places
from qwenimg.cli.options import Number
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.load_options import LoadOptions

if TYPE_CHECKING:
    from qwenimg.common.pipeline.pipeline import Pipeline

_SIDE = click.IntRange(16, 4096)
_FEW = 2  # steps of the shorter run


@click.command("bench")
@click.argument("model", required=False)
@click.option("-W", "--width", type=_SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("-H", "--height", type=_SIDE, metavar="PIXELS", help="Default the model's.")
@click.option(
    "--steps",
    type=click.IntRange(1, 1000),
    default=6,
    metavar="N",
    help="The steps of the longer of two runs; default 6.",
)
@click.option("--guidance", type=Number(0, 100), metavar="X", help="Default the model's; 1 is without guidance.")
@places.declared("backend")
@places.declared("precision", help="The number format, as for generate; default auto.")
@places.declared(
    "compile", type=click.Choice(("off", "on")), default="off", metavar="off|on", help="Compile the model; default off."
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=3,
    metavar="N",
    help="How often to measure; default 3. Medians are shown.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@places.with_opening
def bench(
    opening: LoadOptions,
    width: int | None,
    height: int | None,
    steps: int,
    guidance: float | None,
    rounds: int,
    as_json: bool,
) -> None:
    """Measure the time of an image by MODEL (a name, folder or file) on this machine, stage by stage.

    The steady step is the slope between two numbers of steps, so that work that is done once does not count. Another
    picture, which is not timed, compares shortcuts with their plain form, as --check of generate does.
    """
    if steps <= _FEW:
        raise UsageError(f"--steps {steps}: the slope is taken from {_FEW} steps on; give more")
    begun = time.perf_counter()
    from qwenimg import backends, open_pipeline
    from qwenimg.cli import streams
    from qwenimg.common.hub.open_model import open_files
    from qwenimg.common.measure import bench as measuring
    from qwenimg.common.parity import shortcuts

    backends.load(opening.backend)
    imported = time.perf_counter() - begun
    with closing(open_files(opening)) as files:
        usual = files.defaults()
    work = measuring.Workload(
        width=width or usual.width,
        height=height or usual.height,
        guidance=usual.guidance if guidance is None else guidance,
        few=_FEW,
        many=steps,
        rounds=rounds,
    )
    with ExitStack() as stack:

        def opened() -> Pipeline:
            pipe = open_pipeline(opening)
            stack.callback(pipe.close)
            return pipe

        timings, _, pipe = measuring.measure(opened, work, imported, begun)
        with shortcuts.checked(pipe) as check:
            measuring.draw(pipe, work, _FEW)
    if as_json:
        text = measuring.as_json([timings], work, check.as_json())
    else:
        text = "\n".join([*measuring.lines([timings], work), *check.lines()])
    streams.put(text.encode() + b"\n")
