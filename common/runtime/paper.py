"""An engine for plans: it describes a device and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qwenimg.common.memory.workspace import Workspace
from qwenimg.common.precision.devices import Device
from qwenimg.common.runtime.engine import Array, NumpyArray
from qwenimg.common.runtime.group import Ranks
from qwenimg.common.runtime.rates import Layer

Rate = Callable[[Layer, str, bool], float]  # the operations a second of a layer in a dtype, also of small networks


@dataclass(frozen=True, kw_only=True)
class OnPaper:
    name: str
    facts: Device
    workspace: Workspace
    free: int  # bytes that a run may take
    about: str = ""  # how `free` follows from the memory of the machine
    total: int = 0  # the first result of `Engine.machine`
    limit: str = ""  # the second
    rate: Rate | None  # of its layers, if they can be measured here
    group: Ranks | None = None  # of which it is one

    @property
    def device(self) -> str:
        return self.facts.name

    @property
    def on_gpu(self) -> bool:
        return self.facts.on_gpu

    def free_memory(self) -> int:
        return self.free

    def machine(self) -> tuple[int, str]:
        return self.total, self.limit

    def expect(self, peak: int) -> None:
        """Do nothing: it allocates nothing."""

    def release(self) -> None:
        """Do nothing: it holds nothing."""

    def numpy(self, array: Array) -> NumpyArray:
        raise AssertionError("nothing is computed on paper")
