"""Faults in Z-Image: in its transformer, its text encoder, their weights, and the loop around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mutant import Mutant, Patch
from mutants_qwen import (
    accumulated_in_half,
    attention_scale,
    causal,
    keys_not_shared,
    no_place,
    no_qk_norm,
    no_residual,
    no_rope,
    norm_in_half,
    pixels_truncated,
    red_and_blue_exchanged,
    rope_of_halves,
    shift_off,
    sigma_off_by_one,
    text_not_causal,
    text_rope_of_pairs,
    vae_scale,
    weight_transposed,
)

from qwenimg.common.families.z_image import model
from qwenimg.common.families.z_image.model import ZImage
from qwenimg.common.networks.denoisers import zimage_conditioning
from qwenimg.common.numbers import packing, rope
from qwenimg.common.parts import vae

# The transformer


def pads_zeroed(patch: Patch) -> None:
    patch.layer("Embedding", lambda layer, x, y: 0 * y if "pad_token" in layer.path else y)


def last_token_not_attended(patch: Patch) -> None:
    """A pad of the text, where it has any."""
    patch.attention(lambda attend, q, k, v, *rest, **more: attend(q, k[:, :-1], v[:, :-1], *rest))


def gates_without_tanh(patch: Patch) -> None:
    patch.set(patch.backend.ops, "tanh", lambda x: x)


def scale_without_one(patch: Patch) -> None:
    patch.around(patch.backend.ops, "scaled", lambda scaled, x, scale, dtype: scaled(x, scale - 1, dtype))


def _of_modulation(order: tuple[int, ...]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def exchanged(chunks: Any, modulation: Any, count: int, index: Any) -> Any:
            parts = chunks(modulation, count, index)
            return [parts[i] for i in order] if count == 4 else parts

        patch.around(patch.backend.ops, "chunks", exchanged)

    return plant


def gates_swapped(patch: Patch) -> None:
    _of_modulation((0, 3, 2, 1))(patch)


def gates_before_scales(patch: Patch) -> None:
    _of_modulation((1, 0, 3, 2))(patch)


def feed_forward_exchanged(patch: Patch) -> None:
    patch.around(patch.backend.ops, "swiglu", lambda swiglu, a, b: swiglu(b, a))


def no_norm_of_updates(patch: Patch) -> None:
    patch.layer("RMSNorm", lambda layer, x, y: patch.backend.like(x, y) if layer.path.endswith("norm2") else y)


def norm_eps(patch: Patch) -> None:
    patch.around(patch.backend.ops.RMSNorm, "__init__", lambda init, layer, width, eps: init(layer, width, 10 * eps))


def silu_before_modulation(patch: Patch) -> None:
    owner, silu = patch.backend.network("zimage_dit").TransformerBlock, patch.backend.ops.silu

    def changed(call: Any, block: Any, x: Any, temb: Any, *rest: Any) -> Any:
        return call(block, x, silu(temb), *rest)

    patch.around(owner, patch.backend.calls, changed)


def no_silu_in_the_head(patch: Patch) -> None:
    patch.around(patch.backend.ops, "silu", lambda silu, x: x if x.shape[-1] < 1024 else silu(x))


def no_norm_in_the_head(patch: Patch) -> None:
    patch.set(patch.backend.ops, "unit_norm", lambda x, eps: x)


def sines_first(patch: Patch) -> None:
    owner = patch.backend.network("zimage_dit").TimestepEmbedder

    def exchanged(embed: Any, layer: Any, features: Any) -> Any:
        return embed(layer, patch.backend.join(patch.backend.halves(features), -1))

    patch.around(owner, patch.backend.calls, exchanged)


# The loop: what both backends share


def velocity_sign(patch: Patch) -> None:
    owner = patch.backend.network("zimage_dit").Component
    patch.around(owner, "predict", lambda predict, *given: -predict(*given))


def channels_first(patch: Patch) -> None:
    patch.around(packing, "pack", lambda pack, x, channels_last=False: pack(x))


def time_from_noise(patch: Patch) -> None:
    """Sigma for 1 - sigma."""
    patch.around(model, "time_row", lambda made, timestep, dtype: made(1000.0 - timestep, dtype))


def time_off(patch: Patch) -> None:
    patch.around(model, "time_row", lambda made, timestep, dtype: made(0.999 * timestep, dtype))


def padded_to_half(patch: Patch) -> None:
    patch.set(zimage_conditioning, "MULTIPLE", 16)


def rows_and_columns_swapped(patch: Patch) -> None:
    patch.around(
        zimage_conditioning,
        "image_and_text_rope",
        lambda made, config, rows, columns, length: made(config, columns, rows, length),
    )


def theta_of_others(patch: Patch) -> None:
    patch.around(rope, "rope_table", lambda made, positions, axes, theta: made(positions, axes, 1e4))


def image_frame_one_later(patch: Patch) -> None:
    def moved(made: Any, positions: Any, axes: Any, theta: float) -> Any:
        changed = positions.copy()
        changed[(positions[:, 1:] > 0).any(axis=1), 0] += 1  # tokens of the image, but for the first
        return made(changed, axes, theta)

    patch.around(rope, "rope_table", moved)


def guidance_of_others(patch: Patch) -> None:
    """neg + s (pos - neg)."""

    def usual(engine: Any, request: Any, predictions: Any) -> Any:
        conditional, unconditional = predictions
        return unconditional + request.guidance * (conditional - unconditional)

    patch.set(ZImage, "guidance", replace(ZImage.guidance, formula=usual))


def branches_swapped(patch: Patch) -> None:
    formula = ZImage.guidance.formula
    swapped = replace(ZImage.guidance, formula=lambda engine, request, both: formula(engine, request, both[::-1]))
    patch.set(ZImage, "guidance", swapped)


def template_without_last_newline(patch: Patch) -> None:
    patch.set(model, "TEMPLATE", replace(model.TEMPLATE, text=model.TEMPLATE.text[:-1]))


def no_latents_shift(patch: Patch) -> None:
    patch.around(vae, "scaled", lambda made, scale, shift: made(scale, 0.0))


def latents_scale_1_off(patch: Patch) -> None:
    patch.around(vae, "scaled", lambda made, scale, shift: made(1.01 * scale, shift))


PLAIN = "bf16"
_ALL = (
    Mutant(pads_zeroed, "pads zeroed for the learned tokens"),
    Mutant(last_token_not_attended, "the last pad not attended"),
    Mutant(gates_without_tanh, "gates without tanh"),
    Mutant(scale_without_one, "`scale` for `1 + scale`"),
    Mutant(gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(gates_before_scales, "gates before scales"),
    Mutant(feed_forward_exchanged, "the two parts of the feed-forward exchanged"),
    Mutant(no_norm_of_updates, "updates without their norm"),
    Mutant(norm_eps, "RMSNorm's epsilon ten times too large"),
    Mutant(silu_before_modulation, "SiLU before the blocks' modulation"),
    Mutant(no_silu_in_the_head, "no SiLU before the head's modulation"),
    Mutant(no_norm_in_the_head, "no norm in the head"),
    Mutant(sines_first, "sines before cosines of the time"),
    Mutant(attention_scale, "attention's scale 1 % too large"),
    Mutant(no_qk_norm, "no norm of queries and keys"),
    Mutant(no_rope, "no RoPE"),
    Mutant(rope_of_halves, "RoPE on halves for pairs"),
    Mutant(causal, "causal attention in the transformer"),
    Mutant(text_not_causal, "a Qwen3 that sees what comes"),
    Mutant(text_rope_of_pairs, "Qwen3's RoPE on pairs for halves"),
    Mutant(keys_not_shared, "Qwen3's shared heads of keys dealt out in another order"),
    Mutant(weight_transposed, "square weights transposed"),
    Mutant(accumulated_in_half, "products rounded to bfloat16"),
    Mutant(no_place("final_norm"), "the head's float32 place lost", PLAIN),
    Mutant(no_place("modulation"), "the modulation's float32 place lost", PLAIN),
    Mutant(no_residual, "the residual streams' float32 place lost", PLAIN),
    Mutant(norm_in_half, "RMSNorm's float32 lost", PLAIN),
    Mutant(velocity_sign, "the velocity's sign", picture=True),
    Mutant(channels_first, "channels first in a patch", picture=True),
    Mutant(time_from_noise, "sigma for 1 - sigma", picture=True),
    Mutant(time_off, "times 0.1 % off", picture=True),
    Mutant(padded_to_half, "tokens padded to 16", picture=True),
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True),
    Mutant(theta_of_others, "RoPE's theta 10000", picture=True),
    Mutant(image_frame_one_later, "the image one frame later", picture=True),
    Mutant(guidance_of_others, "guidance from the unconditional prediction", picture=True),
    Mutant(branches_swapped, "the branches of guidance exchanged", picture=True),
    Mutant(template_without_last_newline, "template without its last newline", picture=True),
    Mutant(sigma_off_by_one, "noise levels off by one", picture=True),
    Mutant(shift_off, "the shift of the noise levels 2 % off", picture=True),
    Mutant(no_latents_shift, "the latents' shift not added", picture=True),
    Mutant(latents_scale_1_off, "the latents' scale 1 % off", picture=True),
    Mutant(vae_scale, "latents 10 % off", picture=True),
    Mutant(red_and_blue_exchanged, "red and blue exchanged", picture=True),
    Mutant(pixels_truncated, "pixels truncated, not rounded", picture=True),
)
MUTANTS = tuple(replace(mutant, refused=("fp16",)) for mutant in _ALL)
