"""Where the tokenizer of a Stable Diffusion file is found on a machine, and how it is fetched where it is not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_hub import COMMIT, REPO
from support.refusals import refused
from support.tiny_clip import tiny_clip_vocabulary, write_tiny_clip_tokenizer

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import catalog
from qwenimg.common.hub import resolve
from qwenimg.common.hub.origin import label
from qwenimg.common.hub.pull import pull
from qwenimg.common.parts.downloads import CLIP_TOKENIZER
from qwenimg.common.parts.texts import clip_tokenizer
from qwenimg.common.parts.texts.clip_tokenizer import find_clip_tokenizer

SIZE = len(tiny_clip_vocabulary()[0])
SNAPSHOTS = ("snapshots", "a" * 40)


@pytest.fixture
def file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model on a clean machine; only its name and its folder count here."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "work" / "models" / "checkpoints" / "model.safetensors"
    path.parent.mkdir(parents=True)
    return path


def storage(cache: Path, repo: str) -> Path:
    return cache.joinpath(f"models--{repo.replace('/', '--')}", *SNAPSHOTS)


def test_a_clean_machine_says_what_to_do(file: Path) -> None:
    text = refused(find_clip_tokenizer, file, SIZE)
    for part in (
        "model.safetensors",
        "beside it",
        "ComfyUI",
        "qwenimg pull clip-tokenizer (1.5 MB)",
        "--tokenizer FOLDER",
    ):
        assert part in text


def test_the_nearest_comes_first(file: Path, cache: Path, tmp_path: Path) -> None:
    """Each place is found while those before it are empty."""
    near = file.parent
    farther = [
        storage(cache, "someone/finetune") / "tokenizer",
        near / "stable-diffusion-v1-5" / "tokenizer",
        tmp_path / "home" / "Documents" / "ComfyUI" / "comfy" / "sd1_tokenizer",
        tmp_path / "home" / "stable-diffusion-webui-forge" / clip_tokenizer.INSIDE[2],
        tmp_path / "home" / "Fooocus" / "ldm_patched" / "modules" / "sd1_tokenizer",
        tmp_path / "home" / "ComfyUI" / "comfy" / "sd1_tokenizer",
        tmp_path / "work" / "ComfyUI" / "comfy" / "sd1_tokenizer",
        tmp_path / "work" / "comfy" / "sd1_tokenizer",  # the file lies in this ComfyUI
        storage(cache, "runwayml/stable-diffusion-v1-5") / "tokenizer",
        storage(cache, "openai/clip-vit-large-patch14"),
        near,
        near / "tokenizer",
    ]
    for place in farther:
        if place == near:
            (near / "vocab.json").write_text("{}")  # half of one
            assert find_clip_tokenizer(file, SIZE) == farther[-3]
        write_tiny_clip_tokenizer(place)
        assert find_clip_tokenizer(file, SIZE) == place


def test_one_that_does_not_fit_is_passed_over(file: Path, cache: Path) -> None:
    """Another model's, one with other ids, one that is broken, and one that is a pipe."""
    write_tiny_clip_tokenizer(file.parent / "tokenizer")
    good = storage(cache, "openai/clip-vit-large-patch14")
    write_tiny_clip_tokenizer(good)
    vocab = file.parent / "tokenizer" / "vocab.json"
    whole = vocab.read_text()
    for text in (json.dumps(json.loads(whole) | {"one more": SIZE}), "{", '{"a": 0}'):
        vocab.write_text(text)
        assert find_clip_tokenizer(file, SIZE) == good
    vocab.unlink()
    os.mkfifo(vocab)
    assert find_clip_tokenizer(file, SIZE) == good
    vocab.unlink()
    with vocab.open("wb") as large:
        large.truncate(clip_tokenizer.MAX_BYTES + 1)
    assert find_clip_tokenizer(file, SIZE) == good
    assert "none that fits" in refused(find_clip_tokenizer, file, SIZE + 1)


def test_the_users_own_is_taken_or_refused(file: Path, tmp_path: Path) -> None:
    write_tiny_clip_tokenizer(file.parent)
    write_tiny_clip_tokenizer(tmp_path / "mine" / "tokenizer")
    mine = tmp_path / "mine" / "tokenizer"
    assert find_clip_tokenizer(file, SIZE, tmp_path / "mine") == find_clip_tokenizer(file, SIZE, mine) == mine
    assert "holds no tokenizer" in refused(find_clip_tokenizer, file, SIZE, tmp_path)
    assert "holds no tokenizer" in refused(find_clip_tokenizer, file, SIZE, tmp_path / "nowhere")
    assert "token ids up to" in refused(find_clip_tokenizer, file, SIZE + 1, mine)


def test_that_of_the_base_serves_its_refiner(file: Path, tmp_path: Path) -> None:
    write_tiny_clip_tokenizer(tmp_path / "base" / "tokenizer_2")
    assert find_clip_tokenizer(file, SIZE, also=tmp_path / "base" / "tokenizer_2").name == "tokenizer_2"


def test_a_recipe_holds_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert label(Path("/home/me/sd15/tokenizer")) == label(Path("/home/me/sd15")) == label(Path("a/sd15")) == "sd15"
    assert label(Path()) == label(Path("tokenizer")) == tmp_path.name and label(Path("/")) == "tokenizer"


# Fetching


@pytest.fixture
def published(fake, file, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The hub with the repository of the tokenizer, which holds a whole model, too."""
    piece = replace(CLIP_TOKENIZER, repo=REPO)
    monkeypatch.setattr(catalog, "NAMED", (piece,))
    monkeypatch.setattr(clip_tokenizer, "REPOS", (REPO,))
    write_tiny_clip_tokenizer(tmp_path / "published")
    fake.files = {path.name: path.read_bytes() for path in (tmp_path / "published").iterdir()}
    fake.files |= {"model.safetensors": bytes(99), "tokenizer.json": b"{}", "config.json": b"{}", "README.md": b""}
    return fake


@pytest.mark.parametrize("name", ["clip-tokenizer", "CLIP-Tokenizer", REPO])
def test_pull_fetches_the_vocabulary_alone(published, file: Path, name: str) -> None:
    lines: list[str] = []
    folder = pull(name, echo=lines.append, progress=lambda *_: None)
    assert {path.name for path in folder.iterdir()} == set(CLIP_TOKENIZER.files)
    assert "4 files" in lines[0] and folder.name == COMMIT and published.data_requests == []
    assert find_clip_tokenizer(file, SIZE) == folder
    again: list[str] = []
    assert pull(name, echo=again.append, progress=lambda *_: None, verify=True) == folder
    assert "every hash is right" in again[0] and "complete in the cache already" in again[1]


def test_a_mirror_without_it(published) -> None:
    del published.files["merges.txt"]
    assert "has no merges.txt" in refused(pull, "clip-tokenizer", echo=print, progress=lambda *_: None)


@pytest.mark.parametrize("name", ["clip-tokenizer", "openai/clip-vit-large-patch14"])
def test_it_is_no_model(name: str, file: Path, no_sockets) -> None:
    with pytest.raises(ModelError, match="no model; get it by: qwenimg pull clip-tokenizer"):
        resolve.resolve(name)
