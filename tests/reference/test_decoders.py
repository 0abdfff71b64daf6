"""The network `decoder` with its head against transformers' `generate`, in float32, on both backends: 64 of 64 tokens
of tiny random models of every kind, their states, texts side by side and in chunks; and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.policies import FP32
from support.relative import relative_float32
from support.tiny_model import randomise

from qwenimg import backends
from qwenimg.common.networks.encoders import decoder, qwen
from qwenimg.common.networks.encoders.decoder import GELU, DecoderConfig
from qwenimg.common.networks.encoders.qwen import Qwen3Config, Qwen3VLConfig, QwenVLConfig
from qwenimg.common.numbers.scaled_rope import yarn_attention
from qwenimg.common.parts.components import open_component

BACKENDS = ("cpu", "mlx")
TOKENS, DISTINCT = 64, 20  # of a text that repeats itself, equality proves little
FLOAT32 = 2e-6  # relative L2 of states and scores; measured at most 1e-6
FAULT = 1e-4  # the least that a fault changes; measured at least 1e-3
PROMPT = [int(i) for i in np.random.default_rng(7).integers(3, 600, 29)]
SHORT = [int(i) for i in np.random.default_rng(8).integers(3, 600, 3)]
SIZES: dict[str, Any] = {
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "vocab_size": 640,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
    "llama_4_scaling_beta": 0.1,
}
SEEN = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 2, 2]}


@dataclass(frozen=True)
class Kind:
    """transformers' classes, the changes of its sizes, and our configuration."""

    model: str
    theirs: dict[str, Any]
    ours: DecoderConfig


def _plain(**more: Any) -> DecoderConfig:
    return DecoderConfig(**SIZES | more, writes=True)


def _own(cls: type[DecoderConfig], **more: Any) -> DecoderConfig:
    return cls(**SIZES | more, writes=True)


