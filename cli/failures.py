"""Conversion of an exception to an exit code and one line."""

from __future__ import annotations

import json
import os
import sys
import traceback

import click

from qwenimg.cli import environment, foreign_words, help, streams
from qwenimg.cli.streams import MAX_LINE
from qwenimg.common.base.errors import NotHere, QwenimgError, disk_full, out_of_memory
from qwenimg.common.base.text import clean, short

SCHEMA = 1  # of the events of --json
PARTIAL = 7


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the text for `error`; code 0 if the reader of standard output has closed it."""
    if isinstance(error, NotHere):
        return error.exit_code, str(error) + _instead(error)
    if isinstance(error, QwenimgError):
        return error.exit_code, str(error)
    if isinstance(error, click.ClickException):
        return 2, short(_usage(error))
    if out_of_memory(error):
        return 4, "out of memory: close other programs, or choose a smaller --size"
    if isinstance(error, BrokenPipeError):
        return 0, ""
    if isinstance(error, OSError) and disk_full(error):
        return 4, f"output cannot be written: {error.strerror}"
    hint = "" if _wants_traceback() else "; QWENIMG_TRACEBACK=1 shows where"
    return 1, f"this is a bug in qwenimg: {type(error).__name__}: {str(error)[:150]}{hint}"


def _instead(error: NotHere) -> str:
    """Suggest the best other model for this machine, if the line does not grow too long."""
    from qwenimg.backends.paper import for_hints
    from qwenimg.common.hub import forecast

    if error.chosen:
        return ""
    try:
        text = forecast.instead(error.name, for_hints("auto"))
    except QwenimgError:  # a backend or a file of this installation is missing
        return ""
    return text if len(f"qwenimg: error: {error}{text}") <= MAX_LINE else ""


def report(error: BaseException, where: str = "") -> tuple[int, str]:
    """Print the line for `error`, and its traceback if the user asks for it; return its exit code and text."""
    code, text = explain(error)
    if _wants_traceback():
        traceback.print_exception(error)
    if code:
        streams.say(f"qwenimg: error: {where}{text}")
    else:
        streams.silence(sys.stdout)
    return code, text


def record(name: str, **fields: object) -> bytes:
    """Return one event of --json as a line."""
    return json.dumps({"schema": SCHEMA, "event": name, **fields}).encode() + b"\n"


def event(code: int, text: str, index: int | None = None) -> bytes:
    """Return the `error` event of --json. index: the image's; null if the run has failed."""
    return record("error", index=index, exit=code, message=text)


def _usage(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption) and error.option_name.startswith("--"):
        params = error.ctx.command.params if error.ctx else []
        names = [opt for p in params if isinstance(p, click.Option) and not p.hidden for opt in p.opts]
        return foreign_words.unknown_option(clean(error.option_name, 40), names, _help(error.ctx))
    text = " ".join(error.format_message().split())
    group = error.ctx and error.ctx.command if isinstance(error, click.UsageError) else None
    if isinstance(group, click.Group) and text.startswith("Usage: "):  # all of its help, where no command follows
        assert isinstance(error, click.UsageError) and error.ctx is not None
        path, commands = error.ctx.command_path, ", ".join(group.list_commands(error.ctx))
        return f"{path} takes one of {commands} after it; {path} --help says what they do"
    if isinstance(error, click.BadParameter) and (name := environment.variable(error.ctx, error.param)):
        text = f"{name} in the environment: {' '.join(error.message.split())}"
    lacks = isinstance(error, click.MissingParameter) or "unexpected extra" in text
    if lacks and isinstance(error, click.UsageError) and (example := _example(error.ctx)):
        text = f"{text.removesuffix('.')}. As in: qwenimg {example}"
    if isinstance(error, click.NoSuchOption) and error.ctx and any("-p" in p.opts for p in error.ctx.command.params):
        text += " A prompt that starts with - goes after -p."
    return text


def _help(ctx: click.Context | None) -> str:
    """Return the arguments that show the help of the command of `ctx`."""
    words = [] if ctx is None else ctx.command_path.split()[1:]
    return "--help-all" if words in ([], ["generate"]) else f"{' '.join(words)} --help"


def _example(ctx: click.Context | None) -> str | None:
    return help.COMMAND_EXAMPLES.get(ctx.info_name or "") if ctx else None


def _wants_traceback() -> bool:
    return os.environ.get("QWENIMG_TRACEBACK", "") not in ("", "0")
