"""A stand-in for what `qwenimg.load` returns: its pictures cost nothing and its faults are chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from qwenimg import Result, Step
from qwenimg.common.memory.estimate import Estimate
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.prompts.wildcards import Wildcards
from qwenimg.common.request.recipe import Recipe
from qwenimg.common.request.request import Defaults, Request
from qwenimg.common.runtime.compiling import Decision
from qwenimg.common.shapes import builtin
from support.policies import parse

Notify = Callable[[str, str], None]


class FakePipeline:
    def __init__(
        self,
        *,
        model: str | None = None,
        backend: str = "auto",
        precision: str = "auto",
        notify: Notify | None = None,
        faults: dict[int, BaseException] | None = None,
        pause: float = 0.0,
    ) -> None:
        self.backend = "cpu" if backend == "auto" else backend
        self.device, self.model_name = "Fake CPU", model or "shapes-v1"
        self.engine = SimpleNamespace(attention=lambda: "flash", group=None)
        self.model = SimpleNamespace(guidance=Guidance(formula=cfg), options=frozenset())
        self.runtime = SimpleNamespace()
        self.controls = SimpleNamespace(prompt=lambda prompt, controls: prompt)
        self.precision = parse(precision, on_gpu=False)
        self.defaults = Defaults(width=20, height=12, steps=3, guidance=4.0, negative_prompt=" ")
        self.notify = notify or (lambda kind, text: None)
        self.faults, self.pause = faults or {}, pause
        self.advises = model is None and builtin.present()  # as the built-in model
        self.wildcards = Wildcards()
        self.prepared: list[str] = []
        self.expected = 4.0
        self.asked: list[dict[str, Any]] = []

    def headline(self) -> str:
        return f"{self.backend} on {self.device} · {self.precision.summary()} · {self.model_name}"

    def compile(self, mode: str = "auto", seconds: float = 0.0) -> Decision:
        return Decision(on=mode == "on", line=f"--compile {mode}")

    def plan_preview(self) -> None:
        pass

    def fit_preview(self) -> None:
        pass

    def check(self, prompt: str, **asked: Any) -> None:
        pass

    def estimate(self, prompt: str, **asked: Any) -> Estimate:
        self.check(prompt, **asked)
        return Estimate(memory=3 * 10**8, seconds=self.expected, step=self.expected / 4)

    def prepare(self, prompts: Sequence[str], clip_skip: int = 0, **more: Any) -> None:
        self.prepared += prompts
        self.notify("stage", "encoding")

    def stream(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        seed: int | None = None,
        latents: Any = None,
        **more: Any,
    ) -> Iterator[Step | Result]:
        assert width and height and steps and guidance is not None and seed is not None
        asked = {"prompt": prompt, "negative_prompt": negative_prompt, "width": width, "height": height}
        lora = {name: more[name] for name in ("lora", "lora_mode") if more.get(name)}
        self.asked.append({**asked, "steps": steps, "guidance": guidance, "seed": seed, "latents": latents, **lora})
        for i in range(steps):
            time.sleep(self.pause)
            yield Step(
                index=i + 1,
                total=steps,
                sigma=1 - i / steps,
                seconds=0.25,
                read=lambda: np.zeros((1, 4, 8, 8), "f4"),
                see=lambda: np.full((8, 8, 3), 99, np.uint8),
            )
        if seed in self.faults:
            raise self.faults[seed]
        warnings = [f"width {width} is odd"] if width % 2 else []
        if self.advises:
            size = {"width": width, "height": height}
            warnings += builtin.advise(Request(prompt=prompt, negative_prompt=negative_prompt or " ", **size))
        for warning in warnings:
            self.notify("warning", warning)
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
        yield Result(
            pixels=pixels,
            latents=np.full((1, 4, 2, 2), seed % 1000, np.float32),
            recipe=self._recipe(prompt, negative_prompt, width, height, steps, guidance, seed, latents is not None),
            timing={"steps": 0.75},
            shapes={"pixels": str(list(pixels.shape))},
            warnings=warnings,
        )

    def _recipe(
        self,
        prompt: str,
        negative: str | None,
        width: int,
        height: int,
        steps: int,
        guidance: float,
        seed: int,
        given: bool,
    ) -> Recipe:
        return Recipe(
            format=1, version="0", model=self.model_name, backend=self.backend, device=self.device,
            precision={"name": self.precision.name}, versions={}, rng="given" if given else "torch-cpu",
            prompt=prompt, negative_prompt=(" " if negative is None else negative) if guidance > 1 else "",
            seed=seed, width=width, height=height, steps=steps, guidance=guidance, sampler="euler", schedule="model",
            sigmas_sha256="0" * 64, noise_sha256=f"{seed:064x}"[-64:], tf32=False, warnings=[],
        )  # fmt: skip
