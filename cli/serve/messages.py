"""The messages between the server's process and a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qwenimg.common.families.opening import Opening
from qwenimg.common.jobs.job import Job
from qwenimg.common.prompts.wildcards import OFF

# To a worker


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first message: the models that the worker may open, by their served names; the first is opened at once."""

    models: Mapping[str, Opening]
    backend: str = "auto"  # of all models; auto: their own


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A job to draw."""

    order: str
    model: str
    job: Job
    first: int = 0  # the number of pictures that are drawn already: one for each seed, or one for each layer
    suffix: str = ".png"
    preview_suffix: str = ""  # of previews while it is drawn, or none
    thumbnail: bool = False  # True: each picture comes with a small one
    partial: int = 0
    """Previews of the picture's size that divide its steps evenly; 0: small ones, as many as cost next to nothing."""


@dataclass(frozen=True, kw_only=True)
class Halt:
    """An order that is not drawn any further after the current step; with `skip`, only its current picture is not."""

    order: str
    skip: bool = False


@dataclass(frozen=True, kw_only=True)
class End:
    """The worker's process ends at once."""


ToWorker = Start | Draw | Halt | End


# From a worker


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts of a model once it is opened."""

    name: str
    family: str
    defaults: Mapping[str, Any]
    options: tuple[str, ...]  # the special options that it takes
    images: tuple[int, int] = (0, 1)  # the fewest and the most of a request
    unguided: float = 1.0  # guidance up to which there is none
    controlled: bool = False  # True: it takes control networks


@dataclass(frozen=True, kw_only=True)
class ModelOpened:
    """The model that is open now."""

    model: ModelFacts
    headline: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The first model is open and has drawn a picture of one step."""

    schema: Mapping[str, Any] = field(default_factory=dict)  # of a request: making it takes 20 MB, which are here
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of every served model, by its name


@dataclass(frozen=True, kw_only=True)
class Unusable:
    """A worker that cannot work: the error of a model that does not open."""

    exit_code: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A finished step."""

    order: str
    index: int  # of the picture, from 0
    step: int
    steps: int
    seconds: float
    preview: bytes = b""  # a file, if one was due
    size: tuple[int, int] = (0, 0)  # width and height of the picture


@dataclass(frozen=True, kw_only=True)
class PictureDrawn:
    """A picture."""

    order: str
    index: int
    data: bytes
    recipe: Mapping[str, Any]
    seconds: float
    thumbnail: bytes = b""  # a JPEG


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of an order: all its pictures are drawn, or it was halted, or `error` says why not."""

    order: str
    error: str = ""
    exit_code: int = 0  # of the error, as the command line would return it
    refused: bool = False  # True: the request asks for what the model cannot do, or names what does not fit it
    peak: int = 0  # bytes, of the worker so far


FromWorker = ModelOpened | Ready | Unusable | Stepped | PictureDrawn | Finished


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a server."""

    models: Mapping[str, Opening]  # by served names, the first is opened at the start
    aliases: Mapping[str, str] = field(default_factory=dict)  # further names of models
    backends: tuple[str, ...] = ("auto",)  # a worker for each
    threads: int = 0  # of a worker on a CPU; 0: its framework's choice
    loras: Mapping[str, str] = field(default_factory=dict)  # files, by the names that requests may give
    controls: Mapping[str, str] = field(default_factory=dict)  # control networks, likewise
    hosts: frozenset[str] = frozenset()  # accepted in the header Host, besides those of this machine
    token: str = ""
    queue: int = 16  # orders that may wait
    share: int = 4  # of these of one client on another machine
    deadline: float = 600.0  # seconds
    patience: float = 60.0  # seconds for running orders after SIGTERM

    @property
    def reads_templates(self) -> bool:
        """False if prompts are text, whatever they hold."""
        return all(OFF not in map(str, opening.wildcards) for opening in self.models.values())
