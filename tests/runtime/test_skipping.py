"""Calls that skip deep blocks of a made-up network, whose classes and paths no network of ours has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn
import pytest
import torch

from qwenimg.common.base.block import CachedBlocks
from qwenimg.common.networks.denoisers import qwen_dit, unet
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.runtime.skipping import Skipping

CHAIN = CachedBlocks(after="odd.0", paths=("odd.1", "odd.2"), adds=True)
PAIRS = {"torch": (torch.nn.Module, torch.tensor), "mlx": (mlx.nn.Module, mx.array)}


def network(backend: str, pairs: bool) -> tuple[Any, Callable[..., Any], list[int]]:
    """Return a network of three blocks, block i of which adds x^2 + i to x, with the calls that it recorded. pairs: the
    blocks also take and return a second stream."""
    kind, array = PAIRS[backend]
    calls: list[int] = []

    class Odd(kind):  # type: ignore[misc, valid-type]
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: Any, *others: Any) -> Any:
            calls.append(self.number)
            x = x + x * x + self.number
            return (x, *others) if others else x

        if backend == "mlx":
            __call__ = forward

    class Chain(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            blocks = [Odd(i) for i in range(3)]
            self.odd = torch.nn.ModuleList(blocks) if backend == "torch" else blocks

        def forward(self, x: Any) -> Any:
            streams = (x, -x) if pairs else (x,)
            for block in self.odd:
                made = block(*streams)
                streams = made if pairs else (made,)
            return streams[0]

        if backend == "mlx":
            __call__ = forward

    return Chain(), array, calls


def same(x: Any) -> Any:
    return x


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("backend", PAIRS)
def test_a_call_skips_and_adds(backend: str, pairs: bool) -> None:
    model, array, calls = network(backend, pairs)
    x, updates, started = array([1.0, 2.0]), list[Any](), list[Any]()

    def start(kept: Any) -> Any:
        started.append(kept)
        return kept

    skipping = Skipping(model, CHAIN, lambda image: pytest.fail("the stream is no image"), start)
    plain = model(x).tolist()
    assert plain == [58.0, 1894.0]
    whole, added = skipping.run(lambda: model(x), updates.append)
    assert whole.tolist() == plain and added.tolist() == [56.0, 1888.0]
    assert updates[0].tolist() == [1.0, 4.0] and len(started) == 1
    calls.clear()
    reused, kept = skipping.run(lambda: model(x), lambda update: 10 * added)
    assert calls == [0] and len(started) == 1
    assert reused.tolist() == [562.0, 18886.0] and kept.tolist() == [560.0, 18880.0]
    assert model(x).tolist() == plain and calls == [0, 0, 1, 2]


@pytest.mark.parametrize("backend", PAIRS)
def test_the_stream_itself_is_reused(backend: str) -> None:
    model, array, calls = network(backend, pairs=False)
    deep, updates = CachedBlocks(after="odd.0", paths=("odd.1",), adds=False, image=True), list[Any]()
    skipping = Skipping(model, deep, lambda update: -update, same)
    _, kept = skipping.run(lambda: model(array([1.0])), updates.append)
    assert kept.tolist() == [7.0] and updates[0].tolist() == [-1.0]
    calls.clear()
    reused, _ = skipping.run(lambda: model(array([5.0])), lambda update: kept)
    assert calls == [0, 2] and reused.tolist() == [7.0 + 49.0 + 2.0]


@pytest.mark.parametrize("backend", PAIRS)
def test_nothing_stays_behind_a_call(backend: str) -> None:
    model, array, calls = network(backend, pairs=False)
    skipping, x = Skipping(model, CHAIN, same, same), array([1.0])

    def fail(update: Any) -> Any:
        raise ValueError("in the call")

    with pytest.raises(ValueError, match="in the call"):
        skipping.run(partial(model, x), fail)
    assert model(x).tolist() == [58.0] and calls == [0, 0, 1, 2]
    seen = weakref.ref(model)
    gc.disable()
    del model
    gc.enable()
    assert seen() is None, "freed at once, not when cycles are collected"


def test_what_the_rows_say() -> None:
    blocks = qwen_dit.NETWORK.cached_blocks
    assert blocks is not None and blocks(QwenDiTConfig(num_layers=1)).paths == ()
    assert blocks(QwenDiTConfig(num_layers=3)).paths == ("transformer_blocks.1", "transformer_blocks.2")
    one = UNetConfig(
        block_out_channels=(32,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        layers_per_block=(1,),
        transformer_layers_per_block=(1,),
        attention_head_dim=(4,),
    )
    assert unet.cached_blocks(one).paths == ("mid_block",)
    assert unet.cached_blocks(UNetConfig()).paths == (
        "down_blocks.0.downsamplers.0",
        *(f"down_blocks.{i}" for i in (1, 2, 3)),
        "mid_block",
        *(f"up_blocks.{i}" for i in (0, 1, 2)),
    )
