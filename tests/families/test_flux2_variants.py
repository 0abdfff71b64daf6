"""FLUX.2's six published models: their sizes, and what is refused, with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import passport_runs
from support.cli_runner import cli
from support.tiny_flux2 import tiny_dit, transformer_file

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import catalog, registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.parity.passport import passport_file

# Millions of parameters of the transformer, and of the text encoder's layers that are used with its embeddings.
NAMES = [
    *(f"flux2-klein-{kind}{size}" for kind in ("", "base-") for size in ("4b", "9b")),
    "flux2-klein-9b-kv",
    "flux2-dev",
]
SIZES = {
    "4b": (3875.54, 100.93 * 27 + 388.96),
    "9b": (9078.58, None),
    "kv": (9078.58, None),
    "ev": (32223.28, 555.75 * 30 + 671.09),
}


@pytest.mark.parametrize("name", NAMES)
def test_published_models_have_their_sizes_and_only_layers_that_are_used(name: str) -> None:
    model = registry.published(catalog.KNOWN[name])
    assert model is not None
    checkpoint = model.checkpoint
    dit, text = SIZES[name[-2:]]
    assert checkpoint["transformer"].plan.parameters / 1e6 == pytest.approx(dit, abs=0.006)
    names = checkpoint["text_encoder"].plan.entries
    assert {int(one.split(".")[1]) for one in names if one.startswith("layers.")} == set(
        range(30 if name == "flux2-dev" else 27)
    )
    if text is not None:
        assert checkpoint["text_encoder"].plan.parameters / 1e6 == pytest.approx(text, abs=1)
    assert checkpoint.distilled == ("base" not in name and name != "flux2-dev")
    kv = name.endswith("-kv")
    assert (checkpoint.variant, checkpoint["transformer"].network) == (
        ("kv", "flux2_kv_dit") if kv else ("", "flux2_dit")
    )


# What is refused


def changed(folder: Path, copy: Path, file: str, **values: Any) -> Path:
    """A copy of the model in `folder` whose `file` of JSON has these values."""
    shutil.copytree(folder, copy)
    path = copy / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return copy


INDEX, DIT, TEXT, VAE = "model_index.json", "transformer/config.json", "text_encoder/config.json", "vae/config.json"


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        (INDEX, {"_class_name": "Flux2Pipeline"}, "is FLUX.2 klein's by its guidance_embeds, and the other parts are"),
        (INDEX, {"_class_name": "Flux2KleinInpaintPipeline"}, "for another task: give the model's own folder"),
        (INDEX, {"is_distilled": "yes"}, "'is_distilled' is yes; expected true or false"),
        (INDEX, {"is_distilled": 1}, "'is_distilled' is 1; expected true or false"),
        (DIT, {"guidance_embeds": True}, "is FLUX.2 dev's by its guidance_embeds, and the other parts are"),
        (DIT, {"joint_attention_dim": 60}, "context_embedder.weight"),
        (DIT, {"in_channels": 128}, "x_embedder.weight"),
        (DIT, {"patch_size": 2}, "patch_size is 2: not supported"),
        (DIT, {"axes_dims_rope": [4, 6, 12]}, "must be 4 even numbers that add up to attention_head_dim 22"),
        (DIT, {"axes_dims_rope": [3, 7, 4, 8]}, "must be 4 even numbers"),
        (DIT, {"mlp_ratio": 0.0}, "mlp_ratio 0.0 gives no width"),
        (DIT, {"mlp_ratio": 1e9}, "gives no width"),
        (DIT, {"eps": 0.0}, "eps 0.0 or rope_theta"),
        (DIT, {"num_layers": 10**6}, "num_layers"),
        (DIT, {"num_attention_heads": 0}, "num_attention_heads"),
        (DIT, {"out_channels": 16}, "out_channels is 16; expected those of the input, 32"),
        (DIT, {"timestep_guidance_channels": 63}, "must be even"),
        (TEXT, {"num_hidden_layers": 27}, "num_hidden_layers 27 is too small"),
        (TEXT, {"model_type": "mistral3"}, "mistral3"),
        (VAE, {"latent_channels": 16}, "bn.running_mean"),
    ],
)
def test_models_that_are_refused(
    tiny_flux2: dict[str, Path], tmp_path: Path, file: str, values: dict[str, Any], said: str
) -> None:
    folder = changed(tiny_flux2["flux2-klein"], tmp_path / "model", file, **values)
    with pytest.raises(ModelError) as refused:
        qwenimg.load(folder, backend="cpu")
    text = str(refused.value)
    print(text)
    assert said in text and str(folder)[-40:] in text and "\n" not in text


def test_klein_kv_is_told_by_its_index_or_a_file_of_its_name(tiny_flux2: dict[str, Path], tmp_path: Path) -> None:
    """Without what the index may lack it is distilled. A transformer of the other kind in a folder stays the folder's
    unless its file's name says `kv`."""
    from safetensors.torch import save_file

    plain, kv = (registry.open_model(tiny_flux2[name]).checkpoint for name in ("flux2-klein", "flux2-kv"))
    assert (plain.variant, kv.variant, kv.distilled) == ("", "kv", True)
    tensors = transformer_file(tiny_dit())
    for name, folder, expected in (
        ("flux-2-klein-9b-kv-fp8", "flux2-klein", "kv"),
        ("flux-2-klein-9b-fp8", "flux2-klein", ""),
        ("flux-2-klein-mkv", "flux2-klein", ""),
        ("a-finetune", "flux2-kv", "kv"),
    ):
        save_file(tensors, file := tmp_path / f"{name}.safetensors")
        options = LoadOptions(parts={"transformer": file})
        checkpoint = registry.open_model(tiny_flux2[folder], options).checkpoint
        assert checkpoint.variant == expected, name
        assert checkpoint["transformer"].network == ("flux2_kv_dit" if expected else "flux2_dit")
        checkpoint.close()


