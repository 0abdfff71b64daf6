"""Single files of every type: the tensors are those of the folder, on both backends, and nothing else passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_ldm
from support.parity_cases import MLX, TORCH, Twin
from support.refusals import refused, safetensors_bytes, tensor

from qwenimg.common.base.config import parse, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.stable_diffusion import single_file
from qwenimg.common.families.stable_diffusion.single_file import SingleFile, open_file
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.sampling.discrete import parse_diffusion
from qwenimg.common.weights import keys
from qwenimg.common.weights.plan import LoadPlan
from qwenimg.common.weights.storage import Dense

KINDS = tuple(tiny_ldm.UNETS)
BACKENDS = {"torch": TORCH, "MLX": MLX}


class Made:
    """One type: diffusers' models, their folder and their file."""

    def __init__(self, folder: Path, kind: str):
        self.kind, self.folder = kind, folder / kind
        self.models = tiny_ldm.models_of(kind)
        tiny_ldm.write_folder(self.folder, self.models)
        self.tensors = tiny_ldm.one_file(kind, self.models)
        self.file = folder / f"{kind}.safetensors"
        save_file(self.tensors, self.file)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    folder, kept = tmp_path_factory.mktemp("ldm"), {}

    def get(kind: str) -> Made:
        if kind not in kept:
            kept[kind] = Made(folder, kind)
        return kept[kind]

    return get


def folder_plan(folder: Path, component: str) -> tuple[Any, LoadPlan]:
    """Configuration and plan of a folder in diffusers layout."""
    path = folder / component
    data = read_json(path / "config.json")
    if component == "unet":
        config: Any = parse(UNetConfig, unet.unet_fields(data), source=path, ignored=unet.IGNORED_CONFIG)
        stored = unet.manifest(config)
        return config, keys.plan(path, component, stored, uses=unet.uses)
    if component == "vae":
        config = parse(KLVAEConfig, kl_vae.vae_fields(data), source=path, ignored=kl_vae.IGNORED_CONFIG)
        return config, keys.plan(path, component, kl_vae.manifest(config), rename=kl_vae.rename)
    config = parse(CLIPConfig, clip.text_fields(data), source=path)
    return config, keys.plan(path, component, clip.manifest(config), rename=clip.rename)


def config_of(opened: SingleFile, component: str) -> Any:
    return opened.components[component].config


# The names in the tests are right


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_the_reference_reads_the_file(made: Callable[[str], Made], kind: str) -> None:
    """diffusers' converters make of the test's file the tensors of the test's models."""
    from diffusers.loaders import single_file_utils as theirs

    case = made(kind)
    found = {
        "unet": theirs.convert_ldm_unet_checkpoint(dict(case.tensors), case.models["unet"].config),
        "vae": theirs.convert_ldm_vae_checkpoint(dict(case.tensors), case.models["vae"].config),
    }
    for text in single_file.KINDS[kind].texts:
        model = case.models[text.component]
        if text.like.hidden_act == "gelu":
            found[text.component] = theirs.convert_open_clip_checkpoint(model, dict(case.tensors), prefix=text.prefix)
        else:
            found[text.component] = theirs.convert_ldm_clip_checkpoint(dict(case.tensors))
    for component, tensors in found.items():
        expected = case.models[component].state_dict()
        if "text" in component:
            if component == "text_encoder" and kind == "sd2":
                # The reference splits by the rows of a projection that it then ignores: with ours, of 4 rows, wrongly.
                tensors = {key: value for key, value in tensors.items() if "_proj." not in key or "out_proj" in key}
            tensors = {clip.rename(key): value for key, value in tensors.items()}
            expected = {clip.rename(key): value for key, value in expected.items() if clip.rename(key) in tensors}
            tensors.pop(None, None)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(value.reshape(expected[key].shape), expected[key]) for key, value in tensors.items())
        print(f"{kind} {component}: {len(tensors)} tensors")


# File and folder


