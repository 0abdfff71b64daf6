"""The operations of the torch networks. Every cast of the backend is here or in `load.py`.

A linear layer or a convolution computes in its `dtype`, its weight's, which `load.py` chose from the precision policy:
its input is cast to it. What the policy calls an FP32 place is float32 *at least*: float64 passes through.

Shapes: B batch, L tokens, H heads, D head dim, C channels. Images are [B C h w].
"""

from __future__ import annotations

from qwenimg.backends.torch.ops.activations import *
from qwenimg.backends.torch.ops.attention import *
from qwenimg.backends.torch.ops.cpu import computes as computes
from qwenimg.backends.torch.ops.cpu import multiplies as multiplies
from qwenimg.backends.torch.ops.cpu import multiplies_int8 as multiplies_int8
from qwenimg.backends.torch.ops.device import *
from qwenimg.backends.torch.ops.functions import *
from qwenimg.backends.torch.ops.kept import *
from qwenimg.backends.torch.ops.layers import *
from qwenimg.backends.torch.ops.operate import layer_seconds as layer_seconds
from qwenimg.backends.torch.ops.operate import operate as operate
from qwenimg.backends.torch.ops.products import *
from qwenimg.backends.torch.ops.tokens import HasTokenRanks as HasTokenRanks
from qwenimg.backends.torch.ops.tokens import Tokens as Tokens
from qwenimg.backends.torch.ops.tokens import share_tokens as share_tokens
