"""The loop of a LoRA's training: optimizers, loss scaling, checkpoints, ends, and runs that go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from support import training_steps
from support.training_steps import row_of

import qwenimg
from qwenimg.common.base.errors import ModelError, NumericsError, UsageError
from qwenimg.common.training import lora_step
from qwenimg.common.training.config import LoraConfig, lora_rate, plan_phases
from qwenimg.common.training.example import Example
from qwenimg.common.training.loop import Loop
from qwenimg.common.training.lora import LoraRun
from qwenimg.common.training.optimizer import OPTIMIZERS, AdamW, AdamW8bit, Prodigy

FRAMEWORKS: dict[str, Callable[[np.ndarray], Any]] = {
    "numpy": lambda values: values,
    "torch": torch.from_numpy,
    "mlx": mx.array,
}


def config(tmp_path: Path, **changes: Any) -> LoraConfig:
    usual = {"steps": 12, "rank": 2, "batch": 2, "rate": 1e-2, "save_every": 5, "precision": "fp32"}
    return LoraConfig(stem=tmp_path / "run" / "lora", **(usual | changes))


# Optimizers


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_adamw_is_that_of_torch(framework: str):
    made, generator = FRAMEWORKS[framework], np.random.default_rng(1)
    first = {name: generator.standard_normal((4, 3)).astype(np.float32) for name in "ab"}
    theirs = {name: torch.nn.Parameter(torch.from_numpy(one.copy())) for name, one in first.items()}
    reference = torch.optim.AdamW(theirs.values(), weight_decay=0.01)
    ours = {name: made(one.copy()) for name, one in first.items()}
    optimizer = AdamW(ours)
    for step in range(1, 41):
        gradients = {name: generator.standard_normal((4, 3)).astype(np.float32) for name in "ab"}
        rate = 1e-2 / step
        for name, p in theirs.items():
            p.grad = torch.from_numpy(gradients[name])
        reference.param_groups[0]["lr"] = rate
        reference.step()
        ours = optimizer.step(ours, {name: made(one) for name, one in gradients.items()}, rate, step)
    worst = max(float(np.abs(np.asarray(ours[name]) - theirs[name].detach().numpy()).max()) for name in "ab")
    print(f"{framework}: after 40 steps {worst:.1e} apart")
    assert worst < 1e-6


def minimised(framework: str, kind: type[Any], shape: tuple[int, int], steps: int) -> tuple[float, Any]:
    """Minimise squares whose curvatures are 1e-3 to 1e3 from noisy gradients; return how far the minimum is."""
    made, generator = FRAMEWORKS[framework], np.random.default_rng(3)
    curves = (10 ** generator.uniform(-3, 3, shape)).astype(np.float32)
    goal = generator.standard_normal(shape).astype(np.float32)
    p = {"x": made(np.zeros(shape, np.float32))}
    optimizer = kind(p)
    for step in range(1, steps + 1):
        noise = made((0.3 * curves * generator.standard_normal(shape)).astype(np.float32))
        gradient = made(curves) * (p["x"] - made(goal)) + noise
        p = optimizer.step(p, {"x": gradient}, 1e-2, step)
    return float(np.abs(np.asarray(p["x"]) - goal).mean()), optimizer


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_moments_of_8_bits_learn_as_those_of_32(framework: str):
    """Of a size that neither 256 nor 3 divides; curvatures differ a millionfold within a block."""
    shape = (10, 37)
    (wide, plain), (narrow, packed) = (minimised(framework, kind, shape, 600) for kind in (AdamW, AdamW8bit))
    held = [sum(int(np.asarray(one).nbytes) for one in some.state.values()) for some in (plain, packed)]
    print(f"{framework}: {wide:.4f} from the minimum, in 8 bits {narrow:.4f}; {held[1]} bytes for {held[0]}")
    assert narrow < 2 * wide < 0.1  # 0.8 at the start
    assert all(np.isfinite(np.asarray(one)).all() for one in packed.state.values())
    assert held[1] < held[0] * (1 / 3 + 0.03)


def test_a_moment_that_decays_slowly_decays_in_8_bits():
    """By 0.1 % a step, which is less than a code: after one large gradient the square falls as it must. Rounded to the
    nearest code it would stay, 1.2 apart."""
    p = {"x": np.zeros((1, 60), np.float32)}
    ours, theirs = AdamW8bit(p), AdamW(p)
    first = np.linspace(0.1, 1, 60, dtype=np.float32)[None]
    for step in range(1, 801):
        gradient = {"x": first if step == 1 else first * np.float32(1e-3)}
        for one in (ours, theirs):
            one.step(p, gradient, 0.0, step)
    square = ours._moments("x", p["x"])[1]
    apart = np.abs(square / theirs.state["exp_avg_sq.x"] - 1)
    print(f"after 800 steps the squares are {apart.mean():.3f} apart in the middle, {apart.max():.3f} at most")
    assert apart.max() < 0.3 and theirs.state["exp_avg_sq.x"].max() < 0.5e-3


def test_the_bytes_of_a_plan_are_those_that_an_optimizer_holds():
    shape = (16, 3072)
    for name, kind in OPTIMIZERS.items():
        held = sum(one.nbytes for one in kind({"x": np.zeros(shape, np.float32)}).state.values())
        print(name, kind.bytes, 8 + held / (shape[0] * shape[1]))
        assert kind.bytes == pytest.approx(8 + held / (shape[0] * shape[1]), rel=1e-3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_prodigy_finds_its_step(framework: str):
    """From a millionth, the step grows to about the distance of the minimum, under noisy gradients."""
    made = FRAMEWORKS[framework]
    for scale in (1e-2, 1.0):
        generator = np.random.default_rng(0)
        goal = (generator.standard_normal((50, 2)) * 3 * scale).astype(np.float32)
        p = {"x": made(np.zeros((50, 2), np.float32))}
        optimizer = Prodigy(p)
        for step in range(1, 401):
            noise = generator.standard_normal(goal.shape).astype(np.float32) * scale
            gradient = p["x"] - made(goal) + made(noise.astype(np.float32))
            p = optimizer.step(p, {"x": gradient}, min(1.0, (400 - step) / 100), step)
        size = float(optimizer.state["size"].item())
        away = float(np.linalg.norm(np.asarray(p["x"]) - goal) / np.linalg.norm(goal))
        print(f"{framework}, minimum {3 * scale:g} away: step size {size:.2g}, in the end {away:.2f} of it left")
        assert 0.3 * scale < size < 3 * scale
        assert away < 0.2


def test_the_rate_warms_up_stays_and_falls():
    rates = [lora_rate(step, 1000, 1e-4) for step in range(1000)]
    assert rates[0] == pytest.approx(1e-4 / 50)
    assert rates[49:800] == [1e-4] * 751
    assert rates[900] == pytest.approx(0.5e-4) and rates[-1] == pytest.approx(2e-6)
    assert [lora_rate(step, 1, 1.0) for step in range(1)] == [1.0]


# Loss scaling, with a learner whose gradients overflow


class Overflowing:
    """A parameter whose scaled gradient is not finite in float16 above a scale."""

    def __init__(self, largest: float):
        self.parameters = {"x": np.ones((2, 2), np.float32)}
        self.largest, self.calls = largest, list[tuple[int, str, float]]()

    def put(self, parameters: dict[str, np.ndarray]) -> None:
        self.parameters = parameters

    def gradients(self, step: int, dtype: str, scale: float) -> tuple[float, dict[str, np.ndarray]]:
        self.calls.append((step, dtype, scale))
        fits = dtype != "float16" or scale <= self.largest
        return 1.0, {"x": self.parameters["x"] * np.float32(scale if fits else np.inf)}

    evaluated = array = numpy = staticmethod(lambda value: value)


def looped(tmp_path: Path, learner: Any, precision: str, said: list[str], **changes: Any) -> Loop:
    made = config(tmp_path, precision=precision, **changes)
    (tmp_path / "run").mkdir(exist_ok=True)
    phases = plan_phases(precision, made.steps)
    return Loop(made, learner, AdamW(learner.parameters), phases, lambda step: 1e-2, said.append, save_every=5)


def test_float16_makes_the_steps_of_float32(tmp_path: Path):
    """The scale is undone, and no step is skipped."""
    said: list[str] = []
    plain, half = Overflowing(0), Overflowing(2.0**11)
    ends = [list(looped(tmp_path, one, name, said).steps()) for one, name in ((plain, "fp32"), (half, "fp16"))]
    assert [done.gradient for done in ends[0]] == [done.gradient for done in ends[1]]
    assert np.array_equal(plain.parameters["x"], half.parameters["x"])
    assert half.calls[:4] == [(0, "float16", 2.0**14 / 2**i) for i in range(4)]
    assert ends[1][-1].back_offs == 3 and not said


def test_a_collapse_of_the_scale_is_survived(tmp_path: Path):
    said: list[str] = []
    learner = Overflowing(0.0)
    ends = list(looped(tmp_path, learner, "fp16", said).steps())
    print(said)
    assert {done.dtype for done in ends} == {"bfloat16"}
    assert len(said) == 1 and "bfloat16 from here on" in said[0]
    again = looped(tmp_path, Overflowing(0.0), "fp16", said, resume=True, steps=13)
    assert [done.dtype for done in again.steps()] == ["bfloat16"]  # it is in the checkpoint


def test_a_scale_that_is_not_undone_shows(tmp_path: Path):
    """The planted fault: gradients that stay scaled are clipped to another length."""
    learner = Overflowing(2.0**20)
    gradients = learner.gradients
    learner.gradients = lambda step, dtype, scale: gradients(step, dtype, scale * 2)  # type: ignore[method-assign]
    done = next(looped(tmp_path, learner, "fp16", []).steps())
    assert done.gradient == 2 * 2.0  # twice the length of ones [2 2]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite_ends_the_run(dtype: str, tmp_path: Path):
    learner = Overflowing(0)
    loop = looped(tmp_path, learner, dtype, [])
    steps = loop.steps()
    for _ in range(6):
        next(steps)
    kept = loop.checkpoint.read_bytes()
    learner.gradients = lambda step, dtype, scale: (float("nan"), learner.parameters)  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match=r"step 6: the loss is nan .*; the last checkpoint, run/lora.safetensors"):
        next(steps)
    assert loop.checkpoint.read_bytes() == kept
    assert looped(tmp_path, Overflowing(0), dtype, [], resume=True).step == 5


# Runs on tiny folders


class Random:
    """Pictures of noise."""

    def __init__(self, pipe: Any, count: int = 5, **changes: Any):
        generator, self.examples = np.random.default_rng(2), list[Example]()
        for i in range(count):
            width, height = training_steps.SIZES[i % 2]
            request = pipe.check(f"picture {i}", width=width, height=height)
            shape = (1, pipe.model.channels, *pipe.model.vae.sides(height, width))
            latents = generator.standard_normal(shape).astype(np.float32)
            self.examples.append(replace(Example(latents=latents, request=request), **changes))

    def __len__(self) -> int:
        return len(self.examples)

    def example(self, index: int, generator: np.random.Generator) -> Example:
        return self.examples[index]


def trained(
    folder: Path, backend: str, made: LoraConfig, stop: int = 0, known: bool = False, **changes: Any
) -> tuple[list[Any], dict[str, np.ndarray], list[float]]:
    """Train; return what was done, the factors, and the fixed losses before and after."""
    with qwenimg.load(folder, backend=backend, precision="fp32") as pipe:
        pictures = Random(pipe, **changes)
        run = LoraRun(made, pipe.model, row_of(pipe), pictures, Random(pipe, 3) if known else None, lambda line: None)
        losses, done = [run.fixed_loss(pictures.examples[:1])], []
        for one in run.steps():
            done.append(one)
            if one.step == stop:
                break
        losses.append(run.fixed_loss(pictures.examples[:1]))
        factors = run.factors()
        run.close()
        assert not any(
            getattr(layer, "branch", None)
            for name in pipe.model.residents.opened
            for _, layer in pipe.model.residents.network(name).model.named_modules()
        )
        return done, factors, losses


@pytest.mark.parametrize(
    ("kind", "optimizer", "texts"),
    [
        ("qwen", "adamw", False),
        *(
            pytest.param(*one, marks=pytest.mark.rest)
            for one in [
                ("sd15", "adamw", False),
                ("sd15", "adamw", True),
                ("sdxl", "adamw", True),
                ("qwen", "adamw8bit", False),
                ("qwen", "prodigy", False),
            ]
        ),
    ],
)
@pytest.mark.sample(0)
def test_a_resumed_run_is_the_unbroken_one(
    kind: str, optimizer: str, texts: bool, tiny: dict[str, Path], tmp_path: Path
):
    for backend in ("cpu", "mlx"):
        changes: dict[str, Any] = {"optimizer": optimizer, "text_encoder": texts}
        whole, broken = (config(tmp_path / backend / name, **changes) for name in ("whole", "broken"))
        _, expected, (before, after) = trained(tiny[kind], backend, whole, known=True)
        trained(tiny[kind], backend, broken, stop=7, known=True)
        done, factors, _ = trained(tiny[kind], backend, replace(broken, resume=True), known=True)
        print(f"{kind} on {backend} by {optimizer}: fixed loss {before:.4f} -> {after:.4f}, resumed at {done[0].step}")
        assert done[0].step == 6
        assert all(np.array_equal(factors[name], one) for name, one in expected.items())
        assert any(one.any() for name, one in factors.items() if name.startswith("text_encoder/")) == texts
        assert optimizer == "prodigy" or after < before


def test_runs_of_both_backends_stay_together(tiny: dict[str, Path], tmp_path: Path):
    made = [trained(tiny["qwen"], backend, config(tmp_path / backend)) for backend in ("cpu", "mlx")]
    losses = np.array([[done.loss for done in one[0]] for one in made])
    apart, _, _ = training_steps.apart(made[1][1], {k: v.astype(np.float64) for k, v in made[0][1].items()})
    print(f"after 12 steps: factors {apart:.1e}, losses {np.abs(losses[0] / losses[1] - 1).max():.1e}")
    assert np.allclose(losses[0], losses[1], rtol=1e-4)
    assert apart < 1e-3


@pytest.mark.rest
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_phase_computes_in_its_dtype(backend: str, tiny: dict[str, Path], tmp_path: Path):
    made = config(tmp_path, precision="default", shares="warm-up=25,full=25,predict=25:fp16,correct=25")
    done, _, (before, after) = trained(tiny["sd15"], backend, made)
    print([(one.dtype, one.scale) for one in done], before, after)
    assert [one.dtype for one in done] == ["float32"] * 6 + ["float16"] * 3 + ["float32"] * 3
    assert after < before


def test_a_run_that_learns_nothing_ends(tiny: dict[str, Path], tmp_path: Path):
    with pytest.raises(NumericsError, match="step 20: no layer has learnt anything, all up factors are zero"):
        trained(tiny["qwen"], "cpu", config(tmp_path, steps=30, batch=1), weight=0.0)


def test_a_picture_that_is_not_finite_ends_the_run(tiny: dict[str, Path], tmp_path: Path):
    spoilt = np.full((1, 1, 6, 8), np.nan, np.float32)
    with pytest.raises(NumericsError, match="the mask of the picture with caption 'picture 0' are not finite"):
        trained(tiny["qwen"], "cpu", config(tmp_path), count=1, mask=spoilt)


@pytest.mark.parametrize("kind", ["flux-fill", "inpaint", "qwen-layered"])
def test_a_model_that_is_not_trained_says_why(kind: str, tiny: dict[str, Path], tmp_path: Path):
    with (
        qwenimg.load(tiny[kind], backend="cpu", precision="fp32") as pipe,
        pytest.raises(UsageError, match=r"no LoRA is trained on this model: it (takes a mask|draws several)") as caught,
    ):
        LoraRun(config(tmp_path), pipe.model, row_of(pipe), [], None, lambda line: None)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_a_checkpoint_may_not_be(tiny: dict[str, Path], tmp_path: Path):
    made = config(tmp_path, steps=5)
    trained(tiny["qwen"], "cpu", made)
    path = made.stem.with_suffix(".safetensors")
    whole = path.read_bytes()

    def refused(change: dict[str, Any], match: str) -> None:
        with pytest.raises((ModelError, UsageError), match=match) as caught:
            trained(tiny["qwen"], "cpu", replace(made, **({"resume": True} | change)))
        assert "\n" not in str(caught.value)

    refused({"resume": False}, "a run is there already; go on with --resume")
    refused({"rank": 3}, "is of another run: rank was 2, now it is 3")
    refused({"facts": {"base": "x"}}, "is of another run: base was None, now it is x")
    refused({"optimizer": "prodigy"}, "is of another run: optimizer")
    refused({"steps": 4}, "is of step 5, beyond --steps 4")
    path.write_bytes(whole[:-4])
    refused({}, "is not a whole checkpoint")
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    name = next(one for one in header if one.startswith("exp_avg_sq."))
    begin = 8 + length + header[name]["data_offsets"][0]
    for value, match in ((np.nan, "has 1 non-finite values"), (-1.0, "is a mean of squares and reaches -1")):
        path.write_bytes(whole[:begin] + np.float32(value).tobytes() + whole[begin + 4 :])
        refused({}, match)
    path.write_bytes(whole)
    link = path.with_suffix(".real")
    path.rename(link)
    path.symlink_to(link)
    refused({}, "is a link")


@pytest.mark.parametrize(
    "change", [{"rank": 0}, {"steps": 0}, {"rate": 0.0}, {"optimizer": "sgd"}, {"precision": "fp8"}]
)
def test_an_option_that_is_wrong_is_one_line(change: dict[str, Any], tmp_path: Path):
    with pytest.raises(UsageError) as caught:
        config(tmp_path, **change)
    assert "\n" not in str(caught.value)


@pytest.mark.rest
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_killed_run_goes_on(backend: str, tiny: dict[str, Path], tmp_path: Path):
    """Killed at several moments, at the latest within the next step, it ends as the unbroken one."""
    _, expected, _ = trained(tiny["qwen"], backend, config(tmp_path / "whole"))
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom support import frameworks\nimport test_lora_loop as t\n"
        "folder, backend, out, resume = sys.argv[1:]\n"
        "made = t.config(Path(out), resume=resume == 'on', save_every=1)\n"
        "with t.qwenimg.load(folder, backend=backend, precision='fp32') as pipe:\n"
        "    run = t.LoraRun(made, pipe.model, t.row_of(pipe), t.Random(pipe), None, print)\n"
        "    for one in run.steps():\n"
        "        print('step', one.step, flush=True)\n"
    )
    here = Path(__file__).parent
    path = ":".join([str(here), str(here.parent), str(here.parents[1] / "tools"), *sys.path])
    started, seen = False, 0
    for after in (1, 3, 4, 7, 9):
        command = [sys.executable, str(script), str(tiny["qwen"]), backend, str(tmp_path), "on" if started else "off"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": path, **_environment()}
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                started, seen = True, int(line.split()[1])
            if seen >= after:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
    done, factors, _ = trained(tiny["qwen"], backend, config(tmp_path, resume=True))
    print(f"{backend}: killed 5 times, the last time after step {seen}; went on at {done[0].step}")
    assert all(np.array_equal(factors[name], one) for name, one in expected.items())


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_draws_of_a_step_come_from_seed_and_step(tiny: dict[str, Path], tmp_path: Path):
    """Each picture comes once in each round, and no two noises are alike."""
    with qwenimg.load(tiny["qwen"], backend="cpu", precision="fp32") as pipe:
        pictures = Random(pipe)
        runs = [
            LoraRun(config(tmp_path / str(i), seed=seed), pipe.model, row_of(pipe), pictures, None, lambda line: None)
            for i, seed in enumerate((0, 0, 1))
        ]
        first, same, other = ([draw for step in range(5) for draw in run.learner.draws(step)] for run in runs)
        numbers = [pictures.examples.index(draw.example) for draw in first]
        print(numbers, [round(draw.sigma, 3) for draw in first])
        assert sorted(numbers[:5]) == sorted(numbers[5:]) == list(range(5))
        assert all(a.sigma == b.sigma and np.array_equal(a.noise, b.noise) for a, b in zip(first, same, strict=True))
        assert not any(a.sigma == b.sigma for a, b in zip(first, other, strict=True))
        assert len({draw.noise.tobytes() for draw in first}) == len(first)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["sd15", "qwen"])
def test_layers_that_learn_are_those_of_blocks(kind: str, tiny: dict[str, Path]):
    with qwenimg.load(tiny[kind], backend="cpu", precision="fp32") as pipe:
        paths = lora_step.paths(pipe.model, row_of(pipe))
    assert paths and not any("mod" in path or "norm" in path or "time" in path for path in paths)
