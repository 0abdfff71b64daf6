"""The variation of a seed against AUTOMATIC1111's formula in float64, written again with NumPy's functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.cli_runner import cli

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.jobs.job import jobs_of
from qwenimg.common.numbers import noise, variation
from qwenimg.common.numbers.slerp import slerp
from qwenimg.common.numbers.variation import Variation, parse
from qwenimg.common.prompts.wildcards import Wildcards

FLOAT32 = 1.2e-7  # half a step of the largest noise, relative to it
# SHA-256 of the float32 bytes: the same on every machine, so that an old picture can be drawn again.
PINNED = "44d94de1d54cbc2f9027b16d35ac734693aeab6f38ea5dcfd28e31dde545f8a0"


def published(share: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Spherical interpolation of each column."""
    a, b = low.astype(np.float64), high.astype(np.float64)
    unit_a = a / np.linalg.norm(a, axis=-2, keepdims=True)
    unit_b = b / np.linalg.norm(b, axis=-2, keepdims=True)
    angle = np.arccos((unit_a * unit_b).sum(-2, keepdims=True))
    return (np.sin((1 - share) * angle) * a + np.sin(share * angle) * b) / np.sin(angle)


@pytest.mark.parametrize("shape", [(1, 4, 64, 64), (1, 16, 13, 27), (3, 16, 2, 8)])
@pytest.mark.parametrize("share", [1e-3, 0.2, 0.5, 0.999])
def test_it_is_the_published_formula(shape: tuple[int, ...], share: float) -> None:
    low, high = noise.normal(shape, 3), noise.normal(shape, 7)
    ours, theirs = slerp(share, low, high), published(share, low, high)
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    print(f"{shape} {share}: {error:.1e}")
    assert ours.dtype == np.float32 and error < FLOAT32


def test_the_bits_are_the_same_everywhere() -> None:
    turned = Variation(7, 0.2).applied(noise.normal((1, 16, 13, 27), 3))
    assert noise.sha256(turned) == PINNED


def test_the_ends_and_vectors_of_one_direction() -> None:
    low, high = noise.normal((1, 4, 8, 8), 3), noise.normal((1, 4, 8, 8), 7)
    assert np.array_equal(Variation(7, 0.0).applied(low), low)
    assert np.abs(Variation(7, 1.0).applied(low) - high).max() < 1e-6
    assert np.abs(slerp(0.3, low, low) - low).max() < 1e-6
    for other in (-low, np.zeros_like(low), low[..., :1, :] * 0 + 1e-30):
        assert np.isfinite(slerp(0.5, low, np.broadcast_to(other, low.shape))).all()
    assert np.isfinite(slerp(0.5, low[..., :1, :], high[..., :1, :])).all()  # one row: all of one direction
    assert abs(float(slerp(0.5, *(noise.normal((1, 4, 64, 64), seed) for seed in (1, 2))).std()) - 1) < 0.05


@pytest.mark.parametrize(
    "text",
    ["7", "7:", ":0.2", "7:2", "7:1.0001", "7:-0.1", "-1:0.2", "7:nan", "7:1e-3", "7:.", "7:0.2:1",
     "\N{ARABIC-INDIC DIGIT SEVEN}:0.2", f"{2**64}:0.2", "9" * 30 + ":0.2", "x" * 3000, "\ud800:0.2",
     "7:0.2\n8:0.2"],
)  # fmt: skip
def test_what_is_no_variation(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        variation.check(text)
    assert len(str(caught.value)) <= 300 and str(caught.value).isprintable()


def test_a_text_is_read_back() -> None:
    for one in (Variation(7, 0.2), Variation(2**64 - 1, 1.0), Variation(0, 1 / 3), Variation(1, 1e-9)):
        assert parse(str(one)) == one
    assert parse("7:.5") == parse(" 7:0.5 ") == Variation(7, 0.5)


def test_a_number_of_pictures_counts_up_the_second_seed() -> None:
    def drawn(**options: object) -> list[tuple[int, str]]:
        jobs, _ = jobs_of({"prompt": "x", **options}, [("", {})], Wildcards(()), lambda _: 5)
        return [(job.seed, job.get("variation")) for job in jobs]

    assert drawn(variation="7:0.2", num_images=3) == [(5, "7:0.2"), (5, "8:0.2"), (5, "9:0.2")]
    assert drawn(variation="7:0.2", seed="3-4") == [(3, "7:0.2"), (4, "7:0.2")]
    with pytest.raises(UsageError, match="not a whole number from 0"):
        drawn(variation=f"{2**64 - 1}:0.2", num_images=2)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("mlx", marks=pytest.mark.rest)])
def test_the_command_draws_it_and_draws_it_again(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    monkeypatch.chdir(tmp_path)
    few = ("a red circle", "--steps", "2", "-s", "3", "--backend", backend, "--quiet")
    assert cli(*few, "--variation", "7:0.2", "-N", "2", "-o", "v-{index}.png").code == 0
    pipe = qwenimg.load("shapes", backend)
    whole = pipe("a red circle", steps=2, seed=3)
    near, far = (pipe("a red circle", steps=2, seed=3, variation=f"{seed}:0.2") for seed in (7, 8))
    shape = near.latents.shape
    assert whole.recipe["noise_sha256"] == noise.sha256(noise.normal(shape, 3))
    expected = slerp(0.2, noise.normal(shape, 3), noise.normal(shape, 7))
    assert near.recipe["noise_sha256"] == noise.sha256(expected)
    assert len({one.recipe["noise_sha256"] for one in (whole, near, far)}) == 3
    assert near.recipe["variation"] == "7:0.2" and "variation" not in whole.recipe
    assert cli("--from", "v-2.png", "-o", "again.png", "--backend", backend, "--quiet").code == 0
    from PIL import Image

    for name in ("v-2.png", "again.png"):
        assert np.array_equal(np.asarray(Image.open(name)), far.pixels), name
    with pytest.raises(UsageError, match="leave one out"):
        pipe("x", variation="7:0.2", latents=np.zeros(shape, np.float32))
    cli("x", "--variation", "7:0.2", "--latents", "n.npy").refused(2, "--latents", "leave one out")
