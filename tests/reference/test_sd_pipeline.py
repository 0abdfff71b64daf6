"""Stable Diffusion through the whole pipeline against diffusers: every kind, odd sizes, pictures to start from."""

from __future__ import annotations

import json
import math
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from support import oracle_sd
from support.opened_parts import open_part
from support.tiny_sd import DDIM, LEADING, TRAINED

import qwenimg
from qwenimg.common.base.errors import ModelError, NumericsError, UsageError
from qwenimg.common.numbers import noise
from qwenimg.common.pipeline.pipeline import Pipeline

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 after all steps, float32; measured at most 4e-6
PIXELS = 2  # of 255
PROMPT, NEGATIVE = "a photo of a red circle, a small dog", "a blue square"
PICTURE = np.random.default_rng(3).integers(0, 256, (72, 88, 3), np.uint8)
PICTURE[10:50, 20:70] = (200, 40, 90)
HOLE = np.zeros((72, 88), np.uint8)
HOLE[16:56, 24:60] = 255


def load(folder: Path, backend: str, precision: str = "fp32") -> Pipeline:
    return qwenimg.load(folder, backend=backend, precision=precision)


def compare(name: str, made: qwenimg.Result, expected: tuple[np.ndarray, np.ndarray]) -> None:
    latents, pixels = expected
    error = np.linalg.norm(made.latents - latents) / np.linalg.norm(latents)
    worst = np.abs(made.pixels.astype(float) - pixels[: made.pixels.shape[0], : made.pixels.shape[1]]).max()
    print(f"{name}: latents {error:.2e}, pixels {worst:.0f}, deviation of the picture {pixels.std():.0f}")
    assert pixels.std() > 10  # a picture that is flat or clipped would hide an error
    assert error <= LATENTS and worst <= PIXELS


CLASSES = {"sd15": "StableDiffusionPipeline", "sd21": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("guidance", "rescale"), [(1.0, 0.0), (5.0, 0.0), (7.5, 0.7)])
@pytest.mark.sample(1)
def test_text_to_image(folders, name: str, guidance: float, rescale: float) -> None:
    initial = noise.normal((1, 4, 9, 11), 7)
    negative = NEGATIVE if guidance > 1 else None
    asked = {"guidance_scale": guidance, "negative_prompt": negative, "guidance_rescale": rescale}
    expected = oracle_sd.generate(
        folders[name], CLASSES[name], prompt=PROMPT, width=88, height=72, num_inference_steps=4,
        latents=torch.from_numpy(initial), **asked,
    )  # fmt: skip
    for backend in BACKENDS:
        made = load(folders[name], backend)(
            PROMPT, negative_prompt=negative, width=88, height=72, steps=4, guidance=guidance, latents=initial,
            guidance_rescale=rescale,
        )  # fmt: skip
        compare(f"{name} {backend} guidance {guidance:g}", made, expected)


@pytest.mark.sample(0)
def test_defaults_and_the_empty_negative_prompt_of_sdxl(folders) -> None:
    """Without a negative prompt SDXL takes zeros; sizes and seeds are the reference's."""
    expected = oracle_sd.generate(folders["sdxl"], CLASSES["sdxl"], seed=5, prompt=PROMPT, num_inference_steps=4)
    for backend in BACKENDS:
        made = load(folders["sdxl"], backend)(PROMPT, steps=4, seed=5)
        assert made.pixels.shape == (64, 64, 3) and made.recipe["guidance"] == 5.0
        compare(f"sdxl {backend}", made, expected)


def test_an_aspect_keeps_the_area(folders) -> None:
    """Of a model that is not Qwen-Image, whose trained sizes would be far off."""
    assert load(folders["sdxl"], "cpu").defaults.size(Fraction(16, 9)) == (80, 48)  # instead of 64 x 64


@pytest.mark.sample(0)
def test_sinusoids_of_another_order(folders, tmp_path: Path) -> None:
    """Sines first and the last angle 1 / 10000: of SDXL's sizes as well as of the time. They are made in common/."""
    folder = tmp_path / "sdxl"
    shutil.copytree(folders["sdxl"], folder)
    path = folder / "unet" / "config.json"
    changed = json.loads(path.read_text()) | {"flip_sin_to_cos": False, "freq_shift": 1}
    path.write_text(json.dumps(changed))
    expected = oracle_sd.generate(folder, CLASSES["sdxl"], seed=5, prompt=PROMPT, num_inference_steps=3)
    compare("sdxl, sines first", load(folder, "cpu")(PROMPT, steps=3, seed=5), expected)


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
@pytest.mark.sample(0)
def test_clip_skip(folders, name: str) -> None:
    expected = oracle_sd.generate(
        folders[name], CLASSES[name], seed=2, prompt=PROMPT, num_inference_steps=3, clip_skip=1, guidance_scale=1.0
    )
    for backend in BACKENDS:
        pipe = load(folders[name], backend)
        made = pipe(PROMPT, steps=3, seed=2, guidance=1.0, clip_skip=1)
        compare(f"{name} {backend} clip-skip 1", made, expected)
        plain = pipe(PROMPT, steps=3, seed=2, guidance=1.0)
        assert np.abs(plain.latents - made.latents).max() > 0.01


