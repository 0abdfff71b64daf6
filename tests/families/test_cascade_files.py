"""Stable Cascade's parts from other files: those of its authors, ComfyUI's two whole ones, in 8 bits and GGUF too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import oracle_effnet
from support.cli_runner import cli
from support.drawn_files import check_eight_bits, saved
from support.gguf_files import write
from support.relative import relative
from support.tiny_cascade import (
    WIDE_PRIOR,
    authors_file,
    tiny_decoder,
    tiny_prior,
    tiny_vqgan,
    vqgan_file,
    write_tiny_cascade,
)  # fmt: skip
from support.tiny_clip import tiny_clip

import qwenimg
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.cascade import checkpoint
from qwenimg.common.families.cascade.checkpoint import LAYOUTS
from qwenimg.common.families.cascade.known import EFFNET_FILE
from qwenimg.common.formats.headers import peek
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import cascade_unet
from qwenimg.common.networks.denoisers.cascade_unet import CascadeConfig
from qwenimg.common.networks.layout import StoredShapes
from qwenimg.common.networks.vaes import effnet
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.open_file import open_part

BACKENDS = ("cpu", "mlx")
ASKED: dict[str, Any] = {"width": 48, "height": 40, "steps": 2, "seed": 4, "guidance": 2.0, "decoder_steps": 2}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose prior has widths of whole blocks of codes."""
    folder = tmp_path_factory.mktemp("cascade") / "model"
    write_tiny_cascade(folder, WIDE_PRIOR, encodes=False)
    return folder


@pytest.fixture(scope="module")
def drawn(model: Path) -> dict[str, Any]:
    return {backend: qwenimg.load(model, backend, "fp32")("a red circle", **ASKED) for backend in BACKENDS}


def prior() -> Tensors:
    return authors_file(tiny_prior(**WIDE_PRIOR))


def bare(model: Path, folder: Path, *parts: str) -> Path:
    """A copy of the folder without the weights of those parts."""
    shutil.copytree(model, folder)
    for part in parts:
        for file in (folder / part).glob("*.safetensors"):
            file.unlink()
    return folder


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.sample(1)
def test_files_of_its_authors_draw_what_the_folder_draws(
    model: Path, drawn: dict[str, Any], tmp_path: Path, prefix: str
) -> None:
    given = {
        "transformer": saved(tmp_path / "stage_c.safetensors", {prefix + name: one for name, one in prior().items()}),
        "vae": saved(tmp_path / "stage_a.safetensors", vqgan_file(tiny_vqgan())),
        "text_encoder": model / "text_encoder" / "model.safetensors",
    }
    for file, title in ((given["transformer"], "Stable Cascade's prior"), (given["vae"], "Stable Cascade's VAE")):
        lines = describe(file).lines
        print(*lines, sep="\n")
        assert title in lines[0]
    folder = bare(model, tmp_path / "bare", "prior", "vqgan", "text_encoder")
    for backend in BACKENDS:
        made = qwenimg.load(folder, backend, "fp32", **given)("a red circle", **ASKED)  # type: ignore[arg-type]
        assert np.array_equal(made.latents, drawn[backend].latents)
        assert np.array_equal(made.pixels, drawn[backend].pixels) and made.pixels.std() > 10
        assert made.recipe["transformer"] == "stage_c.safetensors"


def test_the_folder_of_the_prior(model: Path, drawn: dict[str, Any], tmp_path: Path) -> None:
    """Of its own pipeline, or the part in it; without one the decoder's folder says how to get it."""
    folder = tmp_path / "decoder"
    shutil.copytree(model, folder)
    shutil.rmtree(folder / "prior")
    of_prior = model.with_name(f"{model.name}-prior")
    for given in (of_prior, of_prior / "prior"):
        made = qwenimg.load(folder, "cpu", "fp32", transformer=given)("a red circle", **ASKED)
        assert np.array_equal(made.latents, drawn["cpu"].latents)
    with pytest.raises(ModelError, match=r"lacks transformer: add --transformer FILE .*pull stable-cascade-prior"):
        qwenimg.load(folder, "cpu", "fp32")
    with pytest.raises(ModelError, match="prior of Stable Cascade alone"):
        qwenimg.load(of_prior, "cpu", "fp32")
    shutil.copytree(of_prior, tmp_path / "variant")
    [file] = (tmp_path / "variant" / "prior").glob("*.safetensors")
    file.rename(file.with_name("diffusion_pytorch_model.bf16.safetensors"))  # as the smaller download has it
    made = qwenimg.load(folder, "mlx", "fp32", transformer=tmp_path / "variant")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn["mlx"].latents)


