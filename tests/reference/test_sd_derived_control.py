"""ControlNets that are changes of the base's UNet: differences, and Control-LoRAs, against the ControlNets that they
stand for, made in float64 of their definition."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli_runner import cli
from support.file_mutants import assert_line, damaged
from support.refusals import refused
from support.relative import relative
from support.tiny_controlnet import authors_names, tiny_controlnet
from support.tiny_sd import _SMALL, UNETS

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.families.stable_diffusion.control import open_control

BACKENDS = ("cpu", "mlx")
SAME = 2e-6  # relative L2 of latents: one rounding of a weight in float32, which the sum in float64 has not
RANK = 3
PICTURE = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
ASKED: dict[str, Any] = {"width": 64, "height": 48, "steps": 3, "guidance": 4.0, "seed": 3, "sampler": "euler"}


def base_names(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The weights of the base that a ControlNet has too, by its authors' names."""
    model = tiny_controlnet(UNETS[kind] | _SMALL)
    weights = load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")
    own = {name for name, _ in model.named_parameters() if name not in weights}
    model.load_state_dict({name: weights.get(name, tensor) for name, tensor in model.state_dict().items()})
    names = authors_names(model, "")
    alone = tiny_controlnet(UNETS[kind] | _SMALL)
    for parameter in alone.parameters():
        parameter.data.zero_()
    for name, parameter in alone.named_parameters():
        parameter.data.fill_(1.0 if name in own else 0.0)
    marked = authors_names(alone, "")
    return {name: tensor for name, tensor in names.items() if not marked[name].any()}


def write_difference(folder: Path, kind: str, path: Path) -> Path:
    """Write the difference of a ControlNet from the base, and the ControlNet beside it."""
    base, net = base_names(folder, kind), authors_names(tiny_controlnet(UNETS[kind] | _SMALL), "")
    parts = {name: tensor.double() - base[name].double() if name in base else tensor for name, tensor in net.items()}
    tensors = {f"control_model.{name}": tensor.float().contiguous() for name, tensor in parts.items()}
    save_file(tensors | {"difference": torch.zeros(0)}, path)
    summed = {name: (base[name].double() + tensors[f"control_model.{name}"]).float() if name in base else net[name]
              for name in net}  # fmt: skip
    save_file({f"control_model.{name}": tensor for name, tensor in summed.items()}, path.with_name("whole.safetensors"))
    return path


def write_control_lora(folder: Path, kind: str, path: Path) -> Path:
    """Write a Control-LoRA of random factors, biases of its own, norms of the base, and the ControlNet beside it."""
    base, net = base_names(folder, kind), authors_names(tiny_controlnet(UNETS[kind] | _SMALL), "")
    generator, written, whole = torch.Generator().manual_seed(4), {"lora_controlnet": torch.zeros(0)}, {}
    for name, tensor in net.items():
        if name not in base or name.endswith("bias"):
            written[name] = whole[name] = tensor
        elif tensor.ndim == 1:
            whole[name] = base[name]
        else:
            outputs, inputs, *kernel = tensor.shape
            more = [1] * len(kernel)
            up = torch.randn(outputs, RANK, *more, generator=generator) * 0.2
            down = torch.randn(RANK, inputs, *kernel, generator=generator) * 0.2
            module = name.removesuffix(".weight")
            written |= {f"{module}.up": up, f"{module}.down": down}
            product = up.double().flatten(1) @ down.double().flatten(1)
            whole[name] = (base[name].double() + product.reshape(tensor.shape)).float()
    save_file(written, path)
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, path.with_name("whole.safetensors"))
    return path


WRITERS = {"difference": write_difference, "control-lora": write_control_lora}
CASES = [("difference", "sd15"), ("difference", "sd21"), ("control-lora", "sdxl"), ("control-lora", "sd15")]


