"""FLUX.3 Image Klein from a prompt and pictures to pixels, on both backends, against diffusers' modular pipeline on
folders that it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support import oracle_flux3, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families import registry
from qwenimg.common.families.flux3 import references
from qwenimg.common.families.flux3.model import TEMPLATE
from qwenimg.common.networks.denoisers.flux3_conditioning import next_level
from qwenimg.common.numbers import noise
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; measured at most 3e-6
PIXELS = 2  # of 255: a value on a rounding edge may go either way

RNG = np.random.default_rng(11)
EVEN, ODD = (RNG.integers(0, 256, shape, np.uint8) for shape in ((64, 96, 3), (83, 70, 3)))
CASES = [
    # folder, prompt and negative prompt, width, height, steps, guidance, references
    ("flux3-klein", "a red circle", "", 80, 48, 4, 1.0, []),
    ("flux3-klein", "a star above a ring, 3 hearts; 背景", "", 48, 112, 2, 1.0, [EVEN]),
    ("flux3-klein", "x " * 90, "", 64, 64, 2, 1.0, [ODD]),  # two windows of 80 tokens
    ("flux3-base", "一个红色的圆在左边", "", 112, 64, 5, 4.0, []),
    ("flux3-base", "a blue square " * 20, "a ring", 64, 80, 3, 2.5, [ODD]),
    ("flux3-base", "a blue square", "", 48, 48, 3, 1.0, [EVEN]),  # without guidance
    ("flux3-base", "a ring", "", 64, 48, 2, 2.5, [ODD, EVEN]),
    ("flux3-klein", "a ring", "", 64, 48, 2, 1.0, [EVEN, ODD, EVEN]),
]


@pytest.fixture(scope="module")
def opened() -> dict[tuple[str, str], Pipeline]:
    return {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}x{case[4]}-{case[6]}-{len(case[7])}")
@pytest.mark.sample(2)
def test_equals_diffusers(tiny_flux3: dict[str, Path], opened: dict[tuple[str, str], Pipeline], case) -> None:
    name, prompt, negative, width, height, steps, guidance, pictures = case
    latents, pixels = oracle_flux3.generate(
        tiny_flux3[name],
        prompt,
        noise.normal((1, 32, height // 16, width // 16), seed=7),
        steps=steps,
        guidance=guidance,
        negative_prompt=negative,
        images=pictures,
    )
    assert pixels.std() > 10, "a constant picture would prove nothing"
    asked = {"width": width, "height": height, "steps": steps, "guidance": guidance, "seed": 7}
    asked |= {"image": pictures} if pictures else {}
    asked |= {"negative_prompt": negative} if negative else {}
    for backend in BACKENDS:
        if (name, backend) not in opened:
            opened[name, backend] = qwenimg.load(tiny_flux3[name], backend=backend, precision="fp32")
        ours = opened[name, backend](prompt, **asked)
        peer.check_picture(f"{backend} {width}x{height}", ours, (latents, pixels), LATENTS, PIXELS)


def test_every_input_is_seen(tiny_flux3: dict[str, Path]) -> None:
    """Another prompt, picture or number of steps gives another result."""
    with qwenimg.load(tiny_flux3["flux3-klein"], backend="cpu", precision="fp32") as pipe:
        asked = {"width": 48, "height": 48, "steps": 2, "seed": 3}
        calls = [("a star", {}), ("a ring", {}), ("a star", {"image": EVEN}), ("a star", {"image": [EVEN, ODD]})]
        made = [pipe(prompt, **asked, **more).latents for prompt, more in calls]
    changes = [relative(made[i], made[j]) for i in range(4) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


def test_levels() -> None:
    """Golden numbers of diffusers' schedule, whose shift is the same at every size; a step goes to the next level."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    config = known_configs.scheduler("flux3-klein")
    assert flow_schedule(config, 4, 4096) == pytest.approx((1, 0.954107, 0.873897, 0.697885, 0), abs=5e-7)
    levels = flow_schedule(config, 16, 24)
    theirs = FlowMatchEulerDiscreteScheduler(shift=6.93)
    theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / 16, 16))
    assert levels == tuple(theirs.sigmas.tolist())
    assert [next_level(levels, level) for level in levels] == [*levels[1:], 0.0]
    assert next_level(levels, 0.5 * (levels[3] + levels[4])) == levels[4]


def test_template(tiny_flux3: dict[str, Path]) -> None:
    """Ids are those of the pipeline: filled up to a multiple of 80, and cut to the largest window."""
    tokenizer = oracle_flux3.pipeline(tiny_flux3["flux3-klein"]).tokenizer
    own = registry.open_model(tiny_flux3["flux3-klein"]).checkpoint.tokenizers["text_encoder"].tokenizer
    for prompt in ("", "a ring", "x " * 90, '{"id": "cup_1"} [1, 2] <cup_1>'):
        filled = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids, tokens = tokenizer.tokenizer(filled)["input_ids"], TEMPLATE.fill(own, prompt)
        assert list(tokens.ids[: len(tokens.ids) - tokens.pads]) == ids and len(tokens.ids) % 80 == 0
        assert 0 <= tokens.pads < 80 and tokens.lost == 0
    long = TEMPLATE.fill(own, "x " * 6000)
    assert len(long.ids) == 4096 and long.pads == 0 and long.lost > 0


