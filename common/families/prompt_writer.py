"""A language model that was trained to rewrite prompts for the models of a family."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from qwenimg.common.base.config import data_folder
from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.parts.downloads import Download
from qwenimg.common.parts.language_models import CONFIG, LanguageModel, open_language_model
from qwenimg.common.parts.small_files import find_tokenizer
from qwenimg.common.prompts.rewriting import Protocol


@dataclass(frozen=True, kw_only=True)
class PromptWriterFiles:
    """The files of such a language model, and how it is asked. No tensor tells it from other language models."""

    folder: str  # in the folder of a model
    named: re.Pattern[str]  # what the name of a folder or file of its own is like, in small letters
    like: str  # the known model whose text encoder has its configuration, for a file without one
    small_files: Download  # with its tokenizer, for a file without one
    protocol: Protocol

    def inside(self, model: Path) -> Path | None:
        """Return its folder in that of a model."""
        return model / self.folder if is_folder(model / self.folder) else None

    def is_named(self, path: Path) -> bool:
        """Return whether a folder or file is one by its name."""
        return self.named.search(path.name.lower()) is not None

    def open(self, path: Path, tokenizer: Path | None) -> LanguageModel:
        """Open a folder, or a file, which may be alone. tokenizer: a folder that is given. Raises QwenimgError."""
        if is_folder(path) or is_file(path.parent / CONFIG) or path.suffix.lower() == ".gguf":
            return open_language_model(path)
        config = data_folder(self.like) / "text_encoder"
        return open_language_model(path, config, find_tokenizer(path, tokenizer, self.small_files))
