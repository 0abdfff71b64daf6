"""Stable Diffusion as a user runs it: tiny models, pictures in and out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import Ran, cli
from support.processes import listing, pixels

BACKENDS = ("cpu", "mlx")
SUMMER = np.random.default_rng(0).integers(0, 256, (48, 72, 3), np.uint8)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a picture and a mask of it, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(SUMMER).save(tmp_path / "summer.png")
    mask = np.zeros((48, 72), np.uint8)
    mask[:24] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    return tmp_path


def drawn(*args: object) -> Ran:
    ran = cli(*map(str, args))
    assert ran.code == 0, ran
    return ran


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_a_picture_is_made_anew_and_again_from_its_recipe(folders, place: Path, backend: str) -> None:
    given = ("-i", "summer.png", "--mask", "mask.png", "--backend", backend, "-m", folders["sd15"])
    asked = ("--strength", 0.7, "--sampler", "dpmpp_2m_sde", "--schedule", "karras", "--steps", 4, "-s", "1-2")
    events = drawn("a red circle", *given, *asked, "-o", "{seed}.png", "--json").events
    steps = [event for event in events if event["event"] == "step"]
    recipe = next(event["recipe"] for event in events if event["event"] == "image")
    assert {event["total"] for event in steps} == {2} and len(steps) == 4  # 0.7 of 4 steps is 2, for two pictures
    assert (recipe["sampler"], recipe["schedule"], recipe["strength"]) == ("dpmpp_2m_sde", "karras", 0.7)
    assert (recipe["width"], recipe["height"]) == (72, 48)

    drawn("--from", "2.png", *given, "-o", "again.png")
    assert np.array_equal(pixels(place / "again.png"), pixels(place / "2.png"))
    assert not np.array_equal(pixels(place / "1.png"), pixels(place / "2.png"))


def test_one_side_keeps_the_proportions_of_the_picture(folders, place: Path) -> None:
    drawn("a circle", "-i", "summer.png", "-m", folders["sd15"], "-W", 36, "--steps", 2, "-o", "a.png")
    assert pixels(place / "a.png").shape == (24, 36, 3)


@pytest.mark.sample(0)
def test_base_refiner_vae_and_clip_skip(folders, place: Path) -> None:
    asked = ("a (red:1.3) circle", "-m", folders["sdxl"], "--steps", 5, "-s", 1, "--size", "40x40")
    runs = {
        "plain": (),
        "refined": ("--refiner", folders["refiner"], "--refine-at", 0.5),
        "skipped": ("--clip-skip", 1),
        "other": ("--vae", folders["sd15"] / "vae"),
        "half": ("--precision", "fp16"),
    }
    for name, options in runs.items():
        drawn(*asked, *options, "-o", f"{name}.png")
    made = {name: pixels(place / f"{name}.png") for name in runs}
    for name in ("refined", "skipped", "other"):
        assert not np.array_equal(made[name], made["plain"]), name
    assert np.abs(made["half"] - made["plain"]).mean() < 12


def test_info_tells_what_it_is(folders, place: Path) -> None:
    for name, words in {
        "sd21": ("1.x or 2.x", "v_prediction"),
        "inpaint": ("inpainting (9 channels)",),
        "refiner": ("SDXL refiner",),
    }.items():
        told = drawn("info", folders[name])
        assert not told.err and all(word in told.out.decode() for word in words), told


REFUSED = {
    "a picture that is none": (("-i", "none.png"), 5, "none.png"),
    "a mask alone": (("--mask", "mask.png"), 2, "-i"),
    "too little strength": (("-i", "summer.png", "--strength", 0.1, "--steps", 4), 2, "leaves none"),
    "a refiner for no SDXL": (("--refiner", "{refiner}"), 2, "SDXL base"),
    "a VAE that is none": (("--vae", "summer.png"), 5, "summer.png"),
    "no such sampler": (("--sampler", "eular"), 2, "euler"),
    "more layers than there are": (("--clip-skip", 9), 2, "clip-skip"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_in_one_line(folders, place: Path, name: str) -> None:
    options, expected, word = REFUSED[name]
    before = listing(place)
    filled = [str(option).format(refiner=folders["refiner"]) for option in options]
    ran = cli("a red circle", "-m", str(folders["sd15"]), "-o", "a.png", "--quiet", *filled)
    print(ran.err)
    ran.refused(expected, word)
    assert listing(place) == before
