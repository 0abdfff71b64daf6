"""Faults in Qwen-Image: in its transformer, its text encoder, its VAE, their weights, and the loop around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from mutant import Mutant, Patch

from qwenimg.common.families.qwen_image import variants
from qwenimg.common.networks.denoisers import qwen_conditioning
from qwenimg.common.numbers import packing, rope
from qwenimg.common.parts import vae
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pictures import pixels
from qwenimg.common.pipeline.steps import plan
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.sampling.flow_match import FlowMatchConfig
from qwenimg.common.weights.loras import lora

QKV = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")

# The transformer


def layer_norm_eps(patch: Patch) -> None:
    patch.set(patch.backend.network("qwen_dit"), "NORM_EPS", 1e-5)


def gelu_erf(patch: Patch) -> None:
    patch.set(patch.backend.products, "gelu", patch.backend.ops.gelu_erf)


def attention_scale(patch: Patch) -> None:
    patch.attention(lambda attend, q, *rest, **more: attend(1.01 * q, *rest, **more))


def no_qkv_bias(patch: Patch) -> None:
    patch.layer("Linear", lambda layer, x, y: y - layer.bias if layer.path.endswith(QKV) else y)


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


def gates_swapped(patch: Patch) -> None:
    def swapped(chunks: Any, modulation: Any, count: int, index: Any) -> Any:
        parts = list(chunks(modulation, count, index))
        if count == 6:
            parts[2], parts[5] = parts[5], parts[2]
        return parts

    patch.around(patch.backend.ops, "chunks", swapped)


def head_scale_and_shift_swapped(patch: Patch) -> None:
    def swapped(chunks: Any, modulation: Any, count: int, index: Any) -> Any:
        parts = chunks(modulation, count, index)
        return parts[::-1] if count == 2 else parts

    patch.around(patch.backend.ops, "chunks", swapped)


def causal(patch: Patch) -> None:
    patch.attention(lambda attend, q, k, v, *rest, **more: attend(q, k, v, causal=True))


def sines_first(patch: Patch) -> None:
    def exchanged(embed: Any, layer: Any, features: Any) -> Any:
        return embed(layer, patch.backend.join(patch.backend.halves(features), -1))

    owner = patch.backend.network("qwen_dit").TimestepEmbedding
    patch.around(owner, patch.backend.calls, exchanged)


# The text encoder


def text_not_causal(patch: Patch) -> None:
    patch.attention(lambda attend, q, k, v, *rest, causal=False: attend(q, k, v, *rest))


def text_rope_of_pairs(patch: Patch) -> None:
    pairs, freqs = patch.backend.ops.rotate_pairs, patch.backend.ops.rope_freqs

    def rotated(x: Any, *table: Any) -> Any:
        wide, cos, sin = (patch.backend.cast(part, "float32") for part in (x, *table))
        return pairs(wide, freqs(cos, sin), x.dtype)

    patch.set(patch.backend.ops, "rotate_halves", rotated)


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


def no_post_quant_conv(patch: Patch) -> None:
    owner = patch.backend.network("qwen_vae").QwenVAE
    patch.set(owner, "decode", lambda model, z, *sides: model.decoder(z, *sides))


def upsampled_between_pixels(patch: Patch) -> None:
    rows = patch.backend.axes()[1]
    patch.around(patch.backend.images, "upsample", lambda up, x: patch.backend.lib.roll(up(x), 1, rows))


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

    patch.around(patch.backend.quantised, "decode", shifted)


def no_place(place: str) -> Any:
    """A plant that leaves a float32 place in 16 bit."""

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


def time_as_sigma(patch: Patch) -> None:
    patch.around(FlowMatchConfig, "timestep", lambda made, config, sigma: made(config, sigma) * 0.999)


def _with_template(patch: Patch, **changes: Any) -> None:
    kind = replace(variants.TEXT, template=replace(variants.DRAWS, **changes))
    patch.set(variants, "VARIANTS", variants.VARIANTS | {"text": kind})


def template_one_token_off(patch: Patch) -> None:
    _with_template(patch, dropped=variants.DRAWS.dropped + 1)


def rows_and_columns_swapped(patch: Patch) -> None:
    patch.around(rope, "image_positions", lambda made, *rest: made(*rest)[:, [0, 2, 1]])


def stale_rope(patch: Patch) -> None:
    """Of the size before, whose sides were the other way round."""
    patch.around(rope, "image_positions", lambda made, shapes, *rest: made([(f, w, h) for f, h, w in shapes], *rest))


def wrong_text_mask(patch: Patch) -> None:
    patch.around(qwen_conditioning, "key_mask", lambda made, lengths, tokens: made(lengths[::-1], tokens))


def guidance_without_norm(patch: Patch) -> None:
    patch.set(patch.backend.ops, "guide", lambda c, u, scale: u + scale * (c - u))


def branches_swapped(patch: Patch) -> None:
    patch.around(patch.backend.ops, "guide", lambda guide, c, u, scale: guide(u, c, scale))


def lora_without_alpha(patch: Patch) -> None:
    patch.set(lora, "scale_of", lambda file, module, rank: 1.0)


def vae_scale(patch: Patch) -> None:
    patch.around(VAEHalves, "decode", lambda decode, halves, z: decode(halves, 1.1 * z))


def guidance_sign(patch: Patch) -> None:
    patch.around(patch.backend.ops, "guide", lambda guide, c, u, scale: guide(c, u, -scale))


def text_rope_one_later(patch: Patch) -> None:
    patch.around(rope, "text_positions", lambda made, *rest: made(*rest) + 1)


def no_txt_norm(patch: Patch) -> None:
    patch.layer("RMSNorm", lambda layer, x, y: patch.backend.like(x, y) if layer.path == "txt_norm" else y)


def time_plus_one(patch: Patch) -> None:
    patch.around(FlowMatchConfig, "timestep", lambda made, config, sigma: made(config, sigma) + 1)


def template_without_last_newline(patch: Patch) -> None:
    _with_template(patch, text=variants.DRAWS.text[:-1])


# Behind the steps


def no_latents_mean(patch: Patch) -> None:
    patch.around(vae, "standardized", lambda made, mean, std: made([0.0] * len(mean), std))


def latents_std_off(share: float) -> Any:
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


PLAIN = "bf16"
MUTANTS = (
    Mutant(layer_norm_eps, "LayerNorm's epsilon 1e-5 for 1e-6"),
    Mutant(gelu_erf, "GELU by the error function for its tanh form"),
    Mutant(attention_scale, "attention's scale 1 % too large"),
    Mutant(no_qkv_bias, "no bias of queries, keys and values"),
    Mutant(no_qk_norm, "no norm of queries and keys"),
    Mutant(no_rope, "no RoPE"),
    Mutant(rope_of_halves, "RoPE on halves for pairs"),
    Mutant(scale_without_one, "`scale` for `1 + scale`"),
    Mutant(gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(head_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(causal, "causal attention in the transformer"),
    Mutant(sines_first, "sines before cosines of the time"),
    Mutant(text_not_causal, "a text encoder that sees what comes"),
    Mutant(text_rope_of_pairs, "the text's RoPE on pairs for halves"),
    Mutant(keys_not_shared, "shared heads of keys dealt out in another order"),
    Mutant(kernel_turned, "rows and columns of kernels exchanged"),
    Mutant(norm_without_root, "the VAE's norm without the root of the channels"),
    Mutant(queries_and_keys_swapped, "the VAE's queries, keys and values in another order"),
    Mutant(padded_on_the_other_side, "zeros above and left for below and right"),
    Mutant(no_post_quant_conv, "no post_quant_conv"),
    Mutant(upsampled_between_pixels, "doubled pixels moved by one"),
    Mutant(weight_transposed, "square weights transposed"),
    Mutant(accumulated_in_half, "products rounded to bfloat16"),
    Mutant(no_place("final_norm"), "the head's float32 place lost", PLAIN),
    Mutant(no_place("modulation"), "the modulation's float32 place lost", PLAIN),
    Mutant(no_residual, "the residual streams' float32 place lost", PLAIN),
    Mutant(norm_in_half, "RMSNorm's float32 lost", PLAIN),
    Mutant(no_place("final_norm"), "the head's float32 place lost under -q 4", PLAIN, "4"),
    Mutant(no_place("modulation"), "the modulation's float32 place lost under -q 4", PLAIN, "4"),
    Mutant(scales_of_the_next_group, "scales of codes off by one group under -q 4", PLAIN, "4"),
    Mutant(packing_order, "latents packed in another order", picture=True),
    Mutant(sigma_off_by_one, "noise levels off by one", picture=True),
    Mutant(shift_off, "the shift of the noise levels 2 % off", picture=True),
    Mutant(time_as_sigma, "times of the noise levels 0.1 % off", picture=True),
    Mutant(template_one_token_off, "the template cut one token off", picture=True),
    Mutant(rows_and_columns_swapped, "RoPE's rows and columns exchanged", picture=True),
    Mutant(stale_rope, "RoPE tables of another size", picture=True),
    Mutant(wrong_text_mask, "the mask of the other prompt", picture=True),
    Mutant(guidance_without_norm, "guidance without the norm", picture=True),
    Mutant(branches_swapped, "the branches of guidance exchanged", picture=True),
    Mutant(lora_without_alpha, "a LoRA without its alpha", picture=True, lora=True),
    Mutant(vae_scale, "the VAE's scale 10 % off", picture=True),
    Mutant(guidance_sign, "guidance's sign", picture=True),
    Mutant(text_rope_one_later, "the text's RoPE one position later", picture=True),
    Mutant(no_txt_norm, "no norm of the text states", picture=True),
    Mutant(time_plus_one, "times one of 1000 later", picture=True),
    Mutant(template_without_last_newline, "the template without its last newline", picture=True),
    Mutant(no_latents_mean, "the latents' mean not added", picture=True),
    Mutant(latents_std_off(0.003), "the latents' deviation 0.3 % off", picture=True),
    Mutant(latents_std_off(0.01), "the latents' deviation 1 % off", picture=True),
    Mutant(red_and_blue_exchanged, "red and blue exchanged", picture=True),
    Mutant(pixels_truncated, "pixels truncated, not rounded", picture=True),
)


def prepare(pipe: Any) -> None:
    """Both branches of guidance in one batch, so that prompts are padded and masked."""
    pipe.model.batch_guidance = True
