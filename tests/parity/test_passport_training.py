"""Passports of training: recorded on one backend and checked on the other; planted faults; files with a fault."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.cli_runner import Ran, cli
from support.passport_mutants import Original
from support.refusals import refused

import qwenimg
from qwenimg import ModelError
from qwenimg.common.parity import training_step
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Passport
from qwenimg.common.runtime import factor_names
from qwenimg.common.training import encoded, levels, loop, lora, lora_step, optimizer

BACKENDS = ("cpu", "mlx")
KINDS = ("qwen", "qwen-2511", "z-image", "flux-dev", "flux2-base", "sd15", "sd21", "sdxl")
CASES = [  # Z-Image's activations exceed float16; a CPU without products in 16 bits takes minutes for a few gradients
    pytest.param(kind, dtype, marks=[pytest.mark.slow] if dtype != "fp32" else [])
    for kind in KINDS
    for dtype in ("fp32", "bf16", "fp16")
    if (kind, dtype) != ("z-image", "fp16")
]
ASKED = {"prompt": "a large blue star", "width": 64, "height": 48, "steps": 3, "seed": 0}
CAPTIONED = 5  # a seed that drops a caption


def other(backend: str) -> str:
    return BACKENDS[1 - BACKENDS.index(backend)]


@pytest.fixture(scope="module")
def recorded(tiny: dict[str, Path]) -> Callable[..., Passport]:
    """Passports by model, backend and precision, each recorded once."""
    made: dict[tuple[str, ...], Passport] = {}

    def of(kind: str, backend: str, precision: str = "fp32") -> Passport:
        if (kind, backend, precision) not in made:
            with qwenimg.load(tiny[kind], backend=backend, precision=precision) as pipe:
                made[kind, backend, precision] = training_step.record(pipe, ASKED | {"seed": CAPTIONED})
        return made[kind, backend, precision]

    return of


def checked(passport: Passport, folder: Path, backend: str) -> list[training_step.Compared]:
    with qwenimg.load(folder, backend=backend, precision=passport.precision) as pipe:
        return training_step.check(passport, pipe)


def shown(compared: list[training_step.Compared]) -> str:
    return "; ".join(training_step.lines(compared))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "precision"), CASES)
@pytest.mark.sample(1, rest=4)
def test_the_other_backend_passes(
    kind: str, precision: str, backend: str, tiny: dict[str, Path], recorded: Callable[..., Passport]
) -> None:
    passport = recorded(kind, backend, precision)
    compared = checked(passport, tiny[kind], other(backend))
    print(f"{kind} in {precision}, recorded on {backend}: {shown(compared)}")
    assert not training_step.verdict(compared)


# Planted faults


def _no_target(denoiser: Any, x: Any, latents: Any, sigma: float) -> Any:
    return latents


@contextmanager
def _captured(backend: str) -> Iterator[None]:
    """Factors that a recomputed block captures: on MLX their gradients are 0; on torch those of one block are cut."""
    if backend == "mlx":
        from qwenimg.backends.mlx.training import adapters as of_mlx

        plain = of_mlx._checkpointed

        def capturing(function: Any, branches: Any, *arguments: Any) -> Any:
            return plain(lambda *inner: function(branches, *inner), *arguments)

        with mock.patch.object(of_mlx, "_checkpointed", capturing):
            yield
        return
    from qwenimg.backends.torch.training import adapters

    real = adapters.checkpoint

    def detached(forward: Any, first: Any, *arguments: Any, **options: Any) -> Any:
        return real(forward, first.detach(), *arguments, **options)

    with mock.patch.object(adapters, "checkpoint", detached):
        yield


@contextmanager
def _trained_base(backend: str) -> Iterator[None]:
    """A tensor of the base moves with each step."""
    real = lora.LoraLearner.put

    def put(self: Any, parameters: Any) -> None:
        real(self, parameters)
        name = next((one for one in ("transformer", "unet") if one in self.model.residents.opened), None)
        if name is not None:
            weights = dict(self.model.residents.network(name).model.named_modules())
            layer = next(one for path, one in weights.items() if path.endswith("to_q"))
            layer.weight = (
                layer.weight * 1.01 if backend == "mlx" else type(layer.weight)(layer.weight.data * 1.01, False)
            )

    with mock.patch.object(lora.LoraLearner, "put", put):
        yield


def _patched(target: Any, name: str, made: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Return a plant that replaces a function by what `made` makes of it."""
    return lambda backend: mock.patch.object(target, name, made(getattr(target, name)))


