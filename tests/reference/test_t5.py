"""T5's encoder against transformers, on both backends: values, dtypes, streaming, codes, key styles, planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors.torch import load_file, save_file
from support.parity_verdict import judge
from support.policies import BF16, BF16_PLAIN, FP16_PLAIN, FP32, FP64, UNET
from support.refusals import refused
from support.tiny_t5 import CONFIG, tiny_t5

from qwenimg import backends
from qwenimg.backends.mlx import ops as mlx_ops
from qwenimg.backends.torch import ops as torch_ops
from qwenimg.common.base.config import parse
from qwenimg.common.networks.encoders import t5
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.parity import parity
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.precision.precision import Precision, bases
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights import quantize, streaming
from qwenimg.common.weights.storage import Dense, Packed
from qwenimg.common.weights.values import read, read_quantized

BACKENDS = ("cpu", "mlx")
FP16, FP16_UPCAST = (bases(UNET)[name] for name in ("fp16", "fp16-upcast"))  # text encoders in float16 too
OPS = {"cpu": torch_ops, "mlx": mlx_ops}
LENGTH = 300  # tokens: distances beyond the last bucket
IDS = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], LENGTH).tolist()

# Relative L2. Measured at most 5.1e-7 in float32 and 4e-16 in float64: sums in another order.
FLOAT32, FLOAT64 = 2e-6, 1e-14
# Measured at most 7.6e-4 and 1.2e-2, whatever the size of the products.
FLOAT16, BFLOAT16 = 2e-3, 2.5e-2
FAULT = 20 * FLOAT32  # a planted fault is farther off: measured 2e-4 for the other GELU, 0.08 and more else


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape and np.isfinite(ours).all() and theirs.std() > 0.1
    return float(np.linalg.norm(ours.astype(np.float64) - theirs) / np.linalg.norm(theirs.astype(np.float64)))


def exact_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """transformers' own computes the mean square in float32, in a float64 model too."""
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def reference(model: torch.nn.Module, ids: list[int] = IDS) -> np.ndarray:
    """transformers' states in float64."""
    from transformers.models.t5 import modeling_t5

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(modeling_t5.T5LayerNorm, "forward", exact_norm)
        states = model.double()(torch.tensor([ids])).last_hidden_state.numpy()
    model.float()
    return states


def part_of(folder: Path) -> Component:
    return open_component(t5.NETWORK, folder, read_config(t5.NETWORK, folder), "text_encoder_2")


def encoded(part: Component, precision: Precision, backend: str, ids: list[int] = IDS) -> np.ndarray:
    engine = backends.load(backend)
    opened = engine.open(part.network, part.config, part.stored(precision), precision)
    return np.asarray(engine.numpy(opened.encode(ids)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("t5")
    tiny_t5().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return reference(tiny_t5())


# Values


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_to_transformers(folder: Path, expected: np.ndarray, backend: str) -> None:
    error = relative(encoded(part_of(folder), FP32, backend), expected)
    print(f"{backend}, {LENGTH} tokens: {error:.1e} (limit {FLOAT32})")
    assert error <= FLOAT32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 2, 77])
def test_other_lengths(folder: Path, backend: str, length: int) -> None:
    error = relative(encoded(part_of(folder), FP32, backend, IDS[:length]), reference(tiny_t5(), IDS[:length]))
    print(f"{backend}, {length} tokens: {error:.1e} (limit {FLOAT32})")
    assert error <= FLOAT32


def test_float64(folder: Path, expected: np.ndarray) -> None:
    """Nothing in the torch twin narrows."""
    error = relative(encoded(part_of(folder), FP64, "cpu"), expected)
    print(f"{error:.1e} (limit {FLOAT64})")
    assert error <= FLOAT64


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_buckets(tmp_path: Path, backend: str) -> None:
    """A table of another size, and distances beyond it."""
    changes = {"relative_attention_num_buckets": 20, "relative_attention_max_distance": 50}
    tiny_t5(**changes).save_pretrained(tmp_path)
    error = relative(encoded(part_of(tmp_path), FP32, backend), reference(tiny_t5(**changes)))
    print(f"{backend}: {error:.1e} (limit {FLOAT32})")
    assert error <= FLOAT32


GOLDEN = {0: 0, 1: 17, 7: 23, 8: 24, 11: 24, 12: 25, 16: 26, 22: 26, 23: 27, 32: 28, 46: 29, 64: 30, 91: 31, 127: 31}


