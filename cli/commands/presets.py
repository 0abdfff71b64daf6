"""The command `presets`: list the presets."""

from __future__ import annotations

import json

import click


@click.command("presets")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def presets(as_json: bool) -> None:
    """Print the presets that --preset takes, and the precision policy of each for each family of models."""
    from qwenimg.common.base.text import aligned
    from qwenimg.common.families import registry
    from qwenimg.common.precision.presets import PRESETS

    kinds = {family.title: family.precision for family in registry.FAMILIES}
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
    lines: list[tuple[str, ...]] = [("name", *kinds, "purpose")]
    lines += [(name, *(kind.presets[name] for kind in kinds.values()), p.purpose) for name, p in PRESETS.items()]
    click.echo("\n".join(aligned(lines)))
    click.echo(
        "\nauto, the default, is chosen from device, memory and model; qwenimg doctor says what it is here and why"
    )
