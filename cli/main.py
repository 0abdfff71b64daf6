"""Where the command line begins, and how a run ends.

Nothing is imported here, nor by the package itself, before `run` is called: until then Ctrl-C would show a traceback.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own takes longer to import than all that comes before `run`
if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwenimg.cli.signals import Stop

COMPLETE_VAR = "_QWENIMG_COMPLETE"


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (without the program's name) and returns its exit code.

    Without `argv` it is that of the process, which ends when this returns."""
    try:
        from qwenimg.cli import signals

        with signals.watched(process=argv is None) as stop:
            code = _run(list(sys.argv[1:] if argv is None else argv), stop)
            from qwenimg.cli import streams

            streams.forget_unwritten()
        if argv is None:
            import gc

            if "triton" not in sys.modules:  # which takes what is not freed for leaks, and prints thirty lines of them
                gc.freeze()  # before the process ends, Python would search all that torch has made for garbage
        return code if stop.exit_code is None else stop.exit_code
    except KeyboardInterrupt:  # before the signals were watched
        return _early("stopped by a signal", 130)
    except (RuntimeError, MemoryError):
        return _early("no memory for a thread: raise the limits on this process (ulimit -v, -d, -u)", 4)


def _early(text: str, code: int) -> int:
    """What has happened before or after all that could say it."""
    if sys.stderr is not None:
        os.write(2, f"qwenimg: error: {text}\n".encode())
    return code


def _run(args: list[str], stop: Stop) -> int:
    try:
        stop.raises = True
        stop.check()
        from qwenimg.cli import streams

        streams.make_safe()
        if instruction := os.environ.get(COMPLETE_VAR):
            code = _complete(instruction)
        else:
            code = _call(args, stop)
            streams.flush()
        stop.raises = False  # here and below the last and first thing: between two assignments no signal is handled
    except BaseException as error:
        stop.raises = False
        if isinstance(error, SystemExit) and stop.number is None:
            raise
        return _end(error, stop, args)
    return code if stop.number is None else _end(None, stop, args)


def _complete(instruction: str) -> int:
    from click.shell_completion import get_completion_class, shell_complete

    from qwenimg.cli.words import cli
    from qwenimg.common.base.errors import UsageError
    from qwenimg.common.base.text import clean

    shell, _, task = instruction.partition("_")
    if get_completion_class(shell) is None or task not in ("source", "complete"):
        raise UsageError(f"{COMPLETE_VAR} is {clean(instruction, 40)!r}; unset it, or see `qwenimg completion --help`")
    if task == "complete" and not {"COMP_WORDS", "COMP_CWORD"} <= os.environ.keys():
        raise UsageError(f"{COMPLETE_VAR}={instruction} is for a shell, which sets COMP_WORDS and COMP_CWORD; unset it")
    return shell_complete(cli, {}, "qwenimg", COMPLETE_VAR, instruction)


def _call(args: list[str], stop: Stop) -> int:
    from pathlib import Path

    from click.exceptions import Exit

    from qwenimg.cli.help import HELP_NAMES
    from qwenimg.cli.words import cli
    from qwenimg.common.base.safe_files import absolute
    from qwenimg.common.memory import limits

    absolute(Path())  # torch ends the process where there is no working folder
    try:
        with cli.make_context("qwenimg", args.copy(), obj=stop) as ctx:
            stop.working = True
            if not {*HELP_NAMES, "--version"} & {*args}:
                limits.check_room("numpy", limits.NUMPY)
            code = cli.invoke(ctx)
    except Exit as ended:
        code = ended.exit_code
    return code if isinstance(code, int) else 0


def _end(error: BaseException | None, stop: Stop, args: list[str]) -> int:
    """Reports `error` and returns its exit code; whatever was raised while a signal ended the run, the signal's."""
    from qwenimg.cli import streams

    if stop.exit_code is not None:
        code, text = stop.exit_code, "stopped by a signal; the pictures that were done are kept"
        streams.say(f"qwenimg: error: {text}")
    from qwenimg.cli import failures
    from qwenimg.cli.words import wants_json

    if stop.exit_code is None:
        assert error is not None
        code, text = failures.report(error)
    if code and wants_json(args):
        try:
            streams.put(failures.event(code, text))
        except OSError:
            streams.silence(sys.stdout)
    return code
