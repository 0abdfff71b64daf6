"""A network as ncnn stores it (.param, .bin): its weights, and its graph computed in float64."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

HALF = 0x01306B47  # the tag of weights in float16


class Layer(NamedTuple):
    kind: str
    inputs: list[str]
    outputs: list[str]
    options: dict[int, list[float]]
    weights: list[np.ndarray]


def read(param: Path) -> list[Layer]:
    """Return the layers of `param`, with the weights of the .bin beside it."""
    magic, _, *lines = param.read_text().splitlines()
    assert magic == "7767517"
    data, at, layers = param.with_suffix(".bin").read_bytes(), 0, []

    def taken(count: int, dtype: str) -> np.ndarray:
        nonlocal at
        values = np.frombuffer(data, dtype, count, at)
        at += -(-values.nbytes // 4) * 4
        return values.astype(np.float32)

    def tagged(count: int) -> np.ndarray:
        tag = int(np.frombuffer(data, "<u4", 1, at)[0])
        taken(1, "<u4")
        assert tag in (0, HALF), hex(tag)
        return taken(count, "<f2" if tag == HALF else "<f4")

    for line in lines:
        kind, _, ins, outs, *rest = line.split()
        names, fields = rest[: int(ins) + int(outs)], rest[int(ins) + int(outs) :]
        options = {}
        for key, value in (field.split("=") for field in fields):
            numbers = [float(one) for one in value.split(",")]
            options[-int(key) - 23300 if int(key) <= -23300 else int(key)] = (
                numbers[1:] if int(key) <= -23300 else numbers
            )
        weights = []
        if kind == "Convolution":
            weights = [tagged(int(options[6][0])), taken(int(options[0][0]), "<f4")]
        elif kind == "PReLU":
            weights = [taken(int(options[0][0]), "<f4")]
        layers.append(Layer(kind, names[: int(ins)], names[int(ins) :], options, weights))
    assert at == len(data), (at, len(data))
    return layers


def tensors(layers: list[Layer]) -> dict[str, np.ndarray]:
    """Return the weights by BasicSR's names, in whose order the layers stand."""
    compact = any(layer.kind == "PReLU" for layer in layers)
    holding = [layer for layer in layers if layer.weights]
    if compact:
        names = [f"body.{i}" for i in range(len(holding))]
    else:
        blocks = (len(holding) - 6) // 15
        body = [f"body.{b}.rdb{r}.conv{c}" for b in range(blocks) for r in (1, 2, 3) for c in (1, 2, 3, 4, 5)]
        names = ["conv_first", *body, "conv_body", "conv_up1", "conv_up2", "conv_hr", "conv_last"]
    made: dict[str, np.ndarray] = {}
    for name, layer in zip(names, holding, strict=True):
        weight = layer.weights[0]
        outputs = int(layer.options[0][0])
        made[f"{name}.weight"] = weight.reshape(outputs, -1, 3, 3) if layer.kind == "Convolution" else weight
        if layer.kind == "Convolution":
            made[f"{name}.bias"] = layer.weights[1]
    return made


def computed(layers: list[Layer], x: np.ndarray) -> np.ndarray:
    """Return what the graph makes of x [1, 3, h, w], in float64."""
    values: dict[str, torch.Tensor] = {}
    for layer in layers:
        taken = [values[name] for name in layer.inputs]
        if layer.kind == "Input":
            results = [torch.from_numpy(x).double()]
        elif layer.kind == "Split":
            results = taken * len(layer.outputs)
        else:
            results = [_result(layer, taken)]
        values |= dict(zip(layer.outputs, results, strict=True))
    return values["output"].numpy()


def _result(layer: Layer, taken: list[torch.Tensor]) -> torch.Tensor:
    options, first = layer.options, taken[0]
    if layer.kind == "Convolution":
        weight = torch.from_numpy(layer.weights[0]).double().reshape(int(options[0][0]), first.shape[1], 3, 3)
        y = F.conv2d(first, weight, torch.from_numpy(layer.weights[1]).double(), padding=1)
        return F.leaky_relu(y, options[10][0]) if options.get(9) == [2.0] else y
    if layer.kind == "PReLU":
        slope = torch.from_numpy(layer.weights[0]).double()[:, None, None]
        return torch.where(first > 0, first, slope * first)
    if layer.kind == "Concat":
        return torch.cat(taken, 1)
    if layer.kind == "Eltwise":
        return sum(scale * one for scale, one in zip(options.get(1, [1.0] * len(taken)), taken, strict=True))
    if layer.kind == "BinaryOp":
        assert options.get(0, [0.0]) == [0.0] and options.get(1, [0.0]) == [0.0], options
        return taken[0] + taken[1]
    if layer.kind == "PixelShuffle":
        return F.pixel_shuffle(first, int(options[0][0]))
    assert layer.kind == "Interp" and options[0] == [1.0], layer
    return first.repeat_interleave(int(options[1][0]), 2).repeat_interleave(int(options[2][0]), 3)
