"""Rewriting of prompts: several at once, each checked, and written a second time if it lost quoted text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.base.text import clean
from qwenimg.common.numbers.next_token import Decoding
from qwenimg.common.numbers.seeds import MAX_SEED
from qwenimg.common.parts.texts.picture_texts import SeenPicture
from qwenimg.common.parts.texts.writing import Conversation, Show, Writer, Written
from qwenimg.common.prompts import rewriting
from qwenimg.common.prompts.check import check_not_blank, check_prompt
from qwenimg.common.prompts.rewriting import OURS, Language, Protocol, Task
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

KEPT = 1000  # rewritten prompts
SIDE = 1024  # pixels of a picture whose size is not known


@dataclass(frozen=True)
class Draft:
    """A prompt to rewrite, with the pictures that it edits, and the LoRAs of the language model. size: width and height
    of the picture in pixels, for a protocol that takes them."""

    prompt: str
    pictures: tuple[SeenPicture, ...] = ()
    loras: Hashable = ()
    protocol: Protocol = OURS
    size: tuple[int, int] = (SIDE, SIDE)

    @property
    def task(self) -> Task:
        return "edit" if self.pictures else "draw"

    @property
    def language(self) -> Language:
        return rewriting.language_of(self.prompt)

    @property
    def conversation(self) -> Conversation:
        system = self.protocol.system(self.task, self.language)
        return Conversation(system=system, user=self.protocol.user(self.prompt, *self.size), pictures=self.pictures)


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A prompt that was rewritten."""

    draft: Draft
    prompt: str  # the new one; the draft's if no text kept what it must
    tokens: int
    cut: bool  # True: it was ended at the limit of tokens or of time
    how: Decoding  # with the seed of the text that is used
    fault: str = ""  # why the draft's prompt is used
    by: tuple[tuple[str, str], ...] = ()  # name and fingerprint of a language model in files of its own

    def record(self) -> dict[str, str]:
        """Return how it was written, as short texts for a recipe."""
        how = self.how
        return {
            "instruction": self.draft.protocol.name,
            "task": self.draft.task,
            "language": self.draft.language,
            "temperature": f"{how.temperature:g}",
            "top_k": str(how.top_k),
            "top_p": f"{how.top_p:g}",
            "penalty": f"{how.penalty:g}",
            "limit": str(how.limit),
            "seed": str(how.seed),
            "tokens": str(self.tokens),
            "cut": "yes" if self.cut else "no",
            **dict(self.by),
        }


def rewrite(
    writer: Writer,
    drafts: Sequence[Draft],
    how: Decoding,
    notify: Callable[[str, str], None],
    show: Show = lambda index, text: None,
    *,
    keeps: bool = False,
) -> list[Rewritten]:
    """Return each draft rewritten, or as it is, with a warning, if two texts did not keep its quoted text. show: as for
    `Writer.write`, of the first texts. Raises QwenimgError."""
    for draft in drafts:
        check_not_blank(draft.prompt)
        check_prompt(draft.prompt)
    first = writer.write([draft.conversation for draft in drafts], how, show, keeps=True)
    made = [_rewritten(draft, text, how) for draft, text in zip(drafts, first, strict=True)]
    again = [index for index, one in enumerate(made) if one.fault]
    if again:
        another = replace(how, seed=(how.seed + 1) & MAX_SEED, temperature=how.temperature or OURS.how.temperature)
        notify("stage", f"{made[again[0]].fault}: writing once more")
        texts = writer.write([drafts[index].conversation for index in again], another, keeps=True)
        for index, text in zip(again, texts, strict=True):
            made[index] = _rewritten(drafts[index], text, another)
            if made[index].fault:
                notify("warning", f"{made[index].fault}: the prompt stays as it is")
    if not keeps:
        writer.residents.drop(writer.resident)
    for one in made:
        if one.cut and not one.fault:
            notify("warning", f"the text is cut after {one.tokens} tokens, to whole sentences if it has some")
    return made