# As the published ones are where no tensor shows it: heads of 64 channels, 64 sinusoids, 4 tokens of a pooled text
_WHOLE = {"timestep_ratio_embedding_dim": 64, "clip_seq": 4}
ONE_PRIOR = _WHOLE | {"block_out_channels": (64, 64), "num_attention_heads": (1, 1)}
ONE_DECODER = _WHOLE | {"block_out_channels": (24, 40, 64), "num_attention_heads": (0, 0, 1)}


def comfy_text(text: Any) -> Tensors:
    """The names of the text encoder in ComfyUI's files."""
    own = {f"transformer.{name}": value for name, value in text.state_dict().items() if name.startswith("text_model.")}
    own |= {"text_projection": text.text_projection.weight.data.T, "logit_scale": torch.ones(())}
    return {f"text_encoder.clip_g.{name}": value for name, value in own.items()}


@pytest.mark.sample(0)
def test_the_two_whole_files_of_comfyui(tmp_path: Path) -> None:
    """They alone draw what the folder draws, and so does a folder that is converted from them."""
    folder = tmp_path / "model"
    text = tiny_clip("bigG", seed=5, num_attention_heads=1)
    write_tiny_cascade(folder, ONE_PRIOR, ONE_DECODER)
    for part in ("text_encoder", "vqgan"):
        shutil.rmtree(folder / part)
    vae = tiny_vqgan(scale_factor=0.43)
    text.save_pretrained(folder / "text_encoder")
    vae.save_pretrained(folder / "vqgan")
    decoder, first = authors_file(tiny_decoder(**ONE_DECODER)), authors_file(tiny_prior(**ONE_PRIOR))
    b = {f"model.diffusion_model.{name}": value for name, value in decoder.items()} | comfy_text(text)
    b |= {f"vae.{name}": value for name, value in vqgan_file(vae).items()}
    c = {f"model.diffusion_model.{name}": value for name, value in first.items()} | comfy_text(text)
    # What sees pictures, which is not used
    c |= {"vae.encoder.backbone.0.0.weight": torch.ones(3), "clip_l_vision.vision_model.x.weight": torch.ones(3)}
    stage_b = saved(tmp_path / "stable_cascade_stage_b.safetensors", b)
    stage_c = saved(tmp_path / "stable_cascade_stage_c.safetensors", c)
    lines = describe(stage_b).lines
    of_prior = describe(stage_c).lines
    print(*lines, *of_prior, sep="\n")
    assert "Stable Cascade's prior" in of_prior[0] and "use it: qwenimg PROMPT -m DECODER" in of_prior[-1]
    assert "Stable Cascade, single file" in lines[0]
    assert any("lacks: transformer; add them by --transformer" in line for line in lines)
    with pytest.raises(ModelError, match="lacks transformer"):
        qwenimg.load(stage_b, "cpu", "fp32", tokenizer=folder / "tokenizer")
    for backend in BACKENDS:
        expected = qwenimg.load(folder, backend, "fp32")("a red circle", **ASKED)
        pipe = qwenimg.load(stage_b, backend, "fp32", transformer=stage_c, tokenizer=folder / "tokenizer")
        made = pipe("a red circle", **ASKED)
        assert np.array_equal(made.latents, expected.latents) and np.array_equal(made.pixels, expected.pixels)
    more = ("--transformer", str(stage_c), "--tokenizer", str(folder / "tokenizer"), "--quiet")
    assert cli("convert", str(stage_b), str(tmp_path / "o"), *more).code == 0
    again = qwenimg.load(tmp_path / "o", "mlx", "fp32")("a red circle", **ASKED)
    assert np.array_equal(again.latents, made.latents)


