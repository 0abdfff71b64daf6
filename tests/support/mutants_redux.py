"""Faults in pictures that are text of Flux.1: in SigLIP, in Redux, and in where their tokens go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.families.flux import redux
from qwenimg.common.families.flux.model import Flux
from qwenimg.common.families.flux.redux import PictureTexts
from qwenimg.common.pictures import patches
from support.mutant import Patch

# The networks


def encoder_without_its_last_layer(patch: Patch) -> None:
    """States before the last layer of the image encoder, as IP-Adapters take them."""

    def before(call: Any, encoder: Any, x: Any) -> Any:
        del call
        for layer in list(encoder.layers)[:-1]:
            x = layer(x)
        return x

    patch.around(patch.backend.network("siglip_vision").Encoder, patch.backend.calls, before)


def states_not_normed(patch: Patch) -> None:
    def states(model: Any, values: Any) -> Any:
        return model.encoder(model.embeddings(values))

    patch.set(patch.backend.network("siglip_vision").SiglipVisionEncoder, patch.backend.calls, states)


def positions_one_late(patch: Patch) -> None:
    """Positions of a class token, which SigLIP has not, before those of the patches."""

    def late(call: Any, layer: Any, values: Any) -> Any:
        table = layer.position_embedding.weight
        return call(layer, values) - table + patch.backend.join([table[:1], table[:-1]], 0)

    patch.around(patch.backend.network("siglip_vision").Embeddings, patch.backend.calls, late)


def no_bias_below(patch: Patch) -> None:
    """The bias of redux_down left out."""

    def tokens(call: Any, model: Any, states: Any) -> Any:
        return call(model, states) - model.redux_down.bias

    patch.around(patch.backend.network("redux").ReduxImageEncoder, patch.backend.calls, tokens)


def no_activation(patch: Patch) -> None:
    def tokens(model: Any, states: Any) -> Any:
        return model.redux_down(model.redux_up(states))

    patch.set(patch.backend.network("redux").ReduxImageEncoder, patch.backend.calls, tokens)


def bias_of_every_layer_left_out(patch: Patch) -> None:
    patch.layer("Linear", lambda layer, x, y: y - layer.bias if layer.path.startswith("redux_") else y)


# Pictures and texts


def picture_cut(patch: Patch) -> None:
    """The square in a picture's middle, as CLIP's processor takes it, in place of the whole picture."""
    side = patches.stretched_square

    def middle(picture: Any, size: int) -> Any:
        rows, columns = picture.shape[:2]
        least = min(rows, columns)
        top, left = (rows - least) // 2, (columns - least) // 2
        return side(picture[top : top + least, left : left + least], size)

    patch.set(redux.patches, "stretched_square", middle)


def rows_and_columns_of_patches_swapped(patch: Patch) -> None:
    def swapped(made: Any, square: NDArray[np.float32], size: int) -> Any:
        return made(square.swapaxes(0, 1), size)

    patch.around(redux.patches, "in_patches", swapped)


def scale_squared(patch: Patch) -> None:
    def twice(seen: Any, *asked: Any) -> Any:
        return [replace(one, scale=one.scale**2) for one in seen(*asked)]

    patch.around(PictureTexts, "seen", twice)


def first_picture_alone(patch: Patch) -> None:
    def first(tokens: Any, own: Any, seen: Any) -> Any:
        return tokens(own, [seen[0], *(replace(one, scale=0.0) for one in seen[1:])])

    patch.around(PictureTexts, "tokens", first)


def tokens_before_the_text(patch: Patch) -> None:
    """All text stands at one place: the image does not change by it."""

    def first(states: Any, model: Any, request: Any) -> Any:
        own, *others = states(model, request)
        count = sum(one.count for one in model.in_text(request)[:1])
        return [patch.backend.join([own[:, -count:], own[:, :-count]], 1), *others]

    patch.around(Flux, "_states", first)


def negative_prompt_sees_it(patch: Patch) -> None:
    def with_tokens(states: Any, model: Any, request: Any) -> Any:
        own, *others = states(model, request)
        count = sum(one.count for one in model.in_text(request)[:1])
        return [own, *(patch.backend.join([one, own[:, -count:]], 1) for one in others)]

    patch.around(Flux, "_states", with_tokens)


def pooled_text_once(patch: Patch) -> None:
    """The pooled text counts once, not once for each picture."""

    def once(pooled: Any, model: Any, request: Any) -> Any:
        _, *others = pooled(model, request)
        return [request.prompt, *others]

    patch.around(Flux, "_pooled", once)
