"""The LoRAs and hashes in the text that other programs read, by a reader of that text which knows nothing of ours.

The format, as its programs describe it: a prompt in which `<lora:name:strength>` asks for a LoRA; a line `Negative
prompt: ...`; a last line of `Name: value` with commas between them, a value with a comma, colon or line break in JSON's
quotes. `Model hash` is the first 10 digits of the SHA-256 of the model's file (AutoV2), `Lora hashes` a list of `name:
hash` with the first 12 digits of the SHA-256 of what is behind a safetensors file's header (AutoV3).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file
from support.cli_runner import cli
from support.lora_cases import write_lora
from support.recipe_cases import recipe_from_png

import qwenimg
from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.formats import file_hash
from qwenimg.common.hub import origin
from qwenimg.common.request.recipe import a1111_parameters

SMALL: dict[str, Any] = {"width": 32, "height": 32, "steps": 1, "seed": 7}


def read(text: str) -> tuple[str, dict[str, str]]:
    """The prompt and the fields of a text, read from its end by hand."""
    *prompt, last = text.split("\n")
    fields, rest = {}, last
    while rest:
        name, rest = rest.split(": ", 1)
        if rest.startswith('"'):
            value, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:]
        else:
            value = rest.split(", ", 1)[0]
            rest = rest[len(value) :]
        fields[name], rest = value, rest.removeprefix(", ")
    return "\n".join(prompt).split("\nNegative prompt: ")[0], fields


def loras(prompt: str, fields: dict[str, str]) -> list[tuple[str, float, str]]:
    """(name, strength, hash) of each LoRA."""
    hashes = dict(one.split(": ") for one in fields["Lora hashes"].split(", "))
    tags = re.findall(r"<lora:([^:>]+):([^:>]+)>", prompt)
    return [(name, float(strength), hashes[name]) for name, strength in tags]


def behind_header(path: Path) -> str:
    raw = path.read_bytes()
    return hashlib.sha256(raw[8 + int.from_bytes(raw[:8], "little") :]).hexdigest()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_loras_and_model_are_in_the_text_with_their_hashes(backend: str, tiny_folder: Path, tmp_path: Path) -> None:
    one = write_lora(tiny_folder, "qwen", tmp_path / "line art, v2.safetensors", 10)
    two = write_lora(tiny_folder, "qwen", tmp_path / "glow.safetensors", 20)
    with qwenimg.load(tiny_folder, backend, "fp32") as pipe:
        drawn = pipe("a red circle, round", **SMALL, lora=[(one, 0.7), (two, -1)])
        plain = pipe("a red circle, round", **SMALL)
    path = drawn.save(tmp_path / "a.png")
    with Image.open(path) as image:
        prompt, fields = read(image.info["parameters"])
    assert prompt == "a red circle, round <lora:line_art_v2:0.7> <lora:glow:-1>"
    assert loras(prompt, fields) == [
        ("line_art_v2", 0.7, behind_header(one)[:12]),
        ("glow", -1.0, behind_header(two)[:12]),
    ]
    assert (fields["Seed"], fields["Size"], fields["Model"]) == ("7", "32x32", tiny_folder.name)
    assert "Model hash" not in fields  # its transformer is in several files
    assert read(a1111_parameters(plain.recipe))[0] == "a red circle, round"
    assert "Lora hashes" not in read(a1111_parameters(plain.recipe))[1]


@pytest.mark.sample(0)
def test_a_model_in_one_file_has_its_hash(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = next((folders["sd15"] / "unet").glob("*.safetensors"))
    expected = hashlib.sha256(weights.read_bytes()).hexdigest()
    for most in (weights.stat().st_size, weights.stat().st_size - 1):
        monkeypatch.setattr(origin, "MAX_HASHED", most)
        recipe = qwenimg.load(folders["sd15"], "cpu", "fp32")("a ring", **SMALL).recipe
        fields = read(a1111_parameters(recipe))[1]
        assert fields.get("Model hash") == (expected[:10] if most >= weights.stat().st_size else None)
        assert fields["Model"] == folders["sd15"].name


def test_metadata_of_a_lora_change_its_file_and_not_its_hash(tiny_folder: Path, tmp_path: Path) -> None:
    lora = write_lora(tiny_folder, "qwen", tmp_path / "a.safetensors")
    noted = tmp_path / "b.safetensors"
    save_file(load_file(lora), noted, metadata={"ss_tag": "x" * 999})
    assert file_hash.data_sha256(open_regular(lora)) == file_hash.data_sha256(open_regular(noted))
    assert file_hash.sha256(open_regular(lora)) != file_hash.sha256(open_regular(noted))


def test_a_large_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, file = tmp_path / "cache" / "hashes.json", tmp_path / "large"
    monkeypatch.setattr(file_hash, "notes_file", lambda: notes)
    monkeypatch.setattr(file_hash, "KEPT_FROM", 10)
    file.write_bytes(b"a" * 100)
    counted: list[int] = []
    hashed = file_hash.hashed
    monkeypatch.setattr(file_hash, "hashed", lambda *asked: (counted.append(1), hashed(*asked))[1])

    def found() -> str:
        return file_hash.sha256(open_regular(file))

    assert found() == found() == hashlib.sha256(b"a" * 100).hexdigest() and len(counted) == 1
    file.write_bytes(b"b" * 100)
    os.utime(file, ns=(0, 5))
    assert found() == hashlib.sha256(b"b" * 100).hexdigest() and len(counted) == 2
    for broken in (b"", b"[1]", b"{" * 10_000, json.dumps(dict.fromkeys(json.loads(notes.read_text()), 5)).encode()):
        notes.write_bytes(broken)
        assert found() == hashlib.sha256(b"b" * 100).hexdigest()
    notes.unlink()
    notes.mkdir()  # it cannot be written
    assert found() == hashlib.sha256(b"b" * 100).hexdigest()


def test_a_blob_of_the_hubs_cache_has_its_hash_as_its_name(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("5" * 64)
    blob.parent.mkdir()
    blob.write_bytes(b"not looked at")
    (tmp_path / "model.safetensors").symlink_to(blob)
    assert file_hash.sha256(open_regular(tmp_path / "model.safetensors")) == "5" * 64


# Made again


@pytest.fixture
def drawn(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A picture with two LoRAs, in a folder without them."""
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("style", "glow"), 1):
        write_lora(tiny_folder, "qwen", tmp_path / f"{name}.safetensors", 10 * i)
    options = ("--size", "32x32", "--steps", "1", "-s", "3", "--backend", "cpu", "--quiet", "-o", "a.png")
    ran = cli(
        "a ring", "-m", str(tiny_folder), "--lora", "style.safetensors:0.7", "--lora", "glow.safetensors", *options
    )
    assert ran.code == 0, ran.err
    return tmp_path / "a.png"


