"""The second stage: text encoder and transformer together, by rectified flow.

The model learns the velocity noise - image at x = (1 - sigma) image + sigma noise (X. Liu et al., "Flow Straight and
Fast", 2022). Sigma is logit-normal and shifted towards noise by the scheduler's own rule for the picture's size
(P. Esser et al., "Scaling Rectified Flow Transformers", 2024). The published text encoder is frozen; this one is
small, so it learns along.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from qwenimg.backends.torch import nn, train_folder
from qwenimg.backends.torch.qwen_dit import Pair, QwenImageTransformer, TransformerBlock
from qwenimg.backends.torch.qwen_vl import QwenTextEncoder
from qwenimg.backends.torch.train_data import Batch, LatentBatches
from qwenimg.backends.torch.train_vae import Encoder, fresh, initialise
from qwenimg.common import bpe, conditioning, geometry, tokenizers
from qwenimg.common.config_file import parse
from qwenimg.common.errors import ModelError, clean
from qwenimg.common.folder_files import SHAPES_SCHEDULER
from qwenimg.common.model import open_model
from qwenimg.common.models.qwen_dit import TIME_CHANNELS, QwenDiTConfig
from qwenimg.common.models.qwen_vl import QwenVLConfig
from qwenimg.common.samplers import FlowMatchConfig
from qwenimg.common.training import TrainConfig

EMBEDDING = 0.5  # deviation of the token embeddings at the start


class TextToImage(torch.nn.Module):
    """Both networks, so that one optimiser trains them."""

    def __init__(self, text: QwenVLConfig, dit: QwenDiTConfig):
        super().__init__()
        self.text_encoder = QwenTextEncoder(text, torch.float32)
        self.transformer = QwenImageTransformer(dit, torch.float32)
        initialise(self)
        torch.nn.init.normal_(self.text_encoder.embed_tokens.weight, std=EMBEDDING)
        # Each block starts as the identity and the prediction as zero (W. Peebles and S. Xie, "DiT", 2022).
        still: list[Any] = [self.transformer.norm_out.linear, self.transformer.proj_out]
        for block in self._blocks():
            still += [block.img_mod[1], block.txt_mod[1]]
        for layer in still:
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)

    def _blocks(self) -> list[TransformerBlock]:
        return cast(list[TransformerBlock], list(self.transformer.transformer_blocks))

    def modulation(self, features: Tensor) -> tuple[list[Pair], Tensor]:
        """Time features [B 256] -> every block's rows, and the final norm's [B 2C]."""
        dit = self.transformer
        temb = dit.time_text_embed(features, torch.zeros(1))  # no additional condition
        return [block.modulation(temb) for block in self._blocks()], dit.norm_out.modulation(temb)


@dataclass(frozen=True)
class Inputs:
    """A step's arrays on the device: packed latents and velocity [B L 4z], time features [B 256], ids [B S].

    The prompts grow from the first to the last, so that a part of the batch is padded to its own longest only."""

    noisy: Tensor
    velocity: Tensor
    features: Tensor
    ids: Tensor
    lengths: list[int]  # ids of each prompt
    shape: tuple[int, int, int]  # frames, rows, columns in tokens


class DiTStage:
    """What the loop of `train` needs of a stage: parameters, batches, a loss, and the folder to write."""

    def __init__(self, config: TrainConfig, device: torch.device, tell: Callable[[str], None]):
        self.config, self.device = config, device
        self.encoder = Encoder(_vae_folder(config), device)
        self.vocabulary = train_folder.vocabulary()
        self.text = train_folder.text_config(config.size, self.vocabulary.size)
        self.dit = train_folder.dit_config(config.size, self.encoder.config)
        torch.manual_seed(config.seed)
        self.model = TextToImage(self.text, self.dit)
        self._write_tokenizer()
        if config.init is not None:
            self._fill(config.init)
        self.model.to(device).train()
        self.schedule = parse(FlowMatchConfig, SHAPES_SCHEDULER, source="the scheduler")
        self.batches = LatentBatches(config.seed, config.batch, config.sizes, self.encoder, config.simple)

    def _write_tokenizer(self) -> None:
        folder = self.config.out / "tokenizer"
        if self.config.resume:
            self._check_tokenizer(folder)
        train_folder.write_tokenizer(folder, self.vocabulary)
        self.tokenizer = tokenizers.load(folder)

    def _check_tokenizer(self, folder: Path) -> None:
        """Raises ModelError where the ids in `folder` do not mean what this version's mean."""
        path = folder / "tokenizer.json"
        if not path.exists() or path.read_bytes() != bpe.files(self.vocabulary)[path.name]:
            raise ModelError(f"{clean(path)}: is missing or of other words than this version's; train a new model")

    def _fill(self, init: Path) -> None:
        """Goes on from a folder's weights."""
        self._check_tokenizer(init / "tokenizer")
        with contextlib.closing(open_model(init)) as opened:
            if (opened.text_config, opened.transformer_config) != (self.text, self.dit):
                raise ModelError(f"{clean(init)}: is a model of another size than the one to train")
            fresh(self.model.text_encoder, opened.text)
            fresh(self.model.transformer, opened.transformer)

    def blocks(self) -> list[torch.nn.Module]:
        """The modules that gradient checkpointing wraps."""
        return [*self.model.text_encoder.layers, *self.model.transformer.transformer_blocks]

    def matrices(self) -> list[str]:
        """The matrices of attention and feed-forward layers; not the modulations, which learn better under AdamW."""
        inside = ("text_encoder.layers.", "transformer.transformer_blocks.")
        named = self.model.named_parameters()
        return [name for name, p in named if p.ndim == 2 and name.startswith(inside) and "_mod." not in name]

    # Batches

    def count(self, step: int) -> int:
        """Pictures in a step."""
        return self.config.batch

    def batch(self, step: int) -> Inputs:
        width, height = self.batches.size(step)
        rows, columns = height // 16, width // 16
        made, ids, lengths = self._by_length(self.batches.batch(step))
        levels = shifted(made.levels, self.schedule.mu(rows * columns))
        sigma = levels.astype(np.float32)[:, None, None, None]
        noisy = (1 - sigma) * made.latents + sigma * made.noise
        on_device = partial(torch.Tensor.to, device=self.device)
        return Inputs(
            noisy=on_device(torch.from_numpy(geometry.pack(noisy))),
            velocity=on_device(torch.from_numpy(geometry.pack(made.noise - made.latents))),
            features=on_device(torch.from_numpy(time_features(levels))),
            ids=on_device(torch.from_numpy(ids)),
            lengths=lengths,
            shape=(1, rows, columns),
        )

    def _by_length(self, batch: Batch) -> tuple[Batch, np.ndarray, list[int]]:
        """The batch in the order of its prompts' lengths; token ids [B S], padded at the end, where a causal encoder
        does not look; and the lengths."""
        unsorted = [tokenizers.prompt_ids(self.tokenizer, prompt).ids for prompt in batch.prompts]
        order = sorted(range(len(unsorted)), key=lambda i: len(unsorted[i]))
        found = [unsorted[i] for i in order]
        lengths = [len(ids) for ids in found]
        padded = np.zeros((len(found), max(lengths)), dtype=np.int64)
        for row, ids in zip(padded, found, strict=True):
            row[: len(ids)] = ids
        ordered = Batch(
            batch.latents[order], batch.noise[order], batch.levels[order], [batch.prompts[i] for i in order]
        )
        return ordered, padded, lengths

    # Loss

    def loss(self, batch: Inputs, rows: slice) -> Tensor:
        lengths = batch.lengths[rows]
        ids = batch.ids[rows, : max(lengths)]
        mask = self._mask([n - tokenizers.DROPPED for n in lengths], batch.shape)
        dit = self.model.transformer
        text = self.model.text_encoder(ids, self._text_rope(ids.shape[1]))[:, tokenizers.DROPPED :]
        rope = self._rope(batch.shape, text.shape[1])
        mods, final = self.model.modulation(batch.features[rows])
        velocity = dit(batch.noisy[rows], dit.context(text), mods, final, rope, None, mask)
        return torch.nn.functional.mse_loss(velocity.float(), batch.velocity[rows])

    def _mask(self, lengths: list[int], shape: tuple[int, int, int]) -> Tensor | None:
        mask = conditioning.key_mask(lengths, math.prod(shape))
        return None if mask is None else torch.from_numpy(mask).to(self.device)

    def _text_rope(self, length: int) -> tuple[Tensor, Tensor]:
        cos, sin = geometry.text_rope(length, self.text.head_dim, self.text.rope_theta)
        return self._table(cos), self._table(sin)

    def _rope(self, shape: tuple[int, int, int], length: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        image, text = conditioning.image_and_text_rope(self.dit, [shape], length)
        return (self._table(image[0]), self._table(image[1])), (self._table(text[0]), self._table(text[1]))

    def _table(self, values: np.ndarray) -> Tensor:
        return nn.table(values, torch.float32, self.device)

    # Writing

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """The whole folder, but for a VAE that is there already."""
        config = self.config
        if not (config.out / "vae" / "config.json").exists():
            train_folder.copy_vae(_vae_folder(config), config.out / "vae")
        text = {n.removeprefix("text_encoder."): v for n, v in weights.items() if n.startswith("text_encoder.")}
        dit = {n.removeprefix("transformer."): v for n, v in weights.items() if n.startswith("transformer.")}
        train_folder.write_rest(config.out, (self.dit, dit), (self.text, text), self.vocabulary)


def _vae_folder(config: TrainConfig) -> Path:
    """Of the run's own VAE, or of the one to go on from."""
    for folder in (config.out, config.init):
        if folder is not None and (folder / "vae" / "config.json").exists():
            return folder / "vae"
    raise ModelError(f"{clean(config.out)}: has no vae/ yet; run `qwenimg train vae --out {clean(config.out)}` first")


def shifted(levels: np.ndarray, mu: float) -> np.ndarray:
    """Noise levels after the scheduler's exponential shift: e^mu s / (1 + (e^mu - 1) s)."""
    weight = math.exp(mu)
    return weight * levels / (1 + (weight - 1) * levels)


def time_features(levels: np.ndarray) -> np.ndarray:
    """`geometry.timestep_features` of noise levels [B] in one go: [B 256], float32."""
    half = TIME_CHANNELS // 2
    angles = 1000.0 * levels[:, None] * np.exp(-math.log(10000.0) * np.arange(half) / half)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
