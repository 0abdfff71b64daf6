"""The tokens of an image, which ranks may share: each has a part of them, and all of the text's.

The layers of a block compute tokens one by one, and so a rank's own. An attention needs all: queries, keys and values
are exchanged so that each rank has all tokens of its heads, and the results back (S. A. Jacobs et al., "DeepSpeed
Ulysses", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from qwenimg.backends.torch.ops.attention import Attend, attention


class TokenExchange(Protocol):
    """The ranks that share tokens, seen from one of them."""

    rank: int
    size: int

    def swap(self, parts: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send part i to rank i. Return the part that each rank sends to this one, of these shapes."""
        ...


class HasTokenRanks(Protocol):
    """All ranks of a run."""

    def compiled(self) -> None:
        """Note that blocks of a network are compiled."""
        ...

    @property
    def tokens(self) -> TokenExchange | None:
        """The ranks that share tokens in the present run; None if each rank has all tokens."""
        ...


class Tokens(torch.nn.Module):
    """The division of an image's tokens among ranks. Between calls of `part` and `whole` this rank has its own
    tokens; without other ranks, all. Holds no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.group: HasTokenRanks | None = None
        self.counts: list[int] = []  # tokens of each rank, between `part` and `whole`

    @property
    def ranks(self) -> TokenExchange | None:
        return None if self.group is None else self.group.tokens

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of x [B L C]."""
        if (ranks := self.ranks) is None:
            return x
        self.counts = divided(x.shape[1], ranks.size)
        return _own(x, 1, ranks)

    def rows(self, table: Tensor) -> Tensor:
        """Return the rows of a table [L ...] for this rank's tokens."""
        return table if (ranks := self.ranks) is None else _own(table, 0, ranks)

    def once(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of x [B L' C] that no earlier rank has: without the text, of which every rank has
        all."""
        ranks = self.ranks
        return x if ranks is None or ranks.rank == 0 else x[:, : self.counts[ranks.rank]]

    def gathered(self, x: Tensor) -> Tensor:
        """Return the tokens [B L C] of all ranks, for this one's."""
        if (ranks := self.ranks) is None:
            return x
        counts, self.counts = self.counts, []
        shapes = [(x.shape[0], count, x.shape[2]) for count in counts]
        return torch.cat(ranks.swap([x] * len(counts), shapes), dim=1)


def divided(tokens: int, ranks: int) -> list[int]:
    """Return the number of tokens of each rank; the first ranks have one more if `tokens` do not divide evenly."""
    least, more = divmod(tokens, ranks)
    return [least + (rank < more) for rank in range(ranks)]


def _own(x: Tensor, axis: int, ranks: TokenExchange) -> Tensor:
    counts = divided(x.shape[axis], ranks.size)
    return x.narrow(axis, sum(counts[: ranks.rank]), counts[ranks.rank])


def share_tokens(model: torch.nn.Module, group: HasTokenRanks) -> None:
    """Share a denoiser's tokens among the ranks of `group`. Other networks have no tokens to share."""
    for tokens in [module for module in model.modules() if isinstance(module, Tokens)]:
        tokens.group = group
        for module in model.modules():
            if isinstance(module, Attend):
                module.shared = partial(_attention, tokens)


def _attention(tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, text_last: bool) -> Tensor:
    """Return `attention` over this rank's tokens of the image and the text, q [B S+L' H D] and k, v [B S+L' Hk D] ->
    [B S+L' H*D]: this rank computes it for all tokens of its heads."""
    ranks, counts = tokens.ranks, tokens.counts
    if ranks is None or not counts:  # text alone
        return attention(q, k, v, mask)
    B, _, H, D = q.shape
    if k.shape[2] < H:  # heads of keys that queries share: each query's rank has its own copy
        k, v = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (k, v))
    mine, heads = counts[ranks.rank], H // ranks.size
    all_heads = torch.stack([x.to(v.dtype) for x in (q, k, v)])
    txt, img = _apart(all_heads, mine, text_last)
    # From rank i come its tokens of this rank's heads
    parts = ranks.swap(list(img.split(heads, dim=3)), [(3, B, count, heads, D) for count in counts])
    text = txt.narrow(3, ranks.rank * heads, heads)
    q, k, v = torch.cat([*parts, text] if text_last else [text, *parts], dim=2)
    out = attention(q, k, v, mask)
    txt, img = _apart(out[None], sum(counts), text_last)
    # To rank i go its tokens, of this rank's heads, with all of the text's
    S = txt.shape[2]
    sent = [torch.cat((txt, part), dim=2) for part in img.split(counts, dim=2)]
    back = torch.cat(ranks.swap(sent, [(1, B, S + mine, heads * D)] * ranks.size), dim=3)[0]
    return torch.cat((back[:, S:], back[:, :S]), dim=1) if text_last else back


def _apart(x: Tensor, image: int, text_last: bool) -> tuple[Tensor, Tensor]:
    """Split [N B S+L ...] into text and `image` tokens."""
    text = x.shape[2] - image
    if text_last:
        img, txt = x.split((image, text), dim=2)
        return txt, img
    txt, img = x.split((text, image), dim=2)
    return txt, img
