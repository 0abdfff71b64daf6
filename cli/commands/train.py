"""The command `train`: train a LoRA on pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from qwenimg.cli import places
from qwenimg.cli.help import HELP_NAMES
from qwenimg.cli.options import FILE, TEXTS, Number
from qwenimg.cli.signals import Stop
from qwenimg.common.families.load_options import LoadOptions

_F = TypeVar("_F", bound=Callable[..., Any])
_COUNT = click.IntRange(1, 100_000_000)


@click.group("train", context_settings={"help_option_names": HELP_NAMES})
def train() -> None:
    """Train a LoRA on your own pictures."""


def _learning(command: _F) -> _F:
    """Declare the options of what is learnt, and how."""
    for option in reversed(
        (
            click.option("--data", type=FILE, required=True, metavar="FOLDER", help="Pictures, each with NAME.txt."),
            click.option("-o", "--output", type=FILE, required=True, metavar="FILE", help="The LoRA; .safetensors."),
            places.declared("model"),
            click.option("--word", default="", metavar="WORD", help="Caption of pictures without one."),
            click.option(
                "--keep",
                metavar="FOLDER|auto",
                help="Pictures of what it must not forget, half of each step; auto: it draws them first.",
            ),
            click.option("--hold-out", type=click.IntRange(0), default=0, metavar="N", help="Pictures to judge by."),
            click.option("--rank", type=click.IntRange(1, 4096), default=16, help="Default 16."),
            click.option("--steps", type=_COUNT, default=2000, help="Default 2000."),
            click.option("--rate", type=Number(0, 10), default=1e-4, help="Learning rate; default 1e-4."),
            click.option("--size", type=click.IntRange(64, 2048), help="A side in pixels; default the model's."),
            click.option("--batch", type=click.IntRange(1, 65_536), default=1, help="Pictures of a step; default 1."),
            click.option("--accumulate", type=click.IntRange(1, 65_536), default=1, help="Batches of a step."),
            click.option(
                "--optimizer",
                type=click.Choice(("adamw", "adamw8bit", "prodigy")),
                default="adamw",
                help="adamw (default), with moments in 8 bits, or prodigy (give --rate 1).",
            ),
            click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Default 0."),
            click.option("--dropout", type=Number(0, 1), default=0.05, help="Share of captions left out; 0.05."),
            click.option("--train-text-encoder", is_flag=True, help="Train its LoRA too; Stable Diffusion 1, 2, XL."),
            click.option("--flips", is_flag=True, help="Mirror half of the pictures."),
            click.option("--alpha-mask", is_flag=True, help="Learn nothing of transparent parts."),
            click.option("--enlarge", is_flag=True, help="Make pictures larger that are smaller than --size."),
        )
    ):
        command = option(command)
    return command


def _running(command: _F) -> _F:
    """Declare the options of the run and of its results."""
    for option in reversed(
        (
            click.option(
                "--precision", "products", default="auto", metavar="auto|bf16|fp16|fp32", help="Of the products."
            ),
            click.option("--phases", metavar="TEXT", help="warm-up=10,full=20,predict=60:bf16,correct=10."),
            click.option(
                "--lora",
                type=TEXTS,
                multiple=True,
                metavar="FILE[:STRENGTH]",
                help="A LoRA that is loaded while the new one learns, and left out of it; repeatable.",
            ),
            places.declared("quantize", help="Keep the frozen base in 8 or 4 bits."),
            click.option(
                "--checkpointing/--no-checkpointing", default=None, help="Compute blocks twice to save memory."
            ),
            places.declared("max_memory", help="Choose checkpointing, bits and size so that the run fits."),
            places.declared("backend"),
            click.option("--sample", type=TEXTS, multiple=True, metavar="PROMPT", help="Draw it on the way; again."),
            click.option("--sample-every", type=_COUNT, default=250, metavar="N", help="Default 250 steps."),
            click.option("--save-every", type=_COUNT, default=100, metavar="N", help="Default 100 steps."),
            click.option("--dtype", type=click.Choice(("bf16", "fp16", "fp32")), default="bf16", help="Of the file."),
            click.option("--keep-captions", is_flag=True, help="Write the captions into the file."),
            click.option("--resume", is_flag=True, help="Go on from the last checkpoint."),
            click.option("--overwrite", is_flag=True, help="Replace a file that exists."),
            click.option("--plan", "only_plan", is_flag=True, help="Say the memory and the hours, and train nothing."),
            click.option("--quiet", is_flag=True, help="Print only the path, warnings and errors."),
        )
    ):
        command = option(command)
    return command


@train.command("lora")
@_learning
@_running
@places.declared("variant")
@places.with_opening
@click.pass_context
def train_lora(ctx: click.Context, /, opening: LoadOptions, data: Path, output: Path, **given: Any) -> int:
    """Train a LoRA of MODEL on the pictures in FOLDER, and write it as FILE.

    Memory and time come first. The folder FILE.run has the checkpoint, tables and curve of the loss, pictures of each
    --sample and a page of all. Ctrl-C finishes the step and saves; --resume goes on, to the same weights."""
    from qwenimg.cli import lora_training

    stop = ctx.obj if isinstance(ctx.obj, Stop) else Stop()
    return lora_training.run(lora_training.Wanted(data=data, output=output, opening=opening, **given), stop)
