"""Encoded prompts on the disk: the same bits without a text encoder, and whatever lies there is never trusted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from support.crossed import crossed

import qwenimg
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.text_store import TextStore

OPTIONS = {"width": 32, "height": 32, "steps": 1, "seed": 3, "guidance": 4.0, "negative_prompt": "blurry"}
PROMPT = "a (red:1.3) circle"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "qwenimg" / "prompts"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of what is loaded."""
    titles: list[str] = []
    original = Runtime.open

    def recorded(self: Runtime, component: Any, title: str, more: int = 0) -> Any:
        titles.append(title)
        return original(self, component, title, more)

    monkeypatch.setattr(Runtime, "open", recorded)
    return titles


def draw(
    folder: Path, backend: str, said: list[str], prompt: str = PROMPT, precision: str = "fp32", **more: Any
) -> Any:
    pipe = qwenimg.load(
        folder, backend=backend, precision=precision, notify=lambda kind, text: said.append(text), **more
    )
    try:
        return pipe(prompt, **OPTIONS).latents
    finally:
        pipe.close()


@pytest.mark.parametrize(("kind", "backend"), crossed(["qwen", "sdxl"], ["cpu", "mlx"]))
@pytest.mark.sample(0)
def test_the_second_run_has_the_same_bits_and_no_text_encoder(
    tiny_folder: Path, folders: dict[str, Path], place: Path, opened: list[str], backend: str, kind: str
) -> None:
    folder = tiny_folder if kind == "qwen" else folders[kind]
    plain = draw(folder, backend, [])
    assert not place.exists(), "nothing is written unless it is asked for"
    draw(folder, backend, [], cache_prompts=True)
    files = sorted(place.iterdir())
    assert len(files) == (2 if kind == "qwen" else 3)  # of SDXL the empty prompt too
    assert "text encoder" in opened
    opened.clear()
    assert np.array_equal(draw(folder, backend, [], cache_prompts=True), plain)
    assert "text encoder" not in opened and sorted(place.iterdir()) == files
    for change in (
        {"prompt": "a (red:1.2) circle"},
        {"precision": "bf16"},
        {"backend": {"cpu": "mlx", "mlx": "cpu"}[backend]},
    ):
        opened.clear()
        draw(folder, **{"backend": backend, "said": [], "cache_prompts": True} | change)
        assert "text encoder" in opened, change
    print(backend, kind, len(list(place.iterdir())), "files")


def pipe(path: Path, data: bytes) -> None:
    path.unlink()
    os.mkfifo(path)


def subfolder(path: Path, data: bytes) -> None:
    path.unlink()
    path.mkdir()


def nan(path: Path, data: bytes) -> None:
    """With the right hash."""
    import hashlib

    states = safetensors.numpy.load(data)["0"]
    states[0, 0, 0] = np.nan
    meta = {"sha256": hashlib.sha256(states.tobytes()).hexdigest()}
    path.write_bytes(safetensors.numpy.save({"0": states}, meta))


BAD: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda path, data: path.write_bytes(b""),
    "short": lambda path, data: path.write_bytes(data[:-5]),
    "flipped": lambda path, data: path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]),
    "other shape": lambda path, data: path.write_bytes(safetensors.numpy.save({"0": np.ones((1, 3, 5), np.float32)})),
    "other names": lambda path, data: path.write_bytes(safetensors.numpy.save({"a": np.ones((1, 3, 5), np.float32)})),
    "huge header": lambda path, data: path.write_bytes((2**62).to_bytes(8, "little") + data[8:]),
    "nan": nan,
    "pipe": pipe,
    "folder": subfolder,
    "loop": lambda path, data: (path.unlink(), path.symlink_to(path)),
}


@pytest.fixture(scope="module")
def drawn(tiny_folder: Path) -> np.ndarray:
    return draw(tiny_folder, "cpu", [])


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.sample(1)
def test_what_is_not_right_is_a_line_and_no_more(tiny_folder: Path, place: Path, kind: str, drawn: np.ndarray) -> None:
    draw(tiny_folder, "cpu", [], cache_prompts=True)
    for path in place.iterdir():
        BAD[kind](path, path.read_bytes())
    said: list[str] = []
    assert np.array_equal(draw(tiny_folder, "cpu", said, cache_prompts=True), drawn)
    lines = [line for line in said if "ignored" in line]
    print(kind, lines[0])
    assert len(lines) == 2 and all(line.isprintable() for line in said)


def test_the_folder_stays_below_its_budget(tmp_path: Path) -> None:
    def notify(kind: str, text: str) -> None:
        raise AssertionError(text)

    store = TextStore(notify, tmp_path / "p", budget=5000)
    for i in range(8):
        store.put(f"{i:02}", [np.full((1, 250), i, np.float32)])
        os.utime(tmp_path / "p" / f"{i:02}.safetensors", (i, i))
        store.get("00", [(1, 250)])  # is used, and stays
    kept = sorted(path.stem for path in (tmp_path / "p").iterdir())
    print(kept)
    assert kept == ["00", "05", "06", "07"] and sum(path.stat().st_size for path in (tmp_path / "p").iterdir()) <= 5000
    assert store.get("00", [(1, 250)])[0].tolist() == [[0.0] * 250]
    store.put("big", [np.zeros(2000, np.float32)])
    assert not store.has("big") and store.has("00") and not store.has(None)


def test_a_transposed_array_is_read_as_it_was(tmp_path: Path) -> None:
    """Latents of MLX are: their channels lie last."""
    said: list[str] = []
    store = TextStore(lambda kind, text: said.append(text), tmp_path / "p")
    array = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4).transpose(0, 3, 1, 2)
    store.put("one", [array])
    found = store.get("one", [array.shape])
    assert not said and found is not None and np.array_equal(found[0], array)


def test_a_folder_that_cannot_be_written_is_a_line(tiny_folder: Path, place: Path, drawn: np.ndarray) -> None:
    place.parent.mkdir()
    place.write_text("a file")
    said: list[str] = []
    assert np.array_equal(draw(tiny_folder, "cpu", said, cache_prompts=True), drawn)
    assert sum("--cache-prompts: " in line for line in said) == 2
