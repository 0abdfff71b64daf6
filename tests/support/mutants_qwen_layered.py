"""Faults in Qwen-Image-Layered: in how it numbers its frames, in the time with an addition, in the picture that it
takes apart, and in what becomes of its frames. Those of its other parts are Qwen-Image's.

A passport's picture is opaque, and a passport says nothing of --cfg-normalization: faults there are held against
diffusers' layers of a picture with soft alpha.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qwenimg.common.families.qwen_image import layered
from qwenimg.common.families.qwen_image.layered import QwenImageLayered
from qwenimg.common.numbers import noise, packing, rope
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pictures import pixels
from qwenimg.common.pipeline import finish, start
from qwenimg.common.pipeline.models import flow_model
from qwenimg.common.pipeline.models.inputs import PictureInputs
from qwenimg.common.pipeline.steps.guidance import cfg_with_norm
from qwenimg.common.sampling.flow_match import USUAL, FlowLevels
from support import mutants_shared as shared
from support import oracle_layered
from support.mutant import Judge, Mutant, Patch, PictureJudge, Scenes
from support.mutants_qwen import template_one_token_off

# The positions of frames


def _positions(patch: Patch, change: Any) -> None:
    """Makes the positions of image tokens what `change` makes of them and of the frames' number."""

    def moved(made: Any, shapes: Any, *rest: Any) -> Any:
        positions = np.array(made(shapes, *rest))
        change(positions)
        return positions

    patch.around(rope, "image_positions", moved)


def picture_numbered_behind_the_layers(patch: Patch) -> None:
    """As in the other models."""
    patch.around(rope, "image_positions", lambda made, shapes, layered=False: made(shapes))


def picture_in_the_frame_of_the_composite(patch: Patch) -> None:
    def same(positions: Any) -> None:
        positions[positions[:, 0] < 0, 0] = 0

    _positions(patch, same)


def picture_two_frames_before(patch: Patch) -> None:
    def before(positions: Any) -> None:
        positions[positions[:, 0] < 0, 0] = -2

    _positions(patch, before)


def picture_half_a_side_off(patch: Patch) -> None:
    """Its rows and columns counted from the corner."""

    def cornered(positions: Any) -> None:
        seen = positions[:, 0] < 0
        positions[seen, 1:] -= positions[seen, 1:].min(0)

    _positions(patch, cornered)


def layers_in_one_frame(patch: Patch) -> None:
    def together(positions: Any) -> None:
        positions[:, 0] = np.minimum(positions[:, 0], 0)

    _positions(patch, together)


def layers_numbered_back_to_front(patch: Patch) -> None:
    def reversed_(positions: Any) -> None:
        frames = positions[:, 0] >= 0
        positions[frames, 0] = positions[frames, 0].max() - positions[frames, 0]

    _positions(patch, reversed_)


def layers_numbered_from_one(patch: Patch) -> None:
    def later(positions: Any) -> None:
        positions[positions[:, 0] >= 0, 0] += 1

    _positions(patch, later)


def composite_numbered_last(patch: Patch) -> None:
    def last(positions: Any) -> None:
        frames = positions[:, 0] >= 0
        positions[frames, 0] = (positions[frames, 0] - 1) % (positions[frames, 0].max() + 1)

    _positions(patch, last)


def layers_rows_and_columns_swapped(patch: Patch) -> None:
    def swapped(positions: Any) -> None:
        frames = positions[:, 0] >= 0
        positions[frames] = positions[frames][:, [0, 2, 1]]

    _positions(patch, swapped)


def text_counts_from_one_image(patch: Patch) -> None:
    """From behind its rows and columns, and not from behind the frames."""
    patch.around(rope, "text_positions", lambda made, shapes, length, layered=False: made(shapes, length))


def text_counts_the_picture(patch: Patch) -> None:
    """As one frame more."""
    patch.around(
        rope, "text_positions", lambda made, shapes, length, layered=False: made([*shapes, shapes[-1]], length, layered)
    )


# The time with an addition


def addition_ignored(patch: Patch) -> None:
    owner = patch.backend.network("qwen_dit").TimeTextEmbed
    patch.around(owner, patch.backend.calls, lambda call, own, features, *rest: own.timestep_embedder(features))


def addition_of_the_other_kind(patch: Patch) -> None:
    """Of a picture that is taken apart by what the model draws without one."""
    owner = patch.backend.network("qwen_dit").Runner
    patch.around(owner, "modulate", lambda made, own, features, *rest: made(own, features, 1))


