"""Faults in Hunyuan-DiT 1.1, which has all that 1.2 has: in its transformer, its text encoders, its texts, and the loop
around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.families.hunyuan import model
from qwenimg.common.families.hunyuan.model import Hunyuan
from qwenimg.common.families.hunyuan.texts import BertTexts, HunyuanTexts, WordT5Texts
from qwenimg.common.networks.denoisers import hunyuan_conditioning
from qwenimg.common.networks.denoisers.hunyuan_dit import HunyuanConfig
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from support import mutants_flux as flux
from support import mutants_sd as sd
from support import mutants_shared as shared
from support.mutant import Judge, Mutant, Patch

# The transformer


def _class(patch: Patch, name: str, network: str = "hunyuan_dit") -> Any:
    return getattr(patch.backend.network(network), name)


def _around(patch: Patch, name: str, change: Callable[..., Any], network: str = "hunyuan_dit") -> None:
    """Makes the call of a class of the network go through change(the call, the layer, its arguments)."""
    patch.around(_class(patch, name, network), patch.backend.calls, change)


def _rolled(patch: Patch, start: str, by: int) -> None:
    """Rolls the rows of the tensors whose names have that."""
    patch.loaded(lambda entry, made: patch.backend.lib.roll(made, by, 0) if start in entry.name else made)


def skips_from_the_front(patch: Patch) -> None:
    """The first block's for the last's, in the blocks that take one."""

    def other(call: Any, own: Any, x: Any, mod: Any, text: Any, rope: Any, *skip: Any) -> Any:
        return call(own, x, mod, text, rope, *(0.5 * x + 0.5 * one for one in skip))

    _around(patch, "HunyuanBlock", other)


def skip_before_the_stream(patch: Patch) -> None:
    """As the halves of what is joined."""

    def turned(layer: Any, x: Any) -> Any:
        return patch.backend.join(patch.backend.halves(x), -1) if layer.path.endswith("skip_norm") else x

    patch.entering("LayerNorm", turned)


def no_skip_norm(patch: Patch) -> None:
    patch.layer("LayerNorm", lambda layer, x, y: patch.backend.like(x, y) if layer.path.endswith("skip_norm") else y)


def skip_added_to_the_stream(patch: Patch) -> None:
    """What is made of both joined as an update."""

    def added(call: Any, own: Any, x: Any, mod: Any, text: Any, rope: Any, *skip: Any) -> Any:
        return call(own, x, mod, text, rope, *skip) + (0.1 * x if skip else 0.0)

    _around(patch, "HunyuanBlock", added)


def shift_without_silu(patch: Patch) -> None:
    def linear(call: Any, own: Any, x: Any, mod: Any) -> Any:
        return call(own, x, 0.5 * mod)

    _around(patch, "ShiftedNorm", linear)


def no_shift(patch: Patch) -> None:
    _around(patch, "ShiftedNorm", lambda call, own, x, mod: call(own, x, 0.0 * mod) - own.linear(0.0 * mod)[:, None])


def second_and_third_norm_exchanged(patch: Patch) -> None:
    """As the authors number them."""
    patch.exchanged(_class(patch, "HunyuanBlock"), patch.backend.calls, "norm2", "norm3")


def norms_without_biases(patch: Patch) -> None:
    patch.layer("LayerNorm", lambda layer, x, y: y - layer.bias if ".norm_" in layer.path else y)


def no_layer_norm_of_queries(patch: Patch) -> None:
    patch.layer("LayerNorm", lambda layer, x, y: patch.backend.like(x, y) if ".norm_" in layer.path else y)


def keys_of_the_text_rotated(patch: Patch) -> None:
    def changed(call: Any, own: Any, x: Any, rope: Any, text: Any = None) -> Any:
        if text is None:
            return call(own, x, rope)
        one = patch.backend.join((rope,) * (text.shape[1] // rope.shape[0] + 1), 0)[: text.shape[1]]
        own_k = own.norm_k
        own.norm_k = lambda k: own.rotated(own_k(k), one, k.dtype)
        try:
            return call(own, x, rope, text)
        finally:
            own.norm_k = own_k

    _around(patch, "Attention", changed)


def queries_to_the_text_not_rotated(patch: Patch) -> None:
    def changed(call: Any, own: Any, x: Any, rope: Any, text: Any = None) -> Any:
        if text is None:
            return call(own, x, rope)
        cos, sin = rope[..., :1] * 0 + 1, rope[..., :1] * 0
        return call(own, x, patch.backend.join((cos, sin), -1), text)

    _around(patch, "Attention", changed)


def text_not_seen(patch: Patch) -> None:
    def changed(call: Any, own: Any, x: Any, rope: Any, text: Any = None) -> Any:
        return call(own, x, rope) if text is None else 0.0 * call(own, x, rope, text)

    _around(patch, "Attention", changed)


def last_text_token_not_attended(patch: Patch) -> None:
    def changed(call: Any, own: Any, x: Any, rope: Any, text: Any = None) -> Any:
        return call(own, x, rope) if text is None else call(own, x, rope, text[:, :-1])

    _around(patch, "Attention", changed)


def keys_and_values_exchanged(patch: Patch) -> None:
    patch.exchanged(_class(patch, "Attention"), patch.backend.calls, "to_k", "to_v")


def projections_without_silu(patch: Patch) -> None:
    """Of T5's states, and of what is added to the time."""
    patch.set(_class(patch, "Projection"), patch.backend.calls, lambda own, x: own.linear_2(own.linear_1(x)))


