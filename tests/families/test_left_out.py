"""What files have beside the weights, weights in 64 bits, and pad tokens of one dimension: read or left out, and told
in one line; the picture is that without them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli_runner import cli
from support.tiny_zimage import WIDE, tiny_dit, transformer_file

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.denoisers.zimage_dit import ZImageConfig
from qwenimg.common.networks.denoisers.zimage_names import LAYOUTS
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.quant.bits import widened
from qwenimg.common.quant.doubles import Doubles
from qwenimg.common.weights import left_out
from qwenimg.common.weights.values import check_values, read

ASKED = {"width": 40, "height": 24, "steps": 1, "seed": 4, "guidance": 3.0}
BESIDE = {
    "safety_checker.vision_model.x.weight": torch.ones(3),
    "control_model.input_blocks.0.0.weight": torch.ones(2, 2),
    "cond_stage_model.transformer.rotary_emb.inv_freq": torch.ones(4),
    "alphas_cumprod": torch.ones(4, dtype=torch.float64),
}
TABLES = ("rope.freqs_cis", "pos_embed.pos_freqs", "pos_embed.neg_freqs", "layers.0.rotary_emb.inv_freq", "freqs.0")


@pytest.mark.parametrize("backend", ["cpu", pytest.param("mlx", marks=pytest.mark.slow)])
@pytest.mark.sample(0)
def test_a_checkpoint_with_all_of_it(both, backend: str, tmp_path: Path) -> None:
    folder, file = both["sd1"]
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    tensors = load_file(file)
    doubles = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
    save_file(tensors | doubles | BESIDE, tmp_path / "a.safetensors")
    told: list[str] = []
    ours = qwenimg.load(tmp_path / "a.safetensors", backend, "fp32", notify=lambda kind, text: told.append(text))
    right = qwenimg.load(file, backend, "fp32")("a red circle", **ASKED)
    assert np.array_equal(ours("a red circle", **ASKED).latents, right.latents)
    [line] = [text for text in told if "left out" in text]
    print(line)
    assert len(line) < 300 and "safety checker (1 tensor)" in line and "rotary tables (1 tensor)" in line
    assert f"{len({*doubles, 'alphas_cumprod'})} tensors in 64 bits, read in float32" in line
    shown = cli("info", str(tmp_path / "a.safetensors"))
    assert shown.code == 0 and b"ControlNet (control_model.*) (1 tensor)" in shown.out


def test_what_is_too_large_for_float32_is_refused(both, tmp_path: Path) -> None:
    tensors = load_file(both["sd1"][1])
    name = next(name for name in tensors if name.endswith("out.2.bias"))
    for value in (1e300, float("nan"), float("inf")):
        save_file(
            tensors | {name: torch.full(tensors[name].shape, value, dtype=torch.float64)}, tmp_path / "a.safetensors"
        )
        shutil.copytree(both["sd1"][0] / "tokenizer", tmp_path / "tokenizer", dirs_exist_ok=True)
        opened = registry.open_model(tmp_path / "a.safetensors")
        with pytest.raises(ModelError, match="non-finite"):
            check_values(opened.checkpoint["unet"].plan)
        opened.checkpoint.close()


def test_doubles_are_rounded_once() -> None:
    values = np.random.default_rng(1).standard_normal(1000) * 10.0 ** np.random.default_rng(2).integers(-44, 38, 1000)
    made = Doubles().values([values.view(np.uint8)])
    assert made.dtype == np.float32 and np.array_equal(made, torch.from_numpy(values).float().numpy())


@pytest.mark.parametrize("authors", [True, False])
def test_pad_tokens_of_one_dimension_and_tables(tmp_path: Path, authors: bool) -> None:
    model = tiny_dit(**WIDE)
    made = transformer_file(model) if authors else {key: value.clone() for key, value in model.state_dict().items()}
    for name in ("x_pad_token", "cap_pad_token"):
        assert made[name].shape == (1, 96)
        made[name] = made[name][0].clone()
    save_file(made | {name: torch.ones(4) for name in TABLES}, tmp_path / "z.safetensors")
    like = ZImageConfig(dim=96, n_heads=3, axes_dims=(8, 12, 12), axes_lens=(640, 48, 48))
    part = open_part(LAYOUTS, tmp_path / "z.safetensors", like, "transformer")
    for name, value in model.state_dict().items():
        entry = part.plan.entries[zimage_dit.rename(name)]
        assert np.array_equal(widened(read(entry)), value.numpy().reshape(entry.shape)), name
    part.plan.close()
    for shape in ((95,), (96, 1), (1, 1, 96), (2, 48)):
        save_file(made | {"x_pad_token": torch.ones(shape)}, tmp_path / "bad.safetensors")
        with pytest.raises(ModelError, match="x_pad_token' has shape"):
            open_part(LAYOUTS, tmp_path / "bad.safetensors", like, "transformer")


WIDTHLESS = ("mistral3", "gemma2")  # networks without widths of their own, which have the names of others


def test_no_weight_of_a_network_is_left_out() -> None:
    names = {
        name
        for network in registry.networks()
        if network.kind not in WIDTHLESS
        for name in network.manifest(network.config())
    }
    assert len(names) > 1000 and not [name for name in names if left_out.kind(name)]
    assert all(left_out.kind(name) == "rotary tables" for name in TABLES)
    for name in ("safety_checker", "control_modelx.a", "freqs_proj.weight", "a.inv_freq.weight", "my_freqs"):
        assert left_out.kind(name) is None
