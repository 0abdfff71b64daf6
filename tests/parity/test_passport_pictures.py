"""Passports of a model that sees pictures: its vision tower and the VAE's encoder are stations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import passport_runs
from support.cli_runner import cli

import qwenimg
from qwenimg.common.base.config import exactly
from qwenimg.common.families.qwen_image import references
from qwenimg.common.networks.encoders import qwen_vl_vision
from qwenimg.common.parity import check, record, summary
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Passport, RecordedCall
from qwenimg.common.parity.sample import SEEN, called
from qwenimg.common.parts.texts.picture_texts import PictureTexts

ASKED: dict[str, Any] = {
    "prompt": "make it winter", "width": 32, "height": 48, "steps": 2, "seed": 0, "guidance": 4.0,
    "negative_prompt": " ",
}  # fmt: skip
PLACES = ("vae.encode 1", "vae.encode 2", "text_encoder picture 1", "text_encoder picture 2", "text_encoder 1")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    see_few_pixels(monkeypatch)


def see_few_pixels(patch: pytest.MonkeyPatch) -> None:
    """Make pictures so small that a test takes seconds: a megapixel has 16,576 keys."""
    patch.setattr(references, "AREA", 96**2)


@pytest.fixture(scope="module")
def passport(tiny_edit: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Passport]:
    """Recorded on torch, written and read."""
    path = tmp_path_factory.mktemp("passport") / "edit.safetensors"
    with pytest.MonkeyPatch.context() as patch, closing(load(tiny_edit, "cpu")) as pipe:
        see_few_pixels(patch)
        made = record.record(pipe, ASKED, exact=pipe.engine, sampled=True, notify=lambda text: None)
        passport_file.write(path, made, overwrite=False)
        yield passport_file.read(path)


def load(tiny_edit: dict[str, Path], backend: str) -> qwenimg.Pipeline:
    return qwenimg.load(tiny_edit["qwen-2511"], backend, "fp32")


@pytest.mark.sample(0)
def test_it_holds_on_mlx(passport: Passport, tiny_edit: dict[str, Path]) -> None:
    with closing(load(tiny_edit, "mlx")) as pipe:
        judged, drawn = list(check.blocks(passport, pipe)), check.picture(passport, pipe)
    print(*summary.lines(judged, drawn), sep="\n")
    assert summary.verdict(judged, drawn) == ""
    assert [station.name for station in passport.run][: len(PLACES)] == list(PLACES)
    assert all(one.output_error is None or 0 < one.output_error < 1e-5 for one in drawn.stations)
    assert {block.block for block in passport.blocks if block.component == "text_encoder"} == {
        "layer", "vision", "vision_end",
    }  # fmt: skip
    assert passport.picture is not None and passport.picture.asked["pictures"] == len(SEEN) == 2


def whole_windows(patch: pytest.MonkeyPatch) -> None:
    layout = qwen_vl_vision.layout

    def one(config: Any, rows: int, columns: int) -> Any:
        return layout(config, rows, columns)._replace(groups=((1, rows * columns),))

    patch.setattr(qwen_vl_vision, "layout", one)


def first_picture_twice(patch: pytest.MonkeyPatch) -> None:
    values = references.values
    first = called({"pictures": 1})["image"][0]
    patch.setattr(references, "values", lambda picture: values(np.resize(first, picture.shape)))


def pictures_exchanged_in_the_prompt(patch: pytest.MonkeyPatch) -> None:
    fill = PictureTexts.fill
    patch.setattr(PictureTexts, "fill", lambda own, prompt: fill(own, replace(prompt, pictures=prompt.pictures[::-1])))


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    whole_windows: "text_encoder picture",
    first_picture_twice: "vae.encode 2",
    pictures_exchanged_in_the_prompt: "text_encoder 1",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.sample(0)
def test_a_fault_is_named_where_it_is_made(
    passport: Passport, tiny_edit: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    fault(monkeypatch)
    with closing(load(tiny_edit, "cpu")) as pipe:
        drawn = check.picture(passport, pipe)
    print(*drawn.failures, sep="\n")
    assert drawn.failures[0].startswith(FAULTS[fault])


@pytest.mark.parametrize(("more", "pictures"), [((), 2), (("--pictures", "1"), 1), (("--mask", "MASK"), 2)])
@pytest.mark.sample(0)
def test_as_many_pictures_as_are_asked_for(
    tiny_edit: dict[str, Path], tmp_path: Path, more: tuple[str, ...], pictures: int
) -> None:
    Image.new("L", (32, 48), 255).save(tmp_path / "mask.png")
    passport = tmp_path / "passport.safetensors"
    words = [str(tmp_path / "mask.png") if word == "MASK" else word for word in more]
    passport_runs.record(tiny_edit["qwen-2509"], passport, "cpu", "--size", "32x48", "--sampled", *words)
    recorded = passport_file.read(passport).picture
    assert recorded is not None and recorded.asked["pictures"] == pictures


def test_more_pictures_than_the_model_takes(tiny_edit: dict[str, Path], tmp_path: Path) -> None:
    asked = ("--backend", "cpu", "--pictures", "2", "-o", str(tmp_path / "passport.safetensors"))
    cli("parity", "record", str(tiny_edit["qwen-edit"]), *asked).refused(2, "2 pictures are given", "takes one")


@pytest.mark.parametrize("pictures", [0, 3, -1, 1.5, "2"])
def test_a_number_of_pictures_that_no_passport_has(pictures: Any) -> None:
    asked = {**ASKED, "pictures": pictures}
    with pytest.raises(ValueError, match="pictures"):
        exactly(RecordedCall, asked)
