"""Faults in LongCat-Image and -Edit: in their transformer, their text encoder, and the loop around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenimg.common.families.longcat import model, references, texts
from qwenimg.common.families.longcat.model import LongCat
from qwenimg.common.families.longcat.texts import QuotedPictureTexts
from qwenimg.common.networks.denoisers import flux_conditioning
from qwenimg.common.networks.denoisers.longcat_dit import LongCatConfig
from qwenimg.common.numbers import rope
from qwenimg.common.pipeline.steps.guidance import cfg
from qwenimg.common.prompts import quoted
from support import mutants_flux as flux
from support import mutants_shared as shared
from support.mutant import Judge, Mutant, Patch, Scenes

# Texts


def pads_see_pads(patch: Patch) -> None:
    owner = patch.backend.network("decoder").Attention
    patch.around(owner, patch.backend.calls, lambda call, layer, x, rope, pads, *rest: call(layer, x, rope, 0, *rest))


def quotes_as_words(patch: Patch) -> None:
    patch.set(quoted, "parts", lambda prompt: [(prompt, False)] if prompt else [])


def quotes_left_out(patch: Patch) -> None:
    patch.around(quoted, "parts", lambda made, prompt: [(part.strip('"'), is_one) for part, is_one in made(prompt)])


def text_without_pads(patch: Patch) -> None:
    patch.set(model, "DRAWS", replace(texts.DRAWS, limit=64, seen=64))


def template_of_edit(patch: Patch) -> None:
    patch.set(model, "DRAWS", replace(texts.DRAWS, text=texts.EDITS.text))


def template_without_last_newline(patch: Patch) -> None:
    patch.set(model, "DRAWS", replace(texts.DRAWS, text=texts.DRAWS.text[:-1]))


def states_one_token_late(patch: Patch) -> None:
    patch.around(quoted.QuotedTemplate, "start", lambda start, template, length: start(template, length) - 1)


# Positions


def _positions(patch: Patch, change: Any) -> None:
    patch.around(flux_conditioning, "image_positions", lambda made, grids: change(made(grids)))


def text_not_numbered(patch: Patch) -> None:
    """As FLUX.1's."""
    patch.set(LongCatConfig, "counts_text", property(lambda config: False))


def text_in_the_frame_axis(patch: Patch) -> None:
    def moved(made: Any, positions: Any, *rest: Any) -> Any:
        text = not positions[:, 0].any()
        return made(positions[:, [1, 0, 2]] if text else positions, *rest)

    patch.around(rope, "rope_table", moved)


def image_from_the_corner(patch: Patch) -> None:
    """Not behind the text."""

    def moved(made: Any, positions: Any, *rest: Any) -> Any:
        image = positions.shape[1] == 3 and positions[:, 0].any()
        return made(positions - positions[0] * [0, 1, 1] if image else positions, *rest)

    patch.around(rope, "rope_table", moved)


def image_in_the_frame_of_the_text(patch: Patch) -> None:
    _positions(patch, lambda positions: positions - [1, 0, 0])


def rows_and_columns_swapped(patch: Patch) -> None:
    _positions(patch, lambda positions: positions[:, [0, 2, 1]])


def reference_in_the_frame_of_the_image(patch: Patch) -> None:
    _positions(patch, lambda positions: positions * [0, 1, 1])


# Guidance


def guidance_without_limit(patch: Patch) -> None:
    patch.set(LongCat, "guidance", replace(LongCat.guidance, formula=cfg))


def guidance_of_one_vector(patch: Patch) -> None:
    """Shortened as a whole, for token by token."""

    def whole(engine: Any, request: Any, both: Any) -> Any:
        return engine.shortened(cfg(engine, request, both), both[0], 1.0)

    patch.set(LongCat, "guidance", replace(LongCat.guidance, formula=whole))


# Edit


def picture_numbered_as_text(patch: Patch) -> None:
    """As transformers 5 has it without the types of tokens."""
    patch.around(rope, "picture_positions", lambda made, length, places: np.arange(length)[:, None].repeat(3, axis=1))


def pads_behind_the_text(patch: Patch) -> None:
    """For at 0."""

    def plain(made: Any, config: Any, length: int, places: Any, pads: int = 0) -> Any:
        return made(config, length, places)

    patch.around(patch.backend.network("decoder"), "text_table", plain)


def copy_of_the_whole_size(patch: Patch) -> None:
    patch.around(references, "copy", lambda made, picture: picture)


