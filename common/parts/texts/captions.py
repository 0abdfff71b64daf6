"""Text states of a model whose text encoder is a whole language model with a vision tower, if its files have all of it:
then it also describes a picture, for a request without a prompt.

A caption is decoded greedily, since a drawn one would be another on each backend. It is written once for a picture,
and the network that wrote it encodes it too, before it is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.base.text import clean
from qwenimg.common.parts.texts.picture_texts import KEPT, PicturePrompt, PictureTemplate, PictureTexts, SeenPicture
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import WritingEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

STOPS = ("<|im_end|>", "<|endoftext|>")  # tokens that end a text, where the files name none
SHOWN = 4000  # characters of a caption in a message


@dataclass(frozen=True, kw_only=True)
class Describing:
    """The question by which a text encoder describes a picture: by language, the text around the picture."""

    texts: Mapping[str, PictureTemplate]
    limit: int  # tokens of a caption
    alone: Callable[[Component], Component]  # the part of the text encoder that prompts need, a TextEncoder


class CaptionTexts(TemplateTexts):
    """The text states of prompts, and captions of pictures."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint, template: Template, how: Describing):
        super().__init__(residents, checkpoint, template)
        self.how = how
        self._asked = {language: PictureTexts(residents, checkpoint, around) for language, around in how.texts.items()}
        self._written: dict[tuple[str, SeenPicture], str] = {}

    # Captions

    def known(self, picture: SeenPicture, language: str) -> str | None:
        """Return the caption of `picture` if it is written."""
        return self._written.get((language, picture))

    def caption(self, picture: SeenPicture, language: str) -> str:
        """Return the caption of `picture`, and write it if it is new. Raises UsageError for one that is no prompt."""
        if (caption := self.known(picture, language)) is None:
            caption = self._write(picture, language)
            self._written[language, picture] = caption
            drop_oldest(self._written, KEPT)
            self.runtime.notify("stage", f"the prompt is the model's own: {clean(caption, SHOWN)}")
        return caption

    def writing(self, picture: SeenPicture, language: str) -> Stage:
        """Return the stage that writes the caption of `picture`. Its network is kept to encode it. No tokens are
        counted, since a plan may have no tokenizer."""
        asked, prompt = self._asked[language], PicturePrompt("", (picture,))
        [stage] = asked.encodings([prompt], counted=False)
        config, value = self.encoder.config, BYTES[self.runtime.precision.compute_dtype("text")]
        keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * value
        [length] = asked.lengths([prompt], counted=False)
        more = (length + self.how.limit) * keys + 2 * config.vocab_size * BYTES["float32"]
        splits = tuple(replace(split, activations=split.activations + more) for split in stage.splits)
        return replace(stage, name="caption", splits=splits, keeps=True)

    def _write(self, picture: SeenPicture, language: str) -> str:
        encoder, _ = self.residents.acquire(self.writing(picture, language))
        self.runtime.notify("stage", "describing the picture, since no prompt is given")
        with self.runtime.clock.timed("caption"):
            tokens = list(self._tokens(encoder, self._asked[language], picture))
        if len(tokens) == self.how.limit:
            self.runtime.notify("warning", f"the model's description is cut after {len(tokens)} tokens")
        caption: str = self._tokenizer.tokenizer.text(tokens).strip()
        if not caption:
            raise UsageError("the model's description of the picture is empty: give a prompt")
        try:
            check_prompt(caption)
        except UsageError as error:
            raise UsageError(f"the model's description of the picture is refused: {error}; give a prompt") from None
        return caption

    def _tokens(self, encoder: WritingEncoder, asked: PictureTexts, picture: SeenPicture) -> Iterator[int]:
        """Yield the tokens of a caption of `picture`, each of the highest score, without the one that ends it."""
        ids, places = asked.fill(PicturePrompt("", (picture,)))
        slots = [encoder.slots(*asked.patches(picture))]
        scores = encoder.begin(ids, places, slots)
        self.runtime.check_finite(scores, "text encoder", "text", lambda: encoder.begin(ids, places, slots))
        stops, penalty = self._stops(), self.encoder.config.repetition_penalty
        earlier = set(ids)
        for _ in range(self.how.limit):
            self.runtime.interrupt()
            values = self.runtime.engine.numpy(scores)
            if not np.isfinite(values).all():
                raise self.runtime.overflow("text encoder", "text", None)
            token = best(values, earlier, penalty)
            if token in stops:
                return
            yield token
            earlier.add(token)
            scores = encoder.follow(token)

    def _stops(self) -> frozenset[int]:
        tokenizer = self._tokenizer.tokenizer
        return frozenset(self.encoder.config.eos_token_id or map(tokenizer.special, STOPS))

    # States

    def _encoding(self, length: int) -> Stage:
        return self.stage(self.how.alone(self.encoder), 1, length)

    def renew(self, encoders: Mapping[str, Component]) -> None:
        super().renew(encoders)
        for asked in self._asked.values():
            asked.renew(encoders)

    def forget(self) -> None:
        super().forget()
        self._written.clear()

    def close(self) -> None:
        super().close()
        self._written.clear()


def best(scores: NDArray[np.float32], earlier: set[int], penalty: float) -> int:
    """Return the token with the highest of `scores` [V], the first of several. The scores of `earlier` tokens are
    lowered: divided by `penalty`, or multiplied if they are negative (N. S. Keskar et al., "CTRL", 2019)."""
    if penalty == 1:
        return int(np.argmax(scores))
    again = sorted(earlier)
    lowered = scores.copy()
    lowered[again] = np.where(scores[again] < 0, scores[again] * penalty, scores[again] / penalty)
    return int(np.argmax(lowered))
