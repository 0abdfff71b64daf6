"""FLUX.1 Canny and Depth, and the LoRAs that make dev see a control picture, from a picture to pixels: both backends
against diffusers on tiny models that it wrote, and one step in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_bfl_flux_control_lora_to_diffusers
from PIL import Image
from safetensors.torch import load_file, save_file
from support import flux_loras, oracle_flux, peer
from support.relative import relative
from support.tiny_flux import CONTROL, tiny_dit, write_tiny_flux

import qwenimg
from qwenimg.common.families import catalog, registry
from qwenimg.common.numbers import packing
from qwenimg.common.parts import vae
from qwenimg.common.pipeline import control_pictures, start
from qwenimg.common.pipeline.result import Result
from qwenimg.common.weights.loras import delta
from qwenimg.common.weights.loras.lora import fit, read_lora, widened

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-5  # relative L2 of the final latents; measured at most 2e-6
PIXELS = 2  # of 255: a value on a rounding edge may go either way
RNG = np.random.default_rng(5)
EDGES = RNG.integers(0, 256, (61, 90, 3), np.uint8)
PICTURE = RNG.integers(0, 256, (64, 80, 3), np.uint8)
HOLE = np.zeros((64, 80), np.uint8)
HOLE[16:48, 32:] = 255  # edges between latents
Loras = Sequence[tuple[Path, float]]
CASES: dict[str, dict[str, Any]] = {
    "control": {"prompt": "a red circle", "width": 80, "height": 64, "steps": 3, "guidance": 30.0},
    "control-image": {"prompt": "a dog", "width": 80, "height": 64, "steps": 4, "guidance": 10.0, "strength": 0.6},
    "control-mask": {"prompt": "a ring", "width": 80, "height": 64, "steps": 4, "guidance": 10.0, "strength": 1.0},
}


@pytest.fixture(scope="module")
def canny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux") / "flux-canny"
    write_tiny_flux(folder, "canny")
    return folder


def with_pictures(task: str) -> dict[str, Any]:
    pictures = {"control": {}, "control-image": {"image": PICTURE}, "control-mask": {"image": PICTURE, "mask": HOLE}}
    return CASES[task] | pictures[task]


def ours(folder: Path, backend: str, asked: dict[str, Any], **more: Any) -> Result:
    with qwenimg.load(folder, backend=backend, precision="fp32", **more) as pipe:
        return pipe(**({"control": ("", EDGES)} | asked), seed=7)


def theirs(folder: Path, task: str, loras: Loras = ()) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' picture, with LoRAs at their strengths. Its inpainting first draws a sample of the masked picture,
    which this transformer does not see: it is left out, so that both draw the same."""
    asked = CASES[task]
    renamed = {"steps": "num_inference_steps", "guidance": "guidance_scale"}
    given = {renamed.get(name, name): value for name, value in asked.items()}
    given["control_image"] = Image.fromarray(EDGES)
    if task != "control":
        given["image"] = Image.fromarray(PICTURE)
    if task == "control-mask":
        inside = np.repeat((HOLE[::8, ::8] >= 128)[None, None].astype(np.float32), 16, axis=1)
        mask = torch.from_numpy(packing.pack(inside))
        oracle_flux.pipeline(folder, task).prepare_mask_latents = lambda *some: (mask, None)
        given["mask_image"] = Image.fromarray(HOLE)
    if not loras:
        return oracle_flux.generate(folder, task, seed=7, length=512, **given)  # type: ignore[no-any-return]
    pipe = oracle_flux.made(folder, task)  # of its own: it does not take all of a LoRA away again
    for i, (file, _) in enumerate(loras):
        pipe.load_lora_weights(str(file), adapter_name=f"lora{i}")
    pipe.set_adapters([f"lora{i}" for i in range(len(loras))], [strength for _, strength in loras])
    return oracle_flux.generated(pipe, seed=7, length=512, **given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("task", CASES)
@pytest.mark.sample(1)
def test_canny_equals_diffusers(canny: Path, task: str) -> None:
    expected = theirs(canny, task)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        made = ours(canny, backend, with_pictures(task))
        peer.check_picture(f"{backend} {task}", made, expected, LATENTS, PIXELS)
        assert made.recipe["control"] == "a picture:1"


# LoRAs


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("loras")
    save_file(flux_loras.control_lora(pooled_projection_dim=60), place / "canny-lora.safetensors")
    save_file(flux_loras.style_lora(), place / "style.safetensors")
    return {name: place / f"{name}.safetensors" for name in ("canny-lora", "style")}


LORA_CASES: dict[str, tuple[str, float, float]] = {  # the task, the strength, and that of a second LoRA
    "alone": ("control", 1.0, 0.0),
    "weaker": ("control", 0.7, 0.0),
    "with a second one": ("control", 0.85, 0.8),
    "from a picture": ("control-image", 1.0, 0.0),
}


def with_lora(loras: dict[str, Path], case: str, *, fuse: bool = True) -> dict[str, Any]:
    task, strength, second = LORA_CASES[case]
    style = {"lora": f"{loras['style']}:{second}"} if second else {}
    mode = {} if fuse else {"lora_mode": "side"}
    return with_pictures(task) | {"control": (loras["canny-lora"], EDGES, strength)} | style | mode


@pytest.mark.parametrize("case", LORA_CASES)
@pytest.mark.sample(1)
def test_a_lora_equals_diffusers(tiny_flux: dict[str, Path], loras: dict[str, Path], case: str) -> None:
    task, strength, second = LORA_CASES[case]
    files = [(loras["canny-lora"], strength), *([(loras["style"], second)] if second else [])]
    expected = theirs(tiny_flux["dev"], task, files)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        for fuse in (True, False) if case == "with a second one" else (True,):
            made = ours(tiny_flux["dev"], backend, with_lora(loras, case, fuse=fuse))
            peer.check_picture(f"{backend} {case}", made, expected, LATENTS, PIXELS)
        assert made.recipe["control"] == f"canny-lora.safetensors=a picture:{strength:g}"


# One step in float64, by the formulas


def step(dit: Any, x: np.ndarray, channels: np.ndarray, texts: Any, time: float, guidance: float) -> np.ndarray:
    """diffusers' transformer in float64 on packed tokens [1 L 64] and those of a control picture behind them."""
    rows, columns = 8 // 2, 10 // 2
    ids = torch.tensor([[0, row, column] for row in range(rows) for column in range(columns)], dtype=torch.float64)
    states, pooled = texts
    with torch.no_grad():
        return dit(  # type: ignore[no-any-return]
            hidden_states=torch.from_numpy(np.concatenate((x, channels), axis=2)),
            timestep=torch.tensor([time], dtype=torch.float64),
            guidance=torch.tensor([guidance], dtype=torch.float64),
            pooled_projections=pooled,
            encoder_hidden_states=states,
            txt_ids=torch.zeros(states.shape[1], 3, dtype=torch.float64),
            img_ids=ids,
        ).sample.numpy()


def with_changes(dit: torch.nn.Module, tensors: dict[str, torch.Tensor], strength: float) -> torch.nn.Module:
    """The transformer with a LoRA by its formulas: W + s B A, W of zeros for new inputs; b + s c; norms as they are."""
    weights = {key: value.double() for key, value in dit.state_dict().items()}
    for key, value in tensors.items():
        name, value = key.removeprefix("transformer."), value.double()
        if ".lora_A" in name:
            path = name.removesuffix(".lora_A.weight")
            change = tensors[f"transformer.{path}.lora_B.weight"].double() @ value
            own = torch.zeros_like(change)
            own[:, : weights[f"{path}.weight"].shape[1]] = weights[f"{path}.weight"]
            weights[f"{path}.weight"] = own + strength * change
        elif name.endswith(".lora_B.bias"):
            weights[f"{name.removesuffix('.lora_B.bias')}.bias"] += strength * value
        elif ".norm_" in name and ".lora_" not in name:
            weights[name] = value
    wide = tiny_dit(**CONTROL, pooled_projection_dim=60).double()
    wide.load_state_dict(weights)
    wide.time_text_embed.time_proj.forward = lambda values: oracle_flux.exact_sinusoids(values).double()
    return wide


@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_one_step_in_float64(tiny_flux: dict[str, Path], loras: dict[str, Path], strength: float) -> None:
    """From a sample of the picture's latents and the noise, drawn in this order, to the latents after an Euler step."""
    base = oracle_flux.pipeline(tiny_flux["dev"], "control")
    dit = with_changes(base.transformer, load_file(loras["canny-lora"]), strength)
    generator = torch.Generator().manual_seed(7)
    resized = np.asarray(Image.fromarray(EDGES).resize((80, 64), Image.Resampling.LANCZOS), np.float32)
    with torch.no_grad():
        values = torch.from_numpy(resized).permute(2, 0, 1)[None] / 127.5 - 1
        mean, deviation = (getattr(base.vae.encode(values).latent_dist, name) for name in ("mean", "std"))
        drawn = torch.randn(mean.shape, generator=generator)
        noise = torch.randn(mean.shape, generator=generator)
        texts = base.encode_prompt("a red circle", None)[:2]
    config = base.vae.config
    seen = ((mean + deviation * drawn) - config.shift_factor) * config.scaling_factor
    x, channels = (packing.pack(one.double().numpy()) for one in (noise, seen))
    velocity = step(dit, x, channels, [one.double() for one in texts], 1.0, 30.0)
    expected = packing.unpack(x - velocity, h=8, w=10)
    for backend in BACKENDS:
        asked = CASES["control"] | {"control": (loras["canny-lora"], EDGES, strength), "steps": 1}
        error = relative(ours(tiny_flux["dev"], backend, asked).latents, expected)
        print(f"{backend}: {error:.1e} (limit {LATENTS})")
        assert error <= LATENTS


# Its authors' names, against diffusers' converter, which takes the published sizes alone


@pytest.mark.slow
def test_its_authors_names(tmp_path: Path) -> None:
    model = registry.published(catalog.KNOWN["flux-dev"])
    assert model is not None
    transformer = model.checkpoint["transformer"]
    tensors = flux_loras.authors_control_lora(transformer.plan.shapes, rank=2)
    save_file(tensors, tmp_path / "flux1-canny-dev-lora.safetensors")
    expected = _convert_bfl_flux_control_lora_to_diffusers(dict(tensors))
    names = model.family.lora_names(model.checkpoint)
    file = read_lora(tmp_path / "flux1-canny-dev-lora.safetensors")
    [changes] = fit(file, names).values()
    assert widened({"transformer": changes}, names)
    assert {name.rpartition(".")[0] for name in changes} == {
        key.removeprefix("transformer.").partition(".lora_")[0].removesuffix(".weight") for key in expected
    }
    # diffusers swaps the halves of both factors of the last norm: of `lora_A` these are ranks, not outputs
    last = expected["transformer.norm_out.linear.lora_A.weight"]
    expected["transformer.norm_out.linear.lora_A.weight"] = torch.cat(last.chunk(2)[::-1])
    worst = 0.0
    for name, [one] in changes.items():
        path = f"transformer.{name.rpartition('.')[0]}"
        if name.endswith(".bias"):
            theirs = expected[f"{path}.lora_B.bias"].double().numpy()
            made = one.added(np.zeros(transformer.plan.shapes[name], np.float32))
        elif f"{path}.weight" in expected:
            theirs = expected[f"{path}.weight"].double().numpy()
            made = one.added(np.ones(transformer.plan.shapes[name], np.float32)) + 1
        else:
            down, up = one.factors()
            a, b = (expected[f"{path}.lora_{side}.weight"].double().numpy() for side in "AB")
            x = np.random.default_rng(0).standard_normal(down.shape[1])
            made, theirs = up @ (down @ x), b @ (a @ x)
        worst = max(worst, relative(made, theirs))
    print(f"{len(changes)} parameters: at most {worst:.1e} (limit 1e-6)")
    assert worst < 1e-6
    file.close()


# Planted faults


def _before_the_image(patch: pytest.MonkeyPatch) -> None:
    """The picture's channels stand before those of the image."""
    from qwenimg.backends.torch.networks.denoisers.flux_dit import FluxTransformer

    forward = FluxTransformer.forward

    def swapped(self: Any, latents: Any, mask: Any, *more: Any) -> Any:
        return forward(self, mask, latents, *more)

    patch.setattr(FluxTransformer, "forward", swapped)


def _the_mean(patch: pytest.MonkeyPatch) -> None:
    """The picture's latents are their mean, where the draw of a sample is made all the same."""
    latents = vae.VAEHalves.latents

    def mean(self: Any, values: Any, draw: Any) -> Any:
        if draw is not None:
            draw((1, 16, values.shape[2] // 8, values.shape[3] // 8))
        return latents(self, values, None)

    patch.setattr(vae.VAEHalves, "latents", mean)


def _after_the_noise(patch: pytest.MonkeyPatch) -> None:
    """The sample is drawn after the noise."""
    seen, noise = control_pictures.seen, start.noise
    kept: list[Any] = []

    def later(model: Any, request: Any, pictures: Any, generator: Any) -> Any:
        kept.append(noise(model, request, generator))
        return seen(model, request, pictures, generator)

    patch.setattr(control_pictures, "seen", later)
    patch.setattr(start, "noise", lambda model, request, generator: kept.pop())


def _norms_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delta.Whole, "added", _only(delta.Whole.added, replaces=False))


def _biases_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delta.Whole, "added", _only(delta.Whole.added, replaces=True))


def _only(added: Any, *, replaces: bool) -> Any:
    return lambda self, weight: added(self, weight) if self.replaces == replaces else np.zeros_like(weight)


def _norms_scaled(patch: pytest.MonkeyPatch) -> None:
    """Norms go to their new weights by the strength."""
    added = delta.Whole.added
    patch.setattr(
        delta.Whole, "added", lambda self, w: added(self, w) * np.float32(self.strength if self.replaces else 1)
    )


def _half_not_widened(patch: pytest.MonkeyPatch) -> None:
    """The new inputs of the LoRA are left out."""
    added = delta.LowRank.added

    def left_out(self: Any, weight: Any) -> Any:
        change = added(self, weight)
        if self.inputs == 128:
            change[:, 64:] = 0
        return change

    patch.setattr(delta.LowRank, "added", left_out)


FAULTS: dict[str, Any] = {
    "the picture before the image": _before_the_image,
    "the mean in place of a sample": _the_mean,
    "the sample after the noise": _after_the_noise,
    "norms dropped": _norms_dropped,
    "biases dropped": _biases_dropped,
    "norms by the strength": _norms_scaled,
    "the new half left out": _half_not_widened,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(1)
def test_planted_faults_are_caught(
    tiny_flux: dict[str, Path], loras: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    expected, _ = theirs(tiny_flux["dev"], "control", [(loras["canny-lora"], 0.7)])
    FAULTS[fault](monkeypatch)
    error = relative(ours(tiny_flux["dev"], "cpu", with_lora(loras, "weaker")).latents, expected)
    print(f"{fault}: {error:.1e} (limit {LATENTS})")
    assert error > 10 * LATENTS
