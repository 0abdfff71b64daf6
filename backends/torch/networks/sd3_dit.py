"""Stable Diffusion 3's transformer. What is unusual about it: `qwenimg.common.networks.sd3_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D. Attribute paths are keys of the manifest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.networks.diffusion_transformer import FeedForward, FinalNorm, TimestepEmbedding
from qwenimg.backends.torch.ops import images
from qwenimg.common.networks import sd3_conditioning
from qwenimg.common.networks.sd3_dit import MLP_RATIO, NORM_EPS, PATCH, TABLE, TIME_CHANNELS, SD3Config, chunks
from qwenimg.common.precision.precision import Precision
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.runtime.engine import NumpyArray
from qwenimg.common.weights.plan import LoadPlan

Pair = tuple[Tensor, Tensor]

# Layers


class PatchEmbed(torch.nn.Module):
    def __init__(self, config: SD3Config):
        super().__init__()
        self.proj = ops.Conv2d(config.in_channels, config.dim, PATCH, PATCH)
        self.pos_embed = ops.Embedding(config.pos_embed_max_size**2, config.dim)

    def forward(self, x: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B L C] of an image [B in h w], with their positions [1 L C] added, in `dtype`."""
        return ops.add(ops.stream(images.tokens(self.proj(x)), dtype), positions)


class TimeTextEmbed(torch.nn.Module):
    def __init__(self, config: SD3Config):
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(TIME_CHANNELS, config.dim)
        self.text_embedder = TimestepEmbedding(config.pooled_projection_dim, config.dim)


class ModulationRows(torch.nn.Module):
    """Shifts, scales and gates of one stream."""

    def __init__(self, dim: int, count: int):
        super().__init__()
        self.count = count
        self.linear = ops.Linear(dim, count * dim)

    def forward(self, temb: Tensor) -> tuple[Tensor, ...]:
        """Return `count` vectors [B 1 C] for [B C]."""
        return ops.chunks(self.linear(temb), self.count, None)


def head_norm(config: SD3Config) -> torch.nn.Module:
    """Return the norm of queries and keys: SD 3 has none."""
    return ops.RMSNorm(config.attention_head_dim, NORM_EPS) if config.qk_norm else torch.nn.Identity()


