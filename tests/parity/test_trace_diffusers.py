"""A trace of diffusers, under the networks' own paths, is checked as any passport is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trace_diffusers
from support.cli_runner import cli

from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Passport
from qwenimg.common.runtime.traced import Values


def traced(folder: Path, path: Path) -> Passport:
    found = trace_diffusers.trace(folder, (64, 48), 2)
    passport_file.write(path, found, overwrite=True)
    return found


@pytest.mark.sample(0)
def test_qwen_image(tiny_folder: Path, tmp_path: Path) -> None:
    found = traced(tiny_folder, tmp_path / "a.safetensors")
    names = [block.name for block in found.blocks]
    known = {"transformer.transformer_blocks.1", "transformer.norm_out", "vae.decoder.mid_block.attentions.0"}
    assert known <= set(names)
    assert len(names) > 20 and all(figure.failures == () for block in found.sides[0].figures for figure in block)
    for backend in ("cpu", "mlx"):
        ran = cli("parity", "check", str(tmp_path / "a.safetensors"), str(tiny_folder), "--backend", backend)
        print(ran.out.decode())
        assert ran.code == 0 and b"recorded on CPU" in ran.out and b"diffusers" in ran.out


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sd15", "sdxl"])
def test_stable_diffusion(folders: dict[str, Path], tmp_path: Path, model: str) -> None:
    found = traced(folders[model], tmp_path / "a.safetensors")
    kinds = {block.block for block in found.blocks}
    assert {"resnet", "attention", "tokens", "sampler", "time", "end"} <= kinds and len(found.blocks) > 40
    for backend in ("cpu", "mlx"):
        ran = cli("parity", "check", str(tmp_path / "a.safetensors"), str(folders[model]), "--backend", backend)
        assert ran.code == 0, ran.err


@pytest.mark.sample(0)
def test_a_wrong_value_of_the_other_program_is_seen(tiny_folder: Path, tmp_path: Path) -> None:
    """float64 is computed here, so what diffusers gave is judged as well."""
    found = traced(tiny_folder, tmp_path / "a.safetensors")
    first = found.blocks[0]
    given = first.arguments[0]
    assert isinstance(given, Values)
    moved = replace(first, arguments=(Values(given.dtype, 1.01 * given.array), *first.arguments[1:]))
    passport_file.write(tmp_path / "b.safetensors", replace(found, blocks=(moved, *found.blocks[1:])), overwrite=False)
    ran = cli("parity", "check", str(tmp_path / "b.safetensors"), str(tiny_folder), "--backend", "cpu")
    assert ran.code == 6 and first.name in ran.err
