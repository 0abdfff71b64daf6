"""Each manifest against the class that it describes, key by key, at full size on torch's meta device; and the folders
of random weights that are made from the manifests alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch
from random_model import DIT, TEXT, VAE, write_random_model
from support.refusals import refused

from qwenimg.common.base.config import parse
from qwenimg.common.base.shape import Manifest
from qwenimg.common.families.qwen_image.checkpoint import open_folder
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import decoder, qwen, qwen3_vl_vision, qwen_vl_vision
from qwenimg.common.networks.encoders.qwen import QwenVLConfig
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig
from qwenimg.common.parts.vae import decodes

# The configurations as they are published, fields that the forward does not use included.
PUBLISHED_DIT = {
    "_class_name": "QwenImageTransformer2DModel",
    "_diffusers_version": "0.34.0.dev0",
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "guidance_embeds": False,
    "in_channels": 64,
    "joint_attention_dim": 3584,
    "num_attention_heads": 24,
    "num_layers": 60,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 768,
}
PUBLISHED_VAE = {
    "_class_name": "AutoencoderKLQwenImage",
    "attn_scales": [],
    "base_dim": 96,
    "dim_mult": [1, 2, 4, 4],
    "dropout": 0.0,
    "latents_mean": list(QwenVAEConfig().latents_mean),
    "latents_std": list(QwenVAEConfig().latents_std),
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "z_dim": 16,
}
LANGUAGE = {
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "sliding_window": 32768,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MROPE = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
VISION = {
    "depth": 32,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
}
# In published folders, and as transformers 5 saves it.
PUBLISHED_TEXT = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    **LANGUAGE,
    "rope_scaling": MROPE,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vision_config": VISION,
}
NESTED_TEXT = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "dtype": "bfloat16",
    "text_config": {**LANGUAGE, "rope_parameters": {**MROPE, "rope_theta": 1000000.0}},
    "vision_config": VISION,
}

TINY_DITS = [
    {"num_layers": 1, "attention_head_dim": 6, "num_attention_heads": 5, "axes_dims_rope": [2, 2, 2]},
    {"num_layers": 3, "attention_head_dim": 22, "num_attention_heads": 3, "axes_dims_rope": [6, 6, 10]},
    {"num_layers": 2, "in_channels": 12, "out_channels": 3, "joint_attention_dim": 17},
    {"num_layers": 1, "in_channels": 64, "out_channels": None, "patch_size": 1},
]
TINY_VAES = [
    {"base_dim": 2, "num_res_blocks": 1},
    {"base_dim": 6, "z_dim": 5, "latents_mean": [0.5] * 5, "latents_std": [1.5] * 5, "num_res_blocks": 3},
    {"base_dim": 4, "dim_mult": [1, 3], "temperal_downsample": [True], "num_res_blocks": 2, "input_channels": 4},
    {"base_dim": 4, "dim_mult": [2, 1, 3, 5], "temperal_downsample": [True, False, True], "num_res_blocks": 1},
]


def config(cls, data):
    ignored = {QwenDiTConfig: qwen_dit.IGNORED_CONFIG, QwenVAEConfig: qwen_vae.IGNORED_CONFIG}.get(cls, frozenset())
    fields = qwen.QWEN2_5_VL.fields(data) if cls is QwenVLConfig else data
    return parse(cls, fields, source="config.json", ignored=ignored)


def known(data):
    """Without the keys that diffusers' constructors do not take."""
    return {k: v for k, v in data.items() if not k.startswith("_") and k not in qwen_dit.IGNORED_CONFIG}


def shapes(model: torch.nn.Module) -> Manifest:
    """Of a model of a reference library; its key order is its own."""
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def total(manifest: Manifest) -> int:
    return sum(map(prod, manifest.values()))


@cache
def _dit(text: str) -> Manifest:
    from diffusers import QwenImageTransformer2DModel

    with torch.device("meta"):
        return shapes(QwenImageTransformer2DModel(**json.loads(text)))


def diffusers_dit(data) -> Manifest:
    return _dit(json.dumps(known(data)))


def diffusers_vae(data) -> torch.nn.Module:
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(**known(data))


# Transformer


@pytest.mark.parametrize(("addition", "tensors"), [(False, 1933), (True, 1934)])
def test_published_transformer(addition, tensors):
    data = PUBLISHED_DIT | {"use_additional_t_cond": addition}
    made = qwen_dit.manifest(config(QwenDiTConfig, data))
    print(f"{len(made)} tensors, {total(made):,} parameters")
    assert made == diffusers_dit(data)
    assert len(made) == tensors
    assert total(made) == 20_430_401_088 + addition * 2 * 3072


