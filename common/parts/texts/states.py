"""The text states of prompts: encoded once, kept in memory and, where the user asks for it, on the disk.

They are kept in the system's memory, so that thousands of them do not fill the device's. A text encoder is opened for
new prompts, also encodes announced prompts up to the budget, and is freed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.shape import Shape
from qwenimg.common.memory.memory import scores
from qwenimg.common.runtime import text_store
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Split, Stage

BUDGET = 2**30  # bytes; a prompt of 512 tokens of Qwen-Image takes 7.3 MB

RESIDENT = "text encoder"  # its name in memory

States = tuple[NDArray[np.float32], ...]  # the arrays that one prompt is encoded to
Key = TypeVar("Key", bound=Hashable)
Prompt = TypeVar("Prompt")
Encoded = TypeVar("Encoded")


class Texts(ABC, Generic[Key]):
    """The text states of a model, up to `budget` bytes. A key is a prompt with the options that change its states."""

    feed_forward: int  # arrays of the feed-forward's width that a text encoder has in memory at its peak

    def __init__(self, residents: Residents, encoders: Mapping[str, Component]):
        self.residents, self.runtime, self.encoders = residents, residents.runtime, encoders
        self.budget = BUDGET
        self._kept: dict[Key, States] = {}
        self._announced: list[Key] = []

    # Defined for each kind of text encoders

    @abstractmethod
    def shapes(self, key: Key) -> list[Shape]:
        """Return the shapes of the states of `key`."""

    @abstractmethod
    def tokens(self, key: Key) -> list[object]:
        """Return all that the states of `key` depend on besides weights: its tokens, and which states are used."""

    @abstractmethod
    def encode(self, keys: Sequence[Key]) -> Iterable[States]:
        """Open the text encoders and yield the states of each of `keys`."""

    # Called by a model

    def has(self, keys: Iterable[Key]) -> bool:
        """Return whether the states of all `keys` are in memory or on the disk, so that no text encoder is needed."""
        store = self.runtime.prompts
        return all(key in self._kept or (store is not None and store.has(self._name(key))) for key in keys)

    def announce(self, keys: Iterable[Key]) -> None:
        """Encode the first of `keys` now, with as many others as fit into the budget, and the rest when needed."""
        self._announced = list(dict.fromkeys(keys))
        self.arrays(self._announced[:1])

    def upcoming(self, first: Key) -> list[Key]:
        """Return the announced keys from `first` on; none if it was not announced."""
        return self._announced[self._announced.index(first) :] if first in self._announced else []

    def arrays(self, needed: Sequence[Key]) -> list[States]:
        """Return the states of `needed`, encoded if they are neither in memory nor on the disk."""
        missing = [key for key in self._chosen(needed) if not self._read(key)]
        for key, states in zip(missing, self.encode(missing) if missing else (), strict=True):
            self._kept[key] = states
            if self.runtime.prompts is not None:
                self.runtime.prompts.put(self._name(key), states)
        return [self._kept[key] for key in needed]

    def renew(self, encoders: Mapping[str, Component]) -> None:
        """Replace the text encoders by those of `encoders`, which may have more. Drop all states if LoRAs change other
        weights than before."""
        renewed = {name: encoders[name] for name in self.encoders}
        if not all(self.encoders[name].plan.same_deltas(now.plan) for name, now in renewed.items()):
            self.forget()
        self.encoders = renewed

    def forget(self) -> None:
        """Drop all states, since a text encoder has changed. Keys stay announced."""
        self._kept.clear()

    def close(self) -> None:
        """Drop all states and all announced keys."""
        self._kept.clear()
        self._announced.clear()

    # Which prompts are encoded

    def _chosen(self, needed: Sequence[Key]) -> list[Key]:
        """Return the keys to encode: none if all of `needed` is in memory, else its missing keys, and as many announced
        keys from the first needed one on as fit into the budget. Drop other states if these take over half of it."""
        if all(key in self._kept for key in needed):
            return []
        if self._bytes > self.budget // 2:
            self._kept = {key: self._kept[key] for key in needed if key in self._kept}
        free, chosen = self.budget - self._bytes, list[Key]()
        for key in dict.fromkeys([*needed, *self.upcoming(needed[0])]):
            if key in self._kept:
                continue
            free -= 4 * sum(map(prod, self.shapes(key)))
            if free < 0 and key not in needed:
                break
            chosen.append(key)
        return chosen

    @property
    def _bytes(self) -> int:
        return sum(array.nbytes for states in self._kept.values() for array in states)

    def _read(self, key: Key) -> bool:
        """Read the states of `key` from the disk; return whether they are there."""
        store = self.runtime.prompts
        states = None if store is None else store.get(self._name(key), self.shapes(key))
        if states is not None:
            self._kept[key] = tuple(states)
        return states is not None

    def _name(self, key: Key) -> str | None:
        plans = [self.runtime.load_plan(component) for component in self.encoders.values()]
        return text_store.key(self.runtime.engine.name, self.runtime.precision.name, plans, self.tokens(key))

    # For the encoding

    def stage(
        self, component: Component, sequences: int, length: int, more: int = 0, resident: str = RESIDENT
    ) -> Stage:
        """Return the stage in which the network `resident` encodes `sequences` of `length` tokens each at once, with
        `more` bytes."""
        activations = layer_bytes(self.runtime, component, sequences, length, self.feed_forward, more)
        splits = (Split(activations=activations),)
        return Stage(name="text", resident=resident, component=component, splits=splits, keeps=False)

    def run(
        self, stage: Stage, encode: Callable[[Any, Prompt], Encoded], prompts: Iterable[Prompt]
    ) -> Iterator[Encoded]:
        """Open the text encoder of `stage`, yield the result of `encode` for each of `prompts`, and free it."""
        encoder, _ = self.residents.acquire(stage)
        with self.runtime.clock.timed("encode"):
            for prompt in prompts:
                yield encode(encoder, prompt)
        del encoder
        self.runtime.engine.release()

    def computed(self, compute: Callable[[], Array], resident: str = RESIDENT) -> NDArray[np.float32]:
        """Return the result of a text encoder, the network `resident`. Raises NumericsError unless it is finite."""
        result = compute()
        self.runtime.check_finite(result, resident, "text", compute)
        return np.ascontiguousarray(self.runtime.engine.numpy(result), np.float32)


def layer_bytes(
    runtime: Runtime, component: Component, sequences: int, length: int, feed_forward: int, more: int = 0
) -> int:
    """Return the bytes of a text encoder's activations, in float32: those of its feed-forward, six arrays of the hidden
    size, the scores of its attention, and `more` bytes."""
    config, limit = component.config, runtime.engine.workspace.score_bytes
    widths = feed_forward * config.intermediate_size + 6 * config.hidden_size
    score_bytes = scores(config.num_attention_heads, sequences, length, limit)
    return runtime.call_bytes(component, sequences * length * widths * 4 + score_bytes + more)


class ModelTexts(Protocol):
    """The text states of all text encoders of a model, by prompts; see `PromptTexts`."""

    def has(self, prompts: Sequence[Any], /) -> bool: ...

    def announce(self, prompts: Sequence[Any], /) -> None: ...

    def renew(self, encoders: Mapping[str, Component], /) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...

    def states(self, prompts: Sequence[Any], /) -> list[Any]: ...

    def cut(self, prompt: Any, /) -> str: ...

    def lengths(self, prompts: Sequence[Any], counted: bool, /) -> list[int]: ...

    def encodings(self, prompts: Sequence[Any], counted: bool, /) -> list[Stage]: ...


class PromptTexts(Texts[Key]):
    """The text states of a model for which a prompt is the key, alone or with the pictures in it."""

    def states(self, prompts: Sequence[Key]) -> list[Array]:
        """Return the states of each prompt on the device."""
        return [self.runtime.engine.array(states) for (states,) in self.arrays(prompts)]

    @abstractmethod
    def cut(self, prompt: Key) -> str:
        """Return which tokens of a `prompt` that is too long the model does not see, for a message; else nothing."""

    @abstractmethod
    def lengths(self, prompts: Sequence[Key], counted: bool) -> list[int]:
        """Return the number of tokens of each of `prompts` that the denoiser takes. counted: count them; else each
        prompt counts as the longest."""

    @abstractmethod
    def encodings(self, prompts: Sequence[Key], counted: bool) -> list[Stage]:
        """Return the stages that encode `prompts`. counted: as in `lengths`."""