IMG2IMG = {
    "sd21": "StableDiffusionImg2ImgPipeline",
    "sdxl": "StableDiffusionXLImg2ImgPipeline",
    "refiner": "StableDiffusionXLImg2ImgPipeline",
}


@pytest.mark.parametrize("name", IMG2IMG)
@pytest.mark.parametrize("strength", [0.35, 1.0])
@pytest.mark.sample(0)
def test_image_to_image(folders, name: str, strength: float) -> None:
    asked = {"strength": strength, "guidance_scale": 4.0, "negative_prompt": NEGATIVE}
    expected = oracle_sd.generate(
        folders[name], IMG2IMG[name], seed=9, prompt=PROMPT, image=PICTURE, num_inference_steps=6, **asked
    )
    for backend in BACKENDS:
        made = load(folders[name], backend)(
            PROMPT, negative_prompt=NEGATIVE, image=PICTURE, strength=strength, steps=6, guidance=4.0, seed=9
        )
        compare(f"{name} {backend} strength {strength:g}", made, expected)
        assert made.pixels.shape == PICTURE.shape


def test_one_side_keeps_the_proportions_of_the_picture(folders) -> None:
    pipe = load(folders["sd21"], "cpu")
    asked = pipe.check(PROMPT, image=PICTURE, height=36)
    assert (asked.width, asked.height) == (44, 36)
    for wrong in ({"width": 0}, {"width": "wide"}, {"height": 10**9}):
        with pytest.raises(UsageError, match=r"width|height|size"):
            pipe.check(PROMPT, image=PICTURE, **wrong)


@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.parametrize("name", ["sd21", "inpaint"])
@pytest.mark.sample(0)
def test_inpainting(folders, name: str, strength: float) -> None:
    """With a model of 9 channels, and by blending latents with one of 4."""
    asked = {"strength": strength, "guidance_scale": 4.0, "negative_prompt": NEGATIVE}
    expected = oracle_sd.generate(
        folders[name], "StableDiffusionInpaintPipeline", seed=9, prompt=PROMPT, image=PICTURE, mask_image=HOLE,
        height=72, width=88, num_inference_steps=5, **asked,
    )  # fmt: skip
    for backend in BACKENDS:
        made = load(folders[name], backend)(
            PROMPT, negative_prompt=NEGATIVE, image=PICTURE, mask=HOLE, strength=strength, steps=5, guidance=4.0, seed=9
        )
        compare(f"{name} {backend} inpaint {strength:g}", made, expected)


@pytest.mark.sample(0)
def test_base_and_refiner(folders) -> None:
    base = oracle_sd.pipeline(folders["sdxl"], "StableDiffusionXLPipeline")
    asked = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "num_inference_steps": 10, "guidance_scale": 4.0}
    half = base(**asked, denoising_end=0.6, output_type="latent", generator=torch.Generator().manual_seed(4)).images
    expected = oracle_sd.generate(
        folders["refiner"], "StableDiffusionXLImg2ImgPipeline", image=half, denoising_start=0.6, **asked
    )
    for backend in BACKENDS:
        pipe = qwenimg.load(folders["sdxl"], backend=backend, precision="fp32", refiner=folders["refiner"])
        made = pipe(PROMPT, negative_prompt=NEGATIVE, steps=10, guidance=4.0, seed=4, refine_at=0.6)
        compare(f"sdxl + refiner {backend}", made, expected)


SCHEDULERS = {
    "ddim": ("DDIMScheduler", DDIM),
    "euler": ("EulerDiscreteScheduler", LEADING),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", TRAINED),
    "heun": ("HeunDiscreteScheduler", TRAINED),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", TRAINED | {"use_karras_sigmas": True}),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", TRAINED | {"algorithm_type": "sde-dpmsolver++"}),
    "unipc": ("UniPCMultistepScheduler", TRAINED),
    "lcm": ("LCMScheduler", TRAINED),
    "ddim-zero-snr": ("DDIMScheduler", DDIM | {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True,
                                                  "prediction_type": "v_prediction"}),
}  # fmt: skip


