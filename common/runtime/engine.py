"""What a backend offers: the protocol between the pipeline, which knows no framework, and the two engines.

Arrays that stay on the backend are `Array`; everything that crosses is numpy in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

from qwenimg.common.base.block import Block
from qwenimg.common.memory.workspace import Workspace
from qwenimg.common.precision.devices import Device
from qwenimg.common.precision.precision import Precision
from qwenimg.common.runtime.compiling import Compiler
from qwenimg.common.runtime.traced import Blocks, Look
from qwenimg.common.weights.plan import LoadPlan

# An array of the backend: supports + - * with itself and with Python floats. Its type is the framework's own.
Array: TypeAlias = Any
NumpyArray: TypeAlias = "np.ndarray[Any, Any]"
# What depends on the prompt and the size but on neither step nor latent: text stream, RoPE tables, mask.
Condition: TypeAlias = Any
# Every shift, scale and gate of a whole schedule.
Modulation: TypeAlias = Any
# A call of a denoiser behind its first block, whose update `change` [B ...] says how much the rest's may differ.
Begun: TypeAlias = Any
# Called with the operation, the parameter path ("" for an operation without one) and its result.
Observer: TypeAlias = Callable[[str, str, Array], None]


class TextEncoder(Protocol):
    def encode(self, ids: Sequence[int]) -> Array:
        """Last hidden states after the final norm, [1, S, C], evaluated."""
        ...


class Transformer(Protocol):
    def modulate(self, features: NumpyArray, addition: int = 0) -> Modulation:
        """All modulation for timestep sinusoids [T, 256]; their weights are read block by block and freed."""
        ...

    def condition(self, texts: Sequence[Array], shapes: Sequence[tuple[int, int, int]]) -> Condition:
        """Prepares a batch of texts, each [1, S_i, C], for images of `shapes` (frames, rows, columns in tokens)."""
        ...

    def predict(self, latents: Array, condition: Condition, modulation: Modulation, step: int) -> Array:
        """The velocity [B, L, C] in float32 for packed latents [1 or B, L, C] at the schedule's `step`."""
        ...

    def begin(self, latents: Array, condition: Condition, modulation: Modulation, step: int) -> Begun:
        """The same call as far as the first block."""
        ...

    def end(self, begun: Begun, kept: Array | None = None) -> tuple[Array, Array]:
        """The rest of it: what `predict` gives, and what the other blocks made. `kept`: that of a call before, in whose
        place they are not run."""
        ...


class VAE(Protocol):
    def decode(self, latents: NumpyArray, rows: int | None = None) -> NumpyArray:
        """Pixels [N, 3, 8h, 8w], about -1 to 1, of latents [N, z, h, w] in the VAE's own statistics.

        With `rows` the layers behind the mid block run over bands of so many rows, with the same result."""
        ...

    def encode(self, pixels: NumpyArray, rows: int | None = None) -> NumpyArray:
        """Mean and log variance [N, 2z, h, w] of the latents, in the VAE's own statistics, for pixels [N, 3, H, W].

        With `rows` the layers before the mid block run over bands of so many rows, with the same result."""
        ...


class ClipEncoder(Protocol):
    def encode(self, ids: Sequence[Sequence[int]], skipped: int, normed: bool) -> tuple[Array, Array]:
        """States [N, S, C] before the last `skipped` layers, with the final norm if `normed`, and pooled vectors [N, P]
        of chunks of ids [N, S]."""
        ...


class UNet(Protocol):
    def condition(self, texts: NumpyArray, addition: NumpyArray | None) -> Condition:
        """Prepares text states [B, S, C], and for SDXL pooled text and sinusoids of the sizes [B, A]."""
        ...

    def predict(self, latents: Array, features: NumpyArray, condition: Condition) -> Array:
        """The prediction [B, C, h, w] in float32 for latents [1, C', h, w] and sinusoids of the time [1, C0]."""
        ...

    def begin(self, latents: Array, features: NumpyArray, condition: Condition) -> Begun:
        """The same call as far as the first down block."""
        ...

    def end(self, begun: Begun, kept: Array | None = None) -> tuple[Array, Array]:
        """The rest of it: what `predict` gives, and what goes into the last up block. `kept`: that of a call before, in
        whose place what is deeper is not run."""
        ...


