"""Text states of prompts from one or more CLIPs, concatenated along their channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.shape import Shape
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.parts.texts.states import States, Texts
from qwenimg.common.prompts import inversion, weighted
from qwenimg.common.prompts.inversion import Inversion
from qwenimg.common.prompts.weighted import LENGTH, Chunk
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, ClipEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

Float32 = NDArray[np.float32]


class ClipKey(NamedTuple):
    """A prompt with what its states depend on."""

    prompt: str  # with marks in the place of embeddings
    clip_skip: int  # how many layers are skipped at the end of each CLIP
    inversions: tuple[Inversion, ...] = ()  # by the numbers of their marks


class ClipTexts(Texts[ClipKey]):
    """The text states of CLIPs: of each prompt the states [chunks 77 C] from each text encoder, and the pooled vector
    [P] of the last one. penultimate: see `clip.used_states`."""

    feed_forward = 2
    together: frozenset[str] = frozenset()
    """The names of the networks of a training step that the text encoders are a part of: they stay in memory."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint, *, penultimate: bool):
        """Take the text encoders of `checkpoint`."""
        super().__init__(residents, checkpoint.texts)
        self.penultimate = penultimate
        self._tokenizers = [checkpoint.tokenizers[name] for name in self.encoders]

    def keys(self, prompts: Sequence[str], clip_skip: int, inversions: Sequence[Inversion] = ()) -> list[ClipKey]:
        """Return the keys of `prompts` with the empty prompt as the second, whose chunk pads shorter prompts.
        inversions: those that are marked in the prompts."""
        texts = (inversion.used(prompt, inversions) for prompt in (*prompts[:1], "", *prompts[1:]))
        return [ClipKey(text, clip_skip, used) for text, used in texts]

    def states(
        self, prompts: Sequence[str], clip_skip: int = 0, inversions: Sequence[Inversion] = ()
    ) -> tuple[Float32, Float32]:
        """Return states [B 77n C], all padded to n chunks and concatenated in C, and pooled vectors [B P]."""
        first, empty, *rest = self.arrays(self.keys(prompts, clip_skip, inversions))
        rows = [first, *rest]
        count = max(len(states[0]) for states in rows)
        return np.stack([_joined(states, empty, count) for states in rows]), np.stack([states[-1] for states in rows])

    def learned(self, prompt: str, clip_skip: int, inversions: Sequence[Inversion] = ()) -> tuple[Array, Array]:
        """Return the states [1 77n C] and the pooled vector [1 P] of a prompt as arrays of the backend, so that
        gradients pass; nothing is evaluated."""
        key, engine = self.keys([prompt], clip_skip, inversions)[0], self.runtime.engine
        all_chunks, states = self.chunks(key), list[Array]()
        stages = self.stages([key])
        for i, (name, stage) in enumerate(zip(self.encoders, stages, strict=True)):
            stage = replace(stage, resident=name, keeps=True, co_resident=self.together)
            encoder, _ = self.residents.acquire(stage)
            found, pooled = self._call(name, stage.component.config, encoder, key, all_chunks[i])()
            found = weighted.weighted_array(found, all_chunks[i], engine.array)
            states.append(found.reshape(1, -1, found.shape[-1]).swapaxes(1, 2))
        return engine.join(states).swapaxes(1, 2), pooled[:1]

    def used_states(self, config: CLIPConfig, clip_skip: int) -> tuple[int, bool]:
        """Return which states of a text encoder are used, as `clip.used_states` does. Raises UsageError."""
        return clip.used_states(config, self.penultimate, clip_skip)

    def chunks(self, key: ClipKey) -> list[list[Chunk]]:
        """Return the chunks of a prompt for each text encoder, of 77 tokens each."""
        tokenizers = [files.tokenizer for files in self._tokenizers]
        return weighted.prompt_chunks(tokenizers, key.prompt, [one.count for one in key.inversions])

    def shapes(self, key: ClipKey) -> list[Shape]:
        """Return the shapes of the states of each text encoder, and of the pooled vector."""
        count, configs = len(self.chunks(key)[0]), [component.config for component in self.encoders.values()]
        return [*((count, LENGTH, config.hidden_size) for config in configs), (configs[-1].pooled_dim,)]

    def tokens(self, key: ClipKey) -> list[object]:
        """Return the prompt's tokens with their weights, which states and pooled vectors are used, and the hashes of
        embeddings."""
        embeddings = [one.sha256 for one in key.inversions]
        return [repr(self.chunks(key)), self.penultimate, key.clip_skip, *embeddings]

    def stages(self, keys: Iterable[ClipKey], counted: bool = True) -> list[Stage]:
        """Return the stages that encode `keys`, one for each text encoder; if not `counted`, for one chunk."""
        count = max(len(self.chunks(key)[0]) for key in keys) if counted else 1
        return [self.stage(component, count, LENGTH) for component in self.encoders.values()]

    def encode(self, keys: Sequence[ClipKey]) -> Iterator[States]:
        """Encode `keys` with one text encoder after the other."""
        prompts = [(key, self.chunks(key)) for key in keys]
        parts = [
            list(self.run(stage, partial(self._encoded, i, name, stage.component.config), prompts))
            for i, (name, stage) in enumerate(zip(self.encoders, self.stages(keys), strict=True))
        ]
        for results in zip(*parts, strict=True):
            yield *(states for states, _ in results), results[-1][1]

    def _encoded(
        self, index: int, name: str, config: CLIPConfig, encoder: ClipEncoder, prompt: tuple[ClipKey, list[list[Chunk]]]
    ) -> tuple[Float32, Float32]:
        """Return the weighted states [chunks 77 C] and the first chunk's pooled vector [P] of one text encoder."""
        engine, key, chunks = self.runtime.engine, prompt[0], prompt[1][index]
        encode = self._call(name, config, encoder, key, chunks)
        states, pooled = encode()
        self.runtime.check_finite(states, "text encoder", "text", lambda: encode()[0])
        weighed = weighted.apply_weights(engine.numpy(states), chunks)
        return weighed.reshape(len(chunks), LENGTH, -1), engine.numpy(pooled)[0]

    def _call(
        self, name: str, config: CLIPConfig, encoder: ClipEncoder, key: ClipKey, chunks: list[Chunk]
    ) -> Callable[[], tuple[Array, Array]]:
        """Return the call of a text encoder for a prompt's chunks: states [chunks 77 C], pooled vectors [chunks P]."""
        return partial(
            encoder.encode,
            [chunk.ids for chunk in chunks],
            *self.used_states(config, key.clip_skip),
            *_vectors(chunks, [one.vectors[name] for one in key.inversions]),
        )


def _vectors(chunks: Sequence[Chunk], vectors: Sequence[Float32]) -> tuple[()] | tuple[list[clip.Place], Float32]:
    """Return the places of vectors of embeddings in the chunks, and these vectors [N C]; nothing without any."""
    placed = [((i, at), vectors[one.embedding][one.row]) for i, chunk in enumerate(chunks) for at, one in chunk.vectors]
    return ([place for place, _ in placed], np.stack([vector for _, vector in placed])) if placed else ()


def _joined(states: States, empty: States, count: int) -> Float32:
    """Return the states, each padded with the empty prompt's chunk to `count`, concatenated in C: [77n C]."""
    pairs = zip(states[:-1], empty[:-1], strict=True)
    return np.concatenate([_filled(chunks, fill, count) for chunks, fill in pairs], axis=-1)


def _filled(states: Float32, empty: Float32, count: int) -> Float32:
    """[chunks 77 C] -> [77n C], padded with the empty prompt's chunk to n = `count`."""
    joined = np.concatenate([states] + [empty] * (count - len(states)))
    return joined.reshape(-1, joined.shape[-1])
