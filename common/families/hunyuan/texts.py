"""The texts of Hunyuan-DiT: BERT's states of the words, and T5's with those of the padding, which the transformer
pools."""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.shape import Shape
from qwenimg.common.parts.texts.padded_texts import PaddedTexts, SeparateTexts, T5Texts
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, TextEncoder
from qwenimg.common.runtime.residents import Residents

BERT, T5 = "text_encoder", "text_encoder_2"


class BertTexts(PaddedTexts):
    """The states [1 S C] of the words of prompts of up to `length` tokens. No word sees padding, and its states are not
    used, so that it is not encoded."""

    feed_forward = 2

    def fill(self, prompt: str) -> PromptTokens:
        tokens = super().fill(prompt)
        return PromptTokens(tokens.ids[: len(tokens.ids) - tokens.pads], tokens.lost)

    def shapes(self, key: str) -> list[Shape]:
        return [(1, len(self.fill(key).ids), self.encoder.config.hidden_size)]

    def results(self, encoder: TextEncoder, ids: Sequence[int]) -> Sequence[Array]:
        return (encoder.encode(ids),)


class WordT5Texts(T5Texts):
    """The states [1 `length` C] of T5, which sees no padding."""

    def results(self, encoder: TextEncoder, ids: Sequence[int]) -> Sequence[Array]:
        return (encoder.encode(ids, self.padding(ids)),)

    def padding(self, ids: Sequence[int]) -> int:
        """Return the number of pads at the end of `ids`."""
        pad = self._tokenizer.tokenizer.pad
        return next((i for i, token in enumerate(reversed(ids)) if token != pad), len(ids))

    def words(self, prompt: str) -> int:
        """Return the number of tokens of a prompt, with the end token."""
        ids = self.fill(prompt).ids
        return len(ids) - self.padding(ids)


class HunyuanTexts(SeparateTexts):
    """The states of prompts of both encoders."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint):
        config = checkpoint["transformer"].config
        self.bert = BertTexts(residents, checkpoint, BERT, config.text_len)
        self.t5 = WordT5Texts(residents, checkpoint, T5, config.text_len_t5)
        super().__init__([self.bert, self.t5], config.text_len + config.text_len_t5)

    def states(self, prompts: Sequence[str]) -> list[tuple[Array, Array, int]]:
        """Return BERT's states, T5's states, and the number of words of T5, of each prompt."""
        engine = self.bert.runtime.engine
        both = zip(*(texts.arrays(prompts) for texts in self.every), strict=True)
        return [
            (engine.array(first), engine.array(second), self.t5.words(prompt))
            for prompt, ((first,), (second,)) in zip(prompts, both, strict=True)
        ]

    def cut(self, prompt: str) -> str:
        """Return how many tokens each text encoder does not see."""
        lost = {texts.name: texts.fill(prompt).lost for texts in self.every}
        return " and ".join(f"{name} does not see the last {counted(n, 'token')}" for name, n in lost.items() if n)
