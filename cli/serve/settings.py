"""The settings of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.prompts.wildcards import OFF


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a server."""

    models: Mapping[str, LoadOptions]  # by served names, the first is opened at the start
    aliases: Mapping[str, str] = field(default_factory=dict)  # further names of models
    backends: tuple[str, ...] = ("auto",)  # a worker for each
    loras: dict[str, str] = field(default_factory=dict)  # files, by the names that requests may give; trained ones too
    controls: Mapping[str, str] = field(default_factory=dict)  # control networks, likewise
    adapters: tuple[str, ...] = ()  # those of `controls` that are IP-Adapters
    embeddings: Mapping[str, str] = field(default_factory=dict)  # likewise
    embedding_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # widths and numbers of vectors
    upscalers: Mapping[str, str] = field(default_factory=dict)  # of the folders of --models-dir, likewise
    training: str = ""  # the real path of the folder in which LoRAs are trained; "": none are
    hosts: frozenset[str] = frozenset()  # accepted in the header Host, besides those of this machine
    token: str = ""
    queue: int = 16  # jobs that may wait
    share: int = 4  # of these of one client on another machine
    deadline: float = 600.0  # seconds
    patience: float = 60.0  # seconds for running jobs after SIGTERM

    @property
    def reads_templates(self) -> bool:
        """True unless --wildcards off was given."""
        return all(OFF not in map(str, opening.wildcards) for opening in self.models.values())
