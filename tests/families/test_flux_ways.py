"""The ways in which a Flux.1 model is given and held in memory: parts in other programs' files, fewer bits, streamed
blocks, LoRAs, reused calls and float16."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_ldm
from support.comfy_files import comfy
from support.family_cases import BACKENDS
from support.folder_tensors import tensors
from support.gguf_files import fitting, write
from support.mflux_folders import save_as_mflux
from support.opened_parts import network_of, open_part, stream_half
from support.relative import relative
from support.tiny_flux import tiny_dit, transformer_file, write_tiny_flux

import qwenimg
from qwenimg import ModelError, UsageError
from qwenimg.common.conversion.convert import convert
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe
from qwenimg.common.weights.storage import Packed

ASKED: dict[str, Any] = {"prompt": "a red circle", "width": 64, "height": 48, "steps": 2, "seed": 3}
CLIP, T5 = "text_encoder", "text_encoder_2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dev whose rows are whole blocks of codes."""
    made = tmp_path_factory.mktemp("flux") / "wide"
    write_tiny_flux(made, "dev", wide=True)
    return made


def transformer(folder: Path) -> dict[str, torch.Tensor]:
    """The transformer in its authors' names."""
    from diffusers import FluxTransformer2DModel

    return transformer_file(FluxTransformer2DModel.from_pretrained(folder / "transformer"))


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each part in the file that ComfyUI has it in."""
    from diffusers import AutoencoderKL

    place = tmp_path_factory.mktemp("files")
    vae = tiny_ldm.vae_file(AutoencoderKL.from_pretrained(folder / "vae"))
    clip = {f"text_model.{name.removeprefix('text_model.')}": value for name, value in tensors(folder / CLIP).items()}
    contents = {
        "transformer": transformer(folder),
        CLIP: clip,
        T5: tensors(folder / T5),
        "vae": {name: value.contiguous() for name, value in vae.items()},
    }
    for name, content in contents.items():
        save_file(content, place / f"{name}.safetensors")
    return {name: place / f"{name}.safetensors" for name in contents}


def drawn(place: Path, backend: str, precision: str = "fp32", **options: Any) -> np.ndarray:
    asked = {name: options.pop(name) for name in ("lora", "step_cache", "true_cfg") if name in options}
    with qwenimg.load(place, backend, precision, **options) as pipe:
        return pipe(**ASKED, **asked).latents


# Parts in other files


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_parts_in_other_files_draw_the_same(folder: Path, files: dict[str, Path], backend: str) -> None:
    expected = drawn(folder, backend)
    given: dict[str, Any] = dict(files)
    assert np.array_equal(drawn(folder, backend, **given), expected)
    exchanged = given | {CLIP: files[T5], T5: files[CLIP]}  # what they are, their headers say
    assert np.array_equal(drawn(folder, backend, **exchanged), expected)


def test_a_folder_without_the_weights_that_are_elsewhere(folder: Path, files: dict[str, Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    assert np.array_equal(drawn(bare, "cpu", **files), drawn(folder, "cpu"))
    with pytest.raises(ModelError, match="vae"):
        drawn(bare, "cpu", **{name: path for name, path in files.items() if name != "vae"})


@pytest.mark.sample(0)
def test_parts_from_folders(folder: Path) -> None:
    parts = {name: folder / name for name in ("transformer", CLIP, T5, "vae")}
    assert np.array_equal(drawn(folder, "cpu", **parts), drawn(folder, "cpu"))


@pytest.mark.parametrize("layout", ["plain", "newer"])
@pytest.mark.sample(0)
def test_eight_bits_of_comfyui(folder: Path, tmp_path: Path, layout: str) -> None:
    written = comfy(
        tiny_ldm.behind("model.diffusion_model.", transformer(folder)), layout, lambda name: "linear" in name
    )
    save_file(written.tensors, tmp_path / "a.safetensors", metadata=written.notes)
    save_file({key: value.contiguous() for key, value in written.values.items()}, tmp_path / "b.safetensors")
    ours, expected = (drawn(folder, "cpu", transformer=tmp_path / f"{name}.safetensors") for name in "ab")
    assert np.array_equal(ours, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_gguf(folder: Path, tmp_path: Path, backend: str) -> None:
    """Codes stay codes in memory; the parts of a fused tensor keep theirs."""
    values = {key: value.numpy() for key, value in transformer(folder).items()}
    write(tmp_path / "a.gguf", {key: (value, fitting(value, "Q8_0")) for key, value in values.items()}, "flux")
    with qwenimg.load(folder, backend, "fp32", transformer=tmp_path / "a.gguf") as pipe:
        plan = pipe.model.checkpoint["transformer"].plan  # type: ignore[attr-defined]
        packed = {name for name, entry in plan.entries.items() if isinstance(entry.storage, Packed)}
        latents = pipe(**ASKED).latents
    assert {"single_transformer_blocks.0.proj_mlp.weight", "transformer_blocks.1.attn.to_k.weight"} <= packed
    assert "norm_out.linear.weight" not in packed, "its halves are swapped"
    error = relative(latents, drawn(folder, backend))
    print(f"{backend}: {error:.1e}")
    assert 0 < error < 0.05


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("transformer", "layout: Flux.1's transformer, its authors' names"),
        ("vae", "layout: a VAE for latents of 16 channels, ldm names"),
        (T5, "layout: T5, a text encoder, transformers' names"),
    ],
)
def test_info_of_files(files: dict[str, Path], part: str, words: str) -> None:
    about = describe(files[part])
    assert about.lines[0] == words
    assert part == "transformer" or about.lines[1].startswith("for: Stable Diffusion 3")
    if part == "transformer":  # narrower than the published one, whose axes it is taken to have
        assert "axes_dims_rope" in about.faults[0]


def test_info_of_a_transformer_of_published_heads(tmp_path: Path) -> None:
    for guided, words in (
        (True, "type: dev: it is guidance-distilled"),
        (False, "type: schnell: without guidance; if it is a dev without, say --variant dev"),
    ):
        sizes = {"attention_head_dim": 128, "num_attention_heads": 1, "axes_dims_rope": [16, 56, 56]}
        model = tiny_dit(guidance_embeds=guided, num_layers=1, num_single_layers=1, **sizes)
        save_file(transformer_file(model), tmp_path / "a.safetensors")
        about = describe(tmp_path / "a.safetensors")
        assert about.lines[1] == words and not about.faults
        assert about.lines[-1].startswith("use it: qwenimg PROMPT --transformer FILE --text-encoder CLIP-L --text-enc")


def test_files_that_do_not_fit_are_refused(folder: Path, files: dict[str, Path], tmp_path: Path) -> None:
    def refused(error: type[Exception], words: str, **parts: Path) -> None:
        with pytest.raises(error, match=words) as caught:
            registry.open_model(folder, LoadOptions(parts=parts))
        assert "\n" not in str(caught.value)

    refused(UsageError, "are both the model's text_encoder_2", text_encoder=files[T5], text_encoder_2=folder / T5)
    refused(ModelError, "holds no transformer of Flux.1", transformer=files["vae"])
    refused(ModelError, "holds no VAE", vae=files["transformer"])
    refused(ModelError, "holds no CLIP text encoder", text_encoder=files["vae"])
    other = tensors(folder / T5)
    other["encoder.final_layer_norm.weight"] = other["encoder.final_layer_norm.weight"][:-1]
    save_file(other, tmp_path / "a.safetensors")
    refused(ModelError, "encoder.final_layer_norm.weight", text_encoder=tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"is Flux\.1's transformer and no whole model"):
        registry.open_model(files["transformer"])


# mflux


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_folder_of_mflux_draws_the_same(folder: Path, tmp_path: Path, backend: str) -> None:
    """In codes: what the folder that `convert` makes of it under diffusers' names draws."""
    plain = save_as_mflux(folder, tmp_path / "plain", "flux", None)
    assert np.array_equal(drawn(plain, backend), drawn(folder, backend))
    coded = save_as_mflux(folder, tmp_path / "coded", "flux", 8)
    with qwenimg.load(coded, backend, "fp32") as pipe:
        entries = pipe.model.checkpoint[T5].plan.entries  # type: ignore[attr-defined]
        assert any(isinstance(entry.storage, Packed) for entry in entries.values())
        latents = pipe(**ASKED).latents
    convert(coded, tmp_path / "made", LoadOptions(), Mock())
    assert np.array_equal(drawn(tmp_path / "made", backend), latents)
    assert 0 < relative(latents, drawn(folder, backend)) < 0.1


