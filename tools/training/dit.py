"""The last stage: the transformer, by rectified flow. VAE and text encoder are trained already, and stay as they are.

The model learns the velocity noise - image at x = (1 - sigma) image + sigma noise (X. Liu et al., "Flow Straight and
Fast", 2022). Sigma is logit-normal and shifted towards noise by the scheduler's own rule for the picture's size
(P. Esser et al., "Scaling Rectified Flow Transformers", 2024).
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

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.denoisers.diffusion_transformer import Pair
from qwenimg.backends.torch.networks.denoisers.qwen_dit import QwenImageTransformer, TransformerBlock
from qwenimg.backends.torch.networks.encoders.decoder import Decoder
from qwenimg.common.base.config import parse
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.base.text import clean
from qwenimg.common.families.qwen_image.checkpoint import open_folder
from qwenimg.common.families.qwen_image.variants import DRAWS as TEMPLATE
from qwenimg.common.networks.denoisers import qwen_conditioning
from qwenimg.common.networks.denoisers.qwen_dit import TIME_CHANNELS, QwenDiTConfig
from qwenimg.common.numbers import packing
from qwenimg.common.prompts import qwen
from qwenimg.common.sampling.flow_match import FlowMatchConfig, by_size
from qwenimg.common.training.files import is_file
from training import folder as train_folder
from training import tokenizer
from training.config import ShapesConfig
from training.data import Batch, LatentBatches, padded
from training.folder import SCHEDULER, SHAPES_FILES
from training.optimizer import Optimizer
from training.text import states_of
from training.vae import Encoder, fresh, initialise


@dataclass(frozen=True)
class Inputs:
    """A step's arrays on the device: packed latents and velocity [B L 4z], time features [B 256], text states [B S C].

    The prompts grow from the first to the last, so that a part of the batch is padded to its own longest only."""

    noisy: Tensor
    velocity: Tensor
    features: Tensor
    text: Tensor
    lengths: list[int]  # text tokens of each prompt
    shape: tuple[int, int, int]  # frames, rows, columns in tokens


class DiTStage:
    """What the loop needs of a stage: parameters, batches, a loss, and the folder to write."""

    def __init__(self, config: ShapesConfig, device: torch.device, tell: Callable[[str], None]):
        self.config, self.device = config, device
        self.encoder = Encoder(_folder(config, "vae", "vae"), device)
        self.vocabulary = train_folder.vocabulary()
        self.text = train_folder.text_config(config.size, self.vocabulary.size)
        self.text_encoder = self._open_text()
        self.dit = train_folder.dit_config(config.size, self.encoder.config)
        torch.manual_seed(config.seed)
        self.model = new_transformer(self.dit)
        if config.init is not None:
            self._fill(config.init)
        self.model.to(device).train()
        self.schedule = parse(FlowMatchConfig, SHAPES_FILES[SCHEDULER], source="the scheduler")
        self._copy_parts()
        self.batches = LatentBatches(config.seed, config.batch, config.sizes, self.encoder, config.simple)

    def _open_text(self) -> Decoder:
        """The trained text encoder of the run, or of the model to go on from; and its tokenizer."""
        source = _folder(self.config, "text_encoder", "text").parent
        self._check_tokenizer(source / "tokenizer" / "tokenizer.json")
        plan = train_folder.read_text(source / "text_encoder", self.text)
        encoder = fresh(Decoder(self.text, torch.float32), plan).requires_grad_(False).to(self.device)
        train_folder.write_tokenizer(self.config.out / "tokenizer", self.vocabulary)
        self.tokenizer = qwen.load(self.config.out / "tokenizer")
        return encoder

    def _check_tokenizer(self, path: Path) -> None:
        """Raises ModelError where the ids in the file `path` do not mean what this version's mean."""
        expected = tokenizer.files(self.vocabulary)[path.name]
        found = b""
        if path.exists():
            with contextlib.closing(open_regular(path)) as file:
                found = file.read(0, min(file.size, len(expected) + 1))
        if found != expected:
            raise ModelError(f"{clean(path)}: is missing or of other words than this version's; train a new model")

    def _fill(self, init: Path) -> None:
        """Goes on from a folder's weights."""
        with contextlib.closing(open_folder(init)) as opened:
            if opened["transformer"].config != self.dit:
                raise ModelError(f"{clean(init)}: is a model of another size than the one to train")
            fresh(self.model, opened["transformer"].plan)

    def blocks(self) -> list[torch.nn.Module]:
        """The modules that gradient checkpointing wraps."""
        return list(self.model.transformer_blocks)

    def optimizer(self, parameters: Mapping[str, torch.nn.Parameter]) -> Optimizer:
        """Muon has the matrices of attention and feed-forward layers; not the modulations, which learn better under
        AdamW."""
        named = parameters.items()
        return Optimizer(
            parameters,
            [name for name, p in named if p.ndim == 2 and "transformer_blocks." in name and "_mod." not in name],
        )

    # Batches

    def count(self, step: int) -> int:
        """Pictures in a step."""
        return self.config.batch

    def batch(self, step: int) -> Inputs:
        width, height = self.batches.size(step)
        rows, columns = height // 16, width // 16
        drawn = self.batches.batch(step)
        drawn.levels[::2] = shifted(
            drawn.levels[::2], by_size(self.schedule, rows * columns, 1)
        )  # the others are for edges
        made, ids, lengths = self._by_length(drawn)
        sigma = made.levels.astype(np.float32)[:, None, None, None]
        noisy = (1 - sigma) * made.latents + sigma * made.noise
        on_device = partial(torch.Tensor.to, device=self.device)
        return Inputs(
            noisy=on_device(torch.from_numpy(packing.pack(noisy))),
            velocity=on_device(torch.from_numpy(packing.pack(made.noise - made.latents))),
            features=on_device(torch.from_numpy(time_features(made.levels))),
            text=self._states(ids),
            lengths=[length - TEMPLATE.dropped for length in lengths],
            shape=(1, rows, columns),
        )

    def _by_length(self, batch: Batch) -> tuple[Batch, np.ndarray, list[int]]:
        """The batch in the order of its prompts' lengths; its token ids [B S], padded; and the lengths."""
        unsorted = [TEMPLATE.fill(self.tokenizer, prompt).ids for prompt in batch.prompts]
        order = sorted(range(len(unsorted)), key=lambda i: len(unsorted[i]))
        found = [unsorted[i] for i in order]
        table, lengths = padded(found)
        ordered = Batch(
            batch.latents[order], batch.noise[order], batch.levels[order], [batch.prompts[i] for i in order]
        )
        return ordered, table, lengths

    def _states(self, ids: np.ndarray) -> Tensor:
        """What the text encoder makes of ids [B S], without the template's: [B S-34 C]."""
        with torch.no_grad():
            on_device = torch.from_numpy(ids).to(self.device)
            return states_of(self.text_encoder, self.text, on_device)[:, TEMPLATE.dropped :]

    # Loss

    def loss(self, batch: Inputs, rows: slice) -> Tensor:
        dit, lengths = self.model, batch.lengths[rows]
        text = batch.text[rows, : max(lengths)]
        mask = self._mask(lengths, batch.shape)
        rope = self._rope(batch.shape, text.shape[1])
        mods, final = modulation(dit, batch.features[rows])
        velocity = dit(batch.noisy[rows], dit.context(text), mods, final, rope, None, mask)
        return torch.nn.functional.mse_loss(velocity.float(), batch.velocity[rows])

    def _mask(self, lengths: list[int], shape: tuple[int, int, int]) -> Tensor | None:
        mask = qwen_conditioning.key_mask(lengths, math.prod(shape))
        return None if mask is None else torch.from_numpy(mask).to(self.device)

    def _rope(self, shape: tuple[int, int, int], length: int) -> tuple[Tensor, Tensor]:
        image, text = qwen_conditioning.image_and_text_rope(self.dit, [shape], length)
        return ops.rope_freqs(*map(self._table, image)), ops.rope_freqs(*map(self._table, text))

    def _table(self, values: np.ndarray) -> Tensor:
        return ops.table(values, torch.float32, self.device)

    # Writing

    def _copy_parts(self) -> None:
        """A VAE and a text encoder that are not there yet; before the training, since they may be found bad."""
        config = self.config
        for part, stage in (("vae", "vae"), ("text_encoder", "text")):
            if not is_file(config.out / part / "config.json"):
                train_folder.copy_part(_folder(config, part, stage), config.out / part)

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """The rest of the folder."""
        train_folder.write_rest(self.config.out, self.dit, weights)


