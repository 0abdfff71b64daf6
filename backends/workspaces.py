"""The memory that each backend's kernels take on each kind of device, as data for the engines and for plans without
them."""

from __future__ import annotations

from dataclasses import replace

from qwenimg.common.memory.workspace import Workspace

SCORE_BYTES = 2**28  # attention without a fused kernel runs over chunks of queries whose scores take at most this much

# Measured on a CPU: each image twice, as it is and in the kernel's order; a GPU adds its workspace for convolutions
TORCH = Workspace(score_bytes=0, conv_inputs=2.2, conv_outputs=2.2, decoded=1.0)
# Measured: after a few products and convolutions oneDNN keeps 5 to 13 MB, on two threads. Its convolutions in 16 bit
# take weights in another order.
TORCH_CPU = replace(TORCH, kept=10**7, moved=frozenset({"bfloat16", "float16"}), ordered=True)
# Weights are moved, since images have their channels last
_MLX_MOVED = frozenset({"bfloat16", "float16", "float32"})
# Measured: 14.6 and 1, since its convolutions on a CPU copy every window. A weight is decoded in parts and joined.
# Its cache of freed arrays is off there (`Engine.expect`).
MLX_CPU = Workspace(
    score_bytes=SCORE_BYTES, conv_inputs=15.0, conv_outputs=1.0, decoded=2.0, moved=_MLX_MOVED, wide_inputs=True
)
# Metal makes no such copy, and multiplies codes. Not measured there
MLX_GPU = Workspace(score_bytes=0, conv_inputs=5.0, conv_outputs=2.0, decoded=0.0, moved=_MLX_MOVED)