def test_the_shapes_of_files_show_their_configurations(tmp_path: Path) -> None:
    """In both programs' names, for levels of other sizes, widths and repetitions."""
    smaller = {"switch_level": None, "timestep_conditioning_type": ("sca",)}
    for part, made in (
        ("transformer", tiny_prior(**(ONE_PRIOR | {"block_out_channels": (64, 128), "num_attention_heads": (1, 2)}))),
        ("transformer", tiny_prior(**(ONE_PRIOR | smaller))),
        ("decoder", tiny_decoder(**ONE_DECODER)),
        ("decoder", tiny_decoder(**(ONE_DECODER | {"up_blocks_repeat_mappers": (1, 1, 1)}))),
    ):
        for i, tensors in enumerate((authors_file(made), dict(made.state_dict()))):
            file = saved(tmp_path / f"{i}.safetensors", tensors)
            assert LAYOUTS[part].find_in(peek(file)) is not None
            like = CascadeConfig(patch_size=2 if part == "decoder" else 1)
            opened = open_part(LAYOUTS[part], file, like, part)
            opened.plan.close()
            config = made.config
            own = opened.config
            assert list(own.block_out_channels) == list(config.block_out_channels)
            assert list(own.down_num_layers_per_block) == list(config.down_num_layers_per_block)
            assert list(own.up_blocks_repeat_mappers) == list(config.up_blocks_repeat_mappers)
            assert list(own.timestep_conditioning_type) == list(config.timestep_conditioning_type)
            assert own.one_size == (config.switch_level is not None)
            assert own.conditioning_dim == config.conditioning_dim


LITE: dict[str, dict[str, Any]] = {
    "transformer": {
        "conditioning_dim": 1536, "block_out_channels": (1536, 1536), "num_attention_heads": (24, 24),
        "down_num_layers_per_block": (4, 12), "up_num_layers_per_block": (12, 4), "clip_text_in_channels": 1280,
        "clip_image_in_channels": 768, "one_size": True,
    },
    "decoder": {
        "in_channels": 4, "out_channels": 4, "patch_size": 2, "conditioning_dim": 1280, "effnet_in_channels": 16,
        "block_out_channels": (320, 576, 1152, 1152), "num_attention_heads": (5, 9, 18, 18),
        "attending": (False, False, True, True), "down_num_layers_per_block": (2, 4, 14, 4),
        "up_num_layers_per_block": (4, 14, 4, 2), "down_blocks_repeat_mappers": (1, 1, 1, 1),
        "up_blocks_repeat_mappers": (2, 2, 2, 2), "pixel_mapper_in_channels": 3, "timestep_conditioning_type": ("sca",),
    },
}  # fmt: skip
"""The authors' smaller models."""


@pytest.mark.parametrize("part", LITE)
def test_the_smaller_models_of_its_authors(part: str) -> None:
    config, rows = CascadeConfig(**LITE[part]), LAYOUTS[part]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in cascade_unet.manifest(config).items():
        place = rows.place(rows.rows[0], name, config)
        shapes[place.key] = (place.rows.of * shape[0], *shape[1:])
    for like in (
        CascadeConfig(),
        known_configs.read("stable-cascade", {"transformer": "prior"}.get(part, part), rows.network),
    ):
        stored = StoredShapes(Path("a"), shapes, lambda name, like=like: rows.place(rows.rows[0], name, like).key)
        assert rows.config(stored, like) == config


@pytest.mark.parametrize("layout", ["older", "newer", "int8_convrot"])
@pytest.mark.sample(1)
def test_eight_bits_draw_what_their_values_draw(model: Path, tmp_path: Path, layout: str) -> None:
    """As ComfyUI writes them; q, k and v are parts of one tensor."""
    check_eight_bits(
        tmp_path,
        prior(),
        layout,
        lambda name: ".channelwise." in name or "out_proj" in name or "kv_mapper" in name,
        lambda file: qwenimg.load(model, "cpu", "fp32", transformer=file)("a ring", **ASKED),
    )


