"""The command `devices`: list the backends of this machine and their devices."""

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
