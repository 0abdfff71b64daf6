"""The kernels of one call of a network, as torch's dispatcher hands them to a device: on the meta device, which knows
shapes and strides and computes nothing, so that 60 layers take a second.

Of an operation that torch composes of others those are counted, but for those that a GPU has a kernel for: attention,
RMSNorm, enlarging an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paper.kernels import Case, Kernel, Kind, Span
from paper.patches import inputs, latents
from qwenimg.backends.torch import compile
from qwenimg.backends.torch.networks.vaes.vae import WIDE
from qwenimg.backends.torch.ops import DTYPES
from qwenimg.backends.torch.ops.images import laid_out
from qwenimg.common.networks.denoisers.chroma_dit import ChromaConfig
from qwenimg.common.networks.denoisers.hunyuan_dit import CONDITION_CHANNELS, SIZES
from qwenimg.common.networks.denoisers.zimage_dit import PATCH
from qwenimg.common.networks.network import Network, import_network
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

ATTENTION = "scaled_dot_product_attention"
WHOLE = frozenset({ATTENTION, "rms_norm", "upsample_nearest2d", "_upsample_nearest_exact2d"})
PRODUCTS = frozenset({"mm", "addmm", "addmm_", "_addmm_activation", "bmm", "baddbmm", "convolution"})
NOTHING = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
# Of kernels that are several on a GPU: a group norm's moments, its factors for each channel, and their use. The image
# is read for the first and for the last.
SEVERAL = {"native_group_norm": 3}


def kernels(network: str, config: Any, precision: Precision, case: Case) -> list[Kernel]:
    """`paper.kernels.Counts`."""
    row: Network = import_network("qwenimg.common.networks", network).NETWORK
    module = import_network("qwenimg.backends.torch.networks", network)
    plan = LoadPlan(component=row.role, entries={}, files=(), precision=precision)
    component = module.Runner(config, plan, precision, torch.device("meta"))
    uses = row.uses(config)
    for name, use in uses.items():
        _set_dtype(component.model, name, DTYPES[precision.weight_dtype(row.role, name, use.residency)])
    call = CALLS[network](component, config, case)
    counter = Counter(compile.units(component.model, row.compiled) if row.compiled else [])
    with torch.inference_mode():
        call()  # what is kept from the first call on is not counted
        with counter:
            call()
    return counter.kernels


def _set_dtype(model: torch.nn.Module, name: str, dtype: torch.dtype) -> None:
    """Give a parameter its dtype, still without memory."""
    blank = torch.empty(model.get_parameter(name).shape, dtype=dtype, device="meta")
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(blank, requires_grad=False))


Forward = Callable[[], Any]  # the call of a component that is counted


def _transformer(component: Any, config: Any, case: Case) -> Forward:
    rows, columns = case.height // config.patch_size, case.width // config.patch_size
    texts = [torch.empty(1, case.text, config.joint_attention_dim, device=component.device)] * case.branches
    condition = component.condition(texts, [(1, rows, columns)])
    modulation = component.modulate(np.zeros((1, 256)))
    latents = torch.empty(1, rows * columns, config.in_channels, device=component.device)
    return lambda: component.predict(latents, (modulation, 0), condition)


def _single_stream(component: Any, config: Any, case: Case) -> Forward:
    """Z-Image's transformer, one branch of guidance at a time."""
    grid = case.height // PATCH, case.width // PATCH
    text = torch.empty(1, case.text, config.cap_feat_dim, device=component.device)
    condition = component.condition(text, grid)
    latents = torch.empty(1, grid[0] * grid[1], config.features, device=component.device)
    return lambda: component.predict(latents, np.zeros((1, 256)), condition)


def _flux(component: Any, config: Any, case: Case) -> Forward:
    grid = case.height // PATCH, case.width // PATCH

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(1, *shape, device=component.device)

    tokens, masked = grid[0] * grid[1], config.in_channels - config.out_features
    mask = empty(tokens, masked) if masked else None
    condition = component.condition(empty(case.text, config.joint_attention_dim), [grid], [], mask)
    if isinstance(config, ChromaConfig):
        modulation = component.modulate(np.zeros((1, config.vectors, config.approximator_num_channels)))
    else:
        times, pooled = np.zeros((1, 256)), config.pooled_projection_dim
        modulation = component.modulate(times, times, [empty(pooled) if pooled else None])
    latents = empty(tokens, config.out_features)
    return lambda: component.predict(latents, (modulation, 0), condition)


def _patches(component: Any, config: Any, case: Case) -> Forward:
    states, more, features = inputs(config, case)
    condition = component.condition(torch.empty(1, case.text, states, device=component.device), *more)
    x = torch.empty(latents(config, case), device=component.device)
    return lambda: component.predict(x, features, condition)


def _sd3(component: Any, config: Any, case: Case) -> Forward:
    grid = case.height // PATCH, case.width // PATCH
    condition = component.condition(np.zeros((1, case.text, config.joint_attention_dim), np.float32), grid)
    modulation = component.modulate(np.zeros((1, 256)), [np.zeros((1, config.pooled_projection_dim), np.float32)])
    latents = torch.empty(1, config.in_channels, case.height, case.width, device=component.device)
    return lambda: component.predict(latents, (modulation, 0), condition)


def _aura(component: Any, config: Any, case: Case) -> Forward:
    grid = case.height // PATCH, case.width // PATCH
    condition = component.condition(
        torch.empty(1, case.text, config.joint_attention_dim, device=component.device), grid
    )
    modulation = component.modulate(np.zeros((1, 256)))
    latents = torch.empty(1, config.in_channels, case.height, case.width, device=component.device)
    return lambda: component.predict(latents, (modulation, 0), condition)


