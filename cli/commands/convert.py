"""The command `convert`: write a model as a folder."""

from __future__ import annotations

from pathlib import Path

import click

from qwenimg.cli import places, streams
from qwenimg.cli.commands.pull import ByteBar
from qwenimg.cli.options import FILE, TEXTS
from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.request.parts import PARTS


@click.command("convert")
@click.argument("model")
@click.argument("out", type=FILE)
@click.option(
    "-q",
    "--quantize",
    metavar="8|6|4",
    help="Quantize weights to 8, 6 or 4 bits, or by part, such as text=8,transformer=4.",
)
@click.option(
    "--lora",
    type=TEXTS,
    multiple=True,
    metavar="FILE[:SCALE]",
    help="A LoRA to merge into the weights; may be repeated.",
)
@click.option(
    "--dtype",
    type=click.Choice(("bf16", "fp16", "fp32")),
    help="Number format of weights that are not quantized; unchanged without this option.",
)
@places.declared(*PARTS, "tokenizer")
@places.declared("prediction", metavar=None, help="What the UNet of a Stable Diffusion file predicts.")
@places.declared("variant")
@click.option("--quiet", is_flag=True, help="Print only errors on standard error.")
@places.with_opening
def convert(opening: LoadOptions, out: Path, lora: tuple[str, ...], dtype: str | None, quiet: bool) -> None:
    """Write MODEL, a folder, a file or a name, as the folder OUT: in fewer bits, with LoRAs in its weights, or
    unchanged.

    The work of `-q` while a model loads is done once, and the result loads at once. OUT appears when it is whole. A run
    that was ended, even by kill -9, continues when you start it again with the same options."""
    import os

    from qwenimg.common.conversion.convert import convert
    from qwenimg.common.hub.part_files import completed
    from qwenimg.common.hub.resolve import resolve
    from qwenimg.common.request import lora_text

    loras = lora_text.parse(lora)
    options = completed(opening)
    model = resolve(options.model, without=options.replaced)
    name = model.known.name if model.known is not None and "transformer" not in options.parts else None
    progress = ConversionProgress(quiet=quiet)
    try:
        convert(model.folder, out, options, progress, name=name, loras=loras, dtype=dtype)
    finally:
        progress.bar.close()
    streams.put(os.fsencode(out) + b"\n")


class ConversionProgress:
    """The progress of a conversion, shown as `pull` shows a download."""

    def __init__(self, *, quiet: bool) -> None:
        self.bar, self.size, self.done = ByteBar(quiet=quiet), 0, 0

    def report(self, kind: str, text: str) -> None:
        from qwenimg.cli.progress import WARNING

        self.bar.line(f"{WARNING}{text}" if kind == "warning" else text)

    def plan(self, size: int, files: int) -> None:
        self.size = size
        self.bar.line(f"{size_text(size)} of weights in {counted(files, 'file')}")

    def kept(self, name: str, size: int) -> None:
        self.bar.line(f"{name} is there already")
        self.written(name, size)

    def written(self, name: str, size: int) -> None:
        self.done += size
        self.bar.update(name, self.done, max(self.size, self.done))
