"""ComfyUI's files in rotated 8 and 4 bits draw what a folder with their values draws, which are computed by the
published formulas in float64; and their weights stay in 8 bits, with LoRAs, streamed and converted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import tiny_qwen21
from support.cli_runner import cli
from support.family_cases import ASKED, BACKENDS, PROMPT, given_a_picture, see_few_pixels
from support.folder_tensors import tensors
from support.rotated_models import KINDS, write_wide, written

import qwenimg
from qwenimg import Pipeline, Result
from qwenimg.common.families import registry
from qwenimg.common.quant.rotated import RotatedInt8
from qwenimg.common.weights import streaming
from qwenimg.common.weights.storage import Packed


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind, written once."""
    place = tmp_path_factory.mktemp("wide")
    return lambda kind: write_wide(kind, place / kind)


@pytest.fixture(autouse=True)
def few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    see_few_pixels(monkeypatch)
    tiny_qwen21.see_small_pictures(monkeypatch)


def drawn(folder: Path, backend: str, lora: str = "", **options: Any) -> tuple[Result, Pipeline]:
    pipe = qwenimg.load(folder, backend=backend, **{"precision": "fp32"} | options)
    pipe = given_a_picture(pipe) if pipe.model.inputs.fewest else pipe
    return pipe(PROMPT, **ASKED, **({"lora": lora} if lora else {})), pipe


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_picture_is_that_of_the_values(
    wide: Callable[[str], Path], tmp_path: Path, kind: str, backend: str
) -> None:
    coded, plain = written(wide(kind), tmp_path, "convrot")
    rotated = sum(name.endswith(".comfy_quant") for name in tensors(coded / "transformer"))
    (one, _), (other, _) = (drawn(folder, backend) for folder in (coded, plain))
    pixels = np.abs(one.pixels.astype(int) - other.pixels.astype(int)).max()
    most = np.abs(one.latents - other.latents).max() / np.abs(other.latents).max()
    print(f"{kind} on {backend}: {rotated} layers rotate, pixels {pixels}, latents {most:.1e}")
    assert pixels <= 1 and rotated >= 15


