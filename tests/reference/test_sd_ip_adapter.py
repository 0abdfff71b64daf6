"""Stable Diffusion with pictures as prompts, by IP-Adapters, from pictures to pixels, on both backends, against
diffusers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import lora_cases, oracle_sd
from support.relative import relative
from support.tiny_controlnet import write_controlnet
from support.tiny_ip_adapter import KINDS, SIDE, nested, tensors, tiny_image_encoder, write_adapter
from support.tiny_sd import _SMALL, UNETS

import qwenimg
from qwenimg.common.pictures import patches

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 after all steps, float32
PIXELS = 2  # of 255: a value on a rounding edge may go either way
MOVES = 8  # levels of 255 by which a picture must move some pixel: a fault in it would show

RNG = np.random.default_rng(6)
ONE, TWO, START = (RNG.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((50, 31), (40, 90), (72, 88)))
LEFT = np.zeros((72, 88, 3), np.uint8)
LEFT[:, :40] = 255
SIZE = {"width": 88, "height": 72}
PROMPT, NEGATIVE = "a photo of a red circle, a small dog", "a blue square"
SEED = 7
BASES = ("sd15", "sdxl")
CLASSES = {"sd15": "StableDiffusion", "sdxl": "StableDiffusionXL"}


def processor(side: int) -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})


@pytest.mark.parametrize("size", [(224, 224), (31, 50), (500, 333), (333, 500), (225, 1001), (7, 900), (1024, 768)])
def test_the_processor_is_exact(size: tuple[int, int]) -> None:
    picture = np.random.default_rng(size[0]).integers(0, 256, (*size, 3), np.uint8)
    expected = processor(224)(Image.fromarray(picture), return_tensors="np").pixel_values[0]
    made = patches.centre_square(picture, 224).transpose(2, 0, 1)
    assert made.dtype == expected.dtype and (made == expected).all()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], Path]:
    """An adapter of each kind for each base, and a second one of the base kind."""
    folder = tmp_path_factory.mktemp("adapters")
    cases = [(base, kind, 41) for base in BASES for kind in KINDS] + [(base, "base", 42) for base in BASES]
    return {case: write_adapter(folder, *case) for case in cases}


def theirs(
    folder: Path, base: str, cases: list[tuple[str, int]], pictures: list[Any], *, scales: Any, ending: str = "",
    windows: list[tuple[float, float]] | None = None, masks: list[list[np.ndarray]] | None = None,
    lora: Path | None = None, faults: Any = None, net: Path | None = None, **asked: Any,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """diffusers' latents and pixels, with the adapters `cases`, each a kind and a seed."""
    import diffusers
    from diffusers.image_processor import IPAdapterMaskProcessor

    usual = oracle_sd.pipeline(folder, f"{CLASSES[base]}Pipeline")
    parts = {**usual.components, "unet": copy.deepcopy(usual.unet)}
    parts |= {"image_encoder": tiny_image_encoder(), "feature_extractor": processor(SIDE)}
    if base == "sd15":
        parts["safety_checker"] = None
    if net is not None:
        parts["controlnet"], ending = diffusers.ControlNetModel.from_pretrained(net).eval(), "ControlNet"
    pipe = getattr(diffusers, f"{CLASSES[base]}{ending}Pipeline")(**parts)
    pipe.set_progress_bar_config(disable=True)
    states = [nested(tensors(base, kind, seed)) for kind, seed in cases]
    for one in states if faults else []:
        faults(one)
    if lora is not None:
        pipe.load_lora_weights(lora)
        pipe.fuse_lora(components=["unet"])
        pipe.unload_lora_weights()
    pipe.load_ip_adapter(states, [""] * len(states), [""] * len(states), low_cpu_mem_usage=False)
    pipe.set_ip_adapter_scale(scales)
    if masks is not None:
        made = [IPAdapterMaskProcessor().preprocess([Image.fromarray(m) for m in one], 72, 88) for one in masks]
        asked["cross_attention_kwargs"] = {"ip_adapter_masks": [m.reshape(1, -1, *m.shape[-2:]) for m in made]}
    if windows is not None:
        steps = asked["num_inference_steps"]

        def at(i: int) -> list[float]:
            return [
                scale if i / steps >= start and (i + 1) / steps <= end else 0.0
                for scale, (start, end) in zip(scales, windows, strict=True)
            ]

        def after(pipe: Any, i: int, t: Any, values: Any) -> Any:
            pipe.set_ip_adapter_scale(at(i + 1))
            return values

        pipe.set_ip_adapter_scale(at(0))
        asked["callback_on_step_end"] = after
    shown = [[Image.fromarray(p) for p in one] if isinstance(one, list) else Image.fromarray(one) for one in pictures]
    for key in ("image",):
        if key in asked:
            asked[key] = Image.fromarray(asked[key])
    asked |= {} if ending and net is None else SIZE
    final = pipe(
        PROMPT, negative_prompt=NEGATIVE, generator=torch.Generator().manual_seed(SEED), output_type="latent",
        ip_adapter_image=shown, **asked,
    ).images  # fmt: skip
    with torch.no_grad():
        pixels = pipe.vae.decode(final / pipe.vae.config.scaling_factor, return_dict=False)[0]
    image = pipe.image_processor.postprocess(pixels, output_type="np")[0]
    return final.numpy(), (image * 255).round().astype(np.float64)


