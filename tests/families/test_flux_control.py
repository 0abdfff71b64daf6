"""FLUX.1 Canny and Depth, and LoRAs with which dev sees a control picture, in every way that dev has: files, fewer
bits, streaming, plans, passports, replays, refusals and mutants."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support import flux_loras
from support.cli_runner import cli
from support.gguf_files import fitting, write
from support.mflux_folders import save_as_mflux
from support.opened_parts import stream_half
from support.relative import relative
from support.tiny_flux import transformer_file, write_tiny_flux

import qwenimg
from qwenimg import ModelError, Pipeline, UsageError
from qwenimg.common.families.flux.variants import CANNY, DEPTH
from qwenimg.common.hub.describe import describe
from qwenimg.common.parity import check, record, summary
from qwenimg.common.request.control_text import Control

BACKENDS = ("cpu", "mlx")
RNG = np.random.default_rng(7)
EDGES, OTHER = (RNG.integers(0, 256, (52, 70, 3), np.uint8) for _ in range(2))
ASKED: dict[str, Any] = {"prompt": "a ring", "width": 64, "height": 48, "steps": 2, "seed": 5}
OWN: dict[str, Any] = ASKED | {"control": ("", EDGES), "guidance": 10.0}
WIDE = {"attention_head_dim": 32, "joint_attention_dim": 64, "pooled_projection_dim": 64, "axes_dims_rope": [8, 12, 12]}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny folders whose rows are whole blocks of codes, and a LoRA for dev."""
    place = tmp_path_factory.mktemp("flux")
    for kind in ("canny", "dev", "schnell"):
        write_tiny_flux(place / f"flux-{kind}", kind, wide=True)
    save_file(flux_loras.control_lora(**WIDE), place / "lora.safetensors")
    return {kind: place / f"flux-{kind}" for kind in ("canny", "dev", "schnell")} | {"lora": place / "lora.safetensors"}


def opened(folder: Path, backend: str = "cpu", **more: Any) -> Pipeline:
    return qwenimg.load(folder, backend=backend, **({"precision": "fp32"} | more))


def drawn(folder: Path, asked: dict[str, Any] = OWN, backend: str = "cpu", **more: Any) -> Any:
    with opened(folder, backend, **more) as pipe:
        return pipe(**asked).latents


def with_lora(files: dict[str, Path], **more: Any) -> dict[str, Any]:
    return ASKED | {"control": (files["lora"], EDGES)} | more


def authors(folder: Path, out: Path) -> Path:
    from diffusers import FluxTransformer2DModel

    save_file(transformer_file(FluxTransformer2DModel.from_pretrained(folder / "transformer")), out)
    return out


# Files


@pytest.mark.sample(0)
def test_files_of_a_full_model(wide: dict[str, Path], tmp_path: Path) -> None:
    """Its authors' names, GGUF and mflux's folder draw what the folder draws; a name says Depth."""
    expected = drawn(wide["canny"])
    file = authors(wide["canny"], tmp_path / "flux1-canny-dev.safetensors")
    assert np.array_equal(drawn(wide["dev"], transformer=file), expected)
    depth = Path(file.rename(tmp_path / "flux1-depth-dev.safetensors"))
    values = {key: value.numpy() for key, value in load_file(depth).items()}
    gguf = tmp_path / "flux1-canny-Q8_0.gguf"
    write(gguf, {key: (value, fitting(value, "Q8_0")) for key, value in values.items()}, "flux")
    mflux = save_as_mflux(wide["canny"], tmp_path / "my-depth", "flux", 8)
    for place, more, most in ((wide["dev"], {"transformer": gguf}, 0.05), (mflux, {}, 0.1)):
        error = relative(drawn(place, **more), expected)
        print(f"{place.name}: {error:.1e}")
        assert 0 < error < most
    for more, kind in (({"transformer": depth}, DEPTH), ({"transformer": gguf}, CANNY), ({}, CANNY)):
        with opened(wide["dev"] if more else wide["canny"], **more) as pipe:
            assert pipe.checkpoint is not None and pipe.checkpoint.variant == kind.name
            assert (pipe.defaults.steps, pipe.defaults.guidance) == (kind.known.steps, kind.known.guidance)
    with opened(mflux) as pipe:
        assert pipe.checkpoint is not None and pipe.checkpoint.variant == "depth"


