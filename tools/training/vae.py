"""The first stage: the VAE, as the 2-D network that it is for a still image.

Loss: absolute and squared error, the absolute error of the differences between neighbours (edges), and a small KL
term, which with the sampling keeps the latents smooth (D. Kingma and M. Welling, "Auto-Encoding Variational Bayes").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from qwenimg.backends.torch import load, ops
from qwenimg.backends.torch.networks.vaes.qwen_vae import QwenVAE, built
from qwenimg.common.base.errors import NumericsError
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.parts.vae import decodes
from qwenimg.common.precision.precision import bases
from qwenimg.common.weights.plan import LoadPlan
from training import folder as train_folder
from training.config import ShapesConfig
from training.data import Float32, crops, pictures
from training.optimizer import Optimizer

Model = TypeVar("Model", bound=torch.nn.Module)

EDGES, KL = 0.5, 3e-4  # weights beside the errors' 1
WIDE = 2**20  # a tile side that no image reaches
QUIET = -6.0  # log variance at the start: with more noise the decoder learns to ignore the latents
SMALL = 0.1  # of what ends a residual update
FEW = 4  # pictures that are encoded at once on a CPU: more do not fit its caches (measured: 68 against 38 a second)
MEASURED = 64  # pictures that the latents' statistics are taken from
MEASURED_SIZE = (128, 128)


class Images(NamedTuple):
    pixels: Tensor  # [B 3 8h 8w]
    noise: Tensor  # [B z h w]


class VAEStage:
    """What the loop needs of a stage: parameters, batches, a loss, and the folder to write."""

    def __init__(self, config: ShapesConfig, device: torch.device, tell: Callable[[str], None]):
        self.config, self.device, self.tell = config, device, tell
        self.vae = train_folder.vae_config(config.size)
        self.model = built(self.vae)
        torch.manual_seed(config.seed)
        initialise_vae(self.model, self.vae.z_dim)
        if config.init is not None:
            found, plan = train_folder.read_vae(config.init / "vae")
            self.vae, self.model = found, fresh(built(found), plan)
        self.model.to(device).train()

    def blocks(self) -> list[torch.nn.Module]:
        """The modules that gradient checkpointing wraps."""
        return [*self.model.encoder.down_blocks, *self.model.decoder.up_blocks]

    def optimizer(self, parameters: Mapping[str, torch.nn.Parameter]) -> Optimizer:
        """AdamW's alone: the model is made of convolutions."""
        return Optimizer(parameters, [])

    def count(self, step: int) -> int:
        """Windows in a step: all sizes have about as many pixels in a batch as the first one."""
        config = self.config
        first, size = config.sizes[0], config.sizes[step % len(config.sizes)]
        return max(config.accumulate, config.batch * first[0] * first[1] // (size[0] * size[1]))

    def batch(self, step: int) -> Images:
        config = self.config
        size, count = config.sizes[step % len(config.sizes)], self.count(step)
        pixels, rng = crops(config.seed, step, count, size)
        shape = (count, self.vae.z_dim, size[1] // self.vae.scale, size[0] // self.vae.scale)
        noise = rng.standard_normal(shape, dtype=np.float32)
        return Images(torch.from_numpy(pixels).to(self.device), torch.from_numpy(noise).to(self.device))

    def loss(self, batch: Images, rows: slice) -> Tensor:
        pixels, noise = batch.pixels[rows], batch.noise[rows]
        mean, logvar = self.model.encode(pixels).float().chunk(2, dim=1)
        logvar = logvar.clamp(-20, 10)
        z = mean + torch.exp(0.5 * logvar) * noise
        made = self.model.decode(z, z.shape[2], z.shape[3], WIDE).float()
        error = made - pixels
        edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return error.abs().mean() + error.square().mean() + EDGES * edges + KL * divergence

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Measures the latents with the weights as they are stored, and writes the folder vae/."""
        model = built(self.vae)
        model.load_state_dict({name: value.cpu().bfloat16().float() for name, value in weights.items()})
        mean, std, psnr = measure(model.eval(), pictures(self.config.seed, MEASURED, MEASURED_SIZE))
        if not all(map(math.isfinite, (*mean, *std, psnr))):
            raise NumericsError("the latents of these weights are not finite, and nothing is written")
        self.tell(f"VAE: {psnr:.1f} dB over {MEASURED} pictures; latents' deviations {min(std):.3f} to {max(std):.3f}")
        train_folder.write_vae(self.config.out / "vae", self.vae, weights, mean, std)


def initialise_vae(model: QwenVAE, z_dim: int) -> None:
    """Convolutions that keep the size of what they get, without biases, and residual updates that start small.

    As torch's layers start, each shrinks its input and adds a bias, and after a dozen of them little of the picture
    is left: the loss then stays where one colour for all is best (0.55 after 250 steps, where this is at 0.2)."""
    initialise(model)
    for name, layer in model.named_modules():
        if isinstance(layer, ops.Conv2d):
            small = SMALL if name.endswith(("conv2", "proj")) else 1.0
            torch.nn.init.normal_(layer.weight, std=small * layer.weight[0].numel() ** -0.5)
            assert layer.bias is not None
            torch.nn.init.zeros_(layer.bias)
    moments = model.quant_conv
    assert moments.bias is not None
    with torch.no_grad():
        moments.weight[z_dim:] *= SMALL
        moments.bias[z_dim:] = QUIET


def initialise(model: torch.nn.Module) -> None:
    """Gains of norms are 1; all else as torch's layers start."""
    for module in model.modules():
        if isinstance(module, ops.ChannelNorm):
            torch.nn.init.ones_(module.gamma)
        if isinstance(module, ops.RMSNorm):
            torch.nn.init.ones_(module.weight)


def fresh(model: Model, plan: LoadPlan) -> Model:
    """`model` with the weights of `plan`, in float32 and trainable."""
    load.fill(model, plan.stored(bases(KIND)["fp32"]), torch.device("cpu"))
    plan.close()
    model.requires_grad_(True)
    return model


@torch.inference_mode()
def measure(model: QwenVAE, images: Float32) -> tuple[list[float], list[float], float]:
    """Mean and deviation of each latent channel, as sampled, and the PSNR of the reconstructions in dB.

    The deviation has the posterior's variance in it, so a channel that carries nothing is not blown up to 1."""
    means, variances, errors = [], [], []
    for part in np.split(images, max(1, len(images) // 8)):
        pixels = torch.from_numpy(part)
        mean, logvar = model.encode(pixels).chunk(2, dim=1)
        made = model.decode(mean, mean.shape[2], mean.shape[3], WIDE).clamp(-1, 1)
        means.append(mean)
        variances.append(logvar.clamp(-20, 10).exp())
        errors.append((made - pixels).square().mean(dim=(1, 2, 3)))
    mean, variance = torch.cat(means).double(), torch.cat(variances).double()
    average = mean.mean(dim=(0, 2, 3))
    deviation = (mean.var(dim=(0, 2, 3)) + variance.mean(dim=(0, 2, 3))).sqrt()
    psnr = -10 * torch.log10(torch.cat(errors).double().mean() / 4)
    return [float(x) for x in average], [float(x) for x in deviation], float(psnr)


class Encoder:
    """A trained VAE's encoder, frozen: pictures to standardised latents. For the second stage."""

    def __init__(self, folder: Path, device: torch.device):
        self.device = device
        self.config, plan = train_folder.read_vae(folder)
        self.model = load.empty(lambda: built(self.config))
        wanted = plan.only(lambda name: not decodes(name))
        load.fill(self.model, wanted.stored(bases(KIND)["fp32"]), device)
        plan.close()
        self.mean, self.std = (
            torch.tensor(values, device=device)[:, None, None]
            for values in (self.config.latents_mean, self.config.latents_std)
        )

    @torch.inference_mode()
    def __call__(self, pixels: Float32) -> Float32:
        """[N 3 8h 8w] -> the posterior's mean [N z h w], mean 0 and deviation 1 per channel."""
        few = FEW if self.device.type == "cpu" else len(pixels)
        parts = [self._encode(pixels[i : i + few]) for i in range(0, len(pixels), few)]
        return np.concatenate(parts)

    def _encode(self, pixels: Float32) -> Float32:
        z = self.config.z_dim
        moments = self.model.encode(torch.from_numpy(pixels).to(self.device))
        return ops.at_least_float32((moments[:, :z] - self.mean) / self.std).cpu().numpy()
