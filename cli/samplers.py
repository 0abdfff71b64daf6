"""Which samplers and schedules there are."""

from __future__ import annotations

import json

import click


@click.command("samplers")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def samplers(as_json: bool) -> None:
    """Prints the samplers that --sampler takes, and the schedules that --schedule takes.

    Order: of accuracy, of stochastic samplers that of the pictures' distribution. Asks: how often the model is asked
    in a step. Flow: whether it works with flow models, such as Qwen-Image, too.
    """
    from qwenimg.common.base.text import aligned
    from qwenimg.common.sampling.schedules import SCHEDULES
    from qwenimg.common.sampling.table import SAMPLERS

    if as_json:
        rows = [sampler.described() for sampler in SAMPLERS.values()]
        click.echo(json.dumps({"samplers": rows, "schedules": SCHEDULES}))
        return
    lines: list[tuple[str, ...]] = [("name", "title", "order", "noise", "calls", "Qwen", "source")]
    lines += [sampler.row() for sampler in SAMPLERS.values()]
    click.echo("\n".join(aligned(lines)))
    click.echo(f"\nschedules: {', '.join(SCHEDULES)}")