def again(drawn: Path, folder: Path, *more: str) -> Any:
    return cli("--from", str(drawn), "-m", str(folder), "--backend", "cpu", "-o", "b.png", "--overwrite", *more)


@pytest.mark.sample(0)
def test_a_picture_is_made_again_with_loras_found_by_their_content(drawn: Path, tiny_folder: Path) -> None:
    folder, pixels = drawn.parent, Image.open(drawn).tobytes()
    loras = folder / "comfy" / "models" / "loras" / "qwen"
    loras.mkdir(parents=True)
    again(drawn, tiny_folder).refused(2, "made with --lora (style.safetensors:0.7; glow.safetensors:1); give the same")
    (folder / "style.safetensors").rename(loras / "renamed.safetensors")
    write_lora(tiny_folder, "qwen", loras / "style.safetensors", 99)  # of the same name and size, and another one
    again(drawn, tiny_folder, "--models-dir", "comfy").refused(
        2, "--lora (glow.safetensors); it is none of the 2 files"
    )
    (folder / "glow.safetensors").rename(folder / "comfy" / "glow.safetensors")
    ran = again(drawn, tiny_folder, "--models-dir", "comfy")
    assert ran.code == 0 and "warning" not in ran.err, ran.err
    assert re.search(
        r"LoRA style\.safetensors is \S*renamed\.safetensors, by its content \(3 files looked at\)", ran.err
    )
    assert Image.open("b.png").tobytes() == pixels
    first, second = (dict(recipe_from_png(folder / name)) for name in ("a.png", "b.png"))
    assert first["lora_fingerprints"] == second["lora_fingerprints"] and second["lora"].startswith(
        "renamed.safetensors:0.7"
    )


@pytest.mark.sample(0)
def test_the_recorded_name_is_looked_at_first_and_no_path_of_a_picture_is_opened(
    drawn: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """With both files under their names no other one is read, of however many."""
    loras = tmp_path / "comfy" / "loras"
    loras.mkdir(parents=True)
    for i in range(9):
        write_lora(tiny_folder, "qwen", loras / f"a{i}.safetensors", 50 + i)
    again(drawn, tiny_folder, "--models-dir", "comfy").refused(2, "it is none of the 9 files")  # they lie beside it
    for name in ("style", "glow"):
        (tmp_path / f"{name}.safetensors").rename(loras / f"{name}.safetensors")
    ran = again(drawn, tiny_folder, "--models-dir", "comfy")
    assert ran.code == 0 and "(2 files looked at)" in ran.err, ran.err
    ran = again(drawn, tiny_folder, "--models-dir", "comfy", "--lora", "none")
    assert ran.code == 0 and "looked at" not in ran.err, ran.err


def test_what_is_no_lora_in_that_folder_hurts_nobody(drawn: Path, tiny_folder: Path, tmp_path: Path) -> None:
    loras = tmp_path / "comfy" / "loras"
    (loras / "folder.safetensors").mkdir(parents=True)
    (loras / "empty.safetensors").write_bytes(b"")
    (loras / "nowhere.safetensors").symlink_to("gone")
    (loras / "a;b.safetensors").write_bytes(b"x")
    os.mkfifo(loras / "style.safetensors")
    for name in ("style", "glow"):
        (tmp_path / f"{name}.safetensors").rename(loras / f"my {name}.safetensors")
    ran = again(drawn, tiny_folder, "--models-dir", "comfy")
    assert ran.code == 0, ran.err


def test_without_our_json_the_text_is_read_as_another_programs(drawn: Path, tiny_folder: Path) -> None:
    """Its LoRAs are named in a warning, as those of any picture of AUTOMATIC1111's; the rest is taken over."""
    from PIL.PngImagePlugin import PngInfo

    with Image.open(drawn) as image:
        text = PngInfo()
        text.add_text("parameters", image.info["parameters"])
        image.save("text.png", pnginfo=text)
    ran = again(Path("text.png"), tiny_folder)
    assert ran.code == 0 and "left out unless given by --lora: style:0.7, glow" in ran.err, ran.err
    recipe = recipe_from_png(Path("b.png"))
    assert (recipe["prompt"], recipe["seed"], recipe["steps"]) == ("a ring", 3, 1)
