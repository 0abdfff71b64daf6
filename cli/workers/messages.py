"""The messages between a worker and the process that gives it work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.jobs.job import Job
from qwenimg.common.prompts.chat import Turn

# To a worker


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first message, with the settings of the worker."""

    models: Mapping[str, LoadOptions]  # that it may open, by name; the first is opened at once
    backend: str = "auto"  # of all models; auto: their own
    threads: int = 0  # on a CPU; 0: its framework's choice


@dataclass(frozen=True, kw_only=True)
class Enlarging:
    """A picture that is made larger instead of drawn."""

    upscaler: str  # a file, or `lanczos` or `nearest`
    by: float = 0.0  # how many times as wide and high; 0: until it covers `size`
    size: tuple[int, int] = (0, 0)  # width and height
    crops: bool = False  # what is more than `size` is cut off around its middle
    seconds: float = 0.0  # it is refused if it takes longer


@dataclass(frozen=True, kw_only=True)
class Writing:
    """A text that the model's language model writes, about the job's pictures or its prompt, instead of a picture."""

    task: Literal["rewrite", "caption", "tags", "chat"]
    language: str = ""  # of the instruction; "": that of the prompt
    system: str = ""  # the instruction of a chat
    question: str = ""  # of a chat; or about a picture, in place of a caption
    limit: int | None = None  # tokens; None here and below: the model's own
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()  # the text ends before the first of these
    earlier: tuple[Turn, ...] = ()  # of a chat, whose pictures come first
    sees: bool = False  # True: it is about pictures


@dataclass(frozen=True, kw_only=True)
class Training:
    """A LoRA that is trained instead of drawing a picture."""

    folder: str  # in which its pictures, its run and its file are
    options: Mapping[str, Any]  # of `train lora`, by their names; `data`, `keep` and `output` are names in the folder
    continues: bool = False  # True: it goes on from its checkpoint if there is one, since an earlier server began it


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A job to draw."""

    id: str
    model: str
    job: Job
    first: int = 0  # the number of pictures that are drawn already: one for each seed, or one for each layer
    suffix: str = ".png"
    preview_suffix: str = ""  # of previews while it is drawn, or none
    thumbnail: bool = False  # True: each picture comes with a small one
    partial: int = 0
    """Previews of the picture's size that divide its steps evenly; 0: small ones, as many as cost next to nothing."""
    enlarging: Enlarging | None = None  # of the job's picture, instead of drawing
    writing: Writing | None = None  # of a text, instead of drawing
    training: Training | None = None  # of a LoRA, instead of drawing
    seconds: float = 0.0  # a job whose picture an upscaler would make larger for longer is refused; 0: none is


@dataclass(frozen=True, kw_only=True)
class Halt:
    """Stop a job after the current step; with `skip`, only its current picture."""

    id: str
    skip: bool = False


@dataclass(frozen=True, kw_only=True)
class End:
    """End the process at once."""


ToWorker = Start | Draw | Halt | End


# From a worker


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts of an open model that clients may know."""

    name: str
    family: str
    defaults: Mapping[str, Any]
    options: tuple[str, ...]  # the special options that it takes
    images: tuple[int, int] = (0, 1)  # the fewest and the most of a request
    unguided: float = 1.0  # guidance up to which there is none
    controlled: bool = False  # True: it takes control networks
    sees_control: bool = False  # True: it needs a control picture, which it sees itself
    writes: bool = False  # True: its text encoder writes texts
    describes: bool = False  # True: also about pictures


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
    """The first model does not open, so this worker cannot draw."""

    exit_code: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A finished step."""

    id: str  # of the job
    index: int  # of the picture, from 0
    step: int
    steps: int
    seconds: float
    preview: bytes = b""  # a file, if one was due
    size: tuple[int, int] = (0, 0)  # width and height of the picture


@dataclass(frozen=True, kw_only=True)
class PictureDrawn:
    """A picture."""

    id: str  # of the job
    index: int
    data: bytes
    recipe: Mapping[str, Any]
    seconds: float
    thumbnail: bytes = b""  # a JPEG


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """The next words of a text."""

    id: str  # of the job
    text: str


@dataclass(frozen=True, kw_only=True)
class TextWritten:
    """A whole text."""

    id: str  # of the job
    text: str
    prompt_tokens: int
    tokens: int
    cut: bool = False  # True: it has as many tokens as it may have
    note: str = ""  # why it is the prompt itself and no better one
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingNote:
    """A line about a training: its pictures, its plan, a warning."""

    id: str  # of the job
    text: str


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """The last step of a training until now."""

    id: str  # of the job
    step: int
    steps: int
    made: int  # steps since the message before
    loss: float  # the mean of these
    rate: float
    left: float  # seconds


@dataclass(frozen=True, kw_only=True)
class TrainingSamples:
    """The losses on fixed noise after a step of a training, and its samples."""

    id: str  # of the job
    step: int
    learnt: float
    held_out: float | None
    pictures: tuple[bytes, ...]  # small JPEGs, one for each prompt


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The LoRA is written."""

    id: str  # of the job
    path: str


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of a job: all its pictures are drawn, or it was halted, or `error` says why not."""

    id: str  # of the job
    error: str = ""
    exit_code: int = 0  # of the error, as the command line would return it
    refused: bool = False  # True: the request asks for what the model cannot do, or names what does not fit it
    peak: int = 0  # bytes, of the worker so far


FromWorker = (
    ModelOpened
    | Ready
    | Unusable
    | Stepped
    | PictureDrawn
    | TextPart
    | TextWritten
    | TrainingNote
    | TrainingStep
    | TrainingSamples
    | Trained
    | Finished
)
