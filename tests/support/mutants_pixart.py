"""Faults in PixArt-alpha, which has all that PixArt-Sigma has: in its transformer, its text encoder, its texts, and the
loop around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.families.pixart import model
from qwenimg.common.families.pixart.model import PixArt
from qwenimg.common.families.pixart.texts import PixArtTexts
from qwenimg.common.networks.denoisers import pixart_conditioning
from qwenimg.common.parts.texts.padded_texts import MaskedT5Texts, T5Texts
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from support import mutants_anima as anima
from support import mutants_flux as flux
from support import mutants_sd as sd
from support import mutants_shared as shared
from support.mutant import Judge, Mutant, Patch

# The transformer


def _class(patch: Patch, name: str) -> Any:
    return getattr(patch.backend.network("pixart_dit"), name)


def _table(patch: Patch, change: Callable[[Any, Any], Any]) -> None:
    """Makes the table of a block change(its name, itself)."""

    def changed(entry: Any, made: Any) -> Any:
        return change(entry.name, made) if entry.name.endswith("scale_shift_table.weight") else made

    patch.loaded(changed)


def tables_of_blocks_not_added(patch: Patch) -> None:
    _table(patch, lambda name, made: 0.0 * made if name.startswith("transformer") else made)


def table_of_the_head_not_added(patch: Patch) -> None:
    _table(patch, lambda name, made: made if name.startswith("transformer") else 0.0 * made)


def tables_by_channels_first(patch: Patch) -> None:
    """The rows of a table back to front."""
    _table(patch, lambda name, made: patch.backend.lib.roll(made, 1, 0))


def epsilon_of_others(patch: Patch) -> None:
    patch.built(_class(patch, "TransformerBlock"), lambda block: setattr(block, "eps", 1e-2))


def _to_the_text(patch: Patch, change: Callable[..., Any]) -> None:
    """Makes the attention to the text change(the call, the layer, the stream, the text)."""

    def changed(call: Any, own: Any, x: Any, seen: Any) -> Any:
        return call(own, x, seen) if seen is x else change(call, own, x, seen)

    patch.around(_class(patch, "Attention"), patch.backend.calls, changed)


def stream_normed_before_the_text(patch: Patch) -> None:
    _to_the_text(patch, lambda call, own, x, seen: call(own, patch.backend.ops.unit_norm(x, 1e-6), seen))


def text_not_seen(patch: Patch) -> None:
    _to_the_text(patch, lambda call, own, x, seen: 0.0 * call(own, x, seen))


def last_text_token_not_attended(patch: Patch) -> None:
    _to_the_text(patch, lambda call, own, x, seen: call(own, x, seen[:, :-1]))


def text_before_the_image(patch: Patch) -> None:
    """Both attentions with each other's weights."""
    patch.exchanged(_class(patch, "TransformerBlock"), patch.backend.calls, "attn1", "attn2")


def keys_and_values_exchanged(patch: Patch) -> None:
    patch.exchanged(_class(patch, "Attention"), patch.backend.calls, "to_k", "to_v")


def text_projected_without_gelu(patch: Patch) -> None:
    patch.set(
        _class(patch, "TextProjection"),
        patch.backend.calls,
        lambda own, text: own.linear_2(own.linear_1(text)),
    )


def patches_in_channels_first(patch: Patch) -> None:
    """(c, dy, dx) for (dy, dx, c) on the way out."""

    def turned(join: Any, x: Any, like: Any, side: int) -> Any:
        return join(x.reshape(*x.shape[:2], -1, side**2).swapaxes(2, 3).reshape(*x.shape), like, side)

    patch.around(patch.backend.images, "joined_patches", turned)


def variance_for_noise(patch: Patch) -> None:
    """The other half of the channels."""

    def other(entry: Any, made: Any) -> Any:
        return patch.backend.lib.roll(made, -4, 0) if entry.name.startswith("proj_out.") else made

    patch.loaded(other)


