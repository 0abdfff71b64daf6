"""How long a picture takes: on paper, for machines that are not here."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from qwenimg.common.measure.published import Subject

_SIDE = click.IntRange(16, 4096)  # beyond, counting takes long itself


@click.command("bench")
@click.argument("model", required=False)
@click.option("--on-paper", metavar="MACHINE", required=True, help="h100, h200, 4090, m4-max, ...; see below.")
@click.option("-W", "--width", type=_SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("-H", "--height", type=_SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("--steps", type=click.IntRange(1, 1000), metavar="N", help="Default the model's.")
@click.option("--guidance", type=click.FloatRange(0, 100), metavar="X", help="Default the model's; at 1 one branch.")
@click.option("--precision", default="auto", metavar="POLICY", help="As of generate. Default that of a GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    model: str | None,
    on_paper: str,
    width: int | None,
    height: int | None,
    steps: int | None,
    guidance: float | None,
    precision: str,
    as_json: bool,
) -> None:
    """Prints what a picture takes on MACHINE by a MODEL of it: kernels, operations, bytes, and their time.

    The kernels of MODEL (a name, folder or file; default qwen-image) are counted and not run, for the program as it
    is, compiled, and the limit that no program passes. Known names need no files. Machines: h100, h200, a100, 4090,
    5090, m1-max, m2-ultra, m3-ultra, m4-max, m5-max.
    """
    from qwenimg import backends
    from qwenimg.cli import streams
    from qwenimg.common.measure import on_paper as paper
    from qwenimg.common.measure.machines import machine
    from qwenimg.common.numbers.sizes import render_size
    from qwenimg.common.weights.precision import parse

    found = machine(on_paper)
    with ExitStack() as stack:
        subject = _subject(model, stack)
        usual = subject.defaults
        made = paper.on_paper(
            backends.counter(),
            subject,
            found,
            parse(precision, on_gpu=True, kind=subject.kind),
            size=render_size(width or usual.width, height or usual.height),
            steps=steps or usual.steps,
            guided=(usual.guidance if guidance is None else guidance) > 1,
        )
    text = json.dumps(made.as_json()) if as_json else "\n".join(paper.lines(made))
    streams.put(text.encode() + b"\n")


def _subject(model: str | None, stack: ExitStack) -> Subject:
    """By name without files where that is known, else of the files. Raises QwenimgError."""
    from qwenimg.common.families import registry
    from qwenimg.common.families.catalog import DEFAULT
    from qwenimg.common.hub.resolve import resolve
    from qwenimg.common.measure.published import opened, published

    known = published(DEFAULT if model is None else model)
    if known is not None:
        return known
    resolved = resolve(model)
    found = registry.open_model(resolved.folder)
    stack.callback(found.checkpoint.close)
    return opened(resolved.name, resolved.known, found)
