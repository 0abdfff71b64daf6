"""Options from environment variables such as QWENIMG_STEPS: errors name the variable, unknown ones are warned of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import click
from click.core import ParameterSource

from qwenimg.cli import options
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import LOAD_OPTIONS
from qwenimg.common.jobs import image_options
from qwenimg.common.jobs.image_options import TEXT_OPTIONS

PREFIX = "QWENIMG_"
OTHERS = ("QWENIMG_TRACEBACK",)  # variables of no option


def variable(ctx: click.Context | None, param: click.Parameter | None) -> str | None:
    """Return the environment variable that set `param`, or None."""
    if ctx is None or param is None or param.name is None:
        return None
    from_environment = ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT
    return _name(param) if from_environment else None


def check(ctx: click.Context, given: Mapping[str, Any]) -> None:
    """Check the values that come from the environment. Raises UsageError that names the variable."""
    for param in ctx.command.params:
        name, value = param.name or "", given.get(param.name or "")
        if value is None or (origin := variable(ctx, param)) is None:
            continue
        try:
            _check(name, value)
        except UsageError as error:
            option = f"--{name.replace('_', '-')} "  # which was not given
            raise UsageError(f"{origin} in the environment: {str(error).removeprefix(option)}") from None


def unknown(command: click.Command) -> list[str]:
    """Return a warning for each variable that begins with QWENIMG_ and sets no option of `command`."""
    params = [p for p in command.params if isinstance(p, click.Option) and not p.hidden and p.name != "version"]
    # The variable of an option by its other spellings: QWENIMG_CFG is meant as QWENIMG_GUIDANCE.
    spelled = {_spelled(opt): _name(p) for p in params for opt in p.opts if opt.startswith("--")}
    spelled |= {_spelled(alias): spelled[_spelled(name)] for alias, name in options.ALIASES.items()}
    known = {*(_name(p) for p in params), *OTHERS}
    return [_line(name, spelled, known) for name in sorted(os.environ) if name.startswith(PREFIX) and name not in known]


def _line(name: str, spelled: Mapping[str, str], known: set[str]) -> str:
    ends = {other.removeprefix(PREFIX): other for other in sorted(known)}
    near = get_close_matches(name.removeprefix(PREFIX), ends, 1, 0.7)
    suggestion = spelled.get(name) or (ends[near[0]] if near else None)
    hint = f"; did you mean {suggestion}?" if suggestion else ""
    return f"{clean(name, 60)} in the environment is no option's name and is not used{hint}"


def _name(param: click.Parameter) -> str:
    return param.envvar if isinstance(param.envvar, str) else f"{PREFIX}{(param.name or '').upper()}"


def _spelled(option: str) -> str:
    return PREFIX + option.lstrip("-").replace("-", "_").upper()


def _check(name: str, value: Any) -> None:
    """Raise UsageError for a value that the option would refuse."""
    if name == "seed":
        image_options.parse_seeds(value)
    elif name in TEXT_OPTIONS:
        image_options.check(image_options.parse({name: value}))
    elif name == "debug":
        options.parse_debug(value)
    elif name in LOAD_OPTIONS:
        LOAD_OPTIONS[name].check(value)