def test_gguf_is_refused(model: Path, tmp_path: Path) -> None:
    """No program writes it: its architecture has no name there."""
    arrays = {key: (value.numpy(), "F32") for key, value in prior().items()}
    write(tmp_path / "a.gguf", arrays, "cascade")
    with pytest.raises(ModelError, match="GGUF file of 'cascade', not of a transformer"):
        qwenimg.load(model, "cpu", "fp32", transformer=tmp_path / "a.gguf")


def test_a_converted_model_draws_the_same(model: Path, drawn: dict[str, Any], tmp_path: Path) -> None:
    """In diffusers' folders, whose UNets diffusers reads, and in codes."""
    from diffusers import StableCascadeUNet

    file = saved(tmp_path / "stage_c.safetensors", prior())
    folder = bare(model, tmp_path / "bare", "prior")
    assert cli("convert", str(folder), str(tmp_path / "o"), "--transformer", str(file), "--quiet").code == 0
    made = qwenimg.load(tmp_path / "o", "cpu", "fp32")("a red circle", **ASKED)
    assert np.array_equal(made.latents, drawn["cpu"].latents)
    for part, own in (("prior", tiny_prior(**WIDE_PRIOR)), ("decoder", tiny_decoder())):
        again, state = StableCascadeUNet.from_pretrained(tmp_path / "o" / part), own.state_dict()
        assert again.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    assert cli("convert", str(model), str(tmp_path / "q"), "-q", "8", "--quiet").code == 0
    for backend in BACKENDS:
        coded = qwenimg.load(tmp_path / "q", backend, "fp32")("a red circle", **ASKED)
        at_once = qwenimg.load(model, backend, "fp32", quantize="8")("a red circle", **ASKED)
        assert np.array_equal(coded.latents, at_once.latents)
        assert not np.array_equal(coded.latents, drawn[backend].latents)


LORAS = {
    "sd-scripts": "lora_prior_unet_down_blocks_0_2_attention_attn_to_q",
    "OneTrainer": "lora_prior_unet_down_blocks_0_2_attention_attn_in_proj_0",
    "PEFT": "base_model.model.down_blocks.0.2.attention.to_q",
    "diffusers": "transformer.down_blocks.0.2.attention.to_q",
}


@pytest.mark.parametrize("dialect", LORAS)
def test_loras_of_the_prior(model: Path, drawn: dict[str, Any], tmp_path: Path, dialect: str) -> None:
    """In each dialect the same weight is changed, as by a file whose weight is."""
    generator = torch.Generator().manual_seed(3)
    down, up = (torch.randn(shape, generator=generator) * 0.3 for shape in ((2, 64), (64, 2)))
    flat = LORAS[dialect].startswith("lora_")
    halves = ("lora_down", "lora_up") if flat else ("lora_A", "lora_B")
    file = saved(
        tmp_path / "a.safetensors",
        {f"{LORAS[dialect]}.{half}.weight": value for half, value in zip(halves, (down, up), strict=True)},
    )
    changed = load_file(model / "prior" / "diffusion_pytorch_model.safetensors")
    changed["down_blocks.0.2.attention.to_q.weight"] += up @ down
    merged = saved(tmp_path / "merged.safetensors", changed)
    for backend in BACKENDS:
        made = qwenimg.load(model, backend, "fp32")("a red circle", lora=str(file), **ASKED)
        expected = qwenimg.load(model, backend, "fp32", transformer=merged)("a red circle", **ASKED)
        error = np.abs(made.latents - expected.latents).max() / np.abs(expected.latents).max()
        change = np.abs(made.latents - drawn[backend].latents).max()
        print(f"{dialect} on {backend}: {error:.1e}, change {change:.1e}")
        assert error < 1e-5 and change > 1e-3


def test_streamed_weights_draw_the_same(model: Path, drawn: dict[str, Any]) -> None:
    """With one network at a time, and with weights that come from the file in each step."""
    for backend in BACKENDS:
        for more in ({"preset": "memory"}, {"max_memory": "40MB"}):
            made = qwenimg.load(model, backend, "fp32", **more)("a red circle", **ASKED)  # type: ignore[arg-type]
            assert np.array_equal(made.latents, drawn[backend].latents), more


