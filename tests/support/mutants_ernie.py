"""Faults in ERNIE-Image: in its transformer, its text encoder, its VAE, and the loop around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.families.ernie import model
from qwenimg.common.families.ernie.texts import BareTemplate
from qwenimg.common.networks.denoisers import ernie_conditioning
from qwenimg.common.numbers import rope, scaled_rope
from support import mutants_flux2 as flux2
from support import mutants_shared as shared
from support import mutants_zimage as zimage
from support.mutant import Judge, Mutant, Patch

# The transformer


def _turns(patch: Patch, change: Callable[..., Any]) -> None:
    """Makes heads x [B L H D] with tables [L 1 2D] change(the original, x, tables)."""
    owner = patch.backend.network("ernie_dit").SelfAttention
    patch.around(
        owner,
        "turned",
        lambda turned, layer, x, table, dtype: change(lambda *given: turned(layer, *given, dtype), x, table),
    )


def no_rope(patch: Patch) -> None:
    _turns(patch, lambda turned, x, table: x)


def rope_a_rotation(patch: Patch) -> None:
    """One angle for both channels of a pair, as in other models: that of the first."""

    def rotated(turned: Any, x: Any, table: Any) -> Any:
        quarter = table.shape[-1] // 4
        cos, sin = table[..., :quarter], table[..., 2 * quarter : 3 * quarter]
        return turned(x, patch.backend.join([cos, cos, sin, -sin], -1))

    _turns(patch, rotated)


def rope_the_other_way(patch: Patch) -> None:
    def back(turned: Any, x: Any, table: Any) -> Any:
        half = table.shape[-1] // 2
        return turned(x, patch.backend.join([table[..., :half], -table[..., half:]], -1))

    _turns(patch, back)


def scale_without_one(patch: Patch) -> None:
    patch.around(patch.backend.ops, "modulated", lambda made, x, shift, scale, dtype: made(x, shift, scale - 1, dtype))


def silu_in_the_head(patch: Patch) -> None:
    """Before the modulation of the final norm, as in other models."""
    silu = patch.backend.ops.silu
    patch.entering("Linear", lambda layer, x: silu(x) if layer.path == "final_norm.linear" else x)


def feed_forward_exchanged(patch: Patch) -> None:
    patch.around(patch.backend.ops, "gated_gelu_erf", lambda gated, gate, values: gated(values, gate))


def gelu_by_tanh(patch: Patch) -> None:
    gelu = patch.backend.ops.gelu
    patch.set(patch.backend.ops, "gated_gelu_erf", lambda gate, values: gelu(gate) * values)


def norm_of_the_feed_forward_before_attention(patch: Patch) -> None:
    owner = patch.backend.network("ernie_dit").TransformerBlock
    patch.exchanged(owner, patch.backend.calls, "adaLN_sa_ln", "adaLN_mlp_ln")


# The text encoder


def rope_not_scaled(patch: Patch) -> None:
    patch.around(scaled_rope, "frequencies", lambda made, theta, head_dim, scaling: made(theta, head_dim))


def no_token_before_the_text(patch: Patch) -> None:
    """Which the tokenizer's file puts there."""

    def without(fill: Any, template: Any, tokenizer: Any, prompt: str) -> Any:
        made = fill(template, tokenizer, prompt)
        return replace(made, ids=made.ids[1:]) if len(made.ids) > 1 else made

    patch.around(BareTemplate, "fill", without)


# The VAE


def batch_eps_of_flux2(patch: Patch) -> None:
    """1e-4."""
    patch.around(
        patch.backend.ops.ChannelStatistics, "__init__", lambda init, own, channels, eps: init(own, channels, 1e-4)
    )


# Positions and times


def _positions(patch: Patch, image: Callable[..., Any], text: Callable[..., Any] = lambda positions: positions) -> None:
    """Makes positions [L 3] what the functions make of them: text has no rows and columns."""

    def changed(made: Any, config: Any, positions: Any) -> Any:
        return made(config, (image if positions[:, 1:].any() else text)(positions))

    patch.around(ernie_conditioning, "_table", changed)


def rows_and_columns_swapped(patch: Patch) -> None:
    _positions(patch, lambda positions: positions[:, [0, 2, 1]])