def ours(pipe: qwenimg.Pipeline, controls: list[Any], **asked: Any) -> qwenimg.Result:
    return pipe(PROMPT, control=controls, seed=SEED, negative_prompt=NEGATIVE, **SIZE, **asked)


def compare(name: str, made: qwenimg.Result, expected: Any) -> None:
    latents, pixels = expected
    assert pixels.std() > 10, "a constant picture would prove nothing"
    error, worst = relative(made.latents, latents), np.abs(made.pixels.astype(float) - pixels).max()
    print(f"{name}: latents {error:.1e} ({LATENTS}), pixels {worst:.0f} ({PIXELS})")
    assert error <= LATENTS and worst <= PIXELS


def moved(pipe: qwenimg.Pipeline, made: qwenimg.Result, **asked: Any) -> None:
    plain = pipe(PROMPT, seed=SEED, negative_prompt=NEGATIVE, **SIZE, **asked)
    assert np.abs(made.pixels.astype(int) - plain.pixels).max() >= MOVES


@pytest.mark.parametrize(("base", "kind"), [(base, kind) for base in BASES for kind in KINDS])
@pytest.mark.sample(1)
def test_each_kind_equals_diffusers(folders, adapters, base: str, kind: str) -> None:
    asked = {"num_inference_steps": 3, "guidance_scale": 5.0}
    expected = theirs(folders[base], base, [(kind, 41)], [ONE], scales=[0.7], **asked)
    for backend in BACKENDS:
        with qwenimg.load(folders[base], backend=backend, precision="fp32") as pipe:
            made = ours(pipe, [(adapters[base, kind, 41], ONE, 0.7)], steps=3, guidance=5.0)
            compare(f"{base}, {kind}, {backend}", made, expected)
            moved(pipe, made, steps=3, guidance=5.0)


