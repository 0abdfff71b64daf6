"""Faults in Anima: in its transformer, its text conditioner, its text encoder, its VAE, and the loop around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.families.anima import model
from qwenimg.common.families.anima.model import Anima
from qwenimg.common.families.anima.texts import AnimaTexts
from qwenimg.common.networks.denoisers import anima_conditioning
from support import mutants_flux2 as flux2
from support import mutants_qwen as qwen
from support import mutants_shared as shared
from support.mutant import Judge, Mutant, Patch

# The transformer


def _class(patch: Patch, name: str, network: str = "anima_dit") -> Any:
    return getattr(patch.backend.network(network), name)


def part_of_all_blocks_not_added(patch: Patch) -> None:
    patch.around(patch.backend.ops, "add", lambda add, x, update: x if x.ndim == 2 else add(x, update))


def _normed(patch: Patch, end: str) -> None:
    """Leaves out the norms whose path has this end."""
    patch.layer("RMSNorm", lambda layer, x, y: patch.backend.like(x, y) if layer.path.endswith(end) else y)


def time_not_normed(patch: Patch) -> None:
    _normed(patch, "time_embed.norm")


def gelu_by_tanh(patch: Patch) -> None:
    patch.set(patch.backend.ops, "gelu_erf", patch.backend.ops.gelu)


def queries_not_normed(patch: Patch) -> None:
    _normed(patch, ".norm_q")


def keys_not_normed(patch: Patch) -> None:
    _normed(patch, ".norm_k")


def epsilon_of_others(patch: Patch) -> None:
    """Of the stream's norms."""
    patch.set(patch.backend.network("anima_dit"), "NORM_EPS", 1e-2)


def no_rope(patch: Patch) -> None:
    patch.set(patch.backend.ops, "rotate_halves", lambda x, *table: x)


def causal(patch: Patch) -> None:
    def changed(attend: Any, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> Any:
        return attend(q, k, v, causal=True) if q.shape[1] == k.shape[1] else attend(q, k, v, *rest, **more)

    patch.attention(changed)


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
        _class(patch, "AnimaTransformer"),
        "context",
        lambda made, own, text: [*made(own, text)[-1:], *made(own, text)[:-1]],
    )


def modulations_of_attentions_exchanged(patch: Patch) -> None:
    patch.exchanged(_class(patch, "TransformerBlock"), patch.backend.calls, "norm1", "norm2")


def modulation_of_the_feed_forward_for_text(patch: Patch) -> None:
    patch.exchanged(_class(patch, "TransformerBlock"), patch.backend.calls, "norm2", "norm3")


def patches_out_as_in(patch: Patch) -> None:
    """(c, dy, dx) for (dy, dx, c)."""

    def turned(call: Any, own: Any, *given: Any) -> Any:
        made = call(own, *given)
        return made.reshape(*made.shape[:2], -1, 4).swapaxes(2, 3).reshape(*made.shape)

    patch.around(_class(patch, "AnimaTransformer"), patch.backend.calls, turned)


def padding_marked(patch: Patch) -> None:
    """Ones in the channel of padding, by the sum of its columns."""

    def marked(call: Any, own: Any, latents: Any) -> Any:
        columns = own.proj.weight[:, latents.shape[-1] :]
        return call(own, latents) + patch.backend.cast(columns, "float32").sum(-1)

    patch.around(_class(patch, "PatchEmbed"), patch.backend.calls, marked)


# The text conditioner


def _attention(patch: Patch, change: Callable[..., Any]) -> None:
    patch.around(_class(patch, "Attention", "anima_conditioner"), patch.backend.calls, change)


def states_not_read(patch: Patch) -> None:
    _attention(patch, lambda call, own, x, seen, *ropes: call(own, x, seen, *ropes) if seen is x else 0 * x)


def own_tokens_not_read(patch: Patch) -> None:
    _attention(patch, lambda call, own, x, seen, *ropes: 0 * x if seen is x else call(own, x, seen, *ropes))


def states_one_later(patch: Patch) -> None:
    """In RoPE."""

    def later(call: Any, own: Any, x: Any, seen: Any, rope: Any, other: Any) -> Any:
        moved = other if seen is x else tuple(patch.backend.lib.roll(part, 1, 0) for part in other)
        return call(own, x, seen, rope, moved)

    _attention(patch, later)


def norms_of_the_conditioner_exchanged(patch: Patch) -> None:
    owner = _class(patch, "ConditionerBlock", "anima_conditioner")
    patch.exchanged(owner, patch.backend.calls, "norm_self_attn", "norm_mlp")


def text_not_normed_at_the_end(patch: Patch) -> None:
    _normed(patch, "llm_adapter.norm")


def no_bias_behind_the_conditioner(patch: Patch) -> None:
    patch.layer("Linear", lambda layer, x, y: y - layer.bias if layer.path.endswith("llm_adapter.out_proj") else y)


def text_not_filled_up(patch: Patch) -> None:
    owner = _class(patch, "Runner", "anima_conditioner")
    patch.around(owner, "encode", lambda encode, own, ids, states: encode(own, ids, states)[:, : len(ids)])


def zeros_counted_as_words(patch: Patch) -> None:
    """The last token of the text for the zeros behind it."""
    lib = patch.backend.lib

    def filled(encode: Any, own: Any, ids: Any, states: Any) -> Any:
        text = encode(own, ids, states)
        rows = [text[:, : len(ids)], *[text[:, len(ids) - 1 : len(ids)]] * (text.shape[1] - len(ids))]
        return lib.cat(rows, 1) if patch.backend.torch else lib.concatenate(rows, 1)

    patch.around(_class(patch, "Runner", "anima_conditioner"), "encode", filled)


