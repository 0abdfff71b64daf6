"""The options by which commands that have a language model write bound a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from qwenimg.cli.options import Number

USUAL, MOST_TOKENS = 300, 2048


def text_limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --limit and --deadline to a command."""
    limit = click.option(
        "--limit",
        type=click.IntRange(1, MOST_TOKENS),
        metavar="N",
        help=f"The most tokens of a text; default {USUAL}, at most {MOST_TOKENS}.",
    )
    deadline = click.option(
        "--deadline",
        type=Number(0, min_open=True),
        metavar="SECONDS",
        help="The longest time for a text, which is cut then; default none.",
    )
    return limit(deadline(command))
