"""Faults planted in the real code of each backend: the criterion catches every one, and says by what factor.

A factor is the error over what is allowed. The same blocks without a fault pass in `test_parity_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from support.parity_bench import Bench
from support.parity_blocks import BLOCKS
from support.parity_cases import MLX, TORCH, Twin
from support.policies import BF16, FP32

from qwenimg.common.networks.denoisers import qwen_conditioning

Plant = Callable[[pytest.MonkeyPatch, Twin], None]
BY_NAME = {block.name: block for block in BLOCKS}
QKV = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


# Faults


def replace_forward(patch: pytest.MonkeyPatch, twin: Twin, layer: str, change: Callable) -> None:
    """Makes `layer` return change(layer, x, its own result)."""
    kind, method = getattr(twin.nn, layer), "forward" if twin.name == "torch" else "__call__"
    original = getattr(kind, method)
    patch.setattr(kind, method, lambda self, x, *out: change(self, x, original(self, x, *out)))


def layer_norm_eps(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    modulate = twin.nn.norm_modulate
    patch.setattr(
        twin.nn, "norm_modulate", lambda x, shift, scale, dtype, eps: modulate(x, shift, scale, dtype, 10 * eps)
    )


def gelu_erf(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    if twin.name == "torch":
        import torch

        patch.setattr(twin.nn, "linear_gelu", lambda layer, x: torch.nn.functional.gelu(layer(x)))
    else:
        import mlx.nn

        patch.setattr(twin.nn, "linear_gelu", lambda layer, x: mlx.nn.gelu(layer(x)))


def replace_attention(patch: pytest.MonkeyPatch, twin: Twin, change: Callable[..., Any]) -> None:
    """Where networks call it, and where the layer of its own module does."""
    for owner in (twin.nn, twin.attending):
        patch.setattr(owner, "attention", partial(change, owner.attention))


def attention_scale(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    replace_attention(patch, twin, lambda original, q, *rest, **more: original(1.01 * q, *rest, **more))


def no_qkv_bias(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    replace_forward(patch, twin, "Linear", lambda self, x, y: y - self.bias if self.path.endswith(QKV) else y)


def no_qk_norm(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    replace_forward(patch, twin, "RMSNorm", lambda self, x, y: x if ".norm_" in self.path else y)


def no_rope(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    patch.setattr(twin.nn, "rotate_pairs", lambda x, turns, dtype: x)


def rope_halves(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    halves = twin.nn.rotate_halves
    patch.setattr(twin.nn, "rotate_pairs", lambda x, turns, dtype: halves(x, turns[:, 0, :, 0], turns[:, 0, :, 1]))


def scale_without_one(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    original = twin.nn.norm_modulate
    patch.setattr(twin.nn, "norm_modulate", lambda x, shift, scale, *rest: original(x, shift, scale - 1, *rest))


def gates_swapped(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    original = twin.nn.chunks

    def swapped(modulation, count, index):
        parts = list(original(modulation, count, index))
        if count == 6:
            parts[2], parts[5] = parts[5], parts[2]
        return parts

    patch.setattr(twin.nn, "chunks", swapped)


def causal(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    replace_attention(patch, twin, lambda original, q, k, v, *rest: original(q, k, v, causal=True))


def not_causal(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    replace_attention(patch, twin, lambda original, q, k, v, **more: original(q, k, v))


def text_rope_pairs(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    pairs, freqs = twin.nn.rotate_pairs, twin.nn.rope_freqs
    patch.setattr(twin.nn, "rotate_halves", lambda x, cos, sin: pairs(x, freqs(cos, sin), x.dtype))


def no_mask(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    patch.setattr(qwen_conditioning, "key_mask", lambda lengths, tokens: None)


def mask_one_too_long(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    original = qwen_conditioning.key_mask
    patch.setattr(
        qwen_conditioning, "key_mask", lambda lengths, tokens: original([max(lengths), min(lengths) + 1], tokens)
    )


def mask_of_the_other_row(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    original = qwen_conditioning.key_mask
    patch.setattr(qwen_conditioning, "key_mask", lambda lengths, tokens: original(lengths[::-1], tokens))


def head_scale_and_shift_swapped(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    original = twin.nn.chunks

    def swapped(modulation, count, index):
        parts = original(modulation, count, index)
        return parts[::-1] if count == 2 else parts

    patch.setattr(twin.nn, "chunks", swapped)


def sines_first(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    def swapped(self, x, y):
        return original(self, twin_roll(twin, x)) if self.path.endswith("linear_1") else y

    kind, method = twin.nn.Linear, "forward" if twin.name == "torch" else "__call__"
    original = getattr(kind, method)
    replace_forward(patch, twin, "Linear", swapped)


def twin_roll(twin: Twin, x):
    """The halves of the last axis exchanged."""
    if twin.name == "torch":
        return x.roll(x.shape[-1] // 2, -1)
    import mlx.core as mx

    return mx.roll(x, x.shape[-1] // 2, -1)


def kernel_turned(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    """Rows and columns of every convolution's kernel exchanged, as a wrong layout would."""
    load = twin.load
    original = load.tensor

    def turned(entry, *rest):
        made = original(entry, *rest)
        if len(entry.shape) != 4:
            return made
        return made.transpose(2, 3) if twin.name == "torch" else made.swapaxes(1, 2)

    patch.setattr(load, "tensor", turned)


