"""Z-Image's two variants are told apart by their scheduler; sizes that their positions do not hold are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families import catalog
from qwenimg.common.hub.describe import describe
from qwenimg.common.runtime.residents import Residents


def with_shift(folder: Path, copy: Path, shift: float) -> Path:
    """A copy of the model in `folder` whose scheduler has this shift."""
    shutil.copytree(folder, copy)
    scheduler = copy / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"shift": shift}))
    return copy


def test_the_scheduler_tells_the_variants_apart(tiny_zimage: Path, tmp_path: Path) -> None:
    for shift, steps, guidance in ((3.0, 8, 0.0), (6.0, 50, 4.0), (4.5, 50, 4.0)):
        folder = with_shift(tiny_zimage, tmp_path / f"turbo-{shift}", shift)  # the folder's name says nothing
        pipe = qwenimg.load(folder, backend="cpu")
        assert (pipe.defaults.steps, pipe.defaults.guidance, pipe.defaults.negative_prompt) == (steps, guidance, "")


def test_models_that_edit_are_refused_by_name() -> None:
    for name in ("z-image-edit", "Tongyi-MAI/Z-Image-Edit", "z-image-omni-base"):
        assert "edits images" in (catalog.refusal(name) or "")


@pytest.mark.parametrize(("shift", "name"), [(3.0, "Z-Image-Turbo"), (6.0, "Z-Image"), ("x", "Z-Image")])
def test_info_tells_the_variants_apart(tiny_zimage: Path, tmp_path: Path, shift: Any, name: str) -> None:
    folder = shutil.copytree(tiny_zimage, tmp_path / "any")
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"shift": shift}))
    assert f"pipeline: {name}, text to image" in describe(folder).lines


@pytest.mark.parametrize(("width", "height"), [(800, 64), (64, 784), (4096, 4096)])
def test_sizes_beyond_the_positions_are_refused_before_anything_is_loaded(
    tiny_zimage: Path, monkeypatch: pytest.MonkeyPatch, width: int, height: int
) -> None:
    pipe = qwenimg.load(tiny_zimage, backend="cpu", precision="fp32")
    monkeypatch.setattr(Residents, "acquire", lambda *_: pytest.fail("something was loaded"))
    with pytest.raises(UsageError, match=rf"{width}x{height} is too large .* positions of 768x768 pixels"):
        pipe("a ring", width=width, height=height, steps=1)


def test_the_largest_size_has_positions(tiny_zimage: Path) -> None:
    pipe = qwenimg.load(tiny_zimage, backend="cpu", precision="fp32")
    assert pipe("a ring", width=768, height=16, steps=1, seed=1).pixels.shape == (16, 768, 3)
