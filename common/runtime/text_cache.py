"""Encoded prompts, kept in the system's memory, where thousands of them do not take the device's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

BUDGET = 2**30  # bytes; a prompt of 512 tokens of Qwen-Image takes 7.3 MB


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=_Sized)


class TextCache(Generic[K, V]):
    """Encoded prompts up to `budget` bytes, and the prompts that are announced for later, in their order."""

    def __init__(self, budget: int = BUDGET):
        self.budget = budget
        self._kept: dict[K, V] = {}
        self._announced: list[K] = []

    def announce(self, keys: Sequence[K]) -> None:
        """Names what will be asked for, so that an encoder that is loaded encodes as much of it as fits."""
        self._announced = list(dict.fromkeys(keys))

    def to_encode(self, needed: Sequence[K], size: Callable[[K], int]) -> list[K]:
        """What to encode now: nothing where all of `needed` is here, else the rest of it and, of what was announced
        from there on, as much as the budget holds. `size` gives the bytes of one."""
        if all(key in self._kept for key in needed):
            return []
        if self.nbytes > self.budget // 2:
            self._kept = {key: self._kept[key] for key in needed if key in self._kept}
        after = self._announced.index(needed[0]) if needed[0] in self._announced else len(self._announced)
        room, chosen = self.budget - self.nbytes, list[K]()
        for key in dict.fromkeys([*needed, *self._announced[after:]]):
            if key in self._kept:
                continue
            room -= size(key)
            if room < 0 and key not in needed:
                break
            chosen.append(key)
        return chosen

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self._kept.values())

    def __getitem__(self, key: K) -> V:
        return self._kept[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._kept[key] = value

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Drops what is encoded, of an encoder that has changed; what is announced stays so."""
        self._kept.clear()

    def clear(self) -> None:
        self._kept.clear()
        self._announced.clear()
