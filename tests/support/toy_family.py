"""A made-up family: one network on both backends, no text encoder, no tokenizer and no VAE. `add_toy` makes it known by
its row alone; its network on MLX is the translation of that on torch."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import twin
from safetensors.numpy import save_file

from qwenimg.common.base.config import read_json
from qwenimg.common.base.shape import Manifest
from qwenimg.common.families import registry
from qwenimg.common.families.family import Family
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.part_file import PartFile
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.steps import inpaint
from qwenimg.common.pipeline.steps.denoiser import Denoiser, phases
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.pipeline.steps.inpaint import Initial, Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment, flow_plan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.precision.precision import DenoiserKind
from qwenimg.common.request.request import Defaults, Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.sampling.flow_match import FlowMatchConfig

HERE = Path(__file__).parent
SCALE = 4  # pixels to a latent

# The network, as a file of `common/networks` says it


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    channels: int = 3
    width: int = 12
    letters: int = 26


def manifest(config: ToyConfig) -> Manifest:
    return params.merge(
        params.linear("img_in", config.width, config.channels),
        params.linear("letters", config.width, config.letters),
        params.affine("norm_out", config.width),
        params.linear("proj_out", config.channels, config.width),
    )


NETWORK = Network(
    name="toy",
    role="transformer",
    kind="ToyDenoiser",
    config=ToyConfig,
    manifest=manifest,
    compiled=re.compile("norm_out|proj_out"),
)

# The family, as a folder of `common/families` says it


class ToyVAE:
    samples = False
    scale = SCALE
    patch = 1

    def encode(self, pixels: Latents) -> tuple[Latents, Latents]:
        b, c, h, w = pixels.shape
        mean = pixels.reshape(b, c, h // SCALE, SCALE, w // SCALE, SCALE).mean((3, 5))
        return mean, np.zeros_like(mean)

    def check_encodes(self) -> None:
        pass

    def latents(self, pixels: Latents, normal: object) -> Latents:
        return self.encode(pixels)[0]

    def decode(self, latents: Latents) -> Latents:
        return latents.repeat(SCALE, 2).repeat(SCALE, 3)


class ToyModel(DiffusionModel):
    """A latent is the mean of its pixels; the prompt is how often each letter comes in it."""

    multiple = SCALE
    guidance = Guidance(formula=cfg)

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        super().__init__(runtime, checkpoint, Residents(runtime), ToyVAE())  # type: ignore[arg-type]
        self.component = checkpoint["denoiser"]
        self.channels = self.component.config.channels

    def plan(self, request: Request) -> SamplingPlan:
        return flow_plan(self.checkpoint.scheduler, request, request.width * request.height // SCALE**2)

    def stages(self, request: Request, plan: SamplingPlan, shape: LatentShape, counted: bool = True) -> list[Stage]:
        step = 4 * shape.count * self.component.config.width
        splits = (Split(activations=step, size=1, passes=plan.passes(self.guidance.branches(request))),)
        work = plan.evaluations * step
        return [Stage(name="denoise", resident="toy", component=self.component, splits=splits, operations=work)]

    def adapt(self, deltas: Any) -> None:
        assert not deltas

    def check_weights(self) -> None: ...

    def announce(self, requests: Sequence[Request]) -> None: ...

    @contextmanager
    def prepare(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> Iterator[ToyRun]:
        network, _ = self.residents.acquire(self.stages(request, plan, shape)[0])
        yield ToyRun(self, network, request, plan, shape)

    def forget(self) -> None: ...


class ToyRun:
    def __init__(self, model: ToyModel, network: Any, request: Request, plan: SamplingPlan, shape: LatentShape):
        self.model, self.runtime, self.network = model, model.runtime, network
        self.request, self.plan, self.shape = request, plan, shape
        self.branches = model.guidance.branches(request)
        self.shapes = {"text": str([len(self.branches), 1, 26])}

    def array(self, latents: Latents) -> Array:
        """[1 C h w] -> [1 L C]"""
        return self.runtime.engine.array(np.ascontiguousarray(latents.reshape(*latents.shape[:2], -1).swapaxes(1, 2)))

    def latents(self, x: Array) -> Latents:
        return self.runtime.engine.numpy(x).swapaxes(1, 2).reshape(1, -1, *self.shape.grid(1))

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        return Denoiser(
            self.runtime,
            "toy",
            phases(self.plan, self.branches, 1, self._pass),
            lambda x, sigma, velocity: x - sigma * velocity,
            partial(self.model.guidance.combined, self.runtime.engine, self.request),
            blend=inpaint.blend(initial, segment.schedule, self.array),
        )

    def _pass(self, positions: tuple[int, ...]) -> Pass:
        """The call for one branch. `letters` of its options: of all letters in it, the first so many are seen."""
        branch = self.branches[positions[0]]
        text = letters(branch.prompt)
        text[..., branch.options.get("letters", 26) :] = 0
        return Pass(self.network, text, lambda x, sigma: (x, None))


def letters(text: str) -> Latents:
    """[1 1 26]"""
    return np.array([[[text.lower().count(chr(97 + i)) for i in range(26)]]], np.float32)


def open_toy(folder: Path, choices: LoadOptions) -> Checkpoint:
    config = read_config(NETWORK, folder / "denoiser")
    return Checkpoint(
        source=folder,
        components={"denoiser": open_component(NETWORK, folder / "denoiser", config, "denoiser")},
        tokenizers={},
        scheduler=FlowMatchConfig(shift=read_json(folder / "scheduler" / "scheduler_config.json")["shift"]),
    )


FAMILY = Family(
    name="toy",
    title="the Toy",
    pipelines=frozenset({"ToyPipeline"}),
    parts={"denoiser": NETWORK},
    components=(("denoiser",),),
    precision=DenoiserKind(
        denoiser="denoiser",
        places={"residual": "the hidden stream", "final_norm": "norm_out and proj_out"},
        bases=("fp32", "bf16"),
        presets={"quality": "fp32", "balanced": "bf16", "fast": "bf16", "memory": "bf16"},
        prefers=("bf16",),
        keys={"final_norm": re.compile(r"(norm_out|proj_out)\."), "residual": re.compile(r"img_in\.")},
    ),
    load_options=frozenset(),
    open=open_toy,
    models={"": ToyModel},
    defaults=lambda checkpoint: Defaults(width=32, height=24, steps=3, guidance=2.0, negative_prompt="dull"),
    described=lambda folder: "the Toy, text to image",
    files=(
        PartFile(
            option="transformer",
            title="the Toy's denoiser",
            network=NETWORK,
            is_in=lambda header: "letters.weight" in header.tensors,
        ),
    ),
)

# Files, and making it known


def write_toy(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("denoiser", "scheduler"):
        (folder / name).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"}))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"shift": 2.0}))
    config = {"_class_name": NETWORK.kind, "channels": 3, "width": 12, "letters": 26}
    (folder / "denoiser" / "config.json").write_text(json.dumps(config))
    weights = {
        name: (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in manifest(ToyConfig()).items()
    }
    save_file(weights, folder / "denoiser" / "diffusion_pytorch_model.safetensors")
    return folder


@cache
def translated() -> str:
    """The network on MLX; ruff lays it out, in processes of its own."""
    return twin.translate((HERE / "toy_networks" / "toy.py").read_text(encoding="utf-8"))


def add_toy(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The row, and the network where each backend looks for networks; that of MLX is written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.py").write_text(translated())
    for backend, place in (("torch", HERE / "toy_networks"), ("mlx", folder)):
        package = importlib.import_module(f"qwenimg.backends.{backend}.networks.denoisers")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(place)])
        name = f"{package.__name__}.toy"
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, FAMILY))
