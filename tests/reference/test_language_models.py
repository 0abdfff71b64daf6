"""Language models from folders and GGUF files against transformers' `generate`, in float32 on both backends; and files
that are refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_language
from support.policies import FP32
from support.tiny_language import KINDS, reference

from qwenimg import backends
from qwenimg.common.base.errors import ModelError
from qwenimg.common.networks.encoders import decoder_kinds
from qwenimg.common.parts.components import read_config
from qwenimg.common.parts.language_models import Generation, LanguageModel, open_language_model

TOKENS, DISTINCT = 32, 12
PROMPT = [int(i) for i in np.random.default_rng(7).integers(10, 690, 29)]
WAYS = ("folder", "shards", "GGUF")
CASES = [(name, way) for name in KINDS for way in WAYS if way != "GGUF" or KINDS[name].architecture]


@cache
def expected(name: str) -> list[int]:
    return greedy(reference(name))


def greedy(model: Any) -> list[int]:
    """The tokens of transformers' model behind the prompt."""
    with torch.inference_mode():
        ids = torch.tensor([PROMPT])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS,
            eos_token_id=None,
        )  # fmt: skip
    return made[0, len(PROMPT) :].tolist()


def opened(tmp_path: Path, name: str, way: str) -> LanguageModel:
    if way == "GGUF":
        return open_language_model(tiny_language.write_gguf(tmp_path / "model.gguf", name))
    return open_language_model(tiny_language.write(tmp_path, name, way == "shards" and not KINDS[name].nested))


def written(model: LanguageModel, backend: str, opening: int = 0) -> list[int]:
    """The tokens behind the prompt. opening: ids that are computed before, and kept elsewhere meanwhile."""
    engine, part = backends.load(backend), model.component
    ours = engine.open(part.network, part.config, part.stored(FP32), FP32)
    kept = []
    if opening:
        kept = [[engine.array(engine.numpy(one)) for one in pair] for pair in ours.opening(PROMPT[:opening])]
    tokens = [int(engine.numpy(ours.begin(PROMPT, (), (), kept)).argmax())]
    while len(tokens) < TOKENS:
        tokens.append(int(engine.numpy(ours.follow(tokens[-1:]))[0].argmax()))
    return tokens


@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.sample(9)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str, way: str) -> None:
    right = expected(name)
    assert len(set(right)) >= DISTINCT, f"{name}: {len(set(right))} distinct tokens"
    model = opened(tmp_path, name, way)
    for backend in ("cpu", "mlx"):
        assert written(model, backend, opening=0 if way == "folder" else 17) == right
    assert 2 in model.stops or KINDS[name].tokenizer in ("qwen2", "llama-bpe")
    print(f"{name}, {way}: {TOKENS} of {TOKENS} tokens on both backends, {model.chat.name}")
    model.close()


@pytest.mark.parametrize("name", ["phi-3", "smollm2"])
def test_weights_that_mlx_quantized(tmp_path: Path, name: str) -> None:
    """As in mlx-community's folders."""
    folder, model = tiny_language.write(tmp_path, name), copy.deepcopy(reference(name))
    for key, values in tiny_language.quantize(folder).items():
        model.state_dict()[key].copy_(values)
    right = greedy(model)
    assert len(set(right)) >= DISTINCT
    opened_model = open_language_model(folder)
    for backend in ("cpu", "mlx"):
        assert written(opened_model, backend) == right


def test_the_text_encoder_of_an_image_model(tmp_path: Path) -> None:
    """Its tokenizer is in the folder beside it."""
    tiny_language.write(tmp_path / "text_encoder", "qwen3")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "text_encoder" / "tokenizer.json").rename(tmp_path / "tokenizer" / "tokenizer.json")
    model = open_language_model(tmp_path / "text_encoder")
    assert model.component.config.tie_word_embeddings and model.chat.name == "ChatML"


def test_a_file_of_weights_beside_its_configuration(tmp_path: Path) -> None:
    folder = tiny_language.write(tmp_path, "llama 2")
    model = open_language_model(folder / "model.safetensors")
    assert len(model.component.plan.entries) == 3 * 9 + 3
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "eos_token_id": [2, 7]}), "utf-8"
    )
    chosen = open_language_model(folder)
    assert chosen.generation == Generation(do_sample=True, temperature=0.6, top_p=0.9, top_k=40)
    assert {2, 7} <= set(chosen.stops)


