"""The command `lora`: add LoRA files up, or change the rank of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qwenimg.cli import places, streams
from qwenimg.cli.help import HELP_NAMES
from qwenimg.cli.options import FILE
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import shown_path
from qwenimg.common.families.load_options import LoadOptions

if TYPE_CHECKING:
    from qwenimg.common.request.lora_text import Lora

_F = TypeVar("_F", bound=Callable[..., Any])
_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
SUFFIX = ".safetensors"


@click.group("lora", context_settings={"help_option_names": HELP_NAMES})
def lora() -> None:
    """Add LoRA files up, or change the rank of one. `qwenimg info FILE` says what a LoRA is."""


def _writing(command: _F) -> _F:
    """Declare the options of both commands."""
    for option in (
        click.option("--quiet", is_flag=True, help="Print only the path, warnings and errors."),
        click.option("--overwrite", is_flag=True, help="Replace a file that exists."),
        click.option("--dtype", type=click.Choice([*_DTYPES]), help="Number format; default the widest of the files."),
        places.declared("model", help="The model that they are for; default the known model that they fit."),
        click.option("-o", "--output", type=FILE, required=True, metavar="FILE", help="The file; .safetensors."),
    ):
        command = option(command)
    return command


@lora.command("merge")
@click.argument("files", nargs=-1, required=True, metavar="FILE[:STRENGTH]...")
@click.option("--rank", type=int, metavar="N", help="Bring each layer to this rank at most; default exact.")
@_writing
@places.with_opening
def merge(opening: LoadOptions, files: tuple[str, ...], rank: int | None, **given: Any) -> None:
    """Write one LoRA that changes a model as the FILEs do together, each at its STRENGTH (1 if none is given).

    The ranks of the files stand one after the other, so the sum is exact; --rank makes it smaller. LoRA, LoCon, LoHa
    and LoKr of any trainer are read."""
    from qwenimg.common.request import lora_text

    _write(opening, lora_text.parse(files), rank, **given)


@lora.command("resize")
@click.argument("file", type=FILE, metavar="FILE")
@click.option("--rank", type=int, required=True, metavar="N", help="The highest rank of each layer.")
@_writing
@places.with_opening
def resize(opening: LoadOptions, file: Path, rank: int, **given: Any) -> None:
    """Write the LoRA FILE with each layer at a rank of N at most: the nearest change of that rank."""
    from qwenimg.common.request.lora_text import Lora

    _write(opening, [Lora(str(file))], rank, **given)


def _write(
    opening: LoadOptions,
    loras: Sequence[Lora],
    rank: int | None,
    *,
    output: Path,
    dtype: str | None,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Write the sum of `loras`, and print its path."""
    from qwenimg.common.base.atomic_files import check_output
    from qwenimg.common.conversion.loras import Term, add_up
    from qwenimg.common.hub.lora_models import model_for
    from qwenimg.common.request.loras import find_file
    from qwenimg.common.weights.loras.lora import read_lora

    if output.suffix.lower() != SUFFIX:
        raise UsageError(f"-o {shown_path(output, 80)}: let the name end in {SUFFIX}")
    check_output(output, overwrite=overwrite)
    with ExitStack() as stack:
        terms = list[Term]()
        for one in loras:
            if (line := one.warning) is not None:
                streams.say(f"qwenimg: warning: {line}")
            file = read_lora(find_file(one.source))
            stack.callback(file.close)
            terms.append(Term(lora=file, strength=one.scale))
        model = model_for([term.lora for term in terms], opening)
        stack.callback(model.close)
        made = add_up(terms, model, output, rank=rank, dtype=_DTYPES.get(dtype or ""), overwrite=overwrite)
    if not quiet:
        streams.say(f"{model.family.title}: {made.line}")
    streams.put(bytes(output) + b"\n")
