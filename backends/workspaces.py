"""What each backend's kernels take on each kind of device, as data: read by the engines, and by plans without them."""

from __future__ import annotations

from qwenimg.common.memory.workspace import Workspace

SCORE_BYTES = 2**28  # attention without a fused kernel runs over chunks of queries whose scores take at most this much

# Measured on a CPU: 3.1; a GPU's workspace for convolutions comes on top.
TORCH = Workspace(score_bytes=0, decode_buffers=3.5)
# Measured: 15.1, since its convolutions on a CPU copy every window.
MLX_CPU = Workspace(score_bytes=2 * SCORE_BYTES, decode_buffers=16.0)
# Metal has no such copy; not measured there.
MLX_GPU = Workspace(score_bytes=0, decode_buffers=6.0)
