"""Faults in SANA and SANA-Sprint: in the transformer, the text encoder, the texts, the VAE, and the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qwenimg.common.families.sana import model, texts
from qwenimg.common.families.sana.texts import SanaTexts
from qwenimg.common.sampling import flow_solvers
from qwenimg.common.sampling.flow_solvers import DPMFlowConfig
from support import mutants_lumina as lumina
from support import mutants_shared as shared
from support.mutant import Mutant, Patch

# The transformer


def _class(patch: Patch, name: str) -> Any:
    return getattr(patch.backend.network("sana_dit"), name)


def _linear(patch: Patch, change: Callable[..., Any]) -> None:
    patch.around(patch.backend.ops, "linear_attention", change)


def softmax_for_relu(patch: Patch) -> None:
    _linear(patch, lambda attend, q, k, v: patch.backend.ops.attention(q, k, v))


def negative_queries_count(patch: Patch) -> None:
    _linear(patch, lambda attend, q, k, v: attend(abs(q), k, v))


def negative_keys_count(patch: Patch) -> None:
    _linear(patch, lambda attend, q, k, v: attend(q, abs(k), v))


def queries_and_keys_exchanged(patch: Patch) -> None:
    _linear(patch, lambda attend, q, k, v: attend(k, q, v))


def last_pixel_not_attended(patch: Patch) -> None:
    _linear(patch, lambda attend, q, k, v: attend(q, k[:, :-1], v[:, :-1]))


def weights_not_divided(patch: Patch) -> None:
    """The sum of weights 1 % too small."""
    _linear(patch, lambda attend, q, k, v: 1.01 * attend(q, k, v))


def tables_not_added(patch: Patch) -> None:
    patch.around(patch.backend.ops, "add", lambda add, x, update: x if x.ndim == 2 else add(x, update))


def text_not_normed(patch: Patch) -> None:
    shared.norm_left_out(patch, "caption_norm")


def epsilon_of_others(patch: Patch) -> None:
    """Of the stream's norms."""
    patch.set(patch.backend.network("sana_dit"), "NORM_EPS", 1e-2)


def first_token_not_attended(patch: Patch) -> None:
    """Of the text."""
    patch.around(
        _class(patch, "CrossAttention"),
        patch.backend.calls,
        lambda call, own, x, context: call(own, x, tuple(part[:, 1:] for part in context)),
    )


def keys_and_values_exchanged(patch: Patch) -> None:
    patch.exchanged(_class(patch, "CrossAttention"), "context", "to_k", "to_v")


def context_of_the_block_before(patch: Patch) -> None:
    patch.around(
        _class(patch, "SanaTransformer"),
        "context",
        lambda made, own, text: [*made(own, text)[-1:], *made(own, text)[:-1]],
    )


def stream_normed_for_the_text(patch: Patch) -> None:
    owner, ops = _class(patch, "CrossAttention"), patch.backend.ops
    patch.around(owner, patch.backend.calls, lambda call, own, x, context: call(own, ops.unit_norm(x, 1e-6), context))


def values_for_the_gate(patch: Patch) -> None:
    patch.around(patch.backend.ops, "swiglu", lambda glu, gate, values: glu(values, gate))


def neighbours_not_seen(patch: Patch) -> None:
    """By the depthwise kernels, which keep their middle."""

    def middle(entry: Any, made: Any) -> Any:
        if not entry.name.endswith("conv_depth.weight"):
            return made
        kept = 0 * made
        if patch.backend.torch:
            kept[:, :, 1, 1] = made[:, :, 1, 1]
        else:
            kept[:, 1, 1] = made[:, 1, 1]
        return kept

    patch.loaded(middle)


# The texts


def _left_out(patch: Patch, change: Callable[[int], int]) -> None:
    patch.around(SanaTexts, "left_out", lambda left, own, prompt: change(left(own, prompt)))


def whole_instruction_seen(patch: Patch) -> None:
    _left_out(patch, lambda count: 0)


def one_state_more(patch: Patch) -> None:
    """The last but one of the instruction's."""
    _left_out(patch, lambda count: max(0, count - 1))


def first_state_left_out(patch: Patch) -> None:
    patch.around(
        SanaTexts,
        "_selected",
        lambda made, own, encoder, prompt: tuple(one[:, one.shape[1] > 1 :] for one in made(own, encoder, prompt)),
    )


def no_instruction(patch: Patch) -> None:
    patch.set(model, "instructed", lambda prompt: texts.plain(prompt))


def instruction_before_the_negative_prompt(patch: Patch) -> None:
    patch.set(model, "plain", lambda prompt: texts.instructed(prompt))


