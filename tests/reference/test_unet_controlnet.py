"""ControlNets of Stable Diffusion: their manifests and forwards against diffusers, and the UNet under their control."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.crossed import crossed
from support.policies import UNET
from support.sd_models import MLX, PUBLISHED, TINY, TORCH, ExactSinusoids, Given, Side, relative, tiny_unet
from support.tiny_controlnet import authors_names, controlnet_config, tiny_controlnet

from qwenimg.common.base.config import parse
from qwenimg.common.networks.denoisers import unet, unet_controlnet, unet_controlnet_names
from qwenimg.common.networks.denoisers.unet_controlnet import UNetControlNetConfig
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.precision.precision import bases

FP32 = bases(UNET)["fp32"]
FLOAT32 = 4e-6  # relative L2 to diffusers in double, as of the UNet alone; measured at most 1.5e-6
SIZES = ((16, 24), (9, 13))
SCALE = 0.7
COUNTS = {"SD 1.5": (340, 361.28), "SD 2.1": (340, 364.23), "SDXL base": (844, 1251.01)}
NAMES = ("SD 1.5", "SD 2.1", "SDXL base")


def parsed(data: dict[str, Any]) -> UNetControlNetConfig:
    return parse(UNetControlNetConfig, unet_controlnet.fields(data), source="config.json", ignored=unet.IGNORED_CONFIG)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(1)
def test_published_manifest(name: str) -> None:
    from diffusers import ControlNetModel

    data = controlnet_config(PUBLISHED[name], conditioning_embedding_out_channels=(16, 32, 96, 256))
    with torch.device("meta"):
        model = ControlNetModel(**data)
    made = unet_controlnet.manifest(parsed(data))
    assert made == {key: tuple(value.shape) for key, value in model.state_dict().items()}
    parameters = sum(map(prod, made.values()))
    print(f"{name}: {len(made)} tensors, {parameters:,} parameters")
    assert (len(made), round(parameters / 1e6, 2)) == COUNTS[name]
    assert parsed(dict(model.config)) == parsed(data)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_its_authors(name: str) -> None:
    model = tiny_controlnet(TINY[name])
    config = parsed(dict(model.config))
    found = {key: unet_controlnet_names.place(key, config).key for key in unet_controlnet.manifest(config)}
    written = authors_names(model, "")
    assert set(found.values()) == set(written) and len(set(found.values())) == len(found)
    tensors = model.state_dict()
    assert all(torch.equal(tensors[key], written[place]) for key, place in found.items())


class Case:
    """A tiny UNet and its ControlNet in diffusers, in float64, one picture, and two branches of guidance."""

    def __init__(self, folder: Path, name: str, size: tuple[int, int], **changes: Any):
        self.unet, self.net = tiny_unet(name), tiny_controlnet(TINY[name], **changes)
        self.unet.save_pretrained(folder / "unet")
        self.net.save_pretrained(folder / "controlnet")
        self.unet_part = open_component(unet.NETWORK, folder / "unet", read_config(unet.NETWORK, folder / "unet"), "it")
        self.config = self.unet_part.config
        self.part = open_component(
            unet_controlnet.NETWORK,
            folder / "controlnet",
            read_config(unet_controlnet.NETWORK, folder / "controlnet"),
            "it",
        )
        self.given = Given(self.config, size)
        self.given.latents[1] = self.given.latents[0]
        rng = np.random.default_rng(7)
        self.picture = rng.random((1, 3, 8 * size[0], 8 * size[1]))
        for model in (self.unet, self.net):
            model.double()
            model.time_proj = ExactSinusoids(model.config.block_out_channels[0])
            if self.given.sizes is not None:
                model.add_time_proj = ExactSinusoids(model.config.addition_time_embed_dim)

    def expected(self, guess: bool) -> tuple[list[np.ndarray], np.ndarray]:
        """The residuals, the mid block's last, and the UNet's prediction with them."""
        given = self.given
        more: dict[str, Any] = {}
        if given.pooled is not None and given.sizes is not None:
            parts = {"text_embeds": given.pooled, "time_ids": given.sizes}
            more["added_cond_kwargs"] = {key: torch.from_numpy(value) for key, value in parts.items()}
        inputs = [torch.from_numpy(x) for x in (given.latents, np.repeat(given.times[:1], 2), given.text)]
        picture = torch.from_numpy(self.picture).expand(2, -1, -1, -1)
        with torch.no_grad():
            down, mid = self.net(
                *inputs, picture, conditioning_scale=SCALE, guess_mode=guess, return_dict=False, **more
            )
            controlled = self.unet(
                *inputs,
                down_block_additional_residuals=down,
                mid_block_additional_residual=mid,
                return_dict=False,
                **more,
            )[0]
        return [x.numpy() for x in (*down, mid)], controlled.numpy()

    def ours(self, side: Side, scales: list[float]) -> tuple[list[np.ndarray], np.ndarray]:
        engine, given = side.engine, self.given
        net = engine.open(self.part.network, self.part.config, self.part.stored(FP32), FP32)
        model = engine.open("unet", self.config, self.unet_part.stored(FP32), FP32)
        addition = None if given.addition is None else given.addition.astype(np.float32)
        texts, step = given.text.astype(np.float32), given.features[:1]
        x, picture = (engine.array(values.astype(np.float32)) for values in (given.latents[:1], self.picture))
        changes = net.predict(x, step, net.condition(texts, (addition, len(texts)), picture), scales)
        flat = [side.numpy(one) for one in (*(one for level in changes.down for one in level), changes.mid)]
        changes = net.predict(
            x, step, net.condition(texts, (addition, len(texts)), picture), scales
        )  # the UNet may add in place
        prediction = model.predict(x, step, model.condition(texts, addition), [changes])
        return flat, np.asarray(engine.numpy(prediction))


@pytest.mark.parametrize(("name", "size"), crossed(NAMES, SIZES))
@pytest.mark.sample(1)
def test_forward(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    case = Case(tmp_path, name, size)
    count = len(case.part.config.skips) + 1
    for guess in (False, True):
        residuals, prediction = case.expected(guess)
        shares = np.logspace(-1, 0, count) if guess else np.ones(count)
        for label, side in (("torch", TORCH()), ("MLX", MLX())):
            flat, controlled = case.ours(side, [float(SCALE * share) for share in shares])
            errors = [relative(made, theirs) for made, theirs in zip(flat, residuals, strict=True)]
            error = relative(controlled, prediction)
            print(f"{name}, {size}, guess {guess}, {label}: residuals {max(errors):.1e}, UNet {error:.1e}")
            assert max(*errors, error) <= FLOAT32


@pytest.mark.sample(0)
def test_means_over_all_pixels(tmp_path: Path) -> None:
    case = Case(tmp_path, "SD 1.5", (9, 13), global_pool_conditions=True)
    residuals, prediction = case.expected(False)
    for side in (TORCH(), MLX()):
        flat, controlled = case.ours(side, [SCALE] * len(residuals))
        assert flat[0].shape == residuals[0].shape == (2, 16, 1, 1)
        assert max(map(relative, flat, residuals)) <= FLOAT32 and relative(controlled, prediction) <= FLOAT32
