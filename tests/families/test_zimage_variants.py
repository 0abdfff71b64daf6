"""Z-Image's two variants: their names, defaults and downloads, and sizes that their positions do not hold."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_hub import REPO
from support.hub_cases import check_complete, pulled

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families import catalog, registry
from qwenimg.common.hub import requirements
from qwenimg.common.hub.describe import describe
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.residents import Residents

NAMES = {"z-image-turbo": 3.0, "z-image": 6.0}  # and the shift of the scheduler


def with_shift(folder: Path, copy: Path, shift: float) -> Path:
    """A copy of the model in `folder` whose scheduler has this shift."""
    shutil.copytree(folder, copy)
    scheduler = copy / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"shift": shift}))
    return copy


@pytest.mark.parametrize("name", NAMES)
def test_names_have_the_defaults_of_their_files(name: str) -> None:
    known, model = catalog.KNOWN[name], registry.published(catalog.KNOWN[name])
    assert model is not None and model.checkpoint.scheduler.shift == NAMES[name]
    named = Defaults(
        width=known.width,
        height=known.height,
        steps=known.steps,
        guidance=known.guidance,
        negative_prompt=known.negative_prompt,
    )
    assert named == model.defaults() and known.license == "Apache-2.0" and known.family == "z-image"


def test_the_scheduler_tells_the_variants_apart(tiny_zimage: Path, tmp_path: Path) -> None:
    for shift, steps, guidance in ((3.0, 8, 0.0), (6.0, 50, 4.0), (4.5, 50, 4.0)):
        folder = with_shift(tiny_zimage, tmp_path / f"turbo-{shift}", shift)  # the folder's name says nothing
        pipe = qwenimg.load(folder, backend="cpu")
        assert (pipe.defaults.steps, pipe.defaults.guidance, pipe.defaults.negative_prompt) == (steps, guidance, "")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Z-Image-Turbo", "z-image-turbo"),
        ("zimage-turbo", "z-image-turbo"),
        ("tongyi-mai/z-image-turbo", "z-image-turbo"),
        ("Z-Image", "z-image"),
        ("z-image-base", "z-image"),
        ("Tongyi-MAI/Z-Image", "z-image"),
    ],
)
def test_names(given: str, name: str) -> None:
    known = catalog.find(given)
    assert known is not None and known.name == name


def test_models_that_edit_are_refused_by_name() -> None:
    for name in ("z-image-edit", "Tongyi-MAI/Z-Image-Edit", "z-image-omni-base"):
        assert "edits images" in (catalog.refusal(name) or "")


def test_a_pulled_model_has_the_defaults_of_its_name(fake, cache, tiny_zimage: Path, monkeypatch) -> None:
    """Also where its files are the other variant's, as a repository may change."""
    files = {path.relative_to(tiny_zimage).as_posix(): path for path in tiny_zimage.rglob("*") if path.is_file()}
    fake.files = {name: path.read_bytes() for name, path in files.items() if not name.endswith(".jinja")}
    monkeypatch.setitem(catalog.KNOWN, "z-image", replace(catalog.KNOWN["z-image"], repo=REPO))
    folder, _, _ = pulled("z-image")
    check_complete(folder, fake.files)
    pipe = qwenimg.load("z-image", backend="cpu", precision="fp32")
    model = registry.published(catalog.KNOWN["z-image"])
    assert model is not None and pipe.defaults == model.defaults()
    result = pipe("a ring", width=32, height=32, steps=1, seed=1)
    assert result.recipe["model"] == "z-image" and result.recipe["guidance"] == 4.0


def test_a_pull_names_memory_and_license_first() -> None:
    for name in NAMES:
        text = requirements.machine_text(catalog.KNOWN[name], 0)
        assert "14.0 GB of memory on a GPU or a Mac" in text and "Apache-2.0" in text


def test_info_describes_a_folder(tiny_zimage: Path) -> None:
    description = describe(tiny_zimage)
    assert not description.faults and "pipeline: Z-Image-Turbo, text to image" in description.lines
    for name in ("transformer", "text_encoder", "vae"):
        assert any(line.startswith(f"{name}: ") and "parameters" in line for line in description.lines)


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
