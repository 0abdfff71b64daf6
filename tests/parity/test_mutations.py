"""Some of the faults that `make mutations` plants, on both backends: each is caught, and nothing where none is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doc_tables import read_data
from mutations import TITLES
from support.mutant import PRECISIONS, Judge, Judged, Mutant, Patch, Probe, side
from support.mutant_tables import TABLES

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
    "flux": {"fp32": ("guidance_not_read", "text_numbered", "linear1_feed_forward_first", "mask_columns_first")},
    "chroma": {"fp32": ("vectors_one_off", "padding_seen_by_t5", "numbers_not_times_1000"), "fp16": ("time_off",)},
    "longcat": {
        "fp32": ("quotes_as_words", "pads_see_pads", "guidance_of_one_vector", "pads_behind_the_text"),
        "fp16": ("quotes_left_out",),
    },
    "anima": {"fp32": ("keys_and_values_exchanged", "states_not_read", "rows_and_columns_swapped")},
    "ovis": {"fp32": ("gate_for_values", "zeros_as_the_last_token", "image_behind_the_text")},
    "pixart": {"fp32": ("stream_normed_before_the_text", "variance_for_noise", "width_before_height", "padding_seen")},
    "hunyuan": {"fp32": ("skip_before_the_stream", "keys_of_the_text_rotated", "all_of_t5_words", "no_shift")},
    "cascade": {"fp32": ("no_response_norm", "edges_of_zeros", "embedding_turned", "channels_not_weighed")},
    "krea2": {"fp32": ("no_gate_of_attention", "layers_back_to_front", "text_numbered")},
    "auraflow": {
        "fp32": ("attention_in_the_stream", "tables_of_the_first_block", "last_state_for_zeros", "table_one_row_off"),
    },
    "sana": {"fp32": ("softmax_for_relu", "neighbours_not_seen", "whole_instruction_seen", "times_not_rounded_down")},
    "sana-sprint": {"fp32": ("guidance_not_added",)},
    "lumina": {"fp32": ("modulation_without_silu", "scores_without_a_bound", "norm_of_the_whole", "text_from_one_on")},
    "ernie": {"fp32": ("rope_a_rotation", "silu_in_the_head", "image_before_the_text")},
    "flux2": {"fp32": ("taps_the_last_three", "mu_of_pixels", "batch_eps_of_others")},
    "flux2-dev": {"fp32": ("guidance_not_read", "pads_see_each_other", "embedded_guidance_for_true_cfg")},
    "flux2-kv": {"fp32": ("references_apart", "blocks_back_to_front", "references_at_the_time_of_the_image")},
    "flux3": {"fp32": ("text_modulated_as_references", "references_in_one_place", "references_in_frames")},
    "qwen-edit": {"fp32": ("windows_from_the_other_corner", "slots_one_token_late", "zero_cond_t_ignored")},
    "qwen-layered": {"fp32": ("picture_two_frames_before", "addition_of_the_other_kind", "picture_without_alpha")},
    "qwen21": {"fp32": ("kept_of_the_block_before", "deep_slots_put_for_added", "shortcut_of_the_first_frame")},
    "qwen-control": {
        "fp32": (
            "one_block_late", "scale_ignored", "window_one_step_wide", "text_of_the_negative_prompt",
            "mean_of_the_picture", "mask_inverted", "mask_beside_the_latents_inverted", "patch_norms_exchanged",
        )
    },
}  # fmt: skip


Judges = Callable[[str], Judged]


@pytest.fixture(scope="module")
def judges(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Judges:
    """The judge of each family, made when it is asked for."""
    return cache(lambda family: TABLES[family].judge(tiny, tmp_path_factory.mktemp(family)))


def is_quick(family: str, mutant: Mutant) -> bool:
    return mutant.name in QUICK[family].get(mutant.precision, ()) and not mutant.quantize


def planted() -> list[Any]:
    """Every fault of every family in every precision."""
    return [
        pytest.param(
            family,
            mutant.under(precision),
            id=f"{family}-{mutant.name}{mutant.quantize}-{precision}",
            marks=[] if is_quick(family, mutant.under(precision)) else [pytest.mark.slow],
        )
        for family, table in TABLES.items()
        for mutant in table.mutants
        for precision in mutant.precisions
    ]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("family", TABLES)
@pytest.mark.sample(0, rest=4)
def test_nothing_is_caught_where_none_is(judges: Judges, family: str, backend: str) -> None:
    quick = [one.under(name) for one in TABLES[family].mutants for name in one.precisions]
    quick = [mutant for mutant in quick if is_quick(family, mutant)]
    for precision, picture, scene in {(mutant.precision, mutant.picture, mutant.scene) for mutant in quick}:
        plain = Mutant(gone, "", precision, picture=picture, scene=scene)
        assert judges(family).caught(backend, plain, planted=False) == [], (precision, scene)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize(("family", "mutant"), planted())
@pytest.mark.sample(0, rest=16)
def test_a_planted_fault_is_caught(judges: Judges, family: str, mutant: Mutant, backend: str) -> None:
    found = judges(family).caught(backend, mutant)
    print(f"{mutant.name} in {mutant.precision} on {backend}: {found}")
    assert found


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_wrong_epsilon_shows_on_a_small_input(judges: Judges, backend: str) -> None:
    """In bfloat16 itself, where the recorded inputs hide it."""
    fault = next(mutant for mutant in TABLES["qwen"].mutants if mutant.name == "layer_norm_eps").under("bf16")
    judge = judges("qwen")
    assert isinstance(judge, Judge)
    passport = judge.passport(fault)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fault.plant(Patch(monkeypatch, side(backend)))
        pipe = judge.pipe(backend, fault)
        judged = {one.name: one for one in check.blocks(passport, pipe)}
        pipe.close()
    usual, small = (judged[f"transformer.transformer_blocks.0{which}"].failures for which in ("", " small"))
    print(usual, small)
    assert small and not small[0].startswith("in float32") and all(why.startswith("in float32") for why in usual)


def test_what_is_planted_with_each_change_is_there() -> None:
    for family, quick in QUICK.items():
        names = {mutant.name for mutant in TABLES[family].mutants}
        assert {name for some in quick.values() for name in some} <= names


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("family", TABLES)
@pytest.mark.sample(0)
def test_every_fault_can_still_be_planted(judges: Judges, family: str, backend: str) -> None:
    """Its place is there, and one of two pictures comes to it: in float32, or in codes with a LoRA. That it is caught
    is shown by `make mutations`, which does not run with each change."""
    mutants, judge = TABLES[family].mutants, judges(family)
    with pytest.MonkeyPatch.context() as monkeypatch:
        probe = Probe(monkeypatch, side(backend))
        for mutant in mutants:
            probe.plant(mutant)
        for precision, bits in (("fp32", ""), ("bf16", "8")):
            judge.draw(backend, precision, bits)
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
    for table in TABLES.values():
        names = [(mutant.name, mutant.quantize) for mutant in table.mutants]
        assert len(names) == len(set(names)) >= 25


def test_the_tables_have_every_fault_and_what_caught_it() -> None:
    for name, family in TABLES.items():
        rows = {row["fault"]: row for row in read_data(f"mutations-{name}")}
        assert [mutant.what for mutant in family.mutants if mutant.what.replace("`", "") not in rows] == []
        assert [fault for fault, row in rows.items() if not any(row[precision] for precision in PRECISIONS)] == []
    assert TITLES.keys() == TABLES.keys()