def addition_twice(patch: Patch) -> None:
    owner = patch.backend.network("qwen_dit").TimeTextEmbed

    def twice(call: Any, own: Any, features: Any, *rest: Any) -> Any:
        return 2 * call(own, features, *rest) - own.timestep_embedder(features)

    patch.around(owner, patch.backend.calls, twice)


def addition_for_the_time(patch: Patch) -> None:
    owner = patch.backend.network("qwen_dit").TimeTextEmbed

    def alone(call: Any, own: Any, features: Any, *rest: Any) -> Any:
        return call(own, features, *rest) - own.timestep_embedder(features)

    patch.around(owner, patch.backend.calls, alone)


# Noise levels and guidance


def shift_of_qwen_image(patch: Patch) -> None:
    patch.set(QwenImageLayered, "levels", USUAL)


def shift_without_the_root(patch: Patch) -> None:
    patch.set(QwenImageLayered, "levels", FlowLevels(mu=lambda config, tokens, steps: tokens / layered.BASE_TOKENS))


def shift_of_all_frames(patch: Patch) -> None:
    def more(made: Any, config: Any, request: Any, tokens: int, *rest: Any) -> Any:
        return made(config, request, tokens * (request.family_options.layers + 1), *rest)

    patch.around(flow_model, "flow_plan", more)


def guidance_with_norm(patch: Patch) -> None:
    """Without --cfg-normalization."""
    patch.set(layered, "cfg", cfg_with_norm)


def guidance_never_normalized(patch: Patch) -> None:
    patch.around(layered, "cfg_with_norm", lambda guide, *given: layered.cfg(*given))


# The picture


def _picture(patch: Patch, change: Any) -> None:
    """Makes the picture [H, W, 4] that the VAE sees what `change` makes of it."""
    patch.around(pixels, "from_uint8", lambda made, picture: made(np.ascontiguousarray(change(picture))))


def picture_before_alpha(patch: Patch) -> None:
    """Its alpha before its colours."""
    _picture(patch, lambda picture: np.roll(picture, 1, 2))


def picture_with_alpha_in_reverse(patch: Patch) -> None:
    _picture(patch, lambda picture: np.dstack([picture[..., :3], 255 - picture[..., 3]]))


def picture_turned(patch: Patch) -> None:
    _picture(patch, lambda picture: picture[::-1])


def picture_by_nearest_pixels(patch: Patch) -> None:
    def nearest(picture: Any, width: int, height: int) -> Any:
        return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.NEAREST))

    patch.set(pixels, "fit", nearest)


def picture_without_alpha(patch: Patch) -> None:
    _picture(patch, lambda picture: np.dstack([picture[..., :3], np.full_like(picture[..., 3], 255)]))


def picture_on_white(patch: Patch) -> None:
    _picture(patch, lambda picture: pixels.with_alpha(pixels.over_white(picture)))


def picture_premultiplied(patch: Patch) -> None:
    """Its colours multiplied by its alpha."""

    def dark(picture: Any) -> Any:
        colours = picture[..., :3].astype(int) * picture[..., 3:] // 255
        return np.dstack([colours.astype(np.uint8), picture[..., 3]])

    _picture(patch, dark)


def picture_resized_by_channel(patch: Patch) -> None:
    """Its colours not weighted by its alpha."""

    def apart(fit: Any, picture: Any, *size: int) -> Any:
        return np.dstack([fit(np.ascontiguousarray(picture[..., i]), *size) for i in range(picture.shape[2])])

    patch.around(pixels, "fit", apart)


def picture_latents_not_normalized(patch: Patch) -> None:
    """Of the picture: the mean of all latents not taken away."""

    def raw(made: Any, halves: Any, *given: Any) -> Any:
        return made(halves, *given) + 0.1

    patch.around(VAEHalves, "latents", raw)


def picture_not_seen(patch: Patch) -> None:
    owner = patch.backend.network("qwen_dit").Runner

    def without(made: Any, own: Any, texts: Any, shapes: Any, references: Any = ()) -> Any:
        return made(own, texts, shapes, [0 * one for one in references])

    patch.around(owner, "condition", without)


# Frames


def no_frame_for_the_composite(patch: Patch) -> None:
    patch.set(PictureInputs, "frames", lambda own, request: request.family_options.layers)


def one_noise_for_all_frames(patch: Patch) -> None:
    patch.around(start, "noise", lambda made, *given: np.repeat(made(*given)[:1], len(made(*given)), 0))