SUMMED = 40.0  # roundoffs of float32, relative L2; measured 10. Added in order it is above 60


def test_padding_is_not_rounded_the_same_way_hundreds_of_times() -> None:
    """All padding has one key and one value, and MLX's sums on a CPU add in order."""
    rng, engine = np.random.default_rng(0), backends.load("mlx")
    q, k, v = (rng.standard_normal((1, 512, 2, 8)) for _ in "qkv")
    k[:, 9:], v[:, 9:] = k[:, 9:10], v[:, 9:10]
    scores = np.einsum("blhd,bshd->bhls", q, k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhls,bshd->blhd", weights / weights.sum(-1, keepdims=True), v).reshape(1, 512, -1)
    given = [engine.array(x.astype(np.float32)) for x in (q, k, v, np.zeros((1, 2, 512, 512)))]
    ours = np.asarray(engine.numpy(mlx_ops.biased_attention(*given)), np.float64)
    error = float(np.linalg.norm(ours - expected) / np.linalg.norm(expected)) * 2**24
    print(f"{error:.1f} (limit {SUMMED})")
    assert error < SUMMED


def test_buckets() -> None:
    rows = t5.buckets(T5Config(), 600)
    assert {distance: int(rows[0, distance]) for distance in GOLDEN} == GOLDEN
    assert rows[5, 4] == 1 and rows[599, 0] == 15 and rows[0, 599] == 31 and len(np.unique(rows)) == 31
    from transformers.models.t5.modeling_t5 import T5Attention

    for buckets, most in ((32, 128), (4, 2), (20, 50), (64, 200), (128, 1000)):
        config = T5Config(relative_attention_num_buckets=buckets, relative_attention_max_distance=most)
        distances = torch.arange(600)[None] - torch.arange(600)[:, None]
        theirs = T5Attention._relative_position_bucket(distances, num_buckets=buckets, max_distance=most)
        assert np.array_equal(t5.buckets(config, 600), theirs.numpy())


# Planted faults


def divided(ops: Any) -> dict[str, Any]:
    attend = ops.biased_attention
    return {"biased_attention": lambda q, k, v, bias: attend(q * q.shape[-1] ** -0.5, k, v, bias)}


def multiplied(ops: Any) -> dict[str, Any]:
    start = ops.stream
    return {"stream": lambda x, dtype: start(x * x.shape[-1] ** 0.5, dtype)}


def erf(ops: Any) -> dict[str, Any]:
    return {"gated_gelu": lambda gate, values, dtype: ops.gelu_erf(gate) * values}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", [divided, multiplied, erf], ids=lambda fault: fault.__name__)
def test_faults_of_operations_are_seen(
    folder: Path, expected: np.ndarray, backend: str, fault: Callable[[Any], dict[str, Any]], monkeypatch: Any
) -> None:
    for name, wrong in fault(OPS[backend]).items():
        monkeypatch.setattr(OPS[backend], name, wrong)
    error = relative(encoded(part_of(folder), FP32, backend), expected)
    print(f"{backend} {fault.__name__}: {error:.2g} (seen from {FAULT})")
    assert error > FAULT


BUCKETS, BUCKET = t5.buckets, t5._bucket
WRONG_BUCKETS: dict[str, tuple[str, Any]] = {
    "sign": ("buckets", lambda config, length: BUCKETS(config, length).T.copy()),
    "edge": ("_bucket", lambda config, distance: BUCKET(config, distance - (distance == 16))),
    "last": ("_bucket", lambda config, distance: min(BUCKET(config, distance), 14)),
    "one side": ("buckets", lambda config, length: BUCKETS(config, length) % 16),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", WRONG_BUCKETS)
def test_faults_of_buckets_are_seen(
    folder: Path, expected: np.ndarray, backend: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(t5, *WRONG_BUCKETS[fault])
    error = relative(encoded(part_of(folder), FP32, backend), expected)
    print(f"{backend} {fault}: {error:.2g} (seen from {FAULT})")
    assert error > FAULT


# 16 bit


def enlarged(gate: float, out: float) -> torch.nn.Module:
    """A model whose weights float16 holds, and whose gated products and their projections it does not."""
    model = tiny_t5()
    for block in model.encoder.block:
        dense = block.layer[1].DenseReluDense
        for layer, factor in ((dense.wi_0, gate**0.5), (dense.wi_1, gate), (dense.wo, out)):
            layer.weight.data *= factor
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    return model


ENLARGED = {"small": (1, 1), "products": (300, 1), "stream": (300, 30), "both": (1000, 1000)}


@pytest.mark.parametrize("case", ENLARGED)
@pytest.mark.sample(0)
def test_float16_holds_what_is_too_large_for_it(tmp_path: Path, case: str) -> None:
    """Under each policy, against float64, beside transformers' model in float16 as a whole."""
    model = enlarged(*ENLARGED[case])
    model.save_pretrained(tmp_path)
    products: list[float] = []
    for block in model.encoder.block:
        block.layer[1].DenseReluDense.wo.register_forward_hook(
            lambda module, inputs, result: products.extend([float(inputs[0].abs().max()), float(result.abs().max())])
        )
    expected = reference(model)
    product, result = max(products[::2]), max(products[1::2])
    assert (product > 65504) == (case != "small")
    with torch.inference_mode():
        theirs = model.half()(torch.tensor([IDS])).last_hidden_state.float().numpy()
    clamped = float(np.linalg.norm(theirs - expected) / np.linalg.norm(expected))
    print(f"{case}: products to {product:.2g}, results to {result:.2g}")
    print(f"  all of transformers in float16: {clamped:.2g}")
    assert case == "small" or not clamped < 10 * FLOAT16, "the case would prove nothing"
    limits = [(FP32, FLOAT32), (BF16, BFLOAT16), (BF16_PLAIN, BFLOAT16)]
    limits += [(policy, FLOAT16) for policy in (FP16, FP16_PLAIN, FP16_UPCAST)]
    part = part_of(tmp_path)
    for backend in BACKENDS:
        for precision, limit in limits:
            error = relative(encoded(part, precision, backend), expected)
            print(f"  {backend} {precision.name}: {error:.2g} (limit {limit})")
            assert error <= limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("missing", ["wo", "stream", "product"])
def test_each_float32_place_is_needed(tmp_path: Path, backend: str, missing: str, monkeypatch: Any) -> None:
    model = enlarged(*ENLARGED["both"])
    model.save_pretrained(tmp_path)
    if missing == "wo":
        monkeypatch.setattr(t5, "policy", lambda precision: replace(precision, residual=True))
    elif missing == "stream":
        policy = t5.policy
        narrow = policy(FP16_PLAIN)
        monkeypatch.setattr(type(narrow), "residual_dtype", lambda self, component: "float16")
    else:
        ops, product = OPS[backend], OPS[backend].gated_gelu
        half = ops.DTYPES["float16"]
        monkeypatch.setattr(ops, "gated_gelu", lambda gate, values, dtype: product(gate, values, half))
    engine, part = backends.load(backend), part_of(tmp_path)
    opened = engine.open(part.network, part.config, part.stored(FP16_PLAIN), FP16_PLAIN)
    assert not np.isfinite(engine.numpy(opened.encode(IDS))).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parity(folder: Path, tmp_path: Path, dtype: str) -> None:
    """Both backends within the house's limits of float64, on weights that are exact in the dtype."""
    tensors = load_file(next(folder.glob("*.safetensors")))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({key: value.to(getattr(torch, dtype)) for key, value in tensors.items()}, tmp_path / "model.safetensors")
    part = part_of(tmp_path)
    exact = encoded(part, FP64, "cpu")
    for precision in {"float32": (FP32,), "bfloat16": (BF16, BF16_PLAIN), "float16": (FP16,)}[dtype]:
        outputs = {name: parity.Output(values=encoded(part, precision, name), dtype="float32") for name in BACKENDS}
        case = parity.Case(component="t5.model", dtype=dtype, returned="float32", blocks=2 * CONFIG["num_layers"])
        verdict = judge(case, exact, outputs)
        print(verdict.row(precision.name))
        assert verdict.ok


# Memory


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", [FP32, FP16], ids=lambda precision: precision.name)
@pytest.mark.sample(1)
def test_streamed_is_resident_bit_for_bit(tmp_path: Path, backend: str, precision: Precision) -> None:
    layers = 7
    tiny_t5(num_layers=layers).save_pretrained(tmp_path)
    part, engine = part_of(tmp_path), backends.load(backend)
    plan = streaming.stream_to_fit(part.stored(precision), part.streamable, 0, engine.workspace.moved)
    streamed = streaming.streamed_blocks(plan)
    assert list(streamed) == [f"encoder.block.{i}" for i in range(layers)]
    assert {len(block) for block in streamed.values()} == {9}, "the table of distances stays"
    opened = engine.open(part.network, part.config, plan, precision)
    once, again = (np.asarray(engine.numpy(opened.encode(IDS))) for _ in range(2))
    assert np.array_equal(once, again) and np.array_equal(once, encoded(part, precision, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", ["8", "4"])
def test_quantized(tmp_path: Path, backend: str, bits: str) -> None:
    """All matrices of the blocks, and no table; the states are those of a model with the decoded values."""
    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 6}
    model = tiny_t5(**sizes)
    model.save_pretrained(tmp_path)
    part = part_of(tmp_path)
    policy = quantize.parse(bits)["text"]
    plan = quantize.quantized(part.plan, policy, t5.NETWORK.blocks)  # type: ignore[arg-type]
    for name, entry in plan.entries.items():
        is_matrix = ".layer." in name and not any(word in name for word in ("norm", "bias"))
        assert isinstance(entry.storage, Packed if is_matrix else Dense)
        if isinstance(entry.storage, Packed):
            values = entry.storage.code.values(read_quantized(entry).arrays)
            model.state_dict()[name].copy_(torch.from_numpy(values))
    error = relative(encoded(replace(part, plan=plan), FP32, backend), reference(model))
    print(f"{backend}, {bits} bits: {error:.1e} (limit {FLOAT32})")
    assert error <= FLOAT32


# Manifests and key styles

TENSORS, PARAMETERS = 219, 4_762_310_656  # of the encoder of T5 v1.1 XXL, as published


def test_manifest_is_that_of_transformers() -> None:
    """At full size, on torch's meta device."""
    from dataclasses import asdict

    import transformers

    config = T5Config()
    with torch.device("meta"):
        theirs = transformers.T5EncoderModel(transformers.T5Config(**asdict(config)))
    stored = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    assert stored.pop("encoder.embed_tokens.weight") == stored["shared.weight"]
    assert t5.manifest(config) == stored
    count = sum(int(np.prod(shape)) for shape in stored.values())
    print(f"{len(stored)} tensors, {count:,} parameters")
    assert (len(stored), count) == (TENSORS, PARAMETERS)


def styled(tensors: dict[str, torch.Tensor], style: str) -> dict[str, torch.Tensor]:
    table = "encoder.embed_tokens.weight"
    if style == "alias alone":
        return {table if key == "shared.weight" else key: value for key, value in tensors.items()}
    if style == "alias too":
        return tensors | {table: tensors["shared.weight"].clone()}
    if style == "decoder too":
        more = {f"decoder.{key}": torch.ones(3, 5) for key in ("block.0.layer.1.EncDecAttention.q.weight", "x.weight")}
        return tensors | more | {"lm_head.weight": torch.ones(7, 2), "decoder.embed_tokens.weight": torch.ones(2)}
    assert style == "llama.cpp"
    names = get_tensor_name_map(MODEL_ARCH.T5ENCODER, CONFIG["num_layers"])
    return {f"{names.get_name(key.removesuffix('.weight'))}.weight": value for key, value in tensors.items()}


@pytest.mark.parametrize("style", ["alias alone", "alias too", "decoder too", "llama.cpp"])
def test_key_styles(folder: Path, tmp_path: Path, style: str) -> None:
    tensors = load_file(next(folder.glob("*.safetensors")))
    tensors["shared.weight"] = tensors.get("shared.weight", tensors.pop("encoder.embed_tokens.weight", torch.ones(1)))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(styled(tensors, style), tmp_path / "model.safetensors")
    part = part_of(tmp_path)
    assert part.plan.entries.keys() == t5.manifest(part.config).keys()
    for name, entry in part.plan.entries.items():
        assert np.array_equal(read(entry), tensors[name].numpy()), name
    assert part.plan.known == set(styled(tensors, style)) - {
        key for key in styled(tensors, style) if key.startswith(("decoder.", "lm_head."))
    }
    part.plan.close()


def test_names_are_llama_cpps() -> None:
    """Every tensor of the published encoder under the name that gguf's own table gives it."""
    names = get_tensor_name_map(MODEL_ARCH.T5, 24)
    for name in t5.manifest(T5Config()):
        assert t5.rename(f"{names.get_name(name.removesuffix('.weight'))}.weight") == name
    assert t5.rename("dec.blk.0.cross_attn_q.weight") is t5.rename("output.weight") is None
    for key in ("enc.blk.0.attn_q.bias", "enc.blk.0.cross_attn_q.weight", "enc.blk.x.attn_q.weight", "blk.0.x.weight"):
        assert t5.rename(key) == key, "unknown, and refused by the planner"


MUTANTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("encoder.block.1.layer.1.DenseReluDense.wo.weight"), "lacks tensor 'encoder.block.1."),
    "no table of tokens": (lambda t: t.pop("shared.weight"), "lacks tensor 'shared.weight'"),
    "unknown": (lambda t: t.update({"encoder.extra.weight": torch.ones(2)}), "unknown tensor 'encoder.extra.weight'"),
    "bias": (
        lambda t: t.update({"encoder.block.0.layer.0.SelfAttention.q.bias": torch.ones(70)}),
        "unknown tensor 'encoder.block.0.layer.0.SelfAttention.q.bias'",
    ),
    "ungated": (
        lambda t: t.update({"encoder.block.0.layer.1.DenseReluDense.wi.weight": torch.ones(88, 52)}),
        "unknown tensor 'encoder.block.0.layer.1.DenseReluDense.wi.weight'",
    ),
    "one bias for each block": (
        lambda t: t.update({"encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight": torch.ones(32, 5)}),
        "unknown tensor 'encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight'",
    ),
    "shape": (lambda t: t.update({"encoder.final_layer_norm.weight": torch.ones(51)}), "has shape [51], expected [52]"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_tensor_counts(folder: Path, tmp_path: Path, mutant: str) -> None:
    change, words = MUTANTS[mutant]
    tensors = load_file(next(folder.glob("*.safetensors")))
    change(tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    assert words in refused(part_of, tmp_path)


# Configurations


def published(**changes: Any) -> dict[str, Any]:
    """The config.json of T5-XXL beside Flux.1 and Stable Diffusion 3."""
    fields = {
        "architectures": ["T5EncoderModel"],
        "classifier_dropout": 0.0,
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "decoder_start_token_id": 0,
        "dense_act_fn": "gelu_new",
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "is_gated_act": True,
        "layer_norm_epsilon": 1e-06,
        "model_type": "t5",
        "num_decoder_layers": 24,
        "num_heads": 64,
        "num_layers": 24,
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.3",
        "use_cache": True,
        "vocab_size": 32128,
    }
    return fields | changes


def test_published_configuration() -> None:
    assert parse(T5Config, t5.fields(published()), source="config.json") == T5Config()
    assert parse(T5Config, t5.NETWORK.fields(t5.NETWORK.written(T5Config())), source="config.json") == T5Config()


def test_what_a_saved_configuration_leaves_out_is_transformers_default(tmp_path: Path) -> None:
    import transformers

    transformers.T5Config(feed_forward_proj="gated-gelu").save_pretrained(tmp_path)
    short = {"model_type": "t5", "feed_forward_proj": "gated-gelu"}
    (tmp_path / "short.json").write_text(json.dumps(short))
    assert parse(T5Config, t5.fields(short), source="c") == read_config(t5.NETWORK, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "umt5"}, "'umt5'"),
        ({"feed_forward_proj": "relu"}, "feed_forward_proj 'relu' is not supported; expected 'gated-gelu'"),
        ({"feed_forward_proj": "gated-silu"}, "'gated-silu'"),
        ({"feed_forward_proj": 3}, "feed_forward_proj"),
        ({"d_model": 0}, "d_model"),
        ({"d_kv": 10**9}, "d_kv"),
        ({"num_layers": 10**9}, "num_layers"),
        ({"num_heads": 1.5}, "num_heads"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon 0.0 is out of range"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon"),
        ({"relative_attention_num_buckets": 30}, "relative_attention_num_buckets 30 is not a multiple of 4"),
        ({"relative_attention_num_buckets": 0}, "relative_attention_num_buckets"),
        ({"relative_attention_max_distance": 8}, "relative_attention_max_distance 8 must be more than 8"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], words: str) -> None:
    assert words in refused(lambda: parse(T5Config, t5.fields(published(**changes)), source="config.json"))


def test_a_configuration_without_its_feed_forward_is_the_first_t5s() -> None:
    fields = published()
    del fields["feed_forward_proj"]
    assert "'relu'" in refused(lambda: parse(T5Config, t5.fields(fields), source="config.json"))
