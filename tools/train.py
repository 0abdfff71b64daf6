"""Train the built-in model, or go on from its weights: python tools/train.py STAGE --out FOLDER"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click
from training.config import RATES, ShapesConfig, Stage, outputs, parse_sizes

from qwenimg import backends
from qwenimg.cli import failures, streams
from qwenimg.common.base.errors import BackendMissing, QwenimgError, UsageError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.training import files

STAGES = ("vae", "text", "dit", "all")
STEPS = {"vae": 6000, "text": 2000, "dit": 8200}
BATCH = {"vae": 16, "text": 128, "dit": 48}
_FOLDER = click.Path(path_type=Path, readable=False)  # what cannot be read is reported later, with its exit code
SIZE = {"vae": "64", "text": "128", "dit": "128"}


@click.command("train")
@click.argument("stage", type=click.Choice(STAGES))
@click.option(
    "--out",
    type=_FOLDER,
    required=True,
    help="Folder of the model, in diffusers layout.",
)
@click.option("--steps", type=int, help="Steps of each stage [6000 for vae, 2000 for text, 8200 for dit].")
@click.option("--batch", type=int, help="Pictures or prompts in a step [16 for vae, 128 for text, 48 for dit].")
@click.option(
    "--size", help="Pixels, such as 128 or 160x96; of a list, the steps take turns [64 for vae, 128 for dit]."
)
@click.option("--seed", type=int, default=0, help="[0]")
@click.option("--rate", type=float, help="Peak learning rate [1e-3 for vae, 1.3e-3 for text and dit].")
@click.option(
    "--precision", default="auto", help="auto, conservative, default, aggressive, or a dtype: fp32, bf16, fp16 [auto]."
)
@click.option("--phases", help="Percent of the steps: warm-up=10,full=20,predict=60:bf16,correct=10.")
@click.option("--init", type=_FOLDER, help="Folder of a model whose weights to go on from.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in the folder.")
@click.option("--accumulate", type=int, default=1, help="Parts in which a step's batch is computed [1].")
@click.option("--checkpointing", is_flag=True, help="Compute each block twice, to keep less in memory.")
@click.option("--save-every", type=int, default=500, help="Steps between checkpoints [500].")
@click.option("--simple", type=int, default=0, help="Steps of dit, from the first, with one object, plain words [0].")
@click.option("--threads", type=int, help="CPU threads, beside the one that makes the pictures.")
@click.option("--backend", type=click.Choice(("auto", "cpu", "cuda")), default="auto", help="[auto]")
def train(
    stage: str,
    out: Path,
    steps: int | None,
    batch: int | None,
    size: str | None,
    seed: int,
    rate: float | None,
    precision: str,
    phases: str | None,
    init: Path | None,
    resume: bool,
    accumulate: int,
    checkpointing: bool,
    save_every: int,
    simple: int,
    threads: int | None,
    backend: str,
) -> None:
    """Train the built-in model on pictures of coloured shapes, made as they are needed.

    `vae` and `text` (the text encoder alone) come first, then `dit` (text encoder and transformer); `all` is all
    three. A run that was stopped, however hard, goes on with --resume and the same options. Checkpoint and table
    of the loss are in OUT/training.
    """
    stages: list[Stage] = [name for name in get_args(Stage) if stage in (name, "all")]
    resumed = resumed_stages(out, stages) if resume else []
    configs = [
        ShapesConfig(
            stage=name,
            out=out,
            steps=STEPS[name] if steps is None else steps,
            batch=BATCH[name] if batch is None else batch,
            sizes=parse_sizes(SIZE[name] if size is None else size),
            seed=seed,
            rate=RATES[name] if rate is None else rate,
            precision=precision,
            shares=phases,
            init=init,
            resume=name in resumed,
            threads=threads,
            accumulate=accumulate,
            checkpointing=checkpointing,
            save_every=save_every,
            simple=simple,
        )
        for name in stages
    ]
    for config in configs:  # before the first stage, which may take hours
        files.check(config, outputs(config))
    place = device(backend)
    from training.stages import train as run

    for config in configs:
        run(config, streams.say, device=place)


def resumed_stages(out: Path, stages: Sequence[Stage]) -> list[Stage]:
    """Return the `stages` that --resume continues: all that have a checkpoint in `out`. Raises UsageError without such
    a folder, ModelError without a checkpoint."""
    if not out.is_dir():
        raise UsageError(f"--resume: {clean(out)} does not exist; start without --resume")
    started = [stage for stage in stages if os.path.lexists(out / "training" / f"{stage}.safetensors")]
    if not started:
        raise bad(out, f"no checkpoint of {' or '.join(stages)} here to resume; start without --resume")
    return started


def device(backend: str) -> str:
    """Return torch's name of the device. Raises BackendMissing without torch, or without the GPU that is asked for."""
    if not backends.installed("cpu"):
        raise BackendMissing("training needs torch: pip install '.[torch]'")
    from qwenimg.backends.torch.engine import has_cuda

    if backend == "cuda" and not has_cuda():
        raise BackendMissing("--backend cuda: torch sees no NVIDIA GPU here; use --backend cpu")
    return "cuda" if backend == "cuda" or (backend == "auto" and has_cuda()) else "cpu"


def main() -> int:
    """Run the command and return its exit code; an error is one line."""
    try:
        train(standalone_mode=False)
    except (QwenimgError, click.ClickException) as error:
        return failures.report(error)[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