def new_transformer(config: QwenDiTConfig) -> QwenImageTransformer:
    """Untrained, in float32. Each block starts as the identity, and the prediction as zero (W. Peebles and S. Xie,
    "Scalable Diffusion Models with Transformers", 2022)."""
    made = QwenImageTransformer(config, torch.float32)
    initialise(made)
    still: list[Any] = [made.norm_out.linear, made.proj_out]
    for block in _blocks(made):
        still += [block.img_mod[1], block.txt_mod[1]]
    for layer in still:
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return made


def _blocks(dit: QwenImageTransformer) -> list[TransformerBlock]:
    return cast(list[TransformerBlock], list(dit.transformer_blocks))


def modulation(dit: QwenImageTransformer, features: Tensor) -> tuple[list[Pair], Tensor]:
    """Time features [B 256] -> every block's rows, and the final norm's [B 2C]."""
    temb = dit.time_text_embed(features, torch.zeros(1))  # no additional condition
    return [block.modulation(temb) for block in _blocks(dit)], dit.norm_out.modulation(temb)


def _folder(config: ShapesConfig, part: str, stage: str) -> Path:
    """Of a part of the run's own, or of the model to go on from."""
    for folder in (config.out, config.init):
        if folder is not None and is_file(folder / part / "config.json"):
            return folder / part
    out = clean(config.out)
    raise ModelError(f"{out}: has no {part}/ yet; run `python tools/train.py {stage} --out {out}` first")


def shifted(levels: np.ndarray, mu: float) -> np.ndarray:
    """Noise levels after the scheduler's exponential shift: e^mu s / (1 + (e^mu - 1) s)."""
    weight = math.exp(mu)
    return weight * levels / (1 + (weight - 1) * levels)


def time_features(levels: np.ndarray) -> np.ndarray:
    """`timesteps.timestep_features` of noise levels [B] in one go: [B 256], float32."""
    half = TIME_CHANNELS // 2
    angles = 1000.0 * levels[:, None] * np.exp(-math.log(10000.0) * np.arange(half) / half)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
