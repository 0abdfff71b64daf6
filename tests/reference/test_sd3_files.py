"""Stable Diffusion 3 in files with its authors' names: every tensor is that of the folder, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.gguf_files import fitting, write
from support.refusals import refused
from support.relative import largest
from support.tiny_sd3 import KINDS, WIDE_DIT, tiny_dit, transformer_file

from qwenimg.common.networks.denoisers import sd3_dit, sd3_names
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.weights import part_names
from qwenimg.common.weights.values import read

PREFIXES = part_names.DENOISERS
Q8_0 = 0.02  # relative L2 of values in 8 bits with a scale for 32


def opened(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """The configuration of the transformer in a file, and its parameters."""
    part = open_part(sd3_names.LAYOUTS, path, SD3Config(), "transformer")
    return part.config, {name: read(entry) for name, entry in part.plan.entries.items()}


def expected(model: torch.nn.Module) -> dict[str, np.ndarray]:
    values = {sd3_dit.rename(key): value.numpy() for key, value in model.state_dict().items()}
    return values | {sd3_dit.TABLE: values[sd3_dit.TABLE][0]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_in_the_tests_are_right(kind: str) -> None:
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    model = tiny_dit(kind, **WIDE_DIT)
    theirs = convert_sd3_transformer_checkpoint_to_diffusers(transformer_file(model))
    assert theirs.keys() == model.state_dict().keys()
    assert all(torch.equal(theirs[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_a_file_has_the_tensors_of_the_folder(tmp_path: Path, kind: str, prefix: str) -> None:
    model, path = tiny_dit(kind, **WIDE_DIT), tmp_path / "it.safetensors"
    save_file({prefix + key: value.contiguous() for key, value in transformer_file(model).items()}, path)
    config, values = opened(path)
    wanted = expected(model)
    assert values.keys() == wanted.keys()
    assert all(np.array_equal(values[name], wanted[name]) for name in wanted)
    fields = {name: model.config[name] for name in sd3_dit.SD3Config.__dataclass_fields__}
    assert config == sd3_dit.SD3Config(**(fields | {"dual_attention_layers": tuple(fields["dual_attention_layers"])}))


def test_a_file_without_the_table(tmp_path: Path) -> None:
    model, path = tiny_dit(**WIDE_DIT), tmp_path / "it.safetensors"
    save_file({key: value.contiguous() for key, value in transformer_file(model, table=False).items()}, path)
    config, values = opened(path)
    assert values.keys() == expected(model).keys() - {sd3_dit.TABLE}
    assert config.pos_embed_max_size == 384


@pytest.mark.parametrize("type", ["F16", "Q8_0"])
def test_gguf(tmp_path: Path, type: str) -> None:
    model, path = tiny_dit(**WIDE_DIT), tmp_path / "it.gguf"
    tensors = {key: value.numpy() for key, value in transformer_file(model).items()}
    # The table too is quantized by some converters, with its three dimensions.
    kinds = {key: type if key == "pos_embed" else fitting(value, type) for key, value in tensors.items()}
    write(path, {key: (value, kinds[key]) for key, value in tensors.items()}, "sd3")
    _, values = opened(path)
    worst = largest(values, expected(model))
    print(f"{type}: at most {worst:.1e} (limit {Q8_0})")
    assert worst <= Q8_0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("final_layer.linear.weight"), "lacks tensor 'final_layer.linear.weight'"),
        (lambda t: t.pop("joint_blocks.1.x_block.mlp.fc2.bias"), "lacks tensor 'joint_blocks.1.x_block.mlp.fc2.bias'"),
        (lambda t: t.update(pos_embed=torch.zeros(1, 360, 128)), "pos_embed"),
        (lambda t: t.update({"x_embedder.proj.weight": torch.zeros(0, 16, 2, 2)}), "'num_attention_heads' is 0"),
        (lambda t: t.update({"joint_blocks.0.x_block.attn.ln_q.weight": torch.ones(63)}), "attention_head_dim"),
        (lambda t: t.update({"joint_blocks.0.x_block.attn.ln_q.weight": torch.ones(0)}), "'attention_head_dim' is 0"),
        (lambda t: t.update({"joint_blocks.0.x_block.attn.ln_q.weight": torch.tensor(1.0)}), "has not 1 dimensions"),
        (lambda t: t.update({"x_embedder.proj.weight": torch.zeros(128, 16, 3, 3)}), "x_embedder.proj.weight"),
        (
            lambda t: t.update({"joint_blocks.2.context_block.attn.qkv.weight": torch.zeros(385, 128)}),
            "joint_blocks.2.context_block.attn.qkv.weight",
        ),
    ],
    ids=["no end", "no bias", "table", "empty", "odd head", "no head", "flat head", "patch", "not thirds"],
)
@pytest.mark.sample(3)
def test_broken_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    tensors, path = transformer_file(tiny_dit(**WIDE_DIT)), tmp_path / "it.safetensors"
    change(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    assert message in refused(lambda: opened(path))
