"""Text states of Stable Diffusion 3: two CLIPs side by side, then T5's behind them, and both CLIPs' pooled vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.shape import Shape
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.parts.texts.padded_texts import t5_activations
from qwenimg.common.parts.texts.states import PromptTexts, States
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.weighted import LENGTH
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import ClipEncoder, TextEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

T5 = "text_encoder_3"
ROWS = {"text_encoder": LENGTH, "text_encoder_2": LENGTH, T5: 256}
"""The tokens that each text encoder reads."""
ALL_ROWS = LENGTH + ROWS[T5]
Float32 = NDArray[np.float32]


class SD3Texts(PromptTexts[str]):
    """The text states [1 333 C] and the pooled vectors [1 P] of prompts. Without T5 its rows are zeros."""

    feed_forward = 3  # T5's is gated

    def __init__(self, residents: Residents, checkpoint: Checkpoint):
        super().__init__(residents, checkpoint.texts)
        self.width = checkpoint["transformer"].config.joint_attention_dim
        self._tokenizers = checkpoint.tokenizers

    def fill(self, name: str, prompt: str) -> PromptTokens:
        """Return the tokens of `prompt` for the text encoder `name`, with its padding. Raises UsageError as
        `check_prompt` does."""
        tokens: PromptTokens = self._tokenizers[name].tokenizer.padded(prompt, ROWS[name])
        return tokens

    def shapes(self, key: str) -> list[Shape]:
        """Return the shapes of the text states and of the pooled vectors, which no prompt changes."""
        pooled = sum(component.config.projection_dim for component in self.clips.values())
        return [(1, ALL_ROWS, self.width), (1, pooled)]

    def tokens(self, key: str) -> list[object]:
        """Return the ids for each text encoder, and the width of the states."""
        return [*(list(self.fill(name, key).ids) for name in self.encoders), self.width]

    def cut(self, prompt: str) -> str:
        """Return how many tokens each text encoder does not see."""
        lost = {name: self.fill(name, prompt).lost for name in self.encoders}
        return " and ".join(f"{name} does not see the last {counted(n, 'token')}" for name, n in lost.items() if n)

    def lengths(self, prompts: Sequence[str], counted: bool) -> list[int]:
        """Return the numbers of rows, which no prompt changes."""
        return [ALL_ROWS] * len(prompts)

    @property
    def clips(self) -> dict[str, Component]:
        return {name: component for name, component in self.encoders.items() if name != T5}

    def encodings(self, prompts: Sequence[str], counted: bool) -> list[Stage]:
        """Return the stages of all text encoders."""
        return self._stages()

    def _stages(self) -> list[Stage]:
        return [
            self.stage(component, 1, ROWS[name], self._more(component.config) if name == T5 else 0)
            for name, component in self.encoders.items()
        ]

    def _more(self, config: T5Config) -> int:
        return t5_activations(config, ROWS[T5], self.runtime.precision.stored_dtype("text"))

    def encode(self, keys: Sequence[str]) -> Iterator[States]:
        """Encode `keys` with one text encoder after the other."""
        parts = []
        for name, stage in zip(self.encoders, self._stages(), strict=True):
            encode: Any = self._t5 if name == T5 else partial(self._clip, stage.component.config)
            parts.append(list(self.run(stage, encode, [self.fill(name, key).ids for key in keys])))
        for results in zip(*parts, strict=True):
            yield self._joined(results)

    def _joined(self, results: Sequence[Any]) -> States:
        """Return text states and pooled vectors for one prompt's results of all text encoders."""
        (first, first_pooled), (second, second_pooled), *t5 = results
        states = np.zeros((1, ALL_ROWS, self.width), np.float32)
        both = np.concatenate((first, second), axis=-1)
        states[:, :LENGTH, : both.shape[-1]] = both
        if t5:
            states[:, LENGTH:] = t5[0]
        return states, np.concatenate((first_pooled, second_pooled), axis=-1)

    def _clip(self, config: CLIPConfig, encoder: ClipEncoder, ids: Sequence[int]) -> tuple[Float32, Float32]:
        """Return the states [1 77 C] before the last layer, without the final norm, and the pooled vector [1 P]."""
        skipped, normed = clip.used_states(config, penultimate=True)
        states, pooled = encoder.encode([ids], skipped, normed)
        self.runtime.check_finite(states, "text encoder", "text", lambda: encoder.encode([ids], skipped, normed)[0])
        return self.runtime.engine.numpy(states), self.runtime.engine.numpy(pooled)

    def _t5(self, encoder: TextEncoder, ids: Sequence[int]) -> Float32:
        """Return the states [1 256 C]."""
        states = encoder.encode(ids)
        self.runtime.check_finite(states, "text encoder", "text", lambda: encoder.encode(ids))
        return np.asarray(self.runtime.engine.numpy(states), np.float32)
