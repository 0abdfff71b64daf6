"""LoRAs beside the weights: the same pictures as in them, by themselves and on codes, and changed without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.cli_runner import Library, cli
from support.crossed import crossed
from support.family_cases import BACKENDS
from support.lora_cases import LAYERS, write_lora

import qwenimg
from qwenimg import UsageError
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.request import lora_text
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.loras import Loras
from qwenimg.common.weights.storage import Packed
from qwenimg.common.weights.values import read, read_branch, read_quantized

ASKED: dict[str, Any] = {"width": 52, "height": 36, "steps": 2, "guidance": 3.0, "seed": 7}
MODEL = Path(qwenimg.__file__).parent / "common" / "data" / "shapes-v1"


@pytest.fixture(params=["qwen", "sdxl", "z-image"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tiny: dict[str, Path]) -> Path:
    return tiny[kind]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """The files and places of which data is read."""
    seen: list[tuple[Path, int]] = []
    original = OpenFile.fill

    def fill(self: OpenFile, view: memoryview, begin: int) -> None:
        seen.append((self.path, begin))
        original(self, view, begin)

    monkeypatch.setattr(OpenFile, "fill", fill)
    return seen


@pytest.mark.parametrize(("kind", "backend"), crossed(["qwen", "sdxl", "z-image"], BACKENDS), indirect=["kind"])
@pytest.mark.sample(0)
def test_beside_the_weights_is_in_them(
    kind: str, backend: str, folder: Path, tmp_path: Path, reads: list[tuple[Path, int]]
) -> None:
    """Several at strengths of both signs, in the text encoders too; then other strengths, of which no weight knows."""
    a, b = (write_lora(folder, kind, tmp_path / f"{i}.safetensors", 10 * i) for i in (1, 2))
    pipe = qwenimg.load(folder, backend, "fp32")
    plain = pipe("a dog", **ASKED)
    model: Any = pipe.model
    model = model.experts()[0].checkpoint if kind == "sdxl" else model.checkpoint
    denoiser = model["unet" if kind == "sdxl" else "transformer"].plan.when(ALWAYS)
    matrices = [entry.source.first for entry in denoiser.entries.values() if len(entry.shape) == 2]
    kept = {(piece.file.path, piece.begin) for piece in matrices}
    for lora in (f"{a}:0.7; {b}:-0.4", f"{a}:-1; {b}:0", "none"):
        reads.clear()
        side = pipe("a dog", lora=lora, lora_mode="side", **ASKED)
        again = kept & set(reads)
        fused = qwenimg.load(folder, backend, "fp32")("a dog", lora=lora, lora_mode="fuse", **ASKED)
        error, effect = (np.abs(one.latents - side.latents).max() for one in (fused, plain))
        print(f"{lora}: {error:.1e}, the LoRA's effect {effect:.1e}")
        assert not again
        assert error < 1e-4 < effect / 100 if lora != "none" else error == effect == 0
    assert side.recipe["lora_mode"] == "side" and "lora_mode" not in plain.recipe


@pytest.mark.sample(0)
def test_on_codes_it_is_beside_them_and_they_stay(tmp_path: Path) -> None:
    """The built-in model in 8 and 4 bits with the LoRA beside them, in them, and converted with it; on both backends
    alike. PSNR against the LoRA in float32 weights."""
    rng, width = np.random.default_rng(5), 128
    low = {
        f"transformer.transformer_blocks.{block}.attn.{name}.lora_{half}.weight": rng.standard_normal(shape) * 0.4
        for block in range(6)
        for name in ("to_q", "to_v")
        for half, shape in (("A", (4, width)), ("B", (width, 4)))
    }
    save_file({name: value.astype(np.float32) for name, value in low.items()}, tmp_path / "l.safetensors")
    lora, ask = str(tmp_path / "l.safetensors"), {"seed": 1, "width": 128, "height": 128, "steps": 4}

    def drawn(model: Path, backend: str, quantize: str | None = None, **more: Any) -> np.ndarray:
        made = qwenimg.load(model, backend, "fp32", quantize=quantize)("a red circle", **ask, **more)
        return made.pixels.astype(np.float64)

    dense = drawn(MODEL, "cpu", lora=lora)
    for policy, least in (("8", 40.0), ("4", 22.0)):
        beside = {backend: drawn(MODEL, backend, policy, lora=lora) for backend in BACKENDS}
        fused = drawn(MODEL, "cpu", policy, lora=lora, lora_mode="fuse")
        assert cli("convert", str(MODEL), str(tmp_path / policy), "-q", policy, "--lora", lora).code == 0
        assert np.array_equal(drawn(tmp_path / policy, "cpu"), fused)
        assert np.abs(beside["cpu"] - beside["mlx"]).max() <= 1
        side, inside = (psnr(one, dense) for one in (beside["cpu"], fused))
        effect = psnr(beside["cpu"], drawn(MODEL, "cpu", policy))
        print(f"-q {policy}: beside {side:.1f} dB, in the weights {inside:.1f} dB; without it {effect:.1f} dB")
        assert min(side, inside) > max(least, effect + 5)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(np.mean((a - b) ** 2), 1e-9)))


@pytest.mark.sample(1)
def test_what_is_beside_is_the_sum_of_all(kind: str, folder: Path, tmp_path: Path) -> None:
    """up down of every weight against the fused one; it counts as memory, and fused kinds are not beside."""
    a, b = (write_lora(folder, kind, tmp_path / f"{i}.safetensors", 10 * i) for i in (1, 2))
    opened = registry.open_model(folder)
    loras = Loras(lambda: opened.family.lora_names(opened.checkpoint))
    plans = {
        mode: opened.checkpoint.with_deltas(loras.deltas((Lora(str(a), 0.7), Lora(str(b), -0.4)), mode))
        for mode in ("fuse", "side", "auto")
    }
    worst, seen = 0.0, 0
    for name, part in opened.checkpoint.components.items():
        for key, entry in part.plan.entries.items():
            side, fuse, usual = (plans[mode][name].plan.entries[key] for mode in ("side", "fuse", "auto"))
            assert usual.deltas == () or (usual.fused and not usual.branch)
            if not side.branch:
                assert read_branch(side) is None and (not side.fused or len(entry.shape) == 4)
                continue
            found = read_branch(side)
            assert found is not None
            down, up = found
            assert down.shape == (4, entry.shape[1]) and up.shape == (entry.shape[0], 4)
            assert side.nbytes == entry.nbytes + 4 * 4 * sum(entry.shape) and fuse.nbytes == entry.nbytes
            exact = read(entry).astype(np.float64) + up.astype(np.float64) @ down.astype(np.float64)
            worst, seen = max(worst, float(np.abs(read(fuse) - exact).max())), seen + 1
    print(f"{seen} weights, {worst:.1e} from the sum")
    convolutions = 2 if kind == "sdxl" else 0
    assert worst < 1e-5 and seen == sum(len(layers) for _, layers in LAYERS[kind].values()) - convolutions
    loras.close()
    opened.checkpoint.close()


def test_kinds_that_are_no_product_are_fused(tmp_path: Path) -> None:
    """DoRA goes into the codes of a dense source, and with it all others of that weight."""
    rng, layer = np.random.default_rng(2), "transformer.transformer_blocks.{}.attn.to_q"
    halves = {half: rng.standard_normal(shape).astype(np.float32) for half, shape in (("A", (4, 128)), ("B", (128, 4)))}
    low = {f"{layer.format(i)}.lora_{half}.weight": value for i in (1, 2) for half, value in halves.items()}
    save_file(low, tmp_path / "plain.safetensors")
    save_file(low | {f"{layer.format(1)}.dora_scale": np.ones((128, 1), np.float32)}, tmp_path / "dora.safetensors")
    opened = registry.open_model(MODEL, LoadOptions(quantize="8"))
    loras = Loras(lambda: opened.family.lora_names(opened.checkpoint))
    deltas = loras.deltas([Lora(str(tmp_path / name)) for name in ("plain.safetensors", "dora.safetensors")])
    checkpoints = (opened.checkpoint, opened.checkpoint.with_deltas(deltas))
    before, after = (one["transformer"].plan.entries for one in checkpoints)
    first, second = (f"transformer_blocks.{i}.attn.to_q.weight" for i in (1, 2))
    assert isinstance(before[first].storage, Packed)
    assert len(after[first].fused) == len(after[second].branch) == 2
    assert not np.array_equal(read_quantized(after[first]).codes, read_quantized(before[first]).codes)
    assert np.array_equal(read_quantized(after[second]).codes, read_quantized(before[second]).codes)
    loras.close()
    opened.checkpoint.close()


def test_options(library: Library) -> None:
    for args, wanted in (
        (["--lora-mode", "side"], "side"),
        (["--lora-mode", "fuse"], "fuse"),
        ([], None),
    ):
        assert cli("x", "-o", "x.png", "--overwrite", *args).code == 0
        assert library.asked[-1].get("lora_mode") == wanted, args
    cli("x", "--lora-side").refused(2, "--lora-mode side")
    cli("x", "--lora-mode", "beside").refused(2, "is not one of auto, fuse, side")
    with pytest.raises(UsageError, match="fuse, side"):
        lora_text.mode("no")
