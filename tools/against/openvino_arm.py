"""A step of one of our networks as OpenVINO runs it: traced, converted and compiled, in float32.

pip install openvino
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch


class _Step(torch.nn.Module):
    def __init__(self, predict: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.predict = predict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.predict(x)


def compiled(predict: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], np.ndarray]:
    """Return `predict` of x as a function, by as many threads as torch has.

    All but x is constant in the trace: OpenVINO also computes once what depends on the noise level alone. The trace is
    of what torch's compiler is given, without the order of products that suits torch on a CPU.
    """
    try:
        import openvino
    except ImportError as error:
        raise SystemExit("OpenVINO, which is compared with, is not installed: pip install openvino") from error
    with mock.patch("torch.compiler.is_compiling", lambda: True):
        traced = torch.jit.trace(_Step(predict), (x,), check_trace=False)
    converted = openvino.convert_model(traced, example_input=(x,))
    del traced
    options: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    step = openvino.Core().compile_model(converted, "CPU", options)
    fed = {step.input(0): x.numpy()}
    return lambda: step(fed)[0]
