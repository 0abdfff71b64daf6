"""Opening of a language model that describes pictures: the text encoder of a model, or another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from qwenimg.common.base.errors import ModelError, NotHere
from qwenimg.common.families import catalog
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub import opened_writer
from qwenimg.common.hub.resolve import resolve
from qwenimg.common.parts.texts.describing import Describer
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.runtime import Notify

FAMILIES = ("qwen-image", "qwen-image-2.1")
"""The families whose text encoders see pictures as published, for the model that is taken if none is named."""


@contextmanager
def open_describer(
    options: LoadOptions, other: str | None, engine: Callable[[], Engine], notify: Notify
) -> Iterator[Describer]:
    """Open the text encoder of the model that `options` name, or the language model `other`, on an engine, which is
    called once the files have passed all checks. notify: gets stages, warnings and notices. Raises QwenimgError."""
    if other is None and options.model is None and not options.parts:
        options = replace(options, model=_first(options))
    with opened_writer.opened(options, other, engine, notify, seeing=True) as opened:
        yield Describer(writer=opened.writer, headline=opened.headline)


def _first(options: LoadOptions) -> str:
    """Return the first known model that is here and describes pictures. Raises ModelError."""
    known = [one for one in catalog.KNOWN.values() if one is not catalog.BUILT_IN and one.family in FAMILIES]
    names = [one.name for one in known]
    for name in names:
        with suppress(ModelError):
            resolve(name, offline=options.offline, without=options.replaced)
            return name
    raise NotHere(
        f"no model that describes pictures is here: get one by qwenimg pull {names[0]}, or give one by -m or --with",
        names[0],
        chosen=True,
    )
