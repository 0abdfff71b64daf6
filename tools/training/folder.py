"""A trained model as a folder in diffusers layout, which qwenimg and diffusers load alike.

Weights are stored in bfloat16. The 2-D kernels of the VAE become the last temporal tap of 3-D ones, which is what a
causal video VAE applies to a still image. The vision tower that a Qwen2.5-VL checkpoint must have is one block of
zeros: nothing reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from qwenimg.common.base.atomic_files import make_folder, write_atomic
from qwenimg.common.base.errors import ModelError, NumericsError
from qwenimg.common.base.safe_files import bad, open_regular
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.safetensors import read_header
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.networks.encoders.qwen import QWEN2_5_VL, QwenVLConfig
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.networks.vaes.qwen_vae import QwenVAEConfig
from qwenimg.common.parts import known_configs
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.shapes import words as shapes_words
from qwenimg.common.weights.plan import LoadPlan
from training import tokenizer
from training.config import STEM, TEXT_STEM, ModelSize

SCHEDULER = "scheduler/scheduler_config.json"
SHAPES_FILES = known_configs.small_files("qwen-image", base_shift=2.2, max_shift=2.6)
"""More noise than Qwen-Image's own shift: flat shapes in a small picture show through more noise than a photograph, so
levels above 0.85 settle what is where, and Qwen-Image's shift has few of those."""
VISION = {"hidden": 32, "intermediate": 40, "patch": 14, "merge": 2}


# Configurations


def vocabulary() -> tokenizer.Vocabulary:
    """The built-in model's: every word of its prompts, alone and after a space."""
    words = sorted(shapes_words.vocabulary())
    return tokenizer.learn((*words, *(f" {word}" for word in words if word.isascii())))


def vae_config(size: ModelSize) -> QwenVAEConfig:
    return QwenVAEConfig(base_dim=size.vae_base, num_res_blocks=1, dim_mult=size.vae_mult)


def text_config(size: ModelSize, tokens: int) -> QwenVLConfig:
    return QwenVLConfig(
        hidden_size=size.text_hidden,
        intermediate_size=size.text_intermediate,
        num_hidden_layers=size.text_layers,
        num_attention_heads=size.text_heads,
        num_key_value_heads=size.text_key_heads,
        vocab_size=tokens,
        tie_word_embeddings=True,  # the files have no head
    )


def dit_config(size: ModelSize, vae: QwenVAEConfig) -> QwenDiTConfig:
    return QwenDiTConfig(
        in_channels=4 * vae.z_dim,
        out_channels=vae.z_dim,
        num_layers=size.layers,
        attention_head_dim=sum(size.rope_axes),
        num_attention_heads=size.heads,
        joint_attention_dim=size.text_hidden,
        axes_dims_rope=size.rope_axes,
    )


# Reading


def read_vae(folder: Path) -> tuple[QwenVAEConfig, LoadPlan]:
    """Configuration and load plan of `folder`, a VAE's own. Raises ModelError."""
    config = read_config(qwen_vae.NETWORK, folder)
    return config, open_component(qwen_vae.NETWORK, folder, config, "vae").plan


def read_text(folder: Path, expected: QwenVLConfig) -> LoadPlan:
    """Load plan of `folder`, a text encoder's own. Raises ModelError where it is of another size than `expected`."""
    config = read_config(qwen.QWEN2_5_VL, folder)
    if config != expected:
        raise ModelError(f"{clean(folder)}: is a text encoder of another size than the one to train")
    return open_component(qwen.QWEN2_5_VL, folder, config, "text_encoder").plan


# Writing


def write_vae(
    folder: Path, config: QwenVAEConfig, weights: Mapping[str, Tensor], mean: list[float], std: list[float]
) -> None:
    """The VAE's folder, from the weights of the 2-D network."""
    measured = replace(config, latents_mean=tuple(mean), latents_std=tuple(std))
    stored = {key: _temporal(weights.get(key), shape) for key, shape in qwen_vae.manifest(config).items()}
    _write(folder / STEM, _bytes(stored))
    _write_json(folder / "config.json", {"_class_name": qwen_vae.CLASS_NAME} | asdict(measured))