def noise_by_channels(patch: Patch) -> None:
    """Drawn with frames behind channels."""

    def turned(made: Any, *given: Any) -> Any:
        right = made(*given)
        frames, channels, *sides = right.shape
        return np.ascontiguousarray(right.reshape(channels, frames, *sides).swapaxes(0, 1))

    patch.around(start, "noise", turned)


def frames_packed_back_to_front(patch: Patch) -> None:
    patch.around(packing, "pack_frames", lambda pack, latents: pack(latents[::-1]))


def frames_packed_token_by_token(patch: Patch) -> None:
    def mixed(latents: Any) -> Any:
        tokens = packing.pack(latents)
        return tokens.swapaxes(0, 1).reshape(1, -1, tokens.shape[-1])

    patch.set(packing, "pack_frames", mixed)


def frames_unpacked_back_to_front(patch: Patch) -> None:
    patch.around(packing, "unpack_frames", lambda unpack, *given, **more: unpack(*given, **more)[::-1])


def composite_decoded_as_a_layer(patch: Patch) -> None:
    """For the last."""
    patch.set(finish, "frames", lambda latents: [latents[i : i + 1] for i in range(len(latents) - 1)])


def layers_decoded_back_to_front(patch: Patch) -> None:
    patch.around(finish, "frames", lambda made, latents: made(latents)[::-1])


def layers_composed_back_to_front(patch: Patch) -> None:
    patch.around(pixels, "composed", lambda made, layers: made(layers[::-1]))


def layers_not_composed(patch: Patch) -> None:
    patch.set(pixels, "composed", lambda layers: layers[-1])


def layers_opaque(patch: Patch) -> None:
    """Alpha lost in the VAE's decoder."""
    _decoded(patch, lambda values: np.concatenate((values[:, :3], np.ones_like(values[:, 3:])), axis=1))


def layers_alpha_of_zero_to_one(patch: Patch) -> None:
    """The alpha of layers taken for -1 to 1 as if it were 0 to 1."""
    _decoded(patch, lambda values: np.concatenate((values[:, :3], 2 * values[:, 3:] - 1), axis=1))


def layers_alpha_first(patch: Patch) -> None:
    _decoded(patch, lambda values: np.roll(values, 1, 1))


def _decoded(patch: Patch, change: Any) -> None:
    """Makes the decoded values [1, 4, H, W] of every layer what `change` makes of them."""
    patch.around(VAEHalves, "decode", lambda decode, *given: change(decode(*given)))


