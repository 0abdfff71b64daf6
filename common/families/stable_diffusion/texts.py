"""Prompts as Stable Diffusion's text states: encoded once, kept in the system's memory, joined as a run needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.families.stable_diffusion import checkpoint as checkpoints
from qwenimg.common.families.stable_diffusion import memory
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks import clip
from qwenimg.common.prompts import weighted
from qwenimg.common.prompts.clip import CLIPTokenizer
from qwenimg.common.prompts.weighted import Chunk
from qwenimg.common.runtime import text_store
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import ClipEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.runtime.text_cache import TextCache

Float32 = NDArray[np.float32]


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

    def __init__(self, checkpoint: Checkpoint, residents: Residents):
        self.residents, self.runtime = residents, residents.runtime
        self.sdxl = checkpoints.facts(checkpoint).sdxl
        self.encoders = checkpoint.texts
        self._tokenizers = [checkpoint.tokenizers[name] for name in self.encoders]
        self.kept: TextCache[tuple[str, int], Encoded] = TextCache()
        self.width: int = sum(component.config.hidden_size for component in self.encoders.values())

    @property
    def tokenizers(self) -> list[CLIPTokenizer]:
        return [files.tokenizer for files in self._tokenizers]

    def has(self, prompts: Sequence[str], clip_skip: int) -> bool:
        """Whether all of `prompts` are encoded."""
        store = self.runtime.prompts
        needed = [(prompt, clip_skip) for prompt in [*prompts, ""]]
        return all(one in self.kept or (store is not None and store.has(self._key(*one))) for one in needed)

    def announce(self, prompts: Sequence[str], clip_skip: int) -> None:
        """Encodes as many of `prompts` as the cache holds now, the rest in its turn."""
        self.kept.announce([(prompt, clip_skip) for prompt in prompts])
        self._encode(prompts[:1], clip_skip)

    def states(self, prompts: Sequence[str], clip_skip: int = 0) -> tuple[Float32, Float32]:
        """States [B, 77 n, C] with n chunks for all, side by side in C, and pooled vectors [B, P]."""
        self._encode(prompts, clip_skip)
        found = [self.kept[prompt, clip_skip] for prompt in prompts]
        empty = self.kept["", clip_skip]
        count = max(len(one.states[0]) for one in found)
        rows = [_joined(one, empty, count) for one in found]
        return np.stack(rows), np.stack([one.pooled for one in found])

    def renew(self, encoders: dict[str, Component]) -> None:
        """Takes `encoders` in place of those of before, where other LoRAs change them."""
        if not all(self.encoders[name].plan.same_deltas(now.plan) for name, now in encoders.items()):
            self.kept.forget()
        self.encoders = encoders

    def forget(self) -> None:
        """What was encoded under another policy."""
        self.kept.forget()

    def close(self) -> None:
        self.kept.clear()

    def _encode(self, prompts: Sequence[str], clip_skip: int) -> None:
        """Encodes `prompts` and the empty prompt, whose chunk fills up the shorter ones."""
        needed = [(prompt, clip_skip) for prompt in dict.fromkeys([*prompts, ""])]
        missing = [key for key in self.kept.to_encode(needed, lambda key: self._bytes(key[0])) if not self._taken(*key)]
        if not missing:
            return
        chunks = [weighted.prompt_chunks(self.tokenizers, prompt) for prompt, _ in missing]
        parts = [
            self._with_one(component, [chunk[i] for chunk in chunks], clip_skip)
            for i, component in enumerate(self.encoders.values())
        ]
        for i, key in enumerate(missing):
            made = self.kept[key] = Encoded(tuple(part[i][0] for part in parts), parts[-1][i][1])
            if self.runtime.prompts is not None:
                self.runtime.prompts.put(self._key(*key), [*made.states, made.pooled])

    def _taken(self, prompt: str, clip_skip: int) -> bool:
        """Whether the states of `prompt` were on the disk, and are in memory now."""
        if self.runtime.prompts is None:
            return False
        configs = [component.config for component in self.encoders.values()]
        count = len(weighted.prompt_chunks(self.tokenizers, prompt)[0])
        shapes = [(count, weighted.LENGTH, config.hidden_size) for config in configs]
        pooled = (configs[-1].projection_dim or configs[-1].hidden_size,)
        found = self.runtime.prompts.get(self._key(prompt, clip_skip), [*shapes, pooled])
        if found is not None:
            self.kept[prompt, clip_skip] = Encoded(tuple(found[:-1]), found[-1])
        return found is not None

    def _key(self, prompt: str, clip_skip: int) -> str | None:
        """Of the prompt's tokens with their weights, and the layers that are left out."""
        chunks = weighted.prompt_chunks(self.tokenizers, prompt)
        plans = [self.runtime.plan(component) for component in self.encoders.values()]
        return text_store.key(self.runtime, plans, [repr(chunks), self.sdxl, clip_skip])

    def _bytes(self, prompt: str) -> int:
        return 4 * self.width * weighted.LENGTH * self.chunks(prompt)

    def chunks(self, prompt: str) -> int:
        """Of 77 tokens each, in which it is encoded."""
        return len(weighted.prompt_chunks(self.tokenizers, prompt)[0])

    def stages(self, chunks: int) -> list[Stage]:
        """Return the stages that encode a prompt of so many chunks, one for each text encoder."""
        return [self._stage(component, chunks) for component in self.encoders.values()]

    def _stage(self, component: Component, chunks: int) -> Stage:
        config, most = component.config, self.runtime.engine.workspace.score_bytes
        held = scores(config.num_attention_heads, chunks, weighted.LENGTH, most)
        activations = self.runtime.call_bytes(component, memory.text_peak(config, chunks) + held)
        splits = (Split(activations=activations),)
        return Stage(name="text", resident="text encoder", component=component, splits=splits, keeps=False)

    def _with_one(
        self, component: Component, prompts: Sequence[Sequence[Chunk]], clip_skip: int
    ) -> list[tuple[Float32, Float32]]:
        """States and pooled vector of each of `prompts`, given in chunks, by one text encoder."""
        skipped, normed = clip.used_states(component.config, self.sdxl, clip_skip)
        encoder, _ = self.residents.enter(self._stage(component, max(map(len, prompts))))
        with self.runtime.clock.timed("encode"):
            found = [self._encoded(encoder, chunks, skipped, normed) for chunks in prompts]
        del encoder
        self.runtime.engine.release()
        return found

    def _encoded(
        self, encoder: ClipEncoder, chunks: Sequence[Chunk], skipped: int, normed: bool
    ) -> tuple[Float32, Float32]:
        """The weighted states [chunks, 77, C] and the first chunk's pooled vector [P]."""
        engine, ids = self.runtime.engine, [chunk.ids for chunk in chunks]
        states, pooled = encoder.encode(ids, skipped, normed)
        self.runtime.check_finite(states, "text encoder", "text", lambda: encoder.encode(ids, skipped, normed)[0])
        found = weighted.apply_weights(engine.numpy(states), chunks)
        return found.reshape(len(chunks), weighted.LENGTH, -1), engine.numpy(pooled)[0]


def _joined(one: Encoded, empty: Encoded, count: int) -> Float32:
    """Its states side by side in their channels, each with the empty prompt's chunk up to `count`: [77 count, C]."""
    pairs = zip(one.states, empty.states, strict=True)
    return np.concatenate([_filled(states, fill, count) for states, fill in pairs], axis=-1)


def _filled(states: Float32, empty: Float32, count: int) -> Float32:
    """[chunks, 77, C] with the empty prompt's chunk up to `count`, joined: [77 count, C]."""
    joined = np.concatenate([states] + [empty] * (count - len(states)))
    return joined.reshape(-1, joined.shape[-1])
