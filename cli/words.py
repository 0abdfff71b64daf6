"""The grammar of the command line: the choice of the command.

Only the first word decides, that is the first argument that is neither an option nor an option's value: an exact
command name is that command, anything else is a prompt. Options may come before it or after it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module

import click

from qwenimg.cli import editing, foreign_words
from qwenimg.cli.commands.generate import generate
from qwenimg.cli.help import COMMANDS, HELP_NAMES
from qwenimg.common.base.addresses import address_advice
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

FREE = ("words", "prompt", "negative_prompt")  # any text; a prompt has its own check
TABLES = ("devices", "presets", "samplers")  # commands of one module
JSON_FILES = ("precision",)  # commands whose --json names a file


class Words(click.Group):
    """A group of commands, each imported when it is used. Without a command's name it runs `generate`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = "tables" if cmd_name in TABLES else cmd_name
        command: click.Command = getattr(import_module(f"qwenimg.cli.commands.{module}"), cmd_name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        place = command_place(args)
        if place is None:
            first = None if ctx.resilient_parsing else _first_word(args)
            if first is not None and args[first] == "help":
                return self.parse_args(ctx, [*args[first + 1 :], "--help"])
            if first is not None and args[first] in editing.USAGE:
                args = editing.as_run(args, _first_word, _values)
            elif first is not None:
                _check_word(args[first])
            ctx.meta["qwenimg.implied"] = True
            _check_filled(ctx, generate, args)
            return super().parse_args(ctx, ["generate", *args])
        rest = [*args[:place], *args[place + 1 :]]
        if (command := self.get_command(ctx, args[place])) is not None:
            _check_filled(ctx, command, rest)
        return super().parse_args(ctx, [args[place], *rest])


def command_place(args: Sequence[str]) -> int | None:
    """Return the index in `args` of the command's name; None if the first word is a prompt or missing."""
    place = _first_word(args)
    return place if place is not None and args[place] in COMMANDS else None


def _check_filled(ctx: click.Context, command: click.Command, args: Sequence[str]) -> None:
    """Raise UsageError for values that no option or argument accepts: empty (as by an unset variable of a script), or
    with a null byte."""
    while isinstance(command, click.Group):
        inner = command.commands.get(args[0]) if args else None
        if inner is None:
            return
        command, args = inner, args[1:]
    if ctx.resilient_parsing:
        return
    settings = {**command.context_settings, "ignore_unknown_options": True}
    parser = command.make_parser(click.Context(command, parent=ctx, resilient_parsing=True, **settings))
    values, _, _ = parser.parse_args(list(args))
    for param in command.params:
        value = values.get(param.name or "")
        texts = [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, str)]
        if param.name not in FREE and any(not text or "\0" in text for text in texts):
            name = max(param.opts, key=len) if isinstance(param, click.Option) else param.make_metavar(ctx)
            what = "is empty" if "" in texts else "has a null byte"
            raise UsageError(f"{name}: the value {what}; give another, or leave it out")
        address = next((one for one in texts if address_advice(one)), None)
        if param.name not in FREE and address is not None:
            raise UsageError(f"{clean(address, 100)}: {address_advice(address)}")


def _check_word(word: str) -> None:
    """Raise UsageError for a single word that is probably a mistyped command."""
    if advice := foreign_words.advice(word):
        raise UsageError(f"{clean(advice, 200)}; for a prompt of that word: -p {clean(word, 40)}")
    if name := foreign_words.similar_command(word, tuple(COMMANDS)):
        shown = clean(word, 40)
        raise UsageError(f"{shown} is no command; did you mean `qwenimg {name}`? For a prompt of that word: -p {shown}")


def _first_word(args: Sequence[str]) -> int | None:
    """Return the index in `args` of the first word that is no option and no value of one; None after `--`."""
    ctx = click.Context(generate, resilient_parsing=True, allow_interspersed_args=False, **generate.context_settings)
    values, _, _ = generate.make_parser(ctx).parse_args(list(args))
    words = values.get("words")
    if not isinstance(words, tuple):  # click's value for nothing, which differs between its versions
        return None
    place = len(args) - len(words)
    if not words:
        return None
    return None if place and args[place - 1] == "--" else place  # after -- it is a prompt


def _values(args: Sequence[str]) -> Mapping[str, object]:
    """Return the values of the options of `generate` in `args`, which may have errors."""
    ctx = click.Context(generate, resilient_parsing=True, ignore_unknown_options=True, **generate.context_settings)
    return generate.make_parser(ctx).parse_args(list(args))[0]


def wants_json(args: Sequence[str]) -> bool:
    """Return whether `args`, which may have errors, contain --json, or the environment sets it."""
    place = command_place(args)
    if place is not None and args[place] in JSON_FILES:
        return False
    if _values(args).get("json") is True:
        return True
    value = os.environ.get("QWENIMG_JSON", "").strip().lower()
    return (place is None or args[place] == "generate") and value in ("1", "true", "t", "yes", "y", "on")


cli = Words("qwenimg", add_help_option=False, context_settings={"help_option_names": HELP_NAMES})