def capitals_kept(patch: Patch) -> None:
    patch.set(texts, "plain", lambda prompt: prompt.upper())


# Times and levels


def time_off(patch: Patch) -> None:
    patch.around(model, "time_rows", lambda made, config, time, guidance: made(config, 0.995 * time, guidance))


def times_of_0_to_1(patch: Patch) -> None:
    patch.around(model, "time_rows", lambda made, config, time, guidance: made(config, time / 1000, guidance))


def times_not_rounded_down(patch: Patch) -> None:
    patch.set(DPMFlowConfig, "timestep", lambda config, sigma: 1000.0 * sigma)


def levels_of_other_flow_models(patch: Patch) -> None:
    patch.set(flow_solvers, "levels", lambda config: flow_solvers.USUAL)


# The VAE


def bias_of_norms_left_out(patch: Patch) -> None:
    def without(layer: Any, x: Any, y: Any) -> Any:
        return y - (layer.bias[:, None, None] if patch.backend.torch else layer.bias)

    patch.layer("PixelNorm", without)


def gain_of_norms_left_out(patch: Patch) -> None:
    def without(layer: Any, x: Any, y: Any) -> Any:
        weight, bias = (one[:, None, None] if patch.backend.torch else one for one in (layer.weight, layer.bias))
        return (y - bias) / weight + bias

    patch.layer("PixelNorm", without)


def no_shortcut_up(patch: Patch) -> None:
    patch.around(patch.backend.ops, "spread_channels", lambda made, x, channels: 0 * made(x, channels))


def channels_repeated_in_turn(patch: Patch) -> None:
    """(a, b, a, b) for (a, a, b, b)."""
    channels = patch.backend.axes()[0]
    patch.set(patch.backend.ops, "repeated_channels", lambda x, count: patch.backend.join([x] * count, channels))


def no_relu_at_the_end(patch: Patch) -> None:
    patch.set(patch.backend.ops, "relu", lambda x: x)