# The encoder of pictures


def test_places_of_the_encoder_of_pictures(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as a file, beside the parts of the decoder as published, in the prior's file as ComfyUI has it, in the
    hub's cache, and in a folder as `convert` writes it; each is the same network."""
    tensors = oracle_effnet.tiny_effnet()
    file = saved(tmp_path / "e.safetensors", tensors)
    lines = describe(file).lines
    print(*lines, sep="\n")
    assert "encoder of pictures, its authors' names" in lines[0] and "--effnet FILE" in lines[-1]
    beside = tmp_path / "beside"
    shutil.copytree(model, beside)
    shutil.copy(file, beside / EFFNET_FILE)
    comfy = prior() | {f"vae.encoder.{name}": one for name, one in tensors.items()}
    comfy |= {"vae.encoder.mean": torch.ones(3), "vae.previewer.blocks.0.bias": torch.ones(3)}
    stage_c = saved(tmp_path / "stage_c.safetensors", comfy)
    assert "Stable Cascade's prior" in describe(stage_c).lines[0]
    assert cli("convert", str(beside), str(tmp_path / "o"), "--quiet").code == 0
    assert "effnet" in describe(tmp_path / "o").lines[-1] or any(
        "effnet" in one for one in describe(tmp_path / "o").lines
    )
    pixels = np.random.default_rng(0).random((1, 3, 64, 32), np.float32)
    expected = oracle_effnet.encoded(tensors, pixels)
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (effnet.MEAN, effnet.STD))
    bare_model = qwenimg.load(model, "cpu", "fp32")
    assert "effnet" not in bare_model.checkpoint.components
    monkeypatch.setattr(checkpoint, "find_cached", lambda name: file if name.endswith(EFFNET_FILE) else None)
    for place, given in (
        (model, {"effnet": file}), (beside, {}), (model, {"transformer": stage_c}), (tmp_path / "o", {}), (model, {}),
    ):  # fmt: skip
        pipe = qwenimg.load(place, "cpu", "fp32", **given)  # type: ignore[arg-type]
        part = pipe.checkpoint["effnet"]
        made = pipe.engine.open(part.network, part.config, part.stored(pipe.precision), pipe.precision)
        assert relative(made.encode((pixels - mean) / std), expected) < 1e-5, (place, given)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"backbone.1.0.block.0.1.running_var": None}, "lacks tensor 'backbone.1.0.block.0.1.running_var'"),
        ({"mapper.1.running_mean": None}, "lacks tensor 'mapper.1.running_mean'"),
        ({"backbone.4.1.block.2.fc1.weight": (3, 32, 1, 1)}, "backbone.4.1.block.2.fc1.weight"),
        ({"backbone.3.1.block.0.0.weight": (8, 8, 3, 3)}, "'backbone.3.1.block"),
        ({"backbone.2.0.block.1.1.bias": (6, 1)}, "has not 1 dimensions in tensor 'backbone.2.0.block.1.1.bias'"),
        ({"mapper.1.running_mean": (8,), "mapper.1.running_var": (8,), "mapper.0.weight": (8, 20, 1, 1)},
         "the prior takes 16 channels, the encoder of pictures makes 8"),
        ({"backbone.8.0.weight": (3,)}, "unknown tensor 'backbone.8.0.weight'"),
        ({"mapper.0.weight": None},
         "holds no effnet of the encoder of Stable Cascade, by its authors' names or ComfyUI's"),
    ],
)  # fmt: skip
def test_hostile_files_of_the_encoder(
    model: Path, tmp_path: Path, change: dict[str, tuple[int, ...] | None], match: str
) -> None:
    tensors = oracle_effnet.tiny_effnet()
    for name, shape in change.items():
        tensors.pop(name, None)
        tensors |= {} if shape is None else {name: torch.ones(shape)}
    with pytest.raises(ModelError) as caught:
        qwenimg.load(model, "cpu", "fp32", effnet=saved(tmp_path / "e.safetensors", tensors))
    print(caught.value)
    assert match in str(caught.value) and len(str(caught.value)) <= 300
