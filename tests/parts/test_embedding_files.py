"""Files of textual inversion: read as their programs write them, refused in one line, and no pickle is run."""

from __future__ import annotations

import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import embedding_files
from support.cli_runner import cli
from support.file_mutants import damaged

from qwenimg.common.base.errors import ModelError
from qwenimg.common.parts.texts.embedding_file import read_embedding

VALUES = embedding_files.vectors(3, 768, 1)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", embedding_files.WRITERS)
def test_every_program_s_file(tmp_path: Path, name: str, count: int) -> None:
    embedding_files.WRITERS[name](tmp_path / name, VALUES[:count].clone())
    file = read_embedding(tmp_path / name)
    assert np.array_equal(file.parts[""], VALUES[:count].numpy()) and file.base == "Stable Diffusion 1.x"
    assert file.token == ("<cat-toy>" if "learned" in name else "") and file.count == count
    [inversion] = [file.fitted({"text_encoder": 768})]
    assert inversion.names == (Path(name).stem, *([file.token] if file.token else []))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    values = VALUES.to(dtype)
    torch.save({"<a>": values}, tmp_path / "a.bin")
    save_file({"emb_params": values}, tmp_path / "a.safetensors")
    for path in tmp_path.iterdir():
        assert np.array_equal(read_embedding(path).parts[""], values.float().numpy())


def test_sdxl_and_stable_diffusion_3(tmp_path: Path) -> None:
    parts = {"clip_l": VALUES, "clip_g": embedding_files.vectors(3, 1280, 1)}
    save_file(parts, tmp_path / "xl.safetensors")
    save_file(parts | {"t5xxl": torch.zeros(3, 4096)}, tmp_path / "sd3.safetensors")
    for path in tmp_path.iterdir():
        file = read_embedding(path)
        made = file.fitted({"text_encoder": 768, "text_encoder_2": 1280})
        assert file.base == "SDXL" and np.array_equal(made.vectors["text_encoder_2"], parts["clip_g"].numpy())
        assert list(file.fitted({"text_encoder_2": 1280}).vectors) == ["text_encoder_2"]  # the refiner


