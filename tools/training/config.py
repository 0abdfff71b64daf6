"""The options of the built-in model's training: its stages, their learning rates, and the widths of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.training.config import MAX_STEPS, TrainConfig, check_between
from qwenimg.common.training.files import is_file

Stage = Literal["vae", "text", "dit"]
RATES: dict[Stage, float] = {"vae": 1e-3, "text": 1.3e-3, "dit": 1.3e-3}
"""Peak learning rates of AdamW; Muon's is a multiple."""

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
class ShapesConfig(TrainConfig):
    """One stage of the built-in model. The first `simple` steps show one object under a plain prompt."""

    SAME: ClassVar[tuple[str, ...]] = (*TrainConfig.SAME, "simple", "size")
    simple: int = 0
    size: ModelSize = field(default_factory=ModelSize)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("simple", self.simple, 0, MAX_STEPS)


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
