"""Files of upscalers: told by their tensors, from safetensors and from torch's files, and refused in one line."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import upscalers
from support.file_mutants import assert_line, campaign, damaged, read_alike
from support.upscalers import Tensors, as_safetensors, as_torch

from qwenimg.common.base.errors import ModelError
from qwenimg.common.upscaling.network_file import described, open_upscaler

SMALL: dict[str, Callable[[], Tensors]] = {
    "esrgan": lambda: upscalers.rrdbnet(blocks=1, features=4, growth=2, enlarged=1),
    "places": lambda: upscalers.places(upscalers.rrdbnet(blocks=2, features=4, growth=2)),
    "compact": lambda: upscalers.srvgg(convs=1, features=4, scale=2),
}


@pytest.mark.parametrize("kind", SMALL)
def test_all_layouts_of_one_network_are_one(tmp_path: Path, kind: str) -> None:
    tensors = SMALL[kind]()
    average = {name: values + 1 for name, values in tensors.items()}
    made = [
        as_safetensors(tmp_path / "a.safetensors", tensors),
        as_safetensors(tmp_path / "b.safetensors", tensors, "params."),
        as_torch(tmp_path / "c.pth", tensors, "params"),
        as_torch(tmp_path / "d.pth", tensors, ""),
        as_torch(tmp_path / "e.pth", tensors, "params_ema", old=True),
        as_torch(tmp_path / "f.pth", {f"module.{name}": values for name, values in tensors.items()}, "params"),
        as_safetensors(
            tmp_path / "g.safetensors",
            {f"params.{name}": values for name, values in average.items()}
            | {f"params_ema.{name}": values for name, values in tensors.items()},
        ),
    ]
    read = []
    for path in made:
        upscaler = open_upscaler(path)
        assert upscaler.scale == (2 if kind != "places" else 4), path
        entry = next(entry for name, entry in upscaler.component.plan.entries.items() if name.endswith("weight"))
        first = upscaler.component.plan.entries[sorted(upscaler.component.plan.entries)[0]]
        read.append((entry.shape, first.source.first.file.read(first.source.first.begin, 8)))
        upscaler.close()
    assert len({bits for _, bits in read}) == 1, read  # of the average where both are there
    assert described(made[0]) == described(made[4]) is not None


def test_published_sizes_are_told_from_the_shapes(tmp_path: Path) -> None:
    """RealESRGAN_x4plus and anime_6B by their numbers of blocks; general-x4v3 and animevideov3 of convolutions."""
    shapes: dict[str, tuple[Tensors, str]] = {
        "anime_6B": (upscalers.rrdbnet(6, 64, 32), "RRDBNet, x4, 4.5 million parameters"),
        "general-x4v3": (upscalers.srvgg(32, 64, 4), "SRVGGNetCompact, x4, 1.2 million parameters"),
        "animevideov3": (upscalers.srvgg(16, 64, 4), "SRVGGNetCompact, x4, 0.6 million parameters"),
    }
    for name, (tensors, said) in shapes.items():
        assert described(as_torch(tmp_path / f"{name}.pth", tensors)) == said


def refusals() -> dict[str, tuple[Tensors, str]]:
    good = SMALL["esrgan"]()
    without = {name: values for name, values in good.items() if name != "conv_hr.bias"}
    one = np.ones((4, 4, 3, 3), np.float32)
    return {
        "lacks": (without, "lacks tensor 'conv_hr.bias'"),
        "more": (good | {"extra.weight": one}, "extra.weight'"),
        "shape": (good | {"conv_hr.weight": one[:2]}, "has shape [2, 4, 3, 3], expected [4, 4, 3, 3]"),
        "block": ({**good, "body.7.rdb1.conv1.weight": one}, "lacks tensor"),
        "far block": ({**good, "body.999999.rdb1.conv1.weight": one}, "lacks tensor"),
        "grey": (upscalers.rrdbnet(1, 4, 2, channels=1), "pictures of 1 channels"),
        "channels": (good | {"conv_first.weight": np.ones((4, 5, 3, 3), np.float32)}, "takes 5 channels"),
        "large": (upscalers.rrdbnet(1, 4, 2, enlarged=5), "enlarges 32 times"),
        "two names": (good | {"trunk_conv.weight": one}, "under two names"),
        "relu": ({n: v for n, v in SMALL["compact"]().items() if v.ndim != 1 or "bias" in n}, "PReLU"),
        "esrgan+": (good | {"model.1.sub.0.RDB1.conv1x1.weight": one}, "ESRGAN+"),
        "swin": ({"conv_first.weight": one, "layers.0.residual_group.blocks.0.mlp.fc1.bias": one}, "SwinIR"),
        "lora": ({"a.lora_A.weight": one[0, 0], "a.lora_B.weight": one[0, 0]}, "a LoRA"),
        "nothing": ({"a": one}, "no upscaler that is read"),
    }


@pytest.mark.parametrize("name", refusals())
def test_other_files_are_refused_in_a_line_that_says_what_they_are(tmp_path: Path, name: str) -> None:
    tensors, said = refusals()[name]
    for path in (as_safetensors(tmp_path / "u.safetensors", tensors), as_torch(tmp_path / "u.pth", tensors)):
        with pytest.raises(ModelError) as caught:
            open_upscaler(path, lambda header: "a LoRA" if any("lora_A" in name for name in header.tensors) else None)
        assert said in str(caught.value)
        assert_line(str(caught.value), path.name)


def test_what_is_no_file_of_weights(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "text.pth").write_text("a network")
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    for name in ("pipe.pth", "text.pth", "empty.pth", "loop.pth", "none.pth", "."):
        with pytest.raises(ModelError):
            open_upscaler(tmp_path / name)


# Damaged ones


def outcome(path: Path) -> str:
    """What becomes of a file: `refused`, `values` where they are not numbers, or `read`, the same on both backends."""
    try:
        upscaler = open_upscaler(path)
    except ModelError as error:
        assert_line(str(error), path.name)
        return "refused"
    return read_alike(upscaler.component.plan, path.name)


def mutants(path: Path, whole: bytes, count: int, chance: random.Random) -> Iterator[Callable[[], str]]:
    """Half of them damaged at the head, where tensors are described, and half at the end, where an archive has its
    directory."""
    end = min(3000, len(whole) // 2)
    for number in range(count):
        if number % 2:
            content = damaged(whole, 4000, chance)
        else:
            content = whole[:-end] + damaged(whole[-end:], end, chance)
        path.write_bytes(content)
        yield lambda: outcome(path)


def run(folder: Path, count: int, seed: int) -> Counter[str]:
    chance, found = random.Random(seed), Counter[str]()
    writers = {
        "u.safetensors": lambda tensors, path: as_safetensors(path, tensors),
        "u.pth": lambda tensors, path: as_torch(path, tensors),
        "old.pth": lambda tensors, path: as_torch(path, tensors, old=True),
    }
    for name, write in writers.items():
        for kind in SMALL:
            path = folder / name
            whole = write(SMALL[kind](), path).read_bytes()
            assert outcome(path) == "read"
            found += campaign(mutants(path, whole, count, chance), seed)
    assert found.keys() >= {"refused", "read"}
    return found


def test_mutants(tmp_path: Path) -> None:
    run(tmp_path, 25, 1)


@pytest.mark.slow
def test_two_thousand_mutants(tmp_path: Path) -> None:
    assert run(tmp_path, 300, 2).total() == 2700
