"""Faults in Qwen-Image-2.1: in its transformer with the kept keys and values of the text, in the vision tower of its
text encoder, in its VAE of 16 x 16 pixels, their weights, and the loop around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimg.common.families.qwen_image_21 import model, references
from qwenimg.common.networks.denoisers import qwen21_conditioning
from qwenimg.common.networks.denoisers.qwen21_conditioning import SLOT
from qwenimg.common.networks.encoders import qwen3_vl_vision, vision_tower
from qwenimg.common.networks.vaes.qwen21_vae import ResidualLevel
from qwenimg.common.numbers import noise, rope
from qwenimg.common.parts.texts.picture_texts import PictureTexts
from qwenimg.common.pictures import patches, pixels
from support import mutants_qwen_edit as edit
from support import mutants_shared as shared
from support import oracle_qwen21
from support.mutant import Judge, Mutant, Patch, PictureJudge, Scenes
from support.mutants_flux2 import text_not_normed, time_off
from support.mutants_zimage import feed_forward_exchanged, gates_before_scales, gates_swapped, gates_without_tanh
from support.tiny_qwen21 import see_small_pictures


def _class(patch: Patch, name: str, network: str = "qwen21_dit") -> Any:
    return getattr(patch.backend.network(network), name)


# The transformer


def scale_without_one(patch: Patch) -> None:
    patch.around(patch.backend.ops, "norm_scaled", lambda made, x, scale, *rest: made(x, scale - 1, *rest))


def time_not_activated(patch: Patch) -> None:
    """By SiLU, behind its embedding."""
    owner = _class(patch, "TimeEmbed")
    patch.set(owner, patch.backend.calls, lambda layer, features: layer.timestep_embedder(features))


def text_gain_without_one(patch: Patch) -> None:
    """It is stored minus one."""
    ops, calls = patch.backend.ops, patch.backend.calls
    patch.set(ops.CentredRMSNorm, calls, getattr(ops.RMSNorm, calls))


def text_gelu_erf(patch: Patch) -> None:
    patch.set(patch.backend.ops, "gelu", patch.backend.ops.gelu_erf)


def block_eps(patch: Patch) -> None:
    def changed(block: Any) -> None:
        block.eps *= 10

    patch.built(_class(patch, "TransformerBlock"), changed)


# Text and references in front of the image


def _runs(patch: Patch, change: Any) -> None:
    """Makes each run of tokens in front of the image what `change` makes of it."""

    def changed(call: Any, layer: Any, x: Any, table: Any, runs: Any) -> Any:
        return call(layer, x, table, [change(*run) for run in runs])

    patch.around(_class(patch, "Attention"), "context", changed)


def text_not_causal(patch: Patch) -> None:
    """In the transformer."""
    _runs(patch, lambda start, end, causal: (start, end, False))


def references_causal(patch: Patch) -> None:
    _runs(patch, lambda start, end, causal: (start, end, True))


def context_at_the_time_of_the_image(patch: Patch) -> None:
    def same(call: Any, block: Any, img: Any, context: Any, mods: Any, *rest: Any) -> Any:
        return call(block, img, context, (mods[0], mods[0]), *rest)

    patch.around(_class(patch, "TransformerBlock"), patch.backend.calls, same)


def kept_keys_not_rotated(patch: Patch) -> None:
    def plain(call: Any, layer: Any, x: Any, *rest: Any) -> Any:
        out, (_, v) = call(layer, x, *rest)
        return out, (patch.backend.like(layer.norm_k(layer.heads(layer.to_k(x))), v), v)

    patch.around(_class(patch, "Attention"), "context", plain)


def first_kept_token_not_seen(patch: Patch) -> None:
    """By the image."""

    def without(call: Any, layer: Any, x: Any, table: Any, before: Any) -> Any:
        return call(layer, x, table, (before[0][:, 1:], before[1][:, 1:]))

    patch.around(_class(patch, "Attention"), "image", without)


def kept_of_the_block_before(patch: Patch) -> None:
    """In every step but the first."""
    owner = _class(patch, "Qwen21Transformer")

    def late(
        call: Any, own: Any, latents: Any, features: Any, context: Any, ropes: Any, runs: Any, known: Any, *more: Any
    ) -> Any:
        return call(own, latents, features, context, ropes, runs, [*known[-1:], *known[:-1]], *more)

    patch.around(owner, patch.backend.calls, late)


def kept_of_the_other_branch(patch: Patch) -> None:
    """Keys and values of the first one, in both."""
    known: list[Any] = []
    patch.around(_class(patch, "Runner"), "condition", lambda made, *given: replace(made(*given), known=known))


def _layout(patch: Patch, change: Any) -> None:
    """Makes of a prompt's layout, in place, what `change` makes of it and of the places of references."""

    def changed(made: Any, length: int, places: Any, grid: Any) -> Any:
        right = made(length, places, grid)
        return change(right, places) or right

    patch.around(qwen21_conditioning, "layout", changed)


