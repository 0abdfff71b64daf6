"""`qwenimg.diffusers` against diffusers: the same script, with the classes of the one and of the other."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
import warnings
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL import Image
from safetensors.torch import save_file
from support import oracle, oracle_edit, oracle_flux, oracle_flux2, oracle_qwen21, oracle_sd, oracle_sd3, oracle_zimage
from support.processes import ENVIRONMENT

import qwenimg.diffusers
from qwenimg import QwenimgError, UsageError
from qwenimg.common.families.flux import references
from qwenimg.diffusers import keywords, pictures, pipelines

BACKENDS = ("cpu", "mlx")
PIXELS = 2  # of 255: a value on a rounding edge may go either way
PICTURE = np.random.default_rng(3).integers(0, 256, (48, 80, 3), np.uint8)
PICTURE[10:40, 20:60] = (200, 40, 90)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[:, 32:] = 255
SIZE = {"width": 80, "height": 48}
FROM = {"image": Image.fromarray(PICTURE)}
LARGER = Image.fromarray(np.tile(PICTURE, (2, 1, 1))[:75, :70])  # 70 x 75: not in whole latents
PART = FROM | {"mask_image": Image.fromarray(HOLE)}
PROMPT = "a photo of a red circle, a small dog"

# class, the folder's kind, keywords
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("QwenImagePipeline", "qwen", SIZE | {"negative_prompt": "blue", "true_cfg_scale": 3.0}),
    ("QwenImagePipeline", "qwen", SIZE | {"true_cfg_scale": 3.0}),
    ("QwenImageEditPlusPipeline", "qwen-2511", SIZE | FROM | {"negative_prompt": " "}),
    ("QwenImage21Pipeline", "qwen21", {"width": 64, "height": 64}),
    ("ZImagePipeline", "z-image", SIZE | {"guidance_scale": 0.0}),
    ("ZImagePipeline", "z-image", SIZE | {"guidance_scale": 2.0, "cfg_normalization": True}),
    ("ZImageImg2ImgPipeline", "z-image", SIZE | FROM | {"guidance_scale": 0.0}),
    ("FluxPipeline", "dev", SIZE | {"guidance_scale": 2.0}),
    ("FluxPipeline", "schnell", SIZE | {"max_sequence_length": 256, "negative_prompt": "x", "true_cfg_scale": 2.0}),
    ("FluxImg2ImgPipeline", "dev", SIZE | FROM),
    ("FluxFillPipeline", "fill", SIZE | PART),
    ("Flux2KleinPipeline", "flux2-klein", SIZE | {"guidance_scale": 1.0}),
    ("Flux2KleinPipeline", "flux2-klein", {"image": LARGER, "guidance_scale": 1.0}),
    ("Flux2KleinPipeline", "flux2-base", SIZE | {}),
    ("StableDiffusionPipeline", "sd15", SIZE | {"negative_prompt": "blue"}),
    ("StableDiffusionPipeline", "sd15", SIZE | {"guidance_scale": 1.0, "clip_skip": 1}),
    ("StableDiffusionImg2ImgPipeline", "sd21", FROM | {"negative_prompt": "blue"}),
    ("StableDiffusionInpaintPipeline", "inpaint", SIZE | PART),
    ("StableDiffusionXLPipeline", "sdxl", {}),
    ("StableDiffusionXLPipeline", "sdxl", SIZE | {"negative_prompt": ""}),
    ("StableDiffusionXLImg2ImgPipeline", "sdxl", FROM | {"strength": 0.6}),
    ("StableDiffusion3Pipeline", "medium", SIZE | {"skip_guidance_layers": [0], "num_inference_steps": 5}),
    ("StableDiffusion3Img2ImgPipeline", "medium", SIZE | FROM),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tiny: dict[str, Path], tiny_flux: dict[str, Path], tiny_sd3: dict[str, Path]) -> dict[str, Path]:
    return tiny | tiny_flux | tiny_sd3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle_edit.make_pictures_small(monkeypatch)


@cache
def theirs(name: str, folder: Path) -> Any:
    """diffusers' pipeline, with its known defects worked around by the oracle of the family."""
    if name == "QwenImage21Pipeline":
        return oracle_qwen21.pipeline(folder)
    if name.startswith("QwenImageEdit"):
        return oracle_edit.pipeline(folder)
    if name.startswith("QwenImage"):
        return oracle.pipeline(folder)
    if name.startswith("ZImage"):
        return oracle_zimage.pipeline(folder, name.removeprefix("ZImage").removesuffix("Pipeline"))
    if name.startswith("Flux2"):
        return oracle_flux2.pipeline(folder)
    if name.startswith("Flux"):
        return oracle_flux.pipeline(
            folder, {"FluxImg2ImgPipeline": "image", "FluxFillPipeline": "fill"}.get(name, "text")
        )
    if name.startswith("StableDiffusion3"):
        return oracle_sd3.pipeline(folder, "Img2Img" if "Img2Img" in name else "")
    return oracle_sd.pipeline(folder, name)


