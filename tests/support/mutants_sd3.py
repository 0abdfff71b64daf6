"""Faults in Stable Diffusion 3: in its transformer, its text encoders, their weights, and the loop around them.

The order of text rows is none of them: the transformer gives them no positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qwenimg.common.families.sd3 import model
from qwenimg.common.families.sd3.model import SD3
from qwenimg.common.families.sd3.texts import SD3Texts
from qwenimg.common.networks.denoisers import sd3_conditioning
from qwenimg.common.parts.texts import padded_texts
from qwenimg.common.pipeline.steps import plan
from support import mutants_shared as shared
from support.mutant import Mutant, Patch

# The transformer


nine_in_another_order = shared.of_modulation("nine_in_another_order", (0, 1, 2, 6, 7, 8, 3, 4, 5))


def head_halves_swapped(patch: Patch) -> None:
    """Of the weights."""
    patch.layer(
        "Linear",
        lambda layer, x, y: patch.backend.join(patch.backend.halves(y), -1) if layer.path == "norm_out.linear" else y,
    )


def no_second_attention(patch: Patch) -> None:
    owner = patch.backend.network("sd3_dit").SelfAttention
    patch.around(owner, patch.backend.calls, lambda call, layer, x: 0 * call(layer, x))


def no_pooled_text(patch: Patch) -> None:
    owner = patch.backend.network("sd3_dit").TimeTextEmbed
    patch.around(owner, patch.backend.calls, lambda call, layer, features, pooled: call(layer, features, 0 * pooled))


def norm_eps(patch: Patch) -> None:
    patch.set(patch.backend.network("sd3_dit"), "NORM_EPS", 1e-3)


def text_not_attended(patch: Patch) -> None:
    """Its last token."""
    patch.attention(lambda attend, q, k, v, *rest, **more: attend(q, k[:, :-1], v[:, :-1], *rest))


def text_norms_of_the_image(patch: Patch) -> None:
    patch.exchanged(patch.backend.network("sd3_dit").JointAttention, "both", "norm_q", "norm_added_q")


# The loop: what both backends share


def table_at_the_corner(patch: Patch) -> None:
    def cut(config: Any, rows: int, columns: int) -> Any:
        return (np.arange(rows)[:, None] * config.pos_embed_max_size + np.arange(columns)).reshape(1, -1)

    patch.set(sd3_conditioning, "window", cut)


def table_one_row_off(patch: Patch) -> None:
    patch.around(
        sd3_conditioning, "window", lambda made, config, *grid: made(config, *grid) + config.pos_embed_max_size
    )


def shifted_once(patch: Patch) -> None:
    """The levels of others."""
    patch.set(SD3, "levels", plan.USUAL)


def pooled_of_the_other_branch(patch: Patch) -> None:
    owner = patch.backend.network("sd3_dit").Runner
    patch.around(owner, "modulate", lambda made, component, features, pooled: made(component, features, pooled[::-1]))


def clips_exchanged(patch: Patch) -> None:
    patch.around(SD3Texts, "_joined", lambda made, own, results: made(own, (results[1], results[0], *results[2:])))


def t5_left_out(patch: Patch) -> None:
    patch.around(SD3Texts, "_joined", lambda made, own, results: made(own, results[:2]))


def clip_of_the_last_layer(patch: Patch) -> None:
    patch.around(padded_texts.clip, "used_states", lambda used, config, penultimate: used(config, penultimate=False))


def clip_pads_exchanged(patch: Patch) -> None:
    """`!` for the end token, and the other way round."""

    def exchanged(texts: SD3Texts) -> None:
        first, second, *_ = texts.every
        first._tokenizer, second._tokenizer = second._tokenizer, first._tokenizer

    patch.built(SD3Texts, exchanged)


MUTANTS = (
    Mutant(nine_in_another_order, "the second attention's modulation before the feed-forward's"),
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged in the text stream"),
    Mutant(shared.scales_first, "scales before shifts"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift exchanged in the last block's text and in the head"),
    Mutant(head_halves_swapped, "the head's modulation in the order of single files"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale` in every norm"),
    Mutant(no_second_attention, "no second attention"),
    Mutant(no_pooled_text, "times without the pooled text"),
    Mutant(shared.sines_first("sd3_dit", "TimeTextEmbed"), "sines before cosines of times beside the pooled text"),
    Mutant(shared.silu_left_out, "no SiLU"),
    Mutant(norm_eps, "LayerNorm's epsilon 0.001"),
    Mutant(text_not_attended, "the last text token not attended"),
    Mutant(text_norms_of_the_image, "the image's norm of queries for the text"),
    Mutant(shared.attention_scale, "attention's scale 1 % too large"),
    Mutant(shared.no_qk_norm, "no norm of queries and keys"),
    *shared.ARITHMETIC,
    Mutant(table_at_the_corner, "the table of positions from its corner", picture=True),
    Mutant(table_one_row_off, "the table of positions one row off", picture=True),
    Mutant(shared.velocity_sign("sd3_dit"), "the velocity's sign", picture=True),
    Mutant(shared.time_off(model), "times 0.1 % off", picture=True),
    Mutant(shifted_once, "noise levels shifted once", picture=True),
    *shared.NOISE_LEVELS,
    Mutant(pooled_of_the_other_branch, "each branch of guidance with the other's pooled text", picture=True),
    Mutant(clips_exchanged, "the two CLIPs exchanged", picture=True),
    Mutant(t5_left_out, "T5's rows zeros", picture=True),
    Mutant(clip_of_the_last_layer, "the CLIPs' last layer for the one before", picture=True),
    Mutant(clip_pads_exchanged, "each CLIP with the other's padding", picture=True),
    Mutant(shared.branches_swapped(SD3), "the branches of guidance exchanged", picture=True),
    *shared.SCALED_AND_DECODED,
)
