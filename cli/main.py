"""Where the command line begins, and how a run ends.

Little is imported before the signals are watched: what is would be the place of a traceback for an early Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from qwenimg.cli import signals

COMPLETE_VAR = "_QWENIMG_COMPLETE"


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (without the program's name) and returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    with signals.watched() as stop:
        try:
            from qwenimg.cli import streams

            streams.make_safe()
            if instruction := os.environ.get(COMPLETE_VAR):
                return _complete(instruction)
            code = _call(args, stop)
            streams.flush()
            return code
        except BaseException as error:
            if isinstance(error, SystemExit) and stop.number is None:
                raise
            return _end(error, stop, args)


def _complete(instruction: str) -> int:
    from click.shell_completion import shell_complete

    from qwenimg.cli.words import cli

    return shell_complete(cli, {}, "qwenimg", COMPLETE_VAR, instruction)


def _call(args: list[str], stop: signals.Stop) -> int:
    from click.exceptions import Exit

    from qwenimg.cli.words import cli
    from qwenimg.common.untrusted import absolute

    absolute(Path())  # torch ends the process where there is no working folder
    try:
        with cli.make_context("qwenimg", args.copy(), obj=stop) as ctx:
            code = cli.invoke(ctx)
    except Exit as ended:
        code = ended.exit_code
    return code if isinstance(code, int) else 0


def _end(error: BaseException, stop: signals.Stop, args: list[str]) -> int:
    """The exit code for `error`, of which it tells; whatever was raised while a signal ended the run, the signal's."""
    from qwenimg.cli import streams

    if stop.exit_code is not None:
        code, text = stop.exit_code, "stopped by a signal; the pictures that were done are kept"
        streams.say(f"qwenimg: error: {text}")
    from qwenimg.cli import failures
    from qwenimg.cli.words import wants_json

    if stop.exit_code is None:
        code, text = failures.tell(error)
    if code and wants_json(args):
        try:
            streams.put(failures.event(code, text))
        except OSError:
            streams.silence(sys.stdout)
    return code
