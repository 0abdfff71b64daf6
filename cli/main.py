"""The entry point of the command line, and the end of a run.

Nothing is imported here, nor by the package itself, before `run` is called: until then Ctrl-C would show a traceback.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own takes longer to import than everything before `run`
if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwenimg.cli.signals import Stop

COMPLETE_VAR = "_QWENIMG_COMPLETE"
RAISE = "raise the limits on this process (ulimit -v, -d, -u)"
# New objects between two searches for garbage: 700, Python's own number, have imports searched 500 times, for a tenth
# of the time of a first picture. No array waits for a search: none is in a cycle of references.
COLLECTED_AFTER = 10_000
LEAST = 40 << 20  # bytes; measured: with 33 MB of address space all modules but numpy are imported


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return its exit code.

    Without `argv` it is the process's own, and signals are handled; the process must end when this returns."""
    try:
        if _cramped():
            return _early(f"no memory to begin: {RAISE}", 4)
        from qwenimg.cli import signals

        if argv is not None:
            return _run(list(argv), signals.Stop())
        import gc

        gc.set_threshold(COLLECTED_AFTER)
        with signals.watched() as stop:
            code = _run(sys.argv[1:], stop)
        if "triton" not in sys.modules:  # triton reports objects that are not freed as leaks, in thirty lines
            gc.freeze()  # else Python would search all of torch's objects for garbage before the process ends
        return code if stop.exit_code is None else stop.exit_code
    except KeyboardInterrupt:  # before the signals were watched, or where they are not
        return _early("stopped by a signal", 130)
    except (RuntimeError, MemoryError, OSError) as error:
        import errno

        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        return _early(f"no memory for a thread: {RAISE}", 4)


def _cramped() -> bool:
    """Return whether a memory limit is too low to import the command line, where Python itself would fail with any
    error."""
    try:
        import resource
    except ImportError:  # no such limits on this system, or not even memory for this module
        return sys.platform != "win32"
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(0 <= resource.getrlimit(kind)[0] < LEAST for kind in kinds)


def _early(text: str, code: int) -> int:
    """Print an error without the modules that usually print them; return `code`."""
    if sys.stderr is not None:
        os.write(2, f"qwenimg: error: {text}\n".encode())
    return code


def _run(args: list[str], stop: Stop) -> int:
    from qwenimg.cli import streams

    code = _answer(args, stop)
    streams.forget_unwritten()
    return code


def _answer(args: list[str], stop: Stop) -> int:
    from qwenimg.cli import options, streams

    try:
        streams.make_safe()
        args = options.with_bare_values(args)
        if instruction := os.environ.get(COMPLETE_VAR):
            code = _complete(instruction)
        else:
            code = _call(args, stop)
            streams.flush()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
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

    from qwenimg.cli import failures
    from qwenimg.cli.help import HELP_NAMES
    from qwenimg.cli.words import cli, wants_json
    from qwenimg.common.base.safe_files import absolute
    from qwenimg.common.memory import limits

    absolute(Path())  # torch ends the process if there is no working folder
    if wants_json(args):
        stop.event = failures.event
    try:
        with cli.make_context("qwenimg", args.copy(), obj=stop) as ctx:
            if not {*HELP_NAMES, "--help-all", "--version"} & {*args}:
                limits.check_room("numpy", limits.NUMPY)
            code = cli.invoke(ctx)
    except Exit as ended:
        code = ended.exit_code
    return code if isinstance(code, int) else 0


def _end(error: BaseException | None, stop: Stop, args: list[str]) -> int:
    """Report `error` and return its exit code, or the signal's if one came."""
    from qwenimg.cli import failures, signals, streams
    from qwenimg.cli.words import wants_json

    stop.claim()
    if stop.exit_code is not None:
        code, text = stop.exit_code, signals.STOPPED
        streams.say(f"qwenimg: error: {text}")
    else:
        assert error is not None
        code, text = failures.report(error)
    if code and wants_json(args):
        try:
            streams.put(failures.event(code, text))
        except OSError:
            streams.silence(sys.stdout)
    return code