def test_layers_that_no_forward_uses_may_be_missing(tiny_flux2: dict[str, Path], tmp_path: Path) -> None:
    """Those above the last tap, as in files that were made smaller."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_flux2["flux2-klein"], tmp_path / "model")
    tensors: dict[str, Any] = {}
    for file in (folder / "text_encoder").glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    for index in (folder / "text_encoder").glob("*.index.json"):
        index.unlink()
    unused = ("model.layers.27.", "model.layers.28.")
    used = {key: value for key, value in tensors.items() if not key.startswith(unused)}
    assert 0 < len(used) < len(tensors)
    save_file(used, folder / "text_encoder" / "model.safetensors")
    pipe = qwenimg.load(folder, backend="cpu", precision="fp32")
    assert pipe("a ring", width=32, height=32, steps=1, seed=1).pixels.std() > 0
    del used["model.layers.26.mlp.up_proj.weight"]
    save_file(used, folder / "text_encoder" / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.26\.mlp\.up_proj\.weight"):
        qwenimg.load(folder, backend="cpu")


PASSPORTS = [
    *((backend, "flux2-klein", "fp32") for backend in ("cpu", "mlx")),
    *(("cpu", "flux2-kv", precision) for precision in ("fp32", "bf16", "fp16")),
    *(("cpu", "flux2-dev", precision) for precision in ("fp32", "bf16", "fp16")),
]


@pytest.mark.parametrize(("backend", "kind", "precision"), PASSPORTS)
@pytest.mark.sample(0, rest=2)
def test_a_passport_with_two_references(
    tiny_flux2: dict[str, Path], tmp_path: Path, backend: str, kind: str, precision: str
) -> None:
    """It passes on the other backend, which encodes both."""
    passport, model = tmp_path / "passport.safetensors", tiny_flux2[kind]
    passport_runs.record(model, passport, backend, "--pictures", "2", "--precision", precision)
    recorded = passport_file.read(passport)
    assert recorded.picture is not None and recorded.picture.asked["pictures"] == 2
    told = passport_runs.check(model, passport, "mlx" if backend == "cpu" else "cpu")
    assert told.count("vae.encode         2 ") == 1


def test_more_pictures_than_a_model_sees(tiny_sd3: dict[str, Path], tmp_path: Path) -> None:
    passport = str(tmp_path / "passport.safetensors")
    ran = cli("parity", "record", str(tiny_sd3["sd3"]), "--backend", "cpu", "--pictures", "2", "-o", passport)
    ran.refused(2, "2 pictures are given", "takes one")
