"""Faults in FLUX.3 Image Klein: in its transformer of a stream for each kind of token, its text encoder, its VAE, and
the loop around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.networks.denoisers import flux3_conditioning
from support import mutants_flux as flux
from support import mutants_flux2 as flux2
from support import mutants_shared as shared
from support.mutant import Judge, Mutant, Patch

# The transformer

scales_first = shared.of_modulation("scales_first", (1, 0, 2))


def _class(patch: Patch, name: str) -> Any:
    return getattr(patch.backend.network("flux3_dit"), name)


def early_modulation_in_joint_blocks(patch: Patch) -> None:
    """And the other way round."""
    owner = _class(patch, "Flux3Transformer")
    patch.exchanged(owner, patch.backend.calls, "early_stream_modulations", "single_stream_modulations")


def _streams_exchanged(patch: Patch, one: str, other: str, *owners: str) -> None:
    """While text and references go through blocks of their own."""

    def exchanged(call: Any, own: Any, *given: Any) -> Any:
        layers = [getattr(own, name) for name in owners]
        before = [(getattr(layer, one), getattr(layer, other)) for layer in layers]
        for layer, (first, second) in zip(layers, before, strict=True):
            setattr(layer, one, second)
            setattr(layer, other, first)
        try:
            return call(own, *given)
        finally:
            for layer, (first, second) in zip(layers, before, strict=True):
                setattr(layer, one, first)
                setattr(layer, other, second)

    patch.around(_class(patch, "Flux3Transformer"), "context", exchanged)


def text_modulated_as_references(patch: Patch) -> None:
    """And the other way round."""
    _streams_exchanged(patch, "txt", "image_cond", "early_stream_modulations", "single_stream_modulations")


def references_modulated_as_the_image(patch: Patch) -> None:
    _streams_exchanged(patch, "image", "image_cond", "early_stream_modulations", "single_stream_modulations")


def references_in_blocks_of_the_image(patch: Patch) -> None:
    _streams_exchanged(patch, "image", "image_cond", "mode_blocks")


def context_at_the_time_of_the_image(patch: Patch) -> None:
    """For time 0."""
    patch.around(_class(patch, "Flux3Transformer"), "times", lambda times, own, rows: (times(own, rows)[0],) * 2)


def references_with_the_rows_of_the_text(patch: Patch) -> None:
    """Of the modulation, in blocks of all streams."""

    def changed(call: Any, own: Any, img: Any, context: Any, mods: Any, rope: Any, index: Any) -> Any:
        return call(own, img, context, mods, rope, None if index is None else 0 * index)

    patch.around(_class(patch, "SingleBlock"), patch.backend.calls, changed)


def image_first_in_joint_blocks(patch: Patch) -> None:
    """RoPE's rows."""

    def exchanged(call: Any, own: Any, img: Any, context: Any, mods: Any, rope: Any, index: Any) -> Any:
        return call(own, img, context, mods, patch.backend.lib.roll(rope, img.shape[1], 0), index)

    patch.around(_class(patch, "SingleBlock"), patch.backend.calls, exchanged)


def attention_beside_nothing(patch: Patch) -> None:
    """No feed-forward."""
    patch.around(_class(patch, "ParallelBlock"), "update", lambda update, block, x, rope: block.attn(x, rope))


def norm_eps(patch: Patch) -> None:
    def changed(block: Any) -> None:
        block.eps *= 10

    patch.built(_class(patch, "ParallelBlock"), changed)


# Positions


def _positions(patch: Patch, change: Any) -> None:
    patch.around(
        flux3_conditioning, "image_positions", lambda made, grid, reference=0: change(made(grid, reference), reference)
    )


def rows_and_columns_swapped(patch: Patch) -> None:
    _positions(patch, lambda positions, reference: positions[:, [0, 2, 1, 3]])


def positions_not_halved(patch: Patch) -> None:
    patch.set(flux3_conditioning, "SCALE", 1.0)


def references_numbered_as_the_image(patch: Patch) -> None:
    _positions(patch, lambda positions, reference: positions * [1, 1, 1, 0])


def references_numbered_as_text(patch: Patch) -> None:
    """Forwards."""
    _positions(patch, lambda positions, reference: np.abs(positions))


def references_in_frames(patch: Patch) -> None:
    """As FLUX.2's."""
    _positions(patch, lambda positions, reference: positions[:, [3, 1, 2, 0]])


def references_in_one_place(patch: Patch) -> None:
    _positions(patch, lambda positions, reference: np.maximum(positions, [-99, -99, -99, -1]))


MUTANTS = (
    Mutant(shared.sines_first("flux3_dit", "TimestepEmbedding"), "sines before cosines of the time"),
    Mutant(scales_first, "scales before shifts"),
    Mutant(flux.single_gate_first, "gates before shifts and scales"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(early_modulation_in_joint_blocks, "the modulation of blocks of one stream in those of all"),
    Mutant(text_modulated_as_references, "the modulation of references for the text"),
    Mutant(references_modulated_as_the_image, "the modulation of the image for references"),
    Mutant(references_in_blocks_of_the_image, "references in the blocks of the image"),
    Mutant(context_at_the_time_of_the_image, "text and references at the time of the image"),
    Mutant(references_with_the_rows_of_the_text, "the text's modulation for references in blocks of all streams"),
    Mutant(image_first_in_joint_blocks, "RoPE of blocks of all streams with the image first"),
    Mutant(attention_beside_nothing, "no feed-forward beside the attention"),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(shared.silu_left_out, "no SiLU"),
    Mutant(flux2.feed_forward_halves_exchanged, "the two halves of the feed-forward exchanged"),
    Mutant(norm_eps, "epsilons of blocks ten times too large"),
    Mutant(flux.first_text_token_not_attended, "the first token of each stream not attended"),
    *shared.ATTENTION_WITH_ROPE,
    Mutant(shared.text_not_causal, "a Qwen3-VL that sees what comes"),
    Mutant(shared.text_rope_of_pairs, "Qwen3-VL's RoPE on pairs for halves"),
    Mutant(flux2.text_not_normed, "no norm of Qwen3-VL's queries and keys"),
    Mutant(shared.keys_not_shared, "Qwen3-VL's shared heads of keys dealt out in another order"),
    Mutant(flux2.pads_attended, "pads attended"),
    Mutant(flux2.batch_mean_not_added, "the VAE's batch mean not added"),
    Mutant(flux2.batch_eps_of_others, "epsilon 1e-5 for 1e-4 of the VAE's batch variance"),
    Mutant(flux2.patches_in_another_order, "patches in the order (dy, dx, c)"),
    *shared.ARITHMETIC,
    Mutant(shared.velocity_sign("flux3_dit"), "the velocity's sign", picture=True),
    Mutant(flux2.time_off, "times 0.1 % off", picture=True),
    *shared.NOISE_LEVELS,
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True),
    Mutant(positions_not_halved, "rows and columns not halved", picture=True),
    Mutant(references_numbered_as_the_image, "references at the image's positions", picture=True),
    Mutant(references_numbered_as_text, "references numbered forwards", picture=True),
    Mutant(references_in_frames, "references numbered as frames", picture=True),
    Mutant(references_in_one_place, "all references with one number", picture=True, refused=("bf16",)),
)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["flux3-base"], pictures=2)
