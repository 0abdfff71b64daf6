"""A whole Qwen-Image or Z-Image in one file, as ComfyUI saves it, and parts that kept its prefixes: the picture is that
of the folder that the file was made from."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import tiny_flux, tiny_ldm
from support.comfy_files import comfy
from support.family_cases import BACKENDS
from support.folder_tensors import tensors
from support.refusals import refused
from support.tiny_model import randomise, tiny_dit, write_tiny_model
from support.tiny_zimage import tiny_dit as tiny_zimage_dit
from support.tiny_zimage import tiny_vae, transformer_file, write_tiny_zimage
from tiny_tokenizer import tiny_vocabulary

import qwenimg
from qwenimg.common.conversion.convert import convert
from qwenimg.common.families import registry
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.hub.describe import describe

ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 3, "guidance": 2.0}
TEXTS = {"qwen-image": "qwen25_7b", "z-image": "qwen3_4b"}
DENOISER = "model.diffusion_model."
FAMILIES = tuple(TEXTS)
Tensors = dict[str, torch.Tensor]


def write_qwen(folder: Path) -> Tensors:
    """A folder whose heads are as wide as the published ones, since no tensor shows that, and the transformer's
    tensors."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    write_tiny_model(folder)
    sizes = {"attention_head_dim": 128, "num_attention_heads": 1, "axes_dims_rope": (16, 56, 56)}
    dit = tiny_dit(**sizes, joint_attention_dim=256, num_layers=2)
    text = {
        "hidden_size": 256,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "rms_norm_eps": 1e-6,
        "vocab_size": len(tiny_vocabulary()[0]) + 14,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 256}
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    randomise(encoder, 3)
    for part, model in (("transformer", dit), ("text_encoder", encoder)):
        shutil.rmtree(folder / part)
        model.save_pretrained(folder / part)
    return {name: value.contiguous() for name, value in dit.state_dict().items()}


def write_zimage(folder: Path) -> Tensors:
    sizes = {"dim": 128, "n_heads": 1, "n_kv_heads": 1, "axes_dims": [32, 48, 48]}
    write_tiny_zimage(folder, "5GB", sizes)
    shutil.rmtree(folder / "vae")
    tiny_vae(block_out_channels=[32, 32, 64, 32], norm_num_groups=32).save_pretrained(folder / "vae")
    return transformer_file(tiny_zimage_dit(**sizes))


WRITE: dict[str, Callable[[Path], Tensors]] = {"qwen-image": write_qwen, "z-image": write_zimage}


class Made:
    """A folder, and the same in one file beside its tokenizer."""

    def __init__(self, place: Path, family: str):
        self.folder, self.file = place / "folder", place / f"{family}-turbo-aio.safetensors"
        self.denoiser = WRITE[family](self.folder)
        self.text = f"text_encoders.{TEXTS[family]}.transformer."
        shutil.copytree(self.folder / "tokenizer", place / "tokenizer")
        text = tensors(self.folder / "text_encoder")
        if family == "z-image":
            text = {f"model.{name}": value for name, value in text.items()}
            vae = {name: value.contiguous() for name, value in tiny_ldm.vae_file(self._vae()).items()}
        else:
            vae = {wan(name): value for name, value in tensors(self.folder / "vae").items()}
        self.parts = {
            "transformer": {f"{DENOISER}{name}": value for name, value in self.denoiser.items()},
            "text_encoder": {f"{self.text}{name}": value for name, value in text.items()}
            | {f"text_encoders.{TEXTS[family]}.logit_scale": torch.tensor(4.6)},
            "vae": {f"vae.{name}": value for name, value in vae.items()},
        }
        save_file(self.tensors, self.file)

    @property
    def tensors(self) -> Tensors:
        return {name: value for part in self.parts.values() for name, value in part.items()}

    def _vae(self) -> torch.nn.Module:
        from diffusers import AutoencoderKL

        return AutoencoderKL.from_pretrained(self.folder / "vae")

    def draw(self, model: Path | None, backend: str = "cpu", **options: Any) -> np.ndarray:
        with qwenimg.load(model, backend, "fp32", **options) as pipe:
            return pipe("a red circle", negative_prompt="blue", **ASKED).latents


RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
RESIDUAL["conv_shortcut"] = "shortcut"
ENDS = {"conv_in": "conv1", "mid_block.resnets.0": "middle.0", "mid_block.attentions.0": "middle.1"}
ENDS |= {"mid_block.resnets.1": "middle.2", "norm_out": "head.0", "conv_out": "head.2"}


def wan(name: str, layers: int = 2) -> str:
    """Wan's name of a tensor of diffusers' VAE with `layers` residual blocks in each of the decoder's."""
    side, _, rest = name.partition(".")
    if side in ("quant_conv", "post_quant_conv"):
        return f"conv{1 + (side == 'post_quant_conv')}.{rest}"
    for ours, theirs in ENDS.items():
        rest = re.sub(rf"^{re.escape(ours)}\.", f"{theirs}.", rest)
    rest = re.sub(r"^down_blocks\.(\d+)\.", r"downsamples.\1.", rest)
    if up := re.match(r"up_blocks\.(\d+)\.(?:resnets\.(\d+)|upsamplers\.0)\.", rest):
        number = int(up[1]) * (layers + 1) + (layers if up[2] is None else int(up[2]))
        rest = f"upsamples.{number}.{rest[up.end() :]}"
    layer = re.compile(r"\.(norm1|conv1|norm2|conv2|conv_shortcut)\.(?=[a-z]+$)")
    if "resample" not in rest and not rest.startswith(("conv1.", "head.")):
        rest = layer.sub(lambda match: f".{RESIDUAL[match[1]]}.", rest)
    return f"{side}.{rest}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return {family: Made(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def expected(made: dict[str, Made]) -> dict[str, np.ndarray]:
    return {family: one.draw(one.folder) for family, one in made.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(0)
def test_one_file_draws_what_the_folder_draws(made: dict[str, Made], family: str, backend: str) -> None:
    one = made[family]
    right, ours = one.draw(one.folder, backend), one.draw(one.file, backend)
    print(f"{family} {backend}: {np.abs(right - ours).max():.1e}, deviation {right.std():.2f}")
    assert np.array_equal(right, ours) and right.std() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(1)
def test_info_names_the_parts_and_the_option(made: dict[str, Made], family: str) -> None:
    told = describe(made[family].file)
    print("\n".join(told.lines))
    assert not told.faults and told.lines[0].endswith("single file")
    assert [line.partition(":")[0] for line in told.lines[2:5]] == ["transformer", "text_encoder", "vae"]
    kind = registry.identify_file(made[family].file)
    assert kind is not None and kind.flag == "-m" and len(kind.families) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
@pytest.mark.sample(0)
def test_a_part_of_it_and_a_part_that_kept_its_prefix(
    made: dict[str, Made], expected: dict[str, np.ndarray], family: str, part: str, tmp_path: Path
) -> None:
    """Beside the folder, whose own part is another one: out of the whole file, and alone behind the prefix."""
    one = made[family]
    save_file(one.parts[part], tmp_path / "part.safetensors")
    kind = registry.identify_file(tmp_path / "part.safetensors")
    assert kind is not None and kind.option == part
    bare = shutil.copytree(
        one.folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json")
    )
    for other in {"transformer", "text_encoder", "vae"} - {part}:
        for file in (one.folder / other).glob("*.safetensors*"):
            shutil.copy(file, bare / other)
    for path in (one.file, tmp_path / "part.safetensors"):
        assert np.array_equal(one.draw(bare, **{part: path}), expected[family]), path.name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(0)
def test_parts_that_it_lacks_and_parts_in_its_place(
    made: dict[str, Made], expected: dict[str, np.ndarray], family: str, tmp_path: Path
) -> None:
    one, less = made[family], tmp_path / f"{family}-turbo.safetensors"
    shutil.copytree(one.folder / "tokenizer", tmp_path / "tokenizer")
    for absent in ("text_encoder", "vae"):
        save_file({k: v for part, named in one.parts.items() if part != absent for k, v in named.items()}, less)
        option = f"--{absent.replace('_', '-')} FILE"
        assert f"lacks {absent}: add {option}" in refused(registry.open_model, less)
        assert any(option in fault for fault in describe(less).faults)
        assert np.array_equal(one.draw(less, **{absent: one.folder / absent}), expected[family])
    assert np.array_equal(one.draw(one.file, vae=one.folder / "vae"), expected[family])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(1)
def test_it_is_converted_to_a_folder(
    made: dict[str, Made], expected: dict[str, np.ndarray], family: str, tmp_path: Path
) -> None:
    convert(made[family].file, tmp_path / "made", LoadOptions(), Mock())
    shutil.copytree(made[family].folder / "tokenizer", tmp_path / "made" / "tokenizer", dirs_exist_ok=True)
    assert np.array_equal(made[family].draw(tmp_path / "made"), expected[family])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("text_encoders.clip_l.transformer.text_model.x", "holds unknown tensor"),
        ("vae.decoder.x", "holds unknown tensor"),
        (f"{DENOISER}x", "holds unknown tensor"),
        ("something.x", "holds unknown tensor"),
        ("lacks text", "lacks tensor"),
        ("lacks vae", "lacks tensor"),
        ("lacks transformer", "lacks tensor"),
    ],
)
@pytest.mark.sample(8)
def test_files_that_are_broken(made: dict[str, Made], family: str, fault: str, named: str, tmp_path: Path) -> None:
    one = made[family]
    shutil.copytree(one.folder / "tokenizer", tmp_path / "tokenizer")
    lost = {
        "lacks text": f"{one.text}model.layers.1.mlp.up_proj.weight",
        "lacks vae": next(name for name in reversed(one.parts["vae"]) if "decoder" in name),
        "lacks transformer": next(
            name for name in reversed(one.parts["transformer"]) if "blocks.1" in name or ".1." in name
        ),
    }.get(fault)
    lost = next((name for name in one.tensors if lost and name.endswith(lost.rpartition(".model.")[2])), lost)
    values = {name: value for name, value in one.tensors.items() if name != lost}
    save_file(values | ({} if lost else {fault: torch.ones(2)}), tmp_path / "a.safetensors")
    text = refused(registry.open_model, tmp_path / "a.safetensors")
    print(text)
    assert named in text and "a.safetensors" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_file_in_place_of_a_transformer_is_the_model(
    made: dict[str, Made], expected: dict[str, np.ndarray], family: str
) -> None:
    assert np.array_equal(made[family].draw(None, transformer=made[family].file), expected[family])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(0)
