"""The embeddings of requests (textual inversion): found by the names in their prompts, read once, and fitted to the
model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.base.text import clean
from qwenimg.common.parts.texts import embedding_file
from qwenimg.common.parts.texts.embedding_file import EmbeddingFile
from qwenimg.common.prompts import inversion
from qwenimg.common.prompts.check import EMBEDDING
from qwenimg.common.prompts.inversion import Inversion
from qwenimg.common.request.embedding_text import Embedding
from qwenimg.common.request.request import Request

KEPT = 200  # files


def _takes_none() -> str:
    return "this model takes no embeddings"


def _nothing() -> Mapping[str, Path]:
    return {}


@dataclass(kw_only=True, eq=False)
class Embeddings:
    """The embeddings of one model."""

    widths: Mapping[str, int] = field(default_factory=dict)  # of its text encoders, by their names
    refusal: Callable[[], str] | None = _takes_none  # why its prompts name none; None if they do
    find: Callable[[str], Path] = Path  # the file that --embedding names. Raises ModelError
    listed: Callable[[], Mapping[str, Path]] = _nothing  # the files in the folders of models, by name
    _files: dict[tuple[object, ...], EmbeddingFile] = field(default_factory=dict)

    def given(self, request: Request) -> Request:
        """Return the request with the embeddings that its prompts name. Raises UsageError and ModelError."""
        found, _ = self._named([request.prompt, request.negative_prompt], request.embeddings)
        return replace(request, inversions=found) if found else request

    def check(self, embeddings: Sequence[Embedding]) -> None:
        """Raise UsageError and ModelError for embeddings that the model does not take."""
        self._refuse((), embeddings)
        self._known((), embeddings)

    def of_prompts(self, prompts: Sequence[str], embeddings: Sequence[Embedding]) -> tuple[Inversion, ...]:
        """Return the embeddings that `prompts` of several requests name, and leave out what is not here. Raises
        ModelError for a file that cannot be read."""
        return () if self.refusal is not None else _in_prompts(prompts, self._known(prompts, embeddings)[0])

    def warnings(self, request: Request) -> list[str]:
        """Return a line for each embedding that is not used: its name is in no prompt, or it is a word of the prompt
        and for another model."""
        return self._named([request.prompt, request.negative_prompt], request.embeddings)[1]

    def lines(self, request: Request) -> list[str]:
        """Return a line for each embedding of a request, with its number of vectors."""
        return [f"embedding {clean(one.name, 60)}: {counted(one.count, 'vector')}" for one in request.inversions]

    def recorded(self, request: Request, *, guided: bool) -> dict[str, object]:
        """Return the entries of a recipe: names, and the hashes of the files. guided: the negative prompt is used."""
        used = _in_prompts([request.prompt, *([request.negative_prompt] if guided else [])], request.inversions)
        if not used:
            return {}
        return {"embedding": "; ".join(one.name for one in used), "embedding_sha256": [one.sha256 for one in used]}

    def _named(
        self, prompts: Sequence[str], embeddings: Sequence[Embedding]
    ) -> tuple[tuple[Inversion, ...], list[str]]:
        if self.refusal is not None:
            self._refuse(prompts, embeddings)
            return (), []
        known, lines = self._known(prompts, embeddings)
        used = _in_prompts(prompts, known)
        if used:
            for text in prompts:
                inversion.check_no_marks(text)
        for text in prompts:
            if missing := EMBEDDING.search(inversion.marked(text, used)):
                raise self._missing(missing)
        lines += [f"--embedding {clean(one.name, 60)}: its name is in no prompt" for one in known if one not in used]
        return used, lines

    def _refuse(self, prompts: Sequence[str], embeddings: Sequence[Embedding]) -> None:
        if self.refusal is None:
            return
        if embeddings:
            raise UsageError(f"--embedding {clean(embeddings[0], 60)}: {self.refusal()}")
        for text in prompts:
            if tag := EMBEDDING.search(text):
                raise UsageError(f"the prompt has {clean(tag[0], 60)}, and {self.refusal()}; leave it out")

    def _known(self, prompts: Sequence[str], embeddings: Sequence[Embedding]) -> tuple[list[Inversion], list[str]]:
        """Return the embeddings that are given, and those in the folders that the prompts name; and a line for each
        word that is the name of one for another model."""
        given = [self._read(self.find(one.source), one.name) for one in embeddings]
        taken = {name.lower() for one in given for name in one.names}
        lowered, lines = "\n".join(prompts).lower(), list[str]()
        near = {name: path for name, path in self.listed().items() if name.lower() in lowered}
        here = {name.lower(): (name, path) for name, path in near.items() if name.lower() not in taken}
        if not here:
            return given, lines
        explicit: dict[str, bool] = {}
        for text in prompts:
            for match in inversion.name_pattern([*here, *taken]).finditer(text):
                name = match["name"].lower()
                explicit[name] = explicit.get(name, False) or match["prefix"] is not None
        for key in (key for key in explicit if key in here):
            name, path = here[key]
            try:
                given.append(self._read(path, name))
            except ModelError as error:
                if explicit[key]:
                    raise
                lines.append(f"{clean(name, 60)} in the prompt is drawn as a word: {error}")
        return given, lines

    def _read(self, path: Path, name: str = "") -> Inversion:
        """Return the embedding in a file, read again only if it has changed."""
        key: tuple[object, ...] = (path,)
        with suppress(OSError, ValueError):
            state = path.stat()
            key = (path, state.st_ino, state.st_size, state.st_mtime_ns)
        file = self._files.pop(key, None)
        if file is None:
            file = embedding_file.read_embedding(path)
        self._files[key] = file
        drop_oldest(self._files, KEPT)
        return file.fitted(self.widths, name)

    def _missing(self, tag: re.Match[str]) -> ModelError:
        name, here = tag[1], [*self.listed()]
        near = difflib.get_close_matches(name.lower(), [one.lower() for one in here], n=1)
        advice = f"did you mean embedding:{clean(near[0], 40)}?" if near else "give its file: --embedding FILE"
        if not near and not here:
            advice = f"{advice}, or --models-dir with a folder of embeddings"
        return ModelError(
            f"the prompt has embedding:{clean(name, 60)}, and no embedding of this name is here; {advice}"
        )


def _in_prompts(prompts: Sequence[str], known: Sequence[Inversion]) -> tuple[Inversion, ...]:
    """Return those of the `known` embeddings whose names are in a prompt. Raises UsageError for too many."""
    if not known:
        return ()
    pattern = inversion.name_pattern(dict.fromkeys(name.lower() for one in known for name in one.names))
    found = {match["name"].lower() for text in prompts for match in pattern.finditer(text)}
    used = tuple(one for one in known if any(name.lower() in found for name in one.names))
    if len(used) > inversion.MOST:
        raise UsageError(f"the prompt names {len(used)} embeddings; at most {inversion.MOST} are read")
    return used
