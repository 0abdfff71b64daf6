"""The command line: which command the words name, and how a run ends.

Only the first word decides, that is the first argument that is neither an option nor an option's value: an exact
command name is that command, anything else is a prompt. Options may come before it or after it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from qwenimg.cli import config, failures, signals, streams
from qwenimg.cli.generate import generate
from qwenimg.cli.help import COMMANDS, RESERVED
from qwenimg.common.errors import UsageError

COMPLETE_VAR = "_QWENIMG_COMPLETE"


class Words(click.Group):
    """Commands, each imported when it is used, and `generate` where no command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"qwenimg.cli.{cmd_name}"), cmd_name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        place = command_place(args)
        if (place is None or args[place] == "generate") and not ctx.resilient_parsing:
            ctx.default_map = {"generate": config.defaults()}
        if place is None:
            ctx.meta["qwenimg.implied"] = True
            return super().parse_args(ctx, ["generate", *args])
        if args[place] in RESERVED and not ctx.resilient_parsing:
            raise UsageError(f"`qwenimg {args[place]}` is not built yet; for a prompt of that word: -p {args[place]}")
        return super().parse_args(ctx, [args[place], *args[:place], *args[place + 1 :]])


def command_place(args: Sequence[str]) -> int | None:
    """The place in `args` of the word that names a command, or None where the first word is a prompt or missing."""
    ctx = click.Context(generate, resilient_parsing=True, allow_interspersed_args=False, **generate.context_settings)
    found, _, _ = generate.make_parser(ctx).parse_args(list(args))
    words = found.get("words")
    if not isinstance(words, tuple):  # click's mark for nothing, which differs between its versions
        return None
    place = len(args) - len(words)
    if not words or words[0] not in (*COMMANDS, *RESERVED):
        return None
    return None if place and args[place - 1] == "--" else place  # after -- it is a prompt


cli = Words("qwenimg", add_help_option=False)


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (without the program's name) and returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    streams.make_safe()
    if instruction := os.environ.get(COMPLETE_VAR):
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "qwenimg", COMPLETE_VAR, instruction)
    with signals.watched() as stop:
        try:
            code = _call(args, stop)
            streams.flush()
            return code
        except BaseException as error:
            if isinstance(error, SystemExit) and stop.number is None:
                raise
            return _end(error, stop, as_json="--json" in args)


def _call(args: list[str], stop: signals.Stop) -> int:
    try:
        with cli.make_context("qwenimg", args, obj=stop) as ctx:
            code = cli.invoke(ctx)
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    return code if isinstance(code, int) else 0


def _end(error: BaseException, stop: signals.Stop, *, as_json: bool) -> int:
    """The exit code for `error`, of which it tells; whatever was raised while a signal ended the run, the signal's."""
    if stop.exit_code is not None:
        code, text = stop.exit_code, "stopped by a signal; the pictures that were done are kept"
        streams.say(f"qwenimg: error: {text}")
    else:
        code, text = failures.tell(error)
    if as_json and code:
        try:
            streams.put(failures.event(code, text))
        except OSError:
            streams.silence(sys.stdout)
    return code
