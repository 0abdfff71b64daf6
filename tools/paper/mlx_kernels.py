"""The kernels of one call of a network on an Apple GPU, by the graph that MLX itself makes of it: `mx.export_function`
computes nothing, and no GPU is asked for.

While a network is traced, what only a GPU has as one kernel (attention, norms) stands in the graph as one node, and so
does each chain that is compiled; a chain's own graph is taken afterwards, and its operations are one region. Whether a
view needs a copy follows from strides, as numpy keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import count
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.core import array as Array
from mlx.utils import tree_flatten, tree_unflatten
from numpy.lib.stride_tricks import as_strided

from paper.kernels import Case, Kernel, Kind, Span
from paper.patches import inputs, latents
from qwenimg.backends.mlx import compile
from qwenimg.backends.mlx.networks.vaes.vae import WIDE
from qwenimg.backends.mlx.ops import DTYPES
from qwenimg.common.networks.denoisers.chroma_dit import ChromaConfig
from qwenimg.common.networks.denoisers.hunyuan_dit import CONDITION_CHANNELS, SIZES
from qwenimg.common.networks.denoisers.zimage_dit import PATCH
from qwenimg.common.networks.network import Network, import_network
from qwenimg.common.precision.precision import Precision
from qwenimg.common.weights.plan import LoadPlan

PRODUCTS = frozenset({"Matmul", "AddMM", "Convolution"})
# Kernels that MLX's compiler leaves as they are.
APART = frozenset({"Concatenate", "Pad", "Gather", "Reduce", "Softmax", "Reshape", "Flatten", "Unflatten"}) | PRODUCTS


def kernels(network: str, config: Any, precision: Precision, case: Case) -> list[Kernel]:
    """`paper.kernels.Counts`."""
    row: Network = import_network("qwenimg.common.networks", network).NETWORK
    module = import_network("qwenimg.backends.mlx.networks", network)
    plan = LoadPlan(component=row.role, entries={}, files=(), precision=precision)
    component = module.Runner(config, plan, precision)
    component.fuses = True
    uses = row.uses(config)
    dtypes = {n: precision.weight_dtype(row.role, n, use.residency) for n, use in uses.items()}
    with as_on_gpu() as nodes:
        shapes = {name: value.shape for name, value in tree_flatten(component.model.parameters())}
        given = [(name, nodes.given(shapes[name], DTYPES[dtype])) for name, dtype in dtypes.items()]
        component.model.update(tree_unflatten(given))
        call = CALLS[network](component, config, case, nodes)
        graph = Graph(nodes)
        graph.trace(call, [], [], -1)
    return graph.kernels


# What is called of a component.


def _transformer(component: Any, config: Any, case: Case, nodes: Nodes) -> Callable[[], Array]:
    rows, columns = case.height // config.patch_size, case.width // config.patch_size
    texts = [mx.zeros((1, case.text, config.joint_attention_dim))] * case.branches
    condition = nodes.all_given(component.condition(texts, [(1, rows, columns)]))
    modulation = nodes.all_given(component.modulate(np.zeros((1, 256))))
    latents = mx.zeros((1, rows * columns, config.in_channels))
    return lambda: component.predict(latents, (modulation, 0), condition)


def _single_stream(component: Any, config: Any, case: Case, nodes: Nodes) -> Callable[[], Array]:
    """Z-Image's transformer, one branch of guidance at a time."""
    grid = case.height // PATCH, case.width // PATCH
    condition = nodes.all_given(component.condition(mx.zeros((1, case.text, config.cap_feat_dim)), grid))
    latents = mx.zeros((1, grid[0] * grid[1], config.features))
    return lambda: component.predict(latents, np.zeros((1, 256)), condition)


def _flux(component: Any, config: Any, case: Case, nodes: Nodes) -> Callable[[], Array]:
    grid = case.height // PATCH, case.width // PATCH
    tokens, masked = grid[0] * grid[1], config.in_channels - config.out_features
    text = mx.zeros((1, case.text, config.joint_attention_dim))
    mask = mx.zeros((1, tokens, masked)) if masked else None
    condition = nodes.all_given(component.condition(text, [grid], [], mask))
    if isinstance(config, ChromaConfig):
        made = component.modulate(np.zeros((1, config.vectors, config.approximator_num_channels)))
    else:
        times, pooled = np.zeros((1, 256)), config.pooled_projection_dim
        made = component.modulate(times, times, [mx.zeros((1, pooled)) if pooled else None])
    modulation = nodes.all_given(made)
    latents = mx.zeros((1, tokens, config.out_features))
    return lambda: component.predict(latents, (modulation, 0), condition)


