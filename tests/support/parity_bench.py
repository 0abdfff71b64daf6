"""Runs blocks and whole components on both backends and in float64, on the same rounded weights and inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.precision.precision import Precision
from support.parity_blocks import IDS, SHAPES, TABLES, Block, L
from support.parity_cases import DIT, TORCH, Files, Twin, twins
from support.parity_verdict import Verdict, judge
from support.policies import BF16, BF16_PLAIN, FP16_PLAIN, FP32, FP64

VAE_BF16 = replace(BF16, name="bf16,vae=bf16", vae="bfloat16")
VAE_FP16 = replace(FP16_PLAIN, name="fp16-plain,vae=fp16", vae="float16")
NO_HEAD = replace(BF16, name="bf16,final_norm=off", final_norm=False)
POLICIES = {  # of the component's part; the VAE is float32 in all but those that say otherwise
    "transformer": (FP32, BF16, NO_HEAD, BF16_PLAIN, FP16_PLAIN),
    "text": (FP32, BF16, BF16_PLAIN, FP16_PLAIN),
    "vae": (FP32, VAE_BF16, VAE_FP16),
}


class Bench:
    """Runs blocks on both backends and in float64. Weights, components and references are made once."""

    make_files: Callable[[Path, str], Any] = Files
    make_torch = staticmethod(TORCH)

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, Files] = {}
        self._components: dict[tuple[str, str, str, str], object] = {}
        self._references: dict[tuple[str, str, str], list[np.ndarray]] = {}

    def files(self, stored: str) -> Files:
        if stored not in self._files:
            self._files[stored] = self.make_files(self.folder, stored)
        return self._files[stored]

    def component(self, twin: Twin, part: str, precision: Precision, stored: str):
        key = (twin.name, part, precision.name, stored)
        if key not in self._components:
            self._components[key] = twin.component(self.files(stored), part, precision)
        return self._components[key]

    def reference(self, block: Block, family: str, stored: str) -> list[np.ndarray]:
        """The block's outputs in float64, on weights and inputs that were rounded to `stored`."""
        key = (block.name, family, stored)
        if key not in self._references:
            twin = self.make_torch()
            component = self.component(twin, block.part, FP64, stored)
            outputs = block.on(twin, component, FP64, block.values(family, stored))
            assert all(output.dtype == "float64" for output in outputs)
            self._references[key] = [output.values for output in outputs]
        return self._references[key]

    def judge(
        self, block: Block, precision: Precision, family: str = "normal", only: Twin | None = None, fresh: bool = False
    ) -> list[Verdict]:
        """One verdict for each output. `only` one backend where a fault is planted there; `fresh`: load it again."""
        stored = precision.stored_dtype(block.part)
        references = self.reference(block, family, stored)
        values, made = block.values(family, stored), {}
        for name, twin in {only.name: only}.items() if only else twins().items():
            make = twin.component(self.files(stored), block.part, precision) if fresh else None
            made[name] = block.on(twin, make or self.component(twin, block.part, precision, stored), precision, values)
        streams = [values[name] for name in block.residual] or [None] * len(references)
        return [
            judge(block.case(precision, family), reference, {n: o[i] for n, o in made.items()}, streams[i])
            for i, reference in enumerate(references)
        ]


def whole_runs(bench: Bench, twin: Twin, precision: Precision, fresh: bool = False) -> dict[str, Callable[[], object]]:
    """Every operation of each component, once: `fresh` loads the weights again."""
    stored = precision.stored_dtype("transformer")

    def component(part: str):
        if fresh:
            return twin.component(bench.files(stored), part, precision)
        return bench.component(twin, part, precision, stored)

    dit, text, vae = component("transformer"), component("text"), component("vae")
    texts = [twin.array(np.ones((1, count, DIT.joint_attention_dim)), "float32") for count in (5, 3)]
    latents = twin.array(np.ones((1, L, DIT.in_channels)), "float32")
    pixels, z = np.ones((1, 3, 24, 40), np.float32), np.ones((1, 16, 3, 5), np.float32)
    return {
        "text": lambda: text.encode(IDS),
        "transformer": lambda: dit.predict(
            latents, (dit.modulate(TABLES["features"]), 0), dit.condition(texts, SHAPES)
        ),
        "vae": lambda: (vae.decode(z, 2), vae.encode(pixels)),
    }
