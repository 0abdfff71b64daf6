"""The command `samplers`: list the samplers and schedules."""

from __future__ import annotations

import json

import click


@click.command("samplers")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def samplers(as_json: bool) -> None:
    """Print the samplers that --sampler takes, and the schedules that --schedule takes.

    Order: of accuracy; for stochastic samplers, of the images' distribution. Calls: how often a step calls the model.
    Qwen: whether it works with flow models, such as Qwen-Image, too.
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