class SelfAttention(torch.nn.Module):
    """Attention over image tokens alone."""

    def __init__(self, config: SD3Config):
        super().__init__()
        dim, self.head_dim = config.dim, config.attention_head_dim
        self.to_q = ops.Linear(dim, dim)
        self.to_k = ops.Linear(dim, dim)
        self.to_v = ops.Linear(dim, dim)
        self.to_out = torch.nn.ModuleList([ops.Linear(dim, dim)])
        self.norm_q = head_norm(config)
        self.norm_k = head_norm(config)
        self.attend = ops.Attend()

    def heads(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L H D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B L C] -> [B L C]."""
        v = self.attend.values(self.heads(self.to_v(x)))
        q, k = self.norm_q(self.heads(self.to_q(x))), self.norm_k(self.heads(self.to_k(x)))
        return self.to_out[0](self.attend.result(ops.attention(q, k, v)))


class JointAttention(SelfAttention):
    def __init__(self, config: SD3Config, last: bool):
        super().__init__(config)
        dim = config.dim
        self.add_q_proj = ops.Linear(dim, dim)
        self.add_k_proj = ops.Linear(dim, dim)
        self.add_v_proj = ops.Linear(dim, dim)
        self.norm_added_q = head_norm(config)
        self.norm_added_k = head_norm(config)
        self.to_add_out = torch.nn.Identity() if last else ops.Linear(dim, dim)

    def both(self, img: Tensor, txt: Tensor) -> Pair:
        """Attend over both streams, img [B L C] and txt [B S C], and keep their shapes. The image comes first in the
        joint sequence."""
        v = self.attend.values(self.heads(ops.joined_linears(self.to_v, img, self.add_v_proj, txt)))
        img_q, txt_q = self.norm_q(self.heads(self.to_q(img))), self.norm_added_q(self.heads(self.add_q_proj(txt)))
        img_k, txt_k = self.norm_k(self.heads(self.to_k(img))), self.norm_added_k(self.heads(self.add_k_proj(txt)))

        q, k = ops.joined(img_q, txt_q, v.dtype), ops.joined(img_k, txt_k, v.dtype)
        out = self.attend.result(ops.attention(q, k, v))

        L = img.shape[1]
        return self.to_out[0](out[:, :L]), self.to_add_out(out[:, L:])


class TransformerBlock(torch.nn.Module):
    def __init__(self, config: SD3Config, layer: int):
        super().__init__()
        dim, (image, text) = config.dim, chunks(config, layer)
        self.is_dual, self.is_last = layer in config.dual_attention_layers, layer == config.num_layers - 1
        self.norm1 = ModulationRows(dim, image)
        self.norm1_context = ModulationRows(dim, text)
        self.attn = JointAttention(config, self.is_last)
        if self.is_dual:
            self.attn2 = SelfAttention(config)
        self.ff = FeedForward(dim, MLP_RATIO * dim)
        if not self.is_last:
            self.ff_context = FeedForward(dim, MLP_RATIO * dim)

    def forward(self, img: Tensor, txt: Tensor, temb: Tensor) -> Pair:
        """Run the block on img [B L C] and txt [B S C] with SiLU of the embedding of time and text [B C]."""
        shift1, scale1, gate1, shift2, scale2, gate2, *second = self.norm1(temb)
        rows = self.norm1_context(temb)
        txt_shift1, txt_scale1 = (rows[1], rows[0]) if self.is_last else rows[:2]
        dtype = self.attn.to_q.dtype

        x = img
        img_out, txt_out = self.attn.both(
            ops.norm_modulate(x, shift1, scale1, dtype, NORM_EPS),
            ops.norm_modulate(txt, txt_shift1, txt_scale1, dtype, NORM_EPS),
        )
        img = ops.gated(img, gate1, img_out)
        if self.is_dual:
            shift3, scale3, gate3 = second
            img = ops.gated(img, gate3, self.attn2(ops.norm_modulate(x, shift3, scale3, dtype, NORM_EPS)))
        img = ops.gated(img, gate2, self.ff(ops.norm_modulate(img, shift2, scale2, dtype, NORM_EPS)))

        if not self.is_last:
            txt_gate1, txt_shift2, txt_scale2, txt_gate2 = rows[2:]
            txt = ops.gated(txt, txt_gate1, txt_out)
            y = self.ff_context(ops.norm_modulate(txt, txt_shift2, txt_scale2, dtype, NORM_EPS))
            txt = ops.gated(txt, txt_gate2, y)
        return img, txt


# Model


class SD3Transformer(torch.nn.Module):
    def __init__(self, config: SD3Config, stream: torch.dtype):
        super().__init__()
        self.stream = stream
        self.pos_embed = PatchEmbed(config)
        self.time_text_embed = TimeTextEmbed(config)
        self.context_embedder = ops.Linear(config.joint_attention_dim, config.dim)
        layers = range(config.num_layers)
        self.transformer_blocks = torch.nn.ModuleList([TransformerBlock(config, layer) for layer in layers])
        self.norm_out = FinalNorm(config.dim, NORM_EPS)
        self.proj_out = ops.Linear(config.dim, config.out_features)

    def context(self, text: Tensor) -> Tensor:
        """Return the start of the text stream [B S C] for text states [B S 4096]; the same in every step."""
        return ops.stream(self.context_embedder(text), self.stream)

    def forward(
        self,
        latents: Tensor,
        features: Tensor,
        txt: Tensor,
        pooled: Tensor,
        positions: Tensor,
        skipped: tuple[int, ...] = (),
    ) -> Tensor:
        """Predict the velocity [B out h w] for latents [B in h w] and the sinusoid [1 256] of the time.

        txt [B S C]: the text stream; pooled [B C]: the embedding of the pooled text; positions [1 L C]; skipped: the
        numbers of blocks that are left out.
        """
        temb = ops.silu(ops.add(self.time_text_embed.timestep_embedder(features), pooled))
        img = self.pos_embed(latents, positions, self.stream)
        for layer, block in enumerate(self.transformer_blocks):
            if layer not in skipped:
                img, txt = block(img, txt, temb)
                ops.async_eval(img)
        tokens = self.proj_out(self.norm_out(img, self.norm_out.linear(temb), self.proj_out.dtype))
        return images.joined_patches(tokens, latents, PATCH)


# Component


@dataclass(frozen=True)
class Condition:
    txt: Tensor
    pooled: Tensor
    positions: Tensor
    skipped: tuple[int, ...]  # blocks that are left out


class Component:
    def __init__(self, config: SD3Config, plan: LoadPlan, precision: Precision, device: torch.device):
        self.config = config
        self.device = device
        self.has_table = TABLE in plan.entries
        stream = ops.DTYPES[precision.residual_dtype("transformer")]
        self.table_dtype = ops.DTYPES[precision.compute_dtype("transformer")]
        self.model = load.empty(lambda: SD3Transformer(config, stream), precision, "transformer")
        load.fill(self.model, plan.when(ALWAYS), device)

    @ops.computes
    def condition(
        self, texts: tuple[NumpyArray, NumpyArray], grid: tuple[int, int], skip_layers: tuple[int, ...] = ()
    ) -> Condition:
        """Prepare text states [1 S 4096] and the pooled text [1 2048] for an image of `grid` rows and columns of
        tokens. `skip_layers`: the numbers of blocks that are left out."""
        text, pooled = (ops.table(values, self.table_dtype, self.device) for values in texts)
        return Condition(
            txt=ops.eval(self.model.context(text)),
            pooled=ops.eval(self.model.time_text_embed.text_embedder(pooled)),
            positions=self._positions(grid),
            skipped=skip_layers,
        )

    @ops.computes
    def predict(self, x: Tensor, step: NumpyArray, condition: Condition) -> Tensor:
        """Predict the velocity [1 C h w] in float32 for x [1 C h w], both in the order of the pipeline, and sinusoids
        of the time."""
        features = ops.table(step, self.table_dtype, self.device)
        velocity = self.model(
            images.from_bchw(x), features, condition.txt, condition.pooled, condition.positions, condition.skipped
        )
        return images.to_bchw(ops.at_least_float32(velocity))

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """Return the positions [1 L C] of an image: those of the file's table, or by its formula."""
        ids = sd3_conditioning.window(self.config, *grid)
        if self.has_table:
            return ops.eval(self.model.pos_embed.pos_embed(ops.placed(ids, self.device)))
        return ops.table(sd3_conditioning.positions(self.config, ids), self.table_dtype, self.device)
