"""The command `doctor`: the precision of this device, its memory and disk, and the choice of --preset auto."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace

import click

from qwenimg.cli import places
from qwenimg.common.families.load_options import LoadOptions


@click.command("doctor")
@click.argument("model", required=False)
@places.declared("backend")
@click.option("--all", "every", is_flag=True, help="List all known models, not ten.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@places.with_opening
def doctor(opening: LoadOptions, as_json: bool, every: bool) -> int:
    """Measure this device for some seconds: a matrix product, a convolution and attention in each dtype against
    float64.

    With MODEL (a name, folder or file) it prints the choice of --preset auto for that; a known name needs no files. The
    built-in model shows by how much compiled blocks, kept keys, products of 8-bit weights and the step cache differ
    from their plain form. It ends with ten known models, best first for this machine. Exit code 6 if products in
    float32 are less precise than float32, or a shortcut differs by more than rounding.
    """
    from qwenimg import backends
    from qwenimg.cli import streams
    from qwenimg.common.base.errors import NumericsError
    from qwenimg.common.base.text import aligned
    from qwenimg.common.hub import forecast
    from qwenimg.common.hub.open_model import open_files
    from qwenimg.common.hub.shortcut_check import check_shortcuts
    from qwenimg.common.measure.doctor import examine, lines, on_paper

    engine = backends.load(opening.backend)
    with ExitStack() as stack:
        examined = None
        if opening.model is not None:
            files = open_files(replace(opening, offline=True), planned=True)
            stack.callback(files.close)
            examined = (files.path.name, files.family.precision, files.checkpoint)
        report = examine(engine, examined)
    check = None if report.float32.faults else check_shortcuts(engine)  # in a float32 that is none nothing is loaded
    checks = [] if check is None else [*check.differences.values()]
    fits = forecast.forecast_all(on_paper(engine, report))
    if as_json:
        models = [one.as_json() for one in fits]
        text = json.dumps({**report.as_json(), "checks": [one.as_json() for one in checks], "models": models})
    else:
        title = "what fits here, best first (times by the rate above; expect half to twice of them):"
        first, more = forecast.shown(fits, every)
        text = "\n".join(
            [*lines(report), *(one.line() for one in checks), title, *aligned(forecast.rows(first)), *more]
        )
    streams.put(text.encode() + b"\n")
    if report.float32.faults:
        raise NumericsError(
            f"float32 on {report.device} {report.float32.verdict()}; unset MLX_ENABLE_TF32, or use --precision bf16"
        )
    if faults := [one.line() for one in checks if one.faults]:
        raise NumericsError(f"{faults[0]}; please report it")
    return 0