def _patches(component: Any, config: Any, case: Case, nodes: Nodes) -> Callable[[], Array]:
    states, more, features = inputs(config, case)
    condition = nodes.all_given(component.condition(mx.zeros((1, case.text, states)), *more))
    x = mx.zeros(latents(config, case))
    return lambda: component.predict(x, features, condition)


def _sd3(component: Any, config: Any, case: Case, nodes: Nodes) -> Callable[[], Array]:
    grid = case.height // PATCH, case.width // PATCH
    text = np.zeros((1, case.text, config.joint_attention_dim), np.float32)
    condition = nodes.all_given(component.condition(text, grid))
    pooled = np.zeros((1, config.pooled_projection_dim), np.float32)
    modulation = nodes.all_given(component.modulate(np.zeros((1, 256)), [pooled]))
    latents = mx.zeros((1, config.in_channels, case.height, case.width))
    return lambda: component.predict(latents, (modulation, 0), condition)


def _aura(component: Any, config: Any, case: Case, nodes: Nodes) -> Callable[[], Array]:
    grid = case.height // PATCH, case.width // PATCH
    condition = nodes.all_given(component.condition(mx.zeros((1, case.text, config.joint_attention_dim)), grid))
    modulation = nodes.all_given(component.modulate(np.zeros((1, 256))))
    latents = mx.zeros((1, config.in_channels, case.height, case.width))
    return lambda: component.predict(latents, (modulation, 0), condition)


def _hunyuan(component: Any, config: Any, case: Case, nodes: Nodes) -> Callable[[], Array]:
    grid = case.height // PATCH, case.width // PATCH
    bert = mx.zeros((1, case.text, config.cross_attention_dim))
    t5 = mx.zeros((1, config.text_len_t5, config.cross_attention_dim_t5))
    sizes = np.zeros((1, SIZES * CONDITION_CHANNELS)) if config.sees_size else None
    condition = nodes.all_given(component.condition(bert, t5, case.text, grid, sizes))
    latents = mx.zeros((1, config.in_channels, case.height, case.width))
    return lambda: component.predict(latents, np.zeros((1, CONDITION_CHANNELS)), condition)


def _unet(component: Any, config: Any, case: Case, nodes: Nodes) -> Callable[[], Array]:
    texts = np.zeros((case.branches, case.text, config.cross_attention_dim), np.float32)
    added = config.projection_class_embeddings_input_dim if config.addition_embed_type else None
    addition = None if added is None else np.zeros((case.branches, added))
    condition = nodes.all_given(component.condition(texts, addition))
    latents = mx.zeros((1, config.in_channels, case.height, case.width))
    features = np.zeros((1, config.time_channels))
    return lambda: component.predict(latents, features, condition)


def _decoder(component: Any, config: Any, case: Case, nodes: Nodes) -> Callable[[], Array]:
    model = component.model
    channels = getattr(config, "patch_channels", model.decoder.conv_in.weight.shape[-1])
    latents = mx.zeros((1, case.height, case.width, channels))

    def call() -> Array:
        with compile.fusing(True):
            return model.decode(latents, case.height, case.width, WIDE)

    return call


CALLS: dict[str, Callable[[Any, Any, Case, Nodes], Callable[[], Array]]] = {
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


# Nodes that stand for a kernel or a chain


@dataclass(frozen=True)
class Node:
    name: str
    kind: Kind = "memory"
    flops: float = 0.0
    chain: Callable[..., Array] | None = None  # what is compiled, if that is what it stands for


class Nodes(list[Node]):
    def given(self, shape: Sequence[int], dtype: mx.Dtype) -> Array:
        """A weight or an input. Each is one of its own: of arrays that are equal MLX would compute with one alone."""
        return self.stand_in(Node("given"), mx.zeros(shape, dtype), [])

    def all_given(self, tree: Any) -> Any:
        """`tree` with arrays that nothing leads to in the place of its own."""
        if isinstance(tree, Array):
            return self.given(tree.shape, tree.dtype)
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.all_given(one) for one in tree)
        if is_dataclass(tree):
            return type(tree)(*(self.all_given(getattr(tree, field.name)) for field in fields(tree)))
        return tree

    def stand_in(self, node: Node, out: Array, given: Sequence[Array | None]) -> Array:
        """An array like `out` that depends on `given` by one node of the graph, which carries the number of `node`."""
        self.append(node)
        arrays = [x for x in given if x is not None]
        return mx.depends([mx.full(out.shape, 0, out.dtype)], [mx.array(len(self) - 1), *arrays])[0]

    def norm(self, x: Array, weight: Array | None, *more: Any) -> Array:
        return self.stand_in(Node("norm"), x, [x, weight, *(one for one in more if isinstance(one, Array))])

    def attention(self, q: Array, k: Array, v: Array, *, scale: float, mask: Any = None) -> Array:
        masks = [mask] if isinstance(mask, Array) else []
        flops = 4.0 * q.size * k.shape[2]
        made = self.stand_in(Node("attention", "attention", flops), q.swapaxes(1, 2), [q, k, v, *masks])
        return made.swapaxes(1, 2)  # the order in which the kernel writes

    def chain(self, function: Callable[..., Array], arguments: Sequence[Array]) -> Array:
        with compile.counting(None):
            return self.stand_in(Node("chain", chain=function), function(*arguments), arguments)


