"""The row of data that describes a network; each file of this room ends with one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.shape import Manifest
from qwenimg.common.weights.plan import Uses, as_stored


def _same(name: str) -> str:
    return name


def _as_it_is(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return data


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network of the room, as data."""

    name: str  # of its file, here and in the backends
    role: str  # text, transformer or vae: whose precision holds
    kind: str  # what `key` says in its config.json
    key: str = "_class_name"
    config: type[Any]
    manifest: Callable[[Any], Manifest]  # of a config: every tensor that is stored
    uses: Callable[[Manifest], Uses] = as_stored  # of those, what the forward takes, in which shapes and when
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _as_it_is  # of a config.json, those of `config`
    ignored: frozenset[str] = frozenset()  # keys of config.json without a meaning for the forward
    blocks: re.Pattern[str] | None = (
        None  # weights of its blocks that may be kept in codes; a group: the block's number
    )
    streamable: re.Pattern[str] | None = None  # weights that may be streamed; a group: the module whose call needs them
    tables: frozenset[str] = frozenset()  # matrices that are looked up and not multiplied
    traced: tuple[Block, ...] = ()  # what of it is compared between backends
    architectures: frozenset[str] = frozenset()  # what a GGUF file of it says that it is
    rename: Callable[[str], str | None] | None = None  # a stored name in the manifest's, None where it is of no use
    published: Callable[[str], str] = _same  # a name of the manifest as published files have it
    described: Callable[[Any], Mapping[str, object]] = (
        lambda config: {}
    )  # of a config, what config.json needs beside it

    def written(self, config: Any) -> dict[str, object]:
        """The config.json of a model that comes without one."""
        return {self.key: self.kind, **asdict(config), **self.described(config)}