@pytest.mark.parametrize("changes", TINY_DITS)
@pytest.mark.parametrize("addition", [False, True])
def test_tiny_transformers(changes, addition):
    data = PUBLISHED_DIT | changes | {"use_additional_t_cond": addition}
    assert qwen_dit.manifest(config(QwenDiTConfig, data)) == diffusers_dit(data)


@pytest.mark.parametrize("name", ["zero_cond_t", "use_layer3d_rope"])
def test_variants_without_weights_of_their_own(name):
    assert qwen_dit.manifest(QwenDiTConfig(**{name: True})) == qwen_dit.manifest(QwenDiTConfig())


def test_defaults_are_the_published_ones():
    assert config(QwenDiTConfig, PUBLISHED_DIT) == QwenDiTConfig()
    assert config(QwenVAEConfig, PUBLISHED_VAE) == QwenVAEConfig()
    assert config(QwenVLConfig, PUBLISHED_TEXT) == QwenVLConfig()


def test_a_third_depends_on_the_timestep_alone():
    """The parameters of the modules that diffusers calls with the timestep embedding, and no others."""
    made = qwen_dit.manifest(QwenDiTConfig())
    alone = {key: shape for key, shape in made.items() if qwen_dit.timestep_only(key)}
    modules = [f"transformer_blocks.{i}.{stream}_mod.1" for i in range(60) for stream in ("img", "txt")]
    modules += ["norm_out.linear", "time_text_embed.timestep_embedder.linear_1"]
    modules += ["time_text_embed.timestep_embedder.linear_2"]
    assert alone.keys() == {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    blocks = 60 * 2 * 6 * 3072 * (3072 + 1)
    head = 2 * 3072 * (3072 + 1)
    time = 3072 * (256 + 1) + 3072 * (3072 + 1)
    print(f"modulation {blocks:,}, head {head:,}, time {time:,}: {total(alone) / total(made):.1%} of all")
    assert total(alone) == blocks + head + time
    assert round(blocks / 1e9, 2) == 6.80


def test_timestep_only_parameters_see_no_latent():
    """In diffusers, two inputs at one timestep: of the modules with weights these give equal outputs, no others."""
    from support.tiny_model import tiny_dit

    model = tiny_dit()
    seen: dict[str, list[torch.Tensor]] = {}
    names = {key.rpartition(".")[0] for key in model.state_dict()}
    for name, module in model.named_modules():
        if name in names:
            module.register_forward_hook(lambda _, __, out, name=name: seen.setdefault(name, []).append(out))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(2):
            latents = torch.randn(1, 6, 64, generator=generator)
            text = torch.randn(1, 5, 60, generator=generator)
            model(latents, text, None, torch.tensor([0.4]), [[(1, 2, 3)]], return_dict=False)
    same = {name for name, outs in seen.items() if torch.equal(outs[0], outs[-1])}
    ours = {key.rpartition(".")[0] for key in model.state_dict() if qwen_dit.timestep_only(key)}
    print(f"{len(same)} of {len(names)} modules with weights give the same for two inputs at one timestep")
    assert same == ours


# VAE


def test_published_vae():
    with torch.device("meta"):
        reference = diffusers_vae(PUBLISHED_VAE)
    made = qwen_vae.manifest(config(QwenVAEConfig, PUBLISHED_VAE))
    print(f"{len(made)} tensors, {total(made):,} parameters")
    assert made == shapes(reference)
    assert len(made) == 194
    assert total(made) == 126_892_531

    needed = {key: use.shape for key, use in qwen_vae.uses(made).items()}
    counted = sum(_one_frame(module) for module in reference.named_modules())
    decoder = total({key: shape for key, shape in needed.items() if decodes(key)})
    print(f"one frame: {total(needed):,} ({total(needed) / total(made):.1%}), to decode {decoder:,}")
    assert total(needed) == counted
    assert round(total(needed) / 1e6, 1) == 44.6


def _one_frame(named: tuple[str, torch.nn.Module]) -> int:
    """Parameters of one module of diffusers' that a single frame meets: a convolution's last tap in time."""
    name, module = named
    own = [parameter.numel() for parameter in module.parameters(recurse=False)]
    if name.endswith("time_conv"):
        return 0
    if isinstance(module, torch.nn.Conv3d):
        return module.weight.numel() // module.kernel_size[0] + module.bias.numel()
    return sum(own)


@pytest.mark.parametrize("changes", TINY_VAES)
def test_tiny_vaes(changes):
    data = PUBLISHED_VAE | changes
    with torch.device("meta"):
        reference = diffusers_vae(data)
    assert qwen_vae.manifest(config(QwenVAEConfig, data)) == shapes(reference)


@pytest.mark.parametrize("decoding", [True, False])
def test_still_is_what_one_frame_needs(decoding):
    """By gradients in diffusers' own video VAE on one frame: every part that `still` keeps has one, no other has."""
    from support.tiny_model import VAE as TINY
    from support.tiny_model import tiny_vae

    model = tiny_vae()
    vae_config = config(QwenVAEConfig, TINY)
    generator = torch.Generator().manual_seed(0)
    if decoding:
        out = model.decode(torch.randn(1, 16, 1, 3, 5, generator=generator) / 4, return_dict=False)[0]
    else:
        out = model.encode(torch.rand(1, 3, 1, 24, 40, generator=generator)).latent_dist.parameters
    (out * torch.randn(out.shape, generator=generator)).sum().backward()

    live: Manifest = {}
    for key, parameter in model.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            continue
        live[key] = tuple(parameter.shape)
        if parameter.ndim == 5 and parameter.shape[2] > 1:
            *before, now = parameter.grad.abs().sum((0, 1, 3, 4))
            assert not any(before) and now > 0, key
            live[key] = (*parameter.shape[:2], *parameter.shape[3:])
    needed = qwen_vae.uses(qwen_vae.manifest(vae_config))
    half = {key: use.shape for key, use in needed.items() if decodes(key) == decoding}
    print(f"{'decode' if decoding else 'encode'}: {len(live)} tensors with a gradient, {total(live):,} parameters")
    assert live.keys() == half.keys()
    assert {key: prod(shape) for key, shape in live.items()} == {key: prod(shape) for key, shape in half.items()}


# Text encoder


def test_published_text_encoder():
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLTextModel,
    )

    made = decoder.manifest(config(QwenVLConfig, PUBLISHED_TEXT))
    reference = Qwen2_5_VLConfig(text_config=NESTED_TEXT["text_config"], vision_config=VISION)
    with torch.device("meta"):
        language = shapes(Qwen2_5_VLTextModel(reference.text_config))
        whole = shapes(Qwen2_5_VLForConditionalGeneration(reference))
    print(f"{len(made)} tensors, {total(made):,} parameters; in the files {len(whole)}, {total(whole):,}")
    assert made == language
    assert made == {name: shape for key, shape in whole.items() if (name := qwen.QWEN2_5_VL.rename(key)) is not None}
    assert total(made) == 7_070_619_136
    assert (len(whole), round(total(whole) / 1e6, 1)) == (729, 8292.2)
    unused = {key: shape for key, shape in whole.items() if qwen.QWEN2_5_VL.rename(key) is None}
    assert {key.split(".")[0] for key in unused} == {"model", "lm_head"}
    assert total(unused) == total(whole) - total(made)


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model."])
def test_every_key_style_is_the_manifest(prefix):
    made = decoder.manifest(TEXT)
    assert {qwen.QWEN2_5_VL.rename(f"{prefix}{key}"): shape for key, shape in made.items()} == made