def bits(twin: Twin, plan: LoadPlan, name: str, dtype: str) -> np.ndarray:
    device = [torch.device("cpu")] if twin.name == "torch" else []
    loaded = twin.load.tensor(replace(plan.entries[name], storage=Dense(dtype)), *device)
    return twin.engine.numpy(loaded)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_file_and_folder_give_the_same_tensors(made: Callable[[str], Made], kind: str, backend: str) -> None:
    case, twin = made(kind), BACKENDS[backend]()
    opened = open_file(case.file)
    assert opened.components.keys() == case.models.keys()
    for component, part in opened.components.items():
        plan = part.plan
        _, expected = folder_plan(case.folder, component)
        assert plan.entries.keys() == expected.entries.keys()
        for name in plan.entries:
            ours, theirs = (bits(twin, p, name, "float32") for p in (plan, expected))
            assert ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes(), (component, name)
        expected.close()
        print(f"{kind} {component} on {backend}: {len(plan.entries)} tensors, {plan.parameters:,} values")
    opened.close()


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_storage_in_16_bits(made: Callable[[str], Made], tmp_path: Path, stored: str) -> None:
    case = made("sdxl")
    tensors = {k: v.to(getattr(torch, stored)) if v.is_floating_point() else v for k, v in case.tensors.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    opened = open_file(tmp_path / "a.safetensors")
    for component, part in opened.components.items():
        plan = part.plan
        expected = {
            clip.rename(k) if "text" in component else k: v for k, v in case.models[component].state_dict().items()
        }
        for name, entry in plan.entries.items():
            value = expected[name].to(getattr(torch, stored)).float().reshape(entry.shape)
            made_of = torch.from_numpy(bits(TORCH(), plan, name, "float32"))
            assert torch.equal(made_of, value), name
    opened.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_configurations_follow_from_shapes(made: Callable[[str], Made], kind: str) -> None:
    case = made(kind)
    opened = open_file(case.file, prediction="eps")
    for component in opened.components:
        expected, plan = folder_plan(case.folder, component)
        plan.close()
        found = config_of(opened, component)
        differing = {
            name: (getattr(found, name), getattr(expected, name))
            for name in type(found).__dataclass_fields__
            if getattr(found, name) != getattr(expected, name)
        }
        # What no tensor tells is that of the published models.
        differing.pop("sample_size", None)
        differing.pop("scaling_factor", None)
        assert not differing, component
    opened.close()


# What it is


@pytest.mark.parametrize(
    ("kind", "extra", "given", "prediction", "told"),
    [
        ("sd1", (), None, "eps", "Stable Diffusion 1.x is eps"),
        ("sd1", (), "v", "v", "as given"),
        ("sd2", (), None, "v", "--prediction eps"),
        ("sd2", (), "eps", "eps", "as given"),
        ("sdxl", (), None, "eps", "XL base is eps"),
        ("sdxl", ("v_pred",), None, "v", "tensor v_pred"),
        ("sdxl", ("v_pred", "ztsnr"), None, "v", "zero terminal SNR"),
        ("sdxl", ("v_pred",), "eps", "eps", "as given"),
        ("sdxl", (), "x0", "x0", "as given"),
        ("sdxl-refiner", (), None, "eps", "refiner is eps"),
    ],
)
@pytest.mark.sample(3)
def test_type_and_prediction(
    made: Callable[[str], Made],
    tmp_path: Path,
    kind: str,
    extra: tuple[str, ...],
    given: Any,
    prediction: str,
    told: str,
) -> None:
    case = made(kind)
    save_file(case.tensors | {name: torch.empty(0) for name in extra}, tmp_path / "a.safetensors")
    opened = open_file(tmp_path / "a.safetensors", given)
    opened.close()
    detected = opened.detected
    print("\n".join(detected.reasons))
    assert (detected.kind, detected.prediction, detected.zero_snr) == (kind, prediction, "ztsnr" in extra)
    assert not detected.lacks
    assert told in "\n".join(detected.reasons)
    fields = single_file.scheduler_fields(detected)
    assert fields["prediction_type"] == {"eps": "epsilon", "v": "v_prediction", "x0": "sample"}[prediction]
    assert parse_diffusion(fields, "single file").rescale_betas_zero_snr == ("ztsnr" in extra)


@pytest.mark.parametrize(("noted", "prediction"), [("epsilon", "eps"), ("v", "v"), ("unheard-of", "v")])
def test_prediction_in_the_metadata(made: Callable[[str], Made], tmp_path: Path, noted: str, prediction: str) -> None:
    """It counts before the type's usual one, which for SD 2.x is v."""
    save_file(made("sd2").tensors, tmp_path / "a.safetensors", metadata={"modelspec.prediction_type": noted})
    opened = open_file(tmp_path / "a.safetensors")
    opened.close()
    assert opened.detected.prediction == prediction
    assert ("metadata" in opened.detected.reasons[2]) == (noted != "unheard-of")


def test_inpainting(tmp_path: Path) -> None:
    models = tiny_ldm.models_of("sd1", channels=9)
    save_file(tiny_ldm.one_file("sd1", models), tmp_path / "a.safetensors")
    opened = open_file(tmp_path / "a.safetensors")
    opened.close()
    assert opened.unet is not None and opened.unet.in_channels == 9
    assert "9 channels (inpainting" in "\n".join(opened.detected.reasons)


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
def test_a_vae_alone(made: Callable[[str], Made], tmp_path: Path, prefix: str) -> None:
    tensors = tiny_ldm.behind(prefix, tiny_ldm.vae_file(made("sd1").models["vae"]))
    save_file(tensors | {"loss.logvar": torch.ones(1)}, tmp_path / "a.safetensors")
    opened = open_file(tmp_path / "a.safetensors")
    opened.close()
    assert opened.components.keys() == {"vae"} and opened.detected.kind is None and opened.ignored == 1
    assert opened.detected.lacks == ("unet", "text encoder")


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("kind", KINDS)
def test_a_unet_alone(made: Callable[[str], Made], tmp_path: Path, kind: str, prefix: str) -> None:
    """Its type by its layers; SDXL's refiner by its text width, 1280, which the tiny one does not have."""
    save_file(tiny_ldm.behind(prefix, tiny_ldm.unet_file(made(kind).models["unet"])), tmp_path / "a.safetensors")
    opened = open_file(tmp_path / "a.safetensors")
    opened.close()
    print("\n".join(opened.detected.reasons))
    assert opened.components.keys() == {"unet"}
    assert opened.detected.kind == kind.removesuffix("-refiner")
    assert "vae" in opened.detected.lacks and "text_encoder" in opened.detected.lacks


# At the size of the published models

PUBLISHED_TEXTS = {"sd1": (clip.VIT_L,), "sd2": (clip.OPEN_CLIP_H,), "sdxl": (clip.VIT_L, clip.OPEN_CLIP_BIG_G)}
PUBLISHED_TEXTS["sdxl-refiner"] = (clip.OPEN_CLIP_BIG_G,)
XL = {"use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256}
PUBLISHED_UNETS: dict[str, dict[str, Any]] = {
    "sd1": {"attends": (True, True, True, False), "cross_attention_dim": 768, "attention_head_dim": 8},
    "sd2": {
        "attends": (True, True, True, False),
        "cross_attention_dim": 1024,
        "attention_head_dim": (5, 10, 20, 20),
        "use_linear_projection": True,
    },
    "sdxl": {
        "attends": (False, True, True),
        "block_out_channels": (320, 640, 1280),
        "cross_attention_dim": 2048,
        "attention_head_dim": (5, 10, 20),
        "transformer_layers_per_block": (1, 2, 10),
        "projection_class_embeddings_input_dim": 2816,
        **XL,
    },
    "sdxl-refiner": {
        "attends": (False, True, True, False),
        "block_out_channels": (384, 768, 1536, 1536),
        "cross_attention_dim": 1280,
        "attention_head_dim": (6, 12, 24, 24),
        "transformer_layers_per_block": 4,
        "projection_class_embeddings_input_dim": 2560,
        **XL,
    },
}
# Of the UNet: tensors, and parameters in millions, as published.
PUBLISHED_SIZES = {
    "sd1": (686, 859.521),
    "sd2": (686, 865.911),
    "sdxl": (1680, 2567.464),
    "sdxl-refiner": (1220, 2259.527),
}


def published(kind: str) -> dict[str, torch.nn.Module]:
    """The models on torch's meta device, without memory for their values."""
    from dataclasses import asdict

    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    vae = {**tiny_ldm.VAE, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
    vae |= {f"{way}_block_types": (vae[f"{way}_block_types"][0],) * 4 for way in ("down", "up")}
    with torch.device("meta"):
        models = {"unet": tiny_ldm.empty_unet(PUBLISHED_UNETS[kind]), "vae": AutoencoderKL(**vae)}
        for text, config in zip(single_file.KINDS[kind].texts, PUBLISHED_TEXTS[kind], strict=True):
            cls = CLIPTextModelWithProjection if config.projection_dim else CLIPTextModel
            fields = {key: value for key, value in asdict(config).items() if value is not None}
            models[text.component] = cls(CLIPTextConfig(**fields))
    return models


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_published_models(tmp_path: Path, kind: str) -> None:
    """A file of the full size, of which only the header is written."""
    models = published(kind)
    header, end = {}, 0
    for key, value in tiny_ldm.one_file(kind, models).items():
        size = value.numel() * 2
        header[key] = tensor(value.shape, end, end + size, "F16")
        end += size
    file = tmp_path / "a.safetensors"
    file.write_bytes(safetensors_bytes(header))
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + end)
    opened = open_file(file, prediction="eps")
    opened.close()
    assert opened.unet is not None
    print("\n".join(opened.detected.reasons), f"{len(header)} tensors, {end / 1e9:.2f} GB", sep="\n")
    expected = parse(UNetConfig, unet_fields_of(models["unet"]), source="unet", ignored=unet.IGNORED_CONFIG)
    assert (opened.unet.attention_head_dim, opened.unet.down) == (expected.attention_head_dim, expected.down)
    assert (opened.unet.mid, opened.unet.up) == (expected.mid, expected.up)
    assert tuple(opened.texts.values()) == PUBLISHED_TEXTS[kind]
    parameters = round(opened.components["unet"].plan.parameters / 1e6, 3)
    assert (len(opened.components["unet"].plan.entries), parameters) == PUBLISHED_SIZES[kind]
    assert (len(opened.components["vae"].plan.entries), opened.components["vae"].plan.parameters) == (248, 83_653_863)
    assert opened.components["vae"].config.scaling_factor == (0.13025 if "xl" in kind else 0.18215)


def unet_fields_of(model: torch.nn.Module) -> dict[str, Any]:
    return unet.unet_fields({key: value for key, value in model.config.items() if not key.startswith("_")})


# Files that are not as they should be

LONG = "model.diffusion_model.input_blocks.1.0.in_layers.2.weight"


def without(key: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(key)


def with_(key: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({key: value})


ONE = torch.ones(1)
FAULTS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "UNet tensor missing": ("sd1", without(LONG), LONG),
    "VAE tensor missing": ("sd1", without("first_stage_model.quant_conv.bias"), "quant_conv.bias"),
    "text tensor missing": ("sd2", without("cond_stage_model.model.ln_final.bias"), "ln_final.bias"),
    "fused tensor missing": (
        "sdxl",
        without("conditioner.embedders.1.model.transformer.resblocks.1.attn.in_proj_bias"),
        "in_proj_bias",
    ),
    "first block missing": (
        "sd1",
        without("model.diffusion_model.input_blocks.1.0.out_layers.3.weight"),
        "input_blocks.1",
    ),
    "middle missing": (
        "sd1",
        without("model.diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_k.weight"),
        "attn2.to_k.weight",
    ),
    "unknown tensor": ("sd1", with_("model.diffusion_model.extra.weight", ONE), "'model.diffusion_model.extra.weight'"),
    "unknown text tensor": ("sdxl", with_("conditioner.embedders.2.x", ONE), "'conditioner.embedders.2.x'"),
    "transformer block too many": (
        "sd1",
        with_("model.diffusion_model.input_blocks.1.1.transformer_blocks.999999999.norm1.weight", ONE),
        "transformer_blocks",
    ),
    "LoRA": ("sd1", with_("lora_unet_x.alpha", ONE), "lora_unet_x.alpha"),
    "Playground": ("sdxl", with_("edm_mean", ONE), "Playground"),
    "wrong shape": ("sd1", with_(LONG, torch.ones(32, 33, 3, 3)), "[32, 33, 3, 3], expected [32, 32, 3, 3]"),
    "wrong rank": ("sd1", with_("model.diffusion_model.input_blocks.0.0.weight", torch.ones(32, 4)), "input channels"),
    "fused rows do not divide": (
        "sd2",
        with_("cond_stage_model.model.transformer.resblocks.0.attn.in_proj_bias", torch.ones(385)),
        "[385], expected [128]",
    ),
    "projection of another width": (
        "sdxl",
        with_("conditioner.embedders.1.model.text_projection", torch.ones(127, 52)),
        "[127, 52], expected [128, 52]",
    ),
    "integers": ("sd1", with_(LONG, torch.ones(32, 32, 3, 3, dtype=torch.int32)), "I32"),
    "exponents alone": ("sd1", with_(LONG, torch.ones(32, 32, 3, 3).to(torch.float8_e8m0fnu)), "F8_E8M0"),
    "five channels": ("sd2", with_("model.diffusion_model.input_blocks.0.0.weight", torch.ones(64, 5, 3, 3)), "depth"),
    "32 groups do not divide": (
        "sd1",
        with_("model.diffusion_model.input_blocks.1.0.out_layers.3.weight", torch.ones(33, 32, 3, 3)),
        "33",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(6)
def test_bad_files(made: Callable[[str], Made], tmp_path: Path, fault: str) -> None:
    kind, break_it, named = FAULTS[fault]
    tensors = dict(made(kind).tensors)
    break_it(tensors)
    save_file(tensors, tmp_path / "a.safetensors")
    assert named in refused(open_file, tmp_path / "a.safetensors")


def test_truncated_and_other_files(made: Callable[[str], Made], tmp_path: Path) -> None:
    whole = made("sd1").file.read_bytes()
    file = tmp_path / "a.safetensors"
    file.write_bytes(whole[: len(whole) // 2])
    refused(open_file, file)
    for content in (b"PK\x03\x04" + bytes(100), b"\x80\x02" + bytes(100)):
        (tmp_path / "a.ckpt").write_bytes(content)
        assert "can run code" in refused(open_file, tmp_path / "a.ckpt")
    save_file({"x": torch.ones(3)}, file)
    assert "no Stable Diffusion checkpoint" in refused(open_file, file)


def test_every_ignored_name_is_ignored(made: Callable[[str], Made], tmp_path: Path) -> None:
    """And none of them is a parameter of a model."""
    tensors = dict(made("sd2").tensors)
    before = open_file(made("sd2").file)
    before.close()
    names = [*single_file._IGNORED, *(prefix + "x" for prefix in single_file._IGNORED_PREFIXES)]
    names += [f"cond_stage_model.{name}" for name in single_file._IGNORED_TEXT]
    new = {name: torch.ones(2) for name in names if name not in tensors and name != "v_pred"}
    save_file(tensors | new, tmp_path / "a.safetensors")
    after = open_file(tmp_path / "a.safetensors")
    after.close()
    assert after.ignored == before.ignored + len(new)
    used = {entry.source.first.key for part in after.components.values() for entry in part.plan.entries.values()}
    assert not used & set(names)


def test_the_unused_layer_is_not_read(made: Callable[[str], Made]) -> None:
    case = made("sd2")
    opened = open_file(case.file)
    opened.close()
    entries = opened.components["text_encoder"].plan.entries.values()
    assert opened.texts["text_encoder"].num_hidden_layers == 23
    assert not any("resblocks.23." in entry.source.first.key for entry in entries)
    assert any("resblocks.23." in key for key in load_file(case.file))


# For people


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_description(made: Callable[[str], Made], kind: str) -> None:
    found = describe(made(kind).file)
    text = "\n".join(found.lines)
    print(text)
    assert found.faults == [] and single_file.KINDS[kind].title in text
    assert all(f"{component}: " in text for component in made(kind).models)
    assert "known and not needed: " in text
    assert "prediction: v (as given)" in describe(made(kind).file, prediction="v").lines


def test_description_of_a_bad_file(made: Callable[[str], Made], tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(made("sd1").tensors | {"stranger": ONE}, file)
    found = describe(file)
    assert len(found.faults) == 1 and "'stranger'" in found.faults[0]
    assert "type: Stable Diffusion 1.x (text encoder cond_stage_model.transformer.*)" in found.lines


@pytest.mark.parametrize("kind", KINDS)
def test_description_of_component_folders(made: Callable[[str], Made], kind: str) -> None:
    for component, model in made(kind).models.items():
        found = describe(made(kind).folder / component)
        assert found.faults == [] and f"{len(model.state_dict())} tensors" in found.lines[0]


def test_info_prints_it(made: Callable[[str], Made], tmp_path: Path) -> None:
    from click.testing import CliRunner

    from qwenimg.cli.commands.info import info

    result = CliRunner().invoke(info, [str(made("sd2").file)], catch_exceptions=False)
    print(result.output)
    assert result.exit_code == 0
    assert "type: Stable Diffusion 2.x" in result.output and "prediction: v (not stored" in result.output
    (tmp_path / "broken.safetensors").write_bytes(made("sd2").file.read_bytes()[:-1])
    with pytest.raises(ModelError):
        CliRunner().invoke(info, [str(tmp_path / "broken.safetensors")], catch_exceptions=False)
