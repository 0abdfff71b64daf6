"""Faults in Qwen-Image-Edit-2511: in the vision tower of its text encoder, in the prompt with pictures, and in what its
transformer sees of them. Those of its other parts are Qwen-Image's.

The order of windows is none of them: each attends alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwenimg.common.families.qwen_image import references, variants
from qwenimg.common.networks.denoisers import qwen_conditioning
from qwenimg.common.networks.encoders import qwen_vl_vision, vision_tower
from qwenimg.common.networks.encoders.qwen_vl_vision import QwenVLVisionConfig
from qwenimg.common.numbers import rope
from qwenimg.common.parts.texts.picture_texts import VISION, PictureTexts
from qwenimg.common.pictures import patches
from qwenimg.common.pipeline.models.inputs import PictureInputs
from support.mutant import Judge, Mutant, Patch
from support.mutants_qwen import template_one_token_off, with_template
from support.mutants_shared import ARITHMETIC, by_pairs, reference_a_sample, velocity_of_other_tokens

TOWER = 16  # the width of the tower's heads in the tiny models; the language models' differ


# The vision tower


def tower_attention_scale(patch: Patch) -> None:
    def scaled(attend: Any, q: Any, *rest: Any, **more: Any) -> Any:
        return attend(1.01 * q if q.shape[-1] == TOWER else q, *rest, **more)

    patch.attention(scaled)


def _rotated(patch: Patch, change: Any) -> None:
    """Makes the tower's rotation change(the original, its arguments)."""

    def rotated(rotate: Any, x: Any, *table: Any) -> Any:
        return change(rotate, x, *table) if x.shape[-1] == TOWER else rotate(x, *table)

    patch.around(patch.backend.ops, "rotate_halves", rotated)


def tower_not_rotated(patch: Patch) -> None:
    _rotated(patch, lambda rotate, x, *table: x)


def tower_rope_of_pairs(patch: Patch) -> None:
    on_pairs = by_pairs(patch)
    _rotated(patch, lambda rotate, x, *table: on_pairs(x, *table))


def _qkv(patch: Patch, change: Any) -> None:
    patch.layer("Linear", lambda layer, x, y: change(layer, y) if layer.path.endswith(".attn.qkv") else y)


