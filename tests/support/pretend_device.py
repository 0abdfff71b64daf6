"""A device that is not the CPU, on a machine that has nothing else: PyTorch's open backend slot, computed by the CPU.

A tensor here is a shell that says "pretend:0" around a CPU tensor. Every operation unwraps its shells, runs on the CPU
and wraps what comes out. What a GPU would refuse is refused: tensors of two devices in one operation, but for a copy
from one to the other and for numbers without a dimension. Kernels and speed are not pretended. What its tensors take is
counted as an allocator counts it (`MEMORY`), without what kernels take inside an operation.

`pretend_engine()` gives a torch engine on it. Importing this claims the slot for the process, which changes nothing for
tensors that are elsewhere; what else the pretence needs holds inside `pretending` only.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from qwenimg.backends.torch.engine import TorchEngine
from qwenimg.backends.workspaces import TORCH
from qwenimg.common.memory.memory import free_ram

NAME = "pretend"
_setup_privateuseone_for_python_backend(NAME)
# Gradient checkpointing asks any other device than the CPU what autocast has there, also where nothing is on it.
setattr(getattr(torch, NAME), "get_amp_supported_dtype", lambda: [torch.bfloat16, torch.float16])  # noqa: B010
DEVICE = torch.device(NAME, 0)
CPU = torch.device("cpu")
# Between devices these may read one and write the other.
TRANSFERS = {torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten._copy_from}


class WrongDeviceError(RuntimeError):
    """What a real device would raise too, under the same base."""


class Allocator:
    """Bytes of the storages that some tensor of the device has."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._tensors: Counter[int] = Counter()  # of each storage, by its address

    def add(self, shell: Shell) -> None:
        storage = shell.inner.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if not self._tensors[place]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self._tensors[place] += 1
        weakref.finalize(shell, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self._tensors[place] -= 1
        if not self._tensors[place]:
            self.now -= size


MEMORY = Allocator()


class Shell(torch.Tensor):
    """`inner` is where the values are."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Shell:
        assert not isinstance(inner, Shell)
        size, strides, offset = inner.size(), inner.stride(), inner.storage_offset()
        shell = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=strides, storage_offset=offset, dtype=inner.dtype, device=DEVICE
        )
        shell.inner = inner
        return shell

    def __init__(self, inner: torch.Tensor) -> None:
        if not isinstance(inner, FakeTensor):  # while torch's tracer looks at shapes
            MEMORY.add(self)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """What torch's tracer looks for in a tensor around another."""
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Shell:
        return Shell(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _on_cpu(op, args, kwargs or {})


def _on_cpu(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target = _target(op, args, kwargs)
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": CPU}
    plain_args, plain_kwargs = tree_map_only(Shell, lambda shell: shell.inner, (args, kwargs))
    made = op(*plain_args, **plain_kwargs)
    return tree_map_only(torch.Tensor, Shell, made) if target == DEVICE.type else made


def _target(op: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """The kind of device that the result of `op` is on. Raises WrongDeviceError."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    places = {tensor.device.type for tensor in tensors if tensor.dim()}
    if len(places) > 1 and op.overloadpacket not in TRANSFERS:
        raise WrongDeviceError(f"{op}: expected all tensors on one device, found {' and '.join(sorted(places))}")
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type
    if op.overloadpacket in TRANSFERS:
        return args[0].device.type
    return DEVICE.type if any(isinstance(tensor, Shell) for tensor in tensors) else CPU.type


# Operations that have no tensor yet, such as torch.zeros, come here by their device.
_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(lambda op, *args, **kwargs: _on_cpu(op, args, kwargs), "PrivateUse1")


@contextmanager
def pretending() -> Iterator[None]:
    """Within it, what shells cannot do is done in two steps: data straight onto the device, and inference mode."""
    tensor, inference_mode = torch.tensor, torch.inference_mode

    def placed(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = tensor(data, *args, **kwargs)
        return made if device is None else made.to(device)

    def inferring(mode: bool = True) -> Any:
        return torch.no_grad() if mode else torch.enable_grad()

    torch.tensor, torch.inference_mode = placed, inferring  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.tensor, torch.inference_mode = tensor, inference_mode  # type: ignore[misc]


def pretend_engine() -> TorchEngine:
    """The CPU's engine, told that it is on an accelerator with as much memory."""
    engine = TorchEngine("cpu")
    engine._device, engine.device, engine.on_gpu = DEVICE, "a pretend accelerator", True
    engine.workspace = TORCH
    engine.free_memory = free_ram  # type: ignore[method-assign]
    engine.release = lambda: None  # type: ignore[method-assign]
    engine.versions = lambda: {"torch": torch.__version__}  # type: ignore[method-assign]
    return engine
