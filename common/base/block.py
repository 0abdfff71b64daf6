"""Which modules of a network are compared between backends."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Block:
    """A kind of modules of a network that can run alone, from their own weights and the arguments of one call."""

    name: str
    paths: re.Pattern[str]  # of the modules; the network itself is ""
    method: str = ""  # what is called; "" is the module itself
    image: bool = False  # whether the first argument and the result are images where they have four axes
    streams: int = 0  # so many first arguments are residual streams: a result of the shape of its one is its update
    once: bool = False  # whether it runs once for a schedule, on weights that are there for that only
    within: str = ""  # of a method of the network itself, the module that it runs
    depth: int = 0  # updates of a residual stream that it makes itself, not counting those of blocks inside of it

    def called(self, path: str) -> str:
        """What a trace calls it: the module's path, and the method."""
        return ".".join(part for part in (path, self.method) if part) or "whole"