def _temporal(value: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """A 2-D kernel as the last tap of a 3-D one, a gain with its axes; zeros for what a still image never reads."""
    stored = torch.zeros(shape)
    if value is None:
        return stored
    if len(shape) == 5 and value.ndim == 4:
        stored[:, :, -1] = value
        return stored
    return value.reshape(shape)


def copy_part(source: Path, folder: Path) -> None:
    """A component as it is, all its weights being finite; its config.json comes last. Raises ModelError."""
    found = find_files(source)
    for path in found.files:
        _write(folder / path.name, _checked(path))
    for path in (*([found.index] if found.index else []), source / "config.json"):
        with closing(open_regular(path)) as file:
            _write(folder / path.name, file.read(0, file.size))


def _checked(path: Path) -> bytes:
    """The bytes of a safetensors file whose weights are all finite: also those that no still image needs."""
    header = read_header(path)
    with closing(header.file) as file:
        data = file.read(0, file.size)
        file.check_unchanged()
    for name, value in load(data).items():
        if not bool(torch.isfinite(value.float()).all()):
            raise bad(path, f"tensor '{clean(name, 80)}' has non-finite values; the file is damaged, fetch it again")
    return data


def write_tokenizer(folder: Path, tokens: tokenizer.Vocabulary) -> None:
    for name, data in tokenizer.files(tokens).items():
        _write(folder / name, data)


def write_rest(folder: Path, config: QwenDiTConfig, weights: Mapping[str, Tensor]) -> None:
    """The transformer and the scheduler; model_index.json comes last, so a folder that has it is complete."""
    _write_json(folder / SCHEDULER, SHAPES_FILES[SCHEDULER])
    _write(folder / "transformer" / STEM, _bytes(weights))
    _write_json(folder / "transformer" / "config.json", {"_class_name": qwen_dit.CLASS_NAME} | asdict(config))
    _write_json(folder / "model_index.json", SHAPES_FILES["model_index.json"])


def write_text(folder: Path, config: QwenVLConfig, weights: Mapping[str, Tensor], tokens: tokenizer.Vocabulary) -> None:
    """The text encoder's folder."""
    embeddings = same_tokens(weights["embed_tokens.weight"], tokens)
    named = {f"model.{key}": value for key, value in weights.items()} | {"model.embed_tokens.weight": embeddings}
    _write(folder / TEXT_STEM, _bytes(named | vision_tower(config.hidden_size)))
    _write_json(folder / "config.json", published_text_config(config, tokens.special_ids))


def same_tokens(embeddings: Tensor, tokens: tokenizer.Vocabulary) -> Tensor:
    """Embeddings [tokens C] in which a word that training never shows has the row of the word that means the same."""
    made = embeddings.detach().clone()
    for word, other in shapes_words.SAME_AS.items():
        if tokenizer.spelled(word) in tokens.ids:
            made[tokens.ids[tokenizer.spelled(word)]] = made[tokens.ids[tokenizer.spelled(other)]]
    return made


def published_text_config(config: QwenVLConfig, special: Mapping[str, int]) -> dict[str, object]:
    """config.json in the flat form of the published Qwen2.5-VL."""
    sections = config.head_dim // 2
    rest = (sections - sections // 4) // 2
    return QWEN2_5_VL.written(config) | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|im_end|>"],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "mrope", "mrope_section": [sections - 2 * rest, rest, rest]},
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {
            "depth": 1,
            "fullatt_block_indexes": [0],
            "hidden_size": VISION["hidden"],
            "in_chans": 3,
            "intermediate_size": VISION["intermediate"],
            "model_type": "qwen2_5_vl",
            "num_heads": 2,
            "out_hidden_size": config.hidden_size,
            "patch_size": VISION["patch"],
            "spatial_merge_size": VISION["merge"],
            "temporal_patch_size": 2,
        },
    }


def vision_tower(text_hidden: int) -> dict[str, Tensor]:
    """One block of zeros, in the published keys."""
    width, inner, patch = VISION["hidden"], VISION["intermediate"], VISION["patch"]
    merged = width * VISION["merge"] ** 2
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (width, 3, 2, patch, patch)}
    shapes |= {f"blocks.0.{norm}.weight": (width,) for norm in ("norm1", "norm2")}
    linears = {
        "blocks.0.attn.qkv": (3 * width, width),
        "blocks.0.attn.proj": (width, width),
        "blocks.0.mlp.gate_proj": (inner, width),
        "blocks.0.mlp.up_proj": (inner, width),
        "blocks.0.mlp.down_proj": (width, inner),
        "merger.mlp.0": (merged, merged),
        "merger.mlp.2": (text_hidden, merged),
    }
    for name, (outputs, inputs) in linears.items():
        shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    shapes["merger.ln_q.weight"] = (width,)
    return {f"visual.{name}": torch.zeros(shape) for name, shape in shapes.items()}


def _bytes(weights: Mapping[str, Tensor]) -> bytes:
    values = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()}
    for name, value in values.items():
        if not bool(torch.isfinite(value).all()):
            raise NumericsError(f"weight {name} is not finite in bfloat16, and is not written")
    return save(values, metadata={"format": "pt"})


def _write(path: Path, data: bytes) -> None:
    make_folder(path.parent, parents=True)
    write_atomic(path, data, overwrite=True)


def _write_json(path: Path, value: object) -> None:
    _write(path, (json.dumps(value, indent=2) + "\n").encode())