def test_a_folder_of_mflux_says_what_it_is(folder: Path, tmp_path: Path) -> None:
    plain = save_as_mflux(folder, tmp_path / "plain", "flux", None)
    about = describe(plain)
    assert not about.faults and about.lines[:2] == [
        "layout: folder of mflux (its names, as transformer_blocks.0.ff.linear1.bias), mflux 0.13.1, level None",
        "pipeline: Flux.1 dev, text to image",
    ]
    opened = registry.open_model(plain)
    assert (opened.defaults().steps, opened.checkpoint.scheduler.use_dynamic_shifting) == (28, True)
    opened.checkpoint.close()
    (plain / "transformer" / "config.json").unlink()  # then it is of the published size
    with pytest.raises(ModelError, match=r"the configuration is of another model|lacks tensor"):
        registry.open_model(plain)


# Memory


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_streamed_blocks_give_the_same_bits(folder: Path, backend: str) -> None:
    """Half of the blocks of both kinds."""
    with qwenimg.load(folder, backend, "fp32") as pipe:
        expected = [pipe(**(ASKED | {"seed": seed})).latents for seed in (3, 4)]
    with qwenimg.load(folder, backend, "fp32") as pipe:
        stream_half(pipe)
        latents = [pipe(**(ASKED | {"seed": seed})).latents for seed in (3, 4)]
        streamed = network_of(pipe, "transformer").streamed.blocks
    print(f"{backend}: {', '.join(streamed)}")
    assert len(streamed) >= 3 and any(path.startswith("single_") for path in streamed)
    assert all(map(np.array_equal, latents, expected))


