"""The torch engine: opens the networks as components of the protocol of `qwenimg.common.runtime.engine`."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qwenimg.backends.torch import compile, load, ops, shortcuts, stream
from qwenimg.backends.torch.blocks import NetworkBlocks
from qwenimg.backends.torch.ops import crossing, images
from qwenimg.backends.torch.ops.cpu import multiplies
from qwenimg.backends.workspaces import TORCH, TORCH_CPU
from qwenimg.common.base.amounts import counted
from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import BackendMissing
from qwenimg.common.memory import allocator
from qwenimg.common.memory.memory import free_ram, machine_ram, ram_peak
from qwenimg.common.networks.network import import_network
from qwenimg.common.precision import devices
from qwenimg.common.precision.devices import Device
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.runtime import compiling, traced
from qwenimg.common.runtime.compiling import Compiler
from qwenimg.common.runtime.engine import NumpyArray, Observer
from qwenimg.common.runtime.group import Group, RankPlace
from qwenimg.common.runtime.observers import observe
from qwenimg.common.runtime.rates import Layer, Rates, Shapes
from qwenimg.common.runtime.shortcuts import CompiledLook, ProductLook
from qwenimg.common.runtime.skipping import Skipping
from qwenimg.common.weights import streaming
from qwenimg.common.weights.plan import LoadPlan

if TYPE_CHECKING:
    from qwenimg.backends.torch.training.adapters import TorchAdapters


def has_cuda() -> bool:
    """Return whether torch sees an NVIDIA GPU. Queries the driver."""
    return torch.cuda.is_available() and torch.version.hip is None


def _processor() -> str:
    return f"CPU (torch, {counted(torch.get_num_threads(), 'thread')})"


def _ignore(operation: str, path: str, result: Tensor) -> None:
    """Observe nothing: an observer alone has every layer called, uncompiled and not fused with its neighbours."""


class TorchEngine:
    def __init__(self, name: str, number: int = 0):
        """Choose the device: `cpu`, or `cuda` with the number of the GPU. Raises BackendMissing."""
        if name == "cuda" and not has_cuda():
            raise BackendMissing(
                "--backend cuda: torch sees no NVIDIA GPU here; use --backend cpu, or install a CUDA build of torch"
            )
        count = torch.cuda.device_count() if name == "cuda" else 1
        if number >= count:
            there = "only cuda:0 is" if count == 1 else f"cuda:0 to cuda:{count - 1} are"
            raise BackendMissing(f"--backend cuda:{number}: of NVIDIA GPUs {there} here")
        self.name = name
        self.on_gpu = name == "cuda"
        self.workspace = TORCH if self.on_gpu else TORCH_CPU
        self._device = torch.device("cuda", number) if self.on_gpu else torch.device("cpu")
        self.device = torch.cuda.get_device_name(self._device) if self.on_gpu else _processor()
        self.facts = self._facts()
        self.rate = Rates(f"{name} of torch {version('torch')}", lambda: self, self.device if self.on_gpu else "")
        self.group: Group | None = None
        self._ranks: ops.HasTokenRanks | None = None  # the same
        self._neighbours = 1  # ranks on this machine
        self._compiles = False
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        # Partial sums of a product stay in float32: rounded to 16 bit they would fail the tolerances of a passport.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def meet(self, place: RankPlace, store: Any = None) -> None:
        """Connect to the other ranks. place: of this rank. store: rank 0's, if it is open. Raises UsageError and
        RankLost."""
        if not self.on_gpu and place.neighbours > 1:
            self._neighbours = place.neighbours
            torch.set_num_threads(max(1, torch.get_num_threads() // self._neighbours))
            self.device = _processor()
        if self.on_gpu:
            torch.cuda.set_device(self._device)
        from qwenimg.backends.torch.group import TorchGroup  # not every build of torch has what it imports

        self._ranks = self.group = TorchGroup(place, self._device, store)

    def open(self, network: str, config: Any, plan: LoadPlan, precision: Precision) -> Any:
        assert plan.precision == precision, f"{plan.component} is not planned in {precision.name}"
        module = import_network("qwenimg.backends.torch.networks", network)
        opened = module.Runner(config, plan, precision, self._device)
        if streaming.streamed_blocks(plan):
            opened.streamed = stream.Stream(opened.model, plan, self._device)
        if self._ranks is not None:
            ops.share_tokens(opened.model, self._ranks)
        return opened

    def hook_cached_blocks(self, opened: Any, cached: CachedBlocks) -> None:
        opened.skipping = Skipping(opened.model, cached, images.to_bchw, ops.async_eval)

    def compiler(self) -> Compiler:
        """Return what compiling takes and saves here.

        By figures on paper it saves 13 % of a step of Qwen-Image on a GPU (docs/measured/performance.md); others report
        half a minute of compiling for one block of it.
        """
        missing = compile.missing(self.on_gpu)
        if not self.on_gpu:
            return Compiler(share=0.0, seconds=60, about="products are nearly all of a step on a CPU", missing=missing)
        cached = any(compiling.folder(f"torch-{torch.__version__}-{platform.machine()}").glob("*"))
        return Compiler(share=0.13, seconds=10 if cached else 40, about="figures on paper say", missing=missing)

    def compile(self, opened: Any, modules: re.Pattern[str] | None, autotune: bool) -> str:
        if modules is None:
            return ""
        folder = compiling.folder(f"torch-{torch.__version__}-{platform.machine()}")
        line = compile.compile(opened.model, modules, folder, autotune=autotune and self.on_gpu)
        self._compiles = True
        if self._ranks is not None:
            self._ranks.compiled()
        return line

    def refill(self, opened: Any, plan: LoadPlan, names: Iterable[str], branches: Iterable[str]) -> None:
        resident = plan.when(ALWAYS)
        load.fill(opened.model, resident.only(frozenset(names).__contains__), self._device)
        load.branch(opened.model, resident.only(frozenset(branches).__contains__), self._device)
        opened.plan = plan
        if streaming.streamed_blocks(plan):
            opened.streamed.renew(plan)

    def watch(self, opened: Any, blocks: Iterable[Block], look: traced.Look) -> None:
        traced.watch(opened.model, blocks, look, "forward", crossing.outward)

    def blocks(self, network: str, config: Any, plan: LoadPlan, precision: Precision, wide: str = "") -> NetworkBlocks:
        opened = self.open(network, config, plan.only(lambda name: False), precision)
        return NetworkBlocks(opened, plan, self._device, ops.DTYPES[wide] if wide else None)

    def adapters(self, values: Mapping[str, NumpyArray], recomputed: re.Pattern[str] | None) -> TorchAdapters:
        from qwenimg.backends.torch.training.adapters import TorchAdapters  # only a training needs it

        return TorchAdapters(values, recomputed, self._device)

    def array(self, values: NumpyArray) -> Tensor:
        return ops.table(values, torch.float32, self._device)

    def numpy(self, array: Tensor) -> NumpyArray:
        return ops.numpy(array)

    def finite(self, array: Tensor) -> bool:
        return bool(torch.isfinite(array).all())

    def largest(self, array: Tensor) -> float:
        low, high = torch.aminmax(array)
        return float(torch.maximum(-low, high))

    def sampled(self, array: Tensor, most: int, image: bool) -> NumpyArray:
        flat = array[-1].reshape(-1)
        return ops.numpy(flat[:: -(-len(flat) // most)])

    def row_sizes(self, array: Tensor) -> NumpyArray:
        return ops.numpy(ops.at_least_float32(array).abs().mean(-1))

    def guide(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        with torch.inference_mode():
            return ops.guide(conditional, unconditional, scale)

    def rescale(self, guided: Tensor, conditional: Tensor, share: float) -> Tensor:
        with torch.inference_mode():
            return ops.rescale(guided, conditional, share)

    def shortened(self, guided: Tensor, conditional: Tensor, most: float, each: bool = False) -> Tensor:
        with torch.inference_mode():
            return ops.shortened(guided, conditional, most, each)

    def join(self, arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(arrays), dim=1)

    def split(self, batch: Tensor) -> list[Tensor]:
        return list(batch.split(1))

    def free_memory(self) -> int:
        """Return the free bytes of the GPU, torch's own cache included; on the CPU, the bytes that the system can
        still give."""
        if not self.on_gpu:
            return free_ram() // self._neighbours
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def machine(self) -> tuple[int, str]:
        return (0, "") if self.on_gpu else machine_ram()

    def peak_memory(self) -> int | None:
        if not self.on_gpu:
            return ram_peak()
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def expect(self, peak: int) -> None:
        """Set the C library's allocator for a run on a CPU. The allocator of a GPU is set before torch is imported
        (`backends.load`)."""
        if not self.on_gpu:
            allocator.give_back_blocks(peak)

    def release(self) -> None:
        if self.on_gpu:
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()
        else:
            allocator.give_back_heap()

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        with compile.eager(self._compiles), observe(observer):
            yield

    def compared_blocks(
        self, opened: Any, modules: re.Pattern[str], look: CompiledLook
    ) -> AbstractContextManager[None]:
        return shortcuts.compiled(opened.model, look)

    @contextmanager
    def compared_products(self, opened: Any, look: ProductLook) -> Iterator[None]:
        with self.observe(_ignore), shortcuts.products(opened.model, look):
            yield

    def layer_seconds(self, layer: Layer, dtype: str, shapes: Shapes, small: bool) -> float:
        with torch.inference_mode():
            return ops.layer_seconds(layer, ops.DTYPES[dtype], shapes, self._device, small)

    def operate(self, operation: str, dtype: str, arrays: Sequence[NumpyArray]) -> NumpyArray:
        with torch.inference_mode():
            return ops.operate(operation, ops.DTYPES[dtype], arrays, self._device)

    def attention(self) -> str:
        return ops.attention_kernel(self._device)

    def _facts(self) -> Device:
        if self.on_gpu:
            return devices.nvidia(self.device, torch.cuda.get_device_capability(self._device))
        return devices.cpu(self.device, bf16=multiplies(torch.bfloat16, "cpu"))

    def versions(self) -> dict[str, str]:
        cuda = {"cuda": str(torch.version.cuda)} if self.on_gpu else {}
        return {"torch": torch.__version__, **cuda}