def test_info(wide: dict[str, Path], tmp_path: Path) -> None:
    about = describe(wide["canny"])
    assert not about.faults and "Flux.1 Canny, keeps to the edges of a picture" in about.lines[1]
    file = authors(wide["canny"], tmp_path / "flux1-depth-dev.safetensors")
    values = load_file(file)
    assert values["img_in.weight"].shape[1] == 128


@pytest.mark.sample(0)
def test_fewer_bits_and_streaming(wide: dict[str, Path]) -> None:
    """Of the full model and of dev with the LoRA, merged or beside the weights; the wider layer stays as it is."""
    for folder, asked in ((wide["canny"], OWN), (wide["dev"], with_lora(wide))):
        for backend in BACKENDS:
            exact, coded = (drawn(folder, asked, backend, quantize=bits) for bits in (None, "8"))
            print(f"{backend} {folder.name}: {relative(coded, exact):.1e}")
            assert 0 < relative(coded, exact) < 0.1
            with opened(folder, backend) as pipe:
                stream_half(pipe)
                assert relative(pipe(**asked).latents, exact) < 1e-6
    for mode in ("fuse", "side"):
        sides = [drawn(wide["dev"], with_lora(wide, lora_mode=mode), one, quantize="8") for one in BACKENDS]
        assert relative(sides[1], sides[0]) < 1e-4


@pytest.mark.sample(0)
def test_a_lora_on_weights_that_mflux_quantized(wide: dict[str, Path], tmp_path: Path) -> None:
    """There the widened layer is quantized in the file: it is decoded, and back in its code without the LoRA."""
    place = save_as_mflux(wide["dev"], tmp_path / "flux-dev-8", "flux", 8)
    for backend in BACKENDS:
        with opened(place, backend) as pipe:
            before = pipe(**ASKED).latents
            error = relative(pipe(**with_lora(wide)).latents, drawn(wide["dev"], with_lora(wide), backend))
            print(f"{backend}: {error:.1e}")
            assert error < 0.1 and np.array_equal(pipe(**ASKED).latents, before)


@pytest.mark.sample(0)
def test_it_leaves_nothing_behind(wide: dict[str, Path]) -> None:
    for backend in BACKENDS:
        with opened(wide["dev"], backend) as pipe:
            before = pipe(**ASKED)
            first = pipe(**with_lora(wide)).latents
            off, still = (pipe(**ASKED, control=(wide["lora"], one, 0.0)) for one in (EDGES, OTHER))
            assert np.array_equal(off.latents, still.latents) and any("has no effect" in one for one in off.warnings)
            again = pipe(**with_lora(wide))
            assert np.array_equal(again.latents, first) and not np.array_equal(first, before.latents)
            assert np.array_equal(pipe(**ASKED).latents, before.latents)
            assert again.recipe["control"] == "lora.safetensors=a picture:1" and "lora" not in again.recipe
            weaker = pipe(**ASKED, control=(wide["lora"], EDGES, 0.5)).latents
            assert relative(weaker, first) > 1e-3


@pytest.mark.sample(0)
def test_schnell_takes_it_without_the_embedding_of_guidance(wide: dict[str, Path]) -> None:
    sides = [drawn(wide["schnell"], with_lora(wide), one) for one in BACKENDS]
    assert relative(sides[1], sides[0]) < 1e-5 and not np.array_equal(sides[0], drawn(wide["schnell"], ASKED))


def test_the_plan_counts_it(wide: dict[str, Path]) -> None:
    with opened(wide["canny"]) as own, opened(wide["dev"]) as dev:
        for pipe, asked in ((own, OWN), (dev, with_lora(wide))):
            planned = pipe.estimate(**asked).memory
            pipe(**asked)
            print(f"planned {planned:,}")
            assert planned > 0


