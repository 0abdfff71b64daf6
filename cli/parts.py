"""Other programs' options for the precision of a part, converted to overrides of --precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.precision.precision import dtype_named

_F = TypeVar("_F", bound=Callable[..., Any])

# The override that each option stands for. These options are not in the help, nor in the environment.
FLAGS: Mapping[str, str] = {
    "--fp16-vae": "vae=fp16",
    "--bf16-vae": "vae=bf16",
    "--fp32-vae": "vae=fp32",
    "--upcast-attention": "attention=fp32",
    "--force-upcast-attention": "attention=fp32",
    "--dont-upcast-attention": "attention=fused",
    "--upcast-matmul": "matmul=fp32",
}
VALUES: Mapping[str, str] = {"--unet-precision": "unet", "--vae-precision": "vae", "--clip-precision": "text"}


def options(command: _F) -> _F:
    """Declare the options."""
    for name in FLAGS:
        command = click.option(name, is_flag=True, hidden=True, allow_from_autoenv=False)(command)
    for name in VALUES:
        command = click.option(name, hidden=True, metavar="DTYPE", allow_from_autoenv=False)(command)
    return command


def taken(given: dict[str, Any]) -> None:
    """Move the options from `given` into its `precision`. Raises UsageError."""
    overrides: dict[str, tuple[str, str]] = {}  # the option and the override of each part
    for option, override in {**FLAGS, **VALUES}.items():
        value = given.pop(option[2:].replace("-", "_"))
        if not value:
            continue
        if option in VALUES:
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
