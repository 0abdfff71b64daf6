"""The whole pipeline on both backends against diffusers in double precision, and faults planted between the models.

Layers times steps are the blocks that a latent passes; diffusers gets float64 sinusoids, as in `test_float64_twin.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from support import oracle
from support.exact_times import ExactTimes
from support.parity_recorded import identical
from support.parity_verdict import Verdict, judge
from support.tiny_model import DIT

import qwenimg
from qwenimg.common.networks.denoisers import qwen_conditioning
from qwenimg.common.numbers import noise, packing, rope
from qwenimg.common.parity.parity import Case, Output
from qwenimg.common.parts.vae import standardized
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.steps import plan as sampling_plan
from qwenimg.common.sampling.flow_match import FlowMatchConfig

BACKENDS = ("cpu", "mlx")
STEPS = 3  # with two, the terminal fixes both noise levels and a wrong shift does not show
PROMPT, NEGATIVE = "a red circle", "blurry, an ugly green square on the right"
INITIAL = noise.normal((1, 16, 6, 10), seed=7)

Plant = Callable[[pytest.MonkeyPatch, Pipeline], None]


@pytest.fixture(scope="module")
def exact(tiny_folder: Path) -> dict[float, np.ndarray]:
    """The final latents for each guidance."""
    pipe = oracle.pipeline(tiny_folder, torch.float64)
    pipe.transformer.time_text_embed.time_proj = ExactTimes()
    options = {"steps": STEPS, "dtype": torch.float64}
    return {
        1.0: oracle.generate(tiny_folder, PROMPT, INITIAL, negative_prompt=None, guidance=1.0, **options)[0],
        4.0: oracle.generate(tiny_folder, PROMPT, INITIAL, negative_prompt=NEGATIVE, guidance=4.0, **options)[0],
    }


def latents(pipe: Pipeline, exact: dict[float, np.ndarray], guidance: float) -> Verdict:
    """Our latents after all steps against diffusers', by the limits of one pass through as many blocks."""
    negative = NEGATIVE if guidance > 1 else None
    pipe.model.vae.decode = lambda latents: np.zeros((1, 3, 48, 80), np.float32)  # not looked at here
    options = {"width": 80, "height": 48, "steps": STEPS, "latents": INITIAL, "seed": 0}
    made = pipe(PROMPT, negative_prompt=negative, guidance=guidance, **options).latents
    case = Case(component="pipeline", dtype="float32", returned="float32", blocks=DIT["num_layers"] * STEPS)
    return judge(case, exact[guidance], {pipe.backend: Output(values=made, dtype=str(made.dtype))})


@pytest.fixture(scope="module")
def exact_pixels(tiny_folder: Path) -> np.ndarray:
    """What the VAE of diffusers makes of the latents in double, not clamped."""
    vae = AutoencoderKLQwenImage.from_pretrained(tiny_folder / "vae").double()
    statistics = (vae.config.latents_mean, vae.config.latents_std)
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in statistics)
    with torch.no_grad():
        z = torch.from_numpy(INITIAL).double() * std + mean
        return vae.decoder(vae.post_quant_conv(z[:, :, None]))[:, :, 0].numpy()


def pixels(pipe: Pipeline, exact: np.ndarray) -> Verdict:
    """Our pixels, before they become integers, against diffusers'."""
    made = pipe.model.vae.decode(INITIAL)
    case = Case(component="vae.decoder", dtype="float32", returned="float32", blocks=14)
    return judge(case, exact, {pipe.backend: Output(values=made, dtype=str(made.dtype))})


def load(folder: Path, backend: str) -> Pipeline:
    return qwenimg.load(folder, backend=backend, precision="fp32")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.sample(3)
def test_latents_equal_diffusers_in_double(tiny_folder, exact, backend: str, guidance: float, together: bool) -> None:
    pipe = load(tiny_folder, backend)
    pipe.model.batch_guidance = together
    verdict = latents(pipe, exact, guidance)
    print(verdict.row(f"guidance {guidance}"))
    assert verdict.ok, verdict.failures


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_equal_diffusers_in_double(tiny_folder: Path, exact_pixels, backend: str) -> None:
    verdict = pixels(load(tiny_folder, backend), exact_pixels)
    print(verdict.row())
    assert verdict.ok, verdict.failures


# Faults


