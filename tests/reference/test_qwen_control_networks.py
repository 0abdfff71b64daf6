"""Control networks of Qwen-Image and the transformer under their control, on both backends, in float32: ControlNets
against diffusers, block-wise patches against their formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_control import WIDTH, tiny_controlnet, tiny_patches, write_patches
from support.tiny_model import tiny_dit

from qwenimg import backends
from qwenimg.common.families.qwen_image import control
from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_controlnet, qwen_dit, qwen_patches
from qwenimg.common.networks.denoisers.qwen_controlnet import QwenControlNetConfig
from qwenimg.common.networks.denoisers.qwen_patches import QwenPatchesConfig
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.timesteps import sinusoids
from qwenimg.common.parts.components import open_component, read_config

BACKENDS = ("cpu", "mlx")
FLOAT32 = 2e-6  # relative L2 of residuals and of a forward; measured at most 1.5e-6
# Layers of the transformer and of the ControlNet, and channels of a mask
CASES = [((5, 2), 0), ((5, 4), 4), ((5, 5), 0), ((3, 2), 4)]
SIGMA, SCALE = 0.61, 0.7
GRID = (5, 3)


def exact_sinusoids(timesteps: torch.Tensor) -> torch.Tensor:
    """The reference's own are in float32, whose angles of up to 1000 radians are worth 3e-6 of the result."""
    return torch.from_numpy(np.stack([sinusoids(float(np.float32(1000 * float(t))), 256) for t in timesteps]))


class Case:
    """A tiny transformer in diffusers and on one backend, an image of odd sides in tokens, a text and a picture."""

    def __init__(self, folder: Path, backend: str, layers: int, extra: int = 0):
        self.engine = backends.load(backend)
        self.model = tiny_dit(num_layers=layers)
        self.transformer = self.opened(qwen_dit.NETWORK, self.model, folder / "transformer")
        rng = np.random.default_rng(3)
        h, w = 2 * GRID[0], 2 * GRID[1]
        self.x, self.picture = (
            packing.pack(rng.standard_normal((1, channels, h, w)).astype(np.float32))
            for channels in (16, 16 + extra // 4)
        )
        self.texts = [rng.standard_normal((1, length, 60)).astype(np.float32) for length in (9, 14)]
        self.row = qwen_conditioning.time_rows(self.config, [1000 * SIGMA], "float32")

    def opened(self, network: Any, model: torch.nn.Module, folder: Path) -> Any:
        model.save_pretrained(folder)
        model.time_text_embed.time_proj.forward = exact_sinusoids
        part = open_component(network, folder, read_config(network, folder), "it")
        self.config = part.config
        return self.engine.open(part.network, part.config, part.stored(FP32), FP32)

    def numpy(self, array: Any) -> np.ndarray:
        return np.asarray(self.engine.numpy(array))

    def ours(self, text: int, *changes: Any) -> np.ndarray:
        array = self.engine.array
        condition = self.transformer.condition([array(self.texts[text])], [(1, *GRID)])
        step = self.transformer.modulate(self.row), 0
        spread = control.spread(changes, self.transformer.config.num_layers)
        return self.numpy(self.transformer.predict(array(self.x), step, condition, spread))

    def theirs(self, text: int, residuals: Any) -> np.ndarray:
        with torch.inference_mode():
            return self.model(
                hidden_states=torch.from_numpy(self.x),
                encoder_hidden_states=torch.from_numpy(self.texts[text]),
                timestep=torch.tensor([SIGMA]),
                img_shapes=[(1, *GRID)],
                controlnet_block_samples=residuals,
                return_dict=False,
            )[0].numpy()


class ControlNetCase(Case):
    def __init__(self, folder: Path, backend: str, layers: tuple[int, int], extra: int = 0):
        super().__init__(folder, backend, layers[0], extra)
        self.net = tiny_controlnet(layers=layers[1], extra=extra)
        self.network = self.opened(qwen_controlnet.NETWORK, self.net, folder / "controlnet")

    def residuals(self) -> Any:
        with torch.inference_mode():
            return self.net(
                hidden_states=torch.from_numpy(self.x),
                controlnet_cond=torch.from_numpy(self.picture),
                conditioning_scale=SCALE,
                encoder_hidden_states=torch.from_numpy(self.texts[0]),
                timestep=torch.tensor([SIGMA]),
                img_shapes=[(1, *GRID)],
                return_dict=False,
            )

    def changes(self) -> Any:
        array = self.engine.array
        condition = self.network.condition(array(self.texts[0]), GRID, array(self.picture))
        return self.network.predict(array(self.x), (self.network.modulate(self.row), 0), condition, SCALE)

    def errors(self) -> list[float]:
        """Errors of each residual, and of the transformer for the text that the ControlNet saw and for another."""
        expected, changes = self.residuals(), self.changes()
        pairs = [(self.numpy(ours.values), theirs.numpy()) for ours, theirs in zip(changes, expected, strict=True)]
        pairs += [(self.ours(text, changes), self.theirs(text, expected)) for text in range(2)]
        assert all(theirs.std() > 0.1 for _, theirs in pairs)
        assert relative_float32(self.theirs(0, None), pairs[-2][1]) > 0.05, "the residuals move the prediction"
        return [relative_float32(*pair) for pair in pairs]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("layers", "extra"), CASES)
