"""Faults in Stable Diffusion: in its UNet, its text encoders, its VAE, their weights, and the loop around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from qwenimg.common.families.stable_diffusion import expert
from qwenimg.common.networks.encoders import clip
from qwenimg.common.numbers import timesteps
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts.clip_texts import ClipTexts
from qwenimg.common.pipeline.steps.guidance import Guidance
from qwenimg.common.sampling import discrete, schedules
from support import mutants_shared as shared
from support.mutant import Mutant, Patch

# The UNet


def group_norm_eps(patch: Patch) -> None:
    def coarser(norm: Any, layer: Any, x: Any) -> Any:
        eps, layer.eps = layer.eps, 10 * layer.eps
        try:
            return norm(layer, x)
        finally:
            layer.eps = eps

    patch.around(patch.backend.ops.GroupNorm, patch.backend.calls, coarser)


def epsilons_of_others(patch: Patch) -> None:
    """1e-6 for 1e-5 and the reverse."""

    def exchanged(norm: Any, layer: Any, x: Any) -> Any:
        eps, layer.eps = layer.eps, 1e-6 if layer.eps > 3e-6 else 1e-5
        try:
            return norm(layer, x)
        finally:
            layer.eps = eps

    patch.around(patch.backend.ops.GroupNorm, patch.backend.calls, exchanged)


def half_as_many_groups(patch: Patch) -> None:
    def wider(norm: Any, layer: Any, x: Any) -> Any:
        groups, layer.groups = layer.groups, layer.groups // 2
        try:
            return norm(layer, x)
        finally:
            layer.groups = groups

    patch.around(patch.backend.ops.GroupNorm, patch.backend.calls, wider)


def unbiased_variance(patch: Patch) -> None:
    """The variance of LayerNorm over n - 1."""

    def smaller(layer: Any, x: Any, y: Any) -> Any:
        n = x.shape[-1]
        return layer.bias + (y - layer.bias) * ((n - 1) / n) ** 0.5

    patch.layer("LayerNorm", smaller)


def geglu_halves(patch: Patch) -> None:
    patch.around(patch.backend.products, "geglu", lambda gate, x: gate(patch.backend.join(patch.backend.halves(x), -1)))


def geglu_by_tanh(patch: Patch) -> None:
    ops = patch.backend.ops

    def gated(x: Any) -> Any:
        gate, values = patch.backend.halves(x)
        return values * ops.gelu(gate)

    patch.set(patch.backend.products, "geglu", gated)


def heads_dealt_otherwise(patch: Patch) -> None:
    def dealt(layer: Any, x: Any) -> Any:
        return x.reshape(*x.shape[:2], -1, layer.heads).swapaxes(2, 3)

    patch.set(patch.backend.network("unet").Attention, "split", dealt)


def kept_from_the_front(patch: Patch) -> None:
    """Up blocks join what came first where shapes allow it."""

    def turned(beside: Any, x: Any, kept: Any) -> Any:
        return beside(kept, x) if kept.shape == x.shape else beside(x, patch.backend.lib.roll(kept, 1, 0) * 1.001)

    patch.around(patch.backend.images, "beside", turned)


def no_time(patch: Patch) -> None:
    patch.set(patch.backend.ops, "shift", lambda x, rows: x)


def no_attention(patch: Patch) -> None:
    """A level whose attention does nothing."""
    patch.set(patch.backend.network("unet").SpatialTransformer, patch.backend.calls, lambda layer, x, context: x)


def no_shortcut(patch: Patch) -> None:
    patch.layer("Conv2d", lambda layer, x, y: 0.0 * y if layer.path.endswith("conv_shortcut") else y)


def upsampled_between_pixels(patch: Patch) -> None:
    rows = patch.backend.axes()[1]
    for name in ("upsample", "upsample_like"):
        patch.around(patch.backend.images, name, lambda up, *rest: patch.backend.lib.roll(up(*rest), 1, rows))


def cross_attention_of_itself(patch: Patch) -> None:
    """Keys and values of the text exchanged."""
    owner = patch.backend.network("unet").TransformerBlock
    patch.around(owner, "context", lambda made, block, text: made(block, text)[::-1])


# The text encoders


def quick_gelu_for_gelu(patch: Patch) -> None:
    owner, quick, gelu = patch.backend.network("clip").MLP, patch.backend.ops.quick_gelu, patch.backend.ops.gelu_erf

    def other(call: Any, mlp: Any, x: Any) -> Any:
        return mlp.fc2((gelu if mlp.activation is quick else quick)(mlp.fc1(x)))

    patch.around(owner, patch.backend.calls, other)


def text_without_final_norm(patch: Patch) -> None:
    patch.layer("LayerNorm", lambda layer, x, y: x if layer.path == "final_layer_norm" else y)


def positions_off_by_one(patch: Patch) -> None:
    def moved(entry: Any, made: Any) -> Any:
        return patch.backend.lib.roll(made, 1, 0) if "position_embedding" in entry.name else made

    patch.loaded(moved)


def clip_skip_off_by_one(patch: Patch) -> None:
    def earlier(used: Any, *rest: Any) -> Any:
        skipped, normed = used(*rest)
        return skipped + 1, normed

    patch.around(clip, "used_states", earlier)


def pooled_at_the_wrong_end(patch: Patch) -> None:
    network = patch.backend.network("clip")
    patch.set(network, "eos_position", lambda config, ids: len(ids) - 1)


# The VAE


def no_post_quant_conv(patch: Patch) -> None:
    owner = patch.backend.network("kl_vae").KLVAE
    patch.set(owner, "decode", lambda vae, z, *sides: vae.decoder(z, *sides))


def attention_without_its_input(patch: Patch) -> None:
    owner = patch.backend.network("kl_vae").AttentionBlock
    patch.around(owner, patch.backend.calls, lambda call, layer, x: call(layer, x) - x)


def queries_and_keys_swapped(patch: Patch) -> None:
    patch.around(patch.backend.ops, "single_head_attention", lambda attend, q, k, v: attend(q, v, k))


# The loop: what both backends share


def sines_first(patch: Patch) -> None:
    def exchanged(made: Any, *rest: Any, **more: Any) -> Any:
        features = made(*rest, **more)
        return np.roll(features, features.shape[-1] // 2, axis=-1)

    patch.around(timesteps, "unet_sinusoids", exchanged)


def sizes_exchanged(patch: Patch) -> None:
    """SDXL's width before its height."""

    def wrong(made: Any, expert: Any, request: Any, pooled: Any) -> Any:
        return made(expert, replace(request, width=request.height, height=request.width), pooled)

    patch.around(expert.Expert, "_added", wrong)


