"""A cache of results about objects that never change: a result lives as long as its object."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

_Of = TypeVar("_Of")
_More = ParamSpec("_More")
_Found = TypeVar("_Found")


def found_once(find: Callable[Concatenate[_Of, _More], _Found]) -> Callable[Concatenate[_Of, _More], _Found]:
    """Wrap `find` so that it runs once for each first argument with the same others. Its result must not refer to the
    first argument, which would then never be freed."""
    results: WeakKeyDictionary[Any, dict[Hashable, _Found]] = WeakKeyDictionary()

    @wraps(find)
    def found(of: _Of, /, *args: _More.args, **kwargs: _More.kwargs) -> _Found:
        by_arguments, key = results.setdefault(of, {}), (args, tuple(kwargs.items()))
        if key not in by_arguments:
            by_arguments[key] = find(of, *args, **kwargs)
        return by_arguments[key]

    return found
