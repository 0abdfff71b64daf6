"""The blocks of a model that are compared: which there are, the dtype in which each computes, and its number of updates
of a residual stream. Errors grow with the root of that number."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from qwenimg.common.base.block import Block
from qwenimg.common.families import registry
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.networks.network import Network
from qwenimg.common.parity.parity import UNIT
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS, ONCE
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.traced import BlockRunner
from qwenimg.common.weights.plan import Entry, LoadPlan
from qwenimg.common.weights.storage import Packed

_NORM = re.compile(r"norm|\.ln_")  # in the name of a parameter


def network(component: Component) -> Network:
    """Return the description of a component's network."""
    return next(row for row in registry.networks() if row.name == component.network)


def name_of(plan: LoadPlan, components: Mapping[str, Component]) -> str:
    """Return the name of the component with this `plan`. Control networks share a name in their plans, so their files
    tell which one it is."""
    if plan.component in components:
        return plan.component
    mark = fingerprint(plan.files)
    return next(name for name, component in components.items() if fingerprint(component.plan.files) == mark)


def modules(plan: LoadPlan) -> frozenset[str]:
    """Return the paths of all modules that contain weights."""
    paths = {""}
    for name in plan.entries:
        parts = name.split(".")[:-1]
        paths |= {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return frozenset(paths)


@dataclass(frozen=True)
class ComponentPolicy:
    """A component under a policy."""

    name: str
    component: Component
    precision: Precision

    @cached_property
    def plan(self) -> LoadPlan:
        return self.component.stored(self.precision)

    @cached_property
    def network(self) -> Network:
        return network(self.component)

    @cached_property
    def modules(self) -> frozenset[str]:
        return modules(self.plan)

    def block(self, name: str, path: str) -> Block | None:
        """Return the kind of block `name` if the module at `path` is one, else None."""
        kinds = [block for block in self.network.traced if block.name == name and block.paths.fullmatch(path)]
        return kinds[0] if kinds and path in self.modules else None

    def open(self, engine: Engine, wide: str = "") -> BlockRunner:
        component = self.component
        return engine.blocks(component.network, component.config, self.plan, self.precision, wide)

    def has_norm(self, path: str) -> bool:
        """Return whether the module at `path`, which is not the whole network, contains a norm."""
        return path != "" and any(_NORM.search(name) for name in self.plan.under(path).entries)

    def is_whole(self, block: Block, path: str) -> bool:
        """Return whether the block is the whole network or a tower in it: it takes no residual stream, and has blocks
        inside that do."""
        inside = [module for module in self.modules if module.startswith(f"{path}.")]
        holds = any(kind.streams for kind in self.network.traced for one in inside if kind.paths.fullmatch(one))
        return not path or (holds and not block.streams)

    def updates(self, block: Block, path: str) -> int:
        """Return how many updates of a residual stream the block makes, at least one."""
        if block.method and not block.within:
            return 1
        path = block.within or path
        inside = [module for module in self.modules if not path or module == path or module.startswith(f"{path}.")]
        calls = [other for other in self.network.traced if not other.method]
        return max(1, sum(kind.depth for kind in calls for module in inside if kind.paths.fullmatch(module)))

    def dtype(self, block: Block, path: str, returned: Iterable[str]) -> str:
        """Return the dtype with the largest roundoff of the block's products, or of its norms if it has no product, and
        of its results `returned`."""
        entries = list(self.plan.under(block.within or path).when(ONCE if block.once else ALWAYS).entries.values())
        matrices = [entry for entry in entries if len(entry.shape) > 1]
        dtypes = [*(self._computed(entry) for entry in matrices or entries), *returned]
        return max(dtypes, key=UNIT.__getitem__)

    def _computed(self, entry: Entry) -> str:
        way = self.precision.computes(self.component.role, entry.name.rpartition(".")[0])
        rounds = isinstance(entry.storage, Packed) and entry.storage.int8
        return way.dtype if way else "int8" if rounds else entry.storage.dtype


def parts(checkpoint: Checkpoint, precision: Precision) -> dict[str, ComponentPolicy]:
    """Return the components of a model under a policy, by their names."""
    return {name: ComponentPolicy(name, component, precision) for name, component in checkpoint.components.items()}


def shapes_sum(plan: LoadPlan) -> str:
    """Return the SHA-256 of the names and shapes of a plan's parameters."""
    lines = [f"{name} {list(shape)}\n" for name, shape in sorted(plan.shapes.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
