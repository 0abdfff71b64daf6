"""The text encoders of Stable Diffusion from files of their own, by their names and widths; with UNet and VAE too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli_runner import cli
from support.tiny_ldm import behind, clip_file, models_of, open_clip_file, unet_file, vae_file

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe

ASKED: dict[str, Any] = {"width": 40, "height": 24, "steps": 1, "seed": 4, "guidance": 3.0, "sampler": "euler"}


def changed(kind: str) -> dict[str, torch.nn.Module]:
    """The models of the type with other weights."""
    models = models_of(kind)
    with torch.no_grad():
        for model in models.values():
            for parameter in model.parameters():
                parameter *= 0.9
    return models


def hugging_face(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """In transformers' names with the projection as it has it, which is no matrix of OpenCLIP's."""
    return {key: value.contiguous() for key, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def parts(both, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As ComfyUI's users have them, and `folder`: a model of nothing else."""
    place, models = tmp_path_factory.mktemp("parts"), changed("sdxl")
    shutil.copytree(both["sdxl"][0], place / "folder")
    for name, model in models.items():
        model.save_pretrained(place / "folder" / name)
    config = both["sdxl"][0] / "vae" / "config.json"  # with SDXL's factor
    shutil.copy(config, place / "folder" / "vae" / "config.json")
    first = clip_file(models["text_encoder"]) | {"text_projection.weight": torch.ones(64, 64)}  # which is not used
    files = {
        "clip_l": first | {"logit_scale": torch.ones(())},
        "clip_g": hugging_face(models["text_encoder_2"]),
        "open_clip": behind("conditioner.embedders.1.model.", open_clip_file(models["text_encoder_2"])),
        "saved": behind("clip_l.transformer.", first),
        "unet": unet_file(models["unet"]),
        "vae": vae_file(models["vae"]),
    }
    for name, tensors in files.items():
        save_file({key: value.contiguous() for key, value in tensors.items()}, place / f"{name}.safetensors")
    return {name: place / f"{name}.safetensors" for name in files} | {"folder": place / "folder"}


@pytest.mark.parametrize("backend", ["cpu", pytest.param("mlx", marks=pytest.mark.slow)])
@pytest.mark.sample(0)
def test_parts_of_sdxl_draw_what_their_model_draws(both, parts: dict[str, Path], backend: str) -> None:
    """Beside another model, in a folder and in a file; the encoders in either order and in several names."""
    whole = qwenimg.load(parts["folder"], backend, "fp32")("a red circle", **ASKED).latents
    others = {"transformer": parts["unet"], "vae": parts["vae"]}
    for model, first, second in (
        (both["sdxl"][0], "clip_l", "clip_g"),
        (both["sdxl"][1], "open_clip", "saved"),
    ):
        pipe = qwenimg.load(model, backend, "fp32", text_encoder=parts[first], text_encoder_2=parts[second], **others)
        made = pipe("a red circle", **ASKED)
        assert np.array_equal(made.latents, whole)
        assert (made.recipe["text_encoder"], made.recipe["text_encoder_2"]) == (
            f"{first}.safetensors",
            f"{second}.safetensors",
        )
        assert len(set(made.recipe["fingerprints"].values())) == len(made.recipe["fingerprints"]) >= 4
    alone = qwenimg.load(both["sdxl"][0], backend, "fp32", text_encoder=parts["clip_g"])("a red circle", **ASKED)
    assert not np.array_equal(alone.latents, whole) and alone.recipe["text_encoder"] == "clip_g.safetensors"


@pytest.mark.sample(0)
def test_a_vit_l_beside_sd1(both, tmp_path: Path) -> None:
    model = changed("sd1")["text_encoder"]
    folder = shutil.copytree(both["sd1"][0], tmp_path / "m")
    model.save_pretrained(folder / "text_encoder")
    save_file(clip_file(model), tmp_path / "clip_l.safetensors")
    saved = folder / "text_encoder" / "model.safetensors"
    assert not any(name.startswith("text_model.") for name in load_file(saved)), "transformers 5 leaves it out"
    assert "(width 64), transformers' names" in describe(saved).lines[0]
    made = [
        qwenimg.load(path, "cpu", "fp32", **given)("a red circle", **ASKED).latents
        for path, given in (
            (folder, {}),
            (both["sd1"][1], {"text_encoder": tmp_path / "clip_l.safetensors"}),
            (both["sd1"][0], {"text_encoder": folder / "text_encoder"}),
            (both["sd1"][1], {"text_encoder": saved}),
        )
    ]
    assert all(np.array_equal(made[0], other) for other in made[1:])


