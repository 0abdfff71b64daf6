"""The completion script for a shell."""

from __future__ import annotations

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL; put its output into your shell's start-up file."""
    from click.shell_completion import get_completion_class

    from qwenimg.cli.main import COMPLETE_VAR
    from qwenimg.cli.words import cli

    script = get_completion_class(shell)
    assert script is not None, shell
    click.echo(script(cli, {}, "qwenimg", COMPLETE_VAR).source())
