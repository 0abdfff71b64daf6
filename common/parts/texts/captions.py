"""Text states of a model whose text encoder is a whole language model with a vision tower, if its files have all of it:
then it also describes a picture, for a request without a prompt.

A caption is decoded greedily, since a drawn one would be another on each backend. It is written once for a picture,
and the network that wrote it encodes it too, before it is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.base.text import clean
from qwenimg.common.numbers.next_token import Decoding
from qwenimg.common.parts.texts.picture_texts import KEPT, SeenPicture
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.parts.texts.writing import Conversation, Writer
from qwenimg.common.pictures.patches import PictureForm
from qwenimg.common.prompts.chat import Chat
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

SHOWN = 4000  # characters of a caption in a message


@dataclass(frozen=True, kw_only=True)
class Describing:
    """The question by which a text encoder describes a picture."""

    texts: Mapping[str, str]  # the instruction, by language
    chat: Chat
    form: PictureForm
    limit: int  # tokens of a caption
    alone: Callable[[Component], Component]  # the part of the text encoder that prompts need, a TextEncoder


class CaptionTexts(TemplateTexts):
    """The text states of prompts, and captions of pictures."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint, template: Template, how: Describing):
        super().__init__(residents, checkpoint, template)
        self.how = how
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
        """Return the stage that writes the caption of `picture`. Its network is kept to encode it."""
        return self._writer().stage(self._asked(picture, language), self._decoding(), keeps=True)

    def _write(self, picture: SeenPicture, language: str) -> str:
        self.runtime.notify("stage", "describing the picture, since no prompt is given")
        [written] = self._writer().write(self._asked(picture, language), self._decoding(), keeps=True)
        if written.cut:
            self.runtime.notify("warning", f"the model's description is cut after {written.tokens} tokens")
        caption = written.whole.strip()  # as the published pipeline takes it
        if not caption:
            raise UsageError("the model's description of the picture is empty: give a prompt")
        try:
            check_prompt(caption)
        except UsageError as error:
            raise UsageError(f"the model's description of the picture is refused: {error}; give a prompt") from None
        return caption

    def _writer(self) -> Writer:
        stops = self.encoder.config.eos_token_id
        return Writer(self.residents, self.encoder, self._tokenizer, self.how.chat, self.how.form, stops)

    def _asked(self, picture: SeenPicture, language: str) -> list[Conversation]:
        return [Conversation(system=self.how.texts[language], user="", pictures=(picture,))]

    def _decoding(self) -> Decoding:
        penalty = self.encoder.config.repetition_penalty
        return Decoding(limit=self.how.limit, penalty=penalty, penalizes_prompt=True)

    # States

    def _encoding(self, length: int) -> Stage:
        return self.stage(self.how.alone(self.encoder), 1, length)

    def forget(self) -> None:
        super().forget()
        self._written.clear()

    def close(self) -> None:
        super().close()
        self._written.clear()
