"""Prompts of requests rewritten by a language model before they are encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.numbers.noise import sha256
from qwenimg.common.parts.texts.picture_texts import SeenPicture
from qwenimg.common.parts.texts.rewriting import Draft, PromptWriter, Rewritten
from qwenimg.common.parts.texts.writing import Writer
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.stages import Stage

SHOWN = 4000  # characters of a prompt in a message
MOST = 784 * 784  # pixels of a picture as it is seen


def _none() -> PromptWriter:
    raise ModelError("rewrite: this model has no language model that writes: give one by --rewrite-with")


class Rewriters:
    """The language model that rewrites the prompts of one model: it is opened when a request asks for it first."""

    def __init__(self, opens: Callable[[], PromptWriter] = _none) -> None:
        """opens: opens its files and checks them; no weight is read. Raises QwenimgError."""
        self._opens = opens
        self._writer: PromptWriter | None = None

    def given(self, model: DiffusionModel, request: Request) -> Request:
        """Return a request with the language model that rewrites its prompt, if it asks for that. Raises
        QwenimgError."""
        if request.rewrite is None:
            return request
        if not request.prompt.strip():
            raise UsageError("rewrite makes a prompt better, and there is none: give one")
        if request.embeddings:
            raise UsageError("rewrite: a prompt loses the names of embeddings; leave out rewrite or embedding")
        writer = self._opened()
        writer.check(model.residents, model.checkpoint, _draft(model, request, writer))
        return replace(request, writer=writer)

    def writer(self, model: DiffusionModel, seeing: bool) -> Writer:
        """Return the language model, to see pictures if `seeing`. Raises QwenimgError."""
        return self._opened().writer(model.residents, model.checkpoint, seeing)

    @property
    def is_own(self) -> bool:
        """True if the language model is the text encoder of the model itself. Raises QwenimgError."""
        return self._opened().own

    def _opened(self) -> PromptWriter:
        if self._writer is None:
            self._writer = self._opens()
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _draft(model: DiffusionModel, request: Request, writer: PromptWriter) -> Draft:
    """Return the prompt of a request, with its pictures for a model that edits them."""
    edits = model.inputs.references is not None
    pictures = tuple(map(seen, request.images)) if edits else ()
    return writer.draft(request.prompt, pictures, request.loras, (request.width, request.height))


def seen(image: Uint8) -> SeenPicture:
    """Return an image as a language model sees it: on white, of at most MOST pixels."""
    height, width = image.shape[:2]
    scale = min(1.0, sqrt(MOST / (height * width)))
    picture = pixels.fit(pixels.over_white(image), *(max(1, round(scale * side)) for side in (width, height)))
    return SeenPicture(f"{width}x{height} {sha256(image)}", picture)


def planned(model: DiffusionModel, request: Request) -> tuple[Request, list[Stage]]:
    """Return a request with its rewritten prompt if that is known, and the stages in which it is written else."""
    writer, seed = request.writer, request.rewrite
    if writer is None or seed is None:
        return request, []
    asked = _draft(model, request, writer)
    known = writer.known(asked, seed)
    if known is not None:
        return _with(model, request, known), []
    return request, [writer.stage(model.residents, model.checkpoint, asked, seed)]


def rewritten(model: DiffusionModel, requests: Sequence[Request]) -> list[Request]:
    """Return requests with rewritten prompts, where they ask for it: those of one seed are written together. Raises
    QwenimgError."""
    made = list(requests)
    asked = [(index, one.writer, one.rewrite) for index, one in enumerate(requests)]
    for seed in dict.fromkeys(seed for _, writer, seed in asked if writer is not None and seed is not None):
        places = [index for index, writer, other in asked if writer is not None and other == seed]
        writer = requests[places[0]].writer
        assert writer is not None
        drafts = [_draft(model, requests[index], writer) for index in places]
        texts = writer.rewritten(model.residents, model.checkpoint, drafts, seed)
        for index, text in zip(places, texts, strict=True):
            made[index] = _with(model, requests[index], text)
    return made


def announced(model: DiffusionModel, request: Request) -> Request:
    """Return one request with its rewritten prompt, which is shown. Raises QwenimgError."""
    [made] = rewritten(model, [request])
    if made is not request and made.rewritten is not None:
        model.runtime.notify("stage", f"the prompt is now: {clean(made.prompt, SHOWN)}")
    return made


def recorded(request: Request) -> dict[str, object]:
    """Return the entries of a recipe about a rewritten prompt."""
    text = request.rewritten
    return {} if text is None else {"original_prompt": text.draft.prompt, "rewriting": text.record()}


def _with(model: DiffusionModel, request: Request, text: Rewritten) -> Request:
    return replace(request, prompt=model.as_text(text.prompt), rewrite=None, writer=None, rewritten=text)