def image_in_the_frame_of_the_text(patch: Patch) -> None:
    """From 0."""
    _layout(patch, lambda right, places: right._replace(image=right.image * [0, 1, 1]))


def image_one_frame_later(patch: Patch) -> None:
    _layout(patch, lambda right, places: right._replace(image=np.add(right.image, [1, 0, 0])))


def image_from_the_corner(patch: Patch) -> None:
    patch.set(rope, "centred", np.arange)


def rows_and_columns_swapped(patch: Patch) -> None:
    _layout(patch, lambda right, places: right._replace(image=right.image[:, [0, 2, 1]]))


def text_counts_slots(patch: Patch) -> None:
    """Behind a reference, for its tokens."""

    def nearer(right: Any, places: Any) -> Any:
        context, more = right.context.copy(), 0
        for start, rows, columns in places:
            more += SLOT**2 * rows * columns - rows * columns
            context[start + rows * columns + more :] -= max(rows, columns)
        return right._replace(context=context)

    _layout(patch, nearer)


def references_one_state_late(patch: Patch) -> None:
    patch.around(
        PictureTexts,
        "places",
        lambda made, *given: [place._replace(start=place.start + 1) for place in made(*given)],
    )


# The vision tower


def _tower(patch: Patch, name: str) -> Any:
    return _class(patch, name, "qwen3_vl_vision")


def deep_slots_dropped(patch: Patch) -> None:
    patch.around(_tower(patch, "Qwen3PictureEncoder"), "added", lambda added, own, x, *rest: x)


def deep_slots_exchanged(patch: Patch) -> None:
    def exchanged(call: Any, *given: Any) -> Any:
        slots = call(*given)
        return patch.backend.join([slots[:1], slots[2:], slots[1:2]], 0)

    patch.around(_tower(patch, "VisionTower"), patch.backend.calls, exchanged)


def deep_slots_of_the_layer_behind(patch: Patch) -> None:
    def changed(tower: Any) -> None:
        tower.deep_layers = tuple(layer + 1 for layer in tower.deep_layers)

    patch.built(_tower(patch, "VisionTower"), changed)


def deep_slots_put_for_added(patch: Patch) -> None:
    def put(added: Any, own: Any, x: Any, places: Any, slots: Any) -> Any:
        instead = [slot - x[:, at.start : at.start + slot.shape[1]] for at, slot in zip(places, slots, strict=True)]
        return added(own, x, places, instead)

    patch.around(_tower(patch, "Qwen3PictureEncoder"), "added", put)


def tower_eps(patch: Patch) -> None:
    patch.set(patch.backend.network("qwen3_vl_vision"), "NORM_EPS", 1e-5)


def merger_without_norm(patch: Patch) -> None:
    def plain(layer: Any, x: Any, y: Any) -> Any:
        return patch.backend.like(x, y) if layer.path.endswith(".merger.norm") else y

    patch.layer("LayerNorm", plain)