@contextmanager
def as_on_gpu() -> Iterator[Nodes]:
    """Within it the default device is a GPU that computes nothing."""
    nodes = Nodes()
    swaps: list[tuple[Any, str, Any]] = [
        (mx, "default_device", lambda: mx.Device(mx.gpu)),
        (mx.metal, "is_available", lambda: True),
        (mx, "eval", lambda *arrays: None),
        (mx, "async_eval", lambda *arrays: None),
        (mx.fast, "layer_norm", nodes.norm),
        (mx.fast, "rms_norm", nodes.norm),
        (mx.fast, "scaled_dot_product_attention", nodes.attention),
    ]
    before = [getattr(owner, name) for owner, name, _ in swaps]
    try:
        for owner, name, new in swaps:
            setattr(owner, name, new)
        with compile.counting(nodes.chain):
            yield nodes
    finally:
        for (owner, name, _), old in zip(swaps, before, strict=True):
            setattr(owner, name, old)


# From MLX's graph to kernels


@dataclass(frozen=True)
class Held:
    """Where an array lies: the number of its buffer, and a numpy array that lies there as it does."""

    buffer: int
    there: np.ndarray

    @property
    def span(self) -> Span:
        """A broadcast axis is read once; an axis that is read backwards begins at its end."""
        begin = self.there.__array_interface__["data"][0] - _base().__array_interface__["data"][0]
        axes = list(zip(self.there.shape, self.there.strides, strict=True))
        begin += sum((side - 1) * stride for side, stride in axes if stride < 0)
        return Span(self.buffer, begin, self.there.itemsize * prod(side for side, stride in axes if stride))


# Of what is a view if nothing forbids it, how numpy makes it.
_VIEWS: dict[str, Callable[..., Any]] = {
    "Broadcast": lambda x, shape: np.broadcast_to(x, shape),
    "Squeeze": lambda x, axes: x.squeeze(tuple(axes)),
    "ExpandDims": lambda x, axes: np.expand_dims(x, tuple(axes)),
    "Transpose": lambda x, axes: x.transpose(axes),
    "Slice": lambda x, *bounds: x[tuple(slice(*along) for along in zip(*bounds, strict=True))],
    "Split": lambda x, places, axis: np.split(x, places, axis),
}
_RESHAPES = ("Reshape", "Flatten", "Unflatten")


