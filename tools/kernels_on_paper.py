"""Compute what an image takes on a machine that is not here: a MODEL, not a measurement.

python tools/kernels_on_paper.py h100 qwen-image
python tools/kernels_on_paper.py "M4 Max" sdxl -W 1024 -H 1024 --json

Nothing is run: the kernels of a step and of decoding are counted, and each is given its time at the machine's rates.
`qwenimg plan --on list` has the machines. Known models need no files.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing

import click
from paper import on_paper
from paper.published import Subject, opened, published

from qwenimg.backends.paper import backend_of
from qwenimg.cli import failures
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.families import registry
from qwenimg.common.hub.resolve import resolve
from qwenimg.common.numbers.sizes import render_size
from qwenimg.common.precision.machines import machine
from qwenimg.common.precision.precision import parse

SIDE = click.IntRange(16, 4096)  # beyond, counting takes long itself


@click.command("kernels_on_paper")
@click.argument("name", metavar="MACHINE")
@click.argument("model", default="qwen-image")
@click.option("-W", "--width", type=SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("-H", "--height", type=SIDE, metavar="PIXELS", help="Default the model's.")
@click.option("--steps", type=click.IntRange(1, 1000), metavar="N", help="Default the model's.")
@click.option("--guidance", type=click.FloatRange(0, 100), metavar="X", help="Default the model's; at 1 one branch.")
@click.option("--backend", default="auto", help="Of the machine.")
@click.option("--precision", default="auto", metavar="POLICY", help="Default that of a GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    name: str,
    model: str,
    width: int | None,
    height: int | None,
    steps: int | None,
    guidance: float | None,
    backend: str,
    precision: str,
    as_json: bool,
) -> None:
    """Compute what an image of MODEL takes on MACHINE (h100, 4090, m4-max, ...): a MODEL, not a measurement."""
    target = machine(name, "MACHINE")
    backend_of(target.title, backend)  # refuses another backend than the machine's
    subject = find(model)
    usual = subject.defaults
    computed = on_paper.on_paper(
        counter(target.title.startswith("Apple")),
        subject,
        target,
        parse(precision, on_gpu=True, kind=subject.kind),
        size=render_size(width or usual.width, height or usual.height),
        steps=steps or usual.steps,
        guided=(usual.guidance if guidance is None else guidance) > 1,
    )
    click.echo(json.dumps(computed.as_json()) if as_json else "\n".join(on_paper.lines(computed)))


def counter(apple: bool) -> on_paper.Counts:
    """Return the function that counts kernels: of MLX's graph for Apple's chips, else of torch's dispatcher."""
    if apple:
        from paper import mlx_kernels

        return mlx_kernels.kernels
    from paper import torch_kernels

    return torch_kernels.kernels


def find(model: str) -> Subject:
    """Return a known model by name, which needs no files, or the model on this machine. Raises QwenimgError."""
    known = published(model)
    if known is not None:
        return known
    resolved = resolve(model)
    found = registry.open_model(resolved.folder)
    with closing(found.checkpoint):
        return opened(resolved.name, resolved.known, found)


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code; an error is one line."""
    try:
        command(arguments, standalone_mode=False)
    except (QwenimgError, click.ClickException) as error:
        return failures.report(error)[0]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