@pytest.mark.parametrize(("form", "kind"), CASES)
@pytest.mark.sample(1)
def test_draws_what_the_whole_network_draws(folders, tmp_path: Path, form: str, kind: str) -> None:
    path = WRITERS[form](folders[kind], kind, tmp_path / "net.safetensors")
    for backend in BACKENDS:
        with closing(qwenimg.load(folders[kind], backend=backend, precision="fp32")) as pipe:
            made, whole = (
                pipe("a circle", control=(net, PICTURE), **ASKED).latents
                for net in (path, tmp_path / "whole.safetensors")
            )
            plain = pipe("a circle", **ASKED).latents
        error, moved = relative(made, whole), relative(made, plain)
        print(f"{form}, {kind}, {backend}: {error:.1e} ({SAME}), moved by {moved:.2f}")
        assert error <= SAME and moved > 0.01


@pytest.mark.sample(0)
def test_quantized_and_limited(folders, tmp_path: Path) -> None:
    """With -q the sums are quantized; in little memory they are streamed. The base itself stays as it is."""
    path = write_control_lora(folders["sdxl"], "sdxl", tmp_path / "net.safetensors")
    for backend in BACKENDS:
        asked = ASKED | {"control": (path, PICTURE)}
        with closing(qwenimg.load(folders["sdxl"], backend=backend, precision="fp32")) as pipe:
            plain, usual = pipe("a circle", **ASKED).latents, pipe("a circle", **asked).latents
            assert np.array_equal(pipe("a circle", **ASKED).latents, plain)
        with closing(qwenimg.load(folders["sdxl"], backend=backend, precision="fp32", quantize="8")) as pipe:
            packed = relative(pipe("a circle", **asked).latents, usual)
        print(f"{backend}: 8 bits {packed:.1e}")
        assert packed < 0.1


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.sample(0)
def test_mutants_and_other_bases_are_refused(folders, tmp_path: Path, form: str) -> None:
    path = WRITERS[form](folders["sd15"], "sd15", tmp_path / "net.safetensors")
    whole, chance, verdicts = path.read_bytes(), random.Random(5), Counter[str]()
    header = 8 + int.from_bytes(whole[:8], "little")
    tensors = {name: one.clone() for name, one in load_file(path).items()}  # the file is written again
    with closing(registry.open_model(folders["sdxl"]).checkpoint) as checkpoint:
        assert "is a ControlNet for a model with 60 channels in a text" in refused(open_control, path, checkpoint)
    with closing(registry.open_model(folders["sd15"]).checkpoint) as checkpoint:
        open_control(path, checkpoint).close()
        open_control(path, checkpoint).close()  # the base's files stay open
        for _ in range(100):
            path.write_bytes(damaged(whole, header, chance))
            try:
                open_control(path, checkpoint).close()
                verdicts["read"] += 1
            except ModelError as error:
                assert_line(str(error), path.name)
                verdicts["refused"] += 1
        some = next(name for name in tensors if name.endswith(("zero_convs.1.0.weight", "attn1.to_q.up")))
        for change, said in (
            ({some: None}, "lacks tensor"), ({some: torch.ones(2, 2)}, "net.safetensors"),
            ({"more": torch.ones(2)}, "more"), ({some: tensors[some].long()}, "net.safetensors"),
        ):  # fmt: skip
            save_file({name: one for name, one in (tensors | change).items() if one is not None}, path)
            assert said in refused(open_control, path, checkpoint)
    print(f"{form}: {dict(verdicts)}")
    assert verdicts["refused"]
    tensors[some] = torch.full_like(tensors[some], torch.inf)
    save_file(tensors, path)
    with (
        closing(qwenimg.load(folders["sd15"], backend="cpu", precision="fp32")) as pipe,
        pytest.raises(ModelError) as e,
    ):
        pipe("x", control=(path, PICTURE), **ASKED)
    assert "net.safetensors" in str(e.value) and "finite" in str(e.value)


def test_info_tells_the_kind(folders, tmp_path: Path) -> None:
    for form, words in (("difference", b"a difference from the base"), ("control-lora", b"a Control-LoRA")):
        told = cli("info", str(WRITERS[form](folders["sd15"], "sd15", tmp_path / f"{form}.safetensors")))
        assert told.code == 0 and words in told.out, told