@pytest.mark.sample(0)
def test_passports(wide: dict[str, Path]) -> None:
    """Recorded on torch, they hold on MLX."""
    shape = {"prompt": "a ring", "width": 64, "height": 48, "steps": 3, "seed": 0}
    picture = EDGES[:48, :64]
    for folder, network in ((wide["canny"], ""), (wide["dev"], str(wide["lora"]))):
        with closing(opened(folder)) as pipe:
            asked = shape | {"control": (Control(network, "a", picture=picture),)}
            made = record.record(pipe, asked, exact=pipe.engine, sampled=True, notify=lambda text: None)
        with closing(opened(folder, "mlx")) as pipe:
            judged = list(check.blocks(made, pipe, (), (network,)))
            assert summary.verdict(judged, check.picture(made, pipe, (), (network,))) == ""


# The command line


@pytest.mark.sample(0)
def test_the_command_line(wide: dict[str, Path], tmp_path: Path) -> None:
    Image.fromarray(EDGES).save(tmp_path / "house.png")
    canny, house, out = str(wide["canny"]), f"canny@{tmp_path / 'house.png'}", str(tmp_path / "a.png")
    size = ("--width=64", "--height=48", "--steps=2", "--seed=5", "--precision=fp32", "--backend=cpu")
    ran = cli("a ring", "-m", canny, *size, "--control", house, "--keep-control", "-o", out)
    assert ran.code == 0, ran.err
    assert (tmp_path / "a.canny.png").exists()
    said = cli("info", out).out.decode()
    assert "canny@house.png" in said and str(tmp_path) not in said.replace(out, "")
    again = str(tmp_path / "b.png")
    lost = cli("--from", out, "-m", canny, "--backend=cpu", "-o", again)
    assert lost.code == 2 and "--control" in lost.err and "bug" not in lost.err, lost.err
    redrawn = cli("--from", out, "-m", canny, "--control", house, "--backend=cpu", "-o", again)
    assert redrawn.code == 0, redrawn.err
    assert np.array_equal(*(np.asarray(Image.open(name)) for name in (out, again)))
    for model in ("flux-canny", canny):
        planned = cli("plan", model, "--backend=cpu")
        assert planned.code == 0, planned.err


# Refused in one line

Refusal = tuple[str, dict[str, Any], str]


@pytest.mark.sample(0)
def test_refused_in_one_line(wide: dict[str, Path], tmp_path: Path) -> None:
    style = tmp_path / "style.safetensors"
    save_file({f"transformer.transformer_blocks.0.attn.to_q.lora_{x}.weight": torch.ones(2, 96) if x == "A"
               else torch.ones(96, 2) for x in "AB"}, style)  # fmt: skip
    lora = wide["lora"]
    cases: tuple[Refusal, ...] = (
        ("canny", {}, "flux-canny needs a control picture: give it, as in qwenimg PROMPT --control canny@PICTURE"),
        ("canny", {"control": ("", EDGES, 0.5)}, "has no scale: leave out :0.5"),
        ("canny", {"control": ("", EDGES, 1.0, (0.0, 0.5))}, "holds for all steps: leave out START-END"),
        ("canny", {"control": [("", EDGES), ("", OTHER)]}, "the pictures of 2 controls"),
        ("canny", {"control": [("", EDGES), (lora, OTHER)]}, "is for FLUX.1 dev; FLUX.1 Canny has inputs of its own"),
        ("dev", {"control": ("", EDGES)}, "--control PICTURE is for a model that sees one itself; here write NETWORK="),
        ("dev", {"control": [(lora, EDGES), (lora, OTHER)]}, "the pictures of 2 controls"),
        ("dev", {"control": (lora, EDGES, 1.0, (0.0, 0.5))}, "is a LoRA, which holds for all steps"),
        ("dev", {"control": (style, EDGES)}, "is a LoRA that sees no picture: give it with --lora"),
        ("dev", {"lora": str(lora)}, "sees a control picture: give it as --control lora.safetensors=PICTURE"),
    )
    pipes = {kind: opened(wide[kind]) for kind in ("canny", "dev")}
    for kind, more, said in cases:
        with pytest.raises((UsageError, ModelError)) as caught:
            pipes[kind].check(**ASKED, **more)
        assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) <= 300, caught
    with pytest.raises(UsageError, match="--variant kontext: the transformer has a control picture as an input, so it"):
        opened(wide["canny"], variant="kontext")


