"""Faults in Stable Diffusion 3: in its transformer, its text encoders, their weights, and the loop around them.

The order of text rows is none of them: the transformer gives them no positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from mutant import Mutant, Patch
from mutants_qwen import (
    accumulated_in_half,
    attention_scale,
    no_place,
    no_qk_norm,
    no_residual,
    norm_in_half,
    pixels_truncated,
    red_and_blue_exchanged,
    sigma_off_by_one,
    vae_scale,
    weight_transposed,
)

from qwenimg.common.families.sd3 import model
from qwenimg.common.families.sd3.model import SD3
from qwenimg.common.families.sd3.texts import SD3Texts
from qwenimg.common.networks.denoisers import sd3_conditioning
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts import padded_texts
from qwenimg.common.pipeline.steps import plan

# The transformer


def of_modulation(name: str, order: tuple[int, ...]) -> Callable[[Patch], None]:
    """A plant that puts the vectors of a modulation in another order, where there are so many."""

    def plant(patch: Patch) -> None:
        def exchanged(chunks: Any, modulation: Any, count: int, index: Any) -> Any:
            parts = chunks(modulation, count, index)
            return [parts[i] for i in order] if count == len(order) else parts

        patch.around(patch.backend.ops, "chunks", exchanged)

    plant.__name__ = name
    return plant


nine_in_another_order = of_modulation("nine_in_another_order", (0, 1, 2, 6, 7, 8, 3, 4, 5))
gates_swapped = of_modulation("gates_swapped", (0, 1, 5, 3, 4, 2))
scales_first = of_modulation("scales_first", (1, 0, 2, 4, 3, 5))
last_scale_and_shift_swapped = of_modulation("last_scale_and_shift_swapped", (1, 0))


def head_halves_swapped(patch: Patch) -> None:
    """Of the weights."""
    patch.layer(
        "Linear",
        lambda layer, x, y: patch.backend.join(patch.backend.halves(y), -1) if layer.path == "norm_out.linear" else y,
    )


def scale_without_one(patch: Patch) -> None:
    def without(modulate: Any, x: Any, shift: Any, scale: Any, *rest: Any) -> Any:
        return modulate(x, shift, scale - 1, *rest)

    patch.around(patch.backend.ops, "norm_modulate", without)


def no_second_attention(patch: Patch) -> None:
    owner = patch.backend.network("sd3_dit").SelfAttention
    patch.around(owner, patch.backend.calls, lambda call, layer, x: 0 * call(layer, x))


def no_pooled_text(patch: Patch) -> None:
    owner = patch.backend.network("sd3_dit").TimeTextEmbed
    patch.around(owner, patch.backend.calls, lambda call, layer, features, pooled: call(layer, features, 0 * pooled))


def sines_first(patch: Patch) -> None:
    owner = patch.backend.network("sd3_dit").TimeTextEmbed

    def exchanged(call: Any, layer: Any, features: Any, pooled: Any) -> Any:
        return call(layer, patch.backend.join(patch.backend.halves(features), -1), pooled)

    patch.around(owner, patch.backend.calls, exchanged)


def silu_left_out(patch: Patch) -> None:
    patch.set(patch.backend.ops, "silu", lambda x: x)


def norm_eps(patch: Patch) -> None:
    patch.set(patch.backend.network("sd3_dit"), "NORM_EPS", 1e-3)


def text_not_attended(patch: Patch) -> None:
    """Its last token."""
    patch.attention(lambda attend, q, k, v, *rest, **more: attend(q, k[:, :-1], v[:, :-1], *rest))


def text_norms_of_the_image(patch: Patch) -> None:
    owner = patch.backend.network("sd3_dit").JointAttention

    def exchanged(both: Any, layer: Any, img: Any, txt: Any) -> Any:
        layer.norm_added_q, layer.norm_q = layer.norm_q, layer.norm_added_q
        try:
            return both(layer, img, txt)
        finally:
            layer.norm_added_q, layer.norm_q = layer.norm_q, layer.norm_added_q

    patch.around(owner, "both", exchanged)


# The loop: what both backends share


def table_at_the_corner(patch: Patch) -> None:
    def cut(config: Any, rows: int, columns: int) -> Any:
        return (np.arange(rows)[:, None] * config.pos_embed_max_size + np.arange(columns)).reshape(1, -1)

    patch.set(sd3_conditioning, "window", cut)


def table_one_row_off(patch: Patch) -> None:
    patch.around(
        sd3_conditioning, "window", lambda made, config, *grid: made(config, *grid) + config.pos_embed_max_size
    )


def velocity_sign(patch: Patch) -> None:
    owner = patch.backend.network("sd3_dit").Component
    patch.around(owner, "predict", lambda predict, *given: -predict(*given))


def time_off(patch: Patch) -> None:
    patch.around(model, "time_rows", lambda made, timesteps: made([0.999 * timestep for timestep in timesteps]))


def shifted_once(patch: Patch) -> None:
    """The levels of others."""
    patch.set(SD3, "levels", plan.USUAL)


def shift_off(patch: Patch) -> None:
    patch.around(plan, "flow_schedule", lambda made, *rest: tuple(1.02 * s / (1 + 0.02 * s) for s in made(*rest)))


def pooled_of_the_other_branch(patch: Patch) -> None:
    owner = patch.backend.network("sd3_dit").Component
    patch.around(owner, "modulate", lambda made, component, features, pooled: made(component, features, pooled[::-1]))


def clips_exchanged(patch: Patch) -> None:
    patch.around(SD3Texts, "_joined", lambda made, own, results: made(own, (results[1], results[0], *results[2:])))


def t5_left_out(patch: Patch) -> None:
    patch.around(SD3Texts, "_joined", lambda made, own, results: made(own, results[:2]))


def clip_of_the_last_layer(patch: Patch) -> None:
    patch.around(padded_texts.clip, "used_states", lambda used, config, penultimate: used(config, penultimate=False))


def clip_pads_exchanged(patch: Patch) -> None:
    """`!` for the end token, and the other way round."""

    def exchanged(made: Any, own: Any, *rest: Any) -> None:
        made(own, *rest)
        first, second, *_ = own.every
        first._tokenizer, second._tokenizer = second._tokenizer, first._tokenizer

    patch.around(SD3Texts, "__init__", exchanged)


def branches_swapped(patch: Patch) -> None:
    formula = SD3.guidance.formula
    swapped = replace(SD3.guidance, formula=lambda engine, request, both: formula(engine, request, both[::-1]))
    patch.set(SD3, "guidance", swapped)


def no_latents_shift(patch: Patch) -> None:
    patch.around(vae, "scaled", lambda made, scale, shift: made(scale, 0.0))


def latents_scale_1_off(patch: Patch) -> None:
    patch.around(vae, "scaled", lambda made, scale, shift: made(1.01 * scale, shift))


PLAIN = "bf16"
MUTANTS = (
    Mutant(nine_in_another_order, "the second attention's modulation before the feed-forward's"),
    Mutant(gates_swapped, "the gates of attention and feed-forward exchanged in the text stream"),
    Mutant(scales_first, "scales before shifts"),
    Mutant(last_scale_and_shift_swapped, "scale and shift exchanged in the last block's text and in the head"),
    Mutant(head_halves_swapped, "the head's modulation in the order of single files"),
    Mutant(scale_without_one, "`scale` for `1 + scale` in every norm"),
    Mutant(no_second_attention, "no second attention"),
    Mutant(no_pooled_text, "times without the pooled text"),
    Mutant(sines_first, "sines before cosines of times beside the pooled text"),
    Mutant(silu_left_out, "no SiLU"),
    Mutant(norm_eps, "LayerNorm's epsilon 0.001"),
    Mutant(text_not_attended, "the last text token not attended"),
    Mutant(text_norms_of_the_image, "the image's norm of queries for the text"),
    Mutant(attention_scale, "attention's scale 1 % too large"),
    Mutant(no_qk_norm, "no norm of queries and keys"),
    Mutant(weight_transposed, "square weights transposed"),
    Mutant(accumulated_in_half, "products rounded to bfloat16"),
    Mutant(no_place("final_norm"), "the head's float32 place lost", PLAIN),
    Mutant(no_place("modulation"), "the modulation's float32 place lost", PLAIN),
    Mutant(no_residual, "the residual streams' float32 place lost", PLAIN),
    Mutant(norm_in_half, "RMSNorm's float32 lost", PLAIN),
    Mutant(table_at_the_corner, "the table of positions from its corner", picture=True),
    Mutant(table_one_row_off, "the table of positions one row off", picture=True),
    Mutant(velocity_sign, "the velocity's sign", picture=True),
    Mutant(time_off, "times 0.1 % off", picture=True),
    Mutant(shifted_once, "noise levels shifted once", picture=True),
    Mutant(sigma_off_by_one, "noise levels off by one", picture=True),
    Mutant(shift_off, "the shift of the noise levels 2 % off", picture=True),
    Mutant(pooled_of_the_other_branch, "each branch of guidance with the other's pooled text", picture=True),
    Mutant(clips_exchanged, "the two CLIPs exchanged", picture=True),
    Mutant(t5_left_out, "T5's rows zeros", picture=True),
    Mutant(clip_of_the_last_layer, "the CLIPs' last layer for the one before", picture=True),
    Mutant(clip_pads_exchanged, "each CLIP with the other's padding", picture=True),
    Mutant(branches_swapped, "the branches of guidance exchanged", picture=True),
    Mutant(no_latents_shift, "the latents' shift not added", picture=True),
    Mutant(latents_scale_1_off, "the latents' scale 1 % off", picture=True),
    Mutant(vae_scale, "latents 10 % off", picture=True),
    Mutant(red_and_blue_exchanged, "red and blue exchanged", picture=True),
    Mutant(pixels_truncated, "pixels truncated, not rounded", picture=True),
)
