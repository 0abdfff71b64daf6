"""What is found of an object that never changes is found once, and kept as long as the object is there."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

_Of = TypeVar("_Of")
_More = ParamSpec("_More")
_Found = TypeVar("_Found")


def found_once(find: Callable[Concatenate[_Of, _More], _Found]) -> Callable[Concatenate[_Of, _More], _Found]:
    """`find`, which is called once for each first argument with the same others. What it gives must not hold that
    argument, which would then never be freed."""
    known: WeakKeyDictionary[Any, dict[Hashable, _Found]] = WeakKeyDictionary()

    @wraps(find)
    def found(of: _Of, /, *args: _More.args, **kwargs: _More.kwargs) -> _Found:
        own, key = known.setdefault(of, {}), (args, tuple(kwargs.items()))
        if key not in own:
            own[key] = find(of, *args, **kwargs)
        return own[key]

    return found