def opened(name: str, folder: Path, backend: str = "cpu", **asked: Any) -> Any:
    return getattr(qwenimg.diffusers, name).from_pretrained(folder, torch_dtype=torch.float32, backend=backend, **asked)


def compare(title: str, ours: Any, expected: Any) -> None:
    expected = np.asarray(expected, np.float64)
    worst = np.abs(np.asarray(ours, np.float64) - expected).max() * 255
    print(f"{title}: {worst:.2f} of 255 (limit {PIXELS}), deviation of the picture {255 * expected.std():.0f}")
    assert np.asarray(ours).shape == expected.shape
    assert 255 * expected.std() > 10 and worst <= PIXELS + 0.01


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sample(1)
def test_a_script_draws_what_it_drew(places: dict[str, Path], case: tuple[str, str, dict[str, Any]]) -> None:
    name, kind, asked = case
    asked = {"prompt": PROMPT, "num_inference_steps": 3, "output_type": "np"} | asked
    expected = theirs(name, places[kind])(generator=torch.Generator().manual_seed(9), **asked).images
    for backend in BACKENDS:
        pipe = opened(name, places[kind], backend)
        made = pipe(generator=torch.Generator().manual_seed(9), **asked)
        compare(f"{name} {kind} {backend}", made.images, expected)
        pipe.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sample(0)
