# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""FLUX.1 Redux: the text tokens of pictures. What is unusual about it: `qwenimg.common.networks.encoders.redux`.

B pictures, L patches, C channels of the image encoder, S of a text state. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders.redux import WIDER, ReduxConfig
from qwenimg.common.runtime.engine import NumpyArray

# Model


class ReduxImageEncoder(mlx.nn.Module):
    def __init__(self, config: ReduxConfig, stream: mx.Dtype):
        super().__init__()
        self.redux_up = ops.Linear(config.redux_dim, WIDER * config.txt_in_features)
        self.redux_down = ops.Linear(WIDER * config.txt_in_features, config.txt_in_features)

    def __call__(self, states: Array) -> Array:
        """[B L C] -> [B L S]."""
        return self.redux_down(ops.silu(self.redux_up(states)))


# Runner


class Runner(LoadedNetwork[ReduxConfig, ReduxImageEncoder]):
    network, role = ReduxImageEncoder, "text"

    @ops.computes
    def tokens(self, states: NumpyArray) -> Array:
        """Return the text tokens [B L S] of pictures with these states [B L C]."""
        return self.model(self.table(states))