@pytest.fixture(scope="module")
def model(wide: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A FLUX.2 model, in codes and with their values."""
    return written(wide("flux2-base"), tmp_path_factory.mktemp("model"), "convrot")


@pytest.mark.sample(0)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["w4a4", "w4a8"])
def test_formats_in_fewer_bits(wide: Callable[[str], Path], tmp_path: Path, layout: str, backend: str) -> None:
    coded, plain = written(wide("qwen21"), tmp_path, layout)
    (one, pipe), (other, _) = (drawn(folder, backend) for folder in (coded, plain))
    kept = [e for e in pipe.model.checkpoint["transformer"].plan.entries.values() if isinstance(e.storage, Packed)]
    assert kept and all(isinstance(entry.storage.code, RotatedInt8) for entry in kept)
    assert np.abs(one.pixels.astype(int) - other.pixels.astype(int)).max() <= 1


@pytest.mark.sample(0)
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_a_lora_streamed_and_with_fewer_bits(model: tuple[Path, Path], tmp_path: Path, backend: str) -> None:
    """A LoRA beside the codes is the one in the values; streamed blocks give the same bits; -q changes nothing here."""
    coded, plain = model
    rng, layer = np.random.default_rng(1), "transformer.transformer_blocks.0.attn.to_q"
    width = tensors(coded / "transformer")["transformer_blocks.0.attn.to_q.weight"].shape[1]
    low = {f"{layer}.lora_{x}.weight": rng.standard_normal(s) for x, s in (("A", (4, width)), ("B", (width, 4)))}
    save_file({name: torch.from_numpy(v).float() for name, v in low.items()}, tmp_path / "l.safetensors")
    lora = f"{tmp_path / 'l.safetensors'}:0.2"
    (one, _), (other, _) = (drawn(folder, backend, lora=lora) for folder in (coded, plain))
    without, _ = drawn(coded, backend)
    assert np.abs(one.pixels.astype(int) - other.pixels.astype(int)).max() <= 1
    assert not np.array_equal(one.pixels, without.pixels)
    streamed: list[int] = []
    fitting = streaming.stream_to_fit

    def half(plan: Any, streamable: Any, budget: int, moved: Any) -> Any:
        less = fitting(plan, streamable, min(budget, streaming.peak_weight_bytes(plan, moved) * 4 // 5), moved)
        streamed.append(sum(bool(entry.block) for entry in less.entries.values()))
        return less

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "stream_to_fit", half)
        limited, _ = drawn(coded, backend, max_memory="1000GB")
    assert max(streamed, default=0) > 0, "nothing was streamed"
    assert np.array_equal(limited.pixels, without.pixels)
    fewer, _ = drawn(coded, backend, quantize="transformer=4")
    assert np.abs(fewer.pixels.astype(int) - without.pixels).max() < 255


@pytest.mark.sample(0)
def test_converted_it_is_the_same_file_format_and_picture(model: tuple[Path, Path], tmp_path: Path) -> None:
    coded, _ = model
    assert cli("convert", str(coded), str(tmp_path / "made")).code == 0
    made, source = tensors(tmp_path / "made" / "transformer"), tensors(coded / "transformer")
    names = [name for name in source if name.endswith(".comfy_quant")]
    assert names and {name for name in made if name.endswith(".comfy_quant")} == set(names)
    for name in names:
        layer = name.removesuffix(".comfy_quant")
        assert json.loads(bytes(made[name].tolist())) == json.loads(bytes(source[name].tolist()))
        for part in ("weight", "weight_scale"):
            assert torch.equal(made[f"{layer}.{part}"], source[f"{layer}.{part}"])
    config = json.loads((tmp_path / "made" / "transformer" / "config.json").read_bytes())
    assert "quantization" not in config
    for backend in BACKENDS:
        (one, _), (other, _) = drawn(tmp_path / "made", backend), drawn(coded, backend)
        assert np.array_equal(one.pixels, other.pixels)


@pytest.mark.sample(0)
def test_info_and_plan(wide: Callable[[str], Path], tmp_path: Path) -> None:
    """info says the format, or why no model is drawn with a file; plan counts 8 bits."""
    coded, plain = written(wide("qwen"), tmp_path, "convrot")
    ran = cli("info", str(coded))
    assert ran.code == 0 and b"in 8 bits, rotated by groups of " in ran.out, ran
    checkpoint = registry.open_model(coded).checkpoint
    kept = [entry for entry in checkpoint["transformer"].plan.entries.values() if isinstance(entry.storage, Packed)]
    assert kept and all(entry.nbytes == entry.shape[0] * (entry.shape[1] + 4) for entry in kept)
    checkpoint.close()
    ran = cli("info", str(coded / "transformer" / "diffusion_pytorch_model.safetensors"))
    assert ran.code == 0 and b"rotated by groups of " in ran.out, ran
    said = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    weights: dict[str, dict[str, torch.Tensor]] = {
        "format nvfp4": {"a.weight": torch.zeros(4, 32, dtype=torch.uint8), "a.comfy_quant": said},
        "bitsandbytes": {"a.weight": torch.zeros(4, 32, dtype=torch.uint8), "a.weight.absmax": torch.ones(4)},
        "is I64, which is not read": {"a.weight": torch.zeros(4, dtype=torch.int64)},
        "are those of no model": {"a.weight": torch.zeros(4)},
    }
    for words, made in weights.items():
        save_file(made, tmp_path / "a.safetensors")
        ran = cli("info", str(tmp_path / "a.safetensors"))
        (line,) = [line for line in ran.out.decode().splitlines() if line.startswith("not used here: ")]
        assert ran.code == 0 and words in line, line
    for path in (coded, plain):
        assert cli("plan", str(path)).code == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_check_compares_their_products(model: tuple[Path, Path], tmp_path: Path, backend: str) -> None:
    coded, _ = model
    asked = ("--backend", backend, "--precision", "bf16", "--steps", "2", "--size", "52x36", "--check")
    ran = cli("a cat", "-m", str(coded), *asked, "-o", str(tmp_path / "a.png"))
    (line,) = [
        line for line in ran.err.splitlines() if line.startswith("check: quantized products: largest difference")
    ]
    print(f"{backend}: {line}")
    assert ran.code == 0 and "warning: check" not in ran.err, ran


def test_a_descriptor_that_is_wrong_ends_with_5(model: tuple[Path, Path], tmp_path: Path) -> None:
    coded, _ = model
    shutil.copytree(coded, tmp_path / "m")
    path = tmp_path / "m" / "transformer" / "diffusion_pytorch_model.safetensors"
    held = tensors(path.parent)
    name = next(name for name in held if name.endswith(".comfy_quant"))
    said = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 6})
    save_file(held | {name: torch.tensor(list(said.encode()), dtype=torch.uint8)}, path)
    cli("a cat", "-m", str(tmp_path / "m"), "-o", str(tmp_path / "a.png")).refused(5, "convrot_groupsize 6")
