"""Faults in Lumina-Image 2.0: in its transformer, its text encoder, its texts, and the loop around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from qwenimg.common.families.lumina import model, texts
from qwenimg.common.families.lumina.model import Lumina
from qwenimg.common.families.lumina.texts import BegunTemplate
from qwenimg.common.networks.denoisers import lumina_conditioning
from qwenimg.common.networks.encoders.decoder import DecoderConfig
from qwenimg.common.numbers import rope
from support import mutants_flux2 as flux2
from support import mutants_shared as shared
from support import mutants_zimage as zimage
from support.mutant import Mutant, Patch

# The transformer


def modulation_without_silu(patch: Patch) -> None:
    """As Z-Image's blocks take it; the time's embedding and the head keep theirs."""
    owner = patch.backend.network("lumina_dit").LuminaTransformer

    def changed(call: Any, own: Any, latents: Any, features: Any, *rest: Any) -> Any:
        silu, seen = patch.backend.ops.silu, []

        def first_two(x: Any) -> Any:
            seen.append(x)
            return x if len(seen) == 2 else silu(x)

        patch.backend.ops.silu = first_two
        try:
            return call(own, latents, features, *rest)
        finally:
            patch.backend.ops.silu = silu

    patch.around(owner, patch.backend.calls, changed)


def no_norm_of_text(patch: Patch) -> None:
    shared.norm_left_out(patch, "cap_embedder.0")


def patches_in_channels_first(patch: Patch) -> None:
    """(c, dy, dx) for (dy, dx, c)."""
    owner, images = patch.backend.network("lumina_dit").LuminaTransformer, patch.backend.network("lumina_dit").images
    patch.set(owner, "patches", lambda own, latents: images.tokens(images.patches(latents, 2)))


def refiner_left_out(patch: Patch) -> None:
    owner = patch.backend.network("lumina_dit").TransformerBlock
    patch.around(
        owner,
        patch.backend.calls,
        lambda call, own, x, *rest: x if own.attention.to_q.path.startswith("noise_refiner.1") else call(own, x, *rest),
    )


def text_not_refined(patch: Patch) -> None:
    owner = patch.backend.network("lumina_dit").ContextBlock
    patch.set(owner, patch.backend.calls, lambda own, x, rope: x)


def last_text_token_not_attended(patch: Patch) -> None:
    patch.attention(lambda attend, q, k, v, *rest, **more: attend(q, k[:, :-1], v[:, :-1], *rest))


# The text encoder


def _form(patch: Patch, **changes: Any) -> None:
    patch.around(DecoderConfig, "form", lambda form, config, layer: form(config, layer)._replace(**changes))


def text_not_causal(patch: Patch) -> None:
    ops = patch.backend.ops
    patch.around(ops, "causal_attention", lambda attend, q, k, v, form: ops.attention(q, k, v))


def scores_without_a_bound(patch: Patch) -> None:
    _form(patch, cap=0.0)


def windows_of_all_tokens(patch: Patch) -> None:
    _form(patch, window=0)


def embeddings_not_scaled(patch: Patch) -> None:
    def changed(init: Any, own: Any) -> None:
        object.__setattr__(own, "embedding_scale", 1.0)
        init(own)

    patch.around(DecoderConfig, "__post_init__", changed)


# The texts


def no_token_before_the_text(patch: Patch) -> None:
    def without(fill: Any, template: Any, tokenizer: Any, prompt: str) -> Any:
        made = fill(template, tokenizer, prompt)
        return replace(made, ids=made.ids[1:]) if len(made.ids) > 1 else made

    patch.around(BegunTemplate, "fill", without)


def no_instruction(patch: Patch) -> None:
    patch.set(model, "instructed", lambda prompt: prompt)


def instruction_before_the_negative_prompt(patch: Patch) -> None:
    patch.around(Lumina, "prompts", lambda made, own, request: [*map(texts.instructed, made(own, request))])


def start_left_out(patch: Patch) -> None:
    """The words between instruction and prompt."""
    patch.set(model, "instructed", lambda prompt: f"{texts.INSTRUCTION} {prompt}")


# Positions and times


def _positions(patch: Patch, change: Any) -> None:
    """Makes the positions [L 3] of an image change(positions)."""

    def changed(made: Any, positions: Any, axes: Any, theta: float) -> Any:
        return made(change(positions) if positions[:, 1:].any() else positions, axes, theta)

    patch.around(rope, "rope_table", changed)


def rows_and_columns_swapped(patch: Patch) -> None:
    _positions(patch, lambda positions: positions[:, [0, 2, 1]])


def image_one_later(patch: Patch) -> None:
    _positions(patch, lambda positions: np.add(positions, [1, 0, 0]))


def image_before_the_text(patch: Patch) -> None:
    _positions(patch, lambda positions: positions * [0, 1, 1])


def text_from_one_on(patch: Patch) -> None:
    """As Z-Image counts it."""

    def changed(made: Any, positions: Any, axes: Any, theta: float) -> Any:
        return made(positions if positions[:, 1:].any() else np.add(positions, [1, 0, 0]), axes, theta)

    patch.around(rope, "rope_table", changed)


def theta_of_z_image(patch: Patch) -> None:
    patch.around(rope, "rope_table", lambda made, positions, axes, theta: made(positions, axes, 256.0))


def time_from_noise(patch: Patch) -> None:
    """Sigma for 1 - sigma."""
    patch.around(model, "time_row", lambda made, timestep: made(1000.0 - timestep))


def times_1000(patch: Patch) -> None:
    """As Z-Image's."""
    patch.around(lumina_conditioning, "sinusoids", lambda made, value, channels: made(1000.0 * value, channels))


