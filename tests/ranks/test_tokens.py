"""Attention whose tokens ranks share, against attention on one: the same bits; and faults, each of which is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.relative import relative
from support.thread_ranks import ThreadGroup, together

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.ops import tokens as module
from qwenimg.common.runtime.group import Sharing

# q, k and v of a rank are parts of the same numbers, and an attention of a head reads all of them: nothing is rounded
# in another way. Torch's kernel may take heads in groups, so bits are not promised: float32, three times what was seen.
APART = 1e-6


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shared(
    ranks: int, L: int, S: int, H: int = 6, D: int = 10, *, text_last: bool, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The attention of the last rank's text and of all image tokens on one rank, and on each of several."""
    img = [numbers(i, 1, L, H, D).to(dtype) for i in range(3)]
    txt = [numbers(9 + i, 1, S, H, D).to(dtype) for i in range(3)]

    def joined(image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return torch.cat((image, text) if text_last else (text, image), dim=1)

    expected = ops.attention(*map(joined, img, txt))

    def work(group: ThreadGroup) -> torch.Tensor:
        group.share(Sharing(tokens=ranks))
        network = torch.nn.Module()
        network.tokens, network.attend, x = ops.Tokens(), ops.Attend(), numbers(5, 1, L, 4)
        ops.share_tokens(network, group)
        assert torch.equal(network.attend(*txt), ops.attention(*txt)), "text alone is not shared"
        mine = network.tokens.part(x)
        assert torch.equal(network.tokens.rows(x[0]), mine[0])
        parts = [network.tokens.rows(one[0])[None] for one in img]
        out = network.attend(*map(joined, parts, txt), text_last=text_last)
        image, text = (out[:, : mine.shape[1]], out[:, mine.shape[1] :]) if text_last else (out[:, S:], out[:, :S])
        whole = network.tokens.gathered(image)
        assert network.tokens.counts == []
        return joined(whole, text)

    return expected, together(ranks, work)


@pytest.mark.parametrize("text_last", [False, True])
@pytest.mark.parametrize(("ranks", "L", "S"), [(2, 8, 3), (2, 7, 3), (3, 7, 0), (6, 11, 5), (3, 3, 1)])
def test_the_same_as_on_one(ranks: int, L: int, S: int, text_last: bool) -> None:
    expected, found = shared(ranks, L, S, text_last=text_last)
    worst = max(float((one - expected).abs().max()) for one in found)
    print(f"{ranks} ranks, {L} and {S} tokens: {worst:.1e} apart")
    assert all(one.shape == expected.shape and one.dtype == expected.dtype for one in found)
    assert worst <= APART


def test_in_16_bit_and_in_64() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        expected, found = shared(2, 9, 4, text_last=False, dtype=dtype)
        assert all(one.dtype == dtype and torch.equal(one, expected) for one in found)


def test_tokens_are_divided_evenly() -> None:
    for tokens in range(1, 30):
        for ranks in range(1, 8):
            counts = module.divided(tokens, ranks)
            assert sum(counts) == tokens and max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


def reversed_own(x: torch.Tensor, axis: int, ranks: Any) -> torch.Tensor:
    """The part of another rank."""
    counts = module.divided(x.shape[axis], ranks.size)
    rank = ranks.size - 1 - ranks.rank
    return x.narrow(axis, sum(counts[:rank]), counts[rank])


def other_side(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Text taken from the other end."""
    return lambda x, image, text_last: plain(x, image, not text_last)


@pytest.mark.parametrize("fault", ["parts", "side", "heads"])
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "parts":
        monkeypatch.setattr(module, "_own", reversed_own)
    elif fault == "side":
        monkeypatch.setattr(module, "_apart", other_side(module._apart))
    else:
        swap = ThreadGroup.swap
        monkeypatch.setattr(ThreadGroup, "swap", lambda group, parts, shapes: swap(group, parts, shapes)[::-1])
    expected, found = shared(2, 8, 3, text_last=False)
    error = max(relative(one.numpy(), expected.numpy()) for one in found)
    print(f"{fault}: {error:.1e}")
    assert error > 100 * APART


def test_what_is_sent() -> None:
    """Of 2 ranks each sends half of its queries, keys and values and of its results, with the text's: four quarters of
    a token's width for each token of the image."""
    L, S, H, D, sent = 64, 4, 6, 10, []

    def work(group: ThreadGroup) -> None:
        group.share(Sharing(tokens=2))
        tokens, attend = ops.Tokens(), ops.Attend()
        network = torch.nn.Module()
        network.tokens, network.attend = tokens, attend
        ops.share_tokens(network, group)
        tokens.part(numbers(1, 1, L, 4))
        attend(*(numbers(i, 1, S + L // 2, H, D) for i in range(3)))
        sent.append(group.sent)

    together(2, work)
    width = H * D * 4
    assert sent == [4 * (L // 2) * width // 2 + S * width // 2] * 2