def _rewritten(draft: Draft, text: Written, how: Decoding) -> Rewritten:
    fault = _fault(draft, text.text)
    prompt = draft.prompt if fault else text.text
    return Rewritten(draft=draft, prompt=prompt, tokens=text.tokens, cut=text.cut, how=how, fault=fault)


def _fault(draft: Draft, text: str) -> str:
    """Return why `text` is no better prompt than the draft's; "" if it is one."""
    if not text:
        return "the model wrote nothing"
    if lost := draft.protocol.lost(draft.prompt, text):
        return f'the model did not keep the quoted text "{clean(lost[0], 40)}"'
    try:
        check_prompt(text)
    except UsageError as error:
        return f"the model's text is refused ({error})"
    return ""


class PromptWriter:
    """A language model that rewrites prompts for one opened model, and the latest prompts that it has rewritten."""

    def __init__(
        self,
        name: str,
        writes: Callable[[Residents, Checkpoint, bool], Writer],
        *,
        own: bool,
        protocol: Protocol = OURS,
        fingerprint: str = "",
        close: Callable[[], None] = lambda: None,
    ):
        """Set the parts. name: of the language model. writes: returns its writer, for the networks in memory and the
        files of the model that draws, and whether it is to see pictures. own: it is that model's text encoder, which
        encodes what it has written. protocol: how it is asked. fingerprint: of its files, if they are not that model's.
        close: closes them."""
        self.name, self.own, self.protocol, self.close, self._writes = name, own, protocol, close, writes
        self._by = (("with", name), ("fingerprint", fingerprint)) if fingerprint else ()
        self._kept: dict[tuple[Draft, int], Rewritten] = {}

    def writer(self, residents: Residents, checkpoint: Checkpoint, seeing: bool) -> Writer:
        """Return the writer, to see pictures if `seeing`. Raises QwenimgError."""
        return self._writes(residents, checkpoint, seeing)

    def draft(self, prompt: str, pictures: tuple[SeenPicture, ...], loras: Hashable, size: tuple[int, int]) -> Draft:
        """Return a prompt as it is rewritten, for a picture of a `size`."""
        size = size if self.protocol.takes_size else (SIDE, SIDE)
        return Draft(prompt, pictures, loras, self.protocol, size)

    def how(self, seed: int) -> Decoding:
        """Return how the text of a seed is chosen."""
        return replace(self.protocol.how, seed=seed)

    def known(self, draft: Draft, seed: int) -> Rewritten | None:
        """Return what `draft` was rewritten to."""
        return self._kept.get((draft, seed))

    def check(self, residents: Residents, checkpoint: Checkpoint, draft: Draft) -> None:
        """Raise QwenimgError for a draft that it cannot read."""
        check_prompt(draft.prompt)
        self.writer(residents, checkpoint, bool(draft.pictures)).asked(draft.conversation)

    def stage(self, residents: Residents, checkpoint: Checkpoint, draft: Draft, seed: int) -> Stage:
        """Return the stage in which `draft` is rewritten."""
        writer = self.writer(residents, checkpoint, bool(draft.pictures))
        return writer.stage([draft.conversation], self.how(seed), keeps=self.own)

    def rewritten(
        self, residents: Residents, checkpoint: Checkpoint, drafts: Sequence[Draft], seed: int
    ) -> list[Rewritten]:
        """Return the drafts rewritten, the new ones of them together."""
        new = [draft for draft in dict.fromkeys(drafts) if self.known(draft, seed) is None]
        if new:
            notify = residents.runtime.notify
            notify("stage", f"rewriting the prompt by {clean(self.name, 60)}")
            texts = rewrite(
                self.writer(residents, checkpoint, any(one.pictures for one in new)),
                new,
                self.how(seed),
                notify,
                keeps=self.own,
            )
            drop_oldest(self._kept, max(0, KEPT - len(new)))
            self._kept |= {(draft, seed): replace(text, by=self._by) for draft, text in zip(new, texts, strict=True)}
        return [self._kept[draft, seed] for draft in drafts]
