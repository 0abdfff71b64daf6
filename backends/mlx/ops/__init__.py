"""The operations of the MLX networks. Every cast of the backend is here or in `load.py`.

A linear layer or a convolution computes in its `dtype`, its weight's, which `load.py` chose from the precision policy:
its input is cast to it. What the policy calls an FP32 place is float32 *at least*.

Shapes: B batch, L tokens, H heads, D head dim, C channels. Images are [B h w C], as MLX convolves them.
"""

from __future__ import annotations

from qwenimg.backends.mlx.ops.activations import *
from qwenimg.backends.mlx.ops.attention import *
from qwenimg.backends.mlx.ops.device import *
from qwenimg.backends.mlx.ops.functions import *
from qwenimg.backends.mlx.ops.kept import *
from qwenimg.backends.mlx.ops.layers import *
from qwenimg.backends.mlx.ops.operate import layer_seconds as layer_seconds
from qwenimg.backends.mlx.ops.operate import operate as operate
from qwenimg.backends.mlx.ops.products import *
from qwenimg.backends.mlx.ops.tokens import Tokens as Tokens
