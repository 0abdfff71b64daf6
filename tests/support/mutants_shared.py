"""Faults that several families have: what plants them, and the rows that tables have in common.

Where a fault needs the network or the model that it is in, a function returns its plant, under the name of the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from qwenimg.common.numbers import packing
from qwenimg.common.parts import vae
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pictures import pixels
from qwenimg.common.pipeline import control_pictures
from qwenimg.common.pipeline.steps import plan
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.weights.loras import lora
from support.mutant import Mutant, Patch, Plant

# The transformer


def attention_scale(patch: Patch) -> None:
    patch.attention(lambda attend, q, *rest, **more: attend(1.01 * q, *rest, **more))


def norm_left_out(patch: Patch, path: str) -> None:
    """Leaves out the RMSNorm at that path."""
    patch.layer("RMSNorm", lambda layer, x, y: patch.backend.like(x, y) if layer.path == path else y)


def no_qk_norm(patch: Patch) -> None:
    patch.layer("RMSNorm", lambda layer, x, y: patch.backend.like(x, y) if ".norm_" in layer.path else y)


def no_rope(patch: Patch) -> None:
    patch.set(patch.backend.ops, "rotate_pairs", lambda x, turns, dtype: x)


def rope_of_halves(patch: Patch) -> None:
    halves = patch.backend.ops.rotate_halves
    patch.set(
        patch.backend.ops, "rotate_pairs", lambda x, turns, dtype: halves(x, turns[:, 0, :, 0], turns[:, 0, :, 1])
    )


def scale_without_one(patch: Patch) -> None:
    def without(modulate: Any, x: Any, shift: Any, scale: Any, *rest: Any) -> Any:
        return modulate(x, shift, scale - 1, *rest)

    patch.around(patch.backend.ops, "norm_modulate", without)


def silu_left_out(patch: Patch) -> None:
    patch.set(patch.backend.ops, "silu", lambda x: x)


def gelu_erf(patch: Patch) -> None:
    patch.set(patch.backend.products, "gelu", patch.backend.ops.gelu_erf)


def causal(patch: Patch) -> None:
    patch.attention(lambda attend, q, k, v, *rest, **more: attend(q, k, v, causal=True))


def of_modulation(name: str, order: tuple[int, ...]) -> Plant:
    """Return a plant that puts the vectors of a modulation in another order, where there are so many."""

    def plant(patch: Patch) -> None:
        def exchanged(chunks: Any, modulation: Any, count: int, index: Any) -> Any:
            parts = chunks(modulation, count, index)
            return [parts[i] for i in order] if count == len(order) else parts

        patch.around(patch.backend.ops, "chunks", exchanged)

    plant.__name__ = name
    return plant


gates_swapped = of_modulation("gates_swapped", (0, 1, 5, 3, 4, 2))
scales_first = of_modulation("scales_first", (1, 0, 2, 4, 3, 5))
last_scale_and_shift_swapped = of_modulation("last_scale_and_shift_swapped", (1, 0))


def sines_first(network: str, layer: str) -> Plant:
    """Return a plant in the layer that takes the features of a time."""

    def sines_first(patch: Patch) -> None:
        def exchanged(call: Any, own: Any, features: Any, *rest: Any) -> Any:
            return call(own, patch.backend.join(patch.backend.halves(features), -1), *rest)

        patch.around(getattr(patch.backend.network(network), layer), patch.backend.calls, exchanged)

    return sines_first


# The text encoder


def text_not_causal(patch: Patch) -> None:
    patch.attention(lambda attend, q, k, v, *rest, causal=False: attend(q, k, v, *rest))


def by_pairs(patch: Patch) -> Callable[..., Any]:
    """Return RoPE on pairs that takes the tables of RoPE on halves."""
    pairs, freqs = patch.backend.ops.rotate_pairs, patch.backend.ops.rope_freqs

    def rotated(x: Any, *table: Any) -> Any:
        wide, cos, sin = (patch.backend.cast(part, "float32") for part in (x, *table))
        return pairs(wide, freqs(cos, sin), x.dtype)

    return rotated


def text_rope_of_pairs(patch: Patch) -> None:
    patch.set(patch.backend.ops, "rotate_halves", by_pairs(patch))


def keys_not_shared(patch: Patch) -> None:
    """The heads of keys dealt out in another order to the queries."""

    def turned(attend: Any, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> Any:
        return attend(q, patch.backend.lib.roll(k, 1, 2) if k.shape[2] != q.shape[2] else k, v, *rest, **more)

    patch.attention(turned)


# The VAE


def kernel_turned(patch: Patch) -> None:
    """Rows and columns of every kernel exchanged."""
    axes = (2, 3) if patch.backend.torch else (1, 2)
    patch.loaded(lambda entry, made: made.swapaxes(*axes) if len(entry.shape) == 4 else made)


def norm_without_root(patch: Patch) -> None:
    patch.layer("ChannelNorm", lambda layer, x, y: y / layer.gamma.shape[0] ** 0.5)


def queries_and_keys_swapped(patch: Patch) -> None:
    axis = patch.backend.axes()[0]

    def swapped(attend: Any, qkv: Any) -> Any:
        return attend(patch.backend.lib.roll(qkv, qkv.shape[axis] // 3, axis))

    patch.around(patch.backend.ops, "spatial_attention", swapped)


def padded_on_the_other_side(patch: Patch) -> None:
    rows, columns = patch.backend.axes()[1:]
    patch.around(
        patch.backend.ops, "pad_right_bottom", lambda pad, x: patch.backend.lib.roll(pad(x), (1, 1), (rows, columns))
    )


# Weights and arithmetic


def weight_transposed(patch: Patch) -> None:
    """Every square matrix the other way round."""

    def turned(entry: Any, made: Any) -> Any:
        return made.swapaxes(0, 1) if len(entry.shape) == 2 and entry.shape[0] == entry.shape[1] else made

    patch.loaded(turned)


def accumulated_in_half(patch: Patch) -> None:
    patch.layer("Linear", lambda layer, x, y: patch.backend.rounded(y))


def scales_of_the_next_group(patch: Patch) -> None:
    lib = patch.backend.lib

    def shifted(decode: Any, codes: Any, scales: Any, *rest: Any, **code: Any) -> Any:
        return decode(codes, lib.roll(scales, 1, 1), *rest, **code)

    patch.around(patch.backend.quantized, "decode", shifted)


def input_not_rotated(patch: Patch) -> None:
    patch.built(patch.backend.quantized.QuantizedLinear, lambda layer: setattr(layer, "rotation", 0))


def no_place(place: str) -> Plant:
    """Return a plant that leaves a float32 place in 16 bit."""

    def plant(patch: Patch) -> None:
        def lost(weight_dtype: Any, precision: Precision, component: str, key: str, *rest: Any) -> str:
            found = precision.kind.place(key, *(rest or (ONCE,))) if component in ("transformer", "unet") else None
            return (
                precision.stored_dtype(component) if found == place else weight_dtype(precision, component, key, *rest)
            )

        patch.around(Precision, "weight_dtype", lost)

    plant.__name__ = f"no_{place}"
    return plant


def no_residual(patch: Patch) -> None:
    patch.set(Precision, "residual_dtype", Precision.compute_dtype)


def norm_in_half(patch: Patch) -> None:
    """The gain of RMSNorm applied in 16 bit."""
    patch.layer("RMSNorm", lambda layer, x, y: patch.backend.cast(y, "bfloat16"))


def lora_without_alpha(patch: Patch) -> None:
    patch.set(lora, "scale_of", lambda file, module, rank: 1.0)


# Pictures that a model sees


def picture_in_0_to_1(patch: Patch) -> None:
    """For -1 to 1."""
    patch.around(pixels, "from_uint8", lambda made, picture: (made(picture) + 1) / 2)


def reference_a_sample(patch: Patch) -> None:
    """Of its latents, for their mean."""
    patch.around(
        VAEHalves, "__init__", lambda init, halves, *given, **more: init(halves, *given, **(more | {"samples": True}))
    )


def velocity_of_other_tokens(patch: Patch) -> None:
    lib = patch.backend.lib
    patch.around(patch.backend.ops.Tokens, "gathered", lambda gathered, tokens, x: lib.roll(gathered(tokens, x), 1, 1))


# The loop: what both backends share


def packing_order(patch: Patch) -> None:
    def wrong_pack(x: Any) -> Any:
        B, C, h, w = x.shape
        return x.reshape(B, C, h // 2, 2, w // 2, 2).transpose(0, 2, 4, 3, 5, 1).reshape(B, h * w // 4, 4 * C)

    patch.set(packing, "pack", wrong_pack)


def sigma_off_by_one(patch: Patch) -> None:
    patch.around(plan, "flow_schedule", lambda made, *rest: (made(*rest)[0], *made(*rest)[:-2], 0.0))


def shift_off(patch: Patch) -> None:
    patch.around(plan, "flow_schedule", lambda made, *rest: tuple(1.02 * s / (1 + 0.02 * s) for s in made(*rest)))


def velocity_sign(network: str) -> Plant:
    def velocity_sign(patch: Patch) -> None:
        owner = patch.backend.network(network).Runner
        patch.around(owner, "predict", lambda predict, *given: -predict(*given))

    return velocity_sign


def time_off(model: Any) -> Plant:
    """Return a plant in a model's module that makes the rows of all times at once."""

    def time_off(patch: Patch) -> None:
        patch.around(
            model, "time_rows", lambda made, timesteps, *rest: made([0.999 * timestep for timestep in timesteps], *rest)
        )

    return time_off


