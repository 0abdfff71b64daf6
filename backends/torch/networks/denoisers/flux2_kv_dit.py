"""FLUX.2 klein KV's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.flux2_kv_dit`.

B batch, L image tokens, R tokens of references, S text tokens, H heads, D head dim, C = H * D. Attribute paths are
checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers import flux2_dit
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import JointAttention, Pair, Rope, kept
from qwenimg.backends.torch.networks.loaded import LoadedNetwork
from qwenimg.common.networks.denoisers import flux2_conditioning
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.runtime.engine import NumpyArray

# Layers


class Attention(JointAttention):
    def references(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Pair]:
        """Attend over references alone, [B R C] -> [B R C]. Return their keys and values too."""
        v = self.attend.values(self.heads(self.to_v(x)))
        q = ops.rotate_pairs(self.norm_q(self.heads(self.to_q(x))), rope, v.dtype)
        k = ops.rotate_pairs(self.norm_k(self.heads(self.to_k(x))), rope, v.dtype)
        return self.to_out[0](self.attend(q, k, v)), kept(self.attend, k, v)


class DoubleBlock(flux2_dit.DoubleBlock):
    attn: Attention

    def __init__(self, config: Flux2Config):
        super().__init__(config)
        self.attn = Attention(config.dim, config.attention_head_dim, config.eps, bias=False)

    def forward(  # type: ignore[override]
        self, img: Tensor, txt: Tensor, ref: Tensor | None, mods: Pair, rope: Rope, own: Pair, known: Pair | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Pair | None]:
        """Run the block on img [B L C] and txt [B S C] with mods ([1 6C], [1 6C]), and on references ref [B R C], with
        their `own` modulation [1 6C] and table, unless their keys and values are `known`. Return these too."""
        if ref is not None and known is None:
            ref, known = self.run_references(ref, *own)
        img, txt = self.streams(img, txt, mods, rope, (self.ff, self.ff_context), known=known)
        return img, ops.clipped(txt), ref, known

    def run_references(self, ref: Tensor, mod: Tensor, rope: Tensor) -> tuple[Tensor, Pair]:
        """Run the block on references [B R C]. Return them, and their keys and values."""
        shift1, scale1, gate1, shift2, scale2, gate2 = ops.chunks(mod, 6, None)
        dtype, eps = self.attn.to_q.dtype, self.eps
        update, known = self.attn.references(ops.norm_modulate(ref, shift1, scale1, dtype, eps), rope)
        ref = ops.gated(ref, gate1, update)
        return ops.gated(ref, gate2, self.ff(ops.norm_modulate(ref, shift2, scale2, dtype, eps))), known


class SingleBlock(flux2_dit.SingleBlock):
    def forward(  # type: ignore[override]
        self, img: Tensor, txt: Tensor, ref: Tensor | None, mod: Tensor, rope: Tensor, own: Pair, known: Pair | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Pair | None]:
        """Run the block like a `DoubleBlock`, with mod [1 3C]. `rope` has the text first."""
        if ref is not None and known is None:
            ref, known = self.run_references(ref, *own)
        img, txt = self.streams(img, txt, mod, rope, known)
        return img, txt, ref, known

    def run_references(self, ref: Tensor, mod: Tensor, rope: Tensor) -> tuple[Tensor, Pair]:
        """Run the block on references [B R C]. Return them, and their keys and values."""
        shift, scale, gate = ops.chunks(mod, 3, None)
        y = self.attn.to_qkv_mlp_proj(ops.norm_modulate(ref, shift, scale, self.attn.to_qkv_mlp_proj.dtype, self.eps))
        q, k, v = self.attn.projected(y, rope)
        update = self.attn.out(self.attn.attend(q, k, v), y)
        return ops.clipped(ops.gated(ref, gate, update)), kept(self.attn.attend, k, v)


# Model


class Flux2KVTransformer(flux2_dit.Flux2Transformer):
    double_block, single_block = DoubleBlock, SingleBlock

    def still(self, features: Tensor) -> Pair:
        """Return the modulation of references in blocks of two streams [1 6C] and of one [1 3C], for the sinusoid of
        their time [1 channels]."""
        temb = self.time_guidance_embed(features)
        return self.double_stream_modulation_img(temb), self.single_stream_modulation(temb)

    def forward(  # type: ignore[override]
        self,
        latents: Tensor,
        features: Tensor,
        txt: Tensor,
        references: tuple[Tensor | None, Pair],
        ropes: tuple[Tensor, Tensor, Tensor],
        known: Sequence[Pair],
        keeps: bool,
    ) -> tuple[Tensor, list[Pair]]:
        """Predict the velocity [1 L out] for packed latents [1 L in] and sinusoids [1, channels].

        txt [1 S C]: the start of the text stream; references: their embedded tokens [1 R C] and modulation; ropes:
        tables of the image, the text and the references; known: the references' keys and values by block, if an earlier
        call returned them. A call that `keeps` them returns them with the velocity."""
        temb = self.time_guidance_embed(features)
        mods = self.double_stream_modulation_img(temb), self.double_stream_modulation_txt(temb)
        mod, final = self.single_stream_modulation(temb), self.norm_out.modulation(temb)
        (ref, (own_double, own_single)), (rope, txt_rope, ref_rope) = references, ropes

        img, pairs = ops.stream(self.x_embedder(latents), self.stream), []
        before = iter(known) if known else repeat(None)
        own = own_double, ref_rope
        for block in self.transformer_blocks:
            img, txt, ref, pair = block(img, txt, ref, mods, (rope, txt_rope), own, next(before))
            pairs += [ops.eval(pair)] if keeps else []
            ops.async_eval(img)
        joint, own = torch.cat((txt_rope, rope), dim=0), (own_single, ref_rope)
        for block in self.single_transformer_blocks:
            img, txt, ref, pair = block(img, txt, ref, mod, joint, own, next(before))
            pairs += [ops.eval(pair)] if keeps else []
            ops.async_eval(img)
        return self.proj_out(self.norm_out(img, final, self.proj_out.dtype)), pairs


# Runner


@dataclass(frozen=True)
class Condition:
    txt: Tensor
    references: tuple[Tensor | None, Pair]  # embedded tokens, and their modulation
    ropes: tuple[Tensor, Tensor, Tensor]
    keeps: bool
    known: list[Pair] = field(default_factory=list)  # keys and values of references, kept by the first prediction


class Runner(LoadedNetwork[Flux2Config, Flux2KVTransformer]):
    network, role = Flux2KVTransformer, "transformer"

    @ops.computes
    def condition(
        self, text: Tensor, images: tuple[Sequence[flux2_conditioning.Grid], Sequence[Tensor]], keeps: bool = True
    ) -> Condition:
        """Prepare text states [1 S joint]. `images`: rows and columns in tokens of the image and of each reference, and
        the packed latents [1 L C] of the references. keeps: whether keys and values of references are kept between
        predictions, or made again for each."""
        grids, references = images
        tables = flux2_conditioning.image_and_text_rope(self.config, grids, text.shape[1])
        img, txt = map(self.rope, tables)
        rows, columns = grids[0]
        tokens = self.model.x_embedder(torch.cat(list(references), dim=1)) if references else None
        still = flux2_conditioning.time_rows(self.config, 0.0, "float32")
        mods = self.model.still(self.table(still))
        return Condition(
            txt=self.model.context(text),
            references=(None if tokens is None else ops.stream(tokens, self.model.stream), mods),
            ropes=(img[: rows * columns], txt, img[rows * columns :]),
            keeps=keeps and tokens is not None,
        )

    @ops.computes
    def predict(self, x: Tensor, step: NumpyArray, condition: Condition) -> Tensor:
        """Predict the velocity [1 L C] in float32 for packed latents x [1 L C] and sinusoids of the step
        (`flux2_conditioning.time_rows`)."""
        features, one = self.table(step), condition
        keeps = one.keeps and not one.known
        velocity, pairs = self.model(x, features, one.txt, one.references, one.ropes, one.known, keeps)
        one.known.extend(pairs)
        return ops.at_least_float32(velocity)
