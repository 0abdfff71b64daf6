"""What every family does alike, on both backends: a new family is one more entry of `KINDS` in `family_cases`."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from support.crossed import crossed
from support.family_cases import (
    ASKED,
    BACKENDS,
    FIRST,
    HOLE,
    KINDS,
    PICTURE,
    PROMPT,
    SEEN,
    STARTING,
    TASKS,
    Opener,
    opener,
    places,
    see_few_pixels,
)
from support.recipe_cases import recipe_from_png
from support.relative import relative
from support.toy_family import add_toy, write_toy

from qwenimg import DoesNotFit, NumericsError, Pipeline, Result, UsageError
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.families import registry
from qwenimg.common.families.family import Family
from qwenimg.common.hub.describe import describe
from qwenimg.common.numbers import noise
from qwenimg.common.pipeline import preview
from qwenimg.common.prompts.wildcards import Wildcards
from qwenimg.common.request.family_options import FAMILY_OPTIONS
from qwenimg.common.request.parts import PARTS
from qwenimg.common.request.recipe import png_text

LATENTS = 1e-4  # relative L2 of the final latents of both backends in float32; measured at most 4e-6
PIXELS = 2  # of 255: a value on a rounding edge may go either way
BRIEF = ASKED | {"steps": 2}


def each(kinds: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("kind", "backend"), crossed(kinds, BACKENDS), indirect=True)


# For what a run does around its network, one of each path: the others differ in the network alone.
PATHS = ("qwen", "qwen-2511", "sd15", "sdxl+refiner", "z-image", "sd3", "toy")
one_of_each_family = pytest.mark.parametrize("kind", [*FIRST.values(), "toy"], indirect=True)


@pytest.fixture(scope="module")
def toy_networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest.fixture(autouse=True)
def with_toy(monkeypatch: pytest.MonkeyPatch, toy_networks: Path) -> None:
    add_toy(monkeypatch, toy_networks / "networks")
    see_few_pixels(monkeypatch)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tiny: dict[str, Path], toy_networks: Path) -> Path:
    toy = toy_networks / "model"
    return places(tiny, toy if toy.exists() else write_toy(toy))[kind]


@pytest.fixture
def family(folder: Path) -> Family:
    return registry.of_folder(folder)


@pytest.fixture(autouse=True)
def no_previews_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preview, "folder", lambda: tmp_path / "previews")


@pytest.fixture
def load(kind: str, folder: Path, tiny: dict[str, Path]) -> Opener:
    return opener(kind, folder, tiny)


@pytest.fixture(scope="module")
def opened() -> dict[tuple[str, str], Pipeline]:
    return {}


@pytest.fixture
def shared(opened: dict[tuple[str, str], Pipeline], kind: str, load: Opener) -> Callable[[str], Pipeline]:
    """A backend's pipeline of the kind, for tests that change nothing in it."""

    def found(backend: str) -> Pipeline:
        if (kind, backend) not in opened:
            opened[kind, backend] = load(backend)
        return opened[kind, backend]

    return found


def bits(pipe: Pipeline, prompt: str = PROMPT, **more: Any) -> bytes:
    made = pipe(prompt, **(BRIEF | more))
    return made.latents.tobytes() + made.pixels.tobytes()


def test_every_family_is_here() -> None:
    differ = {family.name for family in registry.FAMILIES} ^ set(KINDS.values())
    assert not differ, f"KINDS in tests/support/family_cases.py has a row of each family: {', '.join(differ)}"


# Pictures


# A mask is drawn with a picture to start from: of kinds that differ in the network alone, that is enough.
LIKE_OTHERS = ("sd21", "sdxl")


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        pytest.param(kind, task, marks=[pytest.mark.slow] if task == "image" and kind in LIKE_OTHERS else [])
        for kind in STARTING
        for task in TASKS
    ],
    indirect=["kind"],
)
@pytest.mark.sample(1)
def test_both_backends_draw_the_same(shared: Callable[[str], Pipeline], kind: str, task: str) -> None:
    made = [shared(backend)(PROMPT, **ASKED, **TASKS[task]) for backend in BACKENDS]
    error = relative(made[1].latents, made[0].latents)
    worst = np.abs(made[0].pixels.astype(int) - made[1].pixels).max()
    print(f"{kind} {task}: latents {error:.1e} (limit {LATENTS}), pixels {worst} (limit {PIXELS})")
    assert made[0].pixels.shape[:2] == (36, 52) and made[0].pixels.std() > 10  # flat pictures would prove nothing
    assert error <= LATENTS and worst <= PIXELS
    for key in ("noise_sha256", "sigmas_sha256", "sampler", "steps"):
        assert made[0].recipe[key] == made[1].recipe[key]


