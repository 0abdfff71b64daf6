"""`--check`: shortcuts differ by roundings alone, the picture stays the same, and a planted fault of each is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.cli_runner import cli
from support.family_cases import ASKED, BACKENDS, FIRST, SEEN
from support.relative import relative
from support.tiny_qwen21 import small_pictures

import qwenimg
from qwenimg.backends.mlx import compile as compiling_mlx
from qwenimg.backends.mlx import ops as ops_mlx
from qwenimg.backends.mlx.networks.denoisers import flux2_kv_dit as kv_mlx
from qwenimg.backends.mlx.networks.denoisers import qwen21_dit as qwen21_mlx
from qwenimg.backends.mlx.ops import quantized as quantized_mlx
from qwenimg.backends.torch import compile as compiling_torch
from qwenimg.backends.torch.networks.denoisers import flux2_kv_dit as kv_torch
from qwenimg.backends.torch.networks.denoisers import qwen21_dit as qwen21_torch
from qwenimg.backends.torch.ops import quantized as quantized_torch
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub import open_model
from qwenimg.common.parity.blocks import modules, network
from qwenimg.common.parity.shortcuts import CACHE, COMPILED, KEPT, PRODUCTS, Difference
from qwenimg.common.pipeline.steps.step_cache import StepCache

Notices = list[tuple[str, str]]
OFF = 1.01  # what a planted fault multiplies by: 1 %, seen in float32 and in bfloat16
PRECISIONS = ("fp32", "bf16")


def drawn(folder: Any, backend: str, precision: str = "fp32", **options: Any) -> tuple[np.ndarray, Notices]:
    """Return the latents of a small picture, and the lines of the check. `asked`: more of the request."""
    asked, lines = ASKED | options.pop("asked", {}), list[tuple[str, str]]()
    with (
        small_pictures(),
        qwenimg.load(folder, backend, precision, notify=lambda *line: lines.append(line), **options) as pipe,
    ):
        latents = pipe("a red circle", **asked).latents
    return latents, [line for line in lines if line[1].startswith("check: ")]


def of(lines: Notices, shortcut: str) -> tuple[str, str]:
    """The kind and the text of the last line on a shortcut."""
    return [line for line in lines if line[1].startswith(f"check: {shortcut}")][-1]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace what torch compiles, without generating code: MLX generates none here that takes long."""
    monkeypatch.setattr(compiling_torch, "compile", partial(compiling_torch.compile, backend="eager"))


# Nothing is wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", FIRST.values())
@pytest.mark.sample(2, rest=8)
def test_nothing_is_found_where_nothing_is_wrong(tiny: dict[str, Path], kind: str, backend: str) -> None:
    """And a picture that is checked is the same as another, bit for bit."""
    more: dict[str, Any] = {"image": SEEN} if kind in ("qwen21", "flux2-kv", "qwen-layered") else {}
    plain, nothing = drawn(tiny[kind], backend, quantize="8", asked=more)
    latents, lines = drawn(tiny[kind], backend, quantize="8", asked=more, check=True)
    print(kind, backend, *(text for _, text in lines), sep="\n")
    assert np.array_equal(latents, plain) and nothing == []
    assert {line[0] for line in lines} == {"notice"}
    assert of(lines, KEPT)  # tiny models of some families have no layer that can be quantized


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_denoiser_repeats_no_line(tiny_cascade: Path, backend: str) -> None:
    """Its line was that of the first one once more."""
    _, lines = drawn(tiny_cascade, backend, check=True)
    assert lines == [("notice", f"check: {KEPT}: no difference")]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("traced")
@pytest.mark.sample(0, rest=2)
def test_compiled_blocks_and_a_cache(tiny: dict[str, Path], backend: str, precision: str) -> None:
    asked = {"step_cache": 1.0}
    plain, _ = drawn(tiny["qwen"], backend, precision, compile="on", asked=asked)
    latents, lines = drawn(tiny["qwen"], backend, precision, compile="on", asked=asked, check=True)
    print(*(text for _, text in lines), sep="\n")
    assert np.array_equal(latents, plain) and {line[0] for line in lines} == {"notice"}
    assert [of(lines, name)[0] for name in (COMPILED, KEPT, CACHE)] == ["notice"] * 3


def test_compiled_blocks_have_a_limit_of_their_kind(tiny: dict[str, Path]) -> None:
    """But for single norms of a UNet, whose limit is that of any operation."""
    for kind in FIRST.values():
        with closing(open_model.open_files(LoadOptions(model=str(tiny[kind])))) as files:
            parts = files.checkpoint.denoisers
        for part in parts:
            assert part.compiled is not None
            blocks = network(part).traced
            found = [path for path in modules(part.plan) if part.compiled.fullmatch(path)]
            print(kind, len(found))
            for path in found:
                limited = any(not one.method and one.depth and one.paths.fullmatch(path) for one in blocks)
                assert limited or path.endswith(".norm"), path


