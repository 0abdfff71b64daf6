"""Where a value stopped being finite: the failing computation is run again with a look at every operation."""

from __future__ import annotations

from collections.abc import Callable

from qwenimg.common.runtime.engine import Array, Engine


class _Found(Exception):
    """The first operation with a non-finite result; ends the second run there."""


def first_non_finite(engine: Engine, run: Callable[[], object]) -> str | None:
    """Runs `run` again; the path and operation whose result is the first to be non-finite, or None if all are finite.

    An operation without parameters of its own (attention, a gated sum) is named by the block of the last one that has.
    """
    last = ""

    def look(operation: str, path: str, result: Array) -> None:
        nonlocal last
        last = path or last
        if not engine.finite(result):
            where = path or _block(last)
            dtype = str(getattr(result, "dtype", "")).rpartition(".")[2]
            raise _Found(f"{where}, operation {operation}, {dtype}" if where else f"operation {operation}, {dtype}")

    try:
        with engine.observe(look):
            engine.finite(run())
    except _Found as found:
        return str(found)
    return None


def _block(path: str) -> str:
    """`transformer_blocks.3` of `transformer_blocks.3.attn.to_q`."""
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else parts[0]
