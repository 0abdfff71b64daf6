"""Calls of blocks, as they cross between a backend and numpy: what a trace records, and what can be run again alone.

A trace is of the modules themselves and not of the forwards, which know nothing of it: where nobody looks it is not
there at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from qwenimg.common.base.block import Block


@dataclass(frozen=True)
class Values:
    """An array of a backend: its values, and the name of the dtype that it had there. float32 holds what is 16 bit,
    int64 all whole numbers; images are [B C h w]."""

    dtype: str
    array: NDArray[Any]


@dataclass(frozen=True)
class Dtype:
    """A dtype that was an argument, by its name."""

    name: str


# Of an argument or a result: an array, a number, nothing, or several of these.
Tree: TypeAlias = "Values | Dtype | float | tuple[Tree, ...] | None"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a block."""

    path: str
    block: Block
    arguments: tuple[Tree, ...]
    results: Tree


class Look(Protocol):
    """What looks at a traced model."""

    def wants(self, path: str, block: Block) -> bool:
        """Whether the call that begins is to be taken."""
        ...

    def take(self, call: Call) -> None: ...


class Blocks(Protocol):
    """A network whose blocks run alone, each with its own weights only, which are read for the call and freed."""

    def call(self, path: str, block: Block, arguments: Sequence[Tree]) -> Tree: ...


Crossing: TypeAlias = Callable[[Any, bool], Tree]


def watch(model: Any, blocks: Iterable[Block], look: Look, calling: str, crossed: Crossing) -> None:
    """Makes every module of `model` that is one of `blocks` show its calls to `look`.

    calling: the method that a call of a module runs; crossed(argument or result, whether it is an image) makes a Tree.
    """
    for path, module in list(model.named_modules()):
        found = [block for block in blocks if block.paths.fullmatch(path)]
        if found:
            kind = type(module)
            names = {block: block.method or calling for block in found}
            shown = {name: _shown(getattr(kind, name), path, block, look, crossed) for block, name in names.items()}
            module.__class__ = type(kind.__name__, (kind,), shown)


def _shown(method: Callable[..., Any], path: str, block: Block, look: Look, crossed: Crossing) -> Callable[..., Any]:
    """`method` of a module, shown to `look` where it wants to see."""

    def call(self: Any, *arguments: Any) -> Any:
        if not look.wants(path, block):
            return method(self, *arguments)
        given = tuple(crossed(argument, block.image and i == 0) for i, argument in enumerate(arguments))
        results = method(self, *arguments)
        look.take(Call(path=path, block=block, arguments=given, results=crossed(results, block.image)))
        return results

    return call


def leaves(tree: Tree) -> list[Values]:
    """The arrays of `tree`, in order."""
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree] if isinstance(tree, Values) else []


def mapped(tree: Tree, change: Callable[[Values], Tree]) -> Tree:
    """`tree` with its arrays changed."""
    if isinstance(tree, tuple):
        return tuple(mapped(part, change) for part in tree)
    return change(tree) if isinstance(tree, Values) else tree
