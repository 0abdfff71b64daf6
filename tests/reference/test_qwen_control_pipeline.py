"""Qwen-Image under control, from a prompt and pictures to pixels, on both backends, against diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import oracle_control, peer
from support.tiny_control import write_controlnet, write_patches

import qwenimg
from qwenimg import Pipeline

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; measured 3e-6
PIXELS = 2  # of 255: a value on a rounding edge may go either way
MOVES = 8  # levels of 255 by which each input must move some pixel: a fault in it would show

RNG = np.random.default_rng(5)
WIDE, HIGH, LIKE = (RNG.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((30, 50), (70, 40), (48, 80)))
MASK = np.zeros((48, 80), np.uint8)
MASK[10:30, 25:61] = 255
NEGATIVE = "blue things that nobody wants, everywhere"
CASES: dict[str, dict[str, Any]] = {
    "one": {"pictures": [WIDE], "scales": [0.8], "size": (80, 48)},
    "one-without-guidance": {"pictures": [HIGH], "scales": [1.0], "size": (48, 112), "guidance": 1.0},
    "one-in-the-middle": {"pictures": [LIKE], "windows": [(0.3, 0.7)], "scales": [1.3], "size": (80, 48), "steps": 5},
    "two": {"pictures": [WIDE, HIGH], "windows": [(0, 0.5), (0.3, 1)], "scales": [0.5, 1], "size": (80, 48)},
    "mask": {"pictures": [LIKE], "scales": [1.0], "size": (80, 48), "mask": MASK},
    "mask-at-first": {"pictures": [LIKE], "windows": [(0, 0.7)], "scales": [0.7], "size": (80, 48), "mask": MASK},
}  # fmt: skip
SEED = 7


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A ControlNet, one that paints within a mask, and block-wise patches with and without a mask."""
    folder = tmp_path_factory.mktemp("nets")
    return {
        "union": write_controlnet(folder / "union"),
        "inpainting": write_controlnet(folder / "inpainting", 12, extra=4),
        "patches": write_patches(folder / "patches.safetensors"),
        "patches-mask": write_patches(folder / "patches-mask.safetensors", 22, extra=4),
    }


@pytest.fixture(scope="module")
def opened(tiny_folder: Path) -> dict[str, Pipeline]:
    return {name: qwenimg.load(tiny_folder, backend=name, precision="fp32") for name in BACKENDS}


def whole(case: dict[str, Any]) -> dict[str, Any]:
    usual = {"windows": [(0.0, 1.0)] * len(case["pictures"]), "steps": 3, "guidance": 4.0, "mask": None}
    return usual | case


def theirs(folder: Path, nets: dict[str, Path], case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    net = nets["union" if case.get("mask") is None else "inpainting"]
    return oracle_control.generate(folder, net, "a red circle", seed=SEED, negative_prompt=NEGATIVE, **whole(case))


def ours(pipe: Pipeline, nets: dict[str, Path], case: dict[str, Any]) -> Any:
    full = whole(case)
    net = nets["union" if full["mask"] is None else "inpainting"]
    controls = [(net, *each) for each in zip(full["pictures"], full["scales"], full["windows"], strict=True)]
    asked = {name: full[name] for name in ("steps", "guidance", "mask")}
    width, height = full["size"]
    return pipe(
        "a red circle", control=controls, width=width, height=height, seed=SEED, negative_prompt=NEGATIVE, **asked
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_folder: Path, nets: dict[str, Path], opened: dict[str, Pipeline], name: str) -> None:
    latents, pixels = theirs(tiny_folder, nets, CASES[name])
    assert pixels.std() > 10, "a constant picture would prove nothing"
    for backend, pipe in opened.items():
        result = ours(pipe, nets, CASES[name])
        peer.check_picture(f"{backend} {name}", result, (latents, pixels), LATENTS, PIXELS)


# What diffusers has not: two networks at once, and patches


@pytest.mark.sample(0)
def test_each_input_moves_the_picture(nets: dict[str, Path], opened: dict[str, Pipeline]) -> None:
    pipe = opened["cpu"]
    asked: dict[str, Any] = {"width": 80, "height": 48, "steps": 2, "guidance": 4.0, "seed": SEED}

    def drawn(*controls: Any, **more: Any) -> np.ndarray:
        return pipe("a red circle", control=list(controls), **asked, **more).pixels.astype(int)

    usual = drawn((nets["union"], WIDE), (nets["patches"], HIGH))
    others = {
        "first picture": drawn((nets["union"], HIGH), (nets["patches"], HIGH)),
        "second picture": drawn((nets["union"], WIDE), (nets["patches"], WIDE)),
        "no first": drawn((nets["patches"], HIGH)),
        "no second": drawn((nets["union"], WIDE)),
        "first scale": drawn((nets["union"], WIDE, 0.5), (nets["patches"], HIGH)),
        "second scale": drawn((nets["union"], WIDE), (nets["patches"], HIGH, 0.5)),
        "second window": drawn((nets["union"], WIDE), (nets["patches"], HIGH, 1.0, (0.5, 1.0))),
    }
    moved = {name: int(np.abs(pixels - usual).max()) for name, pixels in others.items()}
    masked = drawn((nets["patches-mask"], WIDE), mask=MASK)
    moved["mask"] = int(np.abs(drawn((nets["patches-mask"], WIDE)) - masked).max())
    print(moved)
    assert min(moved.values()) > MOVES
    swapped = drawn((nets["patches"], HIGH), (nets["union"], WIDE))
    assert np.abs(swapped - usual).max() <= 1, "their order changes nothing but roundings"


def test_no_control_is_left_behind(nets: dict[str, Path], opened: dict[str, Pipeline]) -> None:
    pipe = opened["cpu"]
    asked: dict[str, Any] = {"width": 80, "height": 48, "steps": 2, "seed": SEED}
    plain = pipe("a red circle", **asked)
    controlled = pipe("a red circle", control=(nets["union"], WIDE), **asked)
    again = pipe("a red circle", **asked)
    assert np.array_equal(plain.latents, again.latents) and not np.array_equal(plain.latents, controlled.latents)
    for scale, window in ((0.0, (0.0, 1.0)), (1.0, (0.1, 0.4))):
        off = pipe("a red circle", control=(nets["patches"], WIDE, scale, window), **asked)
        assert np.array_equal(plain.latents, off.latents)
        assert any("has no effect" in line for line in off.warnings)
