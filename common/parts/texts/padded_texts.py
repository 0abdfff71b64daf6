"""Text states of prompts that text encoders read as they are, padded to a fixed length: T5's states, and the states and
the pooled vector of a CLIP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.shape import Shape
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.parts.texts.states import States, Texts
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.weighted import LENGTH
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array, ClipEncoder, TextEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage


class PaddedTexts(Texts[str]):
    """The arrays of one text encoder for each prompt, padded or cut to `length` tokens. Brackets and weights are
    text."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint, name: str, length: int):
        """Take the text encoder `name` of `checkpoint`."""
        super().__init__(residents, {name: checkpoint[name]})
        self.name, self.length, self._tokenizer = name, length, checkpoint.tokenizers[name]

    @property
    def encoder(self) -> Component:
        """The text encoder."""
        return self.encoders[self.name]

    def fill(self, prompt: str) -> PromptTokens:
        """Return the tokens of `prompt` with padding."""
        tokens: PromptTokens = self._tokenizer.tokenizer.padded(prompt, self.length)
        return tokens

    def tokens(self, key: str) -> list[object]:
        """Return the ids."""
        return [list(self.fill(key).ids)]

    def stages(self) -> list[Stage]:
        """Return the stage that encodes prompts."""
        return [self.encoding(self.length)]

    def encoding(self, length: int) -> Stage:
        """Return the stage that encodes prompts of at most `length` tokens."""
        return self.stage(self.encoder, 1, length, self.more(length))

    def encode(self, keys: Sequence[str]) -> Iterator[States]:
        """Encode `keys` one after the other."""
        prompts = [self.fill(key).ids for key in keys]
        return self.run(self.encoding(max(map(len, prompts))), self._encoded, prompts)

    def more(self, length: int) -> int:
        """Return the bytes of activations for `length` tokens that other text encoders do not have."""
        return 0

    def _encoded(self, encoder: Any, ids: Sequence[int]) -> States:
        """Return the arrays of one prompt."""
        arrays = self.results(encoder, ids)
        self.runtime.check_finite(arrays[0], "text encoder", "text", lambda: self.results(encoder, ids)[0])
        return tuple(np.ascontiguousarray(self.runtime.engine.numpy(array), np.float32) for array in arrays)

    @abstractmethod
    def results(self, encoder: Any, ids: Sequence[int]) -> Sequence[Array]:
        """Return the arrays on the device."""


class T5Texts(PaddedTexts):
    """The text states [1 `length` C] of T5's encoder. It reads padding as it reads words, and all rows condition an
    image."""

    feed_forward = 3  # it is gated

    def states(self, prompts: Sequence[str]) -> list[Array]:
        """Return the states of each prompt on the device."""
        return [self.runtime.engine.array(states) for (states,) in self.arrays(prompts)]

    def shapes(self, key: str) -> list[Shape]:
        """Return the shape of the states."""
        return [(1, self.length, self.encoder.config.d_model)]

    def more(self, length: int) -> int:
        """Return the bytes of activations that only T5 has: the bias for each pair of tokens as it is looked up,
        reordered and taken by a kernel (measured on a CPU: two to three of these, so 2.5), and the matrix that is in
        float32 where others are in float16."""
        config: T5Config = self.encoder.config
        half = self.runtime.precision.stored_dtype("text") == "float16"
        return 10 * config.num_heads * length**2 + (4 * config.d_model * config.d_ff if half else 0)

    def results(self, encoder: TextEncoder, ids: Sequence[int]) -> Sequence[Array]:
        """Return the states of one prompt [1 S C]."""
        return (encoder.encode(ids),)


