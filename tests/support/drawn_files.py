"""Pictures from files of weights: what the tests of the families' files share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from qwenimg.common.families import registry
from support.cli_runner import cli
from support.comfy_files import comfy
from support.gguf_files import fitting, write
from support.relative import relative

Tensors = dict[str, torch.Tensor]
Draw = Callable[[Path], Any]
"""Draws with a file, and returns the result."""


def saved(path: Path, tensors: Mapping[str, torch.Tensor], notes: Any = None) -> Path:
    """Write a file, in which no tensors share memory."""
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, path, notes)
    return path


def check_eight_bits(folder: Path, tensors: Tensors, layout: str, chosen: Callable[[str], bool], draw: Draw) -> None:
    """Assert that a file of ComfyUI's in 8 bits draws what a file of its values draws."""
    made = comfy({name: value.contiguous() for name, value in tensors.items()}, layout, chosen)
    codes = draw(saved(folder / "codes.safetensors", made.tensors, made.notes))
    values = draw(saved(folder / "values.safetensors", made.values))
    error = relative(codes.latents, values.latents)
    print(f"{layout}: {error:.1e}")
    assert error < 1e-5 and codes.pixels.std() > 10  # rotated products sum in another order


def check_quantized(model: Path, out: Path, draw: Callable[..., Any], expected: Any, bits: str = "8") -> None:
    """Assert that a tiny model under -q draws nearly what it draws, and converted so to the folder `out` the same as
    under -q. draw: with a folder and keywords of `qwenimg.load`."""
    made = draw(model, quantize=bits)
    error = relative(made.latents, expected.latents)
    print(f"-q {bits}: latents differ by {error:.1e}")
    assert 1e-5 < error < 0.1
    assert cli("convert", str(model), str(out), "-q", bits, "--quiet").code == 0
    assert np.array_equal(draw(out).latents, made.latents)


def check_gguf(
    file: Path, tensors: Tensors, architecture: str, type: str, draw: Draw, expected: Any, family: str
) -> None:
    """Assert that a GGUF file of a tiny model draws what it is made of draws, nearly in 8 bits, and is this family's
    alone."""
    arrays = {key: value.numpy() for key, value in tensors.items()}
    write(file, {key: (value, fitting(value, type)) for key, value in arrays.items()}, architecture)
    error = relative(draw(file).latents, expected.latents)
    print(f"{type}: latents differ by {error:.1e}")
    assert np.isfinite(error) and (error == 0 if type == "F32" else 0 < error < 0.1)
    kind = registry.identify_file(file)
    assert kind is not None and {one.name for one in kind.families} == {family}
