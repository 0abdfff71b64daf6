"""Faults in AuraFlow: in its transformer, its text encoder, its texts, and the loop around them.

The order of text tokens is none of them: the transformer gives them no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from qwenimg.common.families.auraflow import model
from qwenimg.common.families.auraflow.model import AuraFlow
from qwenimg.common.families.auraflow.texts import AuraTexts
from qwenimg.common.networks.denoisers import aura_conditioning
from qwenimg.common.networks.denoisers.aura_dit import REGISTERS
from qwenimg.common.networks.encoders import t5
from qwenimg.common.parts.texts.padded_texts import T5Texts
from qwenimg.common.pipeline.steps import plan
from support import mutants_flux as flux
from support import mutants_shared as shared
from support.mutant import Mutant, Patch

# The transformer


def _updates(patch: Patch, change: Any) -> None:
    """Makes both updates of each stream in a block change(gated, x, gate, update, the stream's first one or None)."""
    ops, network = patch.backend.ops, patch.backend.network("aura_dit")

    def changed(call: Any, own: Any, *given: Any) -> Any:
        gated, first = ops.gated, dict[int, Any]()

        def noted(x: Any, gate: Any, update: Any) -> Any:
            made = change(gated, x, gate, update, first.get(id(x)))
            first.setdefault(id(x), made)
            return made

        ops.gated = noted
        try:
            return call(own, *given)
        finally:
            ops.gated = gated

    for block in (network.JointBlock, network.SingleBlock):
        patch.around(block, patch.backend.calls, changed)


def attention_in_the_stream(patch: Patch) -> None:
    """As other transformers have it."""

    def added(gated: Any, x: Any, gate: Any, update: Any, first: Any) -> Any:
        return gated(x if first is None else first, gate, update)

    _updates(patch, added)


def attention_alone_in_the_feed_forward(patch: Patch) -> None:
    """Without the stream."""

    def alone(gated: Any, x: Any, gate: Any, update: Any, first: Any) -> Any:
        return gated(0 * x if first is None else x, gate, update)

    _updates(patch, alone)


def gate_without_silu(patch: Patch) -> None:
    patch.set(patch.backend.ops, "swiglu", lambda gate, values: gate * values)


def gate_for_values(patch: Patch) -> None:
    patch.around(patch.backend.ops, "swiglu", lambda swiglu, gate, values: swiglu(values, gate))


def norm_eps(patch: Patch) -> None:
    patch.set(patch.backend.network("aura_dit"), "NORM_EPS", 1e-2)


def no_norm_of_heads(patch: Patch) -> None:
    patch.set(patch.backend.ops, "unit_norm", lambda x, eps: patch.backend.cast(x, "float32"))


def mean_of_heads_left_in(patch: Patch) -> None:
    """As RMSNorm leaves it."""

    def root(x: Any, eps: float) -> Any:
        wide = patch.backend.cast(x, "float32")
        return wide / (patch.backend.lib.mean(wide * wide, -1)[..., None] + eps) ** 0.5

    patch.set(patch.backend.ops, "unit_norm", root)


def norm_in_the_head(patch: Patch) -> None:
    ops = patch.backend.ops
    patch.set(ops, "modulated", lambda x, shift, scale, dtype: ops.norm_modulate(x, shift, scale, dtype, 1e-5))


def last_text_token_not_attended(patch: Patch) -> None:
    """Of a joint sequence that begins with text: the first one, a register."""
    patch.attention(lambda attend, q, k, v, *rest, **more: attend(q, k[:, 1:], v[:, 1:], *rest))


def keys_of_text_by_the_images_layer(patch: Patch) -> None:
    patch.exchanged(patch.backend.network("aura_dit").JointAttention, "both", "to_k", "add_k_proj")


def results_of_streams_exchanged(patch: Patch) -> None:
    """The layers behind the attention."""
    owner = patch.backend.network("aura_dit").JointAttention

    def changed(call: Any, own: Any, img: Any, txt: Any) -> Any:
        first, second = own.to_out[0], own.to_add_out
        own.to_out[0], own.to_add_out = second, first
        try:
            return call(own, img, txt)
        finally:
            own.to_out[0], own.to_add_out = first, second

    patch.around(owner, "both", changed)


def patches_in_channels_last(patch: Patch) -> None:
    """(dy, dx, c) for (c, dy, dx)."""
    axis = patch.backend.axes()[0]

    def turned(patches: Any, x: Any, *size: Any) -> Any:
        made = patches(x, *size)
        order = np.arange(made.shape[axis]).reshape(-1, 4).T.reshape(-1).tolist()
        parts = [made[:, i : i + 1] if axis == 1 else made[..., i : i + 1] for i in order]
        return patch.backend.join(parts, axis)

    patch.around(patch.backend.images, "patches", turned)


def patches_out_channels_first(patch: Patch) -> None:
    """(c, dy, dx) for (dy, dx, c)."""

    def turned(joined: Any, x: Any, like: Any, size: int) -> Any:
        B, L, C = x.shape
        return joined(x.reshape(B, L, C // size**2, size**2).swapaxes(2, 3).reshape(B, L, C), like, size)

    patch.around(patch.backend.images, "joined_patches", turned)


def block_left_out(patch: Patch) -> None:
    owner = patch.backend.network("aura_dit").SingleBlock

    def skipped(call: Any, own: Any, img: Any, txt: Any, mod: Any) -> Any:
        last = own.attn.to_q.path.startswith("single_transformer_blocks.2.")
        return (img, txt) if last else call(own, img, txt, mod)

    patch.around(owner, patch.backend.calls, skipped)


def _registers(patch: Patch, change: Any) -> None:
    owner = patch.backend.network("aura_dit").AuraTransformer

    def changed(call: Any, own: Any, text: Any, registers: Any) -> Any:
        made = call(own, text, registers)
        return patch.backend.join([change(made[:, :REGISTERS]), made[:, REGISTERS:]], 1)

    patch.around(owner, "context", changed)


def registers_of_zeros(patch: Patch) -> None:
    _registers(patch, lambda registers: 0 * registers)


def one_register_eight_times(patch: Patch) -> None:
    _registers(patch, lambda registers: 0 * registers + registers[:, :1])


def no_registers(patch: Patch) -> None:
    _registers(patch, lambda registers: registers[:, :0])


# The text encoder


def tables_of_the_first_block(patch: Patch) -> None:
    """As T5's blocks have it."""
    ops = patch.backend.ops

    def changed(call: Any, own: Any, *given: Any) -> Any:
        score_bias, first = ops.score_bias, list[Any]()

        def only(table: Any) -> Any:
            first.append(score_bias(table))
            return first[0]

        ops.score_bias = only
        try:
            return call(own, *given)
        finally:
            ops.score_bias = score_bias

    patch.around(patch.backend.network("t5").Encoder, patch.backend.calls, changed)


def distances_turned_round(patch: Patch) -> None:
    patch.around(t5, "buckets", lambda made, *given: made(*given).T.copy())


def text_scores_divided(patch: Patch) -> None:
    """By the root of a head's width."""

    def divided(attend: Any, q: Any, *rest: Any) -> Any:
        return attend(q / q.shape[-1] ** 0.5, *rest)

    patch.around(patch.backend.ops, "biased_attention", divided)


def text_gate_by_erf(patch: Patch) -> None:
    def by_erf(gate: Any, values: Any, dtype: Any) -> Any:
        made = patch.backend.ops.gelu_erf(patch.backend.cast(gate, "float32")) * patch.backend.cast(values, "float32")
        return patch.backend.like(made, values)

    patch.set(patch.backend.ops, "gated_gelu", by_erf)


# The texts


def _ids(patch: Patch, change: Any) -> None:
    def changed(fill: Any, texts: Any, prompt: str) -> Any:
        made = fill(texts, prompt)
        return replace(made, ids=change(made.ids) or made.ids)

    patch.around(AuraTexts, "fill", changed)


def no_token_behind_the_text(patch: Patch) -> None:
    _ids(patch, lambda ids: ids[:-1])


def token_before_the_text(patch: Patch) -> None:
    """As LLaMA has it."""
    _ids(patch, lambda ids: (1, *ids))


def no_space_before_the_text(patch: Patch) -> None:
    def without(fill: Any, texts: Any, prompt: str) -> Any:
        made, tokenizer = fill(texts, prompt), texts._tokenizer.tokenizer
        return replace(made, ids=(*tokenizer.encode(prompt), made.ids[-1]))

    patch.around(AuraTexts, "fill", without)


def no_zeros_behind_the_text(patch: Patch) -> None:
    patch.set(AuraTexts, "_encoded", T5Texts._encoded)


def last_state_for_zeros(patch: Patch) -> None:
    def filled(made: Any, own: Any, encoder: Any, ids: Any) -> Any:
        [states] = made(own, encoder, ids)
        kept = states[:, : len(ids)]
        return (np.pad(kept, ((0, 0), (0, states.shape[1] - len(ids)), (0, 0)), mode="edge"),)

    patch.around(AuraTexts, "_encoded", filled)


# Positions and times


def _window(patch: Patch, change: Any) -> None:
    """Makes the indices of the table change(made, side, rows, columns)."""

    def changed(window: Any, config: Any, rows: int, columns: int) -> Any:
        return change(window(config, rows, columns), config.side, rows, columns)

    patch.around(aura_conditioning, "window", changed)


def table_from_its_corner(patch: Patch) -> None:
    _window(
        patch, lambda made, side, rows, columns: (np.arange(rows)[:, None] * side + np.arange(columns)).reshape(1, -1)
    )


def table_one_row_off(patch: Patch) -> None:
    _window(patch, lambda made, side, rows, columns: made + side)


def rows_and_columns_swapped(patch: Patch) -> None:
    _window(patch, lambda made, side, rows, columns: made % side * side + made // side)


def table_as_in_stable_diffusion_3(patch: Patch) -> None:
    """The middle of an odd side in an even one one earlier."""

    def middle(made: Any, side: int, rows: int, columns: int) -> Any:
        down, right = ((side - n) // 2 - (side // 2 - n // 2) for n in (rows, columns))
        return made + down * side + right

    _window(patch, middle)


def shifted_once(patch: Patch) -> None:
    """The levels of others."""
    patch.set(AuraFlow, "levels", plan.USUAL)


def times_of_0_to_1(patch: Patch) -> None:
    patch.around(model, "time_rows", lambda made, times: made([time / 1000 for time in times]))


MUTANTS = (
    Mutant(attention_in_the_stream, "the attention's result added to the stream"),
    Mutant(attention_alone_in_the_feed_forward, "a feed-forward that sees the attention's result alone"),
    Mutant(shared.scales_first, "scales before shifts"),
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(flux.streams_modulation_exchanged("aura_dit", "JointBlock"), "each stream with the other's modulation"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(shared.silu_left_out, "no SiLU of the time"),
    Mutant(shared.sines_first("aura_dit", "TimestepEmbedding"), "sines before cosines of the time"),
    Mutant(gate_without_silu, "a gate without SiLU"),
    Mutant(gate_for_values, "SiLU of the values, not of their gate"),
    Mutant(norm_eps, "LayerNorm's epsilon 0.01"),
    Mutant(no_norm_of_heads, "no norm of queries and keys"),
    Mutant(mean_of_heads_left_in, "RMSNorm for LayerNorm of queries and keys"),
    Mutant(norm_in_the_head, "a norm in the head"),
    Mutant(last_text_token_not_attended, "the first register not attended"),
    Mutant(keys_of_text_by_the_images_layer, "the text's keys and the image's by each other's layer"),
    Mutant(results_of_streams_exchanged, "the layers behind the attention exchanged"),
    Mutant(patches_in_channels_last, "patches read in the order (dy, dx, c)"),
    Mutant(patches_out_channels_first, "patches written in the order (c, dy, dx)"),
    Mutant(block_left_out, "the last block left out"),
    Mutant(shared.attention_scale, "attention's scale 1 % too large"),
    Mutant(shared.causal, "causal attention in the transformer"),
    Mutant(tables_of_the_first_block, "the first block's table of distances for all, as T5's"),
    Mutant(text_scores_divided, "the text's scores divided by the root of a head's width"),
    Mutant(text_gate_by_erf, "the text's GELU by its definition", refused=("bf16", "fp16")),
    *shared.ARITHMETIC,
    Mutant(registers_of_zeros, "registers of zeros", picture=True),
    Mutant(one_register_eight_times, "one register eight times", picture=True),
    Mutant(no_registers, "no registers", picture=True),
    Mutant(distances_turned_round, "the text's distances with the other sign", picture=True),
    Mutant(no_token_behind_the_text, "no token behind the text", picture=True),
    Mutant(token_before_the_text, "a token before the text, as LLaMA's", picture=True),
    Mutant(no_space_before_the_text, "no space before the text", picture=True),
    Mutant(no_zeros_behind_the_text, "no zeros behind the text", picture=True),
    Mutant(last_state_for_zeros, "the last state for the zeros behind it", picture=True),
    Mutant(table_from_its_corner, "the table of positions from its corner", picture=True),
    Mutant(table_one_row_off, "the table of positions one row off", picture=True),
    Mutant(rows_and_columns_swapped, "rows and columns of the table exchanged", picture=True),
    Mutant(table_as_in_stable_diffusion_3, "the table's middle as in Stable Diffusion 3", picture=True),
    Mutant(shifted_once, "noise levels shifted once", picture=True),
    *shared.NOISE_LEVELS,
    Mutant(shared.time_off(model), "times 0.1 % off", picture=True),
    Mutant(times_of_0_to_1, "times of 0 to 1", picture=True),
    Mutant(shared.velocity_sign("aura_dit"), "the velocity's sign", picture=True),
    Mutant(shared.branches_swapped(AuraFlow), "the branches of guidance exchanged", picture=True),
    Mutant(shared.from_the_prompt(AuraFlow), "guidance from the prompt's prediction", picture=True),
    Mutant(shared.latents_scale_1_off, "the latents' scale 1 % off", picture=True),
    *shared.DECODING,
)
