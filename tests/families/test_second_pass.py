"""Two passes with each family and on both backends: the second is a run from the enlarged picture; and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import upscalers
from support.cli_runner import cli
from support.crossed import crossed
from support.family_cases import ASKED, BACKENDS, FIRST, HOLE, PICTURE, PROMPT, STARTING, opener, places, see_few_pixels
from support.upscalers import as_torch

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.texts import read_texts
from qwenimg.common.pipeline.result import Result, Step

APART = 1e-4  # of the backends' latents, relative L2; measured at most 3e-5
TWO = {"hires": 1.5, "hires_strength": 0.6}
BRIEF = ASKED | {"steps": 3}
START: dict[str, Any] = {"image": PICTURE, "strength": 0.7}


@pytest.fixture(autouse=True)
def few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    see_few_pixels(monkeypatch)


@pytest.fixture
def upscaler(tmp_path: Path) -> Path:
    as_torch(tmp_path / "x4.pth", upscalers.rrdbnet(blocks=1, features=8, growth=4))
    return tmp_path / "x4.pth"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pair
        for pair in crossed([kind for kind in FIRST.values() if kind in STARTING], ("lanczos", "latent"))
        if pair.values != ("cascade", "latent")  # whose latents are not those that a run begins from
    ],
)
@pytest.mark.sample(1)
def test_both_backends_draw_the_same_picture(tiny: dict[str, Path], tmp_path: Path, kind: str, name: str) -> None:
    made: list[Result] = []
    for backend in BACKENDS:
        with opener(kind, places(tiny, tmp_path)[kind], tiny)(backend) as pipe:
            steps = list(pipe.stream(PROMPT, **BRIEF, **TWO, hires_with=name))
        *before, result = steps
        assert isinstance(result, Result) and result.pixels.shape[:2] == (54, 78)
        totals = {event.total for event in before if isinstance(event, Step)}
        assert [event.index for event in before if isinstance(event, Step)] == [*range(1, len(before) + 1)]
        assert totals == {len(before)}, "the bar counts both passes"
        made.append(result)
    error = np.linalg.norm(made[0].latents - made[1].latents) / np.linalg.norm(made[0].latents)
    print(f"{kind} {name}: {len(before)} steps, latents {error:.1e} (limit {APART})")
    assert error <= APART
    assert (made[0].recipe["width"], made[0].recipe["height"]) == (52, 36), "of the first pass"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "given"), [("lanczos", {}), ("nearest", {}), ("lanczos", START)])
@pytest.mark.sample(0)
def test_the_second_pass_is_a_run_from_the_enlarged_picture(
    tiny: dict[str, Path], backend: str, name: str, given: dict[str, Any]
) -> None:
    """The same bits, with the seed of the first pass; also a sampler that draws noise, and where a picture comes
    first."""
    common = {"steps": 5, "seed": 7, "guidance": 3.0, "sampler": "euler_a"}
    with qwenimg.load(tiny["sd15"], backend=backend, precision="fp32") as pipe:
        first = pipe(PROMPT, width=48, height=32, **common, **given)
        larger = pixels.fit(first.pixels, 72, 48) if name == "lanczos" else pixels.nearest(first.pixels, 72, 48)
        expected = pipe(PROMPT, image=larger, **common | {"steps": 4}, strength=0.6)
        made = pipe(PROMPT, width=48, height=32, **common, **given, **TWO, hires_steps=4, hires_with=name)
    assert np.array_equal(made.latents, expected.latents) and np.array_equal(made.pixels, expected.pixels)
    assert not np.array_equal(made.pixels, larger)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_an_upscaler_enlarges_between_the_passes(tiny: dict[str, Path], upscaler: Path, backend: str) -> None:
    common = {"steps": 4, "seed": 7, "guidance": 3.0}
    with qwenimg.load(tiny["sd15"], backend=backend, precision="fp32") as pipe:
        first = pipe(PROMPT, width=32, height=24, **common)
        wanted = upscalers.formula(upscalers.rrdbnet(blocks=1, features=8, growth=4), first.pixels)[0]
        larger = (wanted.clip(0, 1) * 255).round().transpose(1, 2, 0).astype(np.uint8)
        expected = pipe(PROMPT, image=pixels.fit(larger, 64, 48), strength=0.5, **common)
        made = pipe(PROMPT, width=32, height=24, **common, hires=2, hires_with=str(upscaler))
        planned = pipe.estimate(PROMPT, width=32, height=24, **common, hires=2, hires_with=str(upscaler))
    apart = np.abs(made.pixels.astype(int) - expected.pixels).max()
    print(f"{backend}: {apart} of 255 from the formula, {planned.memory:,} bytes planned")
    assert apart <= 2
    assert made.recipe["hires_with"] == "x4.pth" and len(made.recipe["hires_with_sha256"]) == 64  # type: ignore[typeddict-item]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image": PICTURE, "mask": HOLE}, "leave out the mask"),
    ({"hires": 0.5}, "hires is 0.5; choose 1 to 8"),
    ({"hires": float("nan")}, "choose 1 to 8"),
    ({"hires": 8, "width": 4096, "height": 64}, "makes the picture 32768x512; at most 16384"),
    ({"hires_strength": 0}, "hires-strength is 0"),
    ({"hires_strength": 0.1}, "the second pass of hires: strength 0.1 of 3 steps leaves none"),
    ({"hires_steps": 0}, "hires-steps"),
    ({"hires_with": "latent-sharp"}, "choose one of lanczos, nearest, latent"),
    ({"hires_with": ""}, "choose one of"),
    ({"hires_with": 3}, "expected a text"),
    ({"step_cache": 0.1}, "leave out step-cache"),
]


@pytest.mark.parametrize(("given", "told"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_no_second_pass_does_is_one_line(tiny: dict[str, Path], given: dict[str, Any], told: str) -> None:
    with (
        qwenimg.load(tiny["sd15"], backend="cpu", precision="fp32") as pipe,
        pytest.raises(UsageError, match=told) as caught,
    ):
        pipe.check(PROMPT, **{**BRIEF, **TWO, **given})
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


def test_layers_are_refused_and_options_without_a_second_pass_are_told(tiny: dict[str, Path]) -> None:
    with (
        opener("qwen-layered", tiny["qwen-layered"], tiny)("cpu") as pipe,
        pytest.raises(UsageError, match="layers in one pass"),
    ):
        pipe.check(PROMPT, **BRIEF, hires=2)
    with qwenimg.load(tiny["sd15"], backend="cpu", precision="fp32") as pipe:
        made = pipe(PROMPT, **BRIEF, hires_strength=0.3)
    assert "hires-strength has no effect without hires" in made.warnings
    assert not [name for name in made.recipe if name.startswith("hires")]


@pytest.mark.sample(0)
def test_the_command_draws_and_replays_bit_for_bit(upscaler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(upscaler.parent)
    base = ("-m", "shapes", "--size", "64x48", "--steps", "4", "--backend", "cpu", "--quiet")
    first = cli("a red circle", *base, "-s", "1-2", "--hires", "1.5", "--hires-with", "x4.pth", "-o", "a/")
    assert first.code == 0 and len(first.paths) == 2, first.err
    texts = read_texts(first.paths[0])
    assert "Size: 64x48" in texts["parameters"]
    assert "Denoising strength: 0.5, Hires upscale: 1.5, Hires steps: 2, Hires upscaler: x4" in texts["parameters"]
    source = str(first.paths[0])
    cli("--from", source, "-o", "b.png", "--quiet").refused(2, "made with --hires-with (x4.pth); give the same")
    for number, more in enumerate((("--hires-with", "x4.pth"), ("--models-dir", str(models(upscaler))))):
        again = cli("--from", source, "-o", f"b{number}.png", "--backend", "cpu", "--quiet", *more)
        assert again.code == 0, again.err
        assert np.array_equal(seen(again.paths[0]), seen(first.paths[0]))
    other = cli("--from", source, "-o", "c.png", "--backend", "cpu", "--quiet", "--hires-with", "lanczos")
    assert other.code == 0 and "what --hires-with has is not that" in other.err
    cli("x", *base, "--hires", "2", "--hires-with", "none.pth").refused(5, "none.pth: no such file")
    lines = upscaler.with_name("lines.txt")
    lines.write_text('{"prompt": "a red circle", "hires": 1.25, "hires_with": "latent"}\n')
    ran = cli("--prompt-file", str(lines), *base, "-s", "1", "-o", "d.png")
    assert ran.code == 0 and seen(ran.paths[0]).shape == (60, 80, 3)


def models(upscaler: Path) -> Path:
    folder = upscaler.parent / "models" / "upscale_models"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x4.pth").write_bytes(upscaler.read_bytes())
    return folder.parent


def seen(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as picture:
        return np.asarray(picture)


def test_a_plan_has_both_passes() -> None:
    ran = cli("plan", "sd15", "--size", "512x512", "--steps", "30", "--hires", "2", "--on", "3060")
    lines = ran.out.decode().splitlines()
    assert ran.code == 0 and "512x512, then 1024x1024, 45 steps" in lines[0], lines[0]
    stages = [line.split()[0] for line in lines if line.startswith(("text ", "denoise ", "decode ", "encode "))]
    assert stages == ["text", "denoise", "decode", "encode", "denoise", "decode"]