def branches_swapped(model: Any) -> Plant:
    """Return a plant in a class of models that has a formula of its own."""

    def branches_swapped(patch: Patch) -> None:
        right = model.guidance.formula
        swapped = replace(model.guidance, formula=lambda engine, request, both: right(engine, request, both[::-1]))
        patch.set(model, "guidance", swapped)

    return branches_swapped


def from_the_prompt(model: Any) -> Plant:
    """Return a plant in such a class: pos + s (pos - neg)."""

    def guidance_from_the_prompt(patch: Patch) -> None:
        def formula(engine: Any, request: Any, both: Any) -> Any:
            return both[0] + request.guidance * (both[0] - both[1])

        patch.set(model, "guidance", replace(model.guidance, formula=formula))

    return guidance_from_the_prompt


def cfg_branches_swapped(model: Any) -> Plant:
    """Return a plant in a model's module, from which its models take `cfg`."""

    def branches_swapped(patch: Patch) -> None:
        patch.around(model, "cfg", lambda cfg, engine, request, both: cfg(engine, request, both[::-1]))

    return branches_swapped


def cfg_from_the_prompt(model: Any) -> Plant:
    """Return a plant in such a module: pos + s (pos - neg)."""

    def guidance_from_the_prompt(patch: Patch) -> None:
        patch.set(model, "cfg", lambda engine, request, both: both[0] + request.guidance * (both[0] - both[1]))

    return guidance_from_the_prompt