BASES = {
    "sd1": {"text_encoder": 768},
    "sd2": {"text_encoder": 1024},
    "xl": {"text_encoder": 768, "text_encoder_2": 1280},
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("model", BASES)
def test_a_wrong_base_is_refused(tmp_path: Path, base: str, model: str) -> None:
    widths = [*BASES[base].values()]
    made = [torch.ones(2, width) for width in widths]
    save_file({"emb_params": made[0]} if len(made) == 1 else dict(zip(("clip_l", "clip_g"), made, strict=True)),
              tmp_path / "e.safetensors")  # fmt: skip
    file = read_embedding(tmp_path / "e.safetensors")
    if base == model:
        assert file.fitted(BASES[model]).count == 2
        return
    with pytest.raises(ModelError) as caught:
        file.fitted(BASES[model])
    print(caught.value)
    said = {"sd1": "Stable Diffusion 1.x", "sd2": "Stable Diffusion 2.x", "xl": "SDXL"}
    assert f"is an embedding for {said[base]} (" in str(caught.value)
    assert str(caught.value).endswith(f"the model is {said[model]}") and len(str(caught.value)) <= 300


def torch_file(value: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def safe(**tensors: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: save_file(tensors, path)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "76 vectors": (safe(emb_params=torch.zeros(76, 768)), "has 76 vectors"),
    "no vectors": (safe(emb_params=torch.zeros(0, 768)), "has shape"),
    "no width": (safe(emb_params=torch.zeros(3, 0)), "has shape"),
    "three dimensions": (safe(emb_params=torch.zeros(1, 3, 768)), "has shape"),
    "a number": (safe(emb_params=torch.tensor(1.0)), "has shape"),
    "too wide": (safe(emb_params=torch.zeros(1, 20_000)), "has shape"),
    "whole numbers": (safe(emb_params=torch.zeros(1, 768, dtype=torch.int32)), "not of floats"),
    "NaN": (safe(emb_params=torch.full((1, 768), float("nan"))), "not finite"),
    "infinite": (torch_file({"<a>": torch.full((768,), 1e300, dtype=torch.float64)}), "not finite"),
    "two tokens": (torch_file({"<a>": torch.zeros(768), "<b>": torch.zeros(768)}), "is no embedding with one token"),
    "other numbers of vectors": (safe(clip_l=torch.zeros(2, 768), clip_g=torch.zeros(3, 1280)), "2 vectors for CLIP-L"),
    "only T5": (safe(t5xxl=torch.zeros(2, 4096)), "holds no vectors"),
    "a LoRA": (safe(**{"a.lora_A.weight": torch.zeros(4, 4), "a.lora_B.weight": torch.zeros(4, 4)}), "is no embedding"),
    "a call": (torch_file({"string_to_param": {"*": Evil()}}), "mkdir"),
    "a module": (torch_file({"<a>": torch.nn.Linear(2, 2)}), "which is no tensor"),
    "text": (lambda path: path.write_text("easynegative") and None, "is a text"),
    "empty": (lambda path: path.write_bytes(b"") and None, "is empty"),
    "a plain pickle": (lambda path: path.write_bytes(pickle.dumps({"<a>": [1.0]}, 2)) and None, "none of PyTorch"),
    "a folder": (lambda path: path.mkdir(), "folder"),
    "a pipe": (lambda path: os.mkfifo(path), "regular file"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "not exist"),
    "a link to itself": (lambda path: path.symlink_to(path.name), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write, said = REFUSED[name]
    write(tmp_path / "e.pt")
    with pytest.raises(ModelError) as caught:
        read_embedding(tmp_path / "e.pt")
    print(caught.value)
    assert said in str(caught.value) and str(caught.value).isprintable() and "e.pt" in str(caught.value)
    assert len(str(caught.value)) <= 300 and not (tmp_path / "ran").exists()


def test_700_damaged_files(tmp_path: Path) -> None:
    """400 of safetensors, 300 pickles: each is refused in one line that names it, or read whole."""
    chance, seen = random.Random(44), Counter[str]()
    small = {"style.safetensors": 200, "learned_embeds.safetensors": 200, "style.pt": 100, "original.pt": 100,
             "learned_embeds.bin": 100}  # fmt: skip
    path = tmp_path / "mutant.pt"
    for name, count in small.items():
        embedding_files.WRITERS[name](tmp_path / name, embedding_files.vectors(2, 16, 1))
        whole = (tmp_path / name).read_bytes()
        for _ in range(count):
            path.write_bytes(damaged(whole, max(1, len(whole) - 128), chance))
            try:
                file = read_embedding(path)
                assert np.isfinite(file.parts[""]).all() and len(file.token) <= 100
                seen["read"] += 1
            except ModelError as error:
                assert "mutant.pt" in str(error) and str(error).isprintable() and "\n" not in str(error)
                seen["refused"] += 1
    print(dict(seen))
    assert sum(seen.values()) == 700 and seen["refused"] > 200 and seen["read"] > 10
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*small, "mutant.pt"])


def test_info_says_what_it_is_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, values in {"learned_embeds.bin": VALUES[:1], "style.pt": VALUES}.items():
        embedding_files.WRITERS[kind](tmp_path / kind, values.clone())
    told = cli("info", "learned_embeds.bin").out.decode()
    assert told.splitlines()[:3] == [
        "layout: an embedding (textual inversion), 1 vector of 768", "for: Stable Diffusion 1.x", "token: <cat-toy>",
    ]  # fmt: skip
    assert 'use it: qwenimg "PROMPT, <cat-toy>" -m MODEL --embedding learned_embeds.bin' in told
    assert 'use it: qwenimg "PROMPT, embedding:style" ' in cli("info", "style.pt").out.decode()
    save_file({"emb_params": torch.zeros(76, 768)}, tmp_path / "long.safetensors")
    assert "76 vectors" in cli("info", "long.safetensors").out.decode()
