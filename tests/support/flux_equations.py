"""The transformer of Flux.1's blocks written out in float64, from nothing but the tensors of diffusers' class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Vectors = Sequence[torch.Tensor]
"""Vectors of modulation [C]."""


@dataclass(frozen=True)
class Modulation:
    double: Sequence[tuple[Vectors, Vectors]]  # by block: of the image and of the text, shift, scale, gate, twice
    single: Sequence[Vectors]  # shift, scale, gate
    head: Vectors  # shift, scale


def unit(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x by its root mean square."""
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)


def normed(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return unit(x - x.mean(-1, keepdim=True)) * (1 + scale) + shift


class Equations:
    """The forward of a model with such blocks."""

    def __init__(self, model: Any):
        self.tensors = {name: value.double() for name, value in model.state_dict().items()}
        self.config = model.config

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def heads(self, name: str, norm: str, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(name, x).unflatten(-1, (-1, self.config.attention_head_dim))
        return unit(x) * self.tensors[f"{norm}.weight"] if norm else x

    def rotated(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        parts = [
            places[:, axis, None] * 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
            for axis, width in enumerate(self.config.axes_dims_rope)
        ]
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.exp(1j * torch.cat(parts, -1))[:, None]
        return torch.view_as_real(turned).flatten(-2)

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        q, k = self.rotated(q, places), self.rotated(k, places)
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.config.attention_head_dim**0.5
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")

    def fed(self, name: str, x: torch.Tensor, vectors: Vectors) -> torch.Tensor:
        shift, scale, gate = vectors
        inner = self.activated(self.linear(f"{name}.net.0.proj", normed(x, shift, scale)))
        return x + gate * self.linear(f"{name}.net.2", inner)

    def __call__(self, img: torch.Tensor, txt: torch.Tensor, rows: Modulation, places: torch.Tensor) -> torch.Tensor:
        """Predict for tokens img [L in] and text states [S C], the text's places first."""
        img, txt, count = self.linear("x_embedder", img), self.linear("context_embedder", txt), txt.shape[0]
        for i, (of_img, of_txt) in enumerate(rows.double):
            at = f"transformer_blocks.{i}."
            a, b = normed(txt, *of_txt[:2]), normed(img, *of_img[:2])
            q, k, v = (
                torch.cat([self.heads(f"{at}attn.add_{x}_proj", f"{at}attn.norm_added_{x}" if x != "v" else "", a),
                           self.heads(f"{at}attn.to_{x}", f"{at}attn.norm_{x}" if x != "v" else "", b)])
                for x in "qkv"
            )  # fmt: skip
            out = self.attended(q, k, v, places)
            img = img + of_img[2] * self.linear(f"{at}attn.to_out.0", out[count:])
            txt = txt + of_txt[2] * self.linear(f"{at}attn.to_add_out", out[:count])
            img, txt = self.fed(f"{at}ff", img, of_img[3:]), self.fed(f"{at}ff_context", txt, of_txt[3:])
        both = torch.cat([txt, img])
        for i, (shift, scale, gate) in enumerate(rows.single):
            at, x = f"single_transformer_blocks.{i}.", normed(both, shift, scale)
            q, k = (self.heads(f"{at}attn.to_{name}", f"{at}attn.norm_{name}", x) for name in "qk")
            out = self.attended(q, k, self.heads(f"{at}attn.to_v", "", x), places)
            inner = self.activated(self.linear(f"{at}proj_mlp", x))
            both = both + gate * self.linear(f"{at}proj_out", torch.cat([out, inner], -1))
        return self.linear("proj_out", normed(both[count:], *rows.head))