@each(PATHS)
@pytest.mark.sample(0)
def test_repeats_bit_for_bit(load: Opener, shared: Callable[[str], Pipeline], backend: str) -> None:
    pipe = shared(backend)
    first = bits(pipe)
    assert first == bits(pipe) == bits(load(backend))
    assert first != bits(pipe, seed=8) and first != bits(pipe, "a blue square")


# Of transformers that no test of samplers draws with: two calls in a step, an earlier step's estimate, fresh noise.
@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2m", "euler_ancestral"])
@pytest.mark.parametrize(
    "kind",
    ["longcat", "chroma", "ernie", "krea2", "anima", "flux2-dev", "flux2-kv", "flux3-klein", "flux3-base"],
    indirect=True,
)
@pytest.mark.sample(2)
def test_both_backends_draw_the_same_by_other_samplers(
    shared: Callable[[str], Pipeline], kind: str, sampler: str
) -> None:
    asked = ASKED | {"steps": 4}
    made = [shared(backend)(PROMPT, **asked, sampler=sampler) for backend in BACKENDS]
    error = relative(made[1].latents, made[0].latents)
    print(f"{kind} by {sampler}: latents {error:.1e} (limit {LATENTS})")
    assert error <= LATENTS and made[0].recipe["sampler"] == made[1].recipe["sampler"] == sampler
    assert relative(shared("cpu")(PROMPT, **asked).latents, made[0].latents) > 10 * LATENTS


OF_FAMILIES = {
    "caption": "zh", "step_cache": 0.9, "cached_calls": "2", "guidance_rescale": 0.7, "cfg_normalization": 1.0,
    "cfg_truncation": 0.5, "skip_layers": "0", "skip_layer_scale": 5.0, "layers": 2, "refine_at": 0.5, "clip_skip": 1,
    "control_mode": "control", "decoder_steps": 3, "decoder_guidance": 2.0,
}  # fmt: skip


@one_of_each_family
@pytest.mark.sample(2)
def test_options_of_other_families_change_nothing(shared: Callable[[str], Pipeline]) -> None:
    """`guidance_rescale` changed the pictures of FLUX.2 and Qwen-Image-2.1, while a warning said that it does not."""
    pipe = shared("cpu")
    missing = FAMILY_OPTIONS.keys() ^ OF_FAMILIES.keys()
    assert not missing, f"give a value that changes a picture in OF_FAMILIES: {', '.join(missing)}"
    others = {name: value for name, value in OF_FAMILIES.items() if name not in pipe.model.options}
    plain, made = (pipe(PROMPT, **BRIEF, **more) for more in ({}, others))
    assert np.array_equal(plain.latents, made.latents)
    lines = "\n".join(made.warnings)
    assert {name for name in others if f"{FAMILY_OPTIONS[name].label} has no effect" in lines} == others.keys()


@each(STARTING)
@pytest.mark.sample(1)
def test_a_picture_to_start_from_and_a_mask(shared: Callable[[str], Pipeline], backend: str) -> None:
    """Strength is the share of the schedule that is run; outside the mask the picture's own latents stay."""
    pipe = shared(backend)
    *steps, made = pipe.stream(PROMPT, **(ASKED | {"steps": 4}), image=PICTURE, strength=0.5)
    assert isinstance(made, Result) and made.recipe["strength"] == 0.5
    segments = pipe.model.plan(pipe.check(PROMPT, **ASKED)).segments
    of_decoder = sum(len(one.schedule.sigmas) - 1 for one in segments if one.shape is not None)
    assert len(steps) == 2 + of_decoder
    first, second = (pipe(p, **ASKED, **TASKS["mask"]) for p in (PROMPT, "a blue square"))
    assert first.recipe["mask_sha256"] == noise.sha256(HOLE)
    left = made.latents.shape[3] // 2 - 1  # columns that the mask leaves as they are, on every scale
    same = np.array_equal(first.latents[..., :left], second.latents[..., :left])
    if pipe.model.inputs.mask.put_back:  # its latents are drawn anew
        same = np.array_equal(first.pixels[HOLE == 0], second.pixels[HOLE == 0])
    assert same or pipe.model.inputs.mask.is_input
    assert not np.array_equal(first.latents, second.latents)