# The text encoder and its tokens


def states_before_the_final_norm(patch: Patch) -> None:
    shared.norm_left_out(patch, "norm")


def _tokens(patch: Patch, change: Callable[[Any], Any]) -> None:
    patch.around(AnimaTexts, "fill", lambda fill, texts, prompt: change(fill(texts, prompt)))


def no_end_of_the_text(patch: Patch) -> None:
    _tokens(patch, lambda tokens: tokens._replace(queries=tokens.queries[:-1] or tokens.queries))


def last_word_not_encoded(patch: Patch) -> None:
    _tokens(patch, lambda tokens: tokens._replace(words=tokens.words[:-1]))


# Positions, times and guidance


def rows_and_columns_swapped(patch: Patch) -> None:
    patch.around(anima_conditioning, "table", lambda made, config, grid: made(config, grid[::-1]))


def rope_scale_of_others(patch: Patch) -> None:
    patch.around(
        anima_conditioning, "table", lambda made, config, grid: made(replace(config, rope_scale=(1.0, 1.0, 1.0)), grid)
    )


def times_1000(patch: Patch) -> None:
    """As other models have them."""
    patch.around(anima_conditioning, "sinusoids", lambda made, time, channels: made(1000 * time, channels))


def time_off(patch: Patch) -> None:
    patch.around(model, "time_row", lambda made, config, time, dtype: made(config, 0.999 * time, dtype))


MUTANTS = (
    Mutant(shared.of_modulation("scales_before_shifts", (1, 0, 2)), "scales before shifts"),
    Mutant(shared.of_modulation("gates_for_scales", (0, 2, 1)), "gates and scales exchanged"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(part_of_all_blocks_not_added, "what all modulations share not added"),
    Mutant(shared.silu_left_out, "no SiLU of the time"),
    Mutant(time_not_normed, "no norm of the time"),
    Mutant(shared.sines_first("anima_dit", "TimeEmbed"), "sines before cosines of the time"),
    Mutant(gelu_by_tanh, "GELU's tanh form for its definition"),
    Mutant(queries_not_normed, "no norm of queries"),
    Mutant(keys_not_normed, "no norm of keys"),
    Mutant(epsilon_of_others, "an epsilon of 0.01 in the norms of the stream"),
    Mutant(shared.attention_scale, "attention's scale 1 % too large"),
    Mutant(no_rope, "no RoPE"),
    Mutant(shared.text_rope_of_pairs, "RoPE on pairs for halves"),
    Mutant(causal, "causal attention to the image"),
    Mutant(first_token_not_attended, "the first text token not attended"),
    Mutant(keys_and_values_exchanged, "keys and values of the text exchanged"),
    Mutant(context_of_the_block_before, "keys and values of the block before", picture=True),
    Mutant(modulations_of_attentions_exchanged, "the modulations of both attentions exchanged"),
    Mutant(modulation_of_the_feed_forward_for_text, "the modulations of text and feed-forward exchanged"),
    Mutant(patches_out_as_in, "patches out in the order of patches in"),
    Mutant(padding_marked, "the whole image marked as padding"),
    Mutant(states_not_read, "a conditioner that does not read the states"),
    Mutant(own_tokens_not_read, "a conditioner whose tokens do not see each other"),
    Mutant(states_one_later, "the states one position later"),
    Mutant(norms_of_the_conditioner_exchanged, "two norms of the conditioner exchanged"),
    Mutant(text_not_normed_at_the_end, "no norm of the text"),
    Mutant(no_bias_behind_the_conditioner, "no bias behind the conditioner"),
    Mutant(text_not_filled_up, "a text that is not filled up with zeros", picture=True),
    Mutant(zeros_counted_as_words, "the last token for the zeros behind it", picture=True),
    Mutant(states_before_the_final_norm, "states before Qwen3's final norm"),
    Mutant(shared.text_not_causal, "a Qwen3 that sees what comes"),
    Mutant(flux2.text_not_normed, "no norm of Qwen3's queries and keys"),
    Mutant(shared.keys_not_shared, "shared heads of keys dealt out in another order"),
    Mutant(shared.kernel_turned, "rows and columns of kernels exchanged"),
    Mutant(shared.norm_without_root, "the VAE's norm without the root of the channels"),
    Mutant(qwen.no_post_quant_conv, "no post_quant_conv"),
    *shared.ARITHMETIC,
    Mutant(shared.velocity_sign("anima_dit"), "the velocity's sign", picture=True),
    Mutant(time_off, "times 0.1 % off", picture=True),
    Mutant(times_1000, "times of 0 to 1000", picture=True),
    Mutant(no_end_of_the_text, "no end token of T5's", picture=True),
    Mutant(last_word_not_encoded, "the last token not encoded", picture=True),
    Mutant(shared.packing_order, "latents packed in another order", picture=True),
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True),
    Mutant(rope_scale_of_others, "RoPE without its scales", picture=True, refused=("bf16", "fp16")),
    Mutant(shared.branches_swapped(Anima), "the branches of guidance exchanged", picture=True),
    Mutant(shared.from_the_prompt(Anima), "guidance from the prompt's prediction", picture=True),
    Mutant(shared.no_latents_mean, "the latents' mean not added", picture=True),
    Mutant(shared.latents_std_off(0.01), "the latents' deviation 1 % off", picture=True),
    *shared.NOISE_LEVELS,
    *shared.DECODING,
)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["anima"])
