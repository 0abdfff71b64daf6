"""What float32 and 16 bit are on this device, what there is of memory and disk, and what --preset auto would choose."""

from __future__ import annotations

import json
from contextlib import ExitStack

import click

from qwenimg.backends import NAMES
from qwenimg.cli import places


@click.command("doctor")
@click.argument("model", required=False)
@click.option("--backend", type=click.Choice(NAMES), default="auto", metavar="|".join(NAMES), help="Default auto.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@places.found
def doctor(model: str | None, backend: str, as_json: bool) -> int:
    """Measures this device, in seconds: a matrix product, a convolution and attention in each dtype against float64.

    With MODEL (a name, folder or file) it says what --preset auto chooses for that. Exit code 6 where float32 is not.
    """
    from qwenimg import backends
    from qwenimg.cli import streams
    from qwenimg.common.base.errors import NumericsError
    from qwenimg.common.families import registry
    from qwenimg.common.hub.resolve import resolve
    from qwenimg.common.measure.doctor import examine, lines

    with ExitStack() as stack:
        opened = None
        if model is not None:
            resolved = resolve(model)
            found = registry.open_model(resolved.folder)
            stack.callback(found.checkpoint.close)
            opened = (resolved.name, found.family.precision, found.checkpoint)
        report = examine(backends.load(backend), opened)
    text = json.dumps(report.as_json()) if as_json else "\n".join(lines(report))
    streams.put(text.encode() + b"\n")
    if report.float32.faults:
        raise NumericsError(
            f"float32 on {report.device} {report.float32.verdict()}; unset MLX_ENABLE_TF32, or use --precision bf16"
        )
    return 0
