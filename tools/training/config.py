"""The options of the built-in model's training: its stages, their learning rates, and the widths of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.training.config import FINAL_RATE, MAX_BATCH, MAX_STEPS, check_between, plan_phases
from qwenimg.common.training.files import is_file

Stage = Literal["vae", "text", "dit"]
RATES: dict[Stage, float] = {"vae": 1e-3, "text": 1.3e-3, "dit": 1.3e-3}
"""Peak learning rates of AdamW; Muon's is a multiple."""
WARM_UP = 200  # steps until the peak, or 5 % of a shorter run

STEM = "diffusion_pytorch_model.safetensors"
TEXT_STEM = "model.safetensors"
OUTPUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "vae": {"vae": ("config.json", STEM)},
    "text": {
        "tokenizer": ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
        "text_encoder": ("config.json", TEXT_STEM),
    },
    "dit": {"transformer": ("config.json", STEM), "scheduler": ("scheduler_config.json",), ".": ("model_index.json",)},
}
"""Files by folder that a stage writes, beside those of `training/`."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The widths of the built-in model; the defaults are those that ship (5 M parameters)."""

    vae_base: int = 16
    vae_mult: tuple[int, ...] = (1, 2, 4, 4)
    heads: int = 4
    rope_axes: tuple[int, int, int] = (8, 12, 12)
    layers: int = 6
    text_hidden: int = 128
    text_intermediate: int = 256
    text_layers: int = 2
    text_heads: int = 4
    text_key_heads: int = 2


@dataclass(frozen=True, kw_only=True)
class ShapesConfig:
    """One stage of the built-in model.

    `stage` names its files; `rate` is the peak learning rate; `sizes` are (width, height) in pixels, taken in turn by
    the steps; the first `simple` steps show one object under a plain prompt. A resumed run must have the options `SAME`
    in common with its checkpoint; steps and precision may change."""

    SAME: ClassVar[tuple[str, ...]] = ("stage", "batch", "sizes", "seed", "accumulate", "simple", "size")

    stage: Stage
    out: Path
    steps: int
    batch: int = 64
    sizes: tuple[tuple[int, int], ...] = ((128, 128),)
    seed: int = 0
    rate: float = 1e-3
    precision: str = "auto"
    shares: str | None = None
    init: Path | None = None
    resume: bool = False
    threads: int | None = None
    accumulate: int = 1
    checkpointing: bool = False
    save_every: int = 500
    simple: int = 0
    size: ModelSize = field(default_factory=ModelSize)

    @property
    def stem(self) -> Path:
        """The name of the run's own files, without their suffixes."""
        return self.out / "training" / self.stage

    def __post_init__(self) -> None:
        check_between("steps", self.steps, 1, MAX_STEPS)
        check_between("batch", self.batch, 1, MAX_BATCH)
        check_between("accumulate", self.accumulate, 1, self.batch)
        check_between("save-every", self.save_every, 1, MAX_STEPS)
        check_between("threads", self.threads or 1, 1, 1024)
        check_between("seed", self.seed, 0, 2**63 - 1)
        check_between("simple", self.simple, 0, MAX_STEPS)
        if not 0 < self.rate <= 1:
            raise UsageError(f"rate is {self.rate}; choose a learning rate above 0, at most 1")
        for width, height in self.sizes:
            if width % 16 or height % 16 or not 32 <= min(width, height) <= max(width, height) <= 2048:
                raise UsageError(
                    f"size {clean(width, 40)}x{clean(height, 40)}: sides must be multiples of 16 from 32 to 2048"
                )
        plan_phases("fp32" if self.precision == "auto" else self.precision, self.steps, self.shares)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of the step `step` (from 0): up in a line, down on half a cosine to `FINAL_RATE` of the peak."""
    warm_up = max(1, min(WARM_UP, steps // 20))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def outputs(config: ShapesConfig) -> Iterator[Path]:
    """Yield the files that a stage writes; `dit` also writes a copy of each part that its folder lacks."""
    written = dict(OUTPUTS[config.stage])
    if config.stage == "dit":
        written["tokenizer"] = OUTPUTS["text"]["tokenizer"]
        copied = OUTPUTS["vae"] | {"text_encoder": OUTPUTS["text"]["text_encoder"]} if config.init is not None else {}
        for part, names in copied.items():
            if not is_file(config.out / part / "config.json"):
                written[part] = names
    for folder, names in written.items():
        yield from (config.out / folder / name for name in names)


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Return sizes from `128`, `160x96`, or a list such as `128,160x96,96x160`, taken in turn. Raises UsageError."""
    sizes = []
    for part in text.lower().split(","):
        sides = part.strip().split("x")
        if len(sides) > 2 or not all(side.isascii() and side.isdigit() and len(side) < 6 for side in sides):
            raise UsageError(f"size {clean(part, 40)!r} is not a side or WIDTHxHEIGHT in pixels, such as 128 or 160x96")
        sizes.append((int(sides[0]), int(sides[-1])))
    return tuple(sizes)
