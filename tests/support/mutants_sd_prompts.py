"""Faults in prompts of Stable Diffusion that are no words: pictures by an IP-Adapter, and vectors of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.families.stable_diffusion.ip_adapter import PicturePrompts
from qwenimg.common.parts.texts import clip_texts
from support.mutant import Patch

# Pictures


def keys_for_values(patch: Patch) -> None:
    """Keys and values of pictures exchanged."""
    pair = patch.backend.network("ip_adapter").CrossAttentionPair
    patch.around(pair, patch.backend.calls, lambda call, layer, tokens: call(layer, tokens)[::-1])


def projection_not_normed(patch: Patch) -> None:
    """Tokens of a picture before their norm."""

    def tokens(layer: Any, features: Any) -> Any:
        return layer.proj(features).reshape(features.shape[0], layer.tokens, -1)

    patch.set(patch.backend.network("ip_adapter").LinearProjection, patch.backend.calls, tokens)


def everywhere(patch: Patch) -> None:
    """The branch of the negative prompt is given the picture in the UNet."""

    def all_rows(call: Any, runner: Any, condition: Any, pictures: Any, rows: Sequence[int]) -> Any:
        return call(runner, condition, pictures, [0] * len(rows))

    patch.around(patch.backend.network("unet").Runner, "with_pictures", all_rows)


def empty_is_the_picture(patch: Patch) -> None:
    """The picture stands for the empty one, before keys and values are made."""

    def repeated(features: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([features[:-1], features[:1]])

    patch.around(PicturePrompts, "_features", lambda made, *given: repeated(made(*given)))


def encoder_states_of_the_last_layer(patch: Patch) -> None:
    """States behind the last layer of the image encoder, not before it."""

    def last(call: Any, encoder: Any, x: Any) -> Any:
        states = call(encoder, x)[1]
        return states, states

    patch.around(patch.backend.network("clip_vision").Encoder, patch.backend.calls, last)


# Embeddings


def vectors_in_reverse(patch: Patch) -> None:
    patch.around(clip_texts, "_vectors", lambda made, chunks, vectors: made(chunks, [rows[::-1] for rows in vectors]))


def vectors_one_late(patch: Patch) -> None:
    def late(made: Any, chunks: Any, vectors: Any) -> Any:
        placed = made(chunks, vectors)
        return ([(chunk, at + 1) for chunk, at in placed[0]], placed[1]) if placed else placed

    patch.around(clip_texts, "_vectors", late)


def pooled_at_the_embedding(patch: Patch) -> None:
    """The pooled state at the last vector, as at the largest id of a vocabulary with added tokens."""
    network = patch.backend.network("clip")
    true_position, last = network.eos_position, [None]

    def encode(call: Any, runner: Any, ids: Any, skipped: int, normed: bool, places: Any = (), *vectors: Any) -> Any:
        last[0] = max((at for _, at in places), default=None)
        return call(runner, ids, skipped, normed, places, *vectors)

    patch.around(network.Runner, "encode", encode)
    patch.set(
        network,
        "eos_position",
        lambda config, chunk: true_position(config, chunk) if last[0] is None else last[0],
    )