def _hunyuan(component: Any, config: Any, case: Case) -> Forward:
    grid = case.height // PATCH, case.width // PATCH
    bert = torch.empty(1, case.text, config.cross_attention_dim, device=component.device)
    t5 = torch.empty(1, config.text_len_t5, config.cross_attention_dim_t5, device=component.device)
    sizes = np.zeros((1, SIZES * CONDITION_CHANNELS)) if config.sees_size else None
    condition = component.condition(bert, t5, case.text, grid, sizes)
    latents = torch.empty(1, config.in_channels, case.height, case.width, device=component.device)
    return lambda: component.predict(latents, np.zeros((1, CONDITION_CHANNELS)), condition)


def _unet(component: Any, config: Any, case: Case) -> Forward:
    texts = np.zeros((case.branches, case.text, config.cross_attention_dim), np.float32)
    added = config.projection_class_embeddings_input_dim if config.addition_embed_type else None
    addition = None if added is None else np.zeros((case.branches, added))
    condition = component.condition(texts, addition)
    latents = torch.empty(1, config.in_channels, case.height, case.width, device=component.device)
    features = np.zeros((1, config.time_channels))
    return lambda: component.predict(latents, features, condition)


def _decoder(component: Any, config: Any, case: Case) -> Forward:
    model = component.model
    channels = getattr(config, "patch_channels", model.decoder.conv_in.in_channels)
    latents = torch.empty(1, channels, case.height, case.width, device=component.device)
    return lambda: model.decode(latents, case.height, case.width, WIDE)


CALLS: dict[str, Callable[[Any, Any, Case], Forward]] = {
    "qwen_dit": _transformer,
    "zimage_dit": _single_stream,
    "flux_dit": _flux,
    "longcat_dit": _flux,
    "chroma_dit": _flux,
    "flux2_dit": _patches,
    "flux2_kv_dit": _patches,
    "flux3_dit": _patches,
    "ernie_dit": _patches,
    "krea2_dit": _patches,
    "anima_dit": _patches,
    "lumina_dit": _patches,
    "pixart_dit": _patches,
    "sana_dit": _patches,
    "hunyuan_dit": _hunyuan,
    "ovis_dit": _flux,
    "sd3_dit": _sd3,
    "aura_dit": _aura,
    "unet": _unet,
    "qwen_vae": _decoder,
    "kl_vae": _decoder,
    "dc_vae": _decoder,
    "flux2_vae": _decoder,
}


class Counter(TorchDispatchMode):
    """A record of the kernels of all operations while it is on. A unit's kernels are one region; each other is its
    own."""

    def __init__(self, units: list[torch.nn.Module]):
        super().__init__()
        self.kernels: list[Kernel] = []
        self._kept: list[Tensor] = []  # so that no two buffers have one address
        self._unit: int | None = None
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(lambda module, args, number=number: self._enter(number))
            unit.register_forward_hook(lambda module, args, result: self._enter(None))

    def _enter(self, unit: int | None) -> None:
        self._unit = unit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name not in WHOLE:
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        out = _attended(*args) if name == ATTENTION else func(*args, **kwargs)
        if name == "convolution":
            out = laid_out(out, out.dtype)
        written = name == "copy_"  # over what was there, which is not read
        read = {key: value for key, value in kwargs.items() if key != "out"}
        given, results = list(_tensors((args[1:] if written else args, read))), list(_tensors(out))
        if name in NOTHING or not results or (_is_view(func, given, results)):
            return out
        self._kept += [*given, *results]
        self.kernels.append(self._kernel(name, args, given, results))
        if name == "convolution" and args[2] is not None:  # a pass of its own on a GPU
            self.kernels.append(self._kernel("bias", args, [results[0], args[2]], results))
        return out

    def _kernel(self, name: str, args: Any, given: list[Tensor], results: list[Tensor]) -> Kernel:
        kind: Kind = "attention" if name == ATTENTION else "product" if name in PRODUCTS else "memory"
        reads = tuple(_span(x) for x in given)
        if name in SEVERAL:
            reads = (*reads, reads[0]._replace(begin=-1))
        first = results[0]
        return Kernel(
            name=name,
            kind=kind,
            dtype=str(first.dtype).removeprefix("torch."),
            shape=tuple(first.shape),
            given=tuple(tuple(x.shape) for x in given),
            flops=_flops(name, args, first),
            reads=reads,
            writes=tuple(_span(x) for x in results),
            region=-1 - len(self.kernels) if self._unit is None else self._unit,
            launches=SEVERAL.get(name, 1),
        )


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _is_view(func: Any, given: list[Tensor], results: list[Tensor]) -> bool:
    """Whether nothing is written: all results are in buffers that were there."""
    buffers = {x.untyped_storage()._cdata for x in given}
    return not func._schema.is_mutable and all(x.untyped_storage()._cdata in buffers for x in results)


def _span(x: Tensor) -> Span:
    """What has to be read of `x`: a broadcast axis once."""
    count = prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return Span(x.untyped_storage()._cdata, int(x.storage_offset()) * x.element_size(), count * x.element_size())


def _attended(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """In the order of the kernels that keep no scores, which is that of what they are given: no copy follows."""
    B, H, L, _D = q.shape
    return v.new_empty(B, L, H, v.shape[-1]).transpose(1, 2)


def _flops(name: str, args: Any, result: Tensor) -> float:
    """Multiplications and additions of a product or an attention."""
    if name == ATTENTION:
        q, k = args[0], args[1]
        return 4.0 * q.numel() * k.shape[-2]
    if name == "convolution":
        return 2.0 * result.numel() * prod(args[1].shape[1:])
    if name in PRODUCTS:
        left = args[1] if "add" in name else args[0]
        return 2.0 * result.numel() * left.shape[-1]
    return 0.0
