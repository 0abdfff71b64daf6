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
from qwenimg.common.families.prompt_writer import PromptWriterFiles
from qwenimg.common.families.registry import OpenModel
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.hub.resolve import is_built_in
from qwenimg.common.parts.language_models import TITLE, open_language_model
from qwenimg.common.parts.texts.rewriting import PromptWriter
from qwenimg.common.parts.texts.writers import other_writer, own_writer, text_encoder
from qwenimg.common.parts.texts.writing import Writer
from qwenimg.common.precision.precision import DenoiserKind
from qwenimg.common.prompts.rewriting import OURS, Protocol
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
    protocol: Protocol = OURS  # how it is asked to rewrite a prompt

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
    trained = (one.prompt_writer for one in registry.FAMILIES if one.prompt_writer is not None)
    return _alone(path, next((one for one in trained if one.is_named(path)), None), options)


def _alone(path: Path, trained: PromptWriterFiles | None, options: LoadOptions) -> LanguageFiles:
    """Open the language model in a folder or file of its own. trained: that of a family, if it is one. Raises
    QwenimgError."""
    model = open_language_model(path) if trained is None else trained.open(path, options.tokenizer)
    protocol = OURS if trained is None else trained.protocol
    part = model.component if options.quantize is None else model.component.quantized(options.quantize)
    checkpoint = Checkpoint(source=path, components={TITLE: part}, tokenizers={TITLE: model.tokenizer}, scheduler=None)

    def writes(residents: Residents, checkpoint: Checkpoint, seeing: bool) -> Writer:
        given = checkpoint[TITLE], model.tokenizer, model.chat, model.stops
        return other_writer(residents, *given, seeing, protocol=protocol)

    kind = next(iter(registry.FAMILIES)).precision
    return LanguageFiles(name=path.name, kind=kind, checkpoint=checkpoint, writes=writes, protocol=protocol)


def of_model(options: LoadOptions, opens: Opens, *, seeing: bool = True) -> LanguageFiles:
    """Open the text encoder of the model that `options` name; if it need not see pictures, the language model beside it
    that was trained to rewrite its prompts. Raises QwenimgError."""
    if is_built_in(options.model):
        raise builtin.writes_nothing(builtin.another_writer())
    model = opens(options)
    if not seeing and (trained := _beside(model)) is not None:
        model.close()
        return _alone(*trained, options)

    def writes(residents: Residents, checkpoint: Checkpoint, seeing: bool) -> Writer:
        return own_writer(residents, checkpoint, seeing, TITLE)

    return LanguageFiles(name=model.path.name, kind=model.family.precision, checkpoint=model.checkpoint, writes=writes)


def _beside(model: OpenModel) -> tuple[Path, PromptWriterFiles] | None:
    """Return the language model in the folder of a model that was trained to rewrite its prompts."""
    trained = model.family.prompt_writer
    path = None if trained is None else trained.inside(model.path.folder)
    return None if trained is None or path is None else (path, trained)


def prompt_writer(model: OpenModel, options: LoadOptions, opens: Opens) -> PromptWriter:
    """Return the language model that rewrites prompts of a model that `options` open: the one in its folder that was
    trained for that, its own text encoder, or another one. Files of one apart are opened. Raises QwenimgError."""
    if options.rewrite_with is not None:
        files = open_language(options.rewrite_with, options, opens)
    elif is_built_in(options.model):
        raise builtin.writes_nothing(builtin.another_writer())
    elif (trained := _beside(model)) is not None:
        files = _alone(*trained, options)
    else:
        return PromptWriter("the model's text encoder", own_writer, own=True)
    checkpoint = files.checkpoint
    return PromptWriter(
        files.name,
        lambda residents, drawing, seeing: files.writes(residents, checkpoint, seeing),
        own=False,
        protocol=files.protocol,
        fingerprint=fingerprint(text_encoder(checkpoint)[1].plan.files),
        close=files.close,
    )
