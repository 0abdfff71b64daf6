"""Calls of blocks, converted between a backend's arrays and numpy: a trace records them, and each can run again alone.

A trace wraps the modules; the forwards know nothing of it. Without an observer nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from qwenimg.common.base.block import Block


@dataclass(frozen=True)
class Values:
    """An array of a backend: its values, and the name of its dtype there. float32 holds 16-bit values, int64 all whole
    numbers; images are [B C h w]."""

    dtype: str
    array: NDArray[Any]


@dataclass(frozen=True)
class Dtype:
    """A dtype as an argument, by its name."""

    name: str


TINY = 2.0**-22  # the relative change of arguments and weights by which the gain of a block is measured

# An argument or a result: an array, a number, nothing, or several of these.
Tree: TypeAlias = "Values | Dtype | float | tuple[Tree, ...] | None"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a block."""

    path: str
    block: Block
    arguments: tuple[Tree, ...]
    results: Tree


class Look(Protocol):
    """A receiver of the calls of a traced model."""

    def wants(self, path: str, block: Block) -> bool:
        """Return whether the call that begins is to be recorded."""
        ...

    def take(self, call: Call) -> None: ...


class BlockRunner(Protocol):
    """A network whose blocks run alone, each with only its own weights, which are read for the call and freed."""

    def call(self, path: str, block: Block, arguments: Sequence[Tree], seed: int | None = None) -> Tree:
        """Return the results of the block at `path`. seed: in float64, of weights that are each moved up or down by
        TINY of itself."""
        ...


Crossing: TypeAlias = Callable[[Any, bool], Tree]


def watch(model: Any, blocks: Iterable[Block], look: Look, calling: str, crossed: Crossing) -> None:
    """Make every module of `model` that is one of `blocks` report its calls to `look`.

    calling: the method that a call of a module runs; crossed(argument or result, whether it is an image) makes a Tree.
    """
    for path, module in list(model.named_modules()):
        kinds = [block for block in blocks if block.paths.fullmatch(path)]
        if kinds:
            kind = type(module)
            names = {block: block.method or calling for block in kinds}
            shown = {name: _shown(getattr(kind, name), path, block, look, crossed) for block, name in names.items()}
            module.__class__ = type(kind.__name__, (kind,), shown)


def _shown(method: Callable[..., Any], path: str, block: Block, look: Look, crossed: Crossing) -> Callable[..., Any]:
    """Wrap `method` of a module so that it reports its calls to `look`."""

    def call(self: Any, *arguments: Any) -> Any:
        if not look.wants(path, block):
            return method(self, *arguments)
        given = tuple(crossed(argument, block.image and i == 0) for i, argument in enumerate(arguments))
        results = method(self, *arguments)
        look.take(Call(path=path, block=block, arguments=given, results=crossed(results, block.image)))
        return results

    return call


def leaves(tree: Tree) -> list[Values]:
    """Return the arrays of `tree`, in order."""
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree] if isinstance(tree, Values) else []


def mapped(tree: Tree, change: Callable[[Values], Tree]) -> Tree:
    """Return `tree` with its arrays changed."""
    if isinstance(tree, tuple):
        return tuple(mapped(part, change) for part in tree)
    return change(tree) if isinstance(tree, Values) else tree