def mask_inverted(patch: Patch) -> None:
    patch.around(control_pictures, "hole", lambda hole, *given: ~hole(*given))


# Behind the steps


def vae_scale(patch: Patch) -> None:
    patch.around(VAEHalves, "decode", lambda decode, halves, z: decode(halves, 1.1 * z))


def no_latents_shift(patch: Patch) -> None:
    patch.around(vae, "scaled", lambda made, scale, shift: made(scale, 0.0))


def latents_scale_1_off(patch: Patch) -> None:
    patch.around(vae, "scaled", lambda made, scale, shift: made(1.01 * scale, shift))


def no_latents_mean(patch: Patch) -> None:
    patch.around(vae, "standardized", lambda made, mean, std: made([0.0] * len(mean), std))


def latents_std_off(share: float) -> Plant:
    def plant(patch: Patch) -> None:
        patch.around(vae, "standardized", lambda made, mean, std: made(mean, [(1 + share) * one for one in std]))

    plant.__name__ = f"latents_std_{share:g}_off"
    return plant


def red_and_blue_exchanged(patch: Patch) -> None:
    patch.around(pixels, "to_uint8", lambda made, values: made(values[::-1]))


def pixels_truncated(patch: Patch) -> None:
    def truncated(values: Any) -> Any:
        unit = np.clip(values.astype(np.float32) * 0.5 + 0.5, 0.0, 1.0)
        return np.ascontiguousarray((unit * 255.0).astype(np.uint8).transpose(1, 2, 0))

    patch.set(pixels, "to_uint8", truncated)


# Rows that tables have in common

PLAIN = "bf16"
ATTENTION_WITH_ROPE = (
    Mutant(attention_scale, "attention's scale 1 % too large"),
    Mutant(no_qk_norm, "no norm of queries and keys"),
    Mutant(no_rope, "no RoPE"),
    Mutant(rope_of_halves, "RoPE on halves for pairs"),
)
WEIGHTS_AND_PLACES = (
    Mutant(weight_transposed, "square weights transposed"),
    Mutant(accumulated_in_half, "products rounded to bfloat16"),
    Mutant(no_place("final_norm"), "the head's float32 place lost", PLAIN),
    Mutant(no_place("modulation"), "the modulation's float32 place lost", PLAIN),
    Mutant(no_residual, "the residual streams' float32 place lost", PLAIN),
)
ARITHMETIC = (*WEIGHTS_AND_PLACES, Mutant(norm_in_half, "RMSNorm's float32 lost", PLAIN))
NOISE_LEVELS = (
    Mutant(sigma_off_by_one, "noise levels off by one", picture=True),
    Mutant(shift_off, "the shift of the noise levels 2 % off", picture=True),
)
PIXELS = (
    Mutant(red_and_blue_exchanged, "red and blue exchanged", picture=True),
    Mutant(pixels_truncated, "pixels truncated, not rounded", picture=True),
)
DECODING = (Mutant(vae_scale, "latents 10 % off", picture=True), *PIXELS)
SCALED_AND_DECODED = (
    Mutant(no_latents_shift, "the latents' shift not added", picture=True),
    Mutant(latents_scale_1_off, "the latents' scale 1 % off", picture=True),
    *DECODING,
)
