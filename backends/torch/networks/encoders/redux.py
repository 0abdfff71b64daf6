"""FLUX.1 Redux: the text tokens of pictures. What is unusual about it: `qwenimg.common.networks.encoders.redux`.

B pictures, L patches, C channels of the image encoder, S of a text state. Attribute paths are checkpoint keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.common.networks.encoders.redux import WIDER, ReduxConfig
from qwenimg.common.runtime.engine import NumpyArray

# Model


class ReduxImageEncoder(torch.nn.Module):
    def __init__(self, config: ReduxConfig, stream: torch.dtype):
        super().__init__()
        self.redux_up = ops.Linear(config.redux_dim, WIDER * config.txt_in_features)
        self.redux_down = ops.Linear(WIDER * config.txt_in_features, config.txt_in_features)

    def forward(self, states: Tensor) -> Tensor:
        """[B L C] -> [B L S]."""
        return self.redux_down(ops.silu(self.redux_up(states)))


# Runner


class Runner(LoadedNetwork[ReduxConfig, ReduxImageEncoder]):
    network, role = ReduxImageEncoder, "text"

    @ops.computes
    def tokens(self, states: NumpyArray) -> Tensor:
        """Return the text tokens [B L S] of pictures with these states [B L C]."""
        return self.model(self.table(states))