CASES: dict[str, dict[str, Any]] = {
    "without-guidance": {"uses": [("base", 41, ONE, 0.9)], "guidance": 1.0},
    "two-adapters": {"uses": [("plus", 41, ONE, 0.5), ("base", 42, TWO, 0.8)]},
    "two-pictures": {"uses": [("base", 41, [ONE, TWO], 0.7)]},
    "two-pictures-of-plus": {"uses": [("plus", 41, [TWO, ONE], 0.7)]},
    "masks": {"uses": [("base", 41, [(ONE, LEFT), (TWO, 255 - LEFT)], 0.8)]},
    "windows": {
        "uses": [("base", 41, ONE, 0.9, (0, 0.5)), ("base", 42, TWO, 0.6, (0.2, 1))], "steps": 5, "bases": ["sdxl"],
    },
    "style": {"uses": [("base", 41, ONE, {"style": 0.9})]},
    "style-and-a-block": {"uses": [("plus", 41, ONE, {"down_blocks.1": 0.4, "style": 0.7})]},
    "from-a-picture": {"uses": [("base", 41, ONE, 0.7)], "image": START, "steps": 4, "bases": ["sdxl"]},
}  # fmt: skip
# The blocks of the tiny UNets as diffusers names them, where an attention of each has a scale of its own
BLOCKS = {
    ("sd15", "style"): ("up", "block_1", [True, True]), ("sdxl", "style"): ("up", "block_0", [False, True]),
    ("sd15", "down_blocks.1"): ("down", "block_1", [True]), ("sdxl", "down_blocks.1"): ("down", "block_1", [True]),
}  # fmt: skip


def their_scale(base: str, scale: Any) -> Any:
    if not isinstance(scale, dict):
        return scale
    made: dict[str, Any] = {}
    for part, value in scale.items():
        way, block, attentions = BLOCKS[base, part]
        made.setdefault(way, {})[block] = [value if on else 0.0 for on in attentions]
    return made


