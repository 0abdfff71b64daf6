"""The tokenizers of a model, for the rows of `Opening`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qwenimg.common.families.opening import Source
from qwenimg.common.parts.components import open_tokenizer
from qwenimg.common.parts.downloads import Download
from qwenimg.common.parts.small_files import find_tokenizer
from qwenimg.common.prompts import qwen
from qwenimg.common.runtime.checkpoint import Component, TokenizerFiles


def of_language_model(
    download: Download,
) -> Callable[[Source, Mapping[str, Component]], Mapping[str, TokenizerFiles]]:
    """Return how the tokenizer of a family with one text encoder is found: `download` has it for a model without
    one."""

    def found(source: Source, components: Mapping[str, Component]) -> Mapping[str, TokenizerFiles]:
        path = find_tokenizer(source.path, source.options.tokenizer, download)
        return {"text_encoder": open_tokenizer(path, qwen.load, components["text_encoder"].config)}

    return found
