"""Embeddings in requests: names in prompts, files and folders, recipes and their replay, diffusers' method."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import embedding_files
from support.cli_runner import cli

import qwenimg
from qwenimg.common.base.errors import ModelError, QwenimgError, UsageError
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.prompts import inversion
from qwenimg.common.prompts.inversion import Inversion
from qwenimg.common.request import embedding_text
from qwenimg.common.request.embedding_text import Embedding

ASKED: dict[str, Any] = {"steps": 1, "seed": 1, "guidance": 1.0}


@pytest.fixture
def webui(tmp_path: Path) -> Path:
    """The folders of the web UI with embeddings for both tiny models."""
    folder = tmp_path / "webui" / "embeddings"
    (folder / "more").mkdir(parents=True)
    embedding_files.write(folder / "EasyNegative.safetensors", "sd15", 3, 1)
    embedding_files.a1111_pt(folder / "more" / "bad-hands.v2.pt", embedding_files.vectors(2, 60, 2))
    embedding_files.write(folder / "easy.safetensors", "sd15", 1, 3)
    embedding_files.write(folder / "style-xl.safetensors", "sdxl", 2, 4)
    (folder / "broken.pt").write_bytes(b"PK\3\4 nothing")
    return tmp_path / "webui"


def load(folder: Path, *models_dir: Path) -> Pipeline:
    return qwenimg.load(folder, backend="cpu", precision="fp32", models_dir=models_dir)


def named(pipe: Pipeline, prompt: str, **asked: Any) -> list[str]:
    return [one.name for one in pipe.check(prompt, **ASKED, **asked).inversions]


# Names in prompts


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ("a cat", []), ("easynegative", ["EasyNegative"]), ("(EASYNEGATIVE:1.2), a", ["EasyNegative"]),
        ("embedding:EasyNegative", ["EasyNegative"]), ("(embedding:easynegative:1.2)", ["EasyNegative"]),
        ("embedding:EasyNegative.safetensors", ["EasyNegative"]), ("easynegatively, uneasynegative", []),
        ("easynegative_v2 easynegative2", []), ("easynegative-2", ["EasyNegative"]),
        ("bad-hands.v2, easy", ["bad-hands.v2", "easy"]), ("uneasy easyness", []),
        ("[embedding:easy:embedding:bad-hands.v2:0.5]", ["easy", "bad-hands.v2"]),
        ("a AND embedding:easy :0.5", ["easy"]), ("word embedding: a diagram", []),
    ],
)  # fmt: skip
@pytest.mark.sample(7)
def test_names_in_a_prompt(folders, webui: Path, prompt: str, names: list[str]) -> None:
    pipe = load(folders["sd15"], webui)
    assert sorted(named(pipe, prompt)) == sorted(names)
    assert sorted(named(pipe, "a cat", negative_prompt=prompt)) == sorted(names)


def test_the_longest_name_counts() -> None:
    made = [Inversion(names=(name,), sha256="", vectors={"": np.zeros((1, 4))}) for name in ("a", "a b", "a b c")]
    assert inversion.marked("a b c, a b, a, embedding:a", made) == "\U000f0002, \U000f0001, \U000f0000, \U000f0000"
    text, used = inversion.used(inversion.marked("x a b c", made), made)
    assert text == "x \U000f0000" and used == (made[2],) and inversion.pieces(text) == ["x ", 0]


REFUSED = {
    "embedding:nothing": "no embedding of this name is here; give its file",
    "a embedding:easynegativ cat": "did you mean embedding:easynegative?",
    "embedding:style-xl": "is an embedding for",
    "(embedding:broken:1.1)": "broken.pt",
    "easy \U000f0000": "U+F0000",
    "<embedding:easy>": "write embedding:NAME without",
}


@pytest.mark.parametrize("prompt", REFUSED)
def test_what_a_prompt_may_not_name(folders, webui: Path, prompt: str) -> None:
    with pytest.raises(QwenimgError) as caught:
        load(folders["sd15"], webui).check(prompt, **ASKED)
    print(caught.value)
    assert REFUSED[prompt] in str(caught.value) and len(str(caught.value)) <= 330


def test_a_word_that_is_the_name_of_one_for_another_model_is_a_word(folders, webui: Path) -> None:
    pipe = load(folders["sd15"], webui)
    made = pipe("a style-xl, broken cat", **ASKED)
    assert [line.split(" in the prompt")[0] for line in made.warnings if "drawn as a word" in line] == [
        "style-xl", "broken",
    ]  # fmt: skip
    assert "embedding" not in made.recipe and "embedding_sha256" not in made.recipe
    assert named(load(folders["sdxl"], webui), "a style-xl, easy cat") == ["style-xl"]


@pytest.mark.sample(0)
def test_other_families_say_whom_they_are_for(tiny: dict[str, Path]) -> None:
    pipe = load(tiny["qwen"])
    for asked in ({"prompt": "a embedding:easy"}, {"prompt": "a", "embedding": "easy.pt"}):
        with pytest.raises(UsageError, match="are for Stable Diffusion; the model is Qwen-Image"):
            pipe.check(**asked, **ASKED)


# Files


def test_a_file_by_its_name_its_token_and_a_name_of_mine(folders, tmp_path: Path, monkeypatch) -> None:
    embedding_files.learned_embeds(tmp_path / "learned_embeds.bin", embedding_files.vectors(1, 60, 1))
    monkeypatch.chdir(tmp_path)
    pipe = load(folders["sd15"])
    plain = pipe("a <cat-toy>", embedding="learned_embeds.bin", **ASKED)
    for prompt, given in (("a learned_embeds", Path("learned_embeds.bin")), ("a pet", "pet=learned_embeds.bin"),
                          ("a embedding:pet", ["pet=learned_embeds.bin"]), ("a <CAT-toy>", tmp_path)):  # fmt: skip
        made = pipe(prompt, embedding=given, **ASKED)
        assert np.array_equal(made.latents, plain.latents), prompt
    unused = pipe("a cat", embedding="learned_embeds.bin", **ASKED)
    assert any("its name is in no prompt" in line for line in unused.warnings)
    assert not np.array_equal(unused.latents, plain.latents)


def test_a_changed_file_is_read_again_and_texts_are_kept_by_content(folders, tmp_path: Path) -> None:
    pipe, path = load(folders["sd15"]), tmp_path / "style.safetensors"
    drawn = []
    for seed in (1, 2, 1):
        embedding_files.write(path, "sd15", 2, seed)
        drawn.append(pipe("a style", embedding=path, **ASKED).latents)
    assert np.array_equal(drawn[0], drawn[2]) and not np.array_equal(drawn[0], drawn[1])


@pytest.mark.sample(0)
def test_texts_on_the_disk_are_kept_by_content(folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, drawn, loaded = tmp_path / "style.safetensors", [], []
    for seed in (1, 2, 1, 2):
        embedding_files.write(path, "sd15", 2, seed)
        with qwenimg.load(folders["sd15"], backend="cpu", precision="fp32", cache_prompts=True,
                          notify=lambda kind, text: loaded.append(text)) as pipe:  # fmt: skip
            drawn.append(pipe("a style", embedding=path, **ASKED).latents)
    assert np.array_equal(drawn[0], drawn[2]) and np.array_equal(drawn[1], drawn[3])
    assert not np.array_equal(drawn[0], drawn[1])
    assert sum("loading text encoder" in text for text in loaded) == 2  # the third and the fourth are from the disk


@pytest.mark.parametrize(
    "wrong", ["=x", "x=", "a=b=c;d=", "x" * 101 + "=f", 7, [1], "missing.pt", "a\nb=f", "\ud800=f", {"a": 1}]
)
def test_wrong_values(folders, wrong: Any) -> None:
    with pytest.raises(QwenimgError) as caught:
        load(folders["sd15"]).check("a", embedding=wrong, **ASKED)
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 300


def test_texts_are_read_back(tmp_path: Path) -> None:
    for one in (Embedding("a.pt"), Embedding("b/c.pt", "x y"), Embedding("owner/name"), Embedding("a=b.pt", "n")):
        assert embedding_text.parse(str(one)) == (one,)
    assert embedding_text.parse("a; none; b=c") == (Embedding("a"), Embedding("c", "b"))
    with pytest.raises(UsageError, match="at most 32"):
        embedding_text.parse(";".join("a" * 33))


# Recipes


@pytest.mark.sample(0)
def test_a_recipe_names_embeddings_and_is_drawn_again_by_their_content(
    folders, webui: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ("-m", str(folders["sd15"]), "--backend", "cpu", "--steps", "2")
    prompt = "a cat, (embedding:easynegative:1.2), bad-hands.v2"
    assert cli(prompt, *common, "--models-dir", str(webui), "-s", "1", "-o", "a.png").code == 0
    texts = Image.open("a.png").text
    assert prompt in texts["parameters"] and 'TI hashes: "EasyNegative: ' in texts["parameters"]
    assert str(tmp_path) not in "".join(texts.values())
    ran = cli("--from", "a.png", "-m", str(folders["sd15"]), "--backend", "cpu", "-o", "b.png")
    ran.refused(2, "made with --embedding (EasyNegative; bad-hands.v2)")
    other = tmp_path / "other" / "embeddings"
    other.mkdir(parents=True)
    shutil.copy(webui / "embeddings/EasyNegative.safetensors", other / "renamed.safetensors")
    again = ("--from", "a.png", "-m", str(folders["sd15"]), "--backend", "cpu", "--models-dir", "other")
    cli(*again, "-o", "b.png").refused(2, "made with --embedding (bad-hands.v2)")
    shutil.copy(webui / "embeddings/more/bad-hands.v2.pt", other)
    assert cli(*again, "-o", "b.png").code == 0
    assert np.array_equal(np.asarray(Image.open("a.png")), np.asarray(Image.open("b.png")))


def test_only_what_was_drawn_is_recorded(folders, webui: Path) -> None:
    pipe = load(folders["sd15"], webui)
    asked = {"steps": 1, "seed": 1, "negative_prompt": "easynegative"}
    assert "embedding" not in pipe("a cat", guidance=1.0, **asked).recipe
    assert pipe("an easy cat", guidance=1.0, **asked).recipe["embedding"] == "easy"
    assert pipe("an easy cat", guidance=2.0, **asked).recipe["embedding"] == "easy; EasyNegative"


def test_a_recipe_of_the_web_ui(folders, webui: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embeddings are found by their hashes; those that are not here are named, and drawn as words."""
    from hashlib import sha256

    from PIL.PngImagePlugin import PngInfo

    monkeypatch.chdir(tmp_path)
    digits = sha256((webui / "embeddings/easy.safetensors").read_bytes()).hexdigest()[:12]
    info = PngInfo()
    info.add_text("parameters", "a relaxed cat, gone\nSteps: 2, Sampler: Euler, CFG scale: 1, Seed: 1, Size: 64x64, "
                  f'TI hashes: "relaxed: {digits}, gone: 0123456789ab", Version: v1.10.1')  # fmt: skip
    Image.new("RGB", (64, 64)).save("a.png", pnginfo=info)
    ran = cli("--from", "a.png", "-m", str(folders["sd15"]), "--backend", "cpu", "--models-dir", str(webui),
              "-o", "b.png")  # fmt: skip
    print(ran.err)
    assert ran.code == 0 and "embedding relaxed: 1 vector" in ran.err and "TI hashes" not in ran.err
    assert "drawn as words unless given by --embedding: gone" in ran.err