@pytest.mark.parametrize("key", ["visual.patch_embed.proj.weight", "model.visual.merger.ln_q.weight", "lm_head.weight"])
def test_what_is_not_needed_has_no_name(key):
    assert qwen.QWEN2_5_VL.rename(key) is None


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", "model.visual."])
def test_frequencies_in_a_file_are_not_needed(prefix):
    """Files of other programs have them, of the model and of each layer."""
    networks = (qwen.QWEN2_5_VL, qwen.QWEN3, qwen.QWEN3_VL, qwen_vl_vision.NETWORK, qwen3_vl_vision.NETWORK)
    for name in ("rotary_emb.inv_freq", "layers.3.self_attn.rotary_emb.inv_freq", "rotary_pos_emb.inv_freq"):
        assert [network.rename(prefix + name) for network in networks] == [None] * len(networks)


def test_flat_and_nested_configurations_are_equal():
    assert config(QwenVLConfig, NESTED_TEXT) == config(QwenVLConfig, PUBLISHED_TEXT)
    odd = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}
    flat = config(QwenVLConfig, PUBLISHED_TEXT | odd | {"rope_theta": 12345.0})
    rope = {"rope_parameters": {**MROPE, "rope_theta": 12345.0}}
    nested = config(QwenVLConfig, NESTED_TEXT | {"text_config": LANGUAGE | odd | rope})
    assert flat == nested
    assert (flat.rope_theta, flat.rms_norm_eps, flat.head_dim) == (12345.0, 1e-5, 10)


# Refused


