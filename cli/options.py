"""Names of the command line's options, and types of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from qwenimg.backends import known
from qwenimg.cli import elsewhere
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.jobs.fields import ALL
from qwenimg.common.precision.precision import dtype_named
from qwenimg.common.request.option import Option

_F = TypeVar("_F", bound=Callable[..., Any])
DEBUG = ("timing", "shapes")
FILE = click.Path(path_type=Path, readable=False)  # an unreadable file is reported later, with its exit code


class _Texts(click.types.StringParamType):
    """A text that may be given several times; in a variable of the environment, several are separated by semicolons."""

    envvar_list_splitter = ";"


TEXTS = _Texts()


class Backend(click.Choice[str]):
    """The name of a backend, or of a GPU such as `cuda:1`. For other programs' names, the error suggests ours."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if known(str(value)):
            return str(value)
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            raise click.BadParameter(f"{error.message}{elsewhere.backend(str(value))}", ctx, param) from None


def of_picture(one: Option) -> Callable[[_F], _F]:
    """Return the option of the command line for an option of images."""
    kind = TEXTS if one.joined else FILE if one.kind is None else str if one.several else one.kind
    spelled, shown = described(one)
    repeated = bool(one.joined) or (one.several and kind is FILE)
    return click.option(one.name, *spelled, type=kind, multiple=repeated, **shown)


def described(one: Option) -> tuple[list[str], dict[str, Any]]:
    """Return the spellings of an option, the short one first, and its help."""
    text = one.said(one.help)
    spelled = sorted((f"--{one.dashed}", *one.flags), key=lambda flag: flag.startswith("--"))
    return spelled, {"metavar": one.metavar, "help": f"{text[:1].upper()}{text[1:]}."}


# Other tools' names with one meaning in all of them; they are not in the help.
ALIASES = {
    "disable-metadata": "no-metadata",
    "disable-image-metadata": "no-metadata",
    "quantise": "quantize",
    "quantization": "quantize",
    **{alias: ALL[name].dashed for name in ALL for alias in ALL[name].aliases},
}


def known_name(name: str) -> str:
    """Return the option's name here for an alias, and for a spelling with underscores."""
    plain = name.replace("_", "-") if len(name) > 1 else name
    return ALIASES.get(plain, plain)


def parse_debug(text: str | None) -> tuple[str, ...]:
    """Return the values of --debug. Raises UsageError."""
    parts = tuple(part.strip() for part in text.split(",")) if text is not None else ()
    for part in parts:
        if part not in DEBUG:
            raise UsageError(f"--debug {clean(part, 40)!r} is not one of {', '.join(DEBUG)}")
    return parts


# Other programs' options for the precision of a part

# The override of --precision that each of them stands for. They are not in the help, nor in the environment.
PRECISION_FLAGS: Mapping[str, str] = {
    "--fp16-vae": "vae=fp16",
    "--bf16-vae": "vae=bf16",
    "--fp32-vae": "vae=fp32",
    "--upcast-attention": "attention=fp32",
    "--force-upcast-attention": "attention=fp32",
    "--dont-upcast-attention": "attention=fused",
    "--upcast-matmul": "matmul=fp32",
}
PRECISION_VALUES: Mapping[str, str] = {"--unet-precision": "unet", "--vae-precision": "vae", "--clip-precision": "text"}


def precision_of_parts(command: _F) -> _F:
    """Declare these options."""
    for name in PRECISION_FLAGS:
        command = click.option(name, is_flag=True, hidden=True, allow_from_autoenv=False)(command)
    for name in PRECISION_VALUES:
        command = click.option(name, hidden=True, metavar="DTYPE", allow_from_autoenv=False)(command)
    return command


def take_precision_of_parts(given: dict[str, Any]) -> None:
    """Move these options from `given` into its `precision`. Raises UsageError."""
    overrides: dict[str, tuple[str, str]] = {}  # the option and the override of each part
    for option, override in {**PRECISION_FLAGS, **PRECISION_VALUES}.items():
        value = given.pop(option[2:].replace("-", "_"))
        if not value:
            continue
        if option in PRECISION_VALUES:
            if dtype_named(value) is None:
                raise UsageError(f"{option} {clean(value, 40)!r} is not one of fp32, bf16, fp16")
            override = f"{override}={value.strip().lower()}"
        part = override.partition("=")[0]
        before = overrides.setdefault(part, (option, override))
        if before[1] != override:
            raise UsageError(f"{before[0]} and {option} contradict each other; give one of them")
    if overrides:
        values = (override for _, override in overrides.values())
        given["precision"] = ",".join([given["precision"] or "auto", *values])