def _unscaled(real: Any) -> Any:
    def gradients(self: Any, draws: Any, scale: float = 1.0) -> Any:
        return real(self, draws, 2 * scale)

    return gradients


def _seeded(real: Any) -> Any:
    return lambda self, step, place: np.random.default_rng([self.config.seed + 1, 2, step, place])


def _swapped(real: Any) -> Any:
    def gradients(self: Any, draws: Any, scale: float = 1.0) -> Any:
        """Each up factor has the gradient of another layer's, of the same shape."""
        loss, found = real(self, draws, scale)
        ups = [name for name in found if name.endswith(factor_names.UP) and "to_" in name]
        a = ups[0]
        b = next(name for name in ups[1:] if found[name].shape == found[a].shape)
        return loss, found | {a: found[b], b: found[a]}

    return gradients


def _exchanged(real: Any) -> Any:
    """The first factors are exchanged: up is drawn, down is 0."""

    def factors(*given: Any) -> Any:
        made = real(*given)
        return {name: one[::-1].copy() if name.endswith(factor_names.DOWN) else one for name, one in made.items()}

    return factors


FAULTS: dict[str, Callable[[str], Any]] = {
    "the target is the latents": lambda backend: mock.patch.object(lora_step, "sought", _no_target),
    "another density of levels": _patched(
        levels, "level", lambda real: lambda model, request, place: real(model, request, place**1.2)
    ),
    "a frozen tensor is trained": _trained_base,
    "more layers learn": _patched(
        training_step,
        "training_of",
        lambda real: lambda pipe: (None, replace(real(pipe)[1], layers=re.compile(".+"))),
    ),
    "the scale is not undone": _patched(lora_step.LoraStep, "gradients", _unscaled),
    "the mask is ignored": _patched(
        training_step.RandomPictures,
        "example",
        lambda real: lambda self, *given: replace(real(self, *given), mask=None),
    ),
    "a captured parameter": _captured,
    "another clip": lambda backend: mock.patch.object(loop, "CLIP", 2.0),
    "no weight decay": lambda backend: mock.patch.object(optimizer, "DECAY", 0.0),
    "another epsilon": lambda backend: mock.patch.object(optimizer, "EPS", 1e-6),
    "noise of another seed": _patched(lora.LoraLearner, "_generator", _seeded),
    "no caption is dropped": _patched(encoded, "without_caption", lambda real: lambda example: example),
    "gradients of another layer": _patched(lora_step.LoraStep, "gradients", _swapped),
    "other first factors": _patched(lora_step, "first_factors", _exchanged),
    "the rate does not warm up": _patched(training_step, "lora_rate", lambda real: lambda *given: 0.5 * real(*given)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(6)
def test_a_fault_is_caught(fault: str, backend: str, tiny: dict[str, Path], recorded: Callable[..., Passport]) -> None:
    passport = recorded("qwen", other(backend))
    assert passport.training is not None
    captions = [text for step in passport.training.steps for text in step.captions]
    assert "" in captions and any(captions), captions
    with FAULTS[fault](backend):
        compared = checked(passport, tiny["qwen"], backend)
    verdict = training_step.verdict(compared)
    share = (
        max((one.error / one.allowed if one.allowed else np.inf) for one in compared if one.failure) if verdict else 0
    )
    print(f"{fault} on {backend}: {verdict}; {share:.0f} times the limit")
    assert verdict and share > 3


@pytest.mark.rest
@pytest.mark.parametrize("fault", ["the target is the latents", "the mask is ignored", "a captured parameter"])
def test_a_fault_is_caught_in_bfloat16(fault: str, tiny: dict[str, Path], recorded: Callable[..., Passport]) -> None:
    passport = recorded("qwen", "cpu", "bf16")
    with FAULTS[fault]("mlx"):
        verdict = training_step.verdict(checked(passport, tiny["qwen"], "mlx"))
    print(f"{fault} in bf16: {verdict}")
    assert verdict


# The command, and files


@pytest.fixture(scope="module")
def original(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Original:
    path = tmp_path_factory.mktemp("training") / "whole.safetensors"
    ran = record(tiny["sd15"], path, "--steps", "1")
    assert ran.code == 0, ran.err
    return Original(path)


def record(folder: Path, path: Path, *more: str) -> Ran:
    size = ("--size", "64x48", "--backend", "cpu")
    return cli("parity", "record", str(folder), "--training", *size, "-o", str(path), *more)


@pytest.mark.sample(0)
def test_the_command_records_and_checks(tiny: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    ran = record(tiny["sd15"], path, "--steps", "2")
    assert ran.code == 0 and "2 steps of training" in ran.err, ran.err
    ran = cli("parity", "check", str(path), str(tiny["sd15"]), "--backend", "mlx")
    assert ran.code == 0 and "what the optimizer changes" in ran.out.decode(), ran.err
    data = json.loads(cli("parity", "check", str(path), str(tiny["sd15"]), "--backend", "mlx", "--json").out)
    assert data["ok"] and len(data["training"]) == 2 + 2 * 9
    with mock.patch.object(optimizer, "DECAY", 0.1):
        ran = cli("parity", "check", str(path), str(tiny["sd15"]), "--backend", "mlx")
    assert ran.code == 6 and "step 1: what the optimizer changes differs by" in ran.err, ran.err
    cli("parity", "check", str(path), str(tiny["sd21"]), "--backend", "mlx").refused(5, "is another model")
    cli("parity", "check", str(path), str(tiny["sd15"]), "--blocks").refused(2, "--blocks")
    cli("parity", "report", str(path)).refused(2, "is of a training")
    again = tmp_path / "again.safetensors"
    record(tiny["sd15"], again, "--steps", "9").refused(2, "for 1 to 8 steps")
    record(tiny["sd15"], again, "--sampled").refused(2, "--sampled has no effect")
    record(tiny["qwen-layered"], again).refused(2, "draws several layers")
    assert not again.exists()


@pytest.mark.sample(0)
def test_every_mutant_is_refused_or_judged(original: Original, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Every value by every wrong kind: refused in one line, or read; what is read of the training is judged."""
    path, refusals, read = tmp_path / "mutant.safetensors", 0, list[Any]()
    for mutant in original.mutants():
        try:
            passport = passport_file.read(original.write(path, mutant.text))
        except ModelError as error:
            refusals += 1
            text = str(error)
            assert text.isprintable() and len(text) <= 300 and "mutant.safetensors" in text, (mutant.place, text)
        else:
            if mutant.place.startswith("training") and passport.training is not None:
                read.append((mutant.place, passport))
    verdicts = []
    with qwenimg.load(tiny["sd15"], backend="cpu", precision="fp32") as pipe:
        for place, passport in read:
            try:
                verdicts.append(bool(training_step.verdict(training_step.check(passport, pipe))))
            except ModelError as error:
                assert "\n" not in str(error), place
                verdicts.append(True)
    print(f"{refusals} refused, {len(read)} read, {sum(verdicts)} of these fail")
    assert refusals > 500 and refusals > 5 * len(read) > 0
    assert sum(verdicts) > len(read) / 2


Change = Callable[[dict[str, Any]], object]
WRONG: dict[str, tuple[Change, str]] = {
    "no step": (lambda d: d["training"].update(steps=[]), "0 steps"),
    "a level too many": (lambda d: d["training"]["steps"][0]["sigmas"].append(1.0), "3 noise levels"),
    "a blank caption": (lambda d: d["training"].update(prompts=["a", " "]), "prompt"),
    "one caption": (lambda d: d["training"].update(prompts=["a"]), "1 captions"),
    "a weight of 0": (lambda d: d["training"].update(weight=0), "training.weight"),
    "a loss that is a text": (lambda d: d["training"]["steps"][0].update(loss="x"), "loss is 'x'"),
    "no factors": (lambda d: d["training"]["steps"][0].update(factors={}), "0 factors"),
    "a factor that is not there": (lambda d: d["training"]["steps"][0]["factors"].update(x="t9999"), "t9999"),
    "a gradient less": (lambda d: d["training"]["steps"][0]["gradients"].popitem(), "are not those of its factors"),
    "a picture beside it": (lambda d: d.update(blocks=[{}]), "blocks[0]"),
    "neither training nor blocks": (lambda d: d.pop("training"), "0 blocks"),
    "a path for a caption": (lambda d: d["training"].update(prompts=["/etc/hostname", ""]), "captions"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_named(fault: str, original: Original, tmp_path: Path) -> None:
    change, words = WRONG[fault]
    document = json.loads(json.dumps(original.document))
    change(document)
    path = original.write(tmp_path / "wrong.safetensors", json.dumps(document))
    assert words in refused(passport_file.read, path)


def test_factors_of_another_model_are_refused(original: Original, tiny: dict[str, Path], tmp_path: Path) -> None:
    document = json.loads(json.dumps(original.document))
    for some in ("gradients", "factors"):
        values = document["training"]["steps"][0][some]
        values["x"] = values.pop(next(iter(values)))
    path = original.write(tmp_path / "other.safetensors", json.dumps(document))
    cli("parity", "check", str(path), str(tiny["sd15"]), "--backend", "cpu").refused(5, "do not fit the layers")
