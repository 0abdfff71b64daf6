"""Which backends run here, and on what."""

from __future__ import annotations

import click


@click.command("devices")
def devices() -> None:
    """Prints each backend with its device, or why it is not available."""
    from qwenimg import backends
    from qwenimg.common.errors import clean

    for name, device in backends.available().items():
        click.echo(f"{name:5} {clean(device, 280)}")