@pytest.mark.sample(1)
def test_controlnet(tmp_path: Path, backend: str, extra: int, layers: tuple[int, int]) -> None:
    errors = ControlNetCase(tmp_path, backend, layers, extra).errors()
    print(f"{backend} {layers} extra {extra}: {', '.join(f'{error:.1e}' for error in errors)} (limit {FLOAT32})")
    assert max(errors) <= FLOAT32


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.special.erf(x / 2**0.5))


def patched(case: Case, several: list[tuple[dict[str, torch.Tensor], float]]) -> np.ndarray:
    """The transformer's prediction in float64, with the formula of block-wise patches behind each of its blocks: each
    of `several`, with its scale, is of the stream without the others."""
    nets = [({name: tensor.double() for name, tensor in tensors.items()}, scale) for tensors, scale in several]
    picture = torch.from_numpy(case.picture).double()

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def behind(index: int) -> Callable[..., Any]:
        def hook(module: Any, inputs: Any, outputs: Any) -> Any:
            text, img = outputs
            added = torch.zeros_like(img)
            for wide, scale in nets:
                p = {name: wide[f"controlnet_blocks.{index}.{name}"] for name in NAMES}
                seen = picture @ wide["img_in.weight"].T + wide["img_in.bias"]
                hidden = rms(img, p["x_rms.weight"]) + rms(seen, p["y_rms.weight"])
                hidden = gelu(hidden @ p["input_proj.weight"].T + p["input_proj.bias"])
                added += scale * (hidden @ p["output_proj.weight"].T + p["output_proj.bias"])
            return text, img + added

        return hook

    model = case.model.double()
    hooks = [block.register_forward_hook(behind(i)) for i, block in enumerate(model.transformer_blocks)]
    try:
        with torch.inference_mode():
            return model(
                hidden_states=torch.from_numpy(case.x).double(),
                encoder_hidden_states=torch.from_numpy(case.texts[0]).double(),
                timestep=torch.tensor([SIGMA]),
                img_shapes=[(1, *GRID)],
                return_dict=False,
            )[0].numpy()
    finally:
        for hook in hooks:
            hook.remove()


