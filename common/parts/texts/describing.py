"""Texts about pictures, by a language model that sees them: captions, tags and answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.numbers.next_token import Decoding
from qwenimg.common.numbers.noise import sha256
from qwenimg.common.parts.texts.picture_texts import SeenPicture
from qwenimg.common.parts.texts.writing import Conversation, Ended, Writer, Written
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.patches import check_aspect
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.prompts.chat import Turn
from qwenimg.common.prompts.describing import Asking, tidy_tags

LEAST, MOST = 504 * 504, 784 * 784  # pixels of a picture as it is seen: more are for small writing alone
PENALTY = 1.05  # over the text alone: it ends repetitions, and does not punish words of the question


def reduced(picture: Uint8) -> Uint8:
    """Return a picture [H, W, 3 or 4] as it is seen: on white, of LEAST to MOST pixels. Raises UsageError for one that
    is too narrow."""
    height, width = picture.shape[:2]
    check_aspect(width, height)
    opaque, area = pixels.over_white(picture), width * height
    if LEAST <= area <= MOST:
        return opaque
    scale = math.sqrt((MOST if area > MOST else LEAST) / area)
    return pixels.fit(opaque, *(max(1, round(side * scale)) for side in (width, height)))


def conversation(system: str, user: str, pictures: Sequence[Uint8], earlier: Sequence[Turn] = ()) -> Conversation:
    """Return a question about `reduced` pictures, with an instruction and earlier questions."""
    seen = tuple(SeenPicture(f"{one.shape[1]}x{one.shape[0]} {sha256(one)}", one) for one in pictures)
    return Conversation(system=system, user=user, pictures=seen, earlier=tuple(earlier))


def tidied(made: Written, asking: Asking) -> Written:
    """Return a text with tags that are each there once."""
    if asking.task != "tags" or asking.question:
        return made
    return replace(made, text=tidy_tags(made.text, asking.language, cut=made.cut))


def decoding(limit: int) -> Decoding:
    """Return how the words of a text of at most `limit` tokens are chosen: always the likeliest one."""
    return Decoding(penalty=PENALTY, limit=limit)


@dataclass(frozen=True, kw_only=True)
class Describer:
    """A language model that describes pictures, in memory from the first one on."""

    writer: Writer
    headline: str = ""  # its name, device and precision

    def describe(
        self, picture: Uint8, asking: Asking, limit: int, show: Callable[[str], None] = lambda text: None
    ) -> Written:
        """Return the text about a `reduced` picture. show: is called with its next words. Raises QwenimgError."""
        asked = conversation(asking.system, asking.user, [picture])
        return tidied(self.write(asked, decoding(limit), show), asking)

    def describe_all(self, pictures: Sequence[Uint8], asking: Asking, limit: int, ended: Ended) -> None:
        """Write the text about each `reduced` picture, several at once where they fit in memory. ended: is called
        with its number and its text as each one ends. Raises QwenimgError."""
        asked = [conversation(asking.system, asking.user, [picture]) for picture in pictures]
        how = decoding(limit)
        self.check(asked, how)
        self.writer.write(asked, how, ended=lambda index, made: ended(index, tidied(made, asking)), keeps=True)

    def write(self, asked: Conversation, how: Decoding, show: Callable[[str], None]) -> Written:
        """Return the answer in a conversation. Raises QwenimgError."""
        self.check([asked], how)
        [made] = self.writer.write([asked], how, lambda index, text: show(text), keeps=True)
        return made

    def check(self, asked: Sequence[Conversation], how: Decoding) -> None:
        """Raise DoesNotFit unless the texts are written in the memory that is free, before the model is loaded."""
        runtime = self.writer.runtime
        needs = self.writer.residents.plan([self.writer.stage(asked, how, keeps=True)])
        if not needs.fits(needs.budget):
            taken = needs.largest
            runtime.check_fit(taken.title, taken.peak)
            text = f"{taken.title} takes {size_text(taken.peak)}, {runtime.budget_text(needs.budget)}"
            raise DoesNotFit(f"{text}; give -q 8 or -q 4, or more --max-memory")