class MaskedT5Texts(T5Texts):
    """The text states [1 S C] of T5 for prompts of up to `length` tokens, whose padding no token sees: of the words,
    and of the first `pads` tokens of the padding."""

    pads = 0

    def fill(self, prompt: str) -> PromptTokens:
        tokens = super().fill(prompt)
        words = len(tokens.ids) - self._padding(tokens.ids)
        kept = tokens.ids[: words + self.pads]
        return PromptTokens(kept, tokens.lost, len(kept) - words)

    def shapes(self, key: str) -> list[Shape]:
        return [(1, len(self.fill(key).ids), self.encoder.config.d_model)]

    def results(self, encoder: TextEncoder, ids: Sequence[int]) -> Sequence[Array]:
        return (encoder.encode(ids, min(self.pads, self._padding(ids))),)

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        """Return the number of states of each prompt."""
        return [len(self.fill(prompt).ids) if counted else self.length for prompt in prompts]

    def encodings(self, prompts: Sequence[str], counted: bool) -> list[Stage]:
        """Return the stage of T5, which reads no more than these tokens."""
        return [self.encoding(max(self.lengths(prompts, counted)))]

    def cut(self, prompt: str) -> str:
        """Return the numbers of tokens that are seen and that are not."""
        lost = self.fill(prompt).lost
        return f"the model sees its first {self.length - 1} tokens, not the last {lost}" if lost else ""

    def _padding(self, ids: Sequence[int]) -> int:
        """Return the number of pads at the end of `ids`."""
        pad = self._tokenizer.tokenizer.pad
        return next((i for i, token in enumerate(reversed(ids)) if token != pad), len(ids))


class PaddedClip(PaddedTexts):
    """The states [1 77 C] of a CLIP before its last layer, without the final norm, and the pooled vector [1 P]."""

    feed_forward = 2

    def __init__(self, residents: Residents, checkpoint: Checkpoint, name: str):
        """Take the text encoder `name` of `checkpoint`."""
        super().__init__(residents, checkpoint, name, LENGTH)

    def shapes(self, key: str) -> list[Shape]:
        """Return the shapes of the states and of the pooled vector."""
        config: CLIPConfig = self.encoder.config
        return [(1, self.length, config.hidden_size), (1, config.pooled_dim)]

    def results(self, encoder: ClipEncoder, ids: Sequence[int]) -> Sequence[Array]:
        """Return the states and the pooled vector of one prompt."""
        return encoder.encode([ids], *clip.used_states(self.encoder.config, penultimate=True))


class ClipPooled(PaddedClip):
    """The pooled vector [1 P] of a CLIP."""

    def states(self, prompts: Sequence[str]) -> list[NDArray[np.float32]]:
        """Return the pooled vector of each prompt."""
        return [pooled for (pooled,) in self.arrays(prompts)]

    def shapes(self, key: str) -> list[Shape]:
        """Return the shape of the pooled vector."""
        return [(1, self.encoder.config.pooled_dim)]

    def results(self, encoder: ClipEncoder, ids: Sequence[int]) -> Sequence[Array]:
        """Return the pooled vector of one prompt [1 P]."""
        return (encoder.encode([ids], 0, False)[1],)


class SeparateTexts(ABC):
    """The text states of a model with several text encoders, each of which has its own; see `ModelTexts`. `rows`: the
    text tokens that the denoiser takes, which no prompt changes."""

    def __init__(self, encoders: Sequence[PaddedTexts], rows: int):
        self.every, self.rows = encoders, rows
        self.pooling = [texts for texts in encoders if not isinstance(texts, T5Texts)]

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        return [self.rows] * len(prompts)

    def has(self, prompts: Sequence[str]) -> bool:
        return all(texts.has(prompts) for texts in self.every)

    def encodings(self, prompts: Sequence[str], counted: bool) -> list[Stage]:
        return [stage for texts in self.every if not texts.has(prompts) for stage in texts.stages()]

    def announce(self, prompts: Sequence[str]) -> None:
        for texts in self.every:
            texts.announce(prompts)

    @abstractmethod
    def states(self, prompts: Sequence[str]) -> list[Any]: ...

    @abstractmethod
    def cut(self, prompt: str) -> str: ...

    def others(self, prompts: Sequence[Any]) -> list[str]:
        """Return the announced prompts from the first of `prompts` on, without `prompts`; none from a key that is no
        prompt."""
        return [one for one in self.every[0].upcoming(prompts[0]) if one not in prompts]

    def pooled_already(self, prompts: Sequence[str]) -> list[str]:
        """Return the prompts whose pooled vectors are known already."""
        return [prompt for prompt in prompts if all(texts.has([prompt]) for texts in self.pooling)]

    def renew(self, encoders: Mapping[str, Component]) -> None:
        for texts in self.every:
            texts.renew(encoders)

    def forget(self) -> None:
        for texts in self.every:
            texts.forget()

    def close(self) -> None:
        for texts in self.every:
            texts.close()