SMALL = ("bf16",)  # what it changes is less than twice what a bfloat16 passport allows a step
_ALL = (
    Mutant(addition_ignored, "the addition to the time ignored"),
    Mutant(addition_twice, "the addition to the time twice"),
    Mutant(addition_for_the_time, "the addition in place of the time"),
    Mutant(addition_of_the_other_kind, "the addition of the other kind of picture", picture=True),
    Mutant(picture_numbered_behind_the_layers, "the picture's frame behind the layers'", picture=True, refused=SMALL),
    Mutant(
        picture_in_the_frame_of_the_composite, "the picture in the frame of the composite", picture=True, refused=SMALL
    ),
    Mutant(picture_two_frames_before, "the picture two frames before the composite", picture=True, refused=SMALL),
    Mutant(picture_half_a_side_off, "the picture's tokens counted from the corner", picture=True, refused=SMALL),
    Mutant(layers_in_one_frame, "all layers in one frame", picture=True),
    Mutant(layers_numbered_back_to_front, "layers numbered back to front", picture=True),
    Mutant(layers_numbered_from_one, "layers numbered from one", picture=True),
    Mutant(composite_numbered_last, "the composite's frame behind the layers", picture=True),
    Mutant(layers_rows_and_columns_swapped, "rows and columns of layers exchanged, not the picture's", picture=True),
    Mutant(text_counts_from_one_image, "text that counts from behind one image", picture=True),
    Mutant(text_counts_the_picture, "text that counts one frame more", picture=True),
    Mutant(shift_of_qwen_image, "Qwen-Image's shift of the noise levels", picture=True),
    Mutant(shift_without_the_root, "the shift without its root", picture=True),
    Mutant(shift_of_all_frames, "the shift of all frames' tokens", picture=True),
    Mutant(guidance_with_norm, "guidance with the norm of the prompt's", picture=True, refused=SMALL),
    Mutant(shared.cfg_branches_swapped(layered), "the branches of guidance exchanged", picture=True),
    Mutant(shared.cfg_from_the_prompt(layered), "guidance from the prompt's prediction", picture=True),
    Mutant(picture_before_alpha, "the picture's alpha before its colours", picture=True),
    Mutant(picture_with_alpha_in_reverse, "the picture's alpha in reverse", picture=True),
    Mutant(picture_turned, "the picture upside down", picture=True),
    Mutant(shared.picture_in_0_to_1, "the picture in 0..1 for -1..1", picture=True),
    Mutant(picture_by_nearest_pixels, "the picture resized by the nearest pixels", picture=True),
    Mutant(picture_latents_not_normalized, "the picture's latents 0.1 off", picture=True, refused=SMALL),
    Mutant(picture_not_seen, "the picture's latents not seen", picture=True),
    Mutant(shared.reference_a_sample, "a sample of the picture's latents for their mean", picture=True),
    Mutant(shared.velocity_of_other_tokens, "the velocity of other tokens", picture=True),
    Mutant(template_one_token_off("layered"), "the template cut one token off", picture=True),
    Mutant(no_frame_for_the_composite, "no frame for the composite", picture=True),
    Mutant(one_noise_for_all_frames, "the same noise for all frames", picture=True),
    Mutant(noise_by_channels, "noise with frames behind channels", picture=True),
    Mutant(frames_packed_back_to_front, "frames packed back to front", picture=True),
    Mutant(frames_packed_token_by_token, "frames packed token by token", picture=True),
    Mutant(frames_unpacked_back_to_front, "frames unpacked back to front", picture=True),
    Mutant(composite_decoded_as_a_layer, "the composite decoded for the last layer", picture=True),
    Mutant(layers_decoded_back_to_front, "layers decoded back to front", picture=True),
    Mutant(layers_composed_back_to_front, "layers composed back to front", picture=True),
    Mutant(layers_not_composed, "the last layer for the composition of all", picture=True),
    Mutant(layers_opaque, "the layers' alpha lost", picture=True),
    Mutant(layers_alpha_of_zero_to_one, "the layers' alpha taken for 0..1", picture=True),
    Mutant(layers_alpha_first, "the layers' alpha before their colours", picture=True),
    Mutant(shared.no_latents_mean, "the latents' mean not added", picture=True),
    *shared.PIXELS,
)
MUTANTS = (
    *(replace(mutant, refused=(*mutant.refused, "fp16")) for mutant in _ALL),
    Mutant(picture_without_alpha, "the VAE sees no alpha", scene="soft"),
    Mutant(picture_on_white, "the VAE sees a picture on white", scene="soft"),
    Mutant(picture_premultiplied, "the picture's colours multiplied by its alpha", scene="soft"),
    Mutant(picture_resized_by_channel, "the picture's colours resized without its alpha", scene="soft"),
    Mutant(guidance_never_normalized, "--cfg-normalization ignored", scene="soft"),
)

RNG = np.random.default_rng(11)
PROMPT, NEGATIVE, SEED, LAYERS = "a ring", "a text of what must not be there", 7, 2
ASKED: dict[str, Any] = {"steps": 2, "guidance": 4.0, "negative_prompt": NEGATIVE}
WIDTH, HEIGHT = 64, 48
OFF = 1e-4  # by which final latents may differ from diffusers' (measured without a fault: 1.4e-5)


def soft(height: int, width: int) -> Any:
    """A picture [H, W, 4] of squares of 4 pixels, whose alpha goes from 0 to 255 and back."""
    picture = RNG.integers(0, 256, (height // 4, width // 4, 4), np.uint8).repeat(4, 0).repeat(4, 1)
    picture[..., 3] = np.abs(np.linspace(-255, 255, width)).astype(np.uint8)
    return picture


def judge(tiny: Mapping[str, Path], scratch: Path) -> Scenes:
    folder, picture = tiny["qwen-layered"], soft(60, 96)
    initial = noise.normal((LAYERS + 1, 16, HEIGHT // 8, WIDTH // 8), seed=SEED)

    def theirs() -> tuple[Any, Any]:
        return oracle_layered.generate(folder, PROMPT, picture, initial, normalize=True, **ASKED)

    asked = ASKED | {"prompt": PROMPT, "image": picture, "width": WIDTH, "height": HEIGHT, "seed": SEED}
    asked |= {"layers": LAYERS, "cfg_normalization": 1.0}
    pictures = PictureJudge(folder, asked, theirs, seen=lambda made: np.stack(made.layers), most=OFF)
    # The last of two steps is at the shift's end, whatever the shift: three show it
    return Scenes({"": Judge(folder, pictures=1, steps=3), "soft": pictures})