def image_before_the_text(patch: Patch) -> None:
    """At 0 of the first axis."""
    _positions(patch, lambda positions: positions * [0, 1, 1])


def image_one_later(patch: Patch) -> None:
    _positions(patch, lambda positions: np.add(positions, [1, 0, 0]))


def text_not_numbered(patch: Patch) -> None:
    _positions(patch, lambda positions: positions, lambda positions: 0 * positions)


def text_counted_along_rows(patch: Patch) -> None:
    _positions(patch, lambda positions: positions, lambda positions: positions[:, [1, 0, 2]])


def text_first_in_tables(patch: Patch) -> None:
    patch.around(ernie_conditioning, "tables", lambda made, *given: made(*given)[::-1])


def theta_of_others(patch: Patch) -> None:
    patch.around(rope, "rope_angles", lambda made, positions, axes, theta: made(positions, axes, 1e4))


def cosines_first(patch: Patch) -> None:
    patch.around(model, "time_row", lambda made, *given: np.roll(made(*given), made(*given).shape[1] // 2, axis=1))


MUTANTS = (
    Mutant(shared.scales_first, "scales before shifts"),
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(flux2.feed_forward_modulates_attention, "the feed-forward's modulation for the attention's"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(scale_without_one, "`scale` for `1 + scale`"),
    Mutant(shared.silu_left_out, "no SiLU"),
    Mutant(silu_in_the_head, "SiLU before the head's modulation"),
    Mutant(feed_forward_exchanged, "the two parts of the feed-forward exchanged"),
    Mutant(gelu_by_tanh, "GELU by its tanh form for its definition"),
    Mutant(norm_of_the_feed_forward_before_attention, "the two norms of a block exchanged"),
    Mutant(zimage.norm_eps, "RMSNorm's epsilon ten times too large"),
    Mutant(shared.attention_scale, "attention's scale 1 % too large"),
    Mutant(shared.no_qk_norm, "no norm of queries and keys"),
    Mutant(no_rope, "no RoPE"),
    Mutant(rope_a_rotation, "one angle for both channels of a pair"),
    Mutant(rope_the_other_way, "RoPE the other way round"),
    Mutant(shared.causal, "causal attention in the transformer"),
    Mutant(zimage.last_token_not_attended, "the last text token not attended"),
    Mutant(shared.text_not_causal, "a Ministral 3 that sees what comes"),
    Mutant(shared.text_rope_of_pairs, "Ministral 3's RoPE on pairs for halves"),
    Mutant(shared.keys_not_shared, "Ministral 3's shared heads of keys dealt out in another order"),
    Mutant(flux2.taps_one_layer_early, "text states of one layer before"),
    Mutant(flux2.batch_mean_not_added, "the VAE's batch mean not added"),
    Mutant(batch_eps_of_flux2, "epsilon 1e-4 for 1e-5 of the VAE's batch variance"),
    Mutant(flux2.patches_in_another_order, "patches in the order (dy, dx, c)"),
    *shared.ARITHMETIC,
    Mutant(rope_not_scaled, "Ministral 3's RoPE without YaRN", picture=True, refused=("bf16", "fp16")),
    Mutant(no_token_before_the_text, "no token before the text", picture=True),
    Mutant(shared.velocity_sign("ernie_dit"), "the velocity's sign", picture=True),
    Mutant(flux2.time_off, "times 0.1 % off", picture=True),
    Mutant(cosines_first, "cosines before sines of the time", picture=True),
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True),
    Mutant(image_before_the_text, "the image not behind the text", picture=True),
    Mutant(image_one_later, "the image one token later", picture=True),
    Mutant(text_not_numbered, "text tokens not numbered", picture=True),
    Mutant(text_counted_along_rows, "text tokens counted as rows", picture=True),
    Mutant(text_first_in_tables, "RoPE with the text first", picture=True),
    Mutant(theta_of_others, "RoPE's theta 10000", picture=True),
    Mutant(flux2.tokens_columns_first, "columns before rows of tokens", picture=True),
    Mutant(shared.branches_swapped(model.Ernie), "the branches of guidance exchanged", picture=True),
    Mutant(shared.from_the_prompt(model.Ernie), "guidance from the prompt's prediction", picture=True),
    *shared.NOISE_LEVELS,
    *shared.DECODING,
)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["ernie"])
