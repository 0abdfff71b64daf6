"""The masked area of requests: the part that is drawn, what a masked part starts from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import cli
from support.tiny_control import write_controlnet

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers.noise import TorchCPUGenerator
from qwenimg.common.pictures import masks, pixels
from qwenimg.common.pipeline import start
from qwenimg.common.request.request import Defaults

BACKENDS = ("cpu", "mlx")
PICTURE = np.random.default_rng(5).integers(0, 256, (120, 160, 3), np.uint8)
HOLE = np.zeros((120, 160), np.uint8)
HOLE[40:70, 60:100] = 255
ASKED: dict[str, Any] = {"width": 64, "height": 48, "steps": 4, "guidance": 2.0, "seed": 7}
MASKED: dict[str, Any] = ASKED | {"image": PICTURE, "mask": HOLE}


@pytest.fixture(scope="module")
def pipes() -> dict[str, Pipeline]:
    return {backend: qwenimg.load("shapes", backend=backend, precision="fp32") for backend in BACKENDS}


@pytest.fixture
def pipe(pipes: dict[str, Pipeline]) -> Pipeline:
    return pipes["cpu"]


def told(made: qwenimg.Result) -> list[str]:
    return [line for line in made.warnings if "is blank" not in line and "was trained at" not in line]


def test_both_backends_keep_what_is_outside(pipes: dict[str, Pipeline]) -> None:
    """With a blurred edge up to where the blur ends, and also where all of the picture is drawn."""
    edge = np.pad(np.full((30 + 20, 40 + 20), True), ((30, 40), (50, 50)))  # 2.5 times 4 pixels
    for more in (
        {"only_masked": 8},
        {"only_masked": 8, "mask_blur": 4.0},
        {"mask_blur": 4.0, "height": 120, "width": 160},
    ):
        made = [pipe("a red circle", **(MASKED | more)).pixels.astype(int) for pipe in pipes.values()]
        outside = ~edge if "mask_blur" in more else HOLE == 0
        assert all(np.array_equal(one[outside], PICTURE[outside]) for one in made)
        worst, changed = np.abs(made[0] - made[1]).max(), np.abs(made[0] - PICTURE)[HOLE > 0].mean()
        print(f"{more}: pixels {worst} of 255 between backends, changed inside by {changed:.0f}")
        assert worst <= 2 and changed > 20 and made[0].shape == PICTURE.shape


@pytest.mark.sample(0)
def test_outside_draws_the_black_of_the_mask(pipe: Pipeline) -> None:
    for more in ({}, {"only_masked": 8}, {"mask_blur": 2.0}):
        inside, outside = (
            pipe("a star", **(MASKED | more | one)) for one in ({"mask": 255 - HOLE}, {"mask_mode": "outside"})
        )
        assert np.array_equal(inside.pixels, outside.pixels) and outside.recipe["mask_mode"] == "outside"


@pytest.mark.parametrize("fill", ["original", "fill", "noise", "nothing"])
@pytest.mark.sample(1)
def test_what_the_masked_part_starts_from(pipe: Pipeline, fill: str) -> None:
    """Its latents: the picture's, those of the colours around, the seed's noise, or zeros; then noise is added."""
    request = pipe.check("a star", **(MASKED | {"mask_fill": fill, "strength": 0.5}))
    plan, model = pipe.model.plan(request), pipe.model
    picture, hole = (pixels.fit(one, 64, 48) for one in (PICTURE, HOLE))
    shown = picture if fill == "original" else masks.filled(picture, hole)
    latents = model.vae.latents(pixels.from_uint8(shown), TorchCPUGenerator(7).normal if model.vae.samples else None)
    initial = start.initial_state(model, request, TorchCPUGenerator(7))
    where = (hole >= 128)[:: model.scale, :: model.scale]
    begin = np.where(where, {"noise": initial.noise, "nothing": 0 * latents}.get(fill, latents), latents)
    sigma = plan.sigmas[0]
    expected = (1 - sigma) * begin + sigma * initial.noise
    error = np.abs(start.first(plan, initial) - expected).max()
    print(f"{fill}: {error:.1e}")
    assert error < 1e-5 and 0 < sigma < 1
    results = [pipe("a star", **(MASKED | {"mask_fill": one, "strength": 0.5})) for one in (fill, "original")]
    assert (fill == "original") == np.array_equal(results[0].latents, results[1].latents)
    assert not told(results[0])


def test_options_without_an_effect_are_told(pipe: Pipeline) -> None:
    made = pipe("a star", **ASKED, mask_blur=3, mask_fill="noise", mask_mode="outside")
    assert [line.partition(" ")[2] for line in told(made)] == ["has no effect without a mask"] * 3
    made = pipe("a star", **MASKED, strength=1.0, mask_fill="noise")
    line = "mask-fill has no effect: the masked part is drawn from noise alone; give a strength below 1"
    assert told(made) == [line]


def test_a_mask_of_another_size_is_scaled_and_one_of_everything_is_the_whole_picture(pipe: Pipeline) -> None:
    small = Image.fromarray(HOLE).resize((80, 60))
    made = pipe("a star", **(MASKED | {"mask": small, "only_masked": 0}))
    assert made.pixels.shape == PICTURE.shape and told(made) == ["mask is 80x60, scaled to the 160x120 of the picture"]
    everything = MASKED | {"mask": np.full_like(HOLE, 255)}
    first, second = (pipe("a star", **everything, **more) for more in ({}, {"only_masked": 9}))
    assert np.array_equal(first.latents, second.latents)
    assert np.array_equal(second.pixels, pixels.fit(first.pixels, 160, 120))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mask": np.zeros_like(HOLE), "only_masked": 8}, "the mask has nothing to draw anew"),
        ({"mask": HOLE | 255, "mask_mode": "outside", "only_masked": 8}, "the mask has nothing to draw anew"),
        ({"mask": np.where(np.arange(HOLE.size) == 5000, 255, 0).astype(np.uint8).reshape(HOLE.shape), "only_masked": 8,
          "mask_blur": 64}, "mask-blur 64 leaves nothing of this mask; give less"),
        ({"mask": None, "only_masked": 0}, "only-masked draws what a mask covers"),
        ({"only_masked": -1}, "only-masked is -1; choose 0 to"), ({"only_masked": 10**9}, "only-masked is 1000000000"),
        ({"only_masked": True}, "only_masked is 'True'; expected a whole"), ({"only_masked": 3.5}, "whole number"),
        ({"only_masked": "8"}, "whole number"), ({"mask_blur": float("nan")}, "mask-blur is nan"),
        ({"mask_blur": 1e9}, "mask-blur is 1000000000.0; choose 0 to 256"), ({"mask_blur": "4"}, "expected a number"),
        ({"mask_fill": "latent noise"}, "choose one of original, fill, noise, nothing"), ({"mask_fill": 0}, "a text"),
        ({"mask_mode": "white"}, "choose inside"),
    ],
)  # fmt: skip
def test_what_is_refused(pipe: Pipeline, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        pipe.check("a star", **(MASKED | given))
    text = str(caught.value)
    assert words in text and len(text) <= 300 and "\n" not in text


def test_the_size_of_what_is_drawn(pipe: Pipeline) -> None:
    """Without one it has about the model's usual area in the picture's proportions; in multiples of 16 or not."""
    request = pipe.check("a star", image=PICTURE, mask=HOLE, only_masked=8)
    assert (request.width, request.height) == (304, 224)
    request = pipe.check("a star", image=PICTURE, mask=HOLE, only_masked=8, width=80)
    assert (request.width, request.height) == (80, 60)
    sizes = Defaults(edited=1024**2).sides(None, None, [PICTURE, PICTURE.swapaxes(0, 1)], only_masked=True)
    assert sizes == (1184, 896), "the mask belongs to the first picture"
    for width, height in ((50, 37), (96, 32)):
        made = pipe("a star", **(MASKED | {"width": width, "height": height, "steps": 2, "only_masked": 4}))
        assert made.pixels.shape == PICTURE.shape and made.latents.shape[2:] == (
            -(-height // 16) * 2,
            -(-width // 16) * 2,
        )


def test_a_transparent_picture_is_taken_on_white(pipe: Pipeline) -> None:
    clear = np.dstack((PICTURE, np.where(np.arange(160) < 50, 0, 255).astype(np.uint8)[None].repeat(120, 0)))
    made = pipe("a star", **(MASKED | {"image": clear, "only_masked": 8}))
    assert made.pixels.shape == (120, 160, 3) and (made.pixels[:, :50] == 255).all()
    assert np.array_equal(made.pixels[:, 100:], PICTURE[:, 100:])


@pytest.mark.sample(0)
def test_pictures_of_controls_are_cut_along(tiny_folder: Path, tmp_path: Path) -> None:
    """One of another size is scaled to the picture first. Without -i the first of them is the picture."""
    net = write_controlnet(tmp_path / "inpainting", 12, extra=4)
    large = np.asarray(Image.fromarray(PICTURE).resize((320, 240), 0))
    box = masks.area(HOLE, 8, 64, 48)
    assert box is not None
    part, hole = (masks.cut(one, box, 64, 48) for one in (PICTURE, HOLE))
    for backend in BACKENDS:
        with qwenimg.load(tiny_folder, backend=backend, precision="fp32") as pipe:
            for shown in (PICTURE, large):
                made = pipe("a star", **MASKED, only_masked=8, control=(net, shown))
                seen = masks.cut(pixels.fit(shown, 160, 120), box, 64, 48)
                alone = pipe("a star", **ASKED, image=part, mask=hole, control=(net, seen))
                assert np.array_equal(made.control_pictures[0], seen)
                assert np.array_equal(made.latents, alone.latents)
            made = pipe("a star", **ASKED, mask=HOLE, only_masked=8, control=(net, PICTURE))
            assert np.array_equal(made.pixels[HOLE == 0], PICTURE[HOLE == 0]) and made.pixels.shape == PICTURE.shape
            assert "image_sha256" not in made.recipe


# The command line


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    Image.fromarray(PICTURE).save(tmp_path / "picture.png")
    Image.fromarray(HOLE).save(tmp_path / "mask.png")
    return "-m", "shapes", "-i", str(tmp_path / "picture.png"), "--mask", str(tmp_path / "mask.png"), "--steps", "2"


@pytest.mark.sample(0)
def test_the_command_line_and_the_replay(files: tuple[str, ...], tmp_path: Path) -> None:
    more = ("--mask-blur", "3", "--mask-fill", "noise", "--mask-mode", "outside", "--size", "64x48", "-s", "3")
    ran = cli(*files, *more, "--only-masked", "a red circle", "-o", str(tmp_path / "a.png"))
    assert ran.code == 0, ran.err
    inputs = files[2:6]
    again = cli("--from", str(tmp_path / "a.png"), *inputs, "-o", str(tmp_path / "b.png"))
    assert again.code == 0, again.err
    first, second = (np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "b.png"))
    assert first.shape == PICTURE.shape and np.array_equal(first, second)
    told = cli("info", str(tmp_path / "a.png")).out.decode()
    for line in ("only_masked: 32", "mask_blur: 3.0", "mask_fill: noise", "mask_mode: outside", "width: 64"):
        assert line in told
    several = cli(
        *files, "a star", "--padding_mask_crop", "9", "-N", "2", "-s", "5", "-o", str(tmp_path / "{seed}.png")
    )
    assert several.code == 0 and (tmp_path / "6.png").exists()


def test_a_plan_is_that_of_the_part(files: tuple[str, ...]) -> None:
    for more, size in (
        ((), "160x120"),
        (("--only-masked",), "304x224"),
        (("--only-masked", "9", "--size", "64"), "64x64"),
    ):
        ran = cli("plan", "shapes", "--backend", "cpu", *files[2:6], *more)
        assert ran.code == 0 and f" · {size}, " in ran.out.decode(), ran.err


@pytest.mark.sample(0)
def test_lines_of_a_prompt_file_have_parts_of_their_own(files: tuple[str, ...], tmp_path: Path) -> None:
    lines = [{"prompt": "a star", "size": "64x48"} | more for more in ({"only_masked": 4}, {"only_masked": 20}, {})]
    (tmp_path / "lines.txt").write_text("\n".join(map(json.dumps, lines)))
    drawn = ("--prompt-file", str(tmp_path / "lines.txt"), "-o", str(tmp_path / "{index}.png"), "-s", "3")
    ran = cli(*files, *drawn)
    assert ran.code == 0, ran.err
    sizes = [Image.open(tmp_path / f"{index}.png").size for index in (1, 2, 3)]
    assert sizes == [(160, 120), (160, 120), (64, 48)]
    assert (tmp_path / "1.png").read_bytes() != (tmp_path / "2.png").read_bytes()
    ran = cli(*files[:2], *files[6:], *drawn, "--overwrite", "--keep-going")
    assert ran.code == 7 and "lines.txt:1: only-masked draws what a mask covers" in ran.err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("x", "--only-masked"), "--only-masked draws what a mask covers"),
        (("--only-masked", "x", "--json"), "--only-masked draws what a mask covers"),
        (("x", "--only-masked", "-o", "a.png"), "--only-masked draws what a mask covers"),
        (("x", "--only-masked", "-1"), "No such option '-1'"), (("x", "--only-masked=x"), "is not a valid integer"),
        (("--", "--only-masked"), "is inside the quotes of the prompt"),
    ],
)  # fmt: skip
def test_a_value_may_be_left_out(words: tuple[str, ...], error: str) -> None:
    ran = cli("-m", "shapes", "--steps", "1", *words)
    assert ran.code == 2 and error in ran.err, ran.err
    assert len(ran.err.splitlines()[-1]) <= 300