Change = Callable[[flux_loras.Tensors], None]
DOWN, UP = "transformer.x_embedder.lora_A.weight", "transformer.x_embedder.lora_B.weight"
BIAS, NORM = "transformer.x_embedder.lora_B.bias", "transformer.transformer_blocks.0.attn.norm_q.weight"


def put(key: str, value: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({key: value})


def without(*keys: str) -> Change:
    def change(tensors: flux_loras.Tensors) -> None:
        for key in keys:
            del tensors[key]

    return change


MUTANTS: dict[str, tuple[Change, str]] = {
    "x_embedder of three widths": (put(DOWN, torch.ones(3, 192)), r"makes \[96, 192\] of a weight \[96, 64\]"),
    "x_embedder of half a width": (put(DOWN, torch.ones(3, 32)), r"makes \[96, 32\] of a weight \[96, 64\]"),
    "no up": (without(UP), "has only down"),
    "no down": (without(DOWN), "has only up"),
    "a bias alone": (without(UP, DOWN), "without factors"),
    "outputs of another size": (put(UP, torch.ones(7, 3)), r"makes \[7, 128\]"),
    "a bias of another size": (put(BIAS, torch.ones(7)), "the bias has 7 values, expected 96"),
    "a bias of two axes": (put(BIAS, torch.ones(96, 1)), r"is F32 \[96, 1\], which no bias is"),
    "a norm of another size": (put(NORM, torch.ones(7)), "the norm's weight has 7 values, expected 32"),
    "a norm of two axes": (put(NORM, torch.ones(32, 1)), r"is F32 \[32, 1\], which no norm is"),
    "a norm of integers": (put(NORM, torch.ones(32, dtype=torch.int64)), r"is I64 \[32\], which no norm is"),
    "a norm of a block that is not there": (put("transformer.transformer_blocks.9.attn.norm_q.weight", torch.ones(32)),
                                            "is no layer of this model"),
    "a norm twice": (put("transformer.transformer_blocks.0.attn.norm_q.lora_A.weight", torch.ones(2, 32)),
                     "a norm that has other tensors too"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_refused(wide: dict[str, Path], tmp_path: Path, mutant: str) -> None:
    tensors, (change, said) = flux_loras.control_lora(**WIDE), MUTANTS[mutant]
    change(tensors)
    save_file(tensors, tmp_path / "a.safetensors")
    with opened(wide["dev"]) as pipe, pytest.raises(ModelError, match=said) as caught:
        pipe.check(**ASKED, control=(tmp_path / "a.safetensors", EDGES))
    assert "a.safetensors" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) <= 300


@pytest.mark.parametrize("key", [DOWN, UP, BIAS, NORM])
@pytest.mark.sample(1)
def test_values_that_are_not_finite_are_refused(wide: dict[str, Path], tmp_path: Path, key: str) -> None:
    tensors = flux_loras.control_lora(**WIDE)
    tensors[key].view(-1)[3] = float("nan")
    save_file(tensors, tmp_path / "a.safetensors")
    for backend in BACKENDS:
        with opened(wide["dev"], backend) as pipe:
            before = pipe(**ASKED).latents
            with pytest.raises(ModelError, match=r"a\.safetensors: module .* has values that are not finite"):
                pipe(**ASKED, control=(tmp_path / "a.safetensors", EDGES))
            assert np.array_equal(pipe(**ASKED).latents, before)