NAMES = ["x_rms.weight", "y_rms.weight"] + [
    f"{layer}.{kind}" for layer in ("input_proj", "output_proj") for kind in ("weight", "bias")
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.sample(2)
def test_patches(tmp_path: Path, backend: str, extra: int) -> None:
    case = Case(tmp_path, backend, 3, extra)
    network, config = qwen_patches.NETWORK, QwenPatchesConfig(dim=WIDTH, picture_channels=64 + extra, num_layers=3)
    seeds, opened = (21, 22), []
    for seed in seeds:
        file = write_patches(tmp_path / f"{seed}.safetensors", seed, extra=extra)
        part = open_component(network, file, config, "it")
        opened.append(case.engine.open(part.network, part.config, part.stored(FP32), FP32))
    errors, moved = [], []
    for scales in ((1.0,), (SCALE,), (SCALE, 1.2)):
        several = [(tiny_patches(seed, extra=extra), scale) for seed, scale in zip(seeds, scales, strict=False)]
        expected = patched(case, several)
        case.model.float()
        picture = case.engine.array(case.picture)
        changes = [
            net.predict(None, None, net.condition(None, GRID, picture), scale)
            for net, scale in zip(opened, scales, strict=False)
        ]
        errors.append(relative_float32(case.ours(0, *changes), expected))
        moved.append(relative_float32(case.theirs(0, None), expected))
    print(
        f"{backend} extra {extra}: {', '.join(f'{e:.1e}' for e in errors)} (limit {FLOAT32}), moved by {min(moved):.2f}"
    )
    assert max(errors) <= FLOAT32 and min(moved) > 0.05


# The manifests


@pytest.mark.parametrize(
    ("config", "tensors", "millions"),
    [
        (QwenControlNetConfig(), 181, 1768.0),
        (QwenControlNetConfig(num_layers=6, extra_condition_channels=4), 215, 2117.3),
    ],
)
def test_published_controlnets(config: QwenControlNetConfig, tensors: int, millions: float) -> None:
    from diffusers import QwenImageControlNetModel

    with torch.device("meta"):
        model = QwenImageControlNetModel(
            num_layers=config.num_layers, extra_condition_channels=config.extra_condition_channels
        )
    made = qwen_controlnet.manifest(config)
    assert made == {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert (len(made), round(sum(map(np.prod, made.values())) / 1e6, 1)) == (tensors, millions)


def test_published_patches() -> None:
    made = qwen_patches.manifest(QwenPatchesConfig())
    assert round(sum(map(np.prod, made.values())) / 1e6, 1) == 1133.4


# Planted faults


def one_block_late(patch: pytest.MonkeyPatch, ops: Any) -> None:
    spread = control.spread
    patch.setattr(control, "spread", lambda controls, blocks: [(), *spread(controls, blocks)[:-1]])


def scale_ignored(patch: pytest.MonkeyPatch, ops: Any) -> None:
    predict = ControlNetCase.changes

    def loud(case: ControlNetCase) -> Any:
        patch.setattr(f"{__name__}.SCALE", 1.0)
        try:
            return predict(case)
        finally:
            patch.setattr(f"{__name__}.SCALE", 0.7)

    patch.setattr(ControlNetCase, "changes", loud)


def spread_evenly(patch: pytest.MonkeyPatch, ops: Any) -> None:
    """As other families have it: int(i times count / blocks)."""
    patch.setattr(
        control, "spread", lambda controls, n: [[one[i * len(one) // n] for one in controls] for i in range(n)]
    )


def picture_instead_of_latents(patch: pytest.MonkeyPatch, ops: Any) -> None:
    add = ops.add
    patch.setattr(ops, "add", lambda x, update: add(update, update) if x.shape == update.shape else add(x, update))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "fault", [one_block_late, scale_ignored, spread_evenly, picture_instead_of_latents], ids=lambda one: one.__name__
)
@pytest.mark.sample(1)
def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, fault: Any) -> None:
    case = ControlNetCase(tmp_path, backend, (5, 4))
    fault(monkeypatch, __import__(f"qwenimg.backends.{'torch' if backend == 'cpu' else 'mlx'}.ops", fromlist=["ops"]))
    worst = max(case.errors())
    print(f"{backend} {fault.__name__}: {worst:.1e} (limit {FLOAT32})")
    assert worst > 100 * FLOAT32
