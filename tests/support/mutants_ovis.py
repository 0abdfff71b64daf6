"""Faults in Ovis-Image: in its transformer, its text encoder, and the loop around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.families.ovis import model, texts
from qwenimg.common.families.ovis.model import Ovis
from qwenimg.common.families.ovis.texts import LENGTH, OvisTexts
from qwenimg.common.networks.denoisers import ovis_dit
from qwenimg.common.numbers import rope
from support import mutants_flux as flux
from support import mutants_flux2 as flux2
from support import mutants_shared as shared
from support.mutant import Judge, Mutant, Patch

# The transformer


def _gated(patch: Patch, change: Any) -> None:
    """Makes the gated channels of all feed-forwards what `change` makes of both halves."""
    network = patch.backend.network("ovis_dit")
    patch.set(network, "gated", lambda y: change(*reversed(patch.backend.halves(y))))


def gate_for_values(patch: Patch) -> None:
    silu = patch.backend.ops.silu
    _gated(patch, lambda values, gate: silu(values) * gate)


def gate_without_silu(patch: Patch) -> None:
    _gated(patch, lambda values, gate: values * gate)


def gate_by_gelu(patch: Patch) -> None:
    gelu = patch.backend.ops.gelu
    _gated(patch, lambda values, gate: values * gelu(gate))


def gate_by_sigmoid(patch: Patch) -> None:
    lib = patch.backend.lib
    _gated(patch, lambda values, gate: values * lib.sigmoid(gate))


def text_states_not_normed(patch: Patch) -> None:
    shared.norm_left_out(patch, "context_embedder_norm")


def norm_eps(patch: Patch) -> None:
    network, blocks = patch.backend.network("ovis_dit"), patch.backend.network("flux_dit")
    patch.set(network, "NORM_EPS", 1e-2)

    def changed(call: Any, *given: Any) -> Any:
        before, blocks.NORM_EPS = blocks.NORM_EPS, 1e-2
        try:
            return call(*given)
        finally:
            blocks.NORM_EPS = before

    patch.around(network.SingleBlock, patch.backend.calls, changed)


# Texts


def states_before_the_final_norm(patch: Patch) -> None:
    shared.norm_left_out(patch, "norm")


def zeros_as_the_last_token(patch: Patch) -> None:
    def filled(made: Any, own: Any, encoder: Any, prompt: Any) -> Any:
        [states] = made(own, encoder, prompt)
        kept = len(prompt.ids) - texts.TEMPLATE.dropped
        return (np.pad(states[:, :kept], ((0, 0), (0, LENGTH - kept), (0, 0)), mode="edge"),)

    patch.around(OvisTexts, "_encoded", filled)


def zeros_before_the_text(patch: Patch) -> None:
    def moved(made: Any, own: Any, encoder: Any, prompt: Any) -> Any:
        [states] = made(own, encoder, prompt)
        return (np.roll(states, LENGTH - len(prompt.ids) + texts.TEMPLATE.dropped, axis=1),)

    patch.around(OvisTexts, "_encoded", moved)


def template_without_thoughts(patch: Patch) -> None:
    text = texts.TEMPLATE.text.removesuffix("<think>\n\n</think>\n\n")
    patch.set(model, "TEMPLATE", replace(texts.TEMPLATE, text=text))


def template_without_last_newline(patch: Patch) -> None:
    patch.set(model, "TEMPLATE", replace(texts.TEMPLATE, text=texts.TEMPLATE.text[:-1]))


def template_as_a_system_prompt(patch: Patch) -> None:
    text = texts.TEMPLATE.text.replace("user", "system", 1).replace("{}", "<|im_end|>\n<|im_start|>user\n{}")
    patch.set(model, "TEMPLATE", replace(texts.TEMPLATE, text=text))


def states_one_token_early(patch: Patch) -> None:
    patch.set(model, "TEMPLATE", replace(texts.TEMPLATE, dropped=texts.TEMPLATE.dropped - 1))


# Positions


def _positions(patch: Patch, image: Any = None, text: Any = None) -> None:
    """Changes the positions [L 3] of an image, and of a text of LENGTH tokens; each gets the length."""

    def changed(made: Any, positions: Any, *rest: Any) -> Any:
        change = text if len(positions) == LENGTH else image
        return made(change(np.asarray(positions)) if change else positions, *rest)

    patch.around(rope, "rope_table", changed)


def text_not_numbered(patch: Patch) -> None:
    """As FLUX.1's."""
    _positions(patch, text=lambda positions: 0 * positions)


