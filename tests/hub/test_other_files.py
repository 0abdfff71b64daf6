"""`info FILE` for the files that people have: what each is, and the command that uses it or why none does."""

from __future__ import annotations

import json
import os
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file
from support import tiny_ldm
from support.cli_runner import cli
from support.tiny_control import write_controlnet

from qwenimg.common.base.errors import ModelError
from qwenimg.common.hub import other_files
from qwenimg.common.hub.describe import describe

ANSWERS = (other_files.USE, other_files.NO_USE)


def tensors(**shapes: tuple[int, ...]) -> Callable[[Path], None]:
    """Writes a safetensors file; a double underscore is a dot."""
    values = {name.replace("__", "."): np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return lambda path: save_file(values, path)


def torch_file(value: object) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def raw(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def as_json(value: object) -> Callable[[Path], None]:
    return raw(json.dumps(value).encode())


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "x")


GRAPH = {"nodes": [{"id": 1, "type": "KSampler"}], "links": [], "version": 0.4}
FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "embedding.safetensors": (tensors(emb_params=(4, 768)), "textual inversion"),
    "embedding-xl.safetensors": (tensors(clip_l=(4, 768), clip_g=(4, 1280)), "textual inversion"),
    "embedding.pt": (torch_file({"string_to_param": {"*": torch.zeros(4, 768)}, "name": "x"}), "textual inversion"),
    "learned_embeds.bin": (torch_file({"<cat>": torch.zeros(768)}), "textual inversion"),
    "control.safetensors": (tensors(control_model__zero_convs__0__0__weight=(4, 4, 1, 1)), "ControlNet"),
    "control-diffusers.safetensors": (tensors(controlnet_down_blocks__0__weight=(4, 4, 1, 1)), "ControlNet"),
    "t2i.safetensors": (tensors(adapter__body__0__in_conv__weight=(4, 4)), "T2I-Adapter"),
    "ip-adapter.safetensors": (tensors(image_proj__proj__weight=(4, 4)), "IP-Adapter"),
    "ip-adapter.bin": (torch_file({"ip_adapter": {"1.to_k_ip.weight": torch.zeros(3, 3)}}), "IP-Adapter"),
    "vision.safetensors": (tensors(vision_model__embeddings__class_embedding=(4,)), "image encoder"),
    "motion.safetensors": (tensors(down_blocks__0__motion_modules__0__x=(4, 4)), "motion module"),
    "unknown.safetensors": (tensors(body__weight=(4, 4)), "unknown"),
    "old.ckpt": (torch_file({"state_dict": {"model.diffusion_model.out.2.weight": torch.zeros(4, 4)}}), "whole model"),
    "code.pt": (torch_file({"x": os.system}), "without tensors"),
    "swin.pth": (torch_file({"params": {"layers.0.residual_group.blocks.0.x": torch.zeros(3)}}), "upscaler of another"),
    "net.onnx": (raw(b"\x08\x07"), "ONNX"),
    "net.engine": (raw(b"ptrt"), "TensorRT"),
    "a.zip": (archive, "zip archive"),
    "a.7z": (raw(b"7z\xbc\xaf\x27\x1c"), "7z archive"),
    "a.tar.gz": (raw(b"\x1f\x8b\x08"), "gzip archive"),
    "film.mp4": (raw(b"\0\0\0\x18ftypmp42"), "a film"),
    "photo.heic": (raw(b"\0\0\0\x18ftypheic"), "HEIC"),
    "paper.pdf": (raw(b"%PDF-1.7"), "PDF"),
    "workflow.json": (as_json(GRAPH), "workflow of ComfyUI"),
    "api.json": (as_json({"3": {"class_type": "KSampler", "inputs": {}}}), "workflow of ComfyUI"),
    "config.json": (as_json({"_class_name": "AutoencoderKL"}), "configuration"),
    "other.json": (as_json([1]), "text in JSON"),
    "broken.json": (raw(b'{"a": '), "JSON that is broken"),
    "prompts.txt": (raw(b"a red circle\n"), "a text"),
    "prompts.jsonl": (as_json({"prompt": "x"}), "a text"),
    "extra.yaml": (raw(b"a: 1\n"), "configuration"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_is_answered(tmp_path: Path, name: str) -> None:
    write, told = FILES[name]
    write(tmp_path / name)
    ran = cli("info", str(tmp_path / name))
    lines = ran.out.decode().splitlines()
    print("\n".join(lines))
    assert ran.code == 0 and ran.err == "" and told in lines[0]
    assert [line for line in lines if line.startswith(ANSWERS)] == [lines[-1]] and len(lines[-1]) <= 300
    assert json.loads(cli("info", str(tmp_path / name), "--json").out)["lines"] == lines


@pytest.mark.sample(0)
def test_what_is_ours_names_its_command(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Folders of every family and each of their parts, a model in one file and its parts."""
    seen = []
    for kind, folder in tiny.items():
        parts = [part for part in folder.iterdir() if (part / "config.json").exists()]
        for path in (folder, *parts):
            lines = describe(path).lines
            seen.append((kind, path.name, next(line for line in lines if line.startswith(ANSWERS))))
    for one in seen:
        print(*one)
    alone = [line for _, name, line in seen if name == "text_conditioner"]  # which no option takes
    assert alone and all("give the model's folder" in line for line in alone)
    used = [line for _, name, line in seen if name != "text_conditioner"]
    assert all(line.startswith(other_files.USE) for line in used if "scheduler" not in line)
    uses = {name: line for kind, name, line in seen if kind == "sd15"}
    assert uses["unet"].split()[2:6] == ["qwenimg", "PROMPT", "-m", "MODEL"] and "--transformer" in uses["unet"]
    assert "--vae" in uses["vae"] and "--text-encoder" in uses["text_encoder"]
    models = tiny_ldm.models_of("sd1")
    from safetensors.torch import save_file as save

    for name, values in {
        "whole": tiny_ldm.one_file("sd1", models),
        "unet": tiny_ldm.unet_file(models["unet"]),
        "vae": tiny_ldm.vae_file(models["vae"]),
    }.items():
        save(values, tmp_path / f"{name}.safetensors")
        lines = describe(tmp_path / f"{name}.safetensors").lines
        print(name, lines[-1])
        assert any(line.startswith(ANSWERS) for line in lines)


def test_a_control_network_names_its_option(tmp_path: Path) -> None:
    lines = describe(write_controlnet(tmp_path / "canny")).lines
    print(lines)
    assert lines[-1] == f"use it: qwenimg PROMPT -m MODEL --control {tmp_path / 'canny'}=PICTURE"


def test_a_path_is_one_whole_word_of_the_command(tmp_path: Path) -> None:
    """It was cut to its last 80 characters, as that of a model in the cache of the hub, and had its blanks bare."""
    folder = tmp_path / "of two words" / ("long" * 20) / ("name" * 20)
    folder.mkdir(parents=True)
    (folder / "prompts.txt").write_text("a cat")
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    command = shlex.split(describe(folder / "prompts.txt").lines[-1].removeprefix(other_files.USE))
    picture = shlex.split(cli("info", str(folder / "a.png")).out.decode().splitlines()[-1])
    print(command, picture)
    assert command == ["qwenimg", "--prompt-file", str(folder / "prompts.txt"), "-o", "FOLDER/"]
    assert picture[4] == picture[8] == str(folder / "a.png")


def test_pictures_and_folders(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    ran = cli("info", str(tmp_path / "a.png"))
    last = ran.out.decode().splitlines()[-1]
    assert last.startswith("use it: qwenimg edit ") and "upscale" in last and "--from" not in last
    assert cli("a red circle", "-m", "shapes", "--steps", "1", "-o", str(tmp_path / "b.png")).code == 0
    shown = cli("info", str(tmp_path / "b.png"))
    assert shown.out.decode().splitlines()[-1].startswith("use it: qwenimg --from ")
    assert json.loads(cli("info", str(tmp_path / "b.png"), "--json").out)["use"].startswith("qwenimg --from ")
    (tmp_path / "models" / "loras").mkdir(parents=True)
    tensors(emb_params=(4, 768))(tmp_path / "models" / "loras" / "x.safetensors")
    lines = describe(tmp_path / "models").lines
    assert lines[-1] == f"use it: qwenimg models --models-dir {tmp_path / 'models'}"
    (tmp_path / "empty").mkdir()
    cli("info", str(tmp_path / "empty")).refused(5, "empty", "holds no safetensors file")
    cli("info", str(tmp_path / "none.pt")).refused(5, "none.pt")
    os.mkfifo(tmp_path / "fifo.json")
    cli("info", str(tmp_path / "fifo.json")).refused(5, "fifo.json")


@given(st.binary(max_size=400), st.sampled_from([".json", ".pt", ".zip", ".bin", ".mp4", ".safetensors", ""]))
def test_any_bytes_are_answered_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, ending: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{ending}"
    for head in (b"", b"PK\x03\x04", b"\x80\x02", b"{"):
        path.write_bytes(head + data)
        try:
            lines = describe(path).lines
        except ModelError as error:
            assert len(str(error)) <= 300 and str(error).isprintable()
        else:
            assert any(line.startswith(ANSWERS) for line in lines)


@pytest.mark.parametrize("word", ["a.pt", "b.onnx", "c.zip", "x.HEIC", "models/.", "./models"])
def test_a_path_in_place_of_a_prompt_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    cli(word).refused(2, "qwenimg info", f"-p {word}")
