"""An opened model: its components, each with a configuration and a plan of its weights, checked and not read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qwenimg.common.base.found_once import found_once
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.weights import quantise
from qwenimg.common.weights.lora import Deltas
from qwenimg.common.weights.plan import LoadPlan


@dataclass(frozen=True, kw_only=True)
class Component:
    """One network with its weights."""

    network: str  # the module in `networks` that describes it, and the backends' that computes it
    role: str  # text, transformer or vae: whose precision holds
    config: Any  # that module's configuration
    plan: LoadPlan
    blocks: re.Pattern[str] | None = None  # weights of its blocks, which may be kept in codes
    streamable: re.Pattern[str] | None = None  # weights that may be streamed; a group: the module whose call needs them

    def stored(self, precision: Precision) -> LoadPlan:
        """Of its weights, as they are kept in memory under a policy."""
        if self.plan.precision == precision:
            return self.plan
        known = _stored(self.plan, self.role)
        found = next((plan for plan in known if plan.precision == precision), None)
        if found is None:
            known.append(found := self.plan.stored(precision, self.role))
        return found

    def held(self, precision: Precision) -> int:
        """Bytes of its weights that are in memory at once under a policy, without a plan of them."""
        always = (entry for entry in self.plan.entries.values() if entry.residency is ALWAYS)
        return sum(entry.bytes_under(precision, self.role) for entry in always)


@found_once
def _stored(plan: LoadPlan, role: str) -> list[LoadPlan]:
    """Under each policy that was asked for."""
    return []


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The tokenizer of a text encoder: where it is, and `read`, which reads and checks it. Raises ModelError."""

    path: Path
    read: Callable[[Path], Any]

    @cached_property
    def tokenizer(self) -> Any:
        return self.read(self.path)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model of any family. The plans hold their files open until `close`."""

    source: Path
    components: Mapping[str, Component]  # by the name of its folder in diffusers layout
    tokenizers: Mapping[str, TokenizerFiles]  # by the name of the text encoder's folder
    scheduler: Any  # the configuration of the family's noise levels
    zeros_for_empty: bool = False  # the states of an empty negative prompt are zeros, and not encoded

    def __getitem__(self, name: str) -> Component:
        return self.components[name]

    @property
    def texts(self) -> dict[str, Component]:
        """The text encoders, in their order."""
        return {name: part for name, part in self.components.items() if part.role == "text"}

    @property
    def denoisers(self) -> list[Component]:
        """The transformer or the UNet; beside a refiner, of the base alone."""
        return [part for part in self.components.values() if part.role == "transformer"]

    @property
    def parameters(self) -> int:
        """Number of values that the forwards use."""
        return sum(part.plan.parameters for part in self.components.values())

    def with_deltas(self, deltas: Deltas) -> Checkpoint:
        """The same with `deltas`, of LoRAs, and no others, added to its weights."""
        components = {
            name: part if part.role == "vae" else replace(part, plan=part.plan.with_deltas(deltas.get(name, {})))
            for name, part in self.components.items()
        }
        return replace(self, components=components)

    def quantised(self, text: str) -> Checkpoint:
        """The same with its weights kept as the policy `text` (`quantise.SYNTAX`) says. Raises UsageError."""
        policies = quantise.parse(text)

        def kept(part: Component) -> Component:
            if part.blocks is None or part.role not in policies:
                return part
            return replace(part, plan=quantise.quantised(part.plan, policies[part.role], part.blocks))

        return replace(self, components={name: kept(part) for name, part in self.components.items()})

    def converted(self) -> Checkpoint:
        """Return the same as if its files had the codes that `quantised` gave it, of which nothing can be read."""
        components = {name: replace(part, plan=quantise.converted(part.plan)) for name, part in self.components.items()}
        return replace(self, components=components)

    def as_stored(self) -> Checkpoint:
        """The same with its weights as its files have them, without what `quantised` made of them."""
        components = {name: replace(part, plan=quantise.as_stored(part.plan)) for name, part in self.components.items()}
        return replace(self, components=components)

    @property
    def file_bytes(self) -> int:
        """Of the files with its weights."""
        files = {file.path: file.size for part in self.components.values() for file in part.plan.files}
        return sum(files.values())

    def largest(self, precision: Precision) -> int:
        """Bytes of the weights of its largest component under a policy: the least that has to be in memory at once."""
        return max(part.held(precision) for part in self.components.values())

    def read_tokenizers(self) -> None:
        """Reads them, which a backend would otherwise do after its framework is imported. Raises ModelError."""
        for files in self.tokenizers.values():
            _ = files.tokenizer

    def close(self) -> None:
        for part in self.components.values():
            part.plan.close()