def queries_keys_and_values_apart(patch: Patch) -> None:
    """A head's from q, k and v each, for neighbours of all three together."""
    owner = patch.backend.network("dc_vae").Attention

    def changed(call: Any, own: Any, x: Any) -> Any:
        linear = patch.backend.ops.linear_attention

        def apart(q: Any, k: Any, v: Any) -> Any:
            whole = patch.backend.join([q, k, v], -1)
            B, L, H, D = whole.shape
            q, k, v = (whole.reshape(B, L, -1)[..., i * H * D // 3 : (i + 1) * H * D // 3] for i in range(3))
            return linear(*(one.reshape(B, L, H, D // 3) for one in (q, k, v)))

        patch.backend.ops.linear_attention = apart
        try:
            return call(own, x)
        finally:
            patch.backend.ops.linear_attention = linear

    patch.around(owner, patch.backend.calls, changed)


def _in_float32(mutant: Mutant) -> Mutant:
    return replace(mutant, refused=("bf16", "fp16"))


TRANSFORMER = (
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(shared.scales_first, "scales before shifts"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(tables_not_added, "the tables of blocks and head not added"),
    Mutant(shared.silu_left_out, "no SiLU"),
    Mutant(shared.gelu_erf, "GELU's definition for its tanh form"),
    Mutant(shared.sines_first("sana_dit", "TimestepEmbedder"), "sines before cosines of the time"),
    Mutant(softmax_for_relu, "softmax for ReLU kernels"),
    Mutant(negative_queries_count, "negative queries counted"),
    Mutant(negative_keys_count, "negative keys counted"),
    Mutant(queries_and_keys_exchanged, "queries and keys to the image exchanged"),
    Mutant(last_pixel_not_attended, "the last token of the image not attended"),
    Mutant(weights_not_divided, "the sum of weights 1 % off"),
    Mutant(shared.attention_scale, "the scale of attention to the text 1 % too large"),
    Mutant(shared.no_qk_norm, "no norm of queries and keys"),
    Mutant(epsilon_of_others, "an epsilon of 0.01 in the norms of the stream"),
    Mutant(first_token_not_attended, "the first text token not attended"),
    Mutant(keys_and_values_exchanged, "keys and values of the text exchanged"),
    Mutant(context_of_the_block_before, "keys and values of the block before", picture=True),
    Mutant(stream_normed_for_the_text, "a norm before the attention to the text"),
    Mutant(values_for_the_gate, "values and gate of the feed-forward exchanged"),
    Mutant(neighbours_not_seen, "depthwise kernels that see no neighbours"),
    Mutant(shared.kernel_turned, "rows and columns of kernels exchanged"),
)
_OTHERS = (
    Mutant(lumina.text_not_causal, "a Gemma 2 that sees what comes"),
    Mutant(lumina.scores_without_a_bound, "Gemma 2's scores without their bound"),
    Mutant(lumina.windows_of_all_tokens, "Gemma 2 without windows"),
    Mutant(lumina.embeddings_not_scaled, "Gemma 2's embeddings not scaled"),
    Mutant(text_not_normed, "no norm of the text", picture=True),
    Mutant(bias_of_norms_left_out, "no bias of the VAE's norms"),
    Mutant(gain_of_norms_left_out, "no gain of the VAE's norms"),
    Mutant(no_shortcut_up, "no shortcuts where the VAE doubles sides"),
    Mutant(channels_repeated_in_turn, "latents repeated in turn"),
    Mutant(no_relu_at_the_end, "no ReLU at the end of the VAE"),
    Mutant(queries_keys_and_values_apart, "heads of the VAE from q, k and v apart"),
    Mutant(shared.velocity_sign("sana_dit"), "the velocity's sign", picture=True),
    Mutant(whole_instruction_seen, "the whole instruction seen", picture=True),
    Mutant(one_state_more, "one state of the instruction more", picture=True),
    Mutant(first_state_left_out, "the first state left out", picture=True),
    Mutant(no_instruction, "no instruction before the prompt", picture=True),
    Mutant(instruction_before_the_negative_prompt, "the instruction before the negative prompt too", picture=True),
    Mutant(capitals_kept, "capitals for the prompt's lower case", picture=True),
    Mutant(time_off, "times 0.5 % off", picture=True),
    Mutant(times_of_0_to_1, "times of 0 to 1", picture=True),
    Mutant(times_not_rounded_down, "times not rounded down", picture=True),
    Mutant(levels_of_other_flow_models, "noise levels of other flow models", picture=True),
    Mutant(shared.cfg_branches_swapped(model), "the branches of guidance exchanged", picture=True),
    Mutant(shared.cfg_from_the_prompt(model), "guidance from the prompt's prediction", picture=True),
    *shared.NOISE_LEVELS,
    Mutant(shared.latents_scale_1_off, "the latents' scale 1 % off", picture=True),
    *shared.DECODING,
)
# Those of the transformer are looked for in 16 bit too
MUTANTS = (*TRANSFORMER, *shared.ARITHMETIC, *map(_in_float32, _OTHERS))


# SANA-Sprint


def _times(patch: Patch, change: Callable[..., Any]) -> None:
    patch.around(model, "time_rows", lambda made, config, time, guidance: made(config, *change(time, guidance)))


def guidance_as_given(patch: Patch) -> None:
    """Not scaled to the tenth that the model was trained with."""
    _times(patch, lambda time, guidance: (time, 10 * guidance))


def guidance_of_another_number(patch: Patch) -> None:
    _times(patch, lambda time, guidance: (time, 1.05 * guidance))


def times_of_0_to_1000(patch: Patch) -> None:
    _times(patch, lambda time, guidance: (1000 * time, guidance))


def time_and_guidance_exchanged(patch: Patch) -> None:
    patch.around(model, "time_rows", lambda made, *given: made(*given)[::-1].copy())


def guidance_not_added(patch: Patch) -> None:
    patch.around(
        _class(patch, "GuidedTimeEmbed"),
        patch.backend.calls,
        lambda call, own, features: _alone(patch, own, features),
    )


def _alone(patch: Patch, own: Any, features: Any) -> Any:
    temb = own.timestep_embedder(features[:1])
    return temb, own.linear(patch.backend.ops.silu(temb))


def times_even(patch: Patch) -> None:
    """Half of pi/2 for 1.3 in the second of two steps."""
    patch.set(flow_solvers, "_MIDDLE", 0.7854)


# Of the transformer that both have; SANA's own are looked for in 16 bit too. Sprint makes its time elsewhere.
_SHARED = [_in_float32(one) for one in TRANSFORMER[:17] if one.name != "sines_first"]
SPRINT = (
    Mutant(guidance_as_given, "guidance not scaled", picture=True),
    Mutant(guidance_of_another_number, "guidance 5 % off", picture=True),
    Mutant(times_of_0_to_1000, "times of 0 to 1000", picture=True),
    Mutant(time_and_guidance_exchanged, "time and guidance exchanged", picture=True),
    Mutant(guidance_not_added, "guidance not added"),
    Mutant(times_even, "the second time half of the first", picture=True),
    Mutant(shared.velocity_sign("sana_dit"), "the velocity's sign", picture=True),
    *shared.NOISE_LEVELS,
    *_SHARED,
)
