"""A model as mflux saves it: its names, shards and order of axes, codes in every width; and stale indexes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import constants
from random_model import DIT, TEXT, VAE, write_random_model
from support.cli_runner import cli
from support.fake_hub import COMMIT, REPO
from support.family_cases import BACKENDS
from support.hub_cases import check_complete, pulled
from support.sparse_files import sparse

import qwenimg
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.qwen_image.checkpoint import NETWORKS
from qwenimg.common.hub.pull import pull
from qwenimg.common.quant.affine import Affine
from qwenimg.common.weights.storage import Packed

# Of one block, as its loader lists them: the names of a folder in diffusers layout, and those that it saves.
BLOCK = """
attn.to_q attn.to_q, attn.to_k attn.to_k, attn.to_v attn.to_v, attn.add_q_proj attn.add_q_proj,
attn.add_k_proj attn.add_k_proj, attn.add_v_proj attn.add_v_proj, attn.norm_q attn.norm_q, attn.norm_k attn.norm_k,
attn.norm_added_q attn.norm_added_q, attn.norm_added_k attn.norm_added_k, attn.to_out.0 attn.attn_to_out.0,
attn.to_add_out attn.to_add_out, img_mod.1 img_mod_linear, txt_mod.1 txt_mod_linear,
img_mlp.net.0.proj img_ff.mlp_in, img_mlp.net.2 img_ff.mlp_out, txt_mlp.net.0.proj txt_ff.mlp_in,
txt_mlp.net.2 txt_ff.mlp_out
"""
LAYERS = dict(pair.split() for pair in BLOCK.replace("\n", " ").split(","))
# Of the VAE: the down blocks of a folder, which are counted through, and the parts of a layer.
DOWN = [f"{block}.{part}" for block in range(4) for part in ("resnets.0", "resnets.1", "downsamplers.0")]
LOST = "encoder.down_blocks.5.time_conv."  # of which mflux's network has none
ASK: dict[str, Any] = {"seed": 3, "width": 32, "height": 32, "steps": 2, "guidance": 2.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    dit = replace(
        DIT, attention_head_dim=64, num_attention_heads=2, joint_attention_dim=128, axes_dims_rope=(16, 24, 24)
    )
    text = replace(TEXT, hidden_size=128, num_attention_heads=8, intermediate_size=192)
    write_random_model(folder, dit=dit, text=text, vae=replace(VAE, num_res_blocks=2), dtype="bfloat16")
    return folder


def theirs(name: str, part: str) -> str:
    if part == "vae":
        return theirs_of_vae(name)
    if part == "text_encoder":
        return f"encoder.{name.removeprefix('model.')}"
    if not name.startswith("transformer_blocks."):
        return name
    _, number, rest = name.split(".", 2)
    layer, _, leaf = rest.rpartition(".")
    return f"transformer_blocks.{number}.{LAYERS[layer]}.{leaf}"


def theirs_of_vae(name: str) -> str:
    *owner, leaf = name.split(".")
    if owner[:2] == ["encoder", "down_blocks"]:
        owner[2:3] = DOWN[int(owner[2])].split(".")
    if owner[:2] == ["decoder", "up_blocks"]:
        owner[1:3] = [f"up_block{owner[2]}"]
    if owner[-2:] == ["resample", "1"]:
        owner[-2:] = ["resample_conv"]
    elif leaf != "gamma" and owner[-1] not in ("to_qkv", "proj"):
        owner[-1:] = ["skip_conv" if owner[-1] == "conv_shortcut" else owner[-1], "conv3d"]
    return ".".join([*owner, "weight" if leaf == "gamma" else leaf])


def save(model: Path, out: Path, bits: int | None) -> None:
    """All parts, their matrices quantized by MLX in groups of 64, kernels with their channels last and gains of one
    dimension, in two shards and an index, as mflux does."""
    for part in ("transformer", "text_encoder", "vae"):
        (path,) = (model / part).glob("*.safetensors")
        made = {}
        for name, value in mx.load(str(path)).items():
            layer = theirs(name, part).removesuffix(".weight")
            if name.startswith(LOST):
                continue
            if name.endswith(".gamma"):
                made[f"{layer}.weight"] = value.flatten()
            elif value.ndim > 2:
                made[f"{layer}.weight"] = mx.contiguous(mx.moveaxis(value, 1, -1))
            elif bits and value.ndim == 2 and value.shape[1] % 64 == 0:
                made[f"{layer}.weight"], made[f"{layer}.scales"], made[f"{layer}.biases"] = mx.quantize(
                    value, group_size=64, bits=bits
                )
            else:
                made[theirs(name, part)] = value
        if part == "text_encoder":  # mflux 0.24 saves what it computed too
            for place in ("", "layers.0.self_attn."):
                made[f"encoder.{place}rotary_emb.inv_freq"] = mx.ones(16)
        about = {"quantization_level": str(bits), "mflux_version": "0.11.1"}
        names = list(made)
        (out / part).mkdir(parents=True)
        for i in range(2):
            mx.save_safetensors(str(out / part / f"{i}.safetensors"), {n: made[n] for n in names[i::2]}, about)
        index = {"metadata": about, "weight_map": {n: f"{i}.safetensors" for i in range(2) for n in names[i::2]}}
        (out / part / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_width_is_read_and_stays(model: Path, tmp_path: Path, bits: int) -> None:
    save(model, tmp_path, bits)
    parts = {name: tmp_path / name for name in ("transformer", "text_encoder")}
    opened = registry.open_model(model, LoadOptions(parts=parts))  # type: ignore[arg-type]
    for part in parts:
        entries = opened.checkpoint[part].plan.entries
        codes = {entry.storage.code for entry in entries.values() if isinstance(entry.storage, Packed)}
        matrices = [name for name, e in entries.items() if len(e.shape) == 2 and "embed_tokens" not in name]
        assert codes == {Affine(bits, 64)} and all(isinstance(entries[n].storage, Packed) for n in matrices)
    opened.checkpoint.close()


SMALL = ("transformer/config.json", "text_encoder/config.json", "vae/config.json", "tokenizer")


def saved(model: Path, out: Path, bits: int | None, *names: str) -> Path:
    """The whole folder, with `names` beside it, of the model's sizes: it says none itself, and has the published."""
    save(model, out, bits)
    for name in names or SMALL:
        copy = shutil.copytree if (model / name).is_dir() else shutil.copy
        copy(model / name, out / name)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_a_saved_folder_draws_what_the_folder_of_diffusers_draws(model: Path, tmp_path: Path, backend: str) -> None:
    """Not in codes: the same bits, also of the VAE's encoder, whose first kernel has the same shape in either order of
    axes. In codes: those of the folder that `convert` makes of it under diffusers' names."""
    folder = saved(model, tmp_path / "plain", None)
    start = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8)
    first, second = (
        qwenimg.load(path, backend, "fp32")("a red circle", image=start, strength=0.6, **ASK)
        for path in (model, folder)
    )
    assert np.array_equal(first.latents, second.latents) and np.array_equal(first.pixels, second.pixels)
    assert second.pixels.std() > 10 and second.recipe["model"] == "plain"
    coded = saved(model, tmp_path / "coded", 4)
    assert cli("convert", str(coded), str(tmp_path / "o"), "--quiet").code == 0
    same = [qwenimg.load(path, backend, "fp32")("a red circle", **ASK).latents for path in (coded, tmp_path / "o")]
    assert np.array_equal(*same)