@each(STARTING)
@pytest.mark.sample(2)
def test_only_masked_is_the_part_drawn_alone_and_put_back(shared: Callable[[str], Pipeline], backend: str) -> None:
    """The picture is cut and pasted by diffusers and Pillow. Another picture that the model sees stays whole."""
    pipe, processor = shared(backend), VaeImageProcessor()
    whole = np.asarray(Image.fromarray(PICTURE).resize((156, 108)))
    mask = np.zeros((108, 156), np.uint8)
    mask[50:70, 90:110] = 255
    box = processor.get_crop_region(Image.fromarray(mask), 52, 36, 6)
    part, hole = (
        np.asarray(processor.resize(Image.fromarray(one).crop(box), 36, 52, "fill").convert(mode))
        for one, mode in ((whole, "RGB"), (mask, "L"))
    )
    more = [SEEN] if pipe.model.inputs.most > 1 else []
    asked = ASKED | {"strength": 0.7}
    inputs = pipe.model.inputs
    with pytest.MonkeyPatch.context() as patch:
        if inputs.mask.put_back:  # as it is drawn
            patch.setattr(pipe.model, "inputs", replace(inputs, mask=replace(inputs.mask, put_back=False)))
        alone = pipe(PROMPT, **asked, image=[part, *more], mask=hole)
    made = pipe(PROMPT, **asked, image=[whole, *more], mask=mask, only_masked=6)
    assert np.array_equal(made.latents, alone.latents)
    back = Image.fromarray(alone.pixels).resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.LANCZOS)
    pasted = Image.fromarray(whole).convert(back.mode)  # with the transparency that some models draw
    pasted.paste(back, box[:2], Image.fromarray(mask).crop(box))
    assert np.array_equal(made.pixels, np.asarray(pasted)) and (made.pixels[mask > 0] != 0).any()
    assert made.recipe["mask_sha256"] == noise.sha256(mask) and made.recipe["only_masked"] == 6
    assert (made.recipe["width"], made.recipe["height"]) == (52, 36)


# Masks whose edges are in latents, in half of them, and inputs of the model.
@pytest.mark.parametrize("kind", ["z-image", "flux2-klein", "inpaint"], indirect=True)
@pytest.mark.sample(0)
def test_both_backends_start_a_masked_part_alike(shared: Callable[[str], Pipeline]) -> None:
    asked = BRIEF | {"image": PICTURE, "mask": HOLE, "strength": 0.5, "steps": 4, "mask_blur": 2.0}
    drawn = []
    for fill in ("original", "fill", "noise", "nothing"):
        made = [shared(backend)(PROMPT, **asked, mask_fill=fill) for backend in BACKENDS]
        error = relative(made[1].latents, made[0].latents)
        print(f"{fill}: latents {error:.1e} (limit {LATENTS})")
        assert error <= LATENTS and np.array_equal(made[0].pixels[:, :19, :3], PICTURE[:, :19])
        drawn.append(made[0].latents.tobytes())
    assert len(set(drawn)) == 4


@each(PATHS)
@pytest.mark.sample(1)
def test_a_step_has_its_latents(shared: Callable[[str], Pipeline], backend: str) -> None:
    """Those of the last step go to the VAE, scaled if the schedule does not end at 0. All are there after the run."""
    during, steps = [], []
    for event in shared(backend).stream(PROMPT, **ASKED):
        if isinstance(event, Result):
            scale = np.linalg.norm(event.latents) / np.linalg.norm(during[-1])
            assert relative(scale * during[-1], event.latents) < 1e-6 and abs(scale - 1) < 0.01
        else:
            during.append(event.latents)
            steps.append(event)
    assert len(steps) == ASKED["steps"] and all(one.dtype == np.float32 for one in during)
    assert not np.array_equal(during[0], during[1])
    assert [step.latents.tobytes() for step in steps] == [one.tobytes() for one in during]


@each(PATHS)
@pytest.mark.sample(3)
def test_given_latents_replace_the_noise(shared: Callable[[str], Pipeline], backend: str) -> None:
    pipe = shared(backend)
    seeded = pipe(PROMPT, **BRIEF)
    given = noise.normal(seeded.latents.shape, seed=ASKED["seed"])
    made = pipe(PROMPT, **(BRIEF | {"seed": 1}), latents=given)
    assert made.latents.tobytes() == seeded.latents.tobytes() and made.recipe["rng"] == "given"
    assert made.latents.dtype == np.float32
    with pytest.raises(UsageError, match=r"latents of shape .* do not fit"):
        pipe(PROMPT, **(ASKED | {"width": 128}), latents=given)


