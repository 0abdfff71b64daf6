"""The interface of a backend: the protocol between the pipeline, which knows no framework, and the two engines.

Arrays that stay on the backend are `Array`; all others are numpy in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.memory.workspace import Workspace
from qwenimg.common.precision.devices import Device
from qwenimg.common.precision.precision import Precision
from qwenimg.common.runtime.compiling import Compiler
from qwenimg.common.runtime.group import Group
from qwenimg.common.runtime.rates import Layer, Rates, Shapes
from qwenimg.common.runtime.shortcuts import CompiledLook, ProductLook
from qwenimg.common.runtime.skipping import Skipping
from qwenimg.common.runtime.traced import BlockRunner, Look
from qwenimg.common.weights.plan import LoadPlan

# An array of the backend: supports + - * with itself and with Python floats. Its type is the framework's own.
Array: TypeAlias = Any
NumpyArray: TypeAlias = "np.ndarray[Any, Any]"
# Values that depend on the prompt and the size but on neither step nor latent: text stream, RoPE tables, mask.
Condition: TypeAlias = Any
# All shifts, scales and gates of a whole schedule.
Modulation: TypeAlias = Any
# The changes of one evaluation by control networks, as the denoiser takes them; None without any. Qwen-Image takes the
# changes of its image stream behind each block.
Control: TypeAlias = Any
# The time of a step as its network takes it: the modulation of the schedule and a row of it, or sinusoids [1, C].
TimeStep: TypeAlias = Any
# Called with the operation, the parameter path ("" for an operation without one) and its result.
Observer: TypeAlias = Callable[[str, str, Array], None]


class TextEncoder(Protocol):
    def encode(self, ids: Sequence[int], pads: int = 0) -> Array:
        """Return the hidden states that condition an image, [1, S, C], evaluated. The last `pads` ids are pads; an
        encoder of a family without pads does not take their number."""
        ...


class PictureEncoder(Protocol):
    """A text encoder that sees pictures in the prompt."""

    def slots(self, patches: NumpyArray, rows: int, columns: int) -> Array:
        """Return the inputs [1, slots, C] of the language model for a picture of rows x columns patches [L, values],
        evaluated."""
        ...

    def encode(self, ids: Sequence[int], places: Sequence[Any], slots: Sequence[Array], pads: int = 0) -> Array:
        """Return the hidden states that condition an image, [1, S, C], evaluated. The ids have one for each slot, at
        `places`: (first id, rows and columns of slots). The last `pads` ids are pads; an encoder of a family without
        pads does not take their number."""
        ...


class WritingEncoder(PictureEncoder, Protocol):
    """A language model with its head. Each text that it writes is a row, with keys and values of its own, so that texts
    of any lengths are written side by side as each would be alone. A call that is interrupted leaves rows that can only
    be ended."""

    def opening(self, ids: Sequence[int]) -> Sequence[tuple[Array, Array]]:
        """Return the keys and values [1, H, S, D] of each layer for the first `ids` of texts, evaluated."""
        ...

    def begin(
        self,
        ids: Sequence[int],
        places: Sequence[Any] = (),
        slots: Sequence[Array] = (),
        opening: Sequence[tuple[Array, Array]] = (),
    ) -> Array:
        """Begin a text with `ids` as the last row. Return the scores [V] of its next token in float32, evaluated.
        opening: the result of `opening` for the first ids, which come before any picture, in its own dtype or in
        float32. Other arguments as for `encode`."""
        ...

    def follow(self, tokens: Sequence[int]) -> Array:
        """Append one token to each row. Return the scores [rows, V] of the next ones in float32, evaluated."""
        ...

    def end(self, row: int) -> None:
        """Forget a row; later ones move up."""
        ...

    def forget(self) -> None:
        """Forget all rows."""
        ...


class DenoiserNetwork(Protocol):
    """A network that predicts noise, velocity or denoised latents."""

    @property
    def skipping(self) -> Skipping:
        """Calls through it can skip its cached blocks, if its `Network` has some."""
        ...

    def condition(self, texts: Any, extra: Any) -> Condition:
        """Prepare texts once for a prompt. extra: further inputs of this network (grid, references, sizes).

        Qwen-Image takes texts [1, S_i, C], shapes (frames, rows, columns in tokens) and then references [1, L_i, C],
        Z-Image one text [1, S, C] and rows and columns, a UNet texts [B, S, C] and for SDXL pooled text and sinusoids
        of the sizes [B, A]."""
        ...

    def predict(self, x: Array, step: TimeStep, condition: Condition, control: Control = None) -> Array:
        """Return the prediction in float32 for each text of `condition`, for latents x of one image or of one
        for each text: packed [1 or B, L, C], or [1, C, h, w]. A network without control networks takes no control."""
        ...


class ControlNetwork(Protocol):
    """A network that makes the changes by which a picture controls a denoiser."""

    def condition(self, text: Any, extra: Any, picture: Array) -> Condition:
        """Prepare a text and a picture, its latents or pixels, once. `extra`: as for the denoiser; for a UNet's also
        the number of its branches."""
        ...

    def predict(self, x: Array, step: TimeStep, condition: Condition, scale: Any) -> Any:
        """Return the changes, times `scale`. Qwen-Image takes a list in the order of its blocks: as many as it has, or
        fewer, each for several blocks. A UNet takes one for each result that its up blocks join and one for its mid
        block, each with a scale of its own."""
        ...


class ClipEncoder(Protocol):
    def encode(
        self,
        ids: Sequence[Sequence[int]],
        skipped: int,
        normed: bool,
        places: Sequence[tuple[int, int]] = (),
        vectors: np.ndarray | None = None,
    ) -> tuple[Array, Array]:
        """Encode chunks of ids [N, S]. Return states [N, S, C] before the last `skipped` layers, with the final norm if
        `normed`, and pooled vectors [N, P]. `vectors` [M, C], if there are any, replace the embeddings of the tokens at
        `places`, (chunk, position)."""
        ...


class Adapters(Protocol):
    """LoRA factors, in float32, beside linear layers of networks that are frozen: the denoiser, and text encoders. The
    branch that computes a LoRA for pictures computes them, in the layer's dtype."""

    parameters: dict[str, Array]
    """By a layer's path and `.lora_A.weight` [R in] or `.lora_B.weight` [out R]; a path in a text encoder has its
    folder in front: `text_encoder/encoder.layers.0.mlp.fc1`."""

    def put(self, parameters: dict[str, Array]) -> None:
        """Replace the factors."""
        ...

    def learning(self) -> AbstractContextManager[None]:
        """While the context is open, results of networks may be part of what is differentiated."""
        ...

    def attach(self, opened: Any, part: str = "") -> None:
        """Put the factors of a part beside the layers of `opened`, whichever network had them before. part: the folder
        of a text encoder; "": the denoiser."""
        ...

    def gradients(self, loss: Callable[[], Array], scale: float = 1.0) -> tuple[float, dict[str, Array]]:
        """Return `loss()`, a number that depends on the factors, and the gradient of `scale` times it by each
        parameter, evaluated."""
        ...

    def value(self, loss: Callable[[], Array]) -> float:
        """Return `loss()` without gradients."""
        ...

    def detach(self) -> None:
        """Take the factors away from all networks, which then compute as without them."""
        ...

    def evaluated(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Return the arrays, computed."""
        ...


class Engine(Protocol):
    name: str  # a value of --backend
    device: str  # shown in messages: "Apple M4 Max", "NVIDIA H200", "CPU (torch, 8 threads)"
    on_gpu: bool
    facts: Device  # properties of the device
    rate: Rates  # of its layers, as measured on this machine
    workspace: Workspace
    group: Group | None  # the ranks that share a run, if there are several

    def open(self, network: str, config: Any, plan: LoadPlan, precision: Precision) -> Any:
        """Open `network`, a file of `common/networks/`, as a TextEncoder, DenoiserNetwork, VAE or ClipEncoder.

        Reads the weights of `plan`, a result of `stored(precision)`, that are always needed."""
        ...

    def hook_cached_blocks(self, opened: Any, cached: CachedBlocks) -> None:
        """Give `opened`, a denoiser, its `skipping`: calls through it can skip the `cached` blocks, which are then not
        streamed either."""
        ...

    def compiler(self) -> Compiler:
        """Return the expected effect of compiling a denoiser here."""
        ...

    def compile(self, opened: Any, modules: re.Pattern[str] | None, autotune: bool) -> str:
        """Set whether the next calls of `opened`, a denoiser, are compiled; results are the same up to rounding. Return
        a message for the user, such as why no folder keeps the compiled code, or "". modules: the paths of those that
        are compiled, by a framework that compiles modules; None: nothing is. autotune: also search for the fastest
        kernels, if the framework can."""
        ...

    def refill(self, opened: Any, plan: LoadPlan, names: Iterable[str], branches: Iterable[str]) -> None:
        """Read the parameters `names` of `opened` again from `plan`, which has the same parameters; for `branches` read
        only the LoRA branch. The plan replaces the old one for streamed parameters."""
        ...

    def watch(self, opened: Any, blocks: Iterable[Block], look: Look) -> None:
        """Make the modules of `opened` that are one of `blocks` report their calls to `look`, as long as it is open."""
        ...

    def blocks(self, network: str, config: Any, plan: LoadPlan, precision: Precision, wide: str = "") -> BlockRunner:
        """Return the blocks of `network`, each to be called alone. wide: "float64", if the backend has it, or
        "float32", in place of `precision`'s dtypes, with the weights of `plan`, a result of `stored(precision)`."""
        ...

    def adapters(self, values: Mapping[str, NumpyArray], recomputed: re.Pattern[str] | None) -> Adapters:
        """Return adapters with these values of their parameters. recomputed: paths of the denoiser's modules that keep
        only their inputs for the backward pass, and run again in it (gradient checkpointing)."""
        ...

    def array(self, values: NumpyArray) -> Array:
        """Return a float32 array on the device."""
        ...

    def numpy(self, array: Array) -> NumpyArray:
        """Return the values as float32 (float64 for a float64 array), evaluated."""
        ...

    def finite(self, array: Array) -> bool:
        """Return whether every value is finite. Evaluates."""
        ...

    def largest(self, array: Array) -> float:
        """Return the largest absolute value; infinite or NaN if one is. Evaluates."""
        ...

    def sampled(self, array: Array, most: int, image: bool) -> NumpyArray:
        """Return at most `most` values of the last of a batch, at even distances, in the form of `numpy`; with
        `image`, of an array with rows and columns in the order [C h w], whatever the device's own is."""
        ...

    def row_sizes(self, array: Array) -> NumpyArray:
        """Return the mean absolute value of each row, the last axis, in float32."""
        ...

    def guide(self, conditional: Array, unconditional: Array, scale: float) -> Array:
        """Apply classifier-free guidance with the norm of each token rescaled to the conditional prediction's."""
        ...

    def rescale(self, guided: Array, conditional: Array, share: float) -> Array:
        """Move the standard deviation of `guided` by the fraction `share` towards the standard deviation of
        `conditional`, both [B, C, h, w]."""
        ...

    def shortened(self, guided: Array, conditional: Array, most: float, each: bool = False) -> Array:
        """Return `guided` with at most `most` times the length of `conditional`, both as one vector, or token by token
        if `each`."""
        ...

    def join(self, arrays: Sequence[Array]) -> Array:
        """Concatenate arrays [B, C_i, ...] along their channels."""
        ...

    def split(self, batch: Array) -> list[Array]:
        """Split a batch into its rows, each with a batch axis of 1."""
        ...

    def free_memory(self) -> int:
        """Return the bytes that can still be allocated on the device."""
        ...

    def peak_memory(self) -> int | None:
        """Return the most bytes of arrays since the last call (torch on a CPU: of the whole process). None if they are
        not counted."""
        ...

    def machine(self) -> tuple[int, str]:
        """Return the memory of the device in bytes, 0 if not known; and the name of the limit, such as `ulimit -v`,
        that leaves this process less than the free memory, or ""."""
        ...

    def expect(self, peak: int) -> None:
        """Prepare the allocator for a run that is planned to take `peak` bytes."""
        ...

    def release(self) -> None:
        """Return freed memory to the system."""
        ...

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Call `observer` after every operation of the models while the context is open."""
        ...

    def compared_blocks(
        self, opened: Any, modules: re.Pattern[str], look: CompiledLook
    ) -> AbstractContextManager[None]:
        """Call each compiled block of `opened`, at the paths `modules`, uncompiled too while the context is open, and
        pass both results to `look`. A block that does not stay compiled, by its answer, is called uncompiled from then
        on."""
        ...

    def compared_products(self, opened: Any, look: ProductLook) -> AbstractContextManager[None]:
        """Pass each call of a layer of `opened` whose weight is quantized to `look` while the context is open, in which
        nothing is compiled that would hide one."""
        ...

    def layer_seconds(self, layer: Layer, dtype: str, shapes: Shapes, small: bool) -> float:
        """Return the seconds of one linear layer (`matmul`) or convolution of the networks with inputs and weights of
        `shapes` in `dtype`. On a CPU they are processor time, which other programs hardly change: of one thread, and
        shared among all, unless the network is `small`."""
        ...

    def operate(self, operation: str, dtype: str, arrays: Sequence[NumpyArray]) -> NumpyArray:
        """Run one operation of the networks on `arrays` in `dtype`, for `measure.exactness`: `matmul` of [L, in] with
        [out, in], `conv2d` 3x3 of [B, C, h, w] with [O, C, 3, 3], `attention` of q, k, v [B, L, H, D]."""
        ...

    def attention(self) -> str:
        """Return the name of the kernel for attention over heads of 128 in bfloat16, for `--debug timing`."""
        ...

    def versions(self) -> dict[str, str]:
        """Return the versions of the framework and its libraries, for the recipe."""
        ...