def tower_values_first(patch: Patch) -> None:
    _qkv(patch, lambda layer, y: patch.backend.lib.roll(y, y.shape[-1] // 3, -1))


def tower_heads_first(patch: Patch) -> None:
    """Queries, keys and values side by side in each head."""

    def exchanged(layer: Any, y: Any) -> Any:
        parts = y.reshape(*y.shape[:-1], y.shape[-1] // 3 // TOWER, 3, TOWER)
        return parts.swapaxes(-2, -3).reshape(y.shape)

    _qkv(patch, exchanged)


def tower_without_qkv_bias(patch: Patch) -> None:
    _qkv(patch, lambda layer, y: y - layer.bias)


def tower_gate_and_values_exchanged(patch: Patch) -> None:
    owner = patch.backend.network("qwen_vl_vision").VisionMLP
    patch.exchanged(owner, patch.backend.calls, "gate_proj", "up_proj")


def tower_norms_centred(patch: Patch) -> None:
    """LayerNorm's mean removed."""
    patch.entering("RMSNorm", lambda layer, x: x - x.mean(-1)[..., None] if "visual." in layer.path else x)


def tower_eps(patch: Patch) -> None:
    patch.set(patch.backend.network("qwen_vl_vision"), "NORM_EPS", 1e-5)


def tower_of_one_tap(patch: Patch) -> None:
    """Of the kernel's two in time."""

    def first(entry: Any, made: Any) -> Any:
        if entry.name != "visual.patch_embed.proj.weight":
            return made
        taps = patch.backend.like(patch.backend.array(np.array([1.0, 0.0], np.float32)[:, None]), made)
        return (made.reshape(made.shape[0], 3, 2, -1) * taps).reshape(made.shape)

    patch.loaded(first)


def merger_gelu_tanh(patch: Patch) -> None:
    patch.set(patch.backend.ops, "gelu_erf", patch.backend.ops.gelu)


def merger_without_norm(patch: Patch) -> None:
    patch.layer("RMSNorm", lambda layer, x, y: patch.backend.like(x, y) if layer.path.endswith(".ln_q") else y)


def merger_columns_first(patch: Patch) -> None:
    """Of the patches of a slot."""
    owner = patch.backend.network("qwen_vl_vision").Merger

    def exchanged(call: Any, layer: Any, x: Any) -> Any:
        return call(layer, x.reshape(1, -1, 2, 2, x.shape[-1]).swapaxes(2, 3).reshape(x.shape))

    patch.around(owner, patch.backend.calls, exchanged)


def windows_not_kept(patch: Patch) -> None:
    """Every layer sees the whole picture."""
    owner = patch.backend.network("qwen_vl_vision").VisionAttention
    patch.around(
        owner, patch.backend.calls, lambda call, layer, x, rope, groups: call(layer, x, rope, [(1, x.shape[1])])
    )


def _full_layers(patch: Patch, change: Any) -> None:
    owner = patch.backend.network("qwen_vl_vision").VisionTower

    def changed(tower: Any) -> None:
        tower.full_layers = change(tower.full_layers)

    patch.built(owner, changed)


def windows_in_every_layer(patch: Patch) -> None:
    _full_layers(patch, lambda layers: ())


def full_layers_one_late(patch: Patch) -> None:
    _full_layers(patch, lambda layers: tuple(layer + 1 for layer in layers))


def _layout(patch: Patch, change: Any) -> None:
    patch.around(qwen_vl_vision, "layout", lambda made, *given: change(made(*given)))


def windows_from_the_other_corner(patch: Patch) -> None:
    def turned(right: Any) -> Any:
        order = len(right.order) - 1 - right.order
        return right._replace(order=order, back=np.argsort(order))

    _layout(patch, turned)


def windows_twice_as_wide(patch: Patch) -> None:
    """In slots what it is in patches."""
    patch.set(QwenVLVisionConfig, "window", property(lambda config: config.window_size // config.patch_size))


def slots_in_the_order_of_windows(patch: Patch) -> None:
    _layout(patch, lambda right: right._replace(back=np.arange(len(right.back))))


def slots_back_to_front(patch: Patch) -> None:
    """The order for its inverse."""
    _layout(patch, lambda right: right._replace(back=right.order))


def patch_rows_and_columns_swapped(patch: Patch) -> None:
    patch.around(vision_tower, "blockwise", lambda made, *given: made(*given)[:, ::-1])


def patch_rope_row_by_row(patch: Patch) -> None:
    """For block by block."""
    patch.set(vision_tower, "blockwise", lambda merge, rows, columns: np.indices((rows, columns)).reshape(2, -1).T)


def patch_rope_not_by_window(patch: Patch) -> None:
    patch.around(
        qwen_vl_vision,
        "by_slot",
        lambda made, values, *given: values if values.shape[-1] <= TOWER else made(values, *given),
    )


def patch_theta_of_the_text(patch: Patch) -> None:
    patch.set(vision_tower, "ROPE_THETA", 1e6)


# The picture as the tower takes it


def picture_of_another_mean(patch: Patch) -> None:
    """Qwen3-VL's."""
    third = patches.QWEN3_VL
    patch.set(variants, "QWEN2_VL", patches.QWEN2_VL._replace(mean=third.mean, std=third.std))


def _patches(patch: Patch, change: Any) -> None:
    def changed(made: Any, *given: Any) -> Any:
        values, rows, columns = made(*given)
        return np.ascontiguousarray(change(values, rows, columns)).reshape(values.shape), rows, columns

    patch.around(patches, "patches", changed)


def patch_channels_last(patch: Patch) -> None:
    _patches(patch, lambda values, rows, columns: values.reshape(len(values), 3, -1).swapaxes(1, 2))


def patches_row_by_row(patch: Patch) -> None:
    def raster(values: Any, rows: int, columns: int) -> Any:
        return values.reshape(rows // 2, columns // 2, 2, 2, -1).transpose(0, 2, 1, 3, 4)

    _patches(patch, raster)


def copy_of_half_the_size(patch: Patch) -> None:
    patch.around(references, "copy", lambda made, picture, area: made(picture, area // 2))


# The prompt


def pictures_numbered_as_text(patch: Patch) -> None:
    patch.set(rope, "picture_positions", lambda length, places: np.repeat(np.arange(length)[:, None], 3, axis=1))


def text_goes_on_behind_the_slots(patch: Patch) -> None:
    """For behind the longer side of a picture."""

    def further(made: Any, length: int, places: Any) -> Any:
        positions = made(length, places)
        for start, rows, columns in places:
            positions[start + rows * columns :] += rows * columns - max(rows, columns)
        return positions

    patch.around(rope, "picture_positions", further)


def picture_rows_and_columns_swapped(patch: Patch) -> None:
    patch.around(rope, "picture_positions", lambda made, *given: made(*given)[:, [0, 2, 1]])


def picture_frames_counted_in_rows(patch: Patch) -> None:
    patch.around(rope, "picture_positions", lambda made, *given: made(*given)[:, [1, 0, 2]])


def sections_of_rope_interleaved(patch: Patch) -> None:
    """As Qwen3-VL's are."""
    patch.set(rope, "section_axes", rope.interleaved_axes)


def slots_one_token_late(patch: Patch) -> None:
    def late(made: Any, own: Any, ids: Any, places: Any = (), slots: Any = ()) -> Any:
        return made(own, ids, [place._replace(start=place.start + 1) for place in places], slots)

    patch.around(patch.backend.network("decoder").Decoder, "start", late)


def pictures_exchanged_in_the_prompt(patch: Patch) -> None:
    patch.around(
        PictureTexts, "fill", lambda made, own, prompt: made(own, replace(prompt, pictures=prompt.pictures[::-1]))
    )


def all_pictures_the_first(patch: Patch) -> None:
    """By their numbers."""
    patch.set(variants, "_numbered", lambda pictures: f"Picture 1: {VISION}" * pictures)


def template_of_qwen_image(patch: Patch) -> None:
    with_template(patch, "2511", text=variants.DRAWS.text, dropped=variants.DRAWS.dropped)


# The transformer


def zero_cond_t_ignored(patch: Patch) -> None:
    patch.set(qwen_conditioning, "zero_index", lambda config, shapes: None)


def image_at_time_zero(patch: Patch) -> None:
    """For its references."""
    patch.around(qwen_conditioning, "zero_index", lambda made, *given: 1 - made(*given))


def first_reference_alone_at_time_zero(patch: Patch) -> None:
    def first(made: Any, config: Any, shapes: Any) -> Any:
        index = made(config, shapes)
        index[sum(f * h * w for f, h, w in shapes[:2]) :] = 0
        return index

    patch.around(qwen_conditioning, "zero_index", first)


def time_zero_of_the_first_step(patch: Patch) -> None:
    def same(made: Any, *given: Any) -> Any:
        rows = made(*given)
        rows[-1] = rows[0]
        return rows

    patch.around(qwen_conditioning, "time_rows", same)


def _positions(patch: Patch, change: Any) -> None:
    """Makes the positions of the references what `change` makes of them."""

    def moved(made: Any, *given: Any) -> Any:
        positions = made(*given).astype(float)
        seen = positions[:, 0] > 0
        positions[seen] = change(positions[seen])
        return positions

    patch.around(rope, "image_positions", moved)


def references_half_a_token_off(patch: Patch) -> None:
    _positions(patch, lambda positions: positions + np.array([0, 0.5, 0.5]))


def references_in_the_frame_of_the_image(patch: Patch) -> None:
    _positions(patch, lambda positions: positions * [0, 1, 1])


def references_in_one_frame(patch: Patch) -> None:
    _positions(patch, lambda positions: np.minimum(positions, [1, 999, 999]))


def text_counts_from_the_image(patch: Patch) -> None:
    patch.around(rope, "text_positions", lambda made, shapes, *rest: made(shapes[:1], *rest))


def references_exchanged(patch: Patch) -> None:
    patch.around(PictureInputs, "seen", lambda made, own, request: made(own, request)[::-1])


SMALL = ("bf16",)  # what it changes is less than a bfloat16 passport allows a step or a text
_ALL = (
    Mutant(tower_attention_scale, "the tower's attention 1 % too large in scale"),
    Mutant(tower_not_rotated, "no RoPE in the tower"),
    Mutant(tower_rope_of_pairs, "the tower's RoPE on pairs for halves"),
    Mutant(tower_values_first, "the tower's values before queries and keys"),
    Mutant(tower_heads_first, "the tower's queries, keys and values side by side in each head"),
    Mutant(tower_without_qkv_bias, "no bias of the tower's queries, keys and values"),
    Mutant(tower_gate_and_values_exchanged, "gate and values of the tower's feed-forward exchanged"),
    Mutant(tower_norms_centred, "the tower's norms with the mean removed"),
    Mutant(tower_eps, "epsilon 1e-5 for 1e-6 of the tower's norms"),
    Mutant(tower_of_one_tap, "one of the patch kernel's two taps in time"),
    Mutant(merger_gelu_tanh, "the merger's GELU by its tanh form"),
    Mutant(merger_without_norm, "the merger without its norm"),
    Mutant(merger_columns_first, "columns before rows of a slot's patches"),
    Mutant(windows_not_kept, "every layer of the tower sees the whole picture"),
    *ARITHMETIC,
    Mutant(windows_in_every_layer, "no layer of the tower sees the whole picture", picture=True),
    Mutant(full_layers_one_late, "the layer behind sees the whole picture", picture=True),
    Mutant(windows_from_the_other_corner, "windows counted from the bottom right", picture=True),
    Mutant(windows_twice_as_wide, "windows twice as wide", picture=True),
    Mutant(slots_in_the_order_of_windows, "slots in the order of windows", picture=True),
    Mutant(slots_back_to_front, "the order of windows for its inverse", picture=True),
    Mutant(patch_rows_and_columns_swapped, "rows and columns of patches exchanged in RoPE", picture=True),
    Mutant(patch_rope_row_by_row, "RoPE of patches row by row for block by block", picture=True),
    Mutant(patch_rope_not_by_window, "RoPE of patches not in the order of windows", picture=True),
    Mutant(patch_theta_of_the_text, "the language model's theta in the tower", picture=True),
    Mutant(picture_of_another_mean, "a picture normalized as Qwen3-VL's", picture=True),
    Mutant(patch_channels_last, "channels last in a patch", picture=True),
    Mutant(patches_row_by_row, "patches row by row for block by block", picture=True),
    Mutant(copy_of_half_the_size, "the text encoder's copy of half the pixels", picture=True),
    Mutant(pictures_numbered_as_text, "slots numbered as text", picture=True),
    Mutant(text_goes_on_behind_the_slots, "text that goes on behind the number of slots", picture=True),
    Mutant(picture_rows_and_columns_swapped, "rows and columns of slots exchanged", picture=True),
    Mutant(picture_frames_counted_in_rows, "frames and rows of slots exchanged", picture=True),
    Mutant(sections_of_rope_interleaved, "the sections of RoPE interleaved", picture=True, refused=SMALL),
    Mutant(slots_one_token_late, "slots one token late", picture=True),
    Mutant(pictures_exchanged_in_the_prompt, "the pictures exchanged in the prompt", picture=True),
    Mutant(all_pictures_the_first, "every picture called the first", picture=True),
    Mutant(template_one_token_off("2511"), "the template cut one token off", picture=True, refused=SMALL),
    Mutant(template_of_qwen_image, "Qwen-Image's template", picture=True),
    Mutant(zero_cond_t_ignored, "references at the time of the image", picture=True),
    Mutant(image_at_time_zero, "the image at time 0 for its references", picture=True),
    Mutant(first_reference_alone_at_time_zero, "the first reference alone at time 0", picture=True),
    Mutant(time_zero_of_the_first_step, "references at the time of the first step", picture=True),
    Mutant(references_half_a_token_off, "references off by half a token", picture=True, refused=SMALL),
    Mutant(references_in_the_frame_of_the_image, "references in the frame of the image", picture=True),
    Mutant(references_in_one_frame, "all references in one frame", picture=True, refused=SMALL),
    Mutant(text_counts_from_the_image, "text that counts from the image alone", picture=True),
    Mutant(references_exchanged, "the references in another order", picture=True),
    Mutant(reference_a_sample, "a sample of a reference's latents for their mean", picture=True),
    Mutant(velocity_of_other_tokens, "the velocity of other tokens", picture=True),
)
MUTANTS = tuple(replace(mutant, refused=(*mutant.refused, "fp16")) for mutant in _ALL)


def few_pixels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(references, "AREA", 96**2)


def judge(tiny: Mapping[str, Path], scratch: Path) -> Judge:
    return Judge(tiny["qwen-2511"], setting=few_pixels, pictures=2)
