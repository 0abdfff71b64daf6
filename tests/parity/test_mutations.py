"""Some of the faults that `make mutations` plants, on both backends: each is caught, and nothing where none is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_cases import write_lora
from mutant import Judge, Mutant, Patch, Probe, side
from mutants_qwen import MUTANTS, prepare
from mutants_sd import MUTANTS as SD_MUTANTS
from mutants_sd3 import MUTANTS as SD3_MUTANTS
from mutants_zimage import MUTANTS as ZIMAGE_MUTANTS

import qwenimg
from qwenimg.common.hub.resolve import resolve
from qwenimg.common.numbers import packing
from qwenimg.common.parity import check

# By family the faults that are planted with each change; all others are slow.
IN_16_BIT = (
    "guidance_sign", "text_rope_one_later", "no_txt_norm", "time_plus_one", "template_without_last_newline",
    "red_and_blue_exchanged", "no_latents_mean",
)  # fmt: skip
QUICK = {
    "qwen": {
        "fp32": (
            "layer_norm_eps",
            "packing_order",
            "latents_std_0.003_off",
            "latents_std_0.01_off",
            "pixels_truncated",
        ),
        "bf16": ("no_residual", "norm_in_half", "layer_norm_eps", *IN_16_BIT),
        "fp16": ("guidance_sign", "time_plus_one", "gelu_erf"),
    },
    "sd": {
        "fp32": ("scale_cut", "scale_5_off", "pixels_truncated"),
        "bf16": ("epsilons_of_others",),
        "fp16": ("guidance_sign", "frequencies_shifted", "time_plus_one", "scale_exchanged"),
    },
    "z-image": {
        "fp32": ("pads_zeroed", "norm_eps", "time_from_noise", "latents_scale_1_off"),
        "bf16": ("gates_without_tanh", "no_residual", "norm_in_half", "guidance_of_others", "image_frame_one_later"),
    },
    "sd3": {
        "fp32": ("nine_in_another_order", "norm_eps", "table_one_row_off", "shifted_once", "latents_scale_1_off"),
        "bf16": ("last_scale_and_shift_swapped", "no_residual", "no_modulation", "pooled_of_the_other_branch"),
        "fp16": ("no_second_attention", "clips_exchanged"),
    },
}
FAMILIES = {"qwen": MUTANTS, "sd": SD_MUTANTS, "z-image": ZIMAGE_MUTANTS, "sd3": SD3_MUTANTS}


@pytest.fixture(scope="module")
def judges(
    folders: dict[str, Path],
    tiny_zimage: Path,
    tiny_sd3: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Judge]:
    folder = tmp_path_factory.mktemp("loras")
    loras = {
        "qwen": write_lora(resolve("shapes").folder, "qwen", folder / "qwen.safetensors"),
        "sd": write_lora(folders["sdxl"], "sdxl", folder / "sdxl.safetensors"),
    }
    return {
        "qwen": Judge("shapes", prepare, loras["qwen"]),
        "sd": Judge(folders["sdxl"], lora=loras["sd"]),
        "z-image": Judge(tiny_zimage),
        "sd3": Judge(tiny_sd3["medium"]),
    }


def planted() -> list[Any]:
    """Every fault of every family in every precision."""
    return [
        pytest.param(
            family,
            mutant.under(precision),
            id=f"{family}-{mutant.name}{mutant.quantize}-{precision}",
            marks=[] if mutant.name in QUICK[family][precision] and not mutant.quantize else [pytest.mark.slow],
        )
        for family, mutants in FAMILIES.items()
        for mutant in mutants
        for precision in mutant.precisions
    ]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_caught_where_none_is(judges: dict[str, Judge], family: str, backend: str) -> None:
    for precision in QUICK[family]:
        for picture in (False, True):
            plain = Mutant(gone, "", precision, picture=picture)
            assert judges[family].caught(backend, plain, planted=False) == [], precision


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize(("family", "mutant"), planted())
def test_a_planted_fault_is_caught(judges: dict[str, Judge], family: str, mutant: Mutant, backend: str) -> None:
    found = judges[family].caught(backend, mutant)
    print(f"{mutant.name} in {mutant.precision} on {backend}: {found}")
    assert found


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_wrong_epsilon_shows_on_a_small_input(judges: dict[str, Judge], backend: str) -> None:
    """In bfloat16 itself, where the recorded inputs hide it."""
    fault = next(mutant for mutant in MUTANTS if mutant.name == "layer_norm_eps").under("bf16")
    passport = judges["qwen"].passport(fault)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fault.plant(Patch(monkeypatch, side(backend)))
        pipe = judges["qwen"].pipe(backend, fault)
        judged = {one.name: one for one in check.blocks(passport, pipe)}
        pipe.close()
    usual, small = (judged[f"transformer.transformer_blocks.0{which}"].failures for which in ("", " small"))
    print(usual, small)
    assert small and not small[0].startswith("in float32") and all(why.startswith("in float32") for why in usual)


def test_what_is_planted_with_each_change_is_there() -> None:
    for family, quick in QUICK.items():
        names = {mutant.name for mutant in FAMILIES[family]}
        assert {name for some in quick.values() for name in some} <= names


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("kind", ["qwen", "sdxl", "z-image", "sd3"])
def test_every_fault_can_still_be_planted(kind: str, backend: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Its place is there, and one of two pictures comes to it: in float32, or in codes with a LoRA. That it is caught
    is shown by `make mutations`, which does not run with each change."""
    mutants = {"qwen": MUTANTS, "sdxl": SD_MUTANTS, "z-image": ZIMAGE_MUTANTS, "sd3": SD3_MUTANTS}[kind]
    folder = resolve("shapes").folder if kind == "qwen" else tiny[kind]
    lora = write_lora(folder, kind, tmp_path / "lora.safetensors")
    asked = {
        "width": 40,
        "height": 24,
        "steps": 1,
        "image": np.full((24, 40, 3), 90, np.uint8),
        "strength": 1.0,
        "seed": 0,
        "guidance": 3.0,
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        probe = Probe(monkeypatch, side(backend))
        for mutant in mutants:
            probe.plant(mutant)
        for precision, bits, adapter in (("fp32", None, ""), ("bf16", "8", str(lora))):
            pipe = qwenimg.load(folder, backend, precision, quantize=bits)
            if kind == "qwen":
                prepare(pipe)
            pipe("a red circle", lora=adapter, **asked)
            pipe.close()
    assert {mutant.name for mutant in mutants} - probe.reached == set()


def gone(patch: Patch) -> None:
    patch.set(packing, "packed", lambda x: x)


def passed_by(patch: Patch) -> None:
    patch.set(packing, "pack", lambda x: x)


def test_a_fault_whose_place_is_gone_or_passed_by_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(monkeypatch, side("cpu"))
    with pytest.raises(AttributeError, match="packed"):
        probe.plant(Mutant(gone, ""))
    with pytest.raises(AssertionError, match="changes nothing"):
        probe.plant(Mutant(lambda patch: None, ""))
    probe.plant(Mutant(passed_by, ""))
    assert probe.reached == set()
    packing.pack(np.zeros((1, 1, 2, 2)))
    assert probe.reached == {"passed_by"}


def test_there_are_enough_in_every_family() -> None:
    for mutants in FAMILIES.values():
        names = [(mutant.name, mutant.quantize) for mutant in mutants]
        assert len(names) == len(set(names)) >= 25


def test_the_table_has_every_fault() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measured" / "parity.md").read_text(encoding="utf-8")
    planted = [mutant for mutants in FAMILIES.values() for mutant in mutants]
    assert [mutant.what for mutant in planted if f"| {mutant.what} |" not in page] == []
