"""How long a picture takes: measured here, or on paper for machines that are not here."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from qwenimg.backends import NAMES
from qwenimg.common.base.errors import BackendMissing, UsageError

if TYPE_CHECKING:
    from qwenimg.common.measure.published import Subject

_SIDE = click.IntRange(16, 4096)  # beyond, counting takes long itself
_FEW = 2  # steps of the shorter run


@click.command("bench")
@click.argument("model", required=False)
@click.option("--on-paper", metavar="MACHINE", help="h100, h200, 4090, m4-max, ...: a MODEL of it; see below.")
@click.option("-W", "--width", type=_SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("-H", "--height", type=_SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("--steps", type=click.IntRange(1, 1000), metavar="N", help="Default the model's; measured, 6.")
@click.option("--guidance", type=click.FloatRange(0, 100), metavar="X", help="Default the model's; at 1 one branch.")
@click.option("--backend", type=click.Choice(NAMES), default="auto", metavar="|".join(NAMES), help="Default auto.")
@click.option("--precision", default="auto", metavar="POLICY", help="As of generate. On paper default that of a GPU.")
@click.option("--compile", type=click.Choice(("off", "on")), default="off", metavar="off|on", help="Default off.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, metavar="N", help="Default 3; medians are shown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(model: str | None, on_paper: str | None, as_json: bool, **given: Any) -> None:
    """Measures what a picture of MODEL (a name, folder or file) takes here, stage by stage.

    The steady step is the slope between two numbers of steps, so that what comes once is not in it. With --on-paper
    nothing is run: kernels are counted for the program as it is, compiled, and the limit that no program passes, and
    given their time on one of h100, h200, a100, 4090, 5090, m1-max, m2-ultra, m3-ultra, m4-max, m5-max. Known names
    need no files for that.
    """
    from qwenimg.cli import streams

    text = _on_paper(model, on_paper, as_json, **given) if on_paper else _measured(model, as_json, **given)
    streams.put(text.encode() + b"\n")


def _measured(model: str | None, as_json: bool, **given: Any) -> str:
    begun = time.perf_counter()
    from qwenimg import backends, load
    from qwenimg.common.measure import bench as measuring

    backends.load(given["backend"])
    imported = time.perf_counter() - begun
    many = given["steps"] or 6
    if many <= _FEW:
        raise UsageError(f"--steps {many}: the slope is taken from {_FEW} steps on; give more")
    with ExitStack() as stack:

        def opened() -> Any:
            pipe = load(model, given["backend"], given["precision"])
            stack.callback(pipe.close)
            pipe.compile(given["compile"])
            return pipe

        with ExitStack() as files:
            subject = _subject(model, files)
            usual = subject.defaults
        guidance = usual.guidance if given["guidance"] is None else given["guidance"]
        size = (given["width"] or usual.width, given["height"] or usual.height)
        ask = measuring.Ask(
            width=size[0], height=size[1], guidance=guidance, few=_FEW, many=many, rounds=given["rounds"]
        )
        made, _, pipe = measuring.measure(opened, ask, imported, begun)
        made = _with_share(made, pipe, subject, ask)
    return measuring.as_json([made], ask) if as_json else "\n".join(measuring.lines([made], ask))


def _with_share(made: Any, pipe: Any, subject: Subject, ask: Any) -> Any:
    """With the share of the products' rate, where their kernels can be counted."""
    from qwenimg import backends
    from qwenimg.common.measure.bench import share_of_products
    from qwenimg.common.numbers.sizes import render_size

    try:
        count = backends.counter()
    except BackendMissing:
        return made
    case, calls = subject.step(*render_size(ask.width, ask.height), ask.guidance > 1)
    kernels = count(*subject.denoiser, pipe.precision, case)
    share, rate = share_of_products(pipe.engine, kernels, calls, made.stages["steady step"])
    return replace(made, share=share, rate=rate)


def _on_paper(model: str | None, machine_name: str, as_json: bool, **given: Any) -> str:
    from qwenimg import backends
    from qwenimg.common.measure import on_paper as paper
    from qwenimg.common.measure.machines import machine
    from qwenimg.common.numbers.sizes import render_size
    from qwenimg.common.weights.precision import parse

    found = machine(machine_name)
    with ExitStack() as stack:
        subject = _subject(model, stack, published_alone=True)
        usual = subject.defaults
        made = paper.on_paper(
            backends.counter(),
            subject,
            found,
            parse(given["precision"], on_gpu=True, kind=subject.kind),
            size=render_size(given["width"] or usual.width, given["height"] or usual.height),
            steps=given["steps"] or usual.steps,
            guided=(usual.guidance if given["guidance"] is None else given["guidance"]) > 1,
        )
    return json.dumps(made.as_json()) if as_json else "\n".join(paper.lines(made))


def _subject(model: str | None, stack: ExitStack, *, published_alone: bool = False) -> Subject:
    """By name without files where that is known and enough, else of the files. Raises QwenimgError."""
    from qwenimg.common.families import registry
    from qwenimg.common.families.catalog import DEFAULT
    from qwenimg.common.hub.resolve import resolve
    from qwenimg.common.measure.published import opened, published

    known = published(DEFAULT if model is None else model)
    if published_alone and known is not None:
        return known
    resolved = resolve(model)
    found = registry.open_model(resolved.folder)
    stack.callback(found.checkpoint.close)
    return opened(resolved.name, resolved.known, found)
