"""The command `pull`: download a model from the hub into the cache; and the question of a run that lacks its model.
Nothing else uses the network."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import click

from qwenimg.cli import streams
from qwenimg.cli.progress import Bar
from qwenimg.common.base.errors import NotHere, UsageError

T = TypeVar("T")
EVERY = 10.0  # seconds between two lines without a terminal


class ByteBar(Bar):
    """A bar of bytes on a terminal, occasional lines elsewhere; nothing if `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__()
        self.quiet = quiet
        self._printed = time.monotonic()

    def line(self, text: str) -> None:
        if self.quiet:
            return
        with contextlib.suppress(OSError, ValueError):
            if self._bar is not None:
                self._bar.clear()
        streams.say(text)

    def update(self, path: str, done: int, total: int) -> None:
        if self.quiet or sys.stderr is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr.isatty():
                self._draw(path, done, total)
            elif time.monotonic() - self._printed >= EVERY:
                self._printed = time.monotonic()
                streams.say(f"{done / 1e9:.2f} of {total / 1e9:.2f} GB ({done / max(total, 1):.0%}), {path}")

    def _draw(self, path: str, done: int, total: int) -> None:
        if self._bar is not None and self._bar.total != total:  # checking is over, fetching begins
            self.close()
        if self._bar is None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread of its own
            self._bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, file=sys.stderr, leave=False)
        self._bar.set_description_str(path[-40:], refresh=False)
        self._bar.update(done - self._bar.n)


def offer(error: NotHere, *, offline: bool) -> bool:
    """Ask a person on a terminal whether to download the model that `error` misses; return whether it was downloaded.
    Raises the errors of `pull`."""
    from qwenimg.common.base import hf_cache
    from qwenimg.common.base.amounts import size_text
    from qwenimg.common.base.text import clean
    from qwenimg.common.families import catalog
    from qwenimg.common.hub.requirements import time_text

    if offline or not error.name or not streams.can_ask() or hf_cache.is_offline():
        return False
    known = catalog.find(error.name)
    host = clean(urlsplit(hf_cache.settings().ENDPOINT).netloc, 60)
    size = "an unknown number of bytes" if known is None else f"{size_text(known.bytes)}"
    time = "" if known is None else time_text(known.bytes)
    consent = ", if you have agreed to its terms there" if known is not None and known.gated else ""
    streams.say(f"{error}")
    if not streams.confirm(f"{error.name}: {size} from {host}{time}{consent}: get it?", default=known is not None):
        return False
    _fetch(error.name, quiet=False, verify=False)
    return True


def with_offer(opens: Callable[[], T], *, offline: bool) -> T:
    """Call `opens`; if a model is missing, offer its download and call it again."""
    try:
        return opens()
    except NotHere as error:
        if not offer(error, offline=offline):
            raise
    return opens()


def _fetch(name: str, *, quiet: bool, verify: bool) -> Path:
    from qwenimg.common.hub.pull import pull as fetch_model

    bar = ByteBar(quiet=quiet)
    try:
        return fetch_model(name, echo=bar.line, progress=bar.update, verify=verify)
    finally:
        bar.close()


@click.command("pull")
@click.argument("name", metavar="[NAME]", required=False)
@click.option(
    "--verify", is_flag=True, help="Check the hash of files that are here too, and download damaged ones again."
)
@click.option("--quiet", is_flag=True, help="Print only errors on standard error.")
def pull(name: str | None, verify: bool, quiet: bool) -> None:
    """Download the model NAME, for example qwen-image or OWNER/NAME on the hub, and print its folder. Without a name:
    list the models like `qwenimg models`.

    Files that are here are not fetched again; an interrupted download continues where it stopped; every file is checked
    against its hash. HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_TOKEN are those of the Hugging Face tools."""
    if name is None:
        if verify:
            raise UsageError("--verify needs the NAME of a model; `qwenimg models` lists them")
        from qwenimg.cli.commands.models import table

        click.echo(table())
        return
    streams.put(os.fsencode(_fetch(name, quiet=quiet, verify=verify)) + b"\n")