def packing_order(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    """Tokens of (dy, dx, c) rather than (c, dy, dx)."""
    patch.setattr(packing, "pack", wrong_pack)
    patch.setattr(packing, "unpack", wrong_unpack)


def wrong_pack(x: np.ndarray) -> np.ndarray:
    B, C, h, w = x.shape
    return x.reshape(B, C, h // 2, 2, w // 2, 2).transpose(0, 2, 4, 3, 5, 1).reshape(B, h * w // 4, 4 * C)


def wrong_unpack(tokens: np.ndarray, h: int, w: int) -> np.ndarray:
    B, _, C = tokens.shape
    return tokens.reshape(B, h // 2, w // 2, 2, 2, C // 4).transpose(0, 5, 1, 3, 2, 4).reshape(B, C // 4, h, w)


def _reschedule(patch: pytest.MonkeyPatch, change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> None:
    original = sampling_plan.flow_schedule
    patch.setattr(sampling_plan, "flow_schedule", lambda *arguments: change(original(*arguments)))


def time_off_by_one(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    original = FlowMatchConfig.timestep
    sigmas = pipe.model.plan(pipe.check("x", width=80, height=48, steps=STEPS)).sigmas
    after = dict(zip(sigmas, (*sigmas[1:-1], sigmas[-2]), strict=False))
    patch.setattr(FlowMatchConfig, "timestep", lambda config, sigma: original(config, after[sigma]))


def sigma_off_by_one(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    _reschedule(patch, lambda sigmas: (sigmas[0], *sigmas[:-2], 0.0))


def no_terminal(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    pipe.model.schedule_config = replace(pipe.model.schedule_config, shift_terminal=None)


def shift_for_other_size(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    original = sampling_plan.flow_schedule
    patch.setattr(
        sampling_plan,
        "flow_schedule",
        lambda config, steps, tokens, *given: original(config, steps, 4 * tokens, *given),
    )


def template_one_token_off(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    template = pipe.model.texts.template
    patch.setattr(pipe.model.texts, "template", replace(template, dropped=template.dropped + 1))


def wrong_text_mask(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    pipe.model.batch_guidance = True
    patch.setattr(qwen_conditioning, "key_mask", lambda lengths, tokens: None)


def guidance_without_norm(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    patch.setattr(pipe.engine, "guide", lambda c, u, scale: u + scale * (c - u))


def branches_swapped(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    original = pipe.engine.guide
    patch.setattr(pipe.engine, "guide", lambda c, u, scale: original(u, c, scale))


def rows_and_columns_swapped(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    original = rope.image_positions
    patch.setattr(rope, "image_positions", lambda *arguments: original(*arguments)[:, [0, 2, 1]])


def text_from_zero(patch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    original = rope.text_positions
    patch.setattr(rope, "text_positions", lambda *arguments: original(*arguments) - original(*arguments)[0])


FAULTS = {
    packing_order: 1.0,
    time_off_by_one: 1.0,
    sigma_off_by_one: 1.0,
    no_terminal: 1.0,
    shift_for_other_size: 1.0,
    template_one_token_off: 1.0,
    rows_and_columns_swapped: 1.0,
    text_from_zero: 1.0,
    wrong_text_mask: 4.0,
    guidance_without_norm: 4.0,
    branches_swapped: 4.0,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
@pytest.mark.sample(3)
def test_fault_in_the_loop_is_caught(tiny_folder, exact, backend: str, plant: Plant, monkeypatch) -> None:
    pipe = load(tiny_folder, backend)
    plant(monkeypatch, pipe)
    verdict = latents(pipe, exact, FAULTS[plant])
    print(f"{plant.__name__:<26} {backend:<4} error / allowed: {verdict.worst:.3g}")
    assert not verdict.ok


STATISTICS = {
    "no deviation": lambda c: replace(c, latents_std=(1.0,) * c.z_dim),
    "divided by the deviation": lambda c: replace(c, latents_std=tuple(1 / v for v in c.latents_std)),
    "no mean": lambda c: replace(c, latents_mean=(0.0,) * c.z_dim),
    "mean subtracted": lambda c: replace(c, latents_mean=tuple(-v for v in c.latents_mean)),
    "channels reversed": lambda c: replace(c, latents_mean=c.latents_mean[::-1], latents_std=c.latents_std[::-1]),
    "one channel 1 % off": lambda c: replace(c, latents_std=(1.01 * c.latents_std[0], *c.latents_std[1:])),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", STATISTICS)
@pytest.mark.sample(3)
def test_wrong_vae_scale_is_caught(tiny_folder: Path, exact_pixels, backend: str, fault: str) -> None:
    pipe = load(tiny_folder, backend)
    config = STATISTICS[fault](pipe.model.vae.config)
    pipe.model.vae.statistics = standardized(config.latents_mean, config.latents_std)
    verdict = pixels(pipe, exact_pixels)
    print(f"{fault:<26} {backend:<4} error / allowed: {verdict.worst:.3g}")
    assert not verdict.ok


def test_packing_is_bit_exact_and_its_fault_is_not() -> None:
    theirs = QwenImagePipeline._pack_latents(torch.from_numpy(INITIAL), 1, 16, 6, 10).numpy()
    assert identical(packing.pack(INITIAL), np.ascontiguousarray(theirs))
    assert not identical(wrong_pack(INITIAL), np.ascontiguousarray(theirs))
    assert identical(wrong_unpack(wrong_pack(INITIAL), 6, 10), INITIAL), "wrong, but consistent"