KINDS = {
    "qwen2.5": Kind(
        "Qwen2_5_VL",
        {"head_dim": 10, "rope_parameters": SEEN | {"mrope_section": [1, 2, 2]}},
        _own(QwenVLConfig, head_dim=10, rope_theta=1e6),
    ),
    "qwen3 untied": Kind(
        "Qwen3",
        {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        _own(Qwen3Config, tie_word_embeddings=False),
    ),
    "qwen3 tied": Kind(
        "Qwen3",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        _own(Qwen3Config),
    ),
    "qwen3-vl": Kind("Qwen3VL", {"rope_parameters": SEEN}, _own(Qwen3VLConfig, rope_theta=1e6)),
    "llama": Kind(
        "Llama",
        {"rope_parameters": LLAMA3},
        _plain(rope_type="llama3", rope_factor=8.0, rope_original=64, rope_low=1.0, rope_high=4.0),
    ),
    "llama, linear": Kind(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
        _plain(rope_type="linear", rope_factor=3.0),
    ),
    "mistral": Kind(
        "Mistral",
        {"sliding_window": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        _plain(sliding_window=9, sliding_layers=(0, 1, 2, 3)),
    ),
    "ministral": Kind(
        "Ministral3",
        {"rope_parameters": YARN},
        _plain(
            rope_type="yarn",
            rope_factor=4.0,
            rope_original=256,
            rope_low=1.0,
            rope_high=32.0,
            rope_attention=yarn_attention(4.0, 1.0, 1.0),
        ),
    ),
    "yarn": Kind(
        "Llama",
        {"rope_parameters": {key: value for key, value in YARN.items() if "scal" not in key}},
        _plain(
            rope_type="yarn",
            rope_factor=4.0,
            rope_original=256,
            rope_low=1.0,
            rope_high=32.0,
            rope_attention=yarn_attention(4.0, 0.0, 0.0),
        ),
    ),
    "gemma 2": Kind(
        "Gemma2",
        {
            "sliding_window": 11,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        _plain(
            sliding_window=11,
            sliding_layers=(0, 2),
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            query_scale=20**-0.5,
            hidden_act=GELU,
            centred_norms=True,
            post_norms=True,
            embedding_scale=60**0.5,
            tie_word_embeddings=True,
        ),
    ),
    "phi-3": Kind(
        "Phi3",
        {"head_dim": 10, "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        _plain(head_dim=10),
    ),
}


@cache
def reference(kind: str) -> Any:
    """transformers' model, whose tied table has rows of unequal length, so that its text does not repeat itself."""
    import transformers

    row = KINDS[kind]
    changes = SIZES | {"bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager"} | row.theirs
    if row.model.endswith("VL"):
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 60}
        more = {"deepstack_visual_indexes": [], "num_position_embeddings": 4} if row.model == "Qwen3VL" else {}
        config = getattr(transformers, f"{row.model}Config")(text_config=changes, vision_config=vision | more)
        model = getattr(transformers, f"{row.model}ForConditionalGeneration")(config)
    else:
        model = getattr(transformers, f"{row.model}ForCausalLM")(getattr(transformers, f"{row.model}Config")(**changes))
    randomise(model, 5)
    if row.ours.centred_norms:
        for name, parameter in model.named_parameters():
            parameter.data -= 1 if name.endswith("norm.weight") else 0
    if row.ours.tie_word_embeddings:  # else the token itself has the highest score
        table = model.get_input_embeddings().weight.data
        table *= 0.02
    return model.eval()


def tensors(kind: str) -> dict[str, torch.Tensor]:
    """The reference's weights, with the parts of Phi-3's joined layers apart."""
    state = {name: value for name, value in reference(kind).state_dict().items() if "visual" not in name}
    ours, parts = KINDS[kind].ours, dict[str, torch.Tensor]()
    heads = [count * ours.head_dim for count in (ours.num_attention_heads, *[ours.num_key_value_heads] * 2)]
    for name, value in state.items():
        if "qkv_proj" in name:
            split = zip("qkv", value.split(heads), strict=True)
            parts |= {name.replace("qkv_proj", f"{part}_proj"): rows for part, rows in split}
        elif "gate_up_proj" in name:
            gate, up = value.chunk(2)
            parts |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            parts[name.replace("model.language_model.", "model.")] = value
    if ours.tie_word_embeddings:
        parts.pop("lm_head.weight", None)
    return {name: value.contiguous().clone() for name, value in parts.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(kind: str) -> Path:
        made = tmp_path_factory.mktemp("decoder")
        save_file(tensors(kind), made / "model.safetensors")
        return made

    return folder


def opened(folder: Path, kind: str, backend: str, **changes: Any) -> tuple[Any, Any]:
    row = {QwenVLConfig: qwen.QWEN2_5_VL}.get(type(KINDS[kind].ours), qwen.QWEN3)
    part = open_component(row, folder, replace(KINDS[kind].ours, **changes), "text_encoder")
    engine = backends.load(backend)
    return engine, engine.open(part.network, part.config, part.stored(FP32), FP32)


@cache
def expected(kind: str, short: bool = False) -> list[int]:
    """transformers' tokens behind a prompt."""
    ids = torch.tensor([SHORT if short else PROMPT])
    with torch.inference_mode():
        made = reference(kind).generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0
        )
    tokens: list[int] = made[0, ids.shape[1] :].tolist()
    assert len(tokens) == TOKENS
    return tokens


def written(engine: Any, ours: Any, ids: list[int] = PROMPT) -> list[int]:
    scores, tokens = engine.numpy(ours.begin(ids)), list[int]()
    while len(tokens) < TOKENS:
        tokens.append(int(scores.argmax()))
        [scores] = engine.numpy(ours.follow(tokens[-1:]))
    ours.forget()
    return tokens


def chunks(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    for package in ("torch", "mlx"):
        monkeypatch.setattr(import_module(f"qwenimg.backends.{package}.networks.encoders.decoder"), "PREFILL", tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_tokens_are_those_of_transformers(folders: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a prompt that is computed in chunks."""
    right = expected(kind)
    assert len(set(right)) >= DISTINCT, f"{kind}: {len(set(right))} distinct tokens"
    for backend in BACKENDS:
        engine, ours = opened(folders(kind), kind, backend)
        whole = written(engine, ours)
        with monkeypatch.context() as patch:
            chunks(patch, 7)
            parts = written(engine, ours)
        same = [sum(a == b for a, b in zip(tokens, right, strict=True)) for tokens in (whole, parts)]
        print(f"{backend} {kind}: {same[0]} of {TOKENS} tokens, {same[1]} in chunks, {len(set(right))} distinct")
        assert whole == parts == right


def errors(folder: Path, kind: str, backend: str, **changes: Any) -> tuple[float, float]:
    """Relative errors of the states after the final norm, and of the scores behind the prompt."""
    engine, ours = opened(folder, kind, backend, taps=(), **changes)
    last = list[torch.Tensor]()
    model = reference(kind)
    norm = next(
        module for name, module in model.named_modules() if name.endswith(("model.norm", "language_model.norm"))
    )
    hook = norm.register_forward_hook(lambda module, given, result: last.append(result))
    with torch.inference_mode():
        scores = model(input_ids=torch.tensor([PROMPT])).logits[0, -1].numpy()
    hook.remove()
    states = engine.numpy(ours.encode(PROMPT))
    return relative_float32(states, last[0].numpy()), relative_float32(engine.numpy(ours.begin(PROMPT)), scores)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_states_and_scores_are_those_of_transformers(folders: Any, kind: str, backend: str) -> None:
    found = errors(folders(kind), kind, backend)
    print(f"{backend} {kind}: states {found[0]:.1e}, scores {found[1]:.1e} (limit {FLOAT32})")
    assert max(found) <= FLOAT32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["qwen3 untied", "mistral", "gemma 2"])
@pytest.mark.sample(1)
def test_texts_side_by_side(folders: Any, kind: str, backend: str) -> None:
    """Rows of unequal prompts, one of which begins later and one leaves early, are as each would be alone."""
    engine, ours = opened(folders(kind), kind, backend)
    right = [expected(kind), expected(kind, short=True)]
    texts = [[int(engine.numpy(ours.begin(PROMPT)).argmax())]]
    for _ in range(10):
        texts[0].append(int(engine.numpy(ours.follow([texts[0][-1]]))[0].argmax()))
    texts.append([int(engine.numpy(ours.begin(SHORT)).argmax())])
    for _ in range(20):
        for text, row in zip(texts, engine.numpy(ours.follow([text[-1] for text in texts])), strict=True):
            text.append(int(row.argmax()))
    ours.end(0)
    for _ in range(20):
        texts[1].append(int(engine.numpy(ours.follow([texts[1][-1]]))[0].argmax()))
    assert [len(text) for text in texts] == [31, 41]
    assert all(text == tokens[: len(text)] for text, tokens in zip(texts, right, strict=True))


def test_memory_grows_in_blocks(folders: Any) -> None:
    """The keys of a text stay where they are while it grows within a block: none is copied for a token."""
    for backend in BACKENDS:
        _, ours = opened(folders("qwen3 untied"), "qwen3 untied", backend)
        ours.begin(PROMPT)
        [kept, *_] = ours.rows[0].kept
        rooms = {kept.room}
        start = kept.keys.data_ptr() if backend == "cpu" else None
        for token in range(300):
            ours.follow([token])
            rooms.add(kept.room)
            if start is not None and kept.room == 256:
                assert kept.keys.data_ptr() == start
        assert rooms == {256, 512} and kept.length == len(PROMPT) + 300


# Planted faults

FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "window too wide by one": ("mistral", {"sliding_window": 10}),
    "window too narrow by one": ("mistral", {"sliding_window": 8}),
    "windows of the other layers": ("gemma 2", {"sliding_layers": (1, 3)}),
    "scores of attention without a bound": ("gemma 2", {"attn_logit_softcapping": 0.0}),
    "scores of tokens without a bound": ("gemma 2", {"final_logit_softcapping": 0.0}),
    "another factor of scores": ("gemma 2", {"query_scale": 0.0}),
    "embeddings as they are": ("gemma 2", {"embedding_scale": 1.0}),
    "gains as they are stored": ("gemma 2", {"centred_norms": False}),
    "another activation": ("gemma 2", {"hidden_act": "silu"}),
    "frequencies as they are": ("llama", {"rope_type": "default"}),
    "frequencies of yarn as they are": ("ministral", {"rope_type": "default"}),
    "tables without their factor": ("yarn", {"rope_attention": 1.0}),
    "neighbouring pairs": ("llama", {"rope_pairs": True}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(4)
def test_faults_of_the_configuration_are_seen(folders: Any, fault: str) -> None:
    kind, changes = FAULTS[fault]
    for backend in BACKENDS:
        found = max(errors(folders(kind), kind, backend, **changes))
        print(f"{backend} {fault}: {found:.1e} (limit {FLOAT32})")
        assert found > FAULT


def _no_offset(patch: pytest.MonkeyPatch) -> None:
    """The queries of a chunk are taken for the first of all."""
    from qwenimg.backends.torch.ops import kept

    right = kept._mask
    patch.setattr(kept, "_mask", lambda queries, keys, window, device: right(keys, keys, window, device)[:queries])


def _first_table(patch: pytest.MonkeyPatch) -> None:
    """The positions of a chunk begin at 0."""
    from qwenimg.backends.torch.networks.encoders import decoder as network

    patch.setattr(network, "table_at", lambda config, positions: decoder.table_at(config, positions - positions[0]))


def _late(patch: pytest.MonkeyPatch) -> None:
    """A written token has the position of the one before it."""
    from qwenimg.backends.torch.networks.encoders import decoder as network

    patch.setattr(network, "text_at", lambda numbers: decoder.rope.text_at([one - 1 for one in numbers]))


def _untied(patch: pytest.MonkeyPatch) -> None:
    """The head is another matrix than the table."""
    from qwenimg.backends.torch import ops

    patch.setattr(ops.Embedding, "scores", lambda table, x: torch.nn.functional.linear(x, table.weight.flip(0)))


@pytest.mark.parametrize("fault", [_no_offset, _first_table, _late, _untied])
@pytest.mark.sample(1)
def test_faults_of_writing_are_seen(
    folders: Any, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    kind = "qwen3 tied" if fault is _untied else "qwen3 untied"
    engine, ours = opened(folders(kind), kind, "cpu")
    chunks(monkeypatch, 7)
    fault(monkeypatch)
    tokens, right = written(engine, ours), expected(kind)
    first = next((i for i, (a, b) in enumerate(zip(tokens, right, strict=True)) if a != b), TOKENS)
    print(f"{fault.__name__}: token {first} is the first that differs")
    assert first < TOKENS // 2


def test_pairs_are_halves_in_another_order(folders: Any, tmp_path: Path) -> None:
    """Rows of q and k in the order of llama.cpp's LLaMA, and RoPE of neighbouring channels: the same states."""
    kind, order = "llama", np.arange(14).reshape(2, 7).T.reshape(-1)
    state = tensors(kind)
    for name, value in state.items():
        if "q_proj" in name or "k_proj" in name:
            heads = value.reshape(-1, 14, value.shape[1])
            state[name] = heads[:, order].reshape(value.shape).contiguous()
    save_file(state, tmp_path / "model.safetensors")
    for backend in BACKENDS:
        found = errors(tmp_path, kind, backend, rope_pairs=True)
        print(f"{backend}: {found[0]:.1e} (limit {FLOAT32})")
        assert max(found) <= FLOAT32
