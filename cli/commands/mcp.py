"""The command `mcp`: draw for an assistant, over standard input and output."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from qwenimg.cli import places, streams
from qwenimg.cli.options import FILE, Number
from qwenimg.common.base.errors import BackendMissing, UsageError
from qwenimg.common.base.text import shown_path
from qwenimg.common.families.load_options import load_options_of


@click.command("mcp")
@click.option(
    "--folder",
    type=FILE,
    required=True,
    metavar="DIR",
    help="The folder that pictures are written to, and read from; no other is.",
)
@click.option(
    "--deadline",
    type=Number(0, min_open=True),
    default=600.0,
    metavar="SECONDS",
    help="The longest time for a call; default 600.",
)
@places.declared("model", "backend", *places.OF_WORKERS, "cache_prompts", "offline")
def mcp(folder: Path, deadline: float, **given: Any) -> int:
    """Draw for an assistant that speaks the Model Context Protocol over standard input and output.

    Its tools are draw, edit, rewrite, describe, plan and models. It ends when standard input is closed or by Ctrl-C."""
    if find_spec("mcp") is None:
        raise BackendMissing("mcp needs the package mcp; in the clone of qwenimg: pip install '.[mcp]'")
    if sys.stdin is None or sys.stdout is None:
        raise UsageError("mcp needs standard input and output, on which the assistant speaks")
    import qwenimg
    from qwenimg.cli.assistants.server import serve
    from qwenimg.cli.assistants.tools import Tools
    from qwenimg.cli.client_folder import Folder

    if os.path.lexists(folder):
        Folder(folder)  # for its error, before a model is opened; a new one is made after
    with qwenimg.open_pipeline(load_options_of(places.pop_opening(given)), _say) as pipe:
        place = Folder(folder)
        streams.say(f"qwenimg: {pipe.model_name} for an assistant; pictures in {shown_path(place.path)}")
        if sys.stdin.isatty():
            streams.say("qwenimg: this waits for an assistant's messages on standard input; Ctrl-C ends it")
        asyncio.run(serve(Tools(pipe, place, deadline)))
    return 0


def _say(kind: str, text: str) -> None:
    if kind != "stage":
        streams.say(f"qwenimg: {text}")