def _table(patch: Patch, change: Any) -> None:
    """Makes the places of patches in the table of positions what `change` makes of them."""
    patch.around(qwen3_vl_vision, "stretched", lambda made, config, *grid: change(made(config, *grid), config.side))


def table_not_added(patch: Patch) -> None:
    _table(patch, lambda right, side: right._replace(shares=0 * right.shares))


def table_not_interpolated(patch: Patch) -> None:
    """The nearest row for four."""
    _table(patch, lambda right, side: right._replace(shares=np.eye(4)[right.shares.argmax(1)]))


def table_rows_and_columns_swapped(patch: Patch) -> None:
    _table(patch, lambda right, side: right._replace(rows=right.rows % side * side + right.rows // side))


def table_one_patch_further(patch: Patch) -> None:
    """Its end is behind the picture's last patch."""
    blockwise = vision_tower.blockwise

    def edges(made: Any, config: Any, rows: int, columns: int) -> Any:
        right = made(config, rows + 2, columns + 2)
        places = [tuple(place) for place in blockwise(config.merge_size, rows + 2, columns + 2)]
        kept = [places.index(tuple(place)) for place in blockwise(config.merge_size, rows, columns)]
        return right._replace(rows=right.rows[kept], shares=right.shares[kept])

    patch.around(qwen3_vl_vision, "stretched", edges)


def patch_rows_and_columns_swapped(patch: Patch) -> None:
    """The two halves of the angles."""

    def swapped(made: Any, *given: Any) -> Any:
        return tuple(np.roll(part, part.shape[1] // 2, 1) for part in made(*given))

    patch.around(vision_tower, "patch_rope", swapped)


def sections_of_rope_in_a_row(patch: Patch) -> None:
    """As Qwen2.5-VL's are."""
    patch.set(rope, "interleaved_axes", rope.section_axes)


def picture_of_another_mean(patch: Patch) -> None:
    """Qwen2.5-VL's."""
    form = model.AROUND.form._replace(mean=patches.QWEN2_VL.mean, std=patches.QWEN2_VL.std)
    patch.set(model, "AROUND", replace(model.AROUND, form=form))


def _template(patch: Patch, **changes: Any) -> None:
    patch.set(model, "AROUND", replace(model.AROUND, template=replace(model.AROUND.template, **changes)))


def template_one_token_off(patch: Patch) -> None:
    _template(patch, dropped=model.AROUND.template.dropped - 1)


def pictures_without_names(patch: Patch) -> None:
    patch.set(model, "AROUND", replace(model.AROUND, before=lambda pictures: pictures * model.VISION))


# The VAE


def shortcut_of_the_first_frame(patch: Patch) -> None:
    def first(level: ResidualLevel) -> tuple[int, ...]:
        repeats = level.neighbours * level.outputs // level.inputs
        firsts = (output * level.frames * 4 for output in range(level.outputs))
        return tuple((start + pixel) // repeats for start in firsts for pixel in range(4))

    patch.set(ResidualLevel, "spread", property(first))


def no_shortcut_up(patch: Patch) -> None:
    patch.around(patch.backend.ops, "spread_channels", lambda made, *given: 0 * made(*given))


def shortcut_without_the_frame_of_zeros(patch: Patch) -> None:
    patch.around(
        patch.backend.ops, "averaged_patches", lambda made, x, channels, frames: frames * made(x, channels, frames)
    )


def shortcut_frames_exchanged(patch: Patch) -> None:
    """The zeros behind the picture."""

    def behind(made: Any, x: Any, channels: int, frames: int) -> Any:
        axis = patch.backend.axes()[0]
        made_ = made(x, channels, frames)
        return patch.backend.lib.roll(made_, 1, axis) if frames > 1 else made_

    patch.around(patch.backend.ops, "averaged_patches", behind)


def channels_exchanged(patch: Patch) -> None:
    """Red and blue."""
    patch.around(pixels, "to_uint8", lambda made, values: made(values[[2, 1, 0, 3]]))


# Soft alpha


def text_sees_no_alpha(patch: Patch) -> None:
    """The colours behind it."""
    patch.set(pixels, "over_white", lambda picture: np.ascontiguousarray(picture[..., :3]))


def vae_sees_no_alpha(patch: Patch) -> None:
    patch.set(
        pixels, "with_alpha", lambda picture: np.dstack([picture[..., :3], np.full(picture.shape[:2], 255, np.uint8)])
    )


def reference_on_white(patch: Patch) -> None:
    """For the VAE too."""
    patch.around(references, "values", lambda made, picture: made(pixels.over_white(picture)))


_ALL = (
    Mutant(shared.sines_first("diffusion_transformer", "TimestepEmbedding"), "sines before cosines of the time"),
    Mutant(time_not_activated, "no SiLU behind the embedding of the time"),
    Mutant(scale_without_one, "`scale` for `1 + scale`"),
    Mutant(gates_swapped, "the gates of attention and feed-forward exchanged"),
    Mutant(gates_before_scales, "gates before scales"),
    Mutant(gates_without_tanh, "gates without tanh"),
    Mutant(feed_forward_exchanged, "the two parts of the feed-forward exchanged"),
    Mutant(text_gain_without_one, "the gain of the text's norm without the one"),
    Mutant(text_gelu_erf, "GELU by the error function for the text"),
    Mutant(block_eps, "epsilons of blocks ten times too large"),
    *shared.ATTENTION_WITH_ROPE,
    Mutant(text_not_causal, "text that sees what comes in the transformer"),
    Mutant(references_causal, "references whose tokens see those before them alone"),
    Mutant(kept_keys_not_rotated, "kept keys not rotated"),
    Mutant(first_kept_token_not_seen, "the first kept token not seen by the image"),
    Mutant(text_not_normed, "no norm of the text encoder's queries and keys"),
    Mutant(shared.keys_not_shared, "the text encoder's shared heads of keys dealt out in another order"),
    Mutant(edit.tower_not_rotated, "no RoPE in the tower"),
    Mutant(edit.tower_rope_of_pairs, "the tower's RoPE on pairs for halves"),
    Mutant(edit.tower_values_first, "the tower's values before queries and keys"),
    Mutant(shared.gelu_erf, "GELU by the error function in the tower"),
    Mutant(tower_eps, "epsilon 1e-5 for 1e-6 of the tower's norms"),
    Mutant(edit.merger_gelu_tanh, "the mergers' GELU by its tanh form"),
    Mutant(merger_without_norm, "the last merger without its norm"),
    Mutant(shortcut_of_the_first_frame, "the VAE's shortcut up from the first frame for the last"),
    Mutant(no_shortcut_up, "the VAE without its shortcut up"),
    Mutant(shortcut_without_the_frame_of_zeros, "the VAE's shortcut down without the frame of zeros"),
    Mutant(shortcut_frames_exchanged, "the VAE's shortcut down one channel off"),
    Mutant(shared.kernel_turned, "rows and columns of kernels exchanged"),
    Mutant(shared.norm_without_root, "the VAE's norm without the root of the channels"),
    Mutant(shared.queries_and_keys_swapped, "the VAE's queries, keys and values in another order"),
    Mutant(shared.padded_on_the_other_side, "zeros above and left for below and right"),
    *shared.ARITHMETIC,
    Mutant(context_at_the_time_of_the_image, "text and references at the time of the image", picture=True),
    Mutant(kept_of_the_block_before, "keys and values kept of the block before", picture=True),
    Mutant(kept_of_the_other_branch, "keys and values kept of the other branch", picture=True, refused=edit.SMALL),
    Mutant(image_in_the_frame_of_the_text, "the image in the text's first frame", picture=True),
    Mutant(image_one_frame_later, "the image one frame later", picture=True),
    Mutant(image_from_the_corner, "rows and columns counted from the corner", picture=True),
    Mutant(rows_and_columns_swapped, "rows and columns exchanged", picture=True),
    Mutant(text_counts_slots, "text that counts a reference's slots for its tokens", picture=True),
    Mutant(references_one_state_late, "references one text state late", picture=True),
    Mutant(deep_slots_dropped, "no deep slots", picture=True),
    Mutant(deep_slots_exchanged, "deep slots in another order", picture=True),
    Mutant(deep_slots_of_the_layer_behind, "deep slots of the tower's layer behind", picture=True),
    Mutant(deep_slots_put_for_added, "deep slots put for added", picture=True),
    Mutant(table_not_added, "the tower's table of positions not added", picture=True),
    Mutant(table_not_interpolated, "the nearest of the tower's table for four", picture=True),
    Mutant(table_rows_and_columns_swapped, "rows and columns of the tower's table exchanged", picture=True),
    Mutant(table_one_patch_further, "the tower's table stretched past the picture", picture=True),
    Mutant(patch_rows_and_columns_swapped, "rows and columns of patches exchanged in RoPE", picture=True),
    Mutant(edit.patch_rope_row_by_row, "RoPE of patches row by row for block by block", picture=True),
    Mutant(
        sections_of_rope_in_a_row, "the sections of RoPE in a row for interleaved", picture=True, refused=edit.SMALL
    ),
    Mutant(edit.pictures_numbered_as_text, "slots numbered as text", picture=True),
    Mutant(edit.text_goes_on_behind_the_slots, "text that goes on behind the number of slots", picture=True),
    Mutant(
        edit.picture_rows_and_columns_swapped, "rows and columns of slots exchanged", picture=True, refused=edit.SMALL
    ),
    Mutant(picture_of_another_mean, "a picture normalized as Qwen2.5-VL's", picture=True),
    Mutant(template_one_token_off, "the template cut one token off", picture=True),
    Mutant(pictures_without_names, "pictures without their names in the prompt", picture=True),
    Mutant(shared.velocity_sign("qwen21_dit"), "the velocity's sign", picture=True),
    Mutant(time_off, "times 0.1 % off", picture=True),
    *shared.NOISE_LEVELS,
    Mutant(shared.cfg_branches_swapped(model), "the branches of guidance exchanged", picture=True),
    Mutant(shared.cfg_from_the_prompt(model), "guidance from the prompt's prediction", picture=True),
    Mutant(shared.no_latents_mean, "the latents' mean not added", picture=True),
    Mutant(shared.latents_std_off(0.01), "the latents' deviation 1 % off", picture=True),
    Mutant(shared.vae_scale, "latents 10 % off", picture=True),
    Mutant(channels_exchanged, "red and blue exchanged", picture=True),
    Mutant(shared.pixels_truncated, "pixels truncated, not rounded", picture=True),
    Mutant(text_sees_no_alpha, "the text encoder sees no alpha", scene="alpha"),
    Mutant(vae_sees_no_alpha, "the VAE sees no alpha", scene="alpha"),
    Mutant(reference_on_white, "the VAE sees a picture on white", scene="alpha"),
)
MUTANTS = tuple(replace(mutant, refused=(*mutant.refused, "fp16")) for mutant in _ALL)

RNG = np.random.default_rng(5)
SOFT = np.kron(RNG.integers(0, 256, (4, 5, 4), np.uint8), np.ones((12, 12, 1), np.uint8))
PROMPT, STEPS, SEED = "make it red", 2, 7


def judge(tiny: Mapping[str, Path], scratch: Path) -> Scenes:
    folder = tiny["qwen21"]

    def theirs() -> tuple[Any, Any]:
        return oracle_qwen21.generate(
            folder, PROMPT, [SOFT], noise.normal((1, 12, 4, 2), seed=SEED), steps=STEPS, guidance=1.0
        )

    asked = {"prompt": PROMPT, "width": 32, "height": 64, "steps": STEPS, "guidance": 1.0, "seed": SEED}
    passport = Judge(folder, setting=see_small_pictures, pictures=2, negative_prompt="a ring")
    return Scenes({"": passport, "alpha": PictureJudge(folder, asked | {"image": SOFT}, theirs, see_small_pictures)})
