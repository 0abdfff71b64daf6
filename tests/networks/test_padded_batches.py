"""Prompts of different length in one batch: each row is what it is alone, without padding and mask."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from support.parity_cases import DIT, MLX, TORCH, Twin, weights
from support.parity_recorded import identical
from support.parity_verdict import judge
from support.policies import BF16, FP32, FP64

from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_dit
from qwenimg.common.parity import parity
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights import keys

TARGET = [(1, 5, 3)]
EDIT = [(1, 5, 3), (1, 2, 4), (1, 3, 3)]
CASES = {
    "two prompts": (DIT, TARGET, (4, 11)),
    "the longer first": (DIT, TARGET, (11, 4)),
    "a single token": (DIT, TARGET, (7, 1)),
    "four prompts": (DIT, TARGET, (3, 9, 9, 1)),
    "equal lengths need no mask": (DIT, TARGET, (6, 6)),
    "zero_cond_t": (replace(DIT, zero_cond_t=True), EDIT, (4, 11)),
    "zero_cond_t, target only": (replace(DIT, zero_cond_t=True), TARGET, (9, 2)),
    "zero_cond_t, layered": (replace(DIT, zero_cond_t=True, use_layer3d_rope=True), EDIT, (2, 5)),
}
STEP, TIMES = 1, (981.0, 437.3, 20.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint, of values that bfloat16 holds, for every configuration here: none has a weight more."""
    folder = tmp_path_factory.mktemp("batches")
    made = {key: value.bfloat16().float() for key, value in weights(qwen_dit.manifest(DIT), 4).items()}
    safetensors.torch.save_file(made, folder / "diffusion_pytorch_model.safetensors")
    return folder


class Runs:
    """One configuration on one backend, for any batch of texts."""

    def __init__(self, twin: Twin, folder: Path, case: str, precision: Precision):
        self.twin, (config, self.shapes, self.lengths) = twin, CASES[case]
        plan = keys.plan(folder, "transformer", qwen_dit.manifest(config), uses=qwen_dit.uses)
        self.model = twin.engine.open("qwen_dit", config, plan.stored(precision), precision)
        self.modulation = self.model.modulate(qwen_conditioning.time_rows(config, TIMES, "float32"))
        self.wide = "float64" if precision is FP64 else "float32"
        rng = np.random.default_rng(8)
        tokens = sum(math.prod(shape) for shape in self.shapes)
        self.latents = rng.standard_normal((len(self.lengths), tokens, DIT.in_channels)).astype(np.float32)
        self.texts = [
            rng.standard_normal((1, length, DIT.joint_attention_dim)).astype(np.float32) for length in self.lengths
        ]

    def __call__(self, rows: list[int]) -> np.ndarray:
        condition = self.model.condition([self.twin.array(self.texts[i], self.wide) for i in rows], self.shapes)
        latents = self.twin.array(self.latents[rows], self.wide)
        return self.twin.output(self.model.predict(latents, (self.modulation, STEP), condition)).values


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_rows_of_a_batch_are_the_rows_alone(folder: Path, case: str) -> None:
    """On both backends, in float32, against float64 alone and without padding."""
    exact = Runs(TORCH(), folder, case, FP64)
    rows = range(len(exact.lengths))
    alone = np.concatenate([exact([i]) for i in rows])
    padded = exact(list(rows))
    print(f"{case}: in float64 {np.abs(padded - alone).max():.1e}")
    assert np.abs(padded - alone).max() < 1e-12, "exact but for the order of sums"
    outputs = {
        name: parity.Output(values=Runs(twin, folder, case, FP32)(list(rows)), dtype="float32")
        for name, twin in (("torch", TORCH()), ("MLX", MLX()))
    }
    verdict = judge(parity.Case(component="dit.batch", dtype="float32", returned="float32", blocks=3), alone, outputs)
    print(verdict.row(case))
    assert verdict.ok, verdict.failures


@pytest.mark.parametrize("twin", [TORCH, MLX], ids=["torch", "mlx"])
@pytest.mark.parametrize("case", ["four prompts", "zero_cond_t"])
def test_what_pads_a_row_does_not_reach_it(folder: Path, twin, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of huge values instead of zeros changes nothing in any picture, bit for bit."""
    runs = Runs(twin(), folder, case, BF16)
    rows = list(range(len(runs.lengths)))
    clean, original = runs(rows), runs.twin.nn.pad_tokens

    def loud(x, length: int):
        short = x.shape[1]
        padded = runs.twin.engine.numpy(original(x, length)).copy()
        padded[:, short:] = np.random.default_rng(1).standard_normal(padded[:, short:].shape) * 1e4
        return runs.twin.array(padded, "float32")

    monkeypatch.setattr(runs.twin.nn, "pad_tokens", loud)
    assert identical(runs(rows), clean)
    monkeypatch.setattr(qwen_conditioning, "key_mask", lambda lengths, tokens: None)
    assert not np.allclose(runs(rows), clean, rtol=0.01), "without the mask it does"


def test_one_latent_for_all_rows(folder: Path) -> None:
    """What guidance does: a latent of batch 1 goes with every text."""
    for twin in (TORCH(), MLX()):
        runs = Runs(twin, folder, "two prompts", FP32)
        runs.latents[1] = runs.latents[0]
        both = runs([0, 1])
        runs.latents = runs.latents[:1]
        condition = runs.model.condition([twin.array(text, "float32") for text in runs.texts], runs.shapes)
        one = runs.model.predict(twin.array(runs.latents, "float32"), (runs.modulation, STEP), condition)
        assert identical(twin.output(one).values, both)
