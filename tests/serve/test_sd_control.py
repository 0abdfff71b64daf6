"""Units of AUTOMATIC1111's ControlNet extension: every form of their pictures, their numbers, and what is refused."""

from __future__ import annotations

import base64
import copy
import random
from typing import Any

import pytest

from qwenimg.cli.serve.apis import sd_control
from qwenimg.cli.serve.apis.sd_control import ControlUnits
from qwenimg.cli.serve.http_error import HttpError

FIRST, SECOND, THIRD = (base64.b64encode(name).decode() for name in (b"first", b"second", b"third"))


def units(*units: Any, name: str = "controlnet", images: tuple[bytes, ...] = ()) -> ControlUnits:
    return sd_control.units({name: {"args": list(units)}}, images)


def texts(made: ControlUnits) -> list[str]:
    return list(map(str, made.controls))


@pytest.mark.parametrize("name", ["controlnet", "ControlNet", "CONTROLNET"])
def test_a_whole_unit(name: str) -> None:
    """As the extension's own clients send it, with the fields that have no effect here."""
    unit = {
        "enabled": True, "module": "canny", "model": "control_v11p_sd15_canny [d14c016b]", "weight": 0.8,
        "image": FIRST, "resize_mode": "Crop and Resize", "low_vram": False, "processor_res": 512, "threshold_a": 100,
        "threshold_b": 200, "guidance_start": 0.1, "guidance_end": 0.7, "pixel_perfect": True, "hr_option": "Both",
        "control_mode": "My prompt is more important", "mask": None, "effective_region_mask": None,
        "advanced_weighting": None, "ipadapter_input": None, "save_detected_map": True,
    }  # fmt: skip
    made = units(unit, {"enabled": False, "model": 3}, name=name)
    assert texts(made) == ["control_v11p_sd15_canny=canny@1:0.8:0.1-0.7"]
    assert made.pictures == (b"first",) and made.mode == "prompt"


PICTURES: list[tuple[dict[str, Any], tuple[bytes, ...]]] = [
    ({"image": FIRST}, (b"first",)),
    ({"image": f"data:image/png;base64,{FIRST}"}, (b"first",)),
    ({"input_image": FIRST}, (b"first",)),
    ({"image": "", "input_image": FIRST}, (b"first",)),
    ({"image": {"image": FIRST, "mask": None}}, (b"first",)),
    ({"image": {"image": FIRST, "mask": ""}}, (b"first",)),
    ({"image": [FIRST, None]}, (b"first",)),
    ({"image": [{"image": FIRST}]}, (b"first",)),
    ({}, (b"started",)),
    ({"image": None}, (b"started",)),
    ({"image": {"image": None}}, (b"started",)),
]


@pytest.mark.parametrize(("given", "pictures"), PICTURES)
def test_the_forms_of_a_picture(given: dict[str, Any], pictures: tuple[bytes, ...]) -> None:
    made = units({"model": "x", **given}, images=(b"started", b"other"))
    assert made.pictures == pictures and texts(made) == ["x=1"]


def test_an_adapter_beside_a_network() -> None:
    """Several pictures, their mask, and a mode of its own, which is not that of the networks."""
    adapter = {
        "module": "ip-adapter-auto", "model": "ip-adapter-plus_sd15 [836b5c2e]", "weight": 0.6, "guidance_end": 0.9,
        "image": [{"image": FIRST}, {"image": SECOND}], "effective_region_mask": THIRD, "control_mode": "Balanced",
    }  # fmt: skip
    made = units({"model": "depth", "image": SECOND, "control_mode": 2, "guidance": 0.5}, adapter)
    assert texts(made) == [
        "depth=1:1:0-0.5", "ip-adapter-plus_sd15=2:0.6:0-0.9", "ip-adapter-plus_sd15=also@3",
        "ip-adapter-plus_sd15=mask@4",
    ]  # fmt: skip
    assert made.pictures == (b"second", b"first", b"second", b"third") and made.mode == "control"


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        ({"image": [FIRST, SECOND]}, "a mask"),
        ({"image": [{"image": FIRST}, {"image": SECOND}]}, "several pictures"),
        ({"image": []}, "has image and mask"),
        ({"image": [FIRST, SECOND, THIRD]}, "has image and mask"),
        ({"image": [{"image": FIRST, "mask": SECOND}]}, "a mask"),
        ({"image": 5}, "base64"),
        ({"image": {"a": 1}}, "has no image"),
        ({"image": [{"image": FIRST}] * 9, "module": "ip-adapter-auto"}, "at most 8"),
        ({"image": FIRST, "ipadapter_input": ["UEsDB"]}, "ipadapter_input"),
        ({"image": FIRST, "advanced_weighting": [0.1] * 13}, "advanced_weighting"),
        ({"image": FIRST, "hr_option": "High res only"}, "counts in both passes"),
        ({"image": FIRST, "weight": 99}, "scale"),
        ({"image": FIRST, "weight": [1]}, "numbers"),
        ({"image": FIRST, "guidance_start": 0.9, "guidance_end": 0.1}, "behind its end"),
        ({"image": FIRST, "module": "instant_id_face_embedding"}, "instant_id_face_embedding"),
        ({"image": FIRST, "module": ["canny"]}, "is not here"),
        ({"image": FIRST, "union_control_type": "Smell"}, "union_control_type"),
        ({"image": FIRST, "model": "a=b"}, "semicolon"),
    ],
)  # fmt: skip
def test_what_is_refused(unit: dict[str, Any], words: str) -> None:
    with pytest.raises(HttpError) as caught:
        units({"model": "x", **unit})
    print(caught.value.text)
    assert words in caught.value.text and caught.value.status == 400 and caught.value.text.isprintable()


def test_two_networks_with_two_modes_are_refused() -> None:
    with pytest.raises(HttpError, match="several control_modes"):
        units({"model": "x", "image": FIRST}, {"model": "y", "image": FIRST, "control_mode": 1})


def test_mutants_are_read_or_refused_in_one_line() -> None:
    whole = {
        "enabled": True, "module": "ip-adapter-auto", "model": "x [0123abcd]", "weight": 0.6, "guidance_start": 0.1,
        "guidance_end": 0.9, "control_mode": 0, "image": [{"image": FIRST, "mask": None}, {"image": SECOND}],
        "effective_region_mask": THIRD, "threshold_a": -1, "union_control_type": "Unknown", "hr_option": "Both",
    }  # fmt: skip
    wrong: list[Any] = [
        None, True, -1, 0, 2**70, 1e300, float("nan"), float("inf"), "", "x", "=;", "\ud800", "\x1b[2J", "é", [], {},
        [[]], [None], [FIRST], {"image": {}}, {"image": []}, FIRST, "n" * 3_000, b"x".hex(),
    ]  # fmt: skip
    chance, verdicts = random.Random(5), {"read": 0, "refused": 0}
    for _ in range(3_000):
        unit: dict[str, Any] = copy.deepcopy(whole)
        for _ in range(chance.choice((1, 1, 2, 4))):
            unit[chance.choice([*unit])] = copy.deepcopy(chance.choice(wrong))
        if chance.random() < 0.2 and isinstance(unit["image"], list) and unit["image"]:
            unit["image"][0] = copy.deepcopy(chance.choice(wrong))
        try:
            made = units(unit, images=chance.choice(((), (b"started",))))
            assert len(made.pictures) == len(made.controls) <= 8
            verdicts["read"] += 1
        except HttpError as error:
            verdicts["refused"] += 1
            assert error.status == 400 and error.text.isprintable(), error.text
    print(verdicts)
    assert min(verdicts.values()) > 500