def time_off(patch: Patch) -> None:
    patch.around(model, "time_row", lambda made, timestep: made(0.999 * timestep))


# Guidance


def norm_not_kept(patch: Patch) -> None:
    patch.set(model, "cfg_with_norm", model.cfg)


def norm_of_the_whole(patch: Patch) -> None:
    patch.set(
        model,
        "cfg_with_norm",
        lambda engine, request, both: engine.shortened(model.cfg(engine, request, both), both[0], 1.0),
    )


_ALL = (
    Mutant(zimage.gates_without_tanh, "gates without tanh"),
    Mutant(zimage.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(zimage.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(zimage.gates_before_scales, "gates before scales"),
    Mutant(zimage.feed_forward_exchanged, "the two parts of the feed-forward exchanged"),
    Mutant(zimage.no_norm_of_updates, "updates without their norm"),
    Mutant(zimage.norm_eps, "RMSNorm's epsilon ten times too large"),
    Mutant(zimage.no_norm_in_the_head, "no norm in the head"),
    Mutant(modulation_without_silu, "no SiLU before the blocks' modulation"),
    Mutant(shared.silu_left_out, "no SiLU at all"),
    Mutant(no_norm_of_text, "no norm of the text states"),
    Mutant(patches_in_channels_first, "channels first in a patch"),
    Mutant(refiner_left_out, "the last refiner block of the image left out"),
    Mutant(text_not_refined, "a text that is not refined"),
    Mutant(last_text_token_not_attended, "the last text token not attended"),
    Mutant(shared.sines_first("lumina_dit", "TimestepEmbedding"), "sines before cosines of the time"),
    *shared.ATTENTION_WITH_ROPE,
    Mutant(shared.causal, "causal attention in the transformer"),
    Mutant(shared.keys_not_shared, "shared heads of keys dealt out in another order"),
    Mutant(text_not_causal, "a Gemma 2 that sees what comes"),
    Mutant(shared.text_rope_of_pairs, "Gemma 2's RoPE on pairs for halves"),
    Mutant(flux2.taps_one_layer_early, "text states of one layer before"),
    Mutant(scores_without_a_bound, "Gemma 2's scores without their bound"),
    Mutant(windows_of_all_tokens, "Gemma 2 without windows"),
    Mutant(embeddings_not_scaled, "Gemma 2's embeddings not scaled"),
    *shared.ARITHMETIC,
    Mutant(shared.velocity_sign("lumina_dit"), "the velocity's sign", picture=True),
    Mutant(no_token_before_the_text, "no token before the text", picture=True),
    Mutant(no_instruction, "no instruction before the prompt", picture=True),
    Mutant(instruction_before_the_negative_prompt, "the instruction before the negative prompt too", picture=True),
    Mutant(start_left_out, "no words between instruction and prompt", picture=True),
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True),
    # in bfloat16 these change no more than the roundings of a tiny model
    Mutant(image_one_later, "the image one frame later", picture=True, refused=("bf16",)),
    Mutant(image_before_the_text, "the image not behind the text", picture=True),
    Mutant(text_from_one_on, "text counted from one on", picture=True, refused=("bf16",)),
    Mutant(theta_of_z_image, "RoPE's theta 256", picture=True),
    Mutant(time_from_noise, "sigma for 1 - sigma", picture=True),
    Mutant(times_1000, "times of 0 to 1000", picture=True),
    Mutant(time_off, "times 0.1 % off", picture=True),
    Mutant(norm_not_kept, "guidance that does not keep the norm", picture=True),
    Mutant(norm_of_the_whole, "guidance that keeps the norm of the whole", picture=True),
    Mutant(shared.branches_swapped(Lumina), "the branches of guidance exchanged", picture=True),
    Mutant(shared.from_the_prompt(Lumina), "guidance from the prompt's prediction", picture=True),
    *shared.NOISE_LEVELS,
    *shared.SCALED_AND_DECODED,
)
MUTANTS = tuple(replace(mutant, refused=(*mutant.refused, "fp16")) for mutant in _ALL)