class Graph:
    """Takes the events of `mx.export_function`, and keeps the kernels."""

    def __init__(self, nodes: Nodes):
        self.kernels: list[Kernel] = []
        self.nodes = nodes
        self._buffers = count()

    def trace(self, call: Callable[..., Array], shapes: Sequence[Any], given: Sequence[Held], region: int) -> Held:
        """`call` of arrays of `shapes` [(shape, dtype)] that lie where `given` says: where its result lies. Kernels are
        of `region`, or of their own where that is -1."""
        arrays: dict[str, Held] = {}
        numbers: dict[str, int] = {}
        outputs: list[str] = []

        def take(event: dict[str, Any]) -> None:
            if event["type"] == "inputs":
                arrays.update(zip((name for name, *_ in event["inputs"]), given, strict=True))
            elif event["type"] == "outputs":
                outputs.extend(name for name, *_ in event["outputs"])
            elif event["type"] == "constants":
                for name, value in event["constants"]:
                    arrays[name] = self._new(value.shape, value.dtype.size)
                    if value.dtype == mx.int32 and value.size == 1:
                        numbers[name] = int(value.item())
            elif event["type"] == "primitive":
                self._primitive(event, arrays, numbers, region)

        mx.export_function(take, call, *(mx.zeros(shape, dtype) for shape, dtype in shapes))
        return arrays[outputs[0]]

    def _primitive(self, event: dict[str, Any], arrays: dict[str, Held], numbers: dict[str, int], region: int) -> None:
        name, arguments = event["name"], event["arguments"]
        inputs = [arrays[one] for one, *_ in event["inputs"]]
        (first, shape, dtype), *_ = event["outputs"]
        if name == "Depends":
            node = self.nodes[numbers[event["inputs"][1][0]]]
            if node.name == "given":
                arrays[first] = self._new(shape, dtype.size)
            elif node.chain is not None:
                shapes = [(shape, dtype) for _, shape, dtype in event["inputs"][2:]]
                with compile.counting(None):  # a chain within it is a part of it
                    arrays[first] = self.trace(node.chain, shapes, inputs[2:], len(self.kernels))
            else:
                arrays[first] = self._kernel(node, inputs[2:], shape, dtype, region)
        elif name == "Full":  # numbers that are all the same
            arrays[first] = inputs[0]
        elif name in _VIEWS:
            made = _VIEWS[name](inputs[0].there, *arguments)
            views = made if isinstance(made, list) else [made]
            for (output, *_), view in zip(event["outputs"], views, strict=True):
                arrays[output] = Held(inputs[0].buffer, view)
        elif name in _RESHAPES and (strides := _strides(inputs[0].there, shape)) is not None:
            arrays[first] = Held(inputs[0].buffer, as_strided(inputs[0].there, shape, strides))
        else:
            kind: Kind = "product" if name in PRODUCTS else "memory"
            node = Node(name, kind, _flops(name, [one.there.shape for one in inputs], shape))
            arrays[first] = self._kernel(node, inputs, shape, dtype, region)

    def _kernel(self, node: Node, inputs: list[Held], shape: Sequence[int], dtype: mx.Dtype, region: int) -> Held:
        made = self._new(shape, dtype.size, inputs[0].there if len(inputs) == 1 else None)
        alone = region < 0 or node.name in APART
        launches = {"Concatenate": len(inputs), "Pad": 2}
        self.kernels.append(
            Kernel(
                name=node.name,
                kind=node.kind,
                dtype=str(dtype).removeprefix("mlx.core."),
                shape=tuple(shape),
                given=tuple(one.there.shape for one in inputs),
                flops=node.flops,
                reads=tuple(dict.fromkeys(one.span for one in inputs)),
                writes=(made.span,),
                region=-1 - len(self.kernels) if alone else region,
                launches=launches.get(node.name, 1),
            )
        )
        return made

    def _new(self, shape: Sequence[int], itemsize: int, like: np.ndarray | None = None) -> Held:
        """In the order of axes of `like` where that has no gaps: an operation of one array keeps it."""
        axes = list(range(len(shape)))
        if like is not None and like.shape == tuple(shape):
            order = sorted(axes, key=lambda axis: -like.strides[axis])
            if like.transpose(order).strides == _in_line([shape[axis] for axis in order], like.itemsize):
                axes = order
        strides = dict(zip(axes, _in_line([shape[axis] for axis in axes], itemsize), strict=True))
        base = _base()[:itemsize].view(f"V{itemsize}")
        return Held(next(self._buffers), as_strided(base, shape, [strides[axis] for axis in range(len(shape))]))


@cache
def _base() -> np.ndarray:
    """Where all arrays here pretend to lie; it is never read."""
    return np.zeros(8, np.uint8)


def _in_line(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides without gaps."""
    return tuple(itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _strides(x: np.ndarray, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Those of x as `shape`, or None where that needs a copy."""
    runs: list[tuple[int, int]] = []  # axes that lie behind each other are one
    for side, stride in zip(x.shape, x.strides, strict=True):
        if side > 1 and runs and runs[-1][1] == side * stride:
            runs[-1] = (runs[-1][0] * side, stride)
        elif side > 1:
            runs.append((side, stride))
    made: list[int] = []
    left, step = 1, x.itemsize
    for side in reversed(shape):
        if left == 1 and side > 1:
            left, step = runs.pop()
        if left % side:
            return None
        made.append(step)
        left, step = left // side, step * side
    return tuple(reversed(made))


def _flops(name: str, inputs: Sequence[tuple[int, ...]], result: Sequence[int]) -> float:
    """Multiplications and additions of a product."""
    if name == "Convolution":
        return 2.0 * prod(result) * prod(inputs[1][1:])
    return 2.0 * prod(result) * inputs[0][-1] if name in PRODUCTS else 0.0
