"""Memory that runs out on the way: exit code 4 with the plan's numbers, and a pipeline that draws again."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import write_random_model
from support.opened_parts import network_of

import qwenimg
from qwenimg.backends.mlx import engine as mlx_engine
from qwenimg.backends.torch import engine as torch_engine
from qwenimg.cli.main import run
from qwenimg.common.base.errors import DoesNotFit

ASKED: dict[str, Any] = {"width": 32, "height": 32, "steps": 2, "guidance": 1.0, "seed": 0}
METAL = (
    "[metal::malloc] Attempting to allocate 48736917632 bytes which is greater than the maximum allowed buffer size.",
    "[metal::malloc] Resource limit (499000) exceeded.",
    "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackError...)",
)
ERRORS: list[tuple[str, BaseException]] = [
    ("cpu", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")),
    ("cpu", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ("cpu", RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")),
    ("cpu", MemoryError("Unable to allocate 3.1 TiB")),
    *(("mlx", RuntimeError(text)) for text in METAL),
    ("mlx", MemoryError("std::bad_alloc")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "random"
    write_random_model(made)
    return made


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise error

    return fail


def places(pipe: qwenimg.Pipeline) -> Iterator[tuple[object, str]]:
    """Where an allocation may fail: loading, a step, decoding."""
    yield pipe.engine, "open"
    yield pipe.engine, "finite"
    yield pipe.model.vae, "decode"


@pytest.mark.parametrize(("backend", "error"), ERRORS, ids=lambda value: str(value)[:24])
@pytest.mark.sample(1)
def test_it_is_the_plans_numbers_and_not_a_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str, error: BaseException
) -> None:
    pipe = qwenimg.load(folder, backend=backend, precision="fp32")
    for place, name in places(pipe):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, raising(error))
            with pytest.raises(DoesNotFit) as caught:
                pipe("a red circle", **ASKED)
        text = str(caught.value)
        assert re.match(r"memory ran out on CPU \(.*\): .* was planned with [\d.]+ [kM]B in fp32 \(", text), text
        assert caught.value.exit_code == 4 and "\n" not in text and "Allocator" not in text
        assert pipe("a red circle", **ASKED).pixels.shape == (32, 32, 3)
    print(text)
    pipe.close()


def test_what_was_loaded_is_free_where_the_error_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = qwenimg.load(folder, backend="cpu", precision="fp32")
    pipe("a red circle", **ASKED)
    held: list[Any] = [weakref.ref(network_of(pipe, "transformer"))]

    def fail(x: torch.Tensor) -> bool:
        held.append(weakref.ref(x))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(pipe.engine, "finite", fail)
    with pytest.raises(DoesNotFit) as caught:
        pipe("a red circle", **ASKED)
    gc.collect()
    assert len(held) == 2 and [one() for one in held] == [None, None], caught.value
    pipe.close()


def test_another_error_stays_what_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = qwenimg.load(folder, backend="cpu", precision="fp32")
    monkeypatch.setattr(pipe.engine, "finite", raising(RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        pipe("a red circle", **ASKED)
    pipe.close()


def test_the_command_ends_with_exit_code_4(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        torch_engine.TorchEngine, "finite", raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    )
    command = ["a red circle", "-m", folder, "--backend", "cpu", "--precision", "fp32", "--size", "64x64", "--json"]
    code = run([*map(str, command), "--steps", "2", "-o", str(tmp_path / "x.png")])
    out, err = capfd.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    print(err)
    assert code == 4 and not (tmp_path / "x.png").exists() and "Traceback" not in err
    assert [e["exit"] for e in events if e["event"] == "error"] == [4] and "was planned with" in err


def test_metals_limits_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, int] = {}
    for name in ("memory", "cache", "wired"):
        monkeypatch.setattr(mlx_engine.mx, f"set_{name}_limit", lambda count, name=name: said.setdefault(name, count))
    monkeypatch.setattr(mlx_engine.mx, "device_info", lambda: {"max_recommended_working_set_size": 100})
    engine = mlx_engine.MLXEngine()
    engine.expect(30)
    assert said == {"cache": 0}, "on a CPU"
    said.clear()
    engine.on_gpu = True
    engine.expect(30)
    assert said == {"memory": 100, "cache": 70, "wired": 30}
    said.clear()
    engine.expect(130)
    assert said == {"memory": 100, "cache": 0, "wired": 100}


@pytest.mark.skipif(sys.platform != "linux", reason="segments grow on Linux only")
@pytest.mark.parametrize("own", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}])
def test_the_allocator_is_set_before_torch_is_imported(own: dict[str, str]) -> None:
    script = "import json, os; from qwenimg import backends; backends._set_allocator()\n"
    script += "print(json.dumps({k: v for k, v in os.environ.items() if 'ALLOC_CONF' in k}))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **own},
        check=True,
    )
    found = json.loads(done.stdout)
    print(found, done.stderr)
    assert found == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) and (own or not done.stderr)
