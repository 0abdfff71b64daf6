"""The commands that print a table: `devices`, `presets` and `samplers`."""

from __future__ import annotations

import json

import click


@click.command("devices")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def devices(as_json: bool) -> None:
    """Print each backend with its device, or why it is not available."""
    from qwenimg import backends
    from qwenimg.common.base.text import clean

    reports = backends.available()
    if as_json:
        rows = [_row(name, text.removeprefix(backends.MISSING), text) for name, text in reports.items()]
        click.echo(json.dumps({"backends": rows}))
        return
    for name, device in reports.items():
        click.echo(f"{name:6} {clean(device, 280)}")


def _row(name: str, reason: str, text: str) -> dict[str, object]:
    here = reason == text
    return {"name": name, "available": here, "device": text if here else None, "reason": None if here else reason}


@click.command("presets")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def presets(as_json: bool) -> None:
    """Print the presets that --preset takes, and the precision policy of each for each family of models."""
    from qwenimg.common.base.text import aligned
    from qwenimg.common.families import registry
    from qwenimg.common.precision.presets import PRESETS

    if as_json:
        rows = [
            {
                "name": name,
                "purpose": preset.purpose,
                "tiled": preset.tiled,
                "bits": preset.bits,
                "compiled": preset.compiled,
                "precision": {family.name: family.precision.presets[name] for family in registry.FAMILIES},
            }
            for name, preset in PRESETS.items()
        ]
        click.echo(json.dumps({"presets": rows, "default": "auto"}))
        return
    lines: list[tuple[str, ...]] = [("name", "precision", "purpose")]
    for name, preset in PRESETS.items():
        families: dict[str, list[str]] = {}
        for family in registry.FAMILIES:
            families.setdefault(family.precision.presets[name], []).append(family.title)
        usual, *others = sorted(families, key=lambda policy: -len(families[policy]))
        lines.append((name, usual, preset.purpose))
        lines += [("", policy, f"in {', '.join(families[policy])}") for policy in others]
    click.echo("\n".join(aligned(lines)))
    click.echo(
        "\nauto, the default, is chosen from device, memory and model; qwenimg doctor says what it is here and why"
    )


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
