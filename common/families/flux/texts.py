"""Text states of Flux.1: T5's for the text stream, and the pooled vector of CLIP for the modulation.

T5 reads a prompt with its padding, without a mask, and all of its states are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.shape import Shape
from qwenimg.common.networks import clip
from qwenimg.common.parts.texts import PromptTexts, States
from qwenimg.common.prompts.qwen import PromptTokens
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, ClipEncoder, TextEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

CLIP, T5 = "text_encoder", "text_encoder_2"
CLIP_LENGTH = 77  # tokens, with start, end and padding
Float32 = NDArray[np.float32]


class FluxTexts(PromptTexts):
    """The states [1 S C] of T5 and the pooled vector [1 P] of CLIP of each prompt, for `length` tokens S of T5."""

    feed_forward = 3  # T5's is gated

    def __init__(self, residents: Residents, checkpoint: Checkpoint, length: int):
        super().__init__(residents, checkpoint.texts)
        self.length, self._tokenizers = length, checkpoint.tokenizers

    def states(self, prompts: Sequence[str]) -> list[tuple[Array, Array]]:
        """Return states and pooled vector of each prompt on the device."""
        array = self.runtime.engine.array
        return [(array(states), array(pooled)) for states, pooled in self.arrays(prompts)]

    def t5_tokens(self, prompt: str) -> PromptTokens:
        """Return the ids of a prompt for T5, padded. Raises UsageError as `check_prompt` does."""
        tokens: PromptTokens = self._tokenizers[T5].tokenizer.padded(prompt, self.length)
        return tokens

    def clip_ids(self, prompt: str) -> list[int]:
        """Return the ids of a prompt for CLIP, padded or cut. Raises UsageError as `check_prompt` does."""
        tokenizer = self._tokenizers[CLIP].tokenizer
        ids = [tokenizer.bos, *tokenizer.words(prompt)[: CLIP_LENGTH - 2], tokenizer.eos]
        return ids + [tokenizer.pad] * (CLIP_LENGTH - len(ids))

    def cut(self, prompt: str) -> str:
        lost = self.t5_tokens(prompt).lost
        return f"the model sees its first {self.length - 1} tokens, not the last {lost}" if lost else ""

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        return [self.length] * len(prompts)

    def encodings(self, prompts: Sequence[str], counted: bool) -> list[Stage]:
        return [self.stage(self.encoders[CLIP], 1, CLIP_LENGTH), self.stage(self.encoders[T5], 1, self.length)]

    def shapes(self, key: str) -> list[Shape]:
        return [(1, self.length, self.encoders[T5].config.hidden_size), (1, self.encoders[CLIP].config.hidden_size)]

    def tokens(self, key: str) -> list[object]:
        return [list(self.t5_tokens(key).ids), self.clip_ids(key)]

    def encode(self, keys: Sequence[str]) -> Iterator[States]:
        """Encode `keys` with CLIP, then with T5."""
        clip_stage, t5_stage = self.encodings(keys, counted=True)
        pooled = list(self.run(clip_stage, self._pooled, [self.clip_ids(key) for key in keys]))
        states = self.run(t5_stage, self._encoded, [self.t5_tokens(key).ids for key in keys])
        yield from zip(states, pooled, strict=True)

    def _pooled(self, encoder: ClipEncoder, ids: Sequence[int]) -> Float32:
        """Return the state [1 P] behind the final norm at the first end token."""
        used = clip.used_states(self.encoders[CLIP].config, sdxl=False)
        _, pooled = encoder.encode([ids], *used)
        self.runtime.check_finite(pooled, "text encoder", "text", lambda: encoder.encode([ids], *used)[1])
        return np.asarray(self.runtime.engine.numpy(pooled), np.float32)

    def _encoded(self, encoder: TextEncoder, ids: Sequence[int]) -> Float32:
        states = encoder.encode(ids)
        self.runtime.check_finite(states, "text encoder", "text", lambda: encoder.encode(ids))
        return np.asarray(self.runtime.engine.numpy(states), np.float32)