class Engine(Protocol):
    name: str  # as in --backend
    device: str  # shown in messages: "Apple M4 Max", "NVIDIA H200", "CPU (torch, 8 threads)"
    on_gpu: bool
    facts: Device  # what the device is good at
    workspace: Workspace

    def open(self, network: str, config: Any, plan: LoadPlan, precision: Precision) -> Any:
        """What runs `network`, a file of `common/networks/`: a TextEncoder, Transformer, VAE, ClipEncoder or UNet.
        Reads the weights that it always needs, of `plan` as it was made by `stored(precision)`."""
        ...

    def compiler(self) -> Compiler:
        """What compiling a denoiser is here."""
        ...

    def compile(self, opened: Any, on: bool, autotune: bool) -> str:
        """Set whether the next calls of `opened`, a denoiser, are compiled; results are the same up to rounding. Return
        what to tell the user, such as why no folder keeps what is compiled, or nothing. autotune: also look for the
        fastest kernels, where the framework can."""
        ...

    def refill(self, opened: Any, plan: LoadPlan, names: Iterable[str], branches: Iterable[str]) -> None:
        """Reads the parameters `names` of `opened` again, and of the parameters `branches` what is beside them only, by
        another `plan` of the same parameters, which it keeps for those that are not always there."""
        ...

    def watch(self, opened: Any, blocks: Iterable[Block], look: Look) -> None:
        """Makes the modules of `opened` that are one of `blocks` show their calls to `look`, as long as it is open."""
        ...

    def blocks(self, network: str, config: Any, plan: LoadPlan, precision: Precision, wide: str = "") -> Blocks:
        """The blocks of `network`, each to be called alone. wide: "float64", where the backend has it, or "float32" in
        place of what `precision` says, with the weights that `plan` keeps, which is made by `stored(precision)`."""
        ...

    def array(self, values: NumpyArray) -> Array:
        """A float32 array on the device."""
        ...

    def numpy(self, array: Array) -> NumpyArray:
        """The values as float32 (float64 for a float64 array), evaluated."""
        ...

    def finite(self, array: Array) -> bool:
        """Whether every value is finite. Evaluates."""
        ...

    def largest(self, array: Array) -> float:
        """Of the sizes of all values; infinite or NaN where one is. Evaluates."""
        ...

    def sampled(self, array: Array, most: int, image: bool) -> NumpyArray:
        """At most so many values of the last of a batch, at even distances, as `numpy` gives them; of an `image` in the
        order [C h w], whatever the device's own is."""
        ...

    def row_sizes(self, array: Array) -> NumpyArray:
        """The mean size of the values of each row, the last axis, in float32."""
        ...

    def guide(self, conditional: Array, unconditional: Array, scale: float) -> Array:
        """Classifier-free guidance with the norm of each token rescaled to the conditional prediction's."""
        ...

    def rescale(self, guided: Array, conditional: Array, share: float) -> Array:
        """`guided` with its deviation moved by `share` towards that of `conditional`, both [B, C, h, w]."""
        ...

    def join(self, arrays: Sequence[Array]) -> Array:
        """Images [1, C_i, h, w] side by side in their channels."""
        ...

    def split(self, batch: Array) -> list[Array]:
        """The rows of a batch, each with a batch axis of 1."""
        ...

    def free_memory(self) -> int:
        """Bytes that could still be allocated on the device."""
        ...

    def peak_memory(self) -> int | None:
        """Bytes that arrays took at most since this was last asked, of torch on a CPU the whole process. None where
        nobody counts them."""
        ...

    def machine(self) -> tuple[int, str]:
        """Bytes that the device has, 0 where that is not known, and the limit on this process that leaves less than is
        free of them, as a message names it: `ulimit -v`; empty where none does."""
        ...

    def expect(self, peak: int) -> None:
        """Told before a run how many bytes it was planned to take, for the allocator's own limits."""
        ...

    def release(self) -> None:
        """Gives freed memory back to the system."""
        ...

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Calls `observer` after every operation of the models while the context is open."""
        ...

    def product_seconds(self, side: int, dtype: str) -> float:
        """Of one product of two matrices side x side."""
        ...

    def operate(self, operation: str, dtype: str, arrays: Sequence[NumpyArray]) -> NumpyArray:
        """The result of one operation of the networks on `arrays` in `dtype`, for `measure.exactness`: `matmul` of
        [L, in] with [out, in], `conv2d` 3x3 of [B, C, h, w] with [O, C, 3, 3], `attention` of q, k, v [B, L, H, D]."""
        ...

    def attention(self) -> str:
        """What computes attention over heads of 128 in bfloat16, for `--debug timing`."""
        ...

    def check_fp32(self) -> float:
        """The relative error of a 256^3 float32 matrix product against float64."""
        ...

    def versions(self) -> dict[str, str]:
        """Of the framework and what it stands on, for the recipe."""
        ...
