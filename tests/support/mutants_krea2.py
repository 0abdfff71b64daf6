"""Faults in Krea 2: in its transformer with the tower of the text, its text encoder, its VAE, and the loop around
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.families.krea2 import model, texts
from qwenimg.common.networks.denoisers import krea2_conditioning
from qwenimg.common.numbers import rope
from support import mutants_flux2 as flux2
from support import mutants_qwen as qwen
from support import mutants_qwen21 as qwen21
from support import mutants_shared as shared
from support import mutants_zimage as zimage
from support.mutant import Judge, Mutant, Patch

# The transformer


def _class(patch: Patch, name: str) -> Any:
    return getattr(patch.backend.network("krea2_dit"), name)


def scale_without_one(patch: Patch) -> None:
    patch.around(patch.backend.ops, "modulated", lambda made, x, shift, scale, dtype: made(x, shift, scale - 1, dtype))


def table_not_added(patch: Patch) -> None:
    """Of a block."""
    patch.around(
        patch.backend.ops, "add", lambda add, x, update: x if x.ndim == 2 and x.shape[0] == 1 else add(x, update)
    )


def time_activated_in_the_head(patch: Patch) -> None:
    gelu = patch.backend.ops.gelu
    patch.around(
        _class(patch, "FinalLayer"), patch.backend.calls, lambda call, layer, x, temb: call(layer, x, gelu(temb))
    )


def time_not_activated(patch: Patch) -> None:
    """Before the modulation."""
    patch.around(patch.backend.ops, "gelu", lambda gelu, x: x if x.ndim == 2 else gelu(x))


def silu_for_gelu(patch: Patch) -> None:
    patch.set(patch.backend.ops, "gelu", patch.backend.ops.silu)


def no_gate_of_attention(patch: Patch) -> None:
    patch.set(patch.backend.ops, "sigmoid_gated", lambda x, gate: x)


def gate_by_silu(patch: Patch) -> None:
    silu = patch.backend.ops.silu
    patch.set(patch.backend.ops, "sigmoid_gated", lambda x, gate: x * silu(gate))


def norms_exchanged(patch: Patch) -> None:
    """Of attention and feed-forward."""
    patch.exchanged(_class(patch, "TransformerBlock"), patch.backend.calls, "norm1", "norm2")


def no_qk_norm(patch: Patch) -> None:
    patch.layer("CentredRMSNorm", lambda layer, x, y: patch.backend.like(x, y) if ".norm_" in layer.path else y)


def first_token_not_attended(patch: Patch) -> None:
    """Of the text."""
    patch.attention(lambda attend, q, k, v, *rest, **more: attend(q, k[:, 1:], v[:, 1:], *rest))


# The tower of the text


def _fusion(patch: Patch, change: Callable[..., Any]) -> None:
    """Makes the tower change(the original, its own layers, states [1 S N*W])."""
    patch.around(_class(patch, "TextFusion"), patch.backend.calls, change)


def layers_back_to_front(patch: Patch) -> None:
    def turned(call: Any, tower: Any, text: Any) -> Any:
        layers, width = tower.shape
        parts = [text[..., i * width : (i + 1) * width] for i in reversed(range(layers))]
        return call(tower, patch.backend.join(parts, -1))

    _fusion(patch, turned)


def layers_and_channels_exchanged(patch: Patch) -> None:
    """The channels of a state first, then the layers."""

    def exchanged(call: Any, tower: Any, text: Any) -> Any:
        layers, width = tower.shape
        return call(tower, text.reshape(1, -1, width, layers).swapaxes(2, 3).reshape(1, -1, layers * width))

    _fusion(patch, exchanged)


def blocks_of_layers_left_out(patch: Patch) -> None:
    patch.around(
        _class(patch, "FusionBlock"), patch.backend.calls, lambda call, b, x: x if x.shape[0] > 1 else call(b, x)
    )


def refiners_left_out(patch: Patch) -> None:
    patch.around(
        _class(patch, "FusionBlock"), patch.backend.calls, lambda call, b, x: x if x.shape[0] == 1 else call(b, x)
    )


def fusion_without_norm_of_the_feed_forward(patch: Patch) -> None:
    patch.exchanged(_class(patch, "FusionBlock"), patch.backend.calls, "norm1", "norm2")


# The text encoder


def template_without_last_newline(patch: Patch) -> None:
    patch.set(texts, "END", texts.END[:-1])


def template_one_token_off(patch: Patch) -> None:
    """Of what is dropped."""
    patch.set(model, "TEMPLATE", replace(model.TEMPLATE, dropped=model.TEMPLATE.dropped + 1))


# Positions and times


def _positions(patch: Patch, change: Callable[[Any, int], Any]) -> None:
    """Makes positions [S+L 3] what `change` makes of them and of the length of the text."""
    patch.around(
        krea2_conditioning, "positions", lambda made, grid, length: change(np.array(made(grid, length)), length)
    )


def rows_and_columns_swapped(patch: Patch) -> None:
    _positions(patch, lambda positions, length: positions[:, [0, 2, 1]])


def text_numbered(patch: Patch) -> None:
    """Along the first axis, as in other models."""

    def numbered(positions: Any, length: int) -> Any:
        positions[:length, 0] = np.arange(length)
        return positions

    _positions(patch, numbered)


def image_behind_the_text(patch: Patch) -> None:
    def moved(positions: Any, length: int) -> Any:
        positions[length:, 0] = length
        return positions

    _positions(patch, moved)


def image_one_row_later(patch: Patch) -> None:
    def moved(positions: Any, length: int) -> Any:
        positions[length:, 1] += 1
        return positions

    _positions(patch, moved)


def theta_of_others(patch: Patch) -> None:
    patch.around(rope, "rope_table", lambda made, positions, axes, theta: made(positions, axes, 1e4))


def branches_swapped(patch: Patch) -> None:
    patch.around(model, "from_prompt", lambda formula, engine, request, both: formula(engine, request, both[::-1]))


def guidance_of_others(patch: Patch) -> None:
    """neg + s (pos - neg)."""
    patch.set(model, "from_prompt", lambda engine, request, both: both[1] + request.guidance * (both[0] - both[1]))


MUTANTS = (
    Mutant(shared.of_modulation("shifts_first", (1, 0, 2, 4, 3, 5)), "shifts before scales"),
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(flux2.feed_forward_modulates_attention, "the feed-forward's modulation for the attention's"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(scale_without_one, "`scale` for `1 + scale`"),
    Mutant(table_not_added, "the table of a block not added"),
    Mutant(time_activated_in_the_head, "GELU before the head's modulation"),
    Mutant(time_not_activated, "no GELU of the time"),
    Mutant(silu_for_gelu, "SiLU for GELU"),
    Mutant(qwen21.text_gelu_erf, "GELU by its definition for its tanh form"),
    Mutant(shared.sines_first("krea2_dit", "TimestepEmbedding"), "sines before cosines of the time"),
    Mutant(zimage.feed_forward_exchanged, "the two parts of the feed-forward exchanged"),
    Mutant(no_gate_of_attention, "no gate over attention"),
    Mutant(gate_by_silu, "SiLU for the sigmoid over attention"),
    Mutant(norms_exchanged, "the two norms of a block exchanged"),
    Mutant(qwen21.text_gain_without_one, "the gains of norms without one"),
    Mutant(zimage.norm_eps, "RMSNorm's epsilon ten times too large"),
    Mutant(no_qk_norm, "no norm of queries and keys"),
    Mutant(shared.attention_scale, "attention's scale 1 % too large"),
    Mutant(shared.no_rope, "no RoPE"),
    Mutant(shared.rope_of_halves, "RoPE on halves for pairs"),
    Mutant(shared.causal, "causal attention in the transformer"),
    Mutant(first_token_not_attended, "the first text token not attended"),
    Mutant(layers_back_to_front, "the layers of the text encoder back to front"),
    Mutant(layers_and_channels_exchanged, "the channels of text states before their layers"),
    Mutant(blocks_of_layers_left_out, "the tower's blocks across layers left out"),
    Mutant(refiners_left_out, "the tower's blocks across tokens left out"),
    Mutant(fusion_without_norm_of_the_feed_forward, "the two norms of a block of the tower exchanged"),
    Mutant(flux2.taps_one_layer_early, "text states of one layer before"),
    Mutant(shared.text_not_causal, "a Qwen3-VL that sees what comes"),
    Mutant(shared.text_rope_of_pairs, "Qwen3-VL's RoPE on pairs for halves"),
    Mutant(flux2.text_not_normed, "no norm of Qwen3-VL's queries and keys"),
    Mutant(shared.keys_not_shared, "shared heads of keys dealt out in another order"),
    Mutant(shared.kernel_turned, "rows and columns of kernels exchanged"),
    Mutant(shared.norm_without_root, "the VAE's norm without the root of the channels"),
    Mutant(qwen.no_post_quant_conv, "no post_quant_conv"),
    *shared.ARITHMETIC,
    Mutant(shared.velocity_sign("krea2_dit"), "the velocity's sign", picture=True),
    Mutant(flux2.time_off, "times 0.1 % off", picture=True),
    Mutant(template_without_last_newline, "the template without its last newline", picture=True),
    Mutant(template_one_token_off, "the template cut one token off", picture=True),
    Mutant(shared.packing_order, "latents packed in another order", picture=True),
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True),
    Mutant(text_numbered, "text tokens numbered", picture=True),
    Mutant(image_behind_the_text, "the image behind the text", picture=True),
    Mutant(image_one_row_later, "the image one row later", picture=True),
    Mutant(theta_of_others, "RoPE's theta 10000", picture=True, refused=("bf16",)),
    Mutant(branches_swapped, "the branches of guidance exchanged", picture=True),
    Mutant(guidance_of_others, "guidance from the unconditional prediction", picture=True),
    Mutant(shared.no_latents_mean, "the latents' mean not added", picture=True),
    Mutant(shared.latents_std_off(0.01), "the latents' deviation 1 % off", picture=True),
    *shared.NOISE_LEVELS,
    *shared.DECODING,
)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["krea2"])