def test_eight_bits_of_comfyui(made: dict[str, Made], family: str, tmp_path: Path) -> None:
    """As most of these files are: float8 with a scale for each weight, of the transformer and the text encoder."""
    one = made[family]
    shutil.copytree(one.folder / "tokenizer", tmp_path / "tokenizer")
    written = comfy(one.tensors, "older", lambda name: name.endswith(("to_q.weight", "qkv.weight", "q_proj.weight")))
    assert sum(value.element_size() == 1 and value.ndim == 2 for value in written.tensors.values()) > 3
    save_file(written.tensors, tmp_path / "turbo-a.safetensors", metadata=written.notes)
    values = {name: value.contiguous() for name, value in written.values.items()}
    save_file(values, tmp_path / "turbo-b.safetensors")
    first, second = (one.draw(tmp_path / f"turbo-{name}.safetensors") for name in "ab")
    assert np.array_equal(first, second)


@pytest.mark.sample(0)
def test_clip_and_t5_alone_behind_their_prefixes(tmp_path: Path) -> None:
    """FLUX.1's text encoders, cut out of a whole file with its names: the picture is the folder's."""
    folder = tmp_path / "flux"
    tiny_flux.write_tiny_flux(folder, "dev", single=True)
    whole, asked = tiny_flux.one_file(folder), ASKED | {"guidance": 3.5}
    pictures = []
    for start in ("text_encoders.", ""):
        parts = {}
        for option, name in (("text_encoder", "t5xxl"), ("text_encoder_2", "clip_l")):
            old = f"text_encoders.{name}."
            named = {key: value for key, value in whole.items() if key.startswith(old)}
            assert any(key.endswith(".logit_scale") for key in named)
            file = tmp_path / f"{start}{name}.safetensors"
            save_file({key.replace("text_encoders.", start): value for key, value in named.items()}, file)
            kind = registry.identify_file(file)
            assert kind is not None and kind.option == "text_encoder", file.name
            parts[option] = file
        with qwenimg.load(folder, "cpu", "fp32", **parts) as pipe:
            pictures.append(pipe("a red circle", **asked).latents)
    with qwenimg.load(folder, "cpu", "fp32") as pipe:
        right = pipe("a red circle", **asked).latents
    assert all(np.array_equal(picture, right) for picture in pictures)
