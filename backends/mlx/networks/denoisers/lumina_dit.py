# Translated from the file of this name in backends/torch by `make twins`: edit that one.
"""Lumina-Image 2.0's transformer. What is unusual about it: `qwenimg.common.networks.denoisers.lumina_dit`.

B batch, L image tokens, S text tokens, H heads, D head dim, C = H * D, T time channels. Attribute paths are keys of the
manifest.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.backends.mlx import ops
from qwenimg.backends.mlx.networks.denoisers.diffusion_transformer import TimestepEmbedding
from qwenimg.backends.mlx.networks.denoisers.zimage_dit import ContextBlock, FinalLayer, TransformerBlock
from qwenimg.backends.mlx.networks.loaded import ImageDenoiser
from qwenimg.backends.mlx.ops import images
from qwenimg.common.networks.denoisers import lumina_conditioning
from qwenimg.common.networks.denoisers.lumina_dit import LuminaConfig
from qwenimg.common.networks.denoisers.zimage_dit import PATCH, TIME_CHANNELS

# Model


class LuminaTransformer(mlx.nn.Module):
    def __init__(self, config: LuminaConfig, stream: mx.Dtype):
        super().__init__()
        self.stream = stream
        self.t_embedder = TimestepEmbedding(TIME_CHANNELS, config.time_dim)
        self.x_embedder = ops.Linear(config.features, config.dim)
        text_norm, text_in = (
            ops.RMSNorm(config.cap_feat_dim, config.norm_eps),
            ops.Linear(config.cap_feat_dim, config.dim),
        )
        self.cap_embedder = [text_norm, text_in]
        self.noise_refiner = [TransformerBlock(config) for _ in range(config.n_refiner_layers)]
        self.context_refiner = [ContextBlock(config) for _ in range(config.n_refiner_layers)]
        self.layers = [TransformerBlock(config) for _ in range(config.n_layers)]
        self.final_layer = FinalLayer(config, config.features)

    def context(self, text: Array, rope: Array) -> Array:
        """Return the refined text [1 S C] for text states [1 S 2304]; the same in every step."""
        x = ops.stream(self.cap_embedder[1](self.cap_embedder[0](text)), self.stream)
        for block in self.context_refiner:
            x = block(x, rope)
        return x

    def patches(self, latents: Array) -> Array:
        """Return the patches [1 L out] of latents [1 C h w], in the order (dy, dx, c)."""
        x = images.tokens(images.patches(latents, PATCH))
        return x.reshape(1, x.shape[1], -1, PATCH**2).swapaxes(2, 3).reshape(x.shape)

    def __call__(self, latents: Array, features: Array, txt: Array, img_rope: Array, rope: Array) -> Array:
        """Predict the negative velocity [1 C h w] for latents [1 C h w] and the sinusoid [1 256] of the time.

        txt [1 S C]: the refined text; img_rope [L 1 D/2 2], rope [L+S 1 D/2 2]. Text comes last, which changes nothing
        but the order of sums.
        """
        temb = self.t_embedder(features)
        mod = ops.silu(temb)
        img = ops.stream(self.x_embedder(self.patches(latents)), self.stream)
        for block in self.noise_refiner:
            img = block(img, mod, img_rope)
        x = ops.joined(img, txt, self.stream)
        for block in self.layers:
            x = ops.async_eval(block(x, mod, rope))
        return images.joined_patches(self.final_layer(x[:, : img.shape[1]], temb), latents, PATCH)


# Runner


class Runner(ImageDenoiser[LuminaConfig, LuminaTransformer]):
    network, role = LuminaTransformer, "transformer"

    @ops.computes
    def condition(self, text: Array, grid: tuple[int, int]) -> tuple[Array, Array, Array]:
        """Prepare text states [1 S 2304] for an image of `grid` rows and columns of tokens."""
        tables = lumina_conditioning.image_and_text_rope(self.config, *grid, text.shape[1])
        img, txt = map(self.rope, tables)
        return ops.eval(self.model.context(text, txt)), img, mx.concatenate((img, txt), axis=0)
