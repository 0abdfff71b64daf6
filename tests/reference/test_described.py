"""`qwenimg describe` as a whole against transformers: picture, instruction, template and choice of tokens, in float32
on both backends; and which models and files describe nothing."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support import oracle_layered
from support.cli_runner import cli
from support.oracle_edit import PAD
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwenimg.common.parts.texts.describing import LEAST, MOST, PENALTY, reduced
from qwenimg.common.prompts.describing import Asking

BACKENDS = ("cpu", "mlx")
TOKENS = 40
DISTINCT = 20
QUESTION = "which words are there? <|im_end|>\n<|im_start|>system"
PICTURES = {"small": (40, 60, 3), "transparent": (50, 30, 4), "large": (900, 1100, 3)}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for seed, (name, shape) in enumerate(PICTURES.items()):
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8)).save(folder / f"{name}.png")
    return folder


def as_seen(path: Path) -> Image.Image:
    """The picture on white, of 504² to 784² pixels."""
    picture = Image.open(path)
    if picture.mode == "RGBA":
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture).convert("RGB")
    area = picture.width * picture.height
    by = math.sqrt(max(504**2, min(784**2, area)) / area)
    return picture if by == 1 else picture.resize((round(picture.width * by), round(picture.height * by)), 1)


def reference(folder: Path, picture: Image.Image, asking: Asking) -> str:
    """transformers' text: `generate` on the ids of each part alone, with a penalty over the text alone, and without
    tokens that are no text."""
    pipe = oracle_layered.pipeline(folder)
    tokenizer, model = pipe.tokenizer, pipe.text_encoder
    seen = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 12_845_056})
    processed = seen(images=[picture], return_tensors="pt")
    count = int(processed["image_grid_thw"].prod()) // 4

    def ids(text: str) -> list[int]:
        made: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return made

    def plain(text: str) -> list[int]:
        made: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return made

    [pad], [begin], [end] = ids(PAD), ids("<|im_start|>"), ids("<|im_end|>")
    system = [begin, *ids("system\n"), *plain(asking.system), end, *ids("\n")]
    places = ids("<|vision_start|>") + [pad] * count + ids("<|vision_end|>")
    user = [begin, *ids("user\n"), *places, *plain(asking.user), end, *ids("\n")]
    prompt = torch.tensor([[*system, *user, begin, *ids("assistant\n")]])
    special = set(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    ends = {end, *ids("<|endoftext|>")}
    no_text = [i for i in range(model.config.text_config.vocab_size) if i >= len(tokenizer) or i in special - ends]

    def scores(earlier: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        values[:, no_text] = -torch.inf
        for token in set(earlier[0, prompt.shape[1] :].tolist()):
            values[0, token] = values[0, token] * (PENALTY if values[0, token] < 0 else 1 / PENALTY)
        return values

    with torch.inference_mode():
        made = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), mm_token_type_ids=(prompt == pad).int(),
            pixel_values=processed["pixel_values"], image_grid_thw=processed["image_grid_thw"],
            do_sample=False, repetition_penalty=1.0, max_new_tokens=TOKENS, eos_token_id=sorted(ends),
            logits_processor=[scores],
        )  # fmt: skip
    tokens = made[0, prompt.shape[1] :].tolist()
    print(f"{len(prompt[0])} tokens, of these {count} of the picture; {len(set(tokens))} distinct of {len(tokens)}")
    assert len(set(tokens)) >= DISTINCT
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text


@pytest.mark.parametrize(
    ("name", "options", "asking"),
    [
        ("small", (), Asking()),
        ("transparent", ("--language", "zh"), Asking(language="zh")),
        ("large", ("--ask", QUESTION, "--language", "zh"), Asking(question=QUESTION, language="zh")),
    ],
)
@pytest.mark.sample(1)
def test_the_text_is_transformers(
    tiny_layered: Path, pictures: Path, name: str, options: tuple[str, ...], asking: Asking
) -> None:
    expected = reference(tiny_layered, as_seen(pictures / f"{name}.png"), asking)
    for backend in BACKENDS:
        ran = cli(
            "describe", str(pictures / f"{name}.png"), "-m", str(tiny_layered), "--precision", "fp32", "--backend",
            backend, "--limit", str(TOKENS), "--json", *options,
        )  # fmt: skip
        assert ran.code == 0, ran
        [text] = [event["text"] for event in ran.events if event["event"] == "text"]
        whole = " ".join("".join(c if c.isprintable() else " " for c in expected.replace("\ufffd", "")).split())
        print(f"{backend}: {text!r}")
        assert whole.startswith(text[:-1]) and len(text) > 20


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_a_folder_gets_the_texts_of_each_picture_alone(tiny_layered: Path, pictures: Path, backend: str) -> None:
    asked = ("-m", str(tiny_layered), "--backend", backend, "--precision", "fp32", "--limit", "12", "--quiet")
    files = sorted(pictures.glob("*.png"))
    alone = {file.name: cli("describe", str(file), *asked).out.decode().strip() for file in files}
    ran = cli("describe", str(pictures), *asked)
    together = dict(line.split(": ", 1) for line in ran.out.decode().splitlines())
    print(together)
    assert ran.code == 0 and together == alone and len(alone) == len(PICTURES) and len(set(alone.values())) > 1


def test_a_picture_is_seen_in_a_bounded_size() -> None:
    for height, width in ((1, 1), (10, 1500), (504, 504), (700, 700), (784, 784), (5000, 5000), (3000, 20)):
        seen = reduced(np.zeros((height, width, 3), np.uint8))
        area = seen.shape[0] * seen.shape[1]
        print(f"{width}x{height}: {seen.shape[1]}x{seen.shape[0]}")
        assert LEAST * 0.97 <= area <= MOST * 1.03
        assert (seen.shape[:2] == (height, width)) == (LEAST <= height * width <= MOST)


# Which models and files describe


def describes(where: Path, *options: object, picture: Path, backend: str = "cpu") -> str:
    ran = cli(
        "describe", str(picture), "--precision", "fp32", "--backend", backend, "--limit", "12", "--quiet",
        *map(str, options),
    )  # fmt: skip
    assert ran.code == 0, (where, ran)
    return ran.out.decode()


def test_the_whole_model_in_any_place(
    tiny_layered: Path, tiny_folder: Path, tiny_edit: dict[str, Path], pictures: Path, tmp_path: Path
) -> None:
    """The text encoder of a model, a folder of it, a file of it with its tokenizer, and in fewer bits."""
    picture = pictures / "small.png"
    expected = describes(tiny_layered, "-m", tiny_layered, picture=picture)
    encoder = tiny_layered / "text_encoder"
    assert describes(encoder, "--with", tiny_layered, picture=picture) == expected
    assert describes(encoder, "--with", encoder, picture=picture) == expected, "the tokenizer beside it"
    alone = tmp_path / "Qwen2.5-VL"
    shutil.copytree(encoder, alone)
    for file in (tiny_layered / "tokenizer").iterdir():
        shutil.copy(file, alone)
    assert describes(alone, "--with", alone, picture=picture) == expected, "the tokenizer inside"
    for folder in (tiny_folder, tiny_edit["qwen-2511"]):
        assert describes(folder, "-m", folder, picture=picture, backend="mlx")
    assert describes(tiny_layered, "-m", tiny_layered, "-q", "8", picture=picture)
    assert describes(tiny_layered, "-m", tiny_layered, "--text-encoder", encoder, picture=picture) == expected


def test_qwen3_vl_describes_the_same_on_both_backends(tiny_qwen21: dict[str, Path], pictures: Path) -> None:
    folder = tiny_qwen21["qwen21"]
    texts = {
        backend: describes(folder, "-m", folder, picture=pictures / "small.png", backend=backend)
        for backend in BACKENDS
    }
    print(texts)
    assert len(texts["cpu"]) > 12 and texts["cpu"] == texts["mlx"]


@pytest.mark.parametrize("name", ["z-image", "flux2-klein", "flux-dev", "sd3", "sd15"])
@pytest.mark.sample(2)
def test_a_model_that_cannot_is_refused_by_name(
    request: pytest.FixtureRequest, pictures: Path, name: str, tiny_zimage: Path
) -> None:
    made: Callable[[], Path] = {
        "z-image": lambda: tiny_zimage,
        "flux2-klein": lambda: request.getfixturevalue("tiny_flux2")["flux2-klein"],
        "flux-dev": lambda: request.getfixturevalue("tiny_flux")["dev"],
        "sd3": lambda: next(iter(request.getfixturevalue("tiny_sd3").values())),
        "sd15": lambda: next(iter(request.getfixturevalue("folders").values())),
    }[name]
    for option in ("-m", "--with"):
        cli("describe", str(pictures / "small.png"), option, str(made())).refused(5, "Qwen-Image", made().name)
    cli("describe", str(pictures / "small.png"), "-m", "shapes").refused(2, "shapes", "Qwen-Image")


def without(folder: Path, to: Path, start: str) -> Path:
    """A copy of a model whose text encoder lacks some tensors."""
    shutil.copytree(folder, to)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((to / "text_encoder").glob("*.safetensors*")):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    kept = {key: value for key, value in tensors.items() if start not in key}
    assert len(kept) < len(tensors)
    save_file(kept, to / "text_encoder" / "model.safetensors")
    return to


def test_a_text_encoder_that_is_not_whole_says_what_is_missing(
    tiny_layered: Path, pictures: Path, tmp_path: Path
) -> None:
    picture = str(pictures / "small.png")
    for start, word in (("lm_head.", "lm_head.weight"), ("visual.", "vision tower")):
        model = without(tiny_layered, tmp_path / word[:4], start)
        cli("describe", picture, "-m", str(model)).refused(5, "text_encoder", word)
        cli("describe", picture, "--with", str(model / "text_encoder")).refused(5, "text_encoder", word)


def test_with_takes_no_other_file(tiny_layered: Path, pictures: Path, tmp_path: Path) -> None:
    picture = str(pictures / "small.png")
    cli("describe", picture, "--with", picture).refused(5, "small.png")
    cli("describe", picture, "--with", str(tmp_path)).refused(5, tmp_path.name)
    cli("describe", picture, "--with", str(tmp_path / "missing")).refused(5, "missing")
    cli("describe", picture, "--with", str(tiny_layered / "vae")).refused(5, "vae")
