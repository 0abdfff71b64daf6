"""Text states of prompts from one or more CLIPs, concatenated along their channels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.shape import Shape
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.parts.texts.states import States, Texts
from qwenimg.common.prompts import weighted
from qwenimg.common.prompts.weighted import LENGTH, Chunk
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import ClipEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

Float32 = NDArray[np.float32]
ClipKey = tuple[str, int]  # a prompt, and how many layers are skipped at the end of each CLIP


class ClipTexts(Texts[ClipKey]):
    """The text states of CLIPs: of each prompt the states [chunks 77 C] from each text encoder, and the pooled vector
    [P] of the last one. penultimate: see `clip.used_states`."""

    feed_forward = 2

    def __init__(self, residents: Residents, checkpoint: Checkpoint, *, penultimate: bool):
        """Take the text encoders of `checkpoint`."""
        super().__init__(residents, checkpoint.texts)
        self.penultimate = penultimate
        self._tokenizers = [checkpoint.tokenizers[name] for name in self.encoders]

    def keys(self, prompts: Sequence[str], clip_skip: int) -> list[ClipKey]:
        """Return the keys of `prompts` with the empty prompt as the second, whose chunk pads shorter prompts."""
        return [(prompt, clip_skip) for prompt in (*prompts[:1], "", *prompts[1:])]

    def states(self, prompts: Sequence[str], clip_skip: int = 0) -> tuple[Float32, Float32]:
        """Return states [B 77n C], all padded to n chunks and concatenated in C, and pooled vectors [B P]."""
        first, empty, *rest = self.arrays(self.keys(prompts, clip_skip))
        rows = [first, *rest]
        count = max(len(states[0]) for states in rows)
        return np.stack([_joined(states, empty, count) for states in rows]), np.stack([states[-1] for states in rows])

    def chunks(self, prompt: str) -> list[list[Chunk]]:
        """Return the chunks of `prompt` for each text encoder, of 77 tokens each."""
        return weighted.prompt_chunks([files.tokenizer for files in self._tokenizers], prompt)

    def shapes(self, key: ClipKey) -> list[Shape]:
        """Return the shapes of the states of each text encoder, and of the pooled vector."""
        count, configs = len(self.chunks(key[0])[0]), [component.config for component in self.encoders.values()]
        return [*((count, LENGTH, config.hidden_size) for config in configs), (configs[-1].pooled_dim,)]

    def tokens(self, key: ClipKey) -> list[object]:
        """Return the prompt's tokens with their weights, and which states and pooled vectors are used."""
        prompt, clip_skip = key
        return [repr(self.chunks(prompt)), self.penultimate, clip_skip]

    def stages(self, keys: Iterable[ClipKey], counted: bool = True) -> list[Stage]:
        """Return the stages that encode `keys`, one for each text encoder; if not `counted`, for one chunk."""
        count = max(len(self.chunks(prompt)[0]) for prompt, _ in keys) if counted else 1
        return [self.stage(component, count, LENGTH) for component in self.encoders.values()]

    def encode(self, keys: Sequence[ClipKey]) -> Iterator[States]:
        """Encode `keys` with one text encoder after the other."""
        prompts = [(self.chunks(prompt), clip_skip) for prompt, clip_skip in keys]
        parts = [
            list(self.run(stage, partial(self._encoded, i, stage.component.config), prompts))
            for i, stage in enumerate(self.stages(keys))
        ]
        for results in zip(*parts, strict=True):
            yield *(states for states, _ in results), results[-1][1]

    def _encoded(
        self, index: int, config: CLIPConfig, encoder: ClipEncoder, prompt: tuple[list[list[Chunk]], int]
    ) -> tuple[Float32, Float32]:
        """Return the weighted states [chunks 77 C] and the first chunk's pooled vector [P] of one text encoder."""
        engine, chunks = self.runtime.engine, prompt[0][index]
        skipped, normed = clip.used_states(config, self.penultimate, prompt[1])
        ids = [chunk.ids for chunk in chunks]
        states, pooled = encoder.encode(ids, skipped, normed)
        self.runtime.check_finite(states, "text encoder", "text", lambda: encoder.encode(ids, skipped, normed)[0])
        weighed = weighted.apply_weights(engine.numpy(states), chunks)
        return weighed.reshape(len(chunks), LENGTH, -1), engine.numpy(pooled)[0]


def _joined(states: States, empty: States, count: int) -> Float32:
    """Return the states, each padded with the empty prompt's chunk to `count`, concatenated in C: [77n C]."""
    pairs = zip(states[:-1], empty[:-1], strict=True)
    return np.concatenate([_filled(chunks, fill, count) for chunks, fill in pairs], axis=-1)


def _filled(states: Float32, empty: Float32, count: int) -> Float32:
    """[chunks 77 C] -> [77n C], padded with the empty prompt's chunk to n = `count`."""
    joined = np.concatenate([states] + [empty] * (count - len(states)))
    return joined.reshape(-1, joined.shape[-1])
