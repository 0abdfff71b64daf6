"""Faults in Chroma: in its transformer and its approximator, its text encoder, and the loop around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.families.chroma.model import Chroma
from qwenimg.common.families.chroma.texts import ChromaTexts
from qwenimg.common.networks.denoisers import chroma_conditioning, flux_conditioning
from qwenimg.common.networks.denoisers.flux_dit import ROPE_THETA
from qwenimg.common.numbers import rope
from qwenimg.common.parts.texts.padded_texts import T5Texts
from qwenimg.common.pipeline.steps.guidance import cfg
from support import mutants_flux as flux
from support import mutants_shared as shared
from support.mutant import Judge, Mutant, Patch

# The approximator


def _features(patch: Patch, change: Any) -> None:
    patch.around(chroma_conditioning, "features", lambda made, *given: change(made(*given)))


def numbers_before_time(patch: Patch) -> None:
    _features(patch, lambda rows: np.roll(rows, rows.shape[2] // 2, axis=2))


def numbers_not_times_1000(patch: Patch) -> None:
    def small(made: Any, count: int, channels: int) -> Any:
        angles = np.arange(count)[:, None] * 10000.0 ** (-np.arange(channels // 2) / (channels // 2))
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)

    patch.around(chroma_conditioning, "_numbered", small)


def no_guidance_of_zero(patch: Patch) -> None:
    """Zeros for the sinusoids of 0."""

    def without(rows: Any) -> Any:
        quarter = rows.shape[2] // 4
        rows[:, :, quarter : 2 * quarter] = 0
        return rows

    _features(patch, without)


def time_off(patch: Patch) -> None:
    def off(made: Any, config: Any, times: Any, dtype: str) -> Any:
        return made(config, [0.999 * time for time in times], dtype)

    patch.around(chroma_conditioning, "features", off)


def approximator_without_residual(patch: Patch) -> None:
    patch.layer("RMSNorm", lambda layer, x, y: y if "norms" not in layer.path else 0 * y)


def approximator_norm_eps(patch: Patch) -> None:
    patch.set(patch.backend.network("chroma_dit"), "RMS_EPS", 0.1)


def _rows(patch: Patch, change: Any) -> None:
    """Makes the vectors of modulation [N C] of a time what `change` makes of them."""
    owner = patch.backend.network("chroma_dit").Approximator
    patch.around(owner, patch.backend.calls, lambda call, own, features: change(call(own, features)))


def vectors_one_off(patch: Patch) -> None:
    _rows(patch, lambda vectors: patch.backend.lib.roll(vectors, 1, 0))


def blocks_of_two_streams_first(patch: Patch) -> None:
    """Nine vectors of the three tiny blocks of one stream."""
    _rows(patch, lambda vectors: patch.backend.lib.roll(vectors, -9, 0))


# Texts


def padding_seen_by_t5(patch: Patch) -> None:
    patch.set(ChromaTexts, "results", T5Texts.results)


def all_padding(patch: Patch) -> None:
    """As FLUX.1 has it."""
    patch.set(ChromaTexts, "fill", T5Texts.fill)


def no_padding(patch: Patch) -> None:
    def without(fill: Any, texts: Any, prompt: str) -> Any:
        made = fill(texts, prompt)
        return replace(made, ids=made.ids[: len(made.ids) - made.pads], pads=0)

    patch.around(ChromaTexts, "fill", without)


# Positions and guidance


def rows_and_columns_swapped(patch: Patch) -> None:
    patch.around(flux_conditioning, "image_positions", lambda made, grids: made(grids)[:, [0, 2, 1]])


def text_numbered(patch: Patch) -> None:
    """As LongCat-Image's is."""

    def numbered(made: Any, config: Any, grids: Any, length: int) -> Any:
        positions = np.repeat(np.arange(length)[:, None], 3, axis=1)
        return made(config, grids, length)[0], rope.rope_table(positions, config.axes_dims_rope, ROPE_THETA)

    patch.around(flux_conditioning, "image_and_text_rope", numbered)


def guidance_shortened(patch: Patch) -> None:
    """As LongCat-Image's."""

    def formula(engine: Any, request: Any, both: Any) -> Any:
        return engine.shortened(cfg(engine, request, both), both[0], 1.0, True)

    patch.set(Chroma, "guidance", replace(Chroma.guidance, formula=formula))


MUTANTS = (
    Mutant(approximator_without_residual, "the approximator without its inner layers"),
    Mutant(approximator_norm_eps, "the approximator's epsilon 0.1"),
    Mutant(vectors_one_off, "vectors of modulation one off"),
    Mutant(blocks_of_two_streams_first, "vectors of two streams before those of one"),
    Mutant(shared.scales_first, "scales before shifts in blocks of two streams"),
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(flux.single_gate_first, "gates before shifts and scales in blocks of one stream"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(
        flux.streams_modulation_exchanged("flux_dit", "TransformerBlock"), "each stream with the other's modulation"
    ),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(shared.silu_left_out, "no SiLU"),
    Mutant(shared.gelu_erf, "GELU by the error function for its tanh form"),
    Mutant(flux.feed_forward_before_attention, "the feed-forward before the attention in `proj_out`"),
    Mutant(flux.image_first_in("flux_dit", "SingleTransformerBlock"), "RoPE of one stream with the image first"),
    *shared.ATTENTION_WITH_ROPE,
    Mutant(flux.t5_bias_not_added, "T5 without the bias of positions"),
    *shared.ARITHMETIC,
    Mutant(padding_seen_by_t5, "padding that T5 sees", picture=True),
    Mutant(all_padding, "all of the padding", picture=True),
    Mutant(no_padding, "no token of padding", picture=True),
    Mutant(numbers_before_time, "a vector's number before the time", picture=True),
    Mutant(numbers_not_times_1000, "a vector's number not times 1000", picture=True),
    Mutant(no_guidance_of_zero, "zeros for the sinusoids of a guidance of 0", picture=True),
    Mutant(time_off, "times 0.1 % off", picture=True),
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True),
    Mutant(text_numbered, "text tokens at positions of their own", picture=True),
    Mutant(shared.velocity_sign("chroma_dit"), "the velocity's sign", picture=True),
    Mutant(shared.packing_order, "latents packed in another order", picture=True),
    Mutant(shared.branches_swapped(Chroma), "the branches of guidance exchanged", picture=True),
    Mutant(shared.from_the_prompt(Chroma), "guidance from the prompt's prediction", picture=True),
    Mutant(guidance_shortened, "guidance as LongCat-Image's", picture=True),
    *shared.NOISE_LEVELS,
    *shared.SCALED_AND_DECODED,
)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["chroma"])
