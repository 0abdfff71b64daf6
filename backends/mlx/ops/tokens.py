"""The tokens of an image: all of them are here, since MLX has no exchange of heads between ranks."""

from __future__ import annotations

from mlx.core import array as Array


class Tokens:
    """The division of an image's tokens among ranks. On MLX there is one rank."""

    def part(self, x: Array) -> Array:
        """Return this rank's tokens of x [B L C]: all."""
        return x

    def rows(self, table: Array) -> Array:
        """Return the rows of a table [L ...] for this rank's tokens: all."""
        return table

    def once(self, x: Array) -> Array:
        """Return this rank's tokens of x [B L' C] that no earlier rank has: all."""
        return x

    def gathered(self, x: Array) -> Array:
        """Return the tokens [B L C] of all ranks, for this one's."""
        return x