@pytest.mark.parametrize("bits", ["8", "4"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_fewer_bits_at_load_and_converted(folder: Path, tmp_path: Path, backend: str, bits: str) -> None:
    at_load = drawn(folder, backend, quantize=bits)
    error = relative(at_load, drawn(folder, backend))
    print(f"{backend} -q {bits}: {error:.1e}")
    assert 0 < error < {"8": 0.1, "4": 1.0}[bits]
    convert(folder, tmp_path / bits, LoadOptions(quantize=bits), Mock())
    assert np.array_equal(drawn(tmp_path / bits, backend), at_load)


@pytest.mark.sample(0)
def test_a_folder_is_made_of_other_files(folder: Path, files: dict[str, Path], tmp_path: Path) -> None:
    convert(folder, tmp_path / "made", LoadOptions(parts=files), Mock())
    for name in ("transformer", CLIP, T5, "vae"):
        kept, made = tensors(folder / name), tensors(tmp_path / "made" / name)
        ours = {key.removeprefix("text_model."): value for key, value in made.items()}
        theirs = {key.removeprefix("text_model."): value for key, value in kept.items()}
        ours.pop("encoder.embed_tokens.weight", None), theirs.pop("encoder.embed_tokens.weight", None)
        assert ours.keys() == theirs.keys(), name
        assert all(torch.equal(ours[key].reshape(value.shape), value) for key, value in theirs.items()), name
    assert np.array_equal(drawn(tmp_path / "made", "cpu"), drawn(folder, "cpu"))


# LoRAs


def kohya(modules: dict[str, tuple[int, int]], size: float = 0.3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        key: value
        for name, (outputs, inputs) in modules.items()
        for key, value in (
            (f"{name}.lora_down.weight", torch.randn(4, inputs, generator=generator) / inputs**0.5),
            (f"{name}.lora_up.weight", size * torch.randn(outputs, 4, generator=generator)),
            (f"{name}.alpha", torch.tensor(2.0)),
        )
    }


MODULES: dict[str, dict[str, tuple[int, int]]] = {
    "fused layers": {
        "lora_unet_double_blocks_0_img_attn_qkv": (288, 96),
        "lora_unet_double_blocks_1_txt_attn_qkv": (288, 96),
        "lora_unet_single_blocks_2_linear1": (672, 96),
        "lora_unet_single_blocks_0_linear2": (96, 480),
    },
    "modulation": {
        "lora_unet_double_blocks_0_img_mod_lin": (576, 96),
        "lora_unet_single_blocks_1_modulation_lin": (288, 96),
    },
    "CLIP": {"lora_te1_text_model_encoder_layers_0_self_attn_q_proj": (64, 64)},
    "T5": {"lora_te3_encoder_block_0_layer_0_SelfAttention_v": (64, 64)},
}  # fmt: skip


@pytest.mark.parametrize("part", MODULES)
@pytest.mark.sample(0)
def test_loras_change_the_picture_and_leave_it(folder: Path, tmp_path: Path, part: str) -> None:
    """With the modulation and the states of texts that were kept for the model without the LoRA, and the other way."""
    file = tmp_path / "a.safetensors"
    save_file(kohya(MODULES[part]), file)
    changed = {backend: drawn(folder, backend, lora=str(file)) for backend in BACKENDS}
    error = relative(changed["mlx"], changed["cpu"])
    print(f"{part}: {error:.1e}")
    assert error < 1e-5
    with qwenimg.load(folder, "cpu", "fp32") as pipe:
        plain = pipe(**ASKED).latents
        assert np.array_equal(pipe(**ASKED, lora=str(file)).latents, changed["cpu"])
        assert relative(plain, changed["cpu"]) > 1e-3
        assert np.array_equal(pipe(**ASKED).latents, plain)
        beside = pipe(**ASKED, lora=str(file), lora_mode="side").latents
        assert relative(beside, changed["cpu"]) < 1e-4
    with_codes = drawn(folder, "cpu", lora=str(file), quantize="8")
    assert relative(with_codes, drawn(folder, "cpu", quantize="8")) > 1e-3


def test_few_step_loras_have_their_settings(folder: Path) -> None:
    with qwenimg.load(folder, "cpu", "fp32") as pipe:
        hyper = pipe.resolve({"few_steps": "hyper"})
        turbo = pipe.resolve({"few_steps": "turbo", "lora": "mine.safetensors:0.5"})
        with pytest.raises(UsageError, match="is made for 8, 16 steps"):
            pipe.resolve({"few_steps": "hyper:4"})
    assert (hyper["steps"], hyper["guidance"]) == (8, 3.5)
    assert [*map(str, hyper["lora"])] == ["ByteDance/Hyper-SD/Hyper-FLUX.1-dev-8steps-lora.safetensors:0.125"]
    first, second = map(str, turbo["lora"])
    assert first.endswith("FLUX.1-Turbo-Alpha/diffusion_pytorch_model.safetensors")
    assert second == "mine.safetensors:0.5"


# Reused calls


@pytest.mark.sample(0)
def test_both_backends_reuse_the_same_calls(folder: Path) -> None:
    more: dict[str, Any] = {"steps": 8, "true_cfg": 2.0, "negative_prompt": "x", "step_cache": 0.5}
    made = [qwenimg.load(folder, backend, "fp32")(**(ASKED | more)) for backend in BACKENDS]
    lists = [dict(one.recipe)["cached_calls"] for one in made]
    error = relative(made[1].latents, made[0].latents)
    print(f"calls {lists[0]}: {error:.1e}")
    assert lists[0] == lists[1] != "" and error < 1e-4


def test_a_reused_call_adds_what_the_deeper_blocks_added(folder: Path) -> None:
    """In the second call, what they added in the first one is added behind the first block; by hand."""
    with qwenimg.load(folder, "cpu", "fp32") as pipe:
        model = open_part(pipe, "transformer").model
        blocks, entered = [*model.transformer_blocks, *model.single_transformer_blocks], list[Any]()
        results: dict[int, list[Any]] = {0: [], len(blocks) - 1: []}
        for i, kept in results.items():
            blocks[i].register_forward_hook(lambda _, __, result, kept=kept: kept.append(result[0].clone()))
        model.norm_out.register_forward_pre_hook(lambda _, arguments: entered.append(arguments[0].clone()))
        pipe(**ASKED, cached_calls="2")
        assert len(entered) == 2 and len(results[0]) == 2 and len(results[len(blocks) - 1]) == 1
        [(first, second), [last]] = results.values()
        assert torch.equal(entered[0], last)
        assert torch.allclose(entered[1], second + (last - first), atol=0, rtol=1e-6)
        assert float((last - first).abs().max()) > 0.1


# float16


def overflowing(folder: Path, place: Path) -> Path:
    """The model with a text stream beyond float16: its first feed-forward's last layer is enlarged."""
    shutil.copytree(folder, place)
    for file in (place / "transformer").glob("*.safetensors"):
        values = load_file(file)
        for name in ("transformer_blocks.0.ff_context.net.2.weight", "transformer_blocks.0.ff_context.net.2.bias"):
            if name in values:
                values[name] = values[name] * 3e4
        save_file(values, file, metadata={"format": "pt"})
    return place


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(0)
def test_a_text_stream_beyond_float16(folder: Path, tmp_path: Path, backend: str) -> None:
    """Under fp16 the stream is float32 and right; under fp16-plain it is clipped as in diffusers, and finite."""
    place = overflowing(folder, tmp_path / "large")
    exact = drawn(place, backend)
    errors = {name: relative(drawn(place, backend, name), exact) for name in ("fp16", "fp16-upcast", "fp16-plain")}
    print(f"{backend}: {errors}")
    assert errors["fp16"] < 0.02 and errors["fp16-upcast"] < 0.02
    assert np.isfinite(errors["fp16-plain"])