def drawn(folder: Path, base: str, case: dict[str, Any], **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' result of a case."""
    uses, steps = case["uses"], case.get("steps", 3)
    listed = [use[2] if isinstance(use[2], list) else [use[2]] for use in uses]
    masks = [[one[1][..., 0] for one in pictures if isinstance(one, tuple)] for pictures in listed]
    plain = [[one[0] if isinstance(one, tuple) else one for one in pictures] for pictures in listed]
    scales = [their_scale(base, use[3]) for use in uses]
    if any(masks):
        more["masks"], scales = masks, [[scale] * len(p) for scale, p in zip(scales, plain, strict=True)]
    if any(len(use) > 4 for use in uses):
        more["windows"] = [use[4] for use in uses]
    if "image" in case:
        more |= {"image": case["image"], "strength": 0.6, "ending": "Img2Img"}
    return theirs(
        folder, base, [(kind, seed) for kind, seed, *_ in uses], plain, scales=scales, num_inference_steps=steps,
        guidance_scale=case.get("guidance", 5.0), **more,
    )  # fmt: skip


def controls(adapters: dict[tuple[str, str, int], Path], base: str, case: dict[str, Any]) -> list[Any]:
    return [(adapters[base, kind, seed], *rest) for kind, seed, *rest in case["uses"]]


@pytest.mark.parametrize(
    ("base", "name"), [(base, name) for base in BASES for name in CASES if base in CASES[name].get("bases", BASES)]
)
@pytest.mark.sample(0)
def test_equals_diffusers(folders, adapters, base: str, name: str) -> None:
    case = CASES[name]
    expected = drawn(folders[base], base, case)
    asked = {"steps": case.get("steps", 3), "guidance": case.get("guidance", 5.0)}
    asked |= {"image": case["image"], "strength": 0.6} if "image" in case else {}
    for backend in BACKENDS:
        with qwenimg.load(folders[base], backend=backend, precision="fp32") as pipe:
            made = ours(pipe, controls(adapters, base, case), **asked)
            compare(f"{base}, {name}, {backend}", made, expected)
            moved(pipe, made, **asked)


@pytest.mark.parametrize("fault", ["keys-and-values", "scale-twice", "negative-has-the-picture"])
@pytest.mark.sample(0)
def test_planted_faults_are_seen(folders, adapters, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Each fault moves the latents far beyond the tolerance."""
    from qwenimg.common.families.stable_diffusion import ip_adapter

    case = {"uses": [("base", 41, ONE, 0.7)]}
    expected, _ = drawn(folders["sdxl"], "sdxl", case)
    if fault == "negative-has-the-picture":
        monkeypatch.setattr(ip_adapter, "rows", lambda positions, branches: [0 for _ in positions])
    else:
        weights = ip_adapter.PicturePrompts._weights
        pictures = ip_adapter.Pictures

        def swapped(pairs: Any, weights: Any) -> Any:
            return pictures([(v, k) for k, v in pairs] if fault == "keys-and-values" else pairs, weights)

        def twice(self: Any, scales: Any, *more: Any) -> Any:
            times = 0.7 if fault == "scale-twice" else 1.0
            return weights(self, [times * scale for scale in scales], *more)

        monkeypatch.setattr(ip_adapter, "Pictures", swapped)
        monkeypatch.setattr(ip_adapter.PicturePrompts, "_weights", twice)
    with qwenimg.load(folders["sdxl"], backend="cpu", precision="fp32") as pipe:
        error = relative(ours(pipe, controls(adapters, "sdxl", case), steps=3, guidance=5.0).latents, expected)
    print(f"{fault}: {error:.1e}, {error / LATENTS:.0f} times the tolerance")
    assert error > 10 * LATENTS


@pytest.mark.sample(0)
def test_with_a_lora(folders, adapters, tmp_path: Path) -> None:
    weights = {
        "up_blocks.0.attentions.1.transformer_blocks.0.attn2.to_q": (48, 48),
        "mid_block.attentions.0.proj_in": (48, 48),
    }
    modules = {name: lora_cases.lora(shape, i, rank=2) for i, (name, shape) in enumerate(weights.items())}
    lora = lora_cases.written(
        tmp_path / "lora.safetensors", modules, lora_cases.Dialect("unet.", lora_cases.PEFT_HALVES)
    )
    asked = {"num_inference_steps": 3, "guidance_scale": 5.0, "lora": lora}
    expected = theirs(folders["sdxl"], "sdxl", [("base", 41)], [ONE], scales=[0.7], **asked)
    for backend in BACKENDS:
        with qwenimg.load(folders["sdxl"], backend=backend, precision="fp32") as pipe:
            control = [(adapters["sdxl", "base", 41], ONE, 0.7)]
            made = ours(pipe, control, steps=3, guidance=5.0, lora=str(lora))
            compare(f"with a LoRA, {backend}", made, expected)
            without = ours(pipe, control, steps=3, guidance=5.0)
            assert np.abs(made.pixels.astype(int) - without.pixels).max() >= MOVES


@pytest.mark.parametrize("base", BASES)
@pytest.mark.sample(1)
def test_beside_a_controlnet(folders, adapters, tmp_path: Path, base: str) -> None:
    """Of SDXL the network in a window of the steps; each of both moves the picture."""
    end = 0.75 if base == "sdxl" else 1.0  # PNDM evaluates its first step twice
    net = write_controlnet(tmp_path / "net", UNETS[base] | _SMALL)
    expected = theirs(
        folders[base], base, [("plus", 41)], [ONE], scales=[1.5], net=net, image=TWO, num_inference_steps=4,
        guidance_scale=5.0, controlnet_conditioning_scale=0.1, control_guidance_end=end,
    )  # fmt: skip
    network, adapter = (net, TWO, 0.1, (0, end)), (adapters[base, "plus", 41], ONE, 1.5)
    for backend in BACKENDS:
        with qwenimg.load(folders[base], backend=backend, precision="fp32") as pipe:
            made = ours(pipe, [network, adapter], steps=4, guidance=5.0)
            compare(f"{base}, a ControlNet and an IP-Adapter, {backend}", made, expected)
            turned = ours(pipe, [adapter, network], steps=4, guidance=5.0)
            assert (turned.latents == made.latents).all(), "their order does not count"
            for alone in (network, adapter):
                other = ours(pipe, [alone], steps=4, guidance=5.0)
                assert np.abs(other.pixels.astype(int) - made.pixels).max() >= MOVES
