"""The command `rewrite`: better prompts, by a language model."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qwenimg.cli import failures, places, streams
from qwenimg.cli.options import FILE, Number
from qwenimg.cli.signals import Stop
from qwenimg.cli.text_limits import text_limits
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean, printable
from qwenimg.common.families.load_options import load_options_of
from qwenimg.common.numbers.seeds import MAX_SEED

if TYPE_CHECKING:
    from qwenimg.common.parts.texts.picture_texts import SeenPicture
    from qwenimg.common.parts.texts.rewriting import Rewritten
    from qwenimg.common.runtime.engine import Engine


@click.command("rewrite")
@click.argument("words", nargs=-1, metavar="PROMPT")
@click.option("--prompt-file", metavar="FILE|-", help="Rewrite the prompt of each line, all together.")
@click.option(
    "-i",
    "--image",
    "--edit",
    "images",
    type=FILE,
    multiple=True,
    metavar="PICTURE",
    help="The picture that the prompt edits; may be repeated.",
)
@click.option(
    "--with", "other", metavar="FOLDER|FILE", help="Another language model in place of the model's text encoder."
)
@click.option(
    "-s", "--seed", type=click.IntRange(0, MAX_SEED), default=0, metavar="N", help="Another number, another text."
)
@click.option(
    "--temperature",
    type=Number(0, 2),
    metavar="X",
    help="0 takes the likeliest words always, 2 is wild; default 0.7.",
)
@click.option(
    "--size", metavar="WxH", help="The size of the picture, for a model that writes for it; default 1024x1024."
)
@text_limits
@places.declared(
    "model", "backend", *places.WEIGHTS, "precision", "max_memory", "cache_prompts", "models_dir", "offline"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per event instead of texts.")
@click.option("--quiet", is_flag=True, help="Print texts, warnings and errors only.")
@click.pass_context
def rewrite(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    prompt_file: str | None,
    images: tuple[Path, ...],
    other: str | None,
    seed: int,
    temperature: float | None,
    size: str | None,
    limit: int | None,
    deadline: float | None,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> int:
    """Print a better prompt: what PROMPT leaves open is decided, and text in quotation marks stays as it is.

    It is written by the text encoder of the model (Qwen-Image's is a whole language model), by a model in its folder
    that was trained for it (ERNIE-Image's has one), or by that of --with.
    `qwenimg PROMPT --rewrite` draws with it at once."""
    from dataclasses import replace

    from qwenimg import backends
    from qwenimg.common.hub import opened_writer
    from qwenimg.common.numbers.sizes import parse_size
    from qwenimg.common.parts.texts import rewriting

    stop = ctx.obj if isinstance(ctx.obj, Stop) else Stop()
    prompts = _prompts(words, prompt_file)
    drafts = [rewriting.Draft(prompt, _pictures(images)) for prompt in prompts]
    drafts = drafts if size is None else [replace(draft, size=parse_size(size)) for draft in drafts]
    report = _Report(len(drafts), as_json=as_json, quiet=quiet)
    opening = load_options_of(places.pop_opening(given))

    def load() -> Engine:
        return backends.load(opening.backend)

    with opened_writer.opened(opening, other, load, report.notify, seeing=bool(images)) as opened:
        report.notify("stage", opened.headline)
        opened.writer.runtime.interrupt = stop.check
        opened.writer.seconds = math.inf if deadline is None else deadline
        with stop.waits():
            try:
                protocol = opened.writer.protocol
                drafts = [replace(draft, protocol=protocol) for draft in drafts]
                how = replace(protocol.how, seed=seed)
                how = how if limit is None else replace(how, limit=limit)
                how = how if temperature is None else replace(how, temperature=temperature)
                made = rewriting.rewrite(opened.writer, drafts, how, report.notify, report.more)
            except BaseException:
                report.stopped()
                raise
    report.done(made)
    return 0


def _prompts(words: Sequence[str], prompt_file: str | None) -> list[str]:
    """Return the prompts to rewrite. Raises UsageError, and ModelError for a file."""
    from qwenimg.common.jobs.prompt_file import read_prompts
    from qwenimg.common.prompts.check import check_not_blank, check_prompt

    if (len(words) > 0) == (prompt_file is not None):
        raise UsageError('give a prompt, as in: qwenimg rewrite "a cat", or --prompt-file, and not both')
    if len(words) > 1:
        shown = clean(" ".join(words), 100)
        raise UsageError(f'{len(words)} words where one prompt is expected; quote the prompt: "{shown}"')
    prompts = list(words)
    for where, line in [] if prompt_file is None else read_prompts(prompt_file):
        if isinstance(line, ModelError):
            raise line
        if "prompt" not in line:
            raise ModelError(f"{where}: has no prompt")
        prompts.append(str(line["prompt"]))
    for prompt in prompts:
        check_not_blank(prompt)
        check_prompt(prompt)
    return prompts


def _pictures(paths: Sequence[Path]) -> tuple[SeenPicture, ...]:
    """Return pictures as the language model sees them. Raises ModelError."""
    from qwenimg.common.pictures.input import read_image
    from qwenimg.common.pipeline.rewriting import seen

    return tuple(seen(read_image(path)[0]) for path in paths)


class _Report:
    """Prints texts on standard output, and the rest on standard error. One text alone is printed in a terminal while it
    is written; after a signal, what there is of each."""

    def __init__(self, count: int, *, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet = as_json, quiet
        self._texts = dict.fromkeys(range(count), "")
        one, terminal = count == 1, sys.stdout is not None and sys.stdout.isatty()
        self._grows, self._shown = one and terminal and not as_json, ""

    def notify(self, kind: str, text: str) -> None:
        if kind == "warning" or not self.quiet:
            self._end_line()
            streams.say(f"qwenimg: warning: {text}" if kind == "warning" else text)

    def more(self, index: int, text: str) -> None:
        """Take what was added to a text."""
        self._texts[index] += text
        if self._grows:
            self._shown += text
            streams.put(printable(text).encode())

    def stopped(self) -> None:
        """Print what there is of the texts."""
        if self._grows:
            self._end_line()
        elif not self.as_json:
            for text in self._texts.values():
                if text:
                    streams.put(f"{printable(text)}\n".encode())

    def done(self, made: Sequence[Rewritten]) -> None:
        for index, one in enumerate(made, 1):
            if self.as_json:
                record = one.record() | {"prompt": one.draft.prompt, "text": one.prompt, "note": one.fault}
                streams.put(failures.record("text", index=index, **record))
            elif self._shown and one.prompt.startswith(self._shown):
                streams.put(f"{printable(one.prompt[len(self._shown) :])}\n".encode())
                self._shown = ""
            else:  # a text that was cut, or written again, is another than the one that was shown
                self._end_line()
                streams.put(f"{printable(one.prompt)}\n".encode())
        if self.as_json:
            streams.put(failures.record("done", made=len(made), failed=0, exit=0))

    def _end_line(self) -> None:
        if self._shown:
            self._shown = ""
            streams.put(b"\n")