def prediction_of_another_kind(patch: Patch) -> None:
    other = {"epsilon": "v_prediction", "v_prediction": "epsilon"}
    patch.around(discrete, "scalings", lambda made, prediction, sigma: made(other[prediction], sigma))


def input_not_scaled(patch: Patch) -> None:
    def unscaled(made: Any, prediction: str, sigma: float) -> Any:
        skip, out, _ = made(prediction, sigma)
        return skip, out, 1.0

    patch.around(discrete, "scalings", unscaled)


def time_off_by_one(patch: Patch) -> None:
    def later(made: Any, *rest: Any, **more: Any) -> Any:
        grid = made(*rest, **more)
        return replace(grid, timesteps=tuple(time - 1 for time in grid.timesteps))

    patch.around(schedules, "build", later)


def betas_linear(patch: Patch) -> None:
    """Of another schedule: each level a little higher."""
    patch.around(
        discrete,
        "_discrete_schedule",
        lambda made, config: replace(made(config), sigmas=tuple(1.02 * sigma for sigma in made(config).sigmas)),
    )


def branches_swapped(patch: Patch) -> None:
    def other_way(made: Any, expert: Any, request: Any, texts: Any) -> Any:
        found = made(expert, request, texts)
        added = None if found.added is None else found.added[::-1].copy()
        return replace(found, texts=found.texts[::-1].copy(), added=added)

    patch.around(expert.Expert, "conditioning", other_way)