def qkv_order(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    """The channels of queries, keys and values dealt out in turn rather than in three runs."""
    original = twin.nn.spatial_attention

    def dealt(qkv):
        axis = 1 if twin.name == "torch" else 3
        width = qkv.shape[axis]
        order = [3 * (i % (width // 3)) + i // (width // 3) for i in range(width)]
        return original(qkv[:, order] if axis == 1 else qkv[..., _indices(order)])

    patch.setattr(twin.nn, "spatial_attention", dealt)


def _indices(order: list[int]):
    import mlx.core as mx

    return mx.array(order)


def norm_without_root(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    replace_forward(patch, twin, "ChannelNorm", lambda self, x, y: y / self.gamma.shape[0] ** 0.5)


def padded_all_round(patch: pytest.MonkeyPatch, twin: Twin) -> None:
    """A stride of 2 with the zeros at the top and left instead of the bottom and right."""
    original = twin.nn.pad_right_bottom
    rows, columns = (2, 3) if twin.name == "torch" else (1, 2)

    def shifted(x):
        padded = original(x)
        if twin.name == "torch":
            return padded.roll((1, 1), (rows, columns))
        import mlx.core as mx

        return mx.roll(padded, (1, 1), (rows, columns))

    patch.setattr(twin.nn, "pad_right_bottom", shifted)


@dataclass(frozen=True)
class Fault:
    """A fault, the block that must show it, and inputs on which it shows."""

    plant: Plant
    block: str
    family: str = "normal"
    fresh: bool = False  # whether weights must be loaded again

    @property
    def name(self) -> str:
        return f"{self.plant.__name__} in {self.block}"


FAULTS = (
    Fault(layer_norm_eps, "dit.block", "std 0.03"),
    Fault(gelu_erf, "dit.block"),
    Fault(attention_scale, "dit.block"),
    Fault(no_qkv_bias, "dit.block"),
    Fault(no_qk_norm, "dit.block"),
    Fault(no_rope, "dit.block"),
    Fault(rope_halves, "dit.block"),
    Fault(scale_without_one, "dit.block"),
    Fault(gates_swapped, "dit.block"),
    Fault(causal, "dit.block"),
    Fault(layer_norm_eps, "dit.head", "std 0.03"),
    Fault(scale_without_one, "dit.head"),
    Fault(head_scale_and_shift_swapped, "dit.head"),
    Fault(sines_first, "dit.time"),
    Fault(no_mask, "dit.batch"),
    Fault(mask_one_too_long, "dit.batch"),
    Fault(mask_of_the_other_row, "dit.batch"),
    Fault(not_causal, "text.layer"),
    Fault(attention_scale, "text.layer"),
    Fault(text_rope_pairs, "text.layer"),
    Fault(kernel_turned, "vae.residual", fresh=True),
    Fault(kernel_turned, "vae.decoder", fresh=True),
    Fault(norm_without_root, "vae.residual"),
    Fault(qkv_order, "vae.attention"),
    Fault(padded_all_round, "vae.down"),
)


@pytest.mark.parametrize("twin", [TORCH, MLX], ids=["torch", "mlx"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.sample(16)
def test_planted_fault_is_caught(bench: Bench, fault: Fault, twin: Callable[[], Twin], monkeypatch) -> None:
    block, side = BY_NAME[fault.block], twin()
    clean = bench.judge(block, FP32, fault.family, only=side)
    assert all(verdict.ok for verdict in clean), "without the fault it passes"
    fault.plant(monkeypatch, side)
    found = bench.judge(block, FP32, fault.family, only=side, fresh=fault.fresh)
    factors = [verdict.worst for verdict in found]
    print(f"{fault.name:<42} {side.name:<6} error / allowed: " + ", ".join(f"{factor:.3g}" for factor in factors))
    assert not all(verdict.ok for verdict in found)


def test_most_faults_hide_in_bfloat16(bench: Bench, monkeypatch) -> None:
    """Why float32 is the test of correctness: a wrong epsilon or GELU is below one rounding of bfloat16."""
    for plant in (layer_norm_eps, gelu_erf, attention_scale):
        with monkeypatch.context() as patch:
            plant(patch, TORCH())
            found = bench.judge(BY_NAME["dit.block"], BF16, only=TORCH())
            print(plant.__name__, [f"{verdict.worst:.2f}" for verdict in found])
            assert all(verdict.ok for verdict in found)