def test_lines_of_a_prompt_file_have_their_own(folders, webui: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(webui / "embeddings/easy.safetensors", tmp_path)
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a mine", "embedding": "mine=easy.safetensors"}\n'
        '{"prompt": "a easy", "embedding": "easy.safetensors"}\n'
        '{"prompt": "a embedding:mine"}\n'
    )
    ran = cli("--prompt-file", "p.jsonl", "-m", str(folders["sd15"]), "--backend", "cpu", "--steps", "1", "-s", "1",
              "-o", "{index}.png", "--keep-going")  # fmt: skip
    assert "no embedding of this name" in ran.err and sorted(one.name for one in tmp_path.glob("*.png")) == [
        "1.png", "2.png",
    ]  # fmt: skip
    assert np.array_equal(*(np.asarray(Image.open(name)) for name in ("1.png", "2.png")))


# diffusers' method


@pytest.mark.sample(0)
def test_load_textual_inversion(folders, webui: Path) -> None:
    from qwenimg.diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

    path = webui / "embeddings/EasyNegative.safetensors"
    plain = load(folders["sd15"])("a <bad>", embedding=f"<bad>={path}", steps=2, seed=1, guidance=1.0)
    pipe = StableDiffusionPipeline.from_pretrained(folders["sd15"], backend="cpu", precision="fp32")
    asked = {"num_inference_steps": 2, "guidance_scale": 1.0, "seed": 1, "output_type": "np"}
    words = pipe("a <bad>", **asked).results[0]
    pipe.load_textual_inversion(path, token="<bad>")
    made = pipe("a <bad>", **asked).results[0]
    assert np.array_equal(made.latents, plain.latents) and not np.array_equal(words.latents, made.latents)
    pipe.unload_textual_inversion("<bad>")
    assert np.array_equal(pipe("a <bad>", **asked).results[0].latents, words.latents)
    pipe.load_textual_inversion(str(webui / "embeddings"), weight_name="easy.safetensors")
    with pytest.raises(ModelError, match="is an embedding for"):
        StableDiffusionXLPipeline.from_pretrained(folders["sdxl"], backend="cpu").load_textual_inversion(path)
    for wrong, more in (({"a": 1}, {}), (path, {"token": ["a", "b"]}), (7, {}), (path, {"force_download": True})):
        with pytest.raises(UsageError):
            pipe.load_textual_inversion(wrong, **more)


# Lists


def test_models_lists_the_embeddings_of_folders(webui: Path) -> None:
    ran = cli("models", "--models-dir", str(webui))
    told = ran.out.decode()
    print(told)
    assert (
        ran.code == 0 and "--embedding EasyNegative.safetensors" in told and "--embedding more/bad-hands.v2.pt" in told
    )
    assert "embedding, 3 vectors" in told and "broken.pt" in told