@pytest.mark.parametrize("kind", PATHS, indirect=True)
@pytest.mark.sample(1)
def test_guidance_that_is_off_takes_no_negative_prompt(shared: Callable[[str], Pipeline]) -> None:
    """Nor is its text in the recipe; at another guidance it counts."""
    pipe = shared("cpu")
    off = BRIEF | {"guidance": pipe.model.guidance.off}
    made = [pipe(PROMPT, **off, negative_prompt=text) for text in (None, "a green square")]
    assert made[0].latents.tobytes() == made[1].latents.tobytes()
    assert made[1].recipe["negative_prompt"] == "" and "negative prompt has no effect" in made[1].warnings[0]
    assert bits(pipe, negative_prompt="a green square") != bits(pipe)


@each(PATHS)
@pytest.mark.sample(1)
def test_the_seed_chooses_among_words(shared: Callable[[str], Pipeline], backend: str) -> None:
    """The picture is that of the chosen text, which the recipe has beside the template."""
    pipe, template = shared(backend), "a {red|green|blue} {circle|square}, {2$$a|b|c}"
    made = [pipe(template, **(BRIEF | {"seed": seed}), negative_prompt="{x|y}") for seed in (1, 2)]
    texts = [Wildcards().chosen({"prompt": template}, seed)["prompt"] for seed in (1, 2)]
    assert [one.recipe["prompt"] for one in made] == texts and texts[0] != texts[1]
    assert all(one.recipe["template"] == template for one in made)
    plain = pipe(texts[0], **(BRIEF | {"seed": 1}), negative_prompt=made[0].recipe["negative_prompt"] or None)
    assert plain.latents.tobytes() == made[0].latents.tobytes() and "template" not in plain.recipe
    guided = pipe.model.guidance.is_on(pipe.check(template, **BRIEF))
    assert ("negative_template" in made[0].recipe) == guided
    assert json.loads(png_text(made[0].recipe)["qwenimg"])["template"] == template


# Recipes


@each(PATHS)
@pytest.mark.sample(1)
def test_the_recipe_in_the_file_makes_the_picture_again(
    load: Opener, shared: Callable[[str], Pipeline], backend: str, folder: Path, tmp_path: Path
) -> None:
    made = shared(backend)("一个圆\nNegative prompt: no", **BRIEF, negative_prompt="dull")
    path = made.save(tmp_path / "a.png")
    recipe = recipe_from_png(path)
    assert recipe == json.loads(png_text(made.recipe)["qwenimg"])
    assert np.array_equal(np.asarray(Image.open(path)), made.pixels)
    assert str(folder.parent) not in path.read_bytes().decode("latin-1")
    names = ("negative_prompt", "width", "height", "steps", "guidance", "seed", "sampler")
    again = load(backend)(recipe["prompt"], **{name: recipe[name] for name in names})
    assert again.pixels.tobytes() == made.pixels.tobytes()
    path.write_bytes(made.png(metadata=False))
    assert Image.open(path).info == {}


# Refusals


@pytest.mark.sample(3)
def test_options_of_another_family_are_refused_by_name(load: Opener, family: Family, folder: Path) -> None:
    options: dict[str, Any] = {"tokenizer": folder, "prediction": "v", "variant": "2511"} | dict.fromkeys(PARTS, folder)
    assert options.keys() == {name for row in registry.FAMILIES for name in row.load_options}
    for name in options.keys() - family.load_options:
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is for .*another model"):
            load("cpu", **{name: options[name]})
    if family.refiner is None:
        with pytest.raises(UsageError, match="--refiner is for SDXL base models only"):
            load("cpu", refiner=folder)
    for other in registry.FAMILIES:
        if other.precision.denoiser != family.precision.denoiser:
            with pytest.raises(UsageError, match="syntax"):
                load("cpu", f"bf16,{other.precision.denoiser}=fp32")


@one_of_each_family
@pytest.mark.sample(1)
def test_every_policy_of_the_row_is_known(load: Opener, family: Family) -> None:
    for name in family.precision.bases:
        pipe = load("cpu", name)
        assert family.precision.denoiser in pipe.headline() and name in pipe.headline()
        assert set(pipe.precision.places()) == set(family.precision.places)


@each(PATHS)
@pytest.mark.sample(3)
def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    load: Opener, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, read = load(backend), []
    monkeypatch.setattr(pipe.engine, "free_memory", lambda: 1000)
    monkeypatch.setattr(OpenFile, "fill", lambda self, view, begin: read.append(self.path.name))
    for call in (lambda: pipe(PROMPT, **ASKED), lambda: pipe.estimate(PROMPT, **ASKED)):
        with pytest.raises(DoesNotFit, match=r"takes .* [kM]B in fp32, 1\.0 kB are free") as caught:
            call()
        assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
    print(caught.value)
    assert not read


# A run that ends early leaves nothing behind


class StoppedError(Exception):
    """Of the one who reads the stream, or of a part that fails."""