def text_in_the_frame_axis(patch: Patch) -> None:
    _positions(patch, text=lambda positions: positions[:, [1, 0, 2]])


def text_in_rows_alone(patch: Patch) -> None:
    _positions(patch, text=lambda positions: positions * [0, 1, 0])


def image_behind_the_text(patch: Patch) -> None:
    """As LongCat-Image's."""
    _positions(patch, image=lambda positions: np.add(positions, [0, LENGTH, LENGTH]))


def image_in_a_frame_of_its_own(patch: Patch) -> None:
    _positions(patch, image=lambda positions: np.add(positions, [1, 0, 0]))


def rows_and_columns_swapped(patch: Patch) -> None:
    patch.around(ovis_dit, "image_positions", lambda made, grids: made(grids)[:, [0, 2, 1]])


BF16 = ("bf16",)  # less than what bfloat16 costs a tiny model
_ALL = (
    Mutant(shared.sines_first("flux_dit", "TimeTextEmbed"), "sines before cosines of the time"),
    Mutant(shared.scales_first, "scales before shifts in blocks of two streams"),
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(flux.single_gate_first, "gates before shifts and scales in blocks of one stream"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(flux.streams_modulation_exchanged("ovis_dit", "DoubleBlock"), "each stream with the other's modulation"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(shared.silu_left_out, "no SiLU of the time"),
    Mutant(gate_for_values, "SiLU of the values, not of their gate"),
    Mutant(gate_without_silu, "a gate without SiLU"),
    Mutant(gate_by_gelu, "GELU for SiLU of the gate"),
    Mutant(gate_by_sigmoid, "the gate's sigmoid for its SiLU"),
    Mutant(flux.feed_forward_before_attention, "the feed-forward before the attention in `proj_out`"),
    Mutant(flux.image_first_in("ovis_dit", "SingleBlock"), "RoPE of one stream with the image first"),
    Mutant(text_states_not_normed, "text states that are not normed"),
    Mutant(norm_eps, "an epsilon of 0.01 in the text's norm and in blocks of one stream"),
    *shared.ATTENTION_WITH_ROPE,
    Mutant(states_before_the_final_norm, "states before Qwen3's final norm"),
    Mutant(shared.text_not_causal, "a Qwen3 that sees what comes"),
    Mutant(shared.text_rope_of_pairs, "the text encoder's RoPE on pairs for halves"),
    Mutant(flux2.text_not_normed, "no norm of Qwen3's queries and keys"),
    Mutant(shared.keys_not_shared, "shared heads of keys dealt out in another order"),
    *shared.ARITHMETIC,
    Mutant(zeros_as_the_last_token, "the last state for the zeros behind it", picture=True),
    Mutant(zeros_before_the_text, "zeros before the text", picture=True),
    Mutant(template_without_thoughts, "a template without empty thoughts", picture=True),
    Mutant(template_without_last_newline, "template without its last newline", picture=True),
    Mutant(template_as_a_system_prompt, "the template's text as a system prompt", picture=True),
    Mutant(states_one_token_early, "the text's states one token early", picture=True, refused=BF16),
    Mutant(text_not_numbered, "text at FLUX.1's positions", picture=True),
    Mutant(text_in_the_frame_axis, "text counted in frames for rows", picture=True),
    Mutant(text_in_rows_alone, "text counted in rows alone", picture=True),
    Mutant(image_behind_the_text, "the image behind the text, as LongCat-Image's", picture=True),
    Mutant(image_in_a_frame_of_its_own, "the image in a frame of its own", picture=True, refused=BF16),
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True, refused=BF16),
    Mutant(shared.velocity_sign("ovis_dit"), "the velocity's sign", picture=True),
    Mutant(shared.time_off(model), "times 0.1 % off", picture=True),
    Mutant(shared.packing_order, "latents packed in another order", picture=True),
    Mutant(shared.branches_swapped(Ovis), "the branches of guidance exchanged", picture=True),
    Mutant(shared.from_the_prompt(Ovis), "guidance from the prompt's prediction", picture=True, refused=BF16),
    *shared.NOISE_LEVELS,
    *shared.SCALED_AND_DECODED,
)
MUTANTS = tuple(replace(mutant, refused=(*mutant.refused, "fp16")) for mutant in _ALL)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["ovis"])
