"""A picture extended beyond its borders: what is kept, what is drawn, with each family and on both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.cli_runner import cli
from support.crossed import crossed
from support.family_cases import BACKENDS, FIRST, PICTURE, PROMPT, STARTING, opener, places, see_few_pixels

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.pipeline.result import Result
from qwenimg.common.request import outpaint_text
from qwenimg.common.request.outpaint_text import Border

APART = 1e-4  # of the backends' latents, relative L2
BRIEF: dict[str, Any] = {"steps": 3, "guidance": 3.0, "seed": 7, "image": PICTURE}
BORDERS = "left=20, top=8; bottom=4"
REACH = 21  # pixels of the picture into which the edge is blended: 2.5 standard deviations of 8
KINDS = (*(kind for kind in FIRST.values() if kind in STARTING), "inpaint", "qwen-2511")


@pytest.fixture(autouse=True)
def few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    see_few_pixels(monkeypatch)


@pytest.mark.parametrize(("kind", "blur"), crossed(KINDS, (0.0, None)))
@pytest.mark.sample(1)
def test_what_is_kept_is_exact_and_both_backends_draw_the_same(
    tiny: dict[str, Path], tmp_path: Path, kind: str, blur: float | None
) -> None:
    made: list[Result] = []
    for backend in BACKENDS:
        with opener(kind, places(tiny, tmp_path)[kind], tiny)(backend) as pipe:
            made.append(pipe(PROMPT, **BRIEF, outpaint=BORDERS, mask_blur=blur))
            if backend == "cpu":  # it is a run with a mask, that of a canvas whose borders repeat the picture's
                canvas = np.pad(PICTURE, ((8, 4), (20, 0), (0, 0)), mode="edge")
                mask = np.full(canvas.shape[:2], 255, np.uint8)
                mask[8:-4, 20:] = 0
                usual = BRIEF | {"image": canvas, "mask": mask, "strength": 1.0, "width": 72, "height": 48}
                same = pipe(PROMPT, **usual, mask_blur=8.0 if blur is None else blur)
                assert np.array_equal(made[0].pixels, same.pixels)
    error = np.linalg.norm(made[0].latents - made[1].latents) / np.linalg.norm(made[0].latents)
    print(f"{kind}, blur {blur}: latents {error:.1e} (limit {APART})")
    assert error <= APART
    assert made[0].pixels.shape[:2] == (48, 72) and made[0].recipe["outpaint"] == "left=20; top=8; bottom=4"  # type: ignore[typeddict-item]
    assert "mask_sha256" not in made[0].recipe


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_the_picture_is_kept_bit_for_bit_outside_the_edge(backend: str) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)
    with qwenimg.load("shapes", backend=backend, precision="fp32") as pipe:
        made = pipe("a red circle", image=picture, outpaint={"right": 32}, steps=2, seed=1)
        soft = pipe("a red circle", image=picture, outpaint="right=32", steps=2, seed=1, mask_blur=2)
    assert made.pixels.shape == (96, 128, 3)
    assert np.array_equal(made.pixels[:, : 96 - REACH], picture[:, : 96 - REACH])
    assert np.array_equal(soft.pixels[:, :90], picture[:, :90])
    assert not np.array_equal(made.pixels[:, :96], picture), "the edge is blended"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("left=200,top=100", (Border("left", 200), Border("top", 100))),
        (" TOP = 1 ; right=2,", (Border("right", 2), Border("top", 1))),
        (["bottom=3", "left=0"], (Border("bottom", 3),)),
        ({"top": 5}, (Border("top", 5),)),
        ("", ()),
    ],
)
def test_borders(text: object, expected: tuple[Border, ...]) -> None:
    assert outpaint_text.parse(text) == expected
    assert outpaint_text.parse("; ".join(map(str, expected))) == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"outpaint": "left"}, "write left=200"), ({"outpaint": "left=-3"}, "write left=200"),
    ({"outpaint": "left=1e3"}, "write left=200"), ({"outpaint": "left=nan"}, "write left=200"),
    ({"outpaint": "middle=3"}, "write left=200"), ({"outpaint": "left=1,left=2"}, "left twice"),
    ({"outpaint": "left=0"}, "extends no side"), ({"outpaint": "left=999999999"}, "too much"),
    ({"outpaint": "left=16384"}, "at most 16384 pixels a side"), ({"outpaint": 7}, "write left=200"),
    ({"outpaint": "left=1" * 100}, "characters; at most 200"), ({"outpaint": "left=\ud800"}, "write left=200"),
    ({"outpaint": {"left": None}}, "write left=200"), ({"image": None}, "needs the picture that it extends"),
    ({"mask": np.zeros(PICTURE.shape[:2], np.uint8)}, "leave out mask"), ({"only_masked": 8}, "leave out only-masked"),
    ({"hires": 2}, "draw with one, then the other"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "told"), REFUSED, ids=lambda one: ascii(one)[:30])
@pytest.mark.sample(8)
def test_what_is_refused_is_one_line(tiny: dict[str, Path], given: dict[str, Any], told: str) -> None:
    with (
        qwenimg.load(tiny["sd15"], backend="cpu", precision="fp32") as pipe,
        pytest.raises(UsageError, match=told) as caught,
    ):
        pipe.check(PROMPT, **{**BRIEF, "outpaint": "left=8", **given})
    assert len(str(caught.value)) <= 300 and str(caught.value).isprintable()


@pytest.mark.sample(0)
def test_the_command_and_its_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PICTURE).save("a.png")
    base = ("-m", "shapes", "--steps", "2", "--backend", "cpu", "--quiet")
    first = cli("a red circle", *base, "-i", "a.png", "-s", "3", "--outpaint", "left=12,top=30", "-o", "b.png")
    assert first.code == 0 and seen(first.paths[0]).shape == (66, 64, 3), first.err
    again = cli("--from", "b.png", "-i", "a.png", "-o", "c.png", "--backend", "cpu", "--quiet")
    assert again.code == 0 and np.array_equal(seen(again.paths[0]), seen(first.paths[0])), again.err
    cli("--from", "b.png", "-o", "d.png").refused(2, "made with -i; give the same")
    cli("x", *base, "--outpaint", "left=12").refused(2, "needs the picture that it extends")
    planned = cli("plan", "shapes", "-i", "a.png", "--outpaint", "left=12,top=30", "--json")
    assert planned.code == 0 and planned.events[0]["size"] == [64, 66]


def seen(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)