@pytest.mark.parametrize(
    ("cls", "changes", "words"),
    [
        (QwenDiTConfig, {"guidance_embeds": True}, "guidance_embeds"),
        (QwenDiTConfig, {"axes_dims_rope": [16, 56, 58]}, "attention_head_dim 128"),
        (QwenDiTConfig, {"axes_dims_rope": [72, 56]}, "three numbers"),
        (QwenDiTConfig, {"axes_dims_rope": [17, 55, 56]}, "even"),
        (QwenDiTConfig, {"num_layers": 0}, "num_layers"),
        (QwenDiTConfig, {"num_layers": 10**6}, "num_layers"),
        (QwenDiTConfig, {"num_layers": "60"}, "num_layers"),
        (QwenDiTConfig, {"something_new": 1}, "something_new"),
        (QwenVAEConfig, {"attn_scales": [0.5]}, "attn_scales"),
        (QwenVAEConfig, {"latents_mean": [0.0] * 15}, "16 entries"),
        (QwenVAEConfig, {"latents_std": [1.0] * 17}, "16 entries"),
        (QwenVAEConfig, {"latents_std": [1.0] * 15 + [0.0]}, "positive"),
        (QwenVAEConfig, {"temperal_downsample": [True, True]}, "temperal_downsample"),
        (QwenVAEConfig, {"base_dim": 3, "dim_mult": [1, 3, 5, 7]}, "even"),
        (QwenVAEConfig, {"base_dim": 4096, "dim_mult": [1, 2, 4, 400]}, "wider"),
        (QwenVLConfig, {"use_sliding_window": True}, "use_sliding_window"),
        (QwenVLConfig, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        (QwenVLConfig, {"rope_scaling": [1, 2]}, "rope_parameters"),
        (QwenVLConfig, {"hidden_act": "gelu"}, "gelu"),
        (QwenVLConfig, {"hidden_size": 3585}, "3585"),
        (QwenVLConfig, {"num_key_value_heads": 5}, "5"),
        (QwenVLConfig, {"rms_norm_eps": 0.0}, "rms_norm_eps"),
        (QwenVLConfig, {"text_config": "qwen"}, "text_config"),
    ],
)
def test_refused_configurations(cls, changes, words):
    published = {QwenDiTConfig: PUBLISHED_DIT, QwenVAEConfig: PUBLISHED_VAE, QwenVLConfig: PUBLISHED_TEXT}[cls]
    assert words in refused(config, cls, published | changes)


# Folders made from the manifests


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 1), ("bfloat16", 3), ("float16", 2)])
def test_random_model_is_a_model(tmp_path, dtype, shards):
    """Opened by us and by diffusers, with the same values in both, finite and not trivial."""
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    write_random_model(tmp_path, dtype=dtype, shards=shards)
    model = open_folder(tmp_path)
    stored = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    for plan in (part.plan for part in model.components.values()):
        assert plan.dtypes == {stored: len(plan.entries)}
        assert len(plan.files) == shards
    model.close()
    assert [part.config for part in model.components.values()] == [DIT, TEXT, VAE]
    for cls, folder in ((QwenImageTransformer2DModel, "transformer"), (AutoencoderKLQwenImage, "vae")):
        made = cls.from_pretrained(tmp_path / folder, torch_dtype=getattr(torch, dtype), low_cpu_mem_usage=False)
        for key, value in made.state_dict().items():
            assert value.isfinite().all() and value.float().std() > 0.01, key


def test_random_model_is_reproducible_and_rounded_once(tmp_path):
    from safetensors.torch import load_file

    part = Path("transformer") / "diffusion_pytorch_model.safetensors"
    small = replace(DIT, num_layers=1, zero_cond_t=True, use_additional_t_cond=True)
    for name, dtype, seed in (("a", "float32", 7), ("b", "float32", 7), ("c", "bfloat16", 7), ("d", "float32", 8)):
        write_random_model(tmp_path / name, dit=small, dtype=dtype, seed=seed)
    digest = {name: hashlib.sha256((tmp_path / name / part).read_bytes()).hexdigest() for name in "abd"}
    assert digest["a"] == digest["b"] != digest["d"]
    single, half = load_file(tmp_path / "a" / part), load_file(tmp_path / "c" / part)
    assert all(torch.equal(half[key], value.to(torch.bfloat16)) for key, value in single.items())
    assert {key: tuple(value.shape) for key, value in single.items()} == qwen_dit.manifest(small)
    written = json.loads((tmp_path / "a" / "transformer" / "config.json").read_text())
    assert written["zero_cond_t"] is True
    assert asdict(config(QwenDiTConfig, written)) == asdict(small)
