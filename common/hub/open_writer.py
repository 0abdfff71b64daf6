"""Opening of a language model that writes: the text encoder of a model, or one in a folder or file of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from qwenimg.common.base.arguments import home
from qwenimg.common.base.config import has_index
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.registry import OpenModel
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.hub.resolve import is_built_in
from qwenimg.common.parts.language_models import TITLE, open_language_model
from qwenimg.common.parts.texts.rewriting import PromptWriter
from qwenimg.common.parts.texts.writers import other_writer, own_writer, text_encoder
from qwenimg.common.parts.texts.writing import Writer
from qwenimg.common.precision.precision import DenoiserKind
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.shapes import builtin

Opens: TypeAlias = Callable[[LoadOptions], OpenModel]
"""Opens the files of an image model."""


@dataclass(frozen=True, kw_only=True)
class LanguageFiles:
    """A language model on disk, checked. Its files are open until `close`."""

    name: str
    kind: DenoiserKind  # for its precision
    checkpoint: Checkpoint
    writes: Callable[[Residents, Checkpoint, bool], Writer]  # of its checkpoint; True: about pictures too

    def close(self) -> None:
        self.checkpoint.close()


def open_language(name: str, options: LoadOptions, opens: Opens) -> LanguageFiles:
    """Open the language model in a folder or file of its own, or the text encoder of the model `name`, which `opens`
    opens. No weight is read. Raises QwenimgError."""
    path = Path(home(name))
    is_model = not os.path.lexists(path) or has_index(path)
    if is_model or registry.foreign_folder(path) is not None:
        given = replace(options, model=name, parts={}, rewrite_with=None)
        return of_model(given, opens)
    model = open_language_model(path)
    part = model.component if options.quantize is None else model.component.quantized(options.quantize)
    checkpoint = Checkpoint(source=path, components={TITLE: part}, tokenizers={TITLE: model.tokenizer}, scheduler=None)

    def writes(residents: Residents, checkpoint: Checkpoint, seeing: bool) -> Writer:
        return other_writer(residents, checkpoint[TITLE], model.tokenizer, model.chat, model.stops, seeing)

    kind = registry.FAMILIES[0].precision
    return LanguageFiles(name=path.name, kind=kind, checkpoint=checkpoint, writes=writes)


def of_model(options: LoadOptions, opens: Opens) -> LanguageFiles:
    """Open the text encoder of the model that `options` name. Raises QwenimgError."""
    if is_built_in(options.model):
        raise builtin.writes_nothing(builtin.another_writer())
    model = opens(options)

    def writes(residents: Residents, checkpoint: Checkpoint, seeing: bool) -> Writer:
        return own_writer(residents, checkpoint, seeing, TITLE)

    return LanguageFiles(name=model.path.name, kind=model.family.precision, checkpoint=model.checkpoint, writes=writes)


def prompt_writer(options: LoadOptions, opens: Opens) -> PromptWriter:
    """Return the language model that rewrites prompts of the model that `options` open: its own text encoder, or
    another one, whose files are opened. Raises QwenimgError."""
    if options.rewrite_with is None:
        if is_built_in(options.model):
            raise builtin.writes_nothing(builtin.another_writer())
        return PromptWriter("the model's text encoder", own_writer, own=True)
    files = open_language(options.rewrite_with, options, opens)
    checkpoint = files.checkpoint
    return PromptWriter(
        files.name,
        lambda residents, drawing, seeing: files.writes(residents, checkpoint, seeing),
        own=False,
        fingerprint=fingerprint(text_encoder(checkpoint)[1].plan.files),
        close=files.close,
    )