@pytest.mark.parametrize("open_clip", [False, True])
@pytest.mark.sample(1)
def test_a_whole_clip_with_its_tower_for_pictures(both, tmp_path: Path, open_clip: bool) -> None:
    """As `clip-vit-large-patch14` and OpenCLIP's own files are published: the text encoder's tensors are taken."""
    from transformers import CLIPConfig, CLIPModel, CLIPVisionConfig

    kind = "sd2" if open_clip else "sd1"
    model = changed(kind)["text_encoder"]
    folder = shutil.copytree(both[kind][0], tmp_path / "m")
    model.save_pretrained(folder / "text_encoder")
    if open_clip:
        tower = {"visual.proj": torch.ones(3, 3), "visual.transformer.resblocks.0.ln_1.bias": torch.ones(3)}
        text = open_clip_file(model, extra_layer=True)
        tensors = {key.removeprefix("transformer.text_model."): value for key, value in text.items()} | tower
    else:
        vision = CLIPVisionConfig(
            hidden_size=12, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        )
        whole = CLIPModel(CLIPConfig(text_config=model.config.to_dict(), vision_config=vision.to_dict()))
        own = {key.removeprefix("text_model."): value for key, value in model.state_dict().items()}
        whole.text_model.load_state_dict(own, strict=False)
        tensors = {key: value.contiguous() for key, value in whole.state_dict().items()}
        assert {"visual_projection.weight", "logit_scale"} < tensors.keys()
    save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "whole.safetensors")
    made = [
        qwenimg.load(path, "cpu", "fp32", **more)("a red circle", **ASKED).latents
        for path, more in ((folder, {}), (both[kind][0], {"text_encoder": tmp_path / "whole.safetensors"}))
    ]
    assert np.array_equal(*made)
    assert "CLIP" in describe(tmp_path / "whole.safetensors").lines[0]


def test_open_clips_layer_that_sd2_never_uses(both, tmp_path: Path) -> None:
    save_file(open_clip_file(models_of("sd2")["text_encoder"], extra_layer=True), tmp_path / "h.safetensors")
    opened = registry.open_model(both["sd2"][0], LoadOptions(parts={"text_encoder": tmp_path / "h.safetensors"}))
    opened.checkpoint.close()
    assert opened.checkpoint["text_encoder"].plan.files[0].path == tmp_path / "h.safetensors"


@pytest.mark.parametrize(
    ("kind", "names", "words"),
    [
        ("sdxl", ("clip_l", "saved"), "clip_l.safetensors and saved.safetensors are both the model's text_encoder"),
        ("sd1", ("clip_g",), "is a text encoder of width 128; folder takes width 64"),
        ("sdxl", ("vae",), "vae.safetensors: holds no CLIP text encoder"),
        ("sdxl", ("unet",), "unet.safetensors: holds no CLIP text encoder"),
    ],
)
@pytest.mark.sample(2)
def test_what_does_not_fit_is_one_line(
    both, parts: dict[str, Path], kind: str, names: tuple[str, ...], words: str
) -> None:
    given = [part for name in names for part in ("--text-encoder", str(parts[name]))]
    code = 2 if "both" in words else 5
    cli("a red circle", "-m", str(both[kind][0]), *given, "--backend", "cpu").refused(code, words)


@pytest.mark.parametrize("name", ["clip_l", "clip_g", "open_clip"])
@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "cut"])
@pytest.mark.sample(4)
def test_every_tensor_counts(both, parts: dict[str, Path], name: str, fault: str, tmp_path: Path) -> None:
    tensors, path = load_file(parts[name]), tmp_path / "given.safetensors"
    layers = sorted(key for key in tensors if key.endswith(("layers.1.mlp.fc1.bias", "resblocks.1.mlp.c_fc.bias")))
    if fault == "missing":
        del tensors[layers[0]]
    elif fault == "unknown":
        tensors[layers[0].replace(".1.mlp", ".9.mlp")] = torch.zeros(2)
    elif fault == "shape":
        tensors[layers[0]] = torch.zeros(3)
    save_file(tensors, path)
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError) as caught:
        registry.open_model(both["sdxl"][0], LoadOptions(parts={"text_encoder": path}))
    said = str(caught.value)
    print(said)
    assert "given.safetensors" in said and said.isprintable() and len(said) < 300


@pytest.mark.sample(0)
def test_the_command_line_takes_two_and_says_what_they_are(
    both, parts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ("--text-encoder", str(parts["clip_g"]), "--text-encoder", str(parts["clip_l"]))
    model = ("-m", str(both["sdxl"][0]), "--backend", "cpu", "--quiet", "--size", "72x40", "--steps", "1")
    assert cli("a red circle", *model, *texts, "-o", "a.png").code == 0
    assert cli("plan", *model[:4], *texts, "--size", "72x40").code == 0
    cli("--from", "a.png", *model, *texts[:2], "-o", "b.png").refused(2, "--text-encoder-2 (clip_l.safetensors)")
    cli("a red circle", *model, *texts, *texts, "-o", "b.png").refused(
        2, "4 files; a model has three text encoders at most"
    )
    assert cli("--from", "a.png", *model, *texts, "-o", "b.png").code == 0
    assert (
        "(width 128), OpenCLIP's names, behind conditioner.embedders.1.model." in describe(parts["open_clip"]).lines[0]
    )
    with pytest.raises(ModelError, match="neither is a vision tower"):
        qwenimg.load("shapes", "cpu", text_encoder_2=parts["clip_l"])