def encoders_exchanged(patch: Patch) -> None:
    """The channels of SDXL's two text encoders joined in another order."""

    def moved(made: Any, encoder: Any, *rest: Any) -> Any:
        states, pooled = made(encoder, *rest)
        return np.roll(states, states.shape[2] // 3, axis=2), pooled

    patch.around(ClipTexts, "states", moved)


def guidance_sign(patch: Patch) -> None:
    def other_sign(combined: Any, guidance: Any, engine: Any, request: Any, predictions: Any) -> Any:
        wrong = SimpleNamespace(guidance=-request.guidance, family_options=request.family_options)
        return combined(guidance, engine, wrong, predictions)

    patch.around(Guidance, "combined", other_sign)


def time_plus_one(patch: Patch) -> None:
    def later(made: Any, *rest: Any, **more: Any) -> Any:
        grid = made(*rest, **more)
        return replace(grid, timesteps=tuple(time + 1 for time in grid.timesteps))

    patch.around(schedules, "build", later)


def frequencies_shifted(patch: Patch) -> None:
    """`freq_shift` 1 for 0."""
    patch.around(timesteps, "unet_sinusoids", lambda made, *rest, shift, **more: made(*rest, shift=shift + 1, **more))


def scale_of_another_model(name: str, ratio: float) -> Any:
    def plant(patch: Patch) -> None:
        patch.around(vae, "scaled", lambda made, scale, shift: made(scale * ratio, shift))

    plant.__name__ = name
    return plant


MUTANTS: Sequence[Mutant] = (
    Mutant(group_norm_eps, "GroupNorm's epsilon ten times as large"),
    Mutant(epsilons_of_others, "GroupNorm's epsilons 1e-6 and 1e-5 exchanged"),
    Mutant(half_as_many_groups, "half as many groups"),
    Mutant(unbiased_variance, "LayerNorm's variance over n - 1"),
    Mutant(geglu_halves, "GEGLU's halves exchanged"),
    Mutant(geglu_by_tanh, "GEGLU by the tanh form"),
    Mutant(shared.attention_scale, "attention's scale 1 % too large"),
    Mutant(heads_dealt_otherwise, "channels dealt out to heads in turn"),
    Mutant(kept_from_the_front, "what is kept for the up blocks joined wrongly"),
    Mutant(no_time, "no time in the residual blocks"),
    Mutant(no_attention, "levels without their attention"),
    Mutant(no_shortcut, "no shortcut where the width changes"),
    Mutant(upsampled_between_pixels, "doubled pixels moved by one"),
    Mutant(cross_attention_of_itself, "the text's keys and values exchanged"),
    Mutant(quick_gelu_for_gelu, "quick GELU for GELU and the reverse"),
    Mutant(shared.text_not_causal, "text encoders that see what comes"),
    Mutant(text_without_final_norm, "no final norm of the text"),
    Mutant(positions_off_by_one, "positions of the text off by one"),
    Mutant(no_post_quant_conv, "no post_quant_conv"),
    Mutant(attention_without_its_input, "the VAE's attention without its input"),
    Mutant(queries_and_keys_swapped, "the VAE's keys and values exchanged"),
    Mutant(shared.padded_on_the_other_side, "zeros above and left for below and right"),
    Mutant(shared.kernel_turned, "rows and columns of kernels exchanged"),
    *shared.WEIGHTS_AND_PLACES,
    Mutant(shared.no_place("final_norm"), "the head's float32 place lost under -q 8", shared.PLAIN, "8"),
    Mutant(shared.scales_of_the_next_group, "scales of codes off by one group under -q 8", shared.PLAIN, "8"),
    Mutant(pooled_at_the_wrong_end, "pooled at the last token", picture=True),
    Mutant(clip_skip_off_by_one, "clip skip off by one", picture=True),
    Mutant(encoders_exchanged, "the channels of two text encoders in another order", picture=True),
    Mutant(sines_first, "sines before cosines of the time", picture=True),
    Mutant(sizes_exchanged, "SDXL's width before its height", picture=True),
    Mutant(prediction_of_another_kind, "a prediction of noise taken for one of velocity", picture=True),
    Mutant(input_not_scaled, "latents not scaled before the UNet", picture=True),
    Mutant(time_off_by_one, "times off by one of 1000", picture=True),
    Mutant(betas_linear, "another beta schedule", picture=True),
    Mutant(branches_swapped, "the branches of guidance exchanged", picture=True),
    Mutant(shared.lora_without_alpha, "a LoRA without its alpha", picture=True, lora=True),
    Mutant(shared.vae_scale, "the VAE's scale 10 % off", picture=True),
    Mutant(guidance_sign, "guidance's sign", picture=True),
    Mutant(time_plus_one, "times one of 1000 later", picture=True),
    Mutant(frequencies_shifted, "`freq_shift` 1 for 0", picture=True),
    Mutant(scale_of_another_model("scale_exchanged", 0.18215 / 0.13025), "the latents' scale of SD 1.5", picture=True),
    Mutant(scale_of_another_model("scale_cut", 0.18 / 0.18215), "0.18 for 0.18215 as the latents' scale", picture=True),
    Mutant(scale_of_another_model("scale_5_off", 1.05), "the latents' scale 5 % off", picture=True),
    *shared.PIXELS,
)
