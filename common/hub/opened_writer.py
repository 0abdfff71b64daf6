"""A language model that writes, on an engine, without an image model beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.text import clean
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.open_model import open_files, runtime_of
from qwenimg.common.hub.open_writer import LanguageFiles, of_model, open_language
from qwenimg.common.hub.part_files import located
from qwenimg.common.parts.texts.writers import level, text_encoder
from qwenimg.common.parts.texts.writing import Writer
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.residents import Residents


@dataclass(frozen=True, kw_only=True)
class OpenedWriter:
    """A language model on an engine, and its name, device and precision for a person."""

    writer: Writer
    headline: str


def _files(options: LoadOptions, name: str | None, seeing: bool) -> LanguageFiles:
    if name is None:
        return of_model(options, open_files, seeing=seeing)
    return open_language(name, options, open_files)


@contextmanager
def opened(
    options: LoadOptions,
    name: str | None,
    engine: Callable[[], Engine],
    notify: Callable[[str, str], None],
    *,
    seeing: bool = False,
) -> Iterator[OpenedWriter]:
    """Open the text encoder of the model that `options` name, or the language model `name`, on an engine, which is
    called once the files have passed all checks. seeing: for questions about pictures. Raises QwenimgError."""
    options = located(options)[1]
    with closing(_files(options, name, seeing)) as files:
        level(text_encoder(files.checkpoint)[1], seeing)  # only for its errors, before a framework is imported
        runtime = runtime_of(files.kind, files.checkpoint, options, engine(), notify)
        if options.cache_prompts:
            runtime.keep_prompts()
        residents = Residents(runtime)
        writer = files.writes(residents, runtime.reduced(files.checkpoint), seeing)
        machine, weights = f"{runtime.engine.name} on {runtime.engine.device}", runtime.weight_bytes(writer.component)
        try:
            yield OpenedWriter(
                writer=writer,
                headline=f"{machine} · {runtime.precision.summary()} · {clean(files.name, 80)}, {size_text(weights)}",
            )
        finally:
            residents.free()