def no_embedding_behind_the_table_of_the_head(patch: Patch) -> None:
    """The modulation of all blocks for the embedding that it is made of."""

    def other(call: Any, own: Any, features: Any, sizes: Any) -> Any:
        mod, emb = call(own, features, sizes)
        return mod, mod[:, : emb.shape[-1]]

    patch.around(_class(patch, "AdaLayerNormSingle"), patch.backend.calls, other)


# Sizes, positions and times


def sizes_not_added(patch: Patch) -> None:
    patch.around(
        _class(patch, "AdaLayerNormSingle"), patch.backend.calls, lambda call, own, x, sizes: call(own, x, None)
    )


def _sizes(patch: Patch, change: Callable[[Any, int, int], Any]) -> None:
    patch.around(model, "size_rows", change)


def width_before_height(patch: Patch) -> None:
    _sizes(patch, lambda made, height, width: made(height, width)[[1, 0, 2]])


def ratio_of_width_to_height(patch: Patch) -> None:
    _sizes(patch, lambda made, height, width: np.concatenate((made(height, width)[:2], made(width, height)[2:])))


def sizes_in_latents(patch: Patch) -> None:
    _sizes(patch, lambda made, height, width: made(height // 8, width // 8))


def _positions(patch: Patch, change: Callable[[Any, Any, tuple[int, int]], Any]) -> None:
    patch.around(pixart_conditioning, "positions", change)


def rows_before_columns(patch: Patch) -> None:
    _positions(patch, lambda made, config, grid: np.roll(made(config, grid), config.dim // 2, axis=-1))


def cosines_before_sines(patch: Patch) -> None:
    def turned(made: Any, config: Any, count: int) -> Any:
        return np.roll(made(config, count), config.dim // 4, axis=-1)

    patch.around(pixart_conditioning, "_side", turned)


def places_in_tokens(patch: Patch) -> None:
    """Not as a share of the side."""

    def counted(made: Any, config: Any, count: int) -> Any:
        return made(config, int(config.base / config.scale))[:count]

    patch.around(pixart_conditioning, "_side", counted)


def positions_not_scaled(patch: Patch) -> None:
    _positions(patch, lambda made, config, grid: made(replace(config, interpolation_scale=1.0), grid))


def time_off(patch: Patch) -> None:
    patch.around(model, "time_row", lambda made, time: made(0.999 * time))


def times_0_to_1(patch: Patch) -> None:
    patch.around(model, "time_row", lambda made, time: made(time / 1000))


# The texts


def _tokens(patch: Patch, change: Callable[[PromptTokens], PromptTokens]) -> None:
    patch.around(PixArtTexts, "fill", lambda fill, texts, prompt: change(fill(texts, prompt)))


def padding_seen(patch: Patch) -> None:
    """By T5 and by the transformer."""
    patch.set(MaskedT5Texts, "fill", T5Texts.fill)


def no_end_of_the_text(patch: Patch) -> None:
    _tokens(patch, lambda tokens: replace(tokens, ids=tokens.ids[:-1] or tokens.ids))


def first_word_not_encoded(patch: Patch) -> None:
    _tokens(patch, lambda tokens: replace(tokens, ids=tokens.ids[1:] or tokens.ids))


def case_kept(patch: Patch) -> None:
    patch.set(PixArtTexts, "fill", MaskedT5Texts.fill)


MUTANTS = (
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(shared.scales_first, "scales before shifts"),
    Mutant(shared.of_modulation("feed_forward_first", (3, 4, 5, 0, 1, 2)), "the feed-forward's modulation first"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(tables_of_blocks_not_added, "the tables of the blocks not added"),
    Mutant(table_of_the_head_not_added, "the table of the head not added"),
    Mutant(tables_by_channels_first, "the rows of the tables one later"),
    Mutant(no_embedding_behind_the_table_of_the_head, "the head modulated by what the blocks are"),
    Mutant(epsilon_of_others, "an epsilon of 0.01 in the blocks' norms"),
    Mutant(shared.silu_left_out, "no SiLU"),
    Mutant(shared.gelu_erf, "GELU by its definition for its tanh form"),
    Mutant(shared.sines_first("pixart_dit", "TimestepEmbedding"), "sines before cosines of times and sizes"),
    Mutant(shared.attention_scale, "attention's scale 1 % too large"),
    Mutant(anima.causal, "causal attention to the image"),
    Mutant(stream_normed_before_the_text, "a norm before the attention to the text"),
    Mutant(text_not_seen, "no attention to the text"),
    Mutant(last_text_token_not_attended, "the last text token not attended"),
    Mutant(text_before_the_image, "the weights of both attentions exchanged"),
    Mutant(keys_and_values_exchanged, "keys and values exchanged"),
    Mutant(text_projected_without_gelu, "no GELU between the text's projections"),
    Mutant(patches_in_channels_first, "channels first in a patch"),
    Mutant(variance_for_noise, "the variance for the noise"),
    Mutant(sizes_not_added, "the picture's sizes not added"),
    Mutant(flux.t5_scores_scaled, "T5's scores divided by the root of the width"),
    Mutant(flux.t5_bias_not_added, "T5 without the bias of positions"),
    Mutant(flux.t5_gate_and_values_exchanged, "T5's gate and values exchanged"),
    Mutant(flux.t5_without_final_norm, "T5 without its final norm"),
    Mutant(sd.no_post_quant_conv, "no post_quant_conv"),
    Mutant(sd.attention_without_its_input, "the VAE's attention without its input"),
    Mutant(shared.kernel_turned, "rows and columns of kernels exchanged"),
    *shared.ARITHMETIC,
    Mutant(width_before_height, "the picture's width before its height", picture=True),
    Mutant(ratio_of_width_to_height, "the ratio of width to height", picture=True),
    Mutant(sizes_in_latents, "sizes in latents for pixels", picture=True),
    Mutant(rows_before_columns, "positions of rows before those of columns", picture=True),
    Mutant(cosines_before_sines, "cosines before sines of positions", picture=True),
    Mutant(places_in_tokens, "positions in tokens for shares of the side", picture=True),
    Mutant(positions_not_scaled, "positions without their scale", picture=True),
    Mutant(shared.velocity_sign("pixart_dit"), "the noise's sign", picture=True),
    Mutant(time_off, "times 0.1 % off", picture=True),
    Mutant(times_0_to_1, "times of 0 to 1", picture=True),
    Mutant(sd.time_off_by_one, "times off by one of 1000", picture=True),
    Mutant(sd.prediction_of_another_kind, "a prediction of noise taken for one of velocity", picture=True),
    Mutant(sd.input_not_scaled, "latents not scaled before the transformer", picture=True),
    Mutant(sd.betas_linear, "noise levels 2 % too high", picture=True),
    Mutant(padding_seen, "padding that is seen", picture=True),
    Mutant(no_end_of_the_text, "no end token of T5's", picture=True),
    Mutant(first_word_not_encoded, "the first token not encoded", picture=True),
    Mutant(case_kept, "a prompt in upper case", picture=True),
    Mutant(flux.t5_looks_the_other_way, "T5's distances with the other sign", picture=True),
    Mutant(shared.branches_swapped(PixArt), "the branches of guidance exchanged", picture=True),
    Mutant(shared.from_the_prompt(PixArt), "guidance from the prompt's prediction", picture=True),
    Mutant(
        sd.scale_of_another_model("scale_exchanged", 0.18215 / 0.13025), "the latents' scale of Sigma", picture=True
    ),
    Mutant(shared.latents_scale_1_off, "the latents' scale 1 % off", picture=True),
    *shared.DECODING,
)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["pixart-alpha"], prompt="A large BLUE star")