@pytest.mark.parametrize("sampler", SCHEDULERS)
@pytest.mark.sample(0)
def test_the_folders_own_scheduler(folders, sampler: str, tmp_path: Path) -> None:
    """The schedule and the sampler that scheduler_config.json names, noise and all, through the pipeline."""
    import diffusers

    class_name, config = SCHEDULERS[sampler]
    folder = tmp_path / "model"
    shutil.copytree(folders["sd15"], folder)
    shutil.rmtree(folder / "scheduler")
    getattr(diffusers, class_name)(**config).save_pretrained(folder / "scheduler")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("PNDMScheduler", class_name))
    asked = {"prompt": PROMPT, "num_inference_steps": 5, "guidance_scale": 3.0, "width": 72, "height": 40}
    expected = oracle_sd.generate(folder, CLASSES["sd15"], seed=3, **asked)
    for backend in BACKENDS:
        made = load(folder, backend)(PROMPT, steps=5, guidance=3.0, seed=3, width=72, height=40)
        compare(f"{sampler} {backend}", made, expected)
    oracle_sd.pipeline.cache_clear()


# What is asked for


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_long_prompts_go_in_chunks(folders, backend: str) -> None:
    pipe = load(folders["sd15"], backend)
    long = "a red circle on a small dog, " * 20
    first, second = (pipe(long + end, steps=2, seed=1, width=64, height=64) for end in ("cat", "horse"))
    assert first.shapes["text"] == "[2, 231, 60]"
    assert np.abs(first.latents - second.latents).max() > 1e-3  # the last word, far beyond 77 tokens, is seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_prompts_of_which_the_tokenizers_need_unequal_chunks(folders, backend: str) -> None:
    """SDXL's second tokenizer makes one token of each "!", the first one of each "!!"."""
    from transformers import CLIPTokenizer

    prompt = "!! " * 60
    tokenizers = [CLIPTokenizer.from_pretrained(folders["sdxl"] / name) for name in ("tokenizer", "tokenizer_2")]
    counts = [math.ceil(len(one(prompt, add_special_tokens=False).input_ids) / 75) for one in tokenizers]
    assert counts == [1, 2]
    pipe = load(folders["sdxl"], backend)
    made = pipe(prompt, steps=2, seed=1)
    encoded = {text: [len(part) for part in states[:-1]] for (text, *_), states in pipe.model.base.texts._kept.items()}
    print(made.shapes["text"], encoded.values())
    assert encoded[prompt] == [max(counts)] * 2 and encoded[""] == [1, 1]
    assert made.shapes["text"] == f"[2, {77 * max(counts)}, 140]"
    assert made.pixels.shape == (64, 64, 3) and made.pixels.std() > 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_half_precision_stays_near(folders, backend: str) -> None:
    asked = {"steps": 2, "seed": 1, "width": 64, "height": 64, "guidance": 3.0}
    exact = load(folders["sdxl"], backend)(PROMPT, **asked).latents
    for precision, most in (("bf16", 0.2), ("fp16", 0.02)):
        made = load(folders["sdxl"], backend, precision)(PROMPT, **asked)
        error = np.linalg.norm(made.latents - exact) / np.linalg.norm(exact)
        print(f"{backend} {precision}: {error:.2e}")
        assert 1e-5 < error < most


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sampler": "eulr"}, "euler"),
        ({"schedule": "karas"}, "karras"),
        ({"image": PICTURE, "strength": 0.05, "steps": 4}, "leaves none"),
        ({"mask": HOLE}, "needs the image"),
        ({"clip_skip": 11}, "clip-skip"),
        ({"width": 0}, "0"),
    ],
)
def test_bad_requests_are_one_line(folders, asked: dict, message: str) -> None:
    pipe = load(folders["sd15"], "cpu")
    with pytest.raises(UsageError) as caught:
        list(pipe.stream(PROMPT, **({"steps": 2} | asked)))
    print(caught.value)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_finite_step_names_the_place(folders, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = load(folders["sd15"], backend)
    conv = open_part(pipe, "unet").model.down_blocks[1].resnets[0].conv1
    original = type(conv).__call__

    def spoiled(self, x):
        y = original(self, x)
        return y * float("inf") if self is conv else y

    monkeypatch.setattr(type(conv), "__call__", spoiled)
    with pytest.raises(NumericsError, match=r"unet, step 1: .*down_blocks\.1"):
        pipe(PROMPT, steps=2, width=64, height=64, seed=0)


RESNET = '"resnet_time_scale_shift": "default"'


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("unet/config.json", '"cross_attention_dim": 60', '"cross_attention_dim": 64', "shape|channels"),
        ("unet/config.json", RESNET, RESNET.replace("default", "scale_shift"), "resnet"),
        ("scheduler/scheduler_config.json", "scaled_linear", "sigmoid", "beta_schedule"),
        ("model_index.json", "StableDiffusionPipeline", "StableDiffusionControlNetPipeline", "not supported"),
    ],
)
def test_bad_folders_are_one_line(folders, tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["sd15"], folder)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    with pytest.raises(ModelError, match=message) as caught:
        load(folder, "cpu")
    print(caught.value)
    assert "\n" not in str(caught.value)
