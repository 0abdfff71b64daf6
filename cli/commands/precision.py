"""The command `precision`: measure the cost and the error of each precision policy on this machine."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qwenimg.cli import places
from qwenimg.cli.options import FILE
from qwenimg.common.families.load_options import LoadOptions

if TYPE_CHECKING:
    from qwenimg.common.families.registry import OpenModel
    from qwenimg.common.measure.precision import PrecisionReport

STEPS = 5  # the first and the last are observed, those between are timed


@click.command("precision")
@click.argument("model", default="shapes")
@places.declared("backend")
@click.option(
    "--policies",
    metavar="NAMES",
    help="The policies to compare with fp32, such as bf16,fp16; default all of the model's.",
)
@click.option("-p", "--prompt", default="a red circle", metavar="TEXT", help="The prompt; default 'a red circle'.")
@click.option("--size", metavar="WxH", help="Default the model's; on a CPU half as wide and high.")
@click.option("--steps", type=click.IntRange(3, 1000), default=STEPS, metavar="N", help=f"Default {STEPS}.")
@click.option("-s", "--seed", type=click.IntRange(0, 2**64 - 1), default=0, metavar="N", help="Default 0.")
@places.weights
@click.option("--json", "as_json", type=FILE, metavar="FILE", help="Write all figures as JSON.")
@click.option("--plot", type=FILE, metavar="FILE", help="Write the charts as an SVG.")
@click.option("--html", "as_html", type=FILE, metavar="FILE", help="Write a page with tables and charts.")
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
@places.with_opening
def precision(
    opening: LoadOptions,
    policies: str | None,
    prompt: str,
    size: str | None,
    steps: int,
    seed: int,
    as_json: Path | None,
    plot: Path | None,
    as_html: Path | None,
    overwrite: bool,
) -> int:
    """Draw one image under each precision policy on this machine, and recommend one.

    MODEL is a name, folder or file; without one the built-in model. For a known model that was not pulled it prints the
    needs of each policy and draws nothing. For each policy: seconds a step, memory, and the distance of latents and
    image from float32 (from float64 on torch's CPU, for a model whose weights take at most 1 GiB in it). For each
    block: its largest activation, the headroom of float16, and the error of each policy.
    """
    from qwenimg.cli import streams
    from qwenimg.common.base import atomic_files
    from qwenimg.common.measure import precision_page
    from qwenimg.common.numbers.sizes import parse_size
    from qwenimg.common.pictures import charts

    for path in (as_json, plot, as_html):
        if path is not None:
            atomic_files.check_output(path, overwrite=overwrite)
    picture = {"prompt": prompt, "steps": steps, "seed": seed}
    sides = None if size is None else parse_size(size)
    with ExitStack() as stack:
        files = _files(opening, measured=any((as_json, plot, as_html)))
        stack.callback(files.close)
        if files.on_paper:
            streams.put("\n".join(_on_paper(files.path.name, opening.backend)).encode() + b"\n")
            return 0
        report = _measured(files, opening.backend, policies, sides, picture)
    streams.put("\n".join(precision_page.lines(report)).encode() + b"\n")
    if as_json is not None:
        data = json.dumps(report.as_json(), indent=1, allow_nan=False).encode() + b"\n"
        atomic_files.write_atomic(as_json, data, overwrite=overwrite)
    if plot is not None:
        atomic_files.write_atomic(plot, charts.svg(*precision_page.charts(report)).encode(), overwrite=overwrite)
    if as_html is not None:
        atomic_files.write_atomic(as_html, precision_page.page(report).encode(), overwrite=overwrite)
    return 0


def _files(opening: LoadOptions, *, measured: bool) -> OpenModel:
    """Open the files of the model. Unless it is to be `measured`, a known model may be missing."""
    from qwenimg.common.hub.open_model import open_files

    if measured:
        return open_files(opening)
    files = open_files(replace(opening, offline=True), planned=True)
    if not files.on_paper:
        files.checkpoint.read_tokenizers()
    return files


def _on_paper(name: str, backend: str) -> list[str]:
    """Compute the needs of each policy for the known model `name`, whose files are not on this machine."""
    from qwenimg.backends.paper import on_paper
    from qwenimg.common.base.text import aligned
    from qwenimg.common.hub import forecast

    head = f"{name} is not here: what each policy takes by its published configuration, and nothing is drawn"
    rows = aligned(forecast.policies(name, on_paper(backend, None)))
    return [head, "", *rows, "", f"to measure it: qwenimg pull {name}"]


def _measured(
    files: OpenModel, backend: str, policies: str | None, size: tuple[int, int] | None, picture: dict[str, Any]
) -> PrecisionReport:
    from qwenimg import backends
    from qwenimg.cli import streams
    from qwenimg.common.base.amounts import size_text
    from qwenimg.common.hub.open_model import check_int8
    from qwenimg.common.measure.precision import EXACT_BYTES, Measuring, PrecisionTask, chosen, measure
    from qwenimg.common.precision.precision import parse

    opened, name = files, files.path.name
    kind = opened.family.precision
    names = None if policies is None else chosen(policies, kind)
    defaults = opened.defaults()
    device = Measuring(opened, backends.load(backend), name, defaults)
    if names is None:
        names = device.policies()
    for policy in names:
        check_int8(parse(policy, on_gpu=False, kind=kind), opened.checkpoint, device.engine)
    width, height = size or device.size()
    task = PrecisionTask(width=width, height=height, **picture)
    device.pipe.check(**asdict(task), **device.pipe.model.inputs.placeholder())
    exact, wide = None, 8 * opened.checkpoint.parameters
    if wide > EXACT_BYTES:
        streams.say(f"compared with float32, not float64, which takes {size_text(wide)} for the weights alone")
    elif backends.installed("cpu"):
        exact = Measuring(opened, backends.load("cpu"), name, defaults)
    else:
        streams.say("compared with float32, not float64, which is torch's and not installed")
    return measure(device, exact, task, names, lambda text: streams.say(f"drawing in {text}"))