def patches_in_channels_first(patch: Patch) -> None:
    """(c, dy, dx) for (dy, dx, c) on the way out."""

    def turned(join: Any, x: Any, like: Any, side: int) -> Any:
        return join(x.reshape(*x.shape[:2], -1, side**2).swapaxes(2, 3).reshape(*x.shape), like, side)

    patch.around(patch.backend.images, "joined_patches", turned)


def variance_for_v(patch: Patch) -> None:
    """The other half of the channels."""
    patch.loaded(
        lambda entry, made: patch.backend.lib.roll(made, -4, 0) if entry.name.startswith("proj_out.") else made
    )


# Texts and sizes in the modulation


def mean_not_first(patch: Patch) -> None:
    """The pool attends from its first token of the text."""
    _around(patch, "AttentionPool", lambda call, own, text: call(own, patch.backend.lib.roll(text, 1, 1) * 1.01))


def pool_without_positions(patch: Patch) -> None:
    patch.loaded(lambda entry, made: 0.0 * made if "positional_embedding" in entry.name else made)


def pool_positions_one_later(patch: Patch) -> None:
    _rolled(patch, "positional_embedding", 1)


def pool_not_projected(patch: Patch) -> None:
    """The queries of the pool by the layer of keys."""
    patch.exchanged(_class(patch, "AttentionPool"), patch.backend.calls, "q_proj", "k_proj")


def style_before_the_sizes(patch: Patch) -> None:
    def turned(extra: Any, own: Any, text: Any, sizes: Any) -> Any:
        return own.extra_embedder(patch.backend.join((own.pooler(text), own.style_embedder.weight, sizes), 1))

    patch.around(_class(patch, "Embeddings"), "extra", turned)


def style_not_added(patch: Patch) -> None:
    patch.loaded(lambda entry, made: 0.0 * made if "style_embedder" in entry.name else made)


def _sizes(patch: Patch, change: Callable[[Any, int, int], Any]) -> None:
    patch.around(model, "size_row", change)


def width_before_height(patch: Patch) -> None:
    _sizes(patch, lambda made, height, width: made(width, height))