def test_float_pictures_are_taken_as_there(places: dict[str, Path]) -> None:
    """What output_type="np" returned, and diffusers' "pt", given back as image= and mask_image=."""
    asked = SIZE | {"prompt": PROMPT, "num_inference_steps": 3, "output_type": "np"}
    first = opened("StableDiffusionPipeline", places["sd15"])(generator=torch.Generator().manual_seed(1), **asked)
    floats = first.images
    tensor = torch.from_numpy(np.moveaxis(floats, -1, 1).copy())
    reference = theirs("StableDiffusionImg2ImgPipeline", places["sd21"])  # not PNDM, see oracle_sd
    again = {name: value for name, value in asked.items() if name not in ("width", "height")} | {"strength": 0.7}
    for backend in BACKENDS:
        pipe = opened("StableDiffusionImg2ImgPipeline", places["sd21"], backend)
        for title, image in (("np", floats), ("pt", tensor)):
            expected = reference(generator=torch.Generator().manual_seed(9), image=image, **again).images
            made = pipe(generator=torch.Generator().manual_seed(9), image=image, **again)
            compare(f"{title} {backend}", made.images, expected)
        same = (floats, floats[0], [floats[0]], tensor[0], tensor.double(), first.results[0].pixels)
        alike = [pipe(generator=torch.Generator().manual_seed(9), image=one, **again).images for one in same]
        assert all(np.array_equal(one, alike[0]) for one in alike)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.full((8, 8, 3), 2.0), "from 2 to 2"), (np.full((8, 8, 3), -1.0), "0 to 1"),
        (np.full((8, 8, 3), np.nan), "0 to 1"), (np.zeros((1, 1, 8, 8, 3)), "the shape"), (np.zeros(3), "the shape"),
        (np.zeros((0, 8, 3)), "the shape"), (torch.zeros(0), "the shape"), (torch.full((3, 8, 8), torch.inf), "0 to 1"),
    ],
)  # fmt: skip
def test_floats_that_are_no_picture(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        pictures.in_8_bits("image", value)
    assert len(str(caught.value)) <= 300


def test_float_masks_and_several_pictures() -> None:
    mask = np.zeros((1, 4, 5, 1), np.float32)
    for one in (mask, mask[0], mask[0, ..., 0], torch.zeros(1, 1, 4, 5), torch.zeros(4, 5), torch.zeros(1, 4, 5)):
        made = pictures.in_8_bits("mask_image", one)
        assert made.shape == (4, 5) and made.dtype == np.uint8
    several = pictures.in_8_bits("image", torch.rand(2, 3, 4, 5, dtype=torch.bfloat16))
    assert [one.shape for one in several] == [(4, 5, 3)] * 2
    assert pictures.in_8_bits("image", "a.png") == "a.png" and pictures.in_8_bits("image", None) is None


@pytest.mark.sample(0)
def test_kontext_sees_its_picture_as_there(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """At small sizes in place of a megapixel, on both sides."""
    sizes = ((48, 96), (64, 80), (64, 64), (80, 64), (96, 48))
    monkeypatch.setattr(references, "SIZES", sizes)
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
    asked = SIZE | FROM | {"prompt": "make it red", "num_inference_steps": 2, "output_type": "np"}
    reference = oracle_flux.pipeline(places["kontext"], "kontext")
    expected = reference(generator=torch.Generator().manual_seed(2), max_area=80 * 48, **asked).images
    for backend in BACKENDS:
        pipe = opened("FluxKontextPipeline", places["kontext"], backend)
        compare(backend, pipe(generator=torch.Generator().manual_seed(2), **asked).images, expected)


@pytest.mark.sample(0)
def test_layers_are_a_list_of_each_picture(places: dict[str, Path]) -> None:
    """Its numbers are compared with diffusers' in test_qwen_layered_pipeline; here, what the keywords become."""
    pipe = opened("QwenImageLayeredPipeline", places["qwen-layered"])
    asked: dict[str, Any] = {"width": 48, "height": 32, "layers": 2}
    made = pipe(FROM["image"], "a ring", true_cfg_scale=1.0, num_inference_steps=2, generator=7, **asked)
    [layers] = made.images
    own = pipe.pipeline("a ring", image=FROM["image"], steps=2, guidance=1.0, seed=7, **asked)
    assert [one.mode for one in layers] == ["RGBA"] * 2
    assert all(np.array_equal(a, b) for a, b in zip(layers, own.layers, strict=True))


# The table


@pytest.mark.parametrize("name", pipelines.ROWS)
def test_defaults_are_those_of_diffusers(name: str) -> None:
    row = pipelines.ROWS[name]
    parameters = inspect.signature(getattr(diffusers, name).__call__).parameters
    usual = {key: one.default for key, one in parameters.items()}
    assert tuple(parameters)[1 : 1 + len(row.first)] == row.first
    assert (row.steps, row.true_cfg, row.strength) == tuple(
        usual.get(key) for key in ("num_inference_steps", "true_cfg_scale", "strength")
    )
    assert row.guidance == usual.get("guidance_scale")
    assert row.tokens == usual.get("max_sequence_length", 512)
    assert row.negative == ("negative_prompt" in usual)
    for key in parameters:  # each is mapped or refused with a reason, none is unknown
        if key not in ("self", "kwargs"):
            keywords.named(name, row, (), {key: 1})


@pytest.mark.parametrize("name", pipelines.ROWS)
def test_a_default_that_is_written_out_changes_nothing(name: str) -> None:
    parameters = inspect.signature(getattr(diffusers, name).__call__).parameters
    usual = {key: one.default for key, one in parameters.items() if one.default not in (None, inspect.Parameter.empty)}
    row = pipelines.ROWS[name]
    written = keywords.options(name, row, keywords.named(name, row, (), usual), row.tokens)
    assert keywords.options(name, row, {}, row.tokens).items() <= written.items()


# Noise


@pytest.mark.sample(0)
def test_generators_that_have_drawn_and_several_pictures(places: dict[str, Path]) -> None:
    """A script's loop over one generator, and several pictures of several prompts."""
    asked = SIZE | {"num_inference_steps": 2, "output_type": "np", "true_cfg_scale": 1.0}
    reference, pipe = theirs("QwenImagePipeline", places["qwen"]), opened("QwenImagePipeline", places["qwen"])
    first, second = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    for turn in ("fresh", "used"):
        expected = reference(prompt=PROMPT, generator=first, **asked).images
        compare(turn, pipe(prompt=PROMPT, generator=second, **asked).images, expected)
    both = [pipe(PROMPT, generator=g, **asked).images for g in map(torch.Generator().manual_seed, (1, 2))]
    lists = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    made = pipe([PROMPT], num_images_per_prompt=2, generator=lists, **asked)
    assert np.array_equal(made.images, np.concatenate(both)) and [one.seed for one in made.results] == [1, 2]
    sd, ours = theirs("StableDiffusionPipeline", places["sd15"]), opened("StableDiffusionPipeline", places["sd15"])
    asked = SIZE | {"num_inference_steps": 2, "output_type": "np", "guidance_scale": 3.0}
    asked |= {"prompt": ["a cat", "a dog"], "negative_prompt": ["red", "blue"], "num_images_per_prompt": 2}
    expected = sd(generator=torch.Generator().manual_seed(4), **asked).images
    compare("2 x 2", ours(generator=torch.Generator().manual_seed(4), **asked).images, expected)


@pytest.mark.sample(0)
def test_latents_of_diffusers_are_taken(places: dict[str, Path]) -> None:
    asked = SIZE | {"prompt": PROMPT, "num_inference_steps": 2, "output_type": "np"}
    for name, kind, shape in (
        ("FluxPipeline", "dev", (1, 15, 64)),
        ("QwenImagePipeline", "qwen", (1, 15, 64)),
        ("ZImagePipeline", "z-image", (1, 16, 6, 10)),
    ):
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        expected = theirs(name, places[kind])(latents=noise, **asked).images
        compare(name, opened(name, places[kind])(latents=noise, **asked).images, expected)


def test_noise_that_cannot_be_repeated_is_refused(places: dict[str, Path]) -> None:
    pipe = opened("StableDiffusionImg2ImgPipeline", places["sd21"])
    asked = FROM | {"prompt": PROMPT, "num_inference_steps": 4}
    with pytest.raises(UsageError, match="one generator for several pictures"):
        pipe(num_images_per_prompt=2, generator=torch.Generator().manual_seed(1), **asked)
    with pytest.raises(UsageError, match="3 for 1 pictures"):
        pipe(generator=[torch.Generator()] * 3, **asked)
    with pytest.raises(UsageError, match="generator is"):
        pipe(generator="7", **asked)


# LoRAs and schedulers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sd15", "z-image"])
@pytest.mark.sample(0)
def test_loras_are_those_of_diffusers(places: dict[str, Path], tmp_path: Path, kind: str) -> None:
    name, part = {"sd15": ("StableDiffusionPipeline", "unet"), "z-image": ("ZImagePipeline", "transformer")}[kind]
    reference = getattr(diffusers, name).from_pretrained(places[kind])
    reference.set_progress_bar_config(disable=True)
    for seed in (1, 2):
        tensors = {}
        for path, layer in getattr(reference, part).named_modules():
            if path.endswith("to_q"):
                generator = torch.Generator().manual_seed(seed)
                out, into = layer.weight.shape
                tensors[f"{part}.{path}.lora_A.weight"] = torch.randn((2, into), generator=generator) * 0.3
                tensors[f"{part}.{path}.lora_B.weight"] = torch.randn((out, 2), generator=generator) * 0.3
        save_file(tensors, tmp_path / f"{seed}.safetensors")
    ours = [opened(name, places[kind], backend) for backend in BACKENDS]

    def check(title: str) -> np.ndarray:
        asked = SIZE | {"prompt": PROMPT, "num_inference_steps": 2, "guidance_scale": 0.0, "output_type": "np"}
        expected = reference(generator=torch.Generator().manual_seed(1), **asked).images
        for pipe in ours:
            compare(title, pipe(generator=torch.Generator().manual_seed(1), **asked).images, expected)
        return np.asarray(expected)

    seen = [check("none")]
    for pipe in (reference, *ours):
        pipe.load_lora_weights(tmp_path, weight_name="1.safetensors", adapter_name="one")
    seen.append(check("one"))
    for pipe in (reference, *ours):
        pipe.load_lora_weights(tmp_path / "2.safetensors", adapter_name="two")
        assert pipe.get_active_adapters() == ["two"]
    seen.append(check("two"))
    for pipe in (reference, *ours):
        pipe.set_adapters(["one", "two"], adapter_weights=[0.5, -0.7])
    seen.append(check("both"))
    for pipe in (reference, *ours):
        pipe.set_adapters("two")
        pipe.fuse_lora(lora_scale=0.6)
        pipe.unload_lora_weights()
    seen.append(check("fused"))
    assert min(np.abs(a - b).max() for a, b in pairwise(seen)) > 8 / 255


SCHEDULERS = [
    ("EulerDiscreteScheduler", {}),
    ("DDIMScheduler", {}),
    ("DPMSolverMultistepScheduler", {}),
    ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
    ("EulerAncestralDiscreteScheduler", {}),
    ("UniPCMultistepScheduler", {}),
    ("HeunDiscreteScheduler", {}),
    ("LCMScheduler", {}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("scheduler", "changes"), SCHEDULERS)
@pytest.mark.sample(0)
def test_schedulers_are_those_of_diffusers(places: dict[str, Path], scheduler: str, changes: dict[str, Any]) -> None:
    """A class of diffusers, and the one here of that name, with the model's configuration and changes of it."""
    asked = SIZE | {"prompt": PROMPT, "num_inference_steps": 4, "guidance_scale": 3.0, "output_type": "np"}
    reference = diffusers.StableDiffusionPipeline.from_pretrained(places["sd15"])
    reference.set_progress_bar_config(disable=True)
    kind = getattr(diffusers, scheduler)
    reference.scheduler = kind.from_config(reference.scheduler.config, clip_sample=False, **changes)
    expected = reference(generator=torch.Generator().manual_seed(1), **asked).images
    for made in (kind, getattr(qwenimg.diffusers, scheduler)):
        pipe = opened("StableDiffusionPipeline", places["sd15"])
        pipe.scheduler = made.from_config(pipe.scheduler.config, **changes)
        compare(f"{made}", pipe(generator=torch.Generator().manual_seed(1), **asked).images, expected)


@pytest.mark.sample(0)
def test_schedulers_that_are_not_here_are_refused(places: dict[str, Path]) -> None:
    sd, flux = opened("StableDiffusionPipeline", places["sd15"]), opened("FluxPipeline", places["dev"])
    euler, flow = qwenimg.diffusers.EulerDiscreteScheduler, qwenimg.diffusers.FlowMatchEulerDiscreteScheduler
    for pipe, wrong, told in (
        (sd, diffusers.EDMEulerScheduler(), "EDMEulerScheduler is not built"),
        (sd, euler.from_config(sd.scheduler.config, prediction_type="v_prediction"), "prediction_type"),
        (sd, euler.from_config(sd.scheduler.config, timestep_spacing="linspace"), "timestep_spacing"),
        (sd, flow.from_config({}), "not built for this model"),
        (sd, diffusers.DDIMScheduler(), "clip_sample=True"),
        (sd, "euler", "give X.from_config"),
        (flux, euler.from_config(flux.scheduler.config), "sampler="),
        (flux, flow.from_config(flux.scheduler.config, shift=7.0), "shift=7.0 is not the model's"),
    ):
        with pytest.raises(UsageError, match=told):
            pipe.scheduler = wrong
    flux.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(flux.scheduler.config)
    pipe = opened("QwenImagePipeline", places["qwen"])
    three = {"base_shift": math.log(3), "max_shift": math.log(3), "shift_terminal": None}
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, **three)
    made = pipe(PROMPT, num_inference_steps=2, **SIZE, generator=3)
    assert made.results[0].recipe["schedule"] == "lightning"
    sd.scheduler = euler.from_config(sd.scheduler.config, use_karras_sigmas=True)
    with pytest.warns(UserWarning, match="k-diffusion"):
        made = sd(PROMPT, num_inference_steps=2, **SIZE)
    assert (made.results[0].recipe["sampler"], made.results[0].recipe["schedule"]) == ("euler", "karras")


# What changes nothing, and what is refused


def test_methods_without_effect_say_so_once(places: dict[str, Path]) -> None:
    pipe = opened("StableDiffusionPipeline", places["sd15"])
    for call in (
        lambda: pipe.to("cuda"),
        pipe.enable_model_cpu_offload,
        pipe.enable_attention_slicing,
        pipe.enable_vae_tiling,
        lambda: pipe.vae.enable_slicing(),
        lambda: pipe.unet.to(memory_format=torch.channels_last) and pipe.enable_sequential_cpu_offload(),
        lambda: pipe.set_progress_bar_config(disable=True),
    ):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            call()
            call()
        assert len(told) == 1 and "changes nothing here: " in str(told[0].message), told
    assert pipe.to("cpu") is pipe


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_embeds": torch.zeros(1, 77, 8)}, "prompt_embeds="),
    ({"sigmas": [1.0, 0.5]}, "schedule"),
    ({"ip_adapter_image": FROM["image"]}, "an IP-Adapter is control="),
    ({"eta": 0.5}, "sampler"),
    ({"output_type": "latent"}, "latents"),
    ({"output_type": "pt"}, "'pil' or 'np'"),
    ({"num_images_per_prompt": 0}, "num_images_per_prompt is 0"),
    ({"prompt": []}, "prompt is"),
    ({"prompt": ["a", 7]}, "prompt is"),
    ({"prompt": ["a", "b"], "negative_prompt": ["x"]}, "1 negative prompts for 2"),
    ({"image": FROM["image"]}, "takes no image"),
    ({"true_cfg_scale": 3.0}, "give guidance_scale"),
    ({"guidance_scale": float("nan")}, "guidance"),
    ({"guidance_scale": "high"}, "guidance_scale"),
    ({"cross_attention_kwargs": {"gligen": {}}}, "only {'scale': x}"),
    ({"callback_on_step_end": 7}, "expected a function"),
    ({"callback_on_step_end_tensor_inputs": ["prompt_embeds"]}, "only 'latents'"),
    ({"callback": print}, "callback_on_step_end"),
    ({"num_inference_step": 3}, "did you mean"),
    ({"width": 10**12}, "outside 1 to 16384 pixels"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"latents": torch.full((1, 4, 6, 10), float("nan"))}, "non-finite"),
    ({"latents": torch.zeros(1, 4, 2, 2)}, "do not fit"),
]


