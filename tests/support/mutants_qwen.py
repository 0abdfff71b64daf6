"""Faults in Qwen-Image: in its transformer, its text encoder, its VAE, their weights, and the loop around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qwenimg.common.families.qwen_image import variants
from qwenimg.common.networks.denoisers import qwen_conditioning
from qwenimg.common.numbers import rope
from qwenimg.common.sampling.flow_match import FlowMatchConfig
from support import mutants_shared as shared
from support.mutant import Mutant, Patch, Plant

QKV = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")

# The transformer


def layer_norm_eps(patch: Patch) -> None:
    patch.set(patch.backend.network("qwen_dit"), "NORM_EPS", 1e-5)


def no_qkv_bias(patch: Patch) -> None:
    patch.layer("Linear", lambda layer, x, y: y - layer.bias if layer.path.endswith(QKV) else y)


# The VAE


def no_post_quant_conv(patch: Patch) -> None:
    owner = patch.backend.network("qwen_vae").QwenVAE
    patch.set(owner, "decode", lambda model, z, *sides: model.decoder(z, *sides))


def upsampled_between_pixels(patch: Patch) -> None:
    rows = patch.backend.axes()[1]
    patch.around(patch.backend.images, "upsample", lambda up, x: patch.backend.lib.roll(up(x), 1, rows))


# The loop: what both backends share


def time_as_sigma(patch: Patch) -> None:
    patch.around(FlowMatchConfig, "timestep", lambda made, config, sigma: made(config, sigma) * 0.999)


def with_template(patch: Patch, name: str, **changes: Any) -> None:
    """Change the template of the variant of that name."""
    variant = variants.VARIANTS[name]
    changed = replace(variant, template=replace(variant.template, **changes))
    patch.set(variants, "VARIANTS", variants.VARIANTS | {name: changed})


def template_one_token_off(name: str) -> Plant:
    def template_one_token_off(patch: Patch) -> None:
        with_template(patch, name, dropped=variants.VARIANTS[name].template.dropped + 1)

    return template_one_token_off


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


def guidance_sign(patch: Patch) -> None:
    patch.around(patch.backend.ops, "guide", lambda guide, c, u, scale: guide(c, u, -scale))


def text_rope_one_later(patch: Patch) -> None:
    patch.around(rope, "text_positions", lambda made, *rest: made(*rest) + 1)


def no_txt_norm(patch: Patch) -> None:
    shared.norm_left_out(patch, "txt_norm")


def time_plus_one(patch: Patch) -> None:
    patch.around(FlowMatchConfig, "timestep", lambda made, config, sigma: made(config, sigma) + 1)


def template_without_last_newline(patch: Patch) -> None:
    with_template(patch, "text", text=variants.DRAWS.text[:-1])


MUTANTS = (
    Mutant(layer_norm_eps, "LayerNorm's epsilon 1e-5 for 1e-6"),
    Mutant(shared.gelu_erf, "GELU by the error function for its tanh form"),
    Mutant(shared.attention_scale, "attention's scale 1 % too large"),
    Mutant(no_qkv_bias, "no bias of queries, keys and values"),
    Mutant(shared.no_qk_norm, "no norm of queries and keys"),
    Mutant(shared.no_rope, "no RoPE"),
    Mutant(shared.rope_of_halves, "RoPE on halves for pairs"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(shared.of_modulation("head_scale_and_shift_swapped", (1, 0)), "scale and shift of the head exchanged"),
    Mutant(shared.causal, "causal attention in the transformer"),
    Mutant(shared.sines_first("qwen_dit", "TimestepEmbedding"), "sines before cosines of the time"),
    Mutant(shared.text_not_causal, "a text encoder that sees what comes"),
    Mutant(shared.text_rope_of_pairs, "the text's RoPE on pairs for halves"),
    Mutant(shared.keys_not_shared, "shared heads of keys dealt out in another order"),
    Mutant(shared.kernel_turned, "rows and columns of kernels exchanged"),
    Mutant(shared.norm_without_root, "the VAE's norm without the root of the channels"),
    Mutant(shared.queries_and_keys_swapped, "the VAE's queries, keys and values in another order"),
    Mutant(shared.padded_on_the_other_side, "zeros above and left for below and right"),
    Mutant(no_post_quant_conv, "no post_quant_conv"),
    Mutant(upsampled_between_pixels, "doubled pixels moved by one"),
    *shared.ARITHMETIC,
    Mutant(shared.no_place("final_norm"), "the head's float32 place lost under -q 4", shared.PLAIN, "4"),
    Mutant(shared.no_place("modulation"), "the modulation's float32 place lost under -q 4", shared.PLAIN, "4"),
    Mutant(shared.scales_of_the_next_group, "scales of codes off by one group under -q 4", shared.PLAIN, "4"),
    Mutant(shared.input_not_rotated, "inputs of layers in 4 bits not rotated", shared.PLAIN, "4"),
    Mutant(shared.packing_order, "latents packed in another order", picture=True),
    *shared.NOISE_LEVELS,
    Mutant(time_as_sigma, "times of the noise levels 0.1 % off", picture=True),
    Mutant(template_one_token_off("text"), "the template cut one token off", picture=True),
    Mutant(rows_and_columns_swapped, "RoPE's rows and columns exchanged", picture=True),
    Mutant(stale_rope, "RoPE tables of another size", picture=True),
    Mutant(wrong_text_mask, "the mask of the other prompt", picture=True),
    Mutant(guidance_without_norm, "guidance without the norm", picture=True),
    Mutant(branches_swapped, "the branches of guidance exchanged", picture=True),
    Mutant(shared.lora_without_alpha, "a LoRA without its alpha", picture=True, lora=True),
    Mutant(shared.vae_scale, "the VAE's scale 10 % off", picture=True),
    Mutant(guidance_sign, "guidance's sign", picture=True),
    Mutant(text_rope_one_later, "the text's RoPE one position later", picture=True),
    Mutant(no_txt_norm, "no norm of the text states", picture=True),
    Mutant(time_plus_one, "times one of 1000 later", picture=True),
    Mutant(template_without_last_newline, "the template without its last newline", picture=True),
    Mutant(shared.no_latents_mean, "the latents' mean not added", picture=True),
    Mutant(shared.latents_std_off(0.003), "the latents' deviation 0.3 % off", picture=True),
    Mutant(shared.latents_std_off(0.01), "the latents' deviation 1 % off", picture=True),
    *shared.PIXELS,
)


def prepare(pipe: Any) -> None:
    """Both branches of guidance in one batch, so that prompts are padded and masked."""
    pipe.model.batch_guidance = True