def states_without_vision_start(patch: Patch) -> None:
    """The end of the template in its place."""
    patch.around(QuotedPictureTexts, "used", lambda made, own, *given: np.roll(made(own, *given), 1, axis=1))


def edit_guidance_shortened(patch: Patch) -> None:
    """As that of LongCat-Image."""
    right = model.LongCatEdit.guidance
    patch.set(model.LongCatEdit, "guidance", replace(right, formula=LongCat.guidance.formula))


HARDLY = ("bf16",)  # they change less than a passport in bfloat16 allows
MUTANTS = (
    Mutant(shared.sines_first("flux_dit", "TimeTextEmbed"), "sines before cosines of the time"),
    Mutant(shared.scales_first, "scales before shifts in blocks of two streams"),
    Mutant(shared.gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(flux.single_gate_first, "gates before shifts and scales in blocks of one stream"),
    Mutant(shared.last_scale_and_shift_swapped, "scale and shift of the head exchanged"),
    Mutant(
        flux.streams_modulation_exchanged("flux_dit", "TransformerBlock"), "each stream with the other's modulation"
    ),
    Mutant(shared.scale_without_one, "`scale` for `1 + scale`"),
    Mutant(flux.image_first_in("flux_dit", "SingleTransformerBlock"), "RoPE of one stream with the image first"),
    *shared.ATTENTION_WITH_ROPE,
    Mutant(pads_see_pads, "pads of the text that see pads"),
    Mutant(shared.text_rope_of_pairs, "the text encoder's RoPE on pairs for halves"),
    *shared.ARITHMETIC,
    Mutant(quotes_as_words, "quoted text encoded as words", picture=True),
    Mutant(quotes_left_out, "quoted text without its quotes", picture=True),
    Mutant(text_without_pads, "64 text tokens for 512", picture=True),
    Mutant(template_of_edit, "Edit's template", picture=True),
    Mutant(template_without_last_newline, "template without its last newline", picture=True),
    Mutant(states_one_token_late, "the text's states one token early", picture=True, refused=HARDLY),
    Mutant(text_not_numbered, "text and image at FLUX.1's positions", picture=True),
    Mutant(text_in_the_frame_axis, "text counted in frames for rows", picture=True),
    Mutant(image_from_the_corner, "the image not behind the text", picture=True),
    Mutant(image_in_the_frame_of_the_text, "the image in the frame of the text", picture=True, refused=HARDLY),
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True, refused=HARDLY),
    Mutant(shared.velocity_sign("flux_dit"), "the velocity's sign", picture=True),
    Mutant(shared.time_off(model), "times 0.1 % off", picture=True),
    Mutant(shared.packing_order, "latents packed in another order", picture=True),
    Mutant(shared.branches_swapped(LongCat), "the branches of guidance exchanged", picture=True),
    Mutant(
        guidance_without_limit, "guidance without the length of the prompt's prediction", picture=True, refused=HARDLY
    ),
    Mutant(guidance_of_one_vector, "guidance shortened as a whole for token by token", picture=True, refused=HARDLY),
    *shared.NOISE_LEVELS,
    *shared.SCALED_AND_DECODED,
    Mutant(reference_in_the_frame_of_the_image, "the picture in the frame of the image", picture=True, scene="edit"),
    Mutant(picture_numbered_as_text, "slots numbered as text", picture=True, scene="edit"),
    Mutant(pads_behind_the_text, "pads that count on behind the text", picture=True, scene="edit"),
    Mutant(copy_of_the_whole_size, "the text encoder's copy in its own size", picture=True, scene="edit"),
    Mutant(states_without_vision_start, "states one token early", picture=True, scene="edit"),
    Mutant(shared.reference_a_sample, "a sample of the picture's latents for their mean", picture=True, scene="edit"),
    Mutant(shared.velocity_of_other_tokens, "the velocity of other tokens", picture=True, scene="edit"),
    Mutant(edit_guidance_shortened, "guidance as LongCat-Image's", picture=True, scene="edit"),
)


def few_pixels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(references, "AREA", 96**2)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Scenes:
    asked = {"prompt": 'a large blue "star"', "steps": 2}
    edit = Judge(tiny["longcat-edit"], setting=few_pixels, pictures=1, **asked)
    return Scenes({"": Judge(tiny["longcat"], **asked), "edit": edit})
