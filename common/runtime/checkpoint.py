"""An opened model: its components, each with a configuration and a checked plan of weights that are not read yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from qwenimg.common.base.block import CachedBlocks
from qwenimg.common.base.found_once import found_once
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.weights import quantize
from qwenimg.common.weights.loras.lora import Deltas
from qwenimg.common.weights.plan import Delta, LoadPlan
from qwenimg.common.weights.storage import Packed


@dataclass(frozen=True, kw_only=True)
class Component:
    """One network with its weights."""

    network: str  # the module in `networks` that describes it, and the backends' module that computes it
    role: str  # text, transformer or vae: the part whose precision it has
    config: Any  # the network's configuration
    plan: LoadPlan
    blocks: re.Pattern[str] | None = None  # weights of its blocks, which may stay quantized
    streamable: re.Pattern[str] | None = None  # weights that may be streamed; a group: the module whose call needs them
    compiled: re.Pattern[str] | None = None  # of a denoiser, the paths of the modules that are compiled one by one
    cached_blocks: CachedBlocks | None = None  # of a denoiser, the blocks that a step cache skips
    picture_input: str = ""  # of a denoiser, the weight whose inputs a LoRA may widen
    # From another network or None, and a configuration, the component of its files by them. Raises ModelError
    reopen: Callable[[Any, Any], Component] | None = field(default=None, compare=False, repr=False)
    quantization: str = ""  # the text of `quantized`

    def with_deltas(self, deltas: Mapping[str, tuple[Delta, ...]]) -> Component:
        """Return it with LoRA deltas, by parameter, in place of any earlier ones, and the inputs that they add."""
        plan = self.plan.with_deltas(deltas)
        if not self.picture_input:
            return replace(self, plan=plan)
        return replace(self, plan=plan, config=self.config.seeing(plan.entries[self.picture_input].shape[1]))

    @property
    def is_quantized(self) -> bool:
        """True if weights stay quantized in memory."""
        return any(isinstance(entry.storage, Packed) for entry in self.plan.entries.values())

    def multiplies_int8(self, precision: Precision) -> bool:
        """Return whether layers multiply in 8 bits under a policy."""
        storages = (entry.storage for entry in self.stored(precision).entries.values())
        return any(isinstance(storage, Packed) and storage.int8 for storage in storages)

    def stored(self, precision: Precision) -> LoadPlan:
        """Return the plan of its weights in memory under a policy."""
        return self.plan if self.plan.precision == precision else _stored(self.plan, self.role, precision)

    def quantized(self, text: str) -> Component:
        """Return it with its weights quantized by `text` (`quantize.SYNTAX`). Raises UsageError."""
        policies = quantize.parse(text)
        if self.blocks is None or self.role not in policies:
            return self
        plan = quantize.quantized(self.plan, policies[self.role], self.blocks)
        return replace(self, plan=plan, quantization=text)

    def held(self, precision: Precision) -> int:
        """Return the bytes of its weights that are in memory at once under a policy, without a plan for the policy."""
        return _held(self.plan, self.role, precision)


@found_once
def _held(plan: LoadPlan, role: str, precision: Precision) -> int:
    always = (entry for entry in plan.entries.values() if entry.residency is ALWAYS)
    return sum(entry.bytes_under(precision, role) for entry in always)


@found_once
def _stored(plan: LoadPlan, role: str, precision: Precision) -> LoadPlan:
    return plan.stored(precision, role)


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The tokenizer of a text encoder: its path, and `read`, which reads and checks it. Raises ModelError."""

    path: Path
    read: Callable[[Path], Any]

    @cached_property
    def tokenizer(self) -> Any:
        return self.read(self.path)


Reports: TypeAlias = tuple[tuple[str, str], ...]
"""Messages: the kind of each (`stage`, `notice`, `warning` or MISSING), and its line."""
MISSING = "missing"
"""The kind of a message on a small file that a run needs and a plan does not."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model of any family. The plans hold their files open until `close`."""

    source: Path
    components: Mapping[str, Component]  # by the name of its folder in diffusers layout
    tokenizers: Mapping[str, TokenizerFiles]  # by the name of the text encoder's folder
    scheduler: Any  # the configuration of the family's noise levels
    variant: str = ""  # the family's name for this one of its models, if it has several that files do not tell apart
    distilled: bool = False  # True: made to draw in few steps without guidance
    reports: Reports = ()  # on its files, for whoever opens it to draw
    zeros_for_empty: bool = False  # True: the states of an empty negative prompt are zeros in place of encoded ones
    refiner: Checkpoint | None = None  # of the last steps, by a model of its own

    def __getitem__(self, name: str) -> Component:
        return self.components[name]

    @property
    def texts(self) -> dict[str, Component]:
        """The text encoders, in their order."""
        return {name: part for name, part in self.components.items() if part.role == "text"}

    @property
    def denoisers(self) -> list[Component]:
        """The transformer or the UNet; with a refiner, the base's UNet only."""
        return [part for part in self.components.values() if part.role == "transformer"]

    @property
    def parameters(self) -> int:
        """The number of values that the forwards use."""
        return sum(part.plan.parameters for part in self.components.values())

    def with_part(self, name: str, part: Component) -> Checkpoint:
        """Return the checkpoint with another component `name`. Files from which no component is read are closed."""
        changed = replace(self, components={**self.components, name: part})
        used = {file for other in changed.components.values() for file in other.plan.files}
        if used.isdisjoint(self[name].plan.files):
            self[name].plan.close()
        return changed

    def with_nets(self, nets: Mapping[str, Component], before: Iterable[str] = ()) -> Checkpoint:
        """Return the checkpoint with control networks by their names, in place of those named in `before`."""
        others = {name: part for name, part in self.components.items() if name not in set(before)}
        return replace(self, components=others | dict(nets))

    def with_deltas(self, deltas: Deltas) -> Checkpoint:
        """Return the checkpoint with these LoRA deltas, in place of any earlier ones."""
        components = {
            name: part if part.role == "vae" else part.with_deltas(deltas.get(name, {}))
            for name, part in self.components.items()
        }
        return replace(self, components=components)

    def quantized(self, text: str) -> Checkpoint:
        """Return the checkpoint with its weights quantized by `text` (`quantize.SYNTAX`). Raises UsageError."""
        return replace(self, components={name: part.quantized(text) for name, part in self.components.items()})

    def converted(self) -> Checkpoint:
        """Return the checkpoint as if its files had the codes of `quantized`, for plans: no weight can be read."""
        components = {name: replace(part, plan=quantize.converted(part.plan)) for name, part in self.components.items()}
        return replace(self, components=components)

    def as_stored(self) -> Checkpoint:
        """Return the checkpoint with its weights as in its files, without the effect of `quantized`."""
        components = {
            name: replace(part, plan=quantize.as_stored(part.plan), quantization="")
            for name, part in self.components.items()
        }
        return replace(self, components=components)

    @property
    def file_bytes(self) -> int:
        """The bytes of the files with its weights."""
        files = {file.path: file.size for part in self.components.values() for file in part.plan.files}
        return sum(files.values())

    def largest(self, precision: Precision) -> int:
        """Return the bytes of its largest component's weights under a policy: the least to have in memory at once."""
        return max(part.held(precision) for part in self.components.values())

    def read_tokenizers(self) -> None:
        """Read the tokenizers, which a backend would do only after its framework is imported. Raises ModelError."""
        for files in self.tokenizers.values():
            _ = files.tokenizer

    def close(self) -> None:
        for part in self.components.values():
            part.plan.close()
        if self.refiner is not None:
            self.refiner.close()
