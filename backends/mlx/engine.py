"""The MLX engine: opens the networks as components of the protocol of `qwenimg.common.runtime.engine`."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.core import array as Array

from qwenimg.backends.mlx import compile, load, ops, shortcuts, stream
from qwenimg.backends.mlx.blocks import NetworkBlocks
from qwenimg.backends.mlx.kernel_files import kernel_files, name_gpu_folder
from qwenimg.backends.mlx.ops import crossing, images
from qwenimg.backends.mlx.ops.functions import on_gpu
from qwenimg.backends.workspaces import MLX_CPU, MLX_GPU
from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import BackendMissing
from qwenimg.common.memory import allocator
from qwenimg.common.memory.memory import free_ram, machine_ram
from qwenimg.common.networks.network import import_network
from qwenimg.common.precision import devices
from qwenimg.common.precision.devices import Device
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.runtime import traced
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
    from qwenimg.backends.mlx.training.adapters import MLXAdapters


class MLXEngine:
    name = "mlx"

    def __init__(self, place: str = "") -> None:
        """Choose the device. place: `cpu` or `gpu`, which becomes MLX's default for the whole process. Raises
        BackendMissing."""
        if place == "gpu" and not mx.is_available(mx.gpu):
            raise BackendMissing("--backend mlx:gpu: MLX has no GPU here; use mlx:cpu or cpu")
        if place:
            mx.set_default_device(mx.gpu if place == "gpu" else mx.cpu)
        self.on_gpu = on_gpu()
        if self.on_gpu and not mx.metal.is_available():
            name_gpu_folder()
        self.workspace = MLX_GPU if self.on_gpu else MLX_CPU
        self.group: Group | None = None
        self._neighbours = 1  # ranks on this machine
        self.device = str(mx.device_info().get("device_name", "GPU")) if self.on_gpu else "CPU (mlx)"
        self.facts = _facts(self.device) if self.on_gpu else devices.cpu(self.device, bf16=False, emulates=True)
        self.rate = Rates(f"mlx of mlx {version('mlx')}", lambda: self, self.device if self.on_gpu else "")

    def meet(self, place: RankPlace, store: None = None) -> None:
        """Connect to the other ranks. place: of this rank. Raises UsageError and RankLost."""
        from qwenimg.backends.mlx.group import MLXGroup

        self._neighbours = place.neighbours
        self.group = MLXGroup(place)

    def open(self, network: str, config: Any, plan: LoadPlan, precision: Precision) -> Any:
        assert plan.precision == precision, f"{plan.component} is not planned in {precision.name}"
        module = import_network("qwenimg.backends.mlx.networks", network)
        opened = module.Runner(config, plan, precision)
        if streaming.streamed_blocks(plan):
            opened.streamed = stream.Stream(opened.model, plan)
        return opened

    def hook_cached_blocks(self, opened: Any, cached: CachedBlocks) -> None:
        opened.skipping = Skipping(opened.model, cached, images.to_bchw, ops.async_eval)

    def compiler(self) -> Compiler:
        if not self.on_gpu:
            return Compiler(share=0.0, seconds=10, about="a CPU gains nothing from it", missing=compile.missing())
        return Compiler(share=0.03, seconds=0, about="chains of a few operations compile in a moment")

    def compile(self, opened: Any, modules: re.Pattern[str] | None, autotune: bool) -> str:
        line, on = "", modules is not None
        if on:
            mx.enable_compile()
        if on and not self.on_gpu:
            line = kernel_files().open()
            on = kernel_files().folder is not None
        opened.fuses = on
        return line

    def refill(self, opened: Any, plan: LoadPlan, names: Iterable[str], branches: Iterable[str]) -> None:
        resident = plan.when(ALWAYS)
        load.fill(opened.model, resident.only(frozenset(names).__contains__))
        load.branch(opened.model, resident.only(frozenset(branches).__contains__))
        opened.plan = plan
        if streaming.streamed_blocks(plan):
            opened.streamed.renew(plan)

    def watch(self, opened: Any, blocks: Iterable[Block], look: traced.Look) -> None:
        traced.watch(opened.model, blocks, look, "__call__", crossing.outward)

    def blocks(self, network: str, config: Any, plan: LoadPlan, precision: Precision, wide: str = "") -> NetworkBlocks:
        assert wide in ("", "float32"), "float64 is another backend's"
        return NetworkBlocks(self.open(network, config, plan.only(lambda name: False), precision), plan, bool(wide))

    def adapters(self, values: Mapping[str, NumpyArray], recomputed: re.Pattern[str] | None) -> MLXAdapters:
        from qwenimg.backends.mlx.training.adapters import MLXAdapters  # only a training needs it

        return MLXAdapters(values, recomputed)

    def array(self, values: NumpyArray) -> Array:
        return ops.table(values, mx.float32)

    def numpy(self, array: Array) -> NumpyArray:
        return ops.numpy(array)

    def finite(self, array: Array) -> bool:
        return bool(mx.all(mx.isfinite(array)).item())

    def largest(self, array: Array) -> float:
        return float(mx.max(mx.abs(array)).item())

    def sampled(self, array: Array, most: int, image: bool) -> NumpyArray:
        last = array[-1]
        flat = (last.transpose(2, 0, 1) if image else last).reshape(-1)
        return self.numpy(flat[:: -(-len(flat) // most)])

    def row_sizes(self, array: Array) -> NumpyArray:
        return ops.numpy(mx.mean(mx.abs(ops.at_least_float32(array)), axis=-1))

    def guide(self, conditional: Array, unconditional: Array, scale: float) -> Array:
        return ops.guide(conditional, unconditional, scale)

    def rescale(self, guided: Array, conditional: Array, share: float) -> Array:
        return ops.rescale(guided, conditional, share)

    def shortened(self, guided: Array, conditional: Array, most: float, each: bool = False) -> Array:
        return ops.shortened(guided, conditional, most, each)

    def join(self, arrays: Sequence[Array]) -> Array:
        return mx.concatenate(list(arrays), axis=1)

    def split(self, batch: Array) -> list[Array]:
        return list(mx.split(batch, batch.shape[0]))

    def free_memory(self) -> int:
        """Return the free bytes of the working set that the system recommends for the GPU; on the CPU, the bytes
        that the system can still give."""
        limit = mx.device_info().get("max_recommended_working_set_size") if self.on_gpu else None
        return int(limit) - mx.get_active_memory() if limit else free_ram() // self._neighbours

    def machine(self) -> tuple[int, str]:
        return (0, "") if self.on_gpu else machine_ram()

    def peak_memory(self) -> int | None:
        peak = mx.get_peak_memory()
        mx.reset_peak_memory()
        return peak

    def expect(self, peak: int) -> None:
        """Set MLX's limits for a run that was planned to take `peak` bytes.

        On a GPU the planned bytes stay wired, the rest of the working set may hold buffers for another use, and no more
        than the working set is allocated. On a CPU freed buffers are not kept.
        """
        if not self.on_gpu:
            mx.set_cache_limit(0)
            allocator.give_back_blocks(peak)
        most = int(mx.device_info().get("max_recommended_working_set_size", 0)) if self.on_gpu else 0
        if most:
            mx.set_memory_limit(most)
            mx.set_cache_limit(max(0, most - peak))
            mx.set_wired_limit(min(peak, most))

    def release(self) -> None:
        mx.clear_cache()
        if not self.on_gpu:
            allocator.give_back_heap()

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        return observe(observer)

    def compared_blocks(
        self, opened: Any, modules: re.Pattern[str], look: CompiledLook
    ) -> AbstractContextManager[None]:
        on = getattr(opened, "fuses", None)
        compiles = compile.compiles() if on is None else on
        return shortcuts.compiled(opened.model, modules, look) if compiles else nullcontext()

    def compared_products(self, opened: Any, look: ProductLook) -> AbstractContextManager[None]:
        return shortcuts.products(opened.model, look)

    def layer_seconds(self, layer: Layer, dtype: str, shapes: Shapes, small: bool) -> float:
        return ops.layer_seconds(layer, ops.DTYPES[dtype], shapes, self.on_gpu)  # no threads to choose

    def operate(self, operation: str, dtype: str, arrays: Sequence[NumpyArray]) -> NumpyArray:
        return ops.operate(operation, ops.DTYPES[dtype], arrays)

    def attention(self) -> str:
        return "MLX's fused kernel" if self.on_gpu else "MLX's operations in float32, in chunks of queries"

    def versions(self) -> dict[str, str]:
        return {"mlx": mx.__version__, **({"macos": platform.mac_ver()[0]} if platform.mac_ver()[0] else {})}


def _facts(name: str) -> Device:
    """Return the facts of the GPU: Metal's, or a card's under MLX's CUDA build."""
    if mx.metal.is_available():
        return devices.apple(name)
    info = mx.device_info()
    major, minor = (
        int(info.get(f"compute_capability_{part}", default)) for part, default in (("major", 8), ("minor", 0))
    )
    return devices.nvidia(name, (major, minor))