def sizes_in_latents(patch: Patch) -> None:
    _sizes(patch, lambda made, height, width: made(height // 8, width // 8))


def original_of_the_picture(patch: Patch) -> None:
    """The size of the picture for that of its original."""

    def changed(made: Any, height: int, width: int) -> Any:
        row = made(height, width)
        return np.concatenate((row[:, 512:1024], row[:, 512:]), axis=1)

    _sizes(patch, changed)


def sizes_not_read(patch: Patch) -> None:
    _sizes(patch, lambda made, height, width: 0.0 * made(height, width))


# Places and times


def _places(patch: Patch, change: Callable[[Any, tuple[int, int]], Any]) -> None:
    patch.around(hunyuan_conditioning, "places", change)


def places_of_the_reference(patch: Patch) -> None:
    """Ends of diffusers: of a side that begins at 3 for one that begins at 0."""

    def changed(made: Any, length: int, count: int) -> Any:
        side = made(length, count)
        return side[0] + np.arange(count) * (side[-1] - side[0] / count - side[0]) / max(1, count - 1)

    patch.around(hunyuan_conditioning, "_side", changed)


def not_in_the_middle(patch: Patch) -> None:
    patch.around(
        hunyuan_conditioning, "_side", lambda made, length, count: made(length, count) - made(length, count)[0]
    )


def places_in_tokens(patch: Patch) -> None:
    _places(patch, lambda made, grid: tuple(np.arange(count, dtype=np.float64) for count in grid))


def shorter_side_stretched(patch: Patch) -> None:
    """To the square's."""
    patch.around(hunyuan_conditioning, "_side", lambda made, length, count: made(32, count))


def rows_before_columns(patch: Patch) -> None:
    def turned(made: Any, config: HunyuanConfig, grid: tuple[int, int]) -> Any:
        return tuple(np.roll(table, config.attention_head_dim // 4, axis=-1) for table in made(config, grid))

    patch.around(hunyuan_conditioning, "rope", turned)


def time_off(patch: Patch) -> None:
    patch.around(model, "time_row", lambda made, time: made(0.999 * time))


def times_0_to_1(patch: Patch) -> None:
    patch.around(model, "time_row", lambda made, time: made(time / 1000))


# The text encoders


def bert_without_the_first_of_a_pair(patch: Patch) -> None:
    """The second row for the first."""
    _rolled(patch, "token_type_embeddings", 1)


def bert_norms_before(patch: Patch) -> None:
    """The norm of the update for that of the sum."""

    def before(call: Any, own: Any, x: Any, update: Any) -> Any:
        return call(own, 0.5 * x, update)

    _around(patch, "Output", before, "bert")


def bert_gelu_by_tanh(patch: Patch) -> None:
    gelu = patch.backend.ops.gelu
    _around(patch, "Intermediate", lambda call, own, x: gelu(own.dense(x)), "bert")


def bert_causal(patch: Patch) -> None:
    def changed(call: Any, own: Any, x: Any) -> Any:
        return call(own, x[:, : x.shape[1]] * 1.0 + 0.05 * patch.backend.lib.roll(x, 1, 1))

    _around(patch, "SelfAttention", changed, "bert")


def bert_positions_one_later(patch: Patch) -> None:
    _rolled(patch, "position_embeddings", 1)


def padding_not_learned(patch: Patch) -> None:
    patch.loaded(lambda entry, made: 0.0 * made if "text_embedding_padding" in entry.name else made)


def all_of_t5_words(patch: Patch) -> None:
    """States of padding for the learned rows."""
    patch.around(WordT5Texts, "words", lambda words, texts, prompt: texts.length)


def padding_seen_by_t5(patch: Patch) -> None:
    patch.set(WordT5Texts, "padding", lambda texts, ids: 0)
    patch.around(HunyuanTexts, "states", _with_words)


def _with_words(states: Any, texts: HunyuanTexts, prompts: list[str]) -> Any:
    """Words as they are, while T5 sees all."""
    rows = states(texts, prompts)
    counts = [np.flatnonzero(np.array(texts.t5.fill(prompt).ids) == 1)[0] + 1 for prompt in prompts]
    return [(bert, t5, int(count)) for (bert, t5, _), count in zip(rows, counts, strict=True)]


def _tokens(patch: Patch, owner: Any, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    def changed(fill: Any, texts: Any, prompt: str) -> PromptTokens:
        tokens = fill(texts, prompt)
        return replace(tokens, ids=change(tokens.ids))

    patch.around(owner, "fill", changed)


def no_end_of_berts_text(patch: Patch) -> None:
    _tokens(patch, BertTexts, lambda ids: ids[:-1])


def no_start_of_berts_text(patch: Patch) -> None:
    _tokens(patch, BertTexts, lambda ids: ids[1:])


def first_word_of_t5_last(patch: Patch) -> None:
    _tokens(patch, WordT5Texts, lambda ids: (ids[1], ids[0], *ids[2:]))


def guidance_rescale_of_the_guided(patch: Patch) -> None:
    """All of it."""
    right = Hunyuan.guidance.formula

    def formula(engine: Any, request: Any, both: Any) -> Any:
        options = replace(request.family_options, guidance_rescale=1.0)
        return right(engine, replace(request, family_options=options), both)

    patch.set(Hunyuan, "guidance", replace(Hunyuan.guidance, formula=formula))


MUTANTS = (
    Mutant(shared.attention_scale, "attention's scale 1 % too large"),
    Mutant(shared.no_rope, "no RoPE"),
    Mutant(shared.rope_of_halves, "RoPE on halves for pairs"),
    Mutant(shared.silu_left_out, "no SiLU"),
    Mutant(shared.gelu_erf, "GELU by its definition for its tanh form"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(shared.sines_first("hunyuan_dit", "TimestepEmbedding"), "sines before cosines of the time"),
    Mutant(skips_from_the_front, "half of the stream in what a skip brings"),
    Mutant(skip_before_the_stream, "the skip joined before the stream"),
    Mutant(no_skip_norm, "no norm of stream and skip"),
    Mutant(skip_added_to_the_stream, "a tenth of the stream added behind a skip"),
    Mutant(shift_without_silu, "half of the time in the shift"),
    Mutant(no_shift, "no shift by the time"),
    Mutant(second_and_third_norm_exchanged, "the second and the third norm exchanged"),
    Mutant(norms_without_biases, "the norms of queries and keys without biases"),
    Mutant(no_layer_norm_of_queries, "no norms of queries and keys"),
    Mutant(keys_of_the_text_rotated, "keys of the text rotated"),
    Mutant(queries_to_the_text_not_rotated, "queries to the text not rotated"),
    Mutant(text_not_seen, "no attention to the text"),
    Mutant(last_text_token_not_attended, "the last text token not attended"),
    Mutant(keys_and_values_exchanged, "keys and values exchanged"),
    Mutant(projections_without_silu, "no SiLU between projections"),
    Mutant(patches_in_channels_first, "channels first in a patch"),
    Mutant(variance_for_v, "the variance for v"),
    Mutant(mean_not_first, "the pool's tokens one later"),
    Mutant(pool_without_positions, "the pool without positions"),
    Mutant(pool_positions_one_later, "the pool's positions one later"),
    Mutant(pool_not_projected, "the pool's queries and keys exchanged"),
    Mutant(style_before_the_sizes, "the style before the sizes"),
    Mutant(style_not_added, "no style"),
    Mutant(bert_without_the_first_of_a_pair, "BERT's second text for its first"),
    Mutant(bert_norms_before, "half of the stream in BERT's sums"),
    Mutant(bert_gelu_by_tanh, "BERT's GELU by its tanh form"),
    Mutant(bert_causal, "BERT's tokens mixed with those before them"),
    Mutant(bert_positions_one_later, "BERT's positions one later"),
    Mutant(flux.t5_scores_scaled, "T5's scores divided by the root of the width"),
    Mutant(flux.t5_bias_not_added, "T5 without the bias of positions"),
    Mutant(flux.t5_gate_and_values_exchanged, "T5's gate and values exchanged"),
    Mutant(flux.t5_without_final_norm, "T5 without its final norm"),
    Mutant(sd.no_post_quant_conv, "no post_quant_conv"),
    Mutant(sd.attention_without_its_input, "the VAE's attention without its input"),
    Mutant(shared.kernel_turned, "rows and columns of kernels exchanged"),
    *shared.ARITHMETIC,
    Mutant(padding_not_learned, "zeros for the learned padding", picture=True),
    Mutant(all_of_t5_words, "T5's states of padding for the learned rows", picture=True),
    Mutant(padding_seen_by_t5, "padding that T5 sees", picture=True),
    Mutant(no_end_of_berts_text, "no end token of BERT's", picture=True),
    Mutant(no_start_of_berts_text, "no start token of BERT's", picture=True),
    Mutant(first_word_of_t5_last, "T5's first two tokens exchanged", picture=True),
    Mutant(width_before_height, "the picture's width before its height", picture=True),
    Mutant(sizes_in_latents, "sizes in latents for pixels", picture=True),
    Mutant(original_of_the_picture, "the picture's size for its original's", picture=True),
    Mutant(sizes_not_read, "no sizes", picture=True),
    Mutant(places_of_the_reference, "a side's end as in the reference", picture=True),
    Mutant(not_in_the_middle, "places from 0 on", picture=True),
    Mutant(places_in_tokens, "places in tokens", picture=True),
    Mutant(shorter_side_stretched, "the shorter side stretched", picture=True),
    Mutant(rows_before_columns, "places of rows before those of columns", picture=True),
    Mutant(shared.velocity_sign("hunyuan_dit"), "v's sign", picture=True),
    Mutant(time_off, "times 0.1 % off", picture=True),
    Mutant(times_0_to_1, "times of 0 to 1", picture=True),
    Mutant(sd.time_off_by_one, "times off by one of 1000", picture=True),
    Mutant(sd.prediction_of_another_kind, "v taken for noise", picture=True),
    Mutant(sd.input_not_scaled, "latents not scaled before the transformer", picture=True),
    Mutant(sd.betas_linear, "noise levels 2 % too high", picture=True),
    Mutant(flux.t5_looks_the_other_way, "T5's distances with the other sign", picture=True),
    Mutant(shared.branches_swapped(Hunyuan), "the branches of guidance exchanged", picture=True),
    Mutant(shared.from_the_prompt(Hunyuan), "guidance from the prompt's prediction", picture=True),
    Mutant(guidance_rescale_of_the_guided, "guidance rescaled that is not to be", picture=True, refused=("bf16",)),
    Mutant(shared.latents_scale_1_off, "the latents' scale 1 % off", picture=True),
    *shared.DECODING,
)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["hunyuan-1.1"], prompt="A large BLUE star")
