"""The memory that each backend's kernels take on each kind of device, as data for the engines and for plans without
them."""

from __future__ import annotations

from dataclasses import replace

from qwenimg.common.memory.workspace import Kept, Values, Workspace

SCORE_BYTES = 2**28  # attention without a fused kernel runs over chunks of queries whose scores take at most this much

# Counted by hooks on the tensors that autograd saves: a GELU saves its input; a gated activation gate, SiLU or GELU of
# it, and values; a SiLU and a convolution their inputs. The input of a layer has a gradient from the base and one from
# the factors.
_TORCH_KEPT = Kept(
    gelu=Values(1, 0),
    gated=Values(1.5, 0),
    normed=Values(1, 0),
    silu=Values(1, 0),
    convolved=Values(1, 0),
    attended=Values(1, 0),
    scores=0,
    decoded=False,
    arrays=Values(2, 0),
)
# Measured as the slope of the peak over a chain of 8 to 32 equal operations. MLX differentiates each operation of an
# activation alone, on a GPU too, where only what takes no gradient is compiled to one kernel. A CPU has 10 operations
# under way, whose arrays are not freed yet, and mostly in float32.
_MLX_KEPT = Kept(
    gelu=Values(0, 6),
    gated=Values(1, 2),
    normed=Values(0, 1),
    silu=Values(0, 4),
    convolved=Values(0, 0),
    attended=Values(0, 1),
    scores=1,
    decoded=True,
    arrays=Values(0, 10),
)
# Measured on a CPU: each image twice, as it is and in the kernel's order; a GPU adds its workspace for convolutions
TORCH = Workspace(score_bytes=0, conv_inputs=2.2, conv_outputs=2.2, decoded=1.0, int8=True, kept_values=_TORCH_KEPT)
# Measured: after a few products and convolutions oneDNN keeps 5 to 13 MB, on two threads. Its convolutions in 16 bit
# take weights in another order.
TORCH_CPU = replace(TORCH, kept=10**7, moved=frozenset({"bfloat16", "float16"}), ordered=True)
# Weights are moved, since images have their channels last
_MLX_MOVED = frozenset({"bfloat16", "float16", "float32"})
# Measured: 14.6 and 1, since its convolutions on a CPU copy every window. A weight is decoded in parts and joined.
# Its cache of freed arrays is off there (`Engine.expect`).
MLX_CPU = Workspace(
    score_bytes=SCORE_BYTES,
    conv_inputs=15.0,
    conv_outputs=1.0,
    decoded=2.0,
    kept_values=_MLX_KEPT,
    moved=_MLX_MOVED,
    wide_inputs=True,
)
# Metal makes no such copy, and multiplies codes. Not measured there
MLX_GPU = Workspace(
    score_bytes=0,
    conv_inputs=5.0,
    conv_outputs=2.0,
    decoded=0.0,
    kept_values=replace(_MLX_KEPT, attended=Values(1, 0), scores=0, decoded=False),
    moved=_MLX_MOVED,
)
