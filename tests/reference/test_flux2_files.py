"""Parts of Flux.2 in files of their own: the VAE's tensors are those of the folder, bit for bit, and pictures too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_files import write
from support.refusals import refused
from support.relative import relative
from support.tiny_flux2 import SMALL_DECODER, TEXT, VAE, tiny_dit, tiny_vae, transformer_file

import qwenimg
from qwenimg.common.families import registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.vaes import flux2_vae_names, kl_vae_names
from qwenimg.common.networks.vaes.flux2_vae import Flux2VAEConfig
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.weights.values import read

Tensors = dict[str, torch.Tensor]


# The VAE


LIKE_VAE = Flux2VAEConfig(**{name: value for name, value in VAE.items() if not name.endswith("block_types")})


def vae_file(model: Any, inside: bool) -> Tensors:
    """In ldm names; `inside`: with the quant convolutions as Black Forest Labs' files have them."""
    stored = model.state_dict()
    names = {key: kl_vae_names.place(key, LIKE_VAE).key for key in stored}
    if inside:
        names = {
            key: {"quant_conv": "encoder.", "post_quant_conv": "decoder."}.get(name.split(".")[0], "") + name
            for key, name in names.items()
        }
    return {names[key]: value.contiguous() for key, value in stored.items()}


@pytest.mark.parametrize("changes", [{}, SMALL_DECODER], ids=["", "small decoder"])
@pytest.mark.parametrize("inside", [False, True])
def test_vae_in_ldm_names(tmp_path: Path, inside: bool, changes: dict[str, Any]) -> None:
    model, path = tiny_vae(**changes), tmp_path / "flux2-vae.safetensors"
    save_file(vae_file(model, inside), path)
    part = open_part(flux2_vae_names.LAYOUTS, path, LIKE_VAE, "vae")
    arrays = {name: read(entry) for name, entry in part.plan.entries.items()}
    expected = model.state_dict()
    del expected["bn.num_batches_tracked"]
    assert arrays.keys() == expected.keys()
    assert all(np.array_equal(array.reshape(expected[name].shape), expected[name]) for name, array in arrays.items())
    assert part.config == replace(LIKE_VAE, **changes)
    part.plan.close()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_picture_by_the_small_decoder(tiny_flux2: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """It has the latents of the other, which it decodes by itself, from a file and from a folder."""
    model = tiny_vae(**SMALL_DECODER)
    save_file(vae_file(model, True), tmp_path / "full_encoder_small_decoder.safetensors")
    model.save_pretrained(tmp_path / "vae")
    options: dict[str, Any] = {"backend": backend, "precision": "fp32"}
    places = (None, tmp_path / "full_encoder_small_decoder.safetensors", tmp_path / "vae")
    made = []
    for place in places:
        with qwenimg.load(tiny_flux2["flux2-klein"], **options, **({} if place is None else {"vae": place})) as pipe:
            made.append(pipe("a ring", width=48, height=32, steps=2, seed=5))
    whole, file, folder = made
    assert np.array_equal(whole.latents, file.latents) and np.array_equal(file.pixels, folder.pixels)
    assert not np.array_equal(whole.pixels, file.pixels)


@pytest.mark.parametrize("key", ["bn.running_var", "decoder.mid.block_1.norm1.bias"])
def test_vaes_that_are_not_whole_are_refused(tmp_path: Path, key: str) -> None:
    tensors, path = vae_file(tiny_vae(), True), tmp_path / "flux2-vae.safetensors"
    del tensors[key]
    save_file(tensors, path)
    assert f"lacks tensor '{key}'" in refused(open_part, flux2_vae_names.LAYOUTS, path, LIKE_VAE, "vae")
    save_file({"x": torch.ones(2)}, path)
    assert "holds no VAE of FLUX.2" in refused(open_part, flux2_vae_names.LAYOUTS, path, Flux2VAEConfig(), "vae")


# A model with parts from files


@pytest.fixture
def parts(tiny_flux2: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """The parts of the tiny model in files as ComfyUI has them."""
    text: Tensors = {}
    for file in (tiny_flux2["flux2-klein"] / "text_encoder").glob("*.safetensors"):
        text |= load_file(file)
    tensors = {"transformer": transformer_file(tiny_dit()), "text_encoder": text, "vae": vae_file(tiny_vae(), True)}
    for name, file in tensors.items():
        save_file(file, tmp_path / f"{name}.safetensors")
    return {name: tmp_path / f"{name}.safetensors" for name in tensors}


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_picture_of_parts_is_that_of_the_folder(
    tiny_flux2: dict[str, Path], parts: dict[str, Path], backend: str
) -> None:
    asked: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 5}
    folder, options = tiny_flux2["flux2-klein"], {"backend": backend, "precision": "fp32"}
    whole = qwenimg.load(folder, **options)("a ring", **asked)
    made_of_parts = qwenimg.load(folder, **parts, **options)("a ring", **asked)
    assert np.array_equal(whole.latents, made_of_parts.latents) and np.array_equal(whole.pixels, made_of_parts.pixels)


LLAMA_CPP = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
}  # fmt: skip


