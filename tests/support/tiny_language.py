"""Tiny language models of every kind that is read, written by transformers itself; and as GGUF by llama.cpp's rules."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from support.language_files import add_vocabulary, write_folder
from support.tiny_model import randomise

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 20, "vocab_size": 932, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """transformers' classes, the changes of its sizes, the kind of its tokenizer, and llama.cpp's architecture."""

    model: str
    tokenizer: str
    architecture: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    nested: str = ""  # the model type around the configuration


KINDS = {
    "llama 2": Kind("Llama", "pieces", "llama"),
    "llama 3": Kind("Llama", "llama-bpe", "llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "smollm2": Kind("Llama", "smollm", "llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "mistral": Kind("Mistral", "tekken", "", {"sliding_window": 9}),
    "ministral 3": Kind("Ministral3", "tekken", "mistral3", {"rope_parameters": YARN}, "mistral3"),
    "gemma 2": Kind("Gemma2", "pieces", "gemma2", {
        "sliding_window": 11, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 20,
    }),
    "phi-3": Kind("Phi3", "pieces", "phi3", {"head_dim": 16, "sliding_window": 13}),
    "qwen2.5": Kind("Qwen2", "qwen2", "qwen2", {"head_dim": 16}),
    "qwen3": Kind("Qwen3", "qwen2", "qwen3", {"tie_word_embeddings": True}),
}  # fmt: skip


@cache
def reference(name: str) -> Any:
    """transformers' model. A tied table has short rows, or the token itself would have the highest score."""
    import transformers

    kind = KINDS[name]
    config = getattr(transformers, f"{kind.model}Config")(**SIZES | {"attn_implementation": "eager"} | kind.changes)
    model = getattr(transformers, f"{kind.model}ForCausalLM")(config)
    randomise(model, 5)
    if kind.model == "Gemma2":
        for key, parameter in model.named_parameters():
            parameter.data -= 1 if key.endswith("norm.weight") else 0
    if config.tie_word_embeddings:
        model.get_input_embeddings().weight.data *= 0.02
    return model.eval()


def write(folder: Path, name: str, shards: bool = False) -> Path:
    """A folder as transformers saves it, with its tokenizer."""
    kind = KINDS[name]
    reference(name).save_pretrained(folder, max_shard_size="60KB" if shards else "5GB")
    write_folder(folder, kind.tokenizer)
    if kind.nested:
        file = folder / "config.json"
        text = json.loads(file.read_text(encoding="utf-8"))
        whole = {"model_type": kind.nested, "text_config": text, "vision_config": {"model_type": "pixtral"}}
        file.write_text(json.dumps(whole), encoding="utf-8")
        weights = load_file(folder / "model.safetensors")
        tower = {
            "vision_tower.patch_conv.weight": torch.zeros(2, 2),
            "multi_modal_projector.norm.weight": torch.ones(2),
        }
        save_file({f"language_model.{key}": one for key, one in weights.items()} | tower, folder / "model.safetensors")
    return folder


def quantize(folder: Path) -> dict[str, torch.Tensor]:
    """Makes it one of mlx-community's: 8-bit codes of all matrices, also of the table and of joined rows. Returns the
    values that they stand for."""
    import mlx.core as mx

    values, weights = {}, load_file(folder / "model.safetensors")
    for key in [key for key, value in weights.items() if value.ndim == 2]:
        codes = mx.quantize(mx.array(weights.pop(key).numpy()), 32, 8)
        values[key] = torch.from_numpy(np.array(mx.dequantize(*codes, 32, 8)))
        for part, array in zip(("weight", "scales", "biases"), codes, strict=True):
            weights[key.removesuffix("weight") + part] = torch.from_numpy(np.array(array))
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization"] = {"group_size": 32, "bits": 8}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return values


_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def write_gguf(path: Path, name: str) -> Path:
    """The model as llama.cpp's converter writes it: rows of q and k of its `llama` in another order, gains of Gemma 2
    whole, the scaling of LLaMA 3.1 as a tensor."""
    kind, config = KINDS[name], reference(name).config
    writer = GGUFWriter(path, kind.architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "sliding_window", None) and kind.architecture in ("gemma2", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if kind.architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope["rope_type"] == "yarn":
        writer.add_string(f"{kind.architecture}.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_float32(f"{kind.architecture}.rope.scaling.yarn_beta_fast", rope["beta_fast"])
        writer.add_float32(f"{kind.architecture}.rope.scaling.yarn_beta_slow", rope["beta_slow"])
        writer.add_float32(f"{kind.architecture}.rope.scaling.yarn_log_multiplier", rope["mscale_all_dim"])
        writer.add_float32(f"{kind.architecture}.attention.temperature_scale", rope["llama_4_scaling_beta"])
    add_vocabulary(writer, kind.tokenizer)
    writer.add_eos_token_id(2)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _factors(rope, head_dim))
    names = _NAMES | (_GEMMA if kind.architecture == "gemma2" else {})
    for key, value in reference(name).state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = key.removeprefix("model.").split(".")
        values = value.numpy().astype(np.float32)
        if kind.architecture == "gemma2" and key.endswith("norm.weight"):
            values = values + 1
        if kind.architecture in ("llama", "mistral3") and parts[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if parts[-2] == "q_proj" else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        block = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        layer = ".".join(parts[2:-1] if block else parts[:-1])
        writer.add_tensor(f"{block}{names[layer]}.{parts[-1]}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _factors(rope: dict[str, Any], dim: int) -> np.ndarray:
    """The factors of LLaMA 3.1's frequencies, as its authors compute them."""
    factors = []
    for i in range(dim // 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (2 * i / dim)
        if wave < rope["original_max_position_embeddings"] / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wave > rope["original_max_position_embeddings"] / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (rope["original_max_position_embeddings"] / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