BOXES = (
    "Studio photograph of a cup <cup_1> on a table. "
    '[{"id": "cup_1", "bbox": [400, 300, 800, 700], "desc": "a white cup"}]'
)


def test_boxes_in_a_prompt_stay_as_they_are(tiny_flux3: dict[str, Path]) -> None:
    with qwenimg.load(tiny_flux3["flux3-klein"], backend="cpu", precision="fp32") as pipe:
        made = pipe(BOXES, width=32, height=32, steps=1, seed=1)
        moved = pipe(BOXES.replace("300", "100"), width=32, height=32, steps=1, seed=1)
    assert made.recipe["prompt"] == BOXES and made.warnings == []
    assert relative(made.latents, moved.latents) > 10 * LATENTS


def test_defaults(tiny_flux3: dict[str, Path]) -> None:
    for name, steps, guidance in (("flux3-klein", 16, 1.0), ("flux3-base", 50, 4.0)):
        defaults = qwenimg.load(tiny_flux3[name], backend="cpu", precision="fp32").defaults
        assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (steps, guidance, "")
        assert (defaults.strength, defaults.mask_strength) == (1.0, 0.8)


# Pictures


@pytest.mark.parametrize("several", [False, True])
def test_references_are_those_of_diffusers(several: bool, tiny_flux3: dict[str, Path]) -> None:
    from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
    from PIL import Image

    processor, pipe = Flux3ImageProcessor(), qwenimg.load(tiny_flux3["flux3-klein"], backend="cpu", precision="fp32")
    for width, height in ((64, 64), (70, 83), (20, 90), (1025, 1024), (3000, 1501), (2049, 2047)):
        picture = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        theirs, more = processor.preprocess(Image.fromarray(picture), resize_mode="crop" if several else "fill")
        request = pipe.check("a ring", image=[picture, picture] if several else picture)
        assert np.array_equal(references.values(request)[0], theirs.numpy())
        assert references.sizes(request)[0] == (theirs.shape[3], theirs.shape[2])
        if not several:
            left, top, right, bottom = more["reference_crop"]
            assert (request.width, request.height) == (right - left, bottom - top)
            assert references.origin(request) == (left, top) or min(width, height) < 64


def test_an_image_as_large_as_its_reference_has_its_place(tiny_flux3: dict[str, Path]) -> None:
    """It is cut out of the canvas where the reference is in it."""
    with qwenimg.load(tiny_flux3["flux3-klein"], backend="cpu", precision="fp32") as pipe:
        asked = {"steps": 1, "seed": 1, "image": ODD}
        made, whole = pipe("a ring", **asked), pipe("a ring", **asked, width=80, height=96)
    assert made.pixels.shape == ODD.shape and np.array_equal(made.pixels, whole.pixels[6:89, 5:75])


def test_pictures_that_are_refused(tiny_flux3: dict[str, Path]) -> None:
    pipe = qwenimg.load(tiny_flux3["flux3-klein"], backend="cpu", precision="fp32")
    thin = np.zeros((64, 15, 3), np.uint8)
    with pytest.raises(UsageError, match="15x64 is too narrow: give 16 pixels or more a side"):
        pipe.check("a ring", image=[thin, EVEN], width=64, height=64)
    with pytest.raises(UsageError, match="takes at most 10"):
        pipe.check("a ring", image=11 * [EVEN])


# Folders of modular pipelines


def test_other_modular_pipelines_are_refused(tmp_path: Path) -> None:
    for name in ("Flux2KleinModularPipeline", "HeliosModularPipeline"):
        (tmp_path / "modular_model_index.json").write_text(json.dumps({"_class_name": name}))
        with pytest.raises(ModelError, match=f"is a modular pipeline of diffusers .*{name}.*does not open"):
            registry.of_folder(tmp_path)


def test_4_bits_are_advised_against(tiny_flux3: dict[str, Path]) -> None:
    from dataclasses import replace

    from qwenimg.common.families import catalog
    from qwenimg.common.weights.quantize import in_4_bits

    model = registry.published(catalog.KNOWN["flux3-klein"])
    assert model is not None and "-q 6" in model.family.precision.in_4_bits
    for bits, few in (("8", False), ("6", False), ("4", True), ("text=4,transformer=8", False)):
        plan = replace(model, checkpoint=model.checkpoint.quantized(bits)).checkpoint["transformer"].plan
        assert in_4_bits(plan) is few