def mistral(folder: Path, *, whole: bool) -> Tensors:
    """dev's text encoder without vision. whole: else as ComfyUI has it, 30 layers and the vocabulary."""
    tensors: Tensors = {}
    for file in (folder / "text_encoder").glob("*.safetensors"):
        tensors |= load_file(file)
    start, unused = "language_model.model.", ("norm.", "layers.30.", "layers.31.")
    own = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
    if whole:
        return own | {"lm_head.weight": tensors["language_model.lm_head.weight"]}
    used = {f"model.{key}": value for key, value in own.items() if not key.startswith(unused)}
    return used | {"tekken_model": torch.zeros(8, dtype=torch.uint8)}


def in_gguf(tensors: Tensors) -> dict[str, tuple[np.ndarray, str]]:
    """By llama.cpp's names, with the rows of q and k in its order."""
    made = {}
    for key, value in tensors.items():
        *start, number, name = key.removesuffix(".weight").split(".", 2) if key.startswith("layers.") else ("", key)
        if name.endswith(("q_proj", "k_proj")):
            heads = value.shape[0] // TEXT["head_dim"]
            value = value.reshape(heads, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
        theirs = f"blk.{number}.{LLAMA_CPP[name]}.weight" if start else LLAMA_CPP[name]
        made[theirs] = (value.numpy(), "F32")
    return made


@pytest.mark.parametrize("form", ["ComfyUI's", "GGUF of llama", "GGUF of mistral3"])
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_picture_of_the_parts_of_dev(tiny_flux2: dict[str, Path], tmp_path: Path, backend: str, form: str) -> None:
    folder, text, options = tiny_flux2["flux2-dev"], tmp_path / "mistral", {"backend": backend, "precision": "fp32"}
    if form.startswith("GGUF"):
        write(text, in_gguf(mistral(folder, whole=True)), form.split()[-1])
    else:
        save_file(mistral(folder, whole=False), text)
    save_file(transformer_file(tiny_dit(guidance_embeds=True)), tmp_path / "flux2-dev.safetensors")
    made, written = [], []
    for parts in ({}, {"transformer": tmp_path / "flux2-dev.safetensors", "text_encoder": text}):
        with qwenimg.load(folder, **parts, **options) as pipe:
            made.append(pipe("a ring", width=48, height=32, steps=2, seed=5).latents)
            if form == "GGUF of llama":  # whose head writes
                written.append(pipe("a ring", width=48, height=32, steps=1, rewrite=0).recipe["prompt"])
    print(*(f"{len(text)} characters: {text[:20]}" for text in written), sep="\n")
    # The weights lie elsewhere in memory, where MLX's library for a CPU may add in another order; random weights have
    # near ties, of which one fell the other way behind 293 characters, on one machine of two.
    assert len({text[:100] for text in written}) <= 1
    error = relative(made[1], made[0])
    print(f"{backend} {form}: {error:.1e}")
    assert error < 1e-5 if form.startswith("GGUF") else error == 0  # RoPE turns other pairs there, in float32


def test_files_are_described_and_have_their_option(parts: dict[str, Path]) -> None:
    for name, path in parts.items():
        kind = registry.identify_file(path)
        assert kind is not None and kind.option == name
        description = describe(path)
        print("\n".join([*description.lines, *description.faults]))
        faults = {"transformer": "axes_dims_rope", "vae": "norm_num_groups"}  # of tiny heads and few channels
        if name in faults:
            assert faults[name] in description.faults[0]
        else:
            assert not description.faults and f"--{name.replace('_', '-')} FILE" in description.lines[-1]


def test_files_of_both_generations_are_told_apart(tmp_path: Path) -> None:
    """In GGUF too, where programs write the same architecture for both."""
    from support import tiny_flux

    for name, tensors in (
        ("flux2", transformer_file(tiny_dit())),
        ("flux", tiny_flux.transformer_file(tiny_flux.tiny_dit())),
    ):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        write(tmp_path / f"{name}.gguf", {key: (value.numpy(), "F32") for key, value in tensors.items()}, "flux")
        for path in (tmp_path / f"{name}.safetensors", tmp_path / f"{name}.gguf"):
            kind = registry.identify_file(path)
            assert kind is not None
            assert (kind.option, [family.name for family in kind.families]) == ("transformer", [name]), path