def stopped(*args: object, **kwargs: object) -> Any:
    raise StoppedError


def never_begun(pipe: Pipeline) -> None:
    pipe.stream(PROMPT, **BRIEF)


def closed(pipe: Pipeline) -> None:
    events = pipe.stream(PROMPT, **BRIEF)
    next(events)
    events.close()


def dropped(pipe: Pipeline) -> None:
    for _ in pipe.stream(PROMPT, **ASKED, **TASKS["mask"]):
        break


def raised_in(pipe: Pipeline) -> None:
    events = pipe.stream(PROMPT, **BRIEF)
    next(events)
    with pytest.raises(StoppedError):
        events.throw(StoppedError())


def refused(pipe: Pipeline) -> None:
    with pytest.raises(UsageError):
        pipe(PROMPT, steps=0)


def decoder_failed(pipe: Pipeline) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(pipe.model.vae, "decode", stopped)
        pipe(PROMPT, **BRIEF)


def device_failed(pipe: Pipeline) -> None:
    """While the run is prepared: nothing goes to the device."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(pipe.engine, "array", stopped)
        pipe("another prompt", **BRIEF)


def not_finite(pipe: Pipeline) -> None:
    """In the first step."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NumericsError, match="step 1: non-finite"):
        pipe.prepare([PROMPT, pipe.defaults.negative_prompt])
        patch.setattr(pipe.engine, "finite", lambda array: False)
        pipe(PROMPT, **BRIEF)


ENDS = (never_begun, closed, dropped, raised_in, refused, decoder_failed, device_failed, not_finite)


@each(PATHS)
@pytest.mark.sample(0)
def test_every_end_of_a_run_leaves_nothing_behind(
    load: Opener, shared: Callable[[str], Pipeline], backend: str
) -> None:
    """After each the next picture is bit for bit that of another pipeline, its times are its own, and no run lives."""
    pipe, runs = load(backend), []
    wanted = bits(shared(backend), "a star")
    prepare = pipe.model.prepare

    @contextmanager
    def noted(*args: Any) -> Any:
        with prepare(*args) as run:
            runs.append(weakref.ref(run))
            yield run
            del run

    pipe.model.prepare = noted
    for end in ENDS:
        end(pipe)
        assert pipe.runtime.clock.seconds == {}, end.__name__
        assert bits(pipe, "a star") == wanted, end.__name__
    gc.collect()
    assert len(runs) > len(ENDS) and all(run() is None for run in runs)


# Memory and files


@each(PATHS)
@pytest.mark.sample(0)
def test_what_is_freed_is_loaded_again(load: Opener, backend: str) -> None:
    pipe = load(backend)
    wanted = bits(pipe)
    pipe.free_transformer()
    assert bits(pipe) == wanted
    fresh = load(backend)
    fresh.prepare([PROMPT, "a star", ""])
    assert bits(fresh) == wanted


@each(PATHS)
@pytest.mark.sample(1)
def test_closed_is_closed(load: Opener, backend: str) -> None:
    pipe = load(backend)
    pipe(PROMPT, **BRIEF)
    files = [file for part in pipe.model.checkpoint.components.values() for file in part.plan.files]
    assert files and not any(file.stream.closed for file in files)
    pipe.close()
    pipe.close()
    assert all(file.stream.closed for file in files)
    calls: tuple[Callable[[], object], ...] = (
        lambda: pipe(PROMPT),
        lambda: pipe.prepare([PROMPT]),
        lambda: pipe.free_transformer(),
    )
    for call in calls:
        with pytest.raises(UsageError, match="this pipeline is closed"):
            call()


@pytest.mark.sample(5)
def test_info_finds_no_fault(folder: Path, family: Family) -> None:
    found = describe(folder)
    print("\n".join(found.lines))
    assert found.faults == []
    assert found.lines[1].startswith("pipeline: ") and family.described(folder) in found.lines[1]
    denoiser = family.folders.get(family.denoiser, family.denoiser)
    assert any(line.startswith(f"{denoiser}: ") for line in found.lines)


@pytest.mark.sample(1)
def test_previews_of_steps(load: Opener) -> None:
    """A pixel for each latent, whatever the VAE's channels and scale are."""
    pipe = load("cpu")
    pipe.fit_preview()
    *steps, result = pipe.stream(PROMPT, **BRIEF)
    assert isinstance(result, Result) and steps
    for step in steps:
        assert not isinstance(step, Result)
        seen = step.preview()
        assert (seen.shape, seen.dtype) == ((-(-36 // pipe.model.scale), -(-52 // pipe.model.scale), 3), np.uint8)