# Planted faults


def wrong_blocks(backend: str, patch: pytest.MonkeyPatch) -> None:
    """Compiled code that returns other values than the code it was made of."""
    if backend == "mlx":
        own = ops_mlx.gated
        factor = {True: OFF, False: 1.0, None: 1.0}
        patch.setattr(ops_mlx, "gated", lambda *given: own(*given) * factor[compiling_mlx._fuses.get()])
        return
    compiled = torch.nn.Module.compile

    def wrongly(self: torch.nn.Module, **options: Any) -> None:
        compiled(self, **options)
        right: Any = self._compiled_call_impl
        self._compiled_call_impl = lambda *given: tuple(OFF * one for one in right(*given))

    patch.setattr(torch.nn.Module, "compile", wrongly)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("traced")
@pytest.mark.sample(0, rest=2)
def test_a_wrong_compiled_block_is_found_and_not_used(
    tiny: dict[str, Path], backend: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = drawn(tiny["qwen"], backend, precision, compile="off")
    wrong_blocks(backend, monkeypatch)
    faulty, _ = drawn(tiny["qwen"], backend, precision, compile="on")
    latents, lines = drawn(tiny["qwen"], backend, precision, compile="on", check=True)
    kind, text = of(lines, COMPILED)
    print(text, relative(faulty, plain), relative(latents, plain))
    assert kind == "warning" and "will not be called compiled" in text and len(text) <= 300
    assert relative(faulty, plain) > 1e-3 and np.array_equal(latents, plain), "blocks that are found run uncompiled"


STALE = {
    "qwen21": {"cpu": qwen21_torch.Qwen21Transformer, "mlx": qwen21_mlx.Qwen21Transformer},
    "flux2-kv": {"cpu": kv_torch.Flux2KVTransformer, "mlx": kv_mlx.Flux2KVTransformer},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", STALE)
@pytest.mark.sample(1)
def test_a_stale_key_is_found(tiny: dict[str, Path], kind: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the block before, as if they were kept one block late."""
    model, method = STALE[kind][backend], {"cpu": "forward", "mlx": "__call__"}[backend]
    own: Callable[..., Any] = getattr(model, method)

    def stale(self: Any, *given: Any) -> Any:
        velocity, pairs = own(self, *given)
        return velocity, [*pairs[-1:], *pairs[:-1]]

    monkeypatch.setattr(model, method, stale)
    _, lines = drawn(tiny[kind], backend, asked={"image": SEEN}, check=True)
    kind_, text = of(lines, KEPT)
    print(text)
    assert kind_ == "warning" and "please report it" in text and len(text) <= 300


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bits", ["8", "4"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(2)
def test_a_wrong_scale_of_a_product_is_found(
    backend: str, bits: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = {"cpu": quantized_torch, "mlx": quantized_mlx}[backend]
    own = module.decode
    monkeypatch.setattr(module, "decode", lambda *given, **named: own(*given, **named) * OFF)
    _, lines = drawn("shapes", backend, precision, quantize=bits, asked={"steps": 1}, check=True)
    kind, text = of(lines, PRODUCTS)
    print(text)
    assert kind == "warning" and "please report it" in text and len(text) <= 300


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_a_cache_that_always_skips_is_found(
    tiny: dict[str, Path], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCache, "_size", lambda cache, change: 0.0)
    _, lines = drawn(tiny["qwen"], backend, asked={"step_cache": 0.05}, check=True)
    kind, text = of(lines, CACHE)
    print(text)
    assert kind == "warning" and "give --step-cache less" in text and len(text) <= 300


# Commands


def test_commands_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = cli("a red circle", "-m", "shapes", "--backend", "cpu", "--steps", "2", "--size", "64x64", "-q", "8",
              "--check", "-o", str(tmp_path / "x.png"))  # fmt: skip
    assert ran.code == 0 and "check: quantized products: largest difference" in ran.err
    made = json.loads(cli("doctor", "--backend", "cpu", "--json").out)
    assert {row["shortcut"] for row in made["checks"]} == {KEPT, PRODUCTS, CACHE}
    own = quantized_torch.decode
    monkeypatch.setattr(quantized_torch, "decode", lambda *given: own(*given) * OFF)
    ran = cli("doctor", "--backend", "cpu")
    assert ran.code == 6 and "check: quantized products" in ran.err and "check: kept keys" in ran.out.decode()


def test_a_difference_that_is_no_number_is_a_fault() -> None:
    found = Difference(shortcut=KEPT, where="", error=float("nan"), allowed=1e-6, faults=1)
    assert found.ratio == float("inf") and json.loads(json.dumps(found.as_json()))["error"] is None


def test_devices_that_share_a_picture_are_refused() -> None:
    ready: Any = SimpleNamespace(group=object())
    with pytest.raises(UsageError, match="--check: the devices that share a picture"):
        open_model.open_pipeline(LoadOptions(model="shapes", check=True), lambda: ready)