# From the hub


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.sample(0)
def test_a_repository_by_its_hub_id(model: Path, tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulled, its size told first, and drawn offline by its id: the pictures of the folder, bit for bit. What lacks a
    shard is not whole."""
    folder = saved(model, tmp_path / "coded", 4)
    used = files_of(folder)
    fake.files = used | {"README.md": b"# of mflux", "transformer/x.py": b"import os"}
    place, lines, _ = pulled()
    check_complete(place, used)
    assert re.match(rf"{REPO} at commit {COMMIT[:12]}: {len(used)} files, [0-9.]+ MB", lines[0])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(fake.requests)
    for backend in BACKENDS:
        by_folder, by_id = (qwenimg.load(name, backend, "fp32")("a red circle", **ASK) for name in (folder, REPO))
        assert np.array_equal(by_folder.latents, by_id.latents) and np.array_equal(by_folder.pixels, by_id.pixels)
        assert by_id.recipe["model"] == REPO and by_id.pixels.std() > 10
    assert "every hash is right" in pulled_again(verify=True)
    (place / "transformer" / "1.safetensors").unlink()
    with pytest.raises(ModelError, match=rf"it lacks transformer/1\.safetensors; `qwenimg pull {REPO}` resumes"):
        qwenimg.load(REPO, "cpu")
    assert len(fake.requests) == asked


def pulled_again(**how: bool) -> str:
    lines: list[str] = []
    pull(REPO, echo=lines.append, progress=lambda *told: None, **how)
    return "".join(lines)


def test_another_model_of_mflux_is_refused_before_its_weights(model: Path, tmp_path: Path, fake: Any) -> None:
    """By the names in its index; one without an index when it is here, and it is not taken for whole."""
    used = files_of(saved(model, tmp_path / "coded", 4))
    index = "transformer/model.safetensors.index.json"
    fake.files = used | {index: b'{"weight_map": {"all_final_layer.2-1.linear.weight": "0.safetensors"}}'}
    with pytest.raises(ModelError, match="of no known model as another program saves it; it begins with all_final_la"):
        pulled()
    assert not fake.ranges("transformer/0.safetensors") and not fake.ranges("vae/0.safetensors")
    (place,) = (path for path in (tmp_path / "hf").rglob("snapshots/*"))
    assert not (place.parent.parent / "refs" / "main").exists()
    one = tmp_path / "one.safetensors"
    mx.save_safetensors(str(one), {"all_final_layer.weight": mx.zeros((2, 2))})
    fake.files = {path: data for path, data in used.items() if not path.startswith("transformer/")}
    fake.files |= {"transformer/0.safetensors": one.read_bytes()}
    fake.commit = "f" * 40
    with pytest.raises(ModelError, match=r"no model_index\.json here"):
        pulled()
    assert not (place.parent.parent / "refs" / "main").exists()


def test_the_vae_alone_and_shards_without_an_index(model: Path, tmp_path: Path) -> None:
    save(model, tmp_path, None)
    (tmp_path / "vae" / "model.safetensors.index.json").unlink()  # as older versions saved
    first = qwenimg.load(model, "cpu", "fp32")("a red circle", **ASK).pixels
    given = qwenimg.load(model, "cpu", "fp32", vae=tmp_path / "vae")("a red circle", **ASK).pixels
    assert np.array_equal(first, given)
    (tmp_path / "vae" / "0.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 numbered shards but not 0\.safetensors"):
        qwenimg.load(model, "cpu", vae=tmp_path / "vae")


def test_the_tokenizer_is_the_folders_or_the_caches_or_given(model: Path, tmp_path: Path, cache: Path) -> None:
    folder = saved(model, tmp_path / "x", 8, *SMALL[:3])
    with pytest.raises(ModelError, match=r"no tokenizer/.*qwenimg pull qwen-image-files \(4.7 MB\)"):
        qwenimg.load(folder, "cpu")
    assert cli("info", str(folder)).code == 5
    given = qwenimg.load(folder, "cpu", tokenizer=model / "tokenizer")
    assert given("a red circle", **ASK).recipe["tokenizer"] == "m"
    place = cache / "models--Qwen--Qwen-Image" / "snapshots" / ("0" * 40)
    place.mkdir(parents=True)
    shutil.copytree(model / "tokenizer", place / "tokenizer")
    opened = registry.open_model(folder).checkpoint
    opened.close()
    assert opened.tokenizers["text_encoder"].path == place / "tokenizer"
    with pytest.raises(UsageError, match="--tokenizer is for a model that has none"):
        qwenimg.load(model, "cpu", tokenizer=model / "tokenizer")


def test_info_of_the_published_size(model: Path, tmp_path: Path) -> None:
    """Headers of the published model in 4 bits, the modulation of images in 8, without any configuration."""
    for part, network in NETWORKS.items():
        manifest = network.manifest(network.config())
        entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for name, shape in manifest.items():
            layer = theirs(f"model.{name}" if part == "text_encoder" else name, part).removesuffix(".weight")
            bits = 8 if "img_mod" in name else 4
            if name.startswith(LOST):
                continue
            if len(shape) == 2 and part != "vae":
                entries[f"{layer}.weight"] = ("U32", (shape[0], shape[1] * bits // 32), 4)
                entries |= {f"{layer}.{k}": ("BF16", (shape[0], shape[1] // 64), 2) for k in ("scales", "biases")}
            elif name.endswith(".gamma"):
                entries[f"{layer}.weight"] = ("BF16", shape[:1], 2)
            else:
                kernel = (shape[0], *shape[2:], shape[1]) if len(shape) > 2 else shape
                entries[f"{layer}.weight" if len(shape) > 2 else theirs(name, part)] = ("BF16", kernel, 2)
        (tmp_path / part).mkdir()
        sparse(tmp_path / part / "0.safetensors", entries, {"mflux_version": "0.11.1", "quantization_level": "4"})
    shutil.copytree(model / "tokenizer", tmp_path / "tokenizer")
    said = cli("info", str(tmp_path))
    lines = said.out.decode().splitlines()
    print(*lines, sep="\n")
    assert lines[0].startswith("layout: folder of mflux (its names, as transformer_blocks.0.")
    assert lines[0].endswith("mflux 0.11.1, level 4") and said.code == 0, said
    assert "60 in 8 bits by groups of 64" in "".join(lines) and "20,430.4 M parameters" in "".join(lines)


def test_a_stale_index(model: Path, tmp_path: Path) -> None:
    """One that names shards of before is passed over; one of which a shard is here is not."""
    shutil.copytree(model, tmp_path / "m")
    part = tmp_path / "m" / "text_encoder"
    index = part / "model.safetensors.index.json"
    gone = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    index.write_text(json.dumps(gone))
    registry.open_model(tmp_path / "m").checkpoint.close()
    tensors = mx.load(str(part / "model.safetensors"))
    (part / "model.safetensors").unlink()
    names = list(tensors)
    for i in range(3):
        mx.save_safetensors(str(part / f"model-{i + 1:05}-of-00003.safetensors"), {n: tensors[n] for n in names[i::3]})
    registry.open_model(tmp_path / "m").checkpoint.close()
    (part / "model-00002-of-00003.safetensors").rename(part / "x.safetensors")
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors: does not exist"):
        registry.open_model(tmp_path / "m")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00003-of-00003.safetensors"}}))
    with pytest.raises(ModelError, match="which does not hold it"):
        registry.open_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("transformer", lambda t: t.pop("transformer_blocks.1.img_ff.mlp_out.scales")),
        ("transformer", lambda t: t.update({"transformer_blocks.9.img_mod_linear.bias": mx.zeros(2)})),
        ("transformer", lambda t: t.update({"transformer_blocks.0.img_mlp.net.2.bias": mx.zeros(128)})),
        ("text_encoder", lambda t: t.update({"norm.weight": mx.zeros(128)})),
        ("text_encoder", lambda t: t.pop("encoder.norm.weight")),
    ],
)
def test_every_tensor_counts(model: Path, tmp_path: Path, part: str, change: Any) -> None:
    """One line that names the tensor: codes without scales, a block too many, one layer under both names, none."""
    save(model, tmp_path, 8)
    tensors: dict[str, Any] = {}
    for i in range(2):
        tensors |= mx.load(str(tmp_path / part / f"{i}.safetensors"))
    shutil.rmtree(tmp_path / part)
    (tmp_path / part).mkdir()
    change(tensors)
    mx.save_safetensors(str(tmp_path / part / "model.safetensors"), tensors)
    option = f"--{part.replace('_', '-')}"
    asked = ("x", "-m", str(model), option, str(tmp_path / part), "--backend", "cpu", "-o", str(tmp_path / "x.png"))
    cli(*asked).refused(5, "model.safetensors")
