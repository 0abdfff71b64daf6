"""Prompts as Stable Diffusion's text states: encoded once, kept in the system's memory, joined as a run needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.families.stable_diffusion.checkpoint import SDModel, TextPart
from qwenimg.common.networks import clip
from qwenimg.common.prompts import weighted as clip_prompt
from qwenimg.common.prompts.weighted import Chunk
from qwenimg.common.runtime import memory
from qwenimg.common.runtime.engine import ClipEncoder
from qwenimg.common.runtime.runtime import Keeper

Float32 = NDArray[np.float32]
KEPT = 2**30  # bytes of encoded prompts


@dataclass(frozen=True, eq=False)
class Encoded:
    """Of one prompt the states [chunks, 77, C] of each text encoder, and the last one's pooled vector [P]."""

    states: tuple[Float32, ...]
    pooled: Float32

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.states) + self.pooled.nbytes


class ClipTexts:
    """The text encoders of one model: loaded when a prompt is new, and freed again."""

    def __init__(self, model: SDModel, keeper: Keeper, make_room: Callable[[int], None]):
        """`make_room` frees what it can where so many bytes are not free."""
        self.model, self.keeper, self.make_room = model, keeper, make_room
        self.tokenizers = [text.words for text in model.texts]
        self._kept: dict[tuple[str, int], Encoded] = {}
        self._announced: list[str] = []

    def announce(self, prompts: Sequence[str], clip_skip: int) -> None:
        """Encodes as many of `prompts` as KEPT holds now, the rest in its turn."""
        self._announced = list(dict.fromkeys(prompts))
        self._encode(self._announced[:1], clip_skip)

    def _encode(self, prompts: Sequence[str], clip_skip: int) -> None:
        """Encodes `prompts` and the empty prompt, whose chunk fills up the shorter ones, and of what was announced as
        much as KEPT holds, unless all that is needed is there."""
        needed = list(dict.fromkeys([*prompts, ""]))
        if all((prompt, clip_skip) in self._kept for prompt in needed):
            return
        if self._held() > KEPT // 2:
            self._kept = {key: self._kept[key] for key in self._kept if key[0] in needed and key[1] == clip_skip}
        new: dict[str, list[list[Chunk]]] = {}
        width, room = sum(text.config.hidden_size for text in self.model.texts), KEPT - self._held()
        after = self._announced.index(needed[0]) if needed[0] in self._announced else len(self._announced)
        for prompt in dict.fromkeys([*needed, *self._announced[after:]]):
            if (prompt, clip_skip) in self._kept:
                continue
            chunks = clip_prompt.prompt_chunks(self.tokenizers, prompt)
            room -= 4 * width * clip_prompt.LENGTH * len(chunks[0])
            if room < 0 and prompt not in needed:
                break
            new[prompt] = chunks
        parts = [
            self._with_one(text, [chunks[i] for chunks in new.values()], clip_skip)
            for i, text in enumerate(self.model.texts)
        ]
        for i, prompt in enumerate(new):
            states = tuple(part[i][0] for part in parts)
            self._kept[prompt, clip_skip] = Encoded(states, parts[-1][i][1])

    def _held(self) -> int:
        return sum(found.nbytes for found in self._kept.values())

    def states(self, prompts: Sequence[str], clip_skip: int = 0) -> tuple[Float32, Float32]:
        """States [B, 77 n, C] with n chunks for all, side by side in C, and pooled vectors [B, P]."""
        self._encode(prompts, clip_skip)
        found = [self._kept[prompt, clip_skip] for prompt in prompts]
        empty = self._kept["", clip_skip]
        count = max(len(one.states[0]) for one in found)
        rows = [_joined(one, empty, count) for one in found]
        return np.stack(rows), np.stack([one.pooled for one in found])

    def close(self) -> None:
        self._kept.clear()

    def _with_one(
        self, text: TextPart, prompts: Sequence[Sequence[Chunk]], clip_skip: int
    ) -> list[tuple[Float32, Float32]]:
        """States and pooled vector of each of `prompts`, given in chunks, by one text encoder."""
        keeper, engine = self.keeper, self.keeper.engine
        skipped, normed = clip.used_states(text.config, self.model.sdxl, clip_skip)
        need = memory.weight_bytes(text.plan, keeper.precision, "text")
        self.make_room(need)
        with keeper.loading("text encoder", need):
            encoder = engine.open("clip", text.config, text.plan, keeper.precision)
        with keeper.timed("encode"):
            found = [self._encoded(encoder, chunks, skipped, normed) for chunks in prompts]
        del encoder
        engine.release()
        return found

    def _encoded(
        self, encoder: ClipEncoder, chunks: Sequence[Chunk], skipped: int, normed: bool
    ) -> tuple[Float32, Float32]:
        """The weighted states [chunks, 77, C] and the first chunk's pooled vector [P]."""
        engine, ids = self.keeper.engine, [chunk.ids for chunk in chunks]
        states, pooled = encoder.encode(ids, skipped, normed)
        self.keeper.check_finite(states, "text encoder", "text", lambda: encoder.encode(ids, skipped, normed)[0])
        weighted = clip_prompt.apply_weights(engine.numpy(states), chunks)
        return weighted.reshape(len(chunks), clip_prompt.LENGTH, -1), engine.numpy(pooled)[0]


def _joined(one: Encoded, empty: Encoded, count: int) -> Float32:
    """Its states side by side in their channels, each with the empty prompt's chunk up to `count`: [77 count, C]."""
    pairs = zip(one.states, empty.states, strict=True)
    return np.concatenate([_filled(states, fill, count) for states, fill in pairs], axis=-1)


def _filled(states: Float32, empty: Float32, count: int) -> Float32:
    """[chunks, 77, C] with the empty prompt's chunk up to `count`, joined: [77 count, C]."""
    joined = np.concatenate([states] + [empty] * (count - len(states)))
    return joined.reshape(-1, joined.shape[-1])