@pytest.mark.parametrize(("wrong", "told"), REFUSED, ids=lambda one: next(iter(one)) if isinstance(one, dict) else "")
def test_a_keyword_that_is_not_taken_is_named(shared_sd: Any, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(QwenimgError, match=re.escape(told)) as caught:
        shared_sd(**(SIZE | {"prompt": PROMPT, "num_inference_steps": 2} | wrong))
    assert len(str(caught.value)) <= 300 and str(caught.value).isprintable()


@pytest.fixture(scope="module")
def shared_sd(places: dict[str, Path]) -> Any:
    return opened("StableDiffusionPipeline", places["sd15"])


def test_opening_is_refused_in_one_line(places: dict[str, Path], tmp_path: Path) -> None:
    names = qwenimg.diffusers
    for name, place, asked, told in (
        ("FluxPipeline", places["sd15"], {}, "is another model; take StableDiffusionPipeline"),
        ("StableDiffusionPipeline", "https://x/y.safetensors", {}, "address is not opened"),
        ("StableDiffusionPipeline", 7, {}, "give a folder"),
        ("StableDiffusionPipeline", tmp_path / "none", {}, "none"),
        ("StableDiffusionPipeline", places["sd15"], {"torch_dtype": "float8"}, "torch_dtype is float8"),
        ("StableDiffusionPipeline", places["sd15"], {"quantization_config": object()}, "give quantize=8"),
        ("StableDiffusionPipeline", places["sd15"], {"vae": object()}, "give the folder or file"),
        ("StableDiffusionPipeline", places["sd15"], {"custom_pipeline": "lpw"}, "no code of a model"),
        ("StableDiffusionPipeline", places["sd15"], {"zzz": 1}, "zzz"),
    ):
        with pytest.raises(QwenimgError, match=re.escape(told)):
            getattr(names, name).from_pretrained(place, **{"backend": "cpu"} | asked)
    with pytest.raises(AttributeError, match="it has QwenImagePipeline"):
        names.WanPipeline  # noqa: B018
    for wrong, told in (
        ({"a": 1}, "state dict"), (7, "give a safetensors file"), ("a;b", "semicolon"),
    ):  # fmt: skip
        with pytest.raises(QwenimgError, match=told):
            opened("StableDiffusionPipeline", places["sd15"]).load_lora_weights(wrong)


@pytest.mark.sample(0)
def test_classes_that_take_any_model(places: dict[str, Path], tmp_path: Path) -> None:
    for auto, kind, expected in (
        ("DiffusionPipeline", "sdxl", "StableDiffusionXLPipeline"),
        ("DiffusionPipeline", "z-image", "ZImagePipeline"),
        ("DiffusionPipeline", "qwen-2511", "QwenImageEditPlusPipeline"),
        ("AutoPipelineForText2Image", "dev", "FluxPipeline"),
        ("AutoPipelineForImage2Image", "sdxl", "StableDiffusionXLImg2ImgPipeline"),
        ("AutoPipelineForInpainting", "medium", "StableDiffusion3InpaintPipeline"),
        ("AutoPipelineForInpainting", "inpaint", "StableDiffusionInpaintPipeline"),
    ):
        made = opened(auto, places[kind])
        assert type(made).__name__ == expected == made.name
        made.close()
    text = opened("AutoPipelineForText2Image", places["sdxl"])
    start = qwenimg.diffusers.AutoPipelineForImage2Image.from_pipe(text)
    assert start.name == "StableDiffusionXLImg2ImgPipeline" and start.pipeline is text.pipeline
    drawn = start(PROMPT, image=FROM["image"], num_inference_steps=4, generator=7)
    assert drawn.images[0].size == (80, 48) and drawn[0] is drawn.images
    assert start(PROMPT, image=FROM["image"], num_inference_steps=4, return_dict=False)[0][0].size == (80, 48)


@pytest.mark.sample(0)
def test_a_callback_sees_each_step(shared_sd: Any) -> None:
    seen: list[Any] = []

    def look(pipe: Any, index: int, level: float, values: dict[str, Any]) -> dict[str, Any]:
        seen.append((index, values["latents"].shape))
        return values

    asked = SIZE | {"prompt": PROMPT, "num_inference_steps": 3, "generator": 7}
    plain = shared_sd(**asked)
    assert shared_sd(callback_on_step_end=look, **asked).images == plain.images
    assert [index for index, _ in seen][:3] == [0, 1, 2] and seen[0][1] == (1, 4, 6, 10)
    with pytest.raises(UsageError, match="only looks on"):
        shared_sd(callback_on_step_end=lambda p, i, t, values: {"latents": values["latents"] * 0}, **asked)

    def stop(pipe: Any, index: int, level: float, values: dict[str, Any]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        shared_sd(callback_on_step_end=stop, **asked)
    assert shared_sd(**asked).images == plain.images  # free again


@pytest.mark.sample(0)
def test_torch_is_not_imported_for_mlx(places: dict[str, Path]) -> None:
    code = (
        "import sys, warnings\nwarnings.simplefilter('ignore')\n"
        "from qwenimg.diffusers import StableDiffusionPipeline, EulerDiscreteScheduler\n"
        f"folder = {str(places['sd15'])!r}\n"
        "pipe = StableDiffusionPipeline.from_pretrained(folder, backend='mlx', torch_dtype='float32')\n"
        "pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)\n"
        "pipe.to('mps')\n"
        "pipe('a ring', num_inference_steps=1, width=64, height=64, generator=7).images[0]\n"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode == 0


def test_a_lora_that_is_not_here_is_refused_when_it_is_loaded(places: dict[str, Path], tmp_path: Path) -> None:
    """It was accepted, and then refused in every call, also after `unload_lora_weights`."""
    pipe = opened("StableDiffusionPipeline", places["sd15"])
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "none.safetensors", tmp_path / "empty"):
        with pytest.raises(QwenimgError):
            pipe.load_lora_weights(place)
    assert pipe.get_active_adapters() == [] and pipe.get_list_adapters() == {}


@pytest.mark.parametrize("latents", ["x", [1, 2], object(), np.zeros((2, 2))])
def test_latents_that_are_none(places: dict[str, Path], latents: object) -> None:
    with pytest.raises(UsageError, match="latents"):
        opened("StableDiffusionXLPipeline", places["sdxl"])("a", latents=latents)


def test_one_option_by_two_names(places: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="steps and num_inference_steps are one option"):
        opened("StableDiffusionPipeline", places["sd15"])("a", steps=2, num_inference_steps=3)
