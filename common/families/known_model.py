"""A model that is known by name, with its defaults; and the place of a model on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FREE = ("Apache-2.0", "MIT")


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """One model. Sizes, steps, guidance and negative prompt are those of its model card."""

    name: str
    repo: str | None  # hub id, owner/name; None: it ships with this package, see `shapes.builtin`
    title: str
    license: str
    purpose: str
    width: int = 1024  # pixels
    height: int = 1024
    steps: int
    guidance: float
    negative_prompt: str = ""
    bytes: int  # of the files that are used, about; for messages
    memory: int  # bytes at its peak on a GPU or a Mac, at its size in the precision of `auto`, about; for messages
    family: str
    dtype: str = "bfloat16"  # of its published weights
    denoiser_dtype: str | None = None  # of its denoiser's weights, if another
    gated: bool = False  # True: its makers ask for a consent on the hub before the download
    mostly_text: bool = False  # True: its bytes, by which larger models are shown first, are the text encoder's
    aliases: tuple[str, ...] = ()  # other names, in lower case
    folder: str = ""  # of its configurations in `common/data`, if neither its name nor its family's
    files: tuple[str, ...] = ()  # names of its files in other programs, without suffix and in lower case

    @property
    def about(self) -> str:
        """The purpose, and whether its makers ask for a consent."""
        return f"{self.purpose}; gated" if self.gated else self.purpose

    @property
    def terms(self) -> str:
        """The license, if it has terms of use beyond those of FREE; else ""."""
        return "" if self.license in FREE else self.license

    @property
    def usual(self) -> dict[str, Any]:
        """The values of its model card, by the names of `Defaults`."""
        return {name: getattr(self, name) for name in ("width", "height", "steps", "guidance", "negative_prompt")}


@dataclass(frozen=True, kw_only=True)
class ModelPath:
    """A model on this machine, a folder or one file. `name` is a known name, a hub id or the last name of a path, never
    a path, for messages and metadata. `revision` is the commit of a folder in the cache."""

    folder: Path
    name: str
    known: KnownModel | None = None
    revision: str | None = None

    @property
    def from_path(self) -> bool:
        """True if the name alone does not identify the model."""
        return self.known is None and self.revision is None