# config.json of published models, as their authors write it, and the number of their weights
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1, "rope_scaling": None,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "LLaMA 2 7B": (_LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
    }, 6_738_415_616),
    "LLaMA 3.2 1B": (_LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16,
        "head_dim": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
        "rope_theta": 500000.0, "eos_token_id": [128001, 128008, 128009], "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    }, 1_235_814_400),
    "SmolLM2 135M": (_LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "rope_theta": 100000,
        "is_llama_config": True, "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    }, 134_515_008),
    "Mistral 7B": ({
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0", "use_cache": True, "vocab_size": 32000,
    }, 7_241_732_096),
    "Gemma 2 2B": ({
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
    }, 2_614_341_888),
    "Phi-3 mini 4k": ({
        "architectures": ["Phi3ForCausalLM"], "attention_dropout": 0.0, "auto_map": {"AutoConfig": "x.Y"},
        "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rope_scaling": None,
        "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064,
        "attention_bias": False,
    }, 3_821_079_552),
    "Qwen2.5 7B": ({
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 3584,
        "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 152064,
    }, 7_615_616_512),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(tmp_path: Path, name: str) -> None:
    data, count = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    network = decoder_kinds.network(data["model_type"])
    config = replace(read_config(network, tmp_path), writes=True)
    assert sum(math.prod(shape) for shape in network.manifest(config).values()) == count
    assert len(config.sliding_layers) == {"mistral": 32, "gemma2": 13, "phi3": 32}.get(data["model_type"], 0)


# Refusals


def _json(name: str, **changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / name
        data = json.loads(file.read_text(encoding="utf-8")) | changes
        file.write_text(json.dumps(data), encoding="utf-8")

    return change


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def changed(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return changed


def _rope(**changes: Any) -> Callable[[Path], object]:
    return _json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4} | changes)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda folder: (folder / "tokenizer.model").unlink(), "holds no tokenizer"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "no head": (_weights(lambda weights: weights.pop("lm_head.weight")), "lm_head.weight"),
    "another head": (_weights(lambda w: w.update({"lm_head.weight": w["lm_head.weight"][:7].clone()})), "shape"),
    "a bias of one layer": (
        _weights(lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(80)})), "q_proj.bias",
    ),
    "another type": (_json("config.json", model_type="mamba"), "mamba"),
    "an unknown key": (_json("config.json", residual_multiplier=0.22), "residual_multiplier"),
    "a bias": (_json("config.json", attention_bias=True), "attention_bias"),
    "an activation": (_json("config.json", hidden_act="relu"), "relu"),
    "a window": (_json("config.json", layer_types=["chunked_attention"] * 3), "layer_types"),
    "too few windows": (_json("config.json", layer_types=["full_attention"]), "layer_types"),
    "long RoPE": (_rope(rope_type="longrope", short_factor=[1.0], long_factor=[2.0]), "longrope"),
    "dynamic RoPE": (_rope(rope_type="dynamic", factor=2.0), "dynamic"),
    "RoPE of a part": (_rope(partial_rotary_factor=0.5), "0.5"),
    "a RoPE factor": (_rope(rope_type="linear", factor="two"), "two"),
    "sizes": (_json("config.json", num_key_value_heads=3), "multiple"),
    "no number": (_json("config.json", hidden_size="64"), "hidden_size"),
    "too few embeddings": (_json("config.json", vocab_size=800), "embeddings"),
    "temperature": (_json("generation_config.json", temperature=-1), "temperature is -1"),
    "top_p": (_json("generation_config.json", top_p=0), "top_p is 0"),
    "top_k": (_json("generation_config.json", top_k=1.5), "top_k is 1.5"),
    "penalty": (_json("generation_config.json", repetition_penalty=9), "repetition_penalty is 9"),
    "eos": (_json("generation_config.json", eos_token_id=[2, 932]), "eos_token_id"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tiny_language.write(tmp_path_factory.mktemp("whole"), "llama 2")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line(tmp_path: Path, whole: dict[str, bytes], name: str) -> None:
    for file, data in whole.items():
        (tmp_path / file).write_bytes(data)
    change, reason = REFUSED[name]
    change(tmp_path)
    with pytest.raises(ModelError) as error:
        open_language_model(tmp_path)
    message = str(error.value)
    assert reason in message and str(tmp_path) in message and "\n" not in message and len(message) < 600


def test_unknown_architectures_and_keys_of_gguf_files(tmp_path: Path) -> None:
    whole = tiny_language.write_gguf(tmp_path / "a.gguf", "llama 3").read_bytes()
    for old, new, reason in (
        (b"llama.block_count", b"llama.block_kount", "block_kount"),
        (b"tokenizer.ggml.pre", b"tokenizer.ggml.pra", "tokenizer.ggml.pre"),
        (b"rope_freqs.weight", b"rope_freqz.weight", "rope_freqz"),
    ):
        assert old in whole
        (tmp_path / "b.gguf").write_bytes(whole.replace(old, new))
        with pytest.raises(ModelError, match=reason) as error:
            open_language_model(tmp_path / "b.gguf")
        assert "\n" not in str(error.value)
