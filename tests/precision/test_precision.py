"""The precision policy: what `--precision` accepts, what it refuses, and what each policy says of every place."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policies import BF16, BF16_PLAIN, FP16_PLAIN, FP32, FP64, MMDIT, UNET, parse

from qwenimg.common.base.errors import QwenimgError, UsageError
from qwenimg.common.families import registry
from qwenimg.common.families.family import Family
from qwenimg.common.networks.denoisers import qwen_dit, unet
from qwenimg.common.networks.encoders import decoder, qwen
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.precision import precision
from qwenimg.common.precision.ladder import higher
from qwenimg.common.precision.precision import INT8, Compute, DenoiserKind, Precision, bases
from qwenimg.common.precision.residency import ALWAYS, ONCE

BASES, SD_BASES = bases(MMDIT), bases(UNET)

DIT = qwen_dit.uses(qwen_dit.manifest(qwen_dit.QwenDiTConfig(num_layers=2, use_additional_t_cond=True)))

# Written out by hand: text, transformer, vae, then the parts of the transformer that may stay float32.
EXPECTED = {
    # name: text, transformer, vae, head, modulation, stream
    "fp32": ("float32", "float32", "float32", "float32", "float32", "float32"),
    "bf16": ("bfloat16", "bfloat16", "float32", "float32", "float32", "float32"),
    "bf16-plain": ("bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16"),
    "fp16-plain": ("float16", "float16", "float32", "float16", "float16", "float16"),
    "fp16": ("bfloat16", "float16", "float32", "float32", "float32", "float32"),
    "fp16-upcast": ("float16", "float16", "float32", "float32", "float32", "float32"),
    "bf16,attention=fp32": ("bfloat16", "bfloat16", "float32", "float32", "float32", "float32"),
    "bf16-plain,matmul=fp32": ("bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16"),
    "bf16,final_norm=off": ("bfloat16", "bfloat16", "float32", "bfloat16", "float32", "float32"),
    "bf16,vae=bf16": ("bfloat16", "bfloat16", "bfloat16", "float32", "float32", "float32"),
    "bf16,text=fp32": ("float32", "bfloat16", "float32", "float32", "float32", "float32"),
    "bf16-plain,final_norm=fp32": ("bfloat16", "bfloat16", "float32", "float32", "bfloat16", "bfloat16"),
    "fp32,transformer=bf16": ("float32", "bfloat16", "float32", "float32", "float32", "float32"),
    "fp16-plain,text=bf16,vae=fp16": ("bfloat16", "float16", "float16", "float16", "float16", "float16"),
}


def dit_dtype(policy: Precision, key: str) -> str:
    return policy.weight_dtype("transformer", key, DIT[key].residency)


def described(policy: Precision) -> tuple[str, ...]:
    def of(key: str) -> str:
        return dit_dtype(policy, key)

    parts = tuple(policy.stored_dtype(part) for part in ("text", "transformer", "vae"))
    return (*parts, of("proj_out.weight"), of("transformer_blocks.0.img_mod.1.weight"), of("img_in.weight"))


@pytest.mark.parametrize("text", EXPECTED)
def test_parse(text: str) -> None:
    policy = parse(text, on_gpu=False)
    assert described(policy) == EXPECTED[text]
    assert policy.name == text
    assert policy == parse(text, on_gpu=True), "only auto asks where it runs"


@pytest.mark.parametrize(("on_gpu", "name"), [(True, "bf16"), (False, "fp32")])
def test_auto(on_gpu: bool, name: str) -> None:
    assert parse("auto", on_gpu=on_gpu) == BASES[name]
    assert parse("auto,vae=bf16", on_gpu=on_gpu).name == f"{name},vae=bf16"


@pytest.mark.parametrize(
    ("alias", "text"),
    [
        ("f32", "fp32"),
        ("float32", "fp32"),
        ("bfloat16", "bf16"),
        (" BF16 ", "bf16"),
        ("Bf16-Plain", "bf16-plain"),
        ("bf16, VAE=bfloat16 ,final_norm=off", "bf16,vae=bf16,final_norm=off"),
        ("bf16,text=f32", "bf16,text=fp32"),
        ("bf16,text=float32", "bf16,text=fp32"),
        ("fp32,vae=float16", "fp32,vae=fp16"),
        ("fp32,vae=f16", "fp32,vae=fp16"),
        ("bf16-plain,final_norm=float32", "bf16-plain,final_norm=fp32"),
        ("bf16,timestep=float32", "bf16,timestep=fp32"),
    ],
)
def test_aliases(alias: str, text: str) -> None:
    a, b = parse(alias, on_gpu=False), parse(text, on_gpu=False)
    assert all(getattr(a, f.name) == getattr(b, f.name) for f in fields(a) if f.name != "name")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "bf17",
        "fp8",
        "fp64",
        "bf16-plain-x",
        "bf16,",
        "bf16,,vae=fp32",
        "bf16,vae",
        "bf16,vae=",
        "bf16,vae=fp8",
        "bf16,vae=fp64",
        "bf16,vae=off",
        "bf16,unet=fp32",
        "bf16,final_norm=bf16",
        "bf16,final_norm=on",
        "bf16,timestep=bf16",
        "bf16,timestep=off",
        "bf16,residual=off",
        "bf16,attention=bf16",
        "bf16,matmul=off",
        "bf16,matmul=bf16",
        "bf16;vae=fp32",
        "vae=fp32",
        "bf16=fp32",
        "bf16,vae=fp32=fp32",
        "bf16,fp32",
    ],
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, on_gpu=False)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    what = "weights in fewer bits are -q 8, 6 or 4" if text == "fp8" else MMDIT.syntax
    assert "--precision" in message and what in message and message.isprintable()


def test_later_overrides_win_and_are_independent_of_order_otherwise() -> None:
    assert parse("bf16,vae=bf16,vae=fp32", on_gpu=False).vae == "float32"
    assert parse("bf16,final_norm=off,final_norm=fp32", on_gpu=False).final_norm is True
    a, b = parse("bf16,vae=bf16,text=fp32", on_gpu=False), parse("bf16,text=fp32,vae=bf16", on_gpu=False)
    assert described(a) == described(b) and a.name != b.name


@given(st.text(max_size=40))
@pytest.mark.sample(0)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        policy = parse(text, on_gpu=False)
    except QwenimgError as error:
        assert error.exit_code == 2 and str(error).isprintable()
    else:
        assert policy.name.startswith((*BASES, INT8))


# Places


@pytest.mark.parametrize("policy", [*BASES.values(), FP64], ids=lambda policy: policy.name)
def test_places_say_what_the_policy_does(policy: Precision) -> None:
    places = policy.places()
    assert places.keys() == MMDIT.places.keys()
    assert places["final_norm"] == dit_dtype(policy, "norm_out.linear.weight")
    assert places["modulation"] == dit_dtype(policy, "time_text_embed.timestep_embedder.linear_1.bias")
    assert places["residual"] == policy.residual_dtype("transformer")
    assert places["timestep"] == "float32", "a float64 run gets the times of every other run"
    for place in ("rope", "softmax", "rms_norm", "guidance", "scheduler"):
        assert places[place] == ("float64" if policy is FP64 else "float32")


def test_a_place_is_float32_at_least() -> None:
    for key in DIT:
        assert dit_dtype(FP64, key) == "float64"
        assert dit_dtype(FP32, key) == "float32"
    assert {FP64.residual_dtype(part) for part in precision.COMPONENTS} == {"float64"}


def test_every_weight_of_the_transformer_has_its_dtype() -> None:
    """Of the whole manifest: in bf16 a weight is float32 exactly if it belongs to a place."""
    wide = {key for key in DIT if dit_dtype(BF16, key) == "float32"}
    tops = {"time_text_embed", "img_in", "txt_in", "norm_out", "proj_out"}
    assert wide == {key for key in DIT if key.split(".")[0] in tops or "_mod." in key}
    for plain in (BF16_PLAIN, FP16_PLAIN):
        assert {dit_dtype(plain, key) for key in DIT} == {plain.transformer}


def test_places_are_the_transformers_alone() -> None:
    text, vae = decoder.manifest(qwen.QwenVLConfig()), qwen_vae.manifest(qwen_vae.QwenVAEConfig())
    assert {BF16.weight_dtype("text", key) for key in text} == {"bfloat16"}
    assert {parse("bf16,vae=bf16", on_gpu=False).weight_dtype("vae", key) for key in vae} == {"bfloat16"}


def test_a_kind_states_its_own_keys() -> None:
    """What is a place of one kind of denoiser is none of the other's, and a new kind needs no line beside its own."""
    assert [MMDIT.place(key, ALWAYS) for key in ("conv_in.weight", "conv_out.bias", "time_embedding.x")] == [None] * 3
    assert [UNET.place(key, ALWAYS) for key in ("img_in.weight", "proj_out.bias", "norm_out.linear.x")] == [None] * 3
    own = replace(BF16, kind=replace(MMDIT, keys={"residual": re.compile(r"begin\.")}))
    assert own.weight_dtype("transformer", "begin.weight") == "float32"
    assert own.weight_dtype("transformer", "proj_out.weight") == "bfloat16"
    assert own.weight_dtype("transformer", "any.weight", ONCE) == "float32", "modulation, whatever its name"


@pytest.mark.parametrize(
    ("text", "dtype", "place"),
    [
        ("fp32", "float32", "float32"),
        ("bf16", "float32", "float32"),
        ("bf16,timestep=rounded", "bfloat16", "rounded to bfloat16"),
        ("fp16-plain,timestep=rounded", "float16", "rounded to float16"),
        ("fp32,timestep=rounded", "float32", "rounded to float32"),
    ],
)
def test_what_a_timestep_is_rounded_to(text: str, dtype: str, place: str) -> None:
    policy = parse(text, on_gpu=False)
    assert policy.time_dtype() == dtype
    assert policy.places()["timestep"] == place


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("fp32", "fp32 (text fp32, transformer fp32, vae fp32)"),
        ("bf16", "bf16 (text bf16, transformer bf16, vae fp32; fp32: final_norm modulation residual)"),
        ("bf16-plain", "bf16-plain (text bf16, transformer bf16, vae fp32)"),
        ("fp16-plain", "fp16-plain (text fp16, transformer fp16, vae fp32)"),
        (
            "bf16,final_norm=off",
            "bf16,final_norm=off (text bf16, transformer bf16, vae fp32; fp32: modulation residual)",
        ),
        (
            "bf16-plain,timestep=rounded",
            "bf16-plain,timestep=rounded (text bf16, transformer bf16, vae fp32; timestep rounded)",
        ),
    ],
)
def test_summary(text: str, summary: str) -> None:
    assert parse(text, on_gpu=False).summary() == summary


# Stable Diffusion

ADDED = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64}
KEYS = unet.manifest(unet.UNetConfig(**ADDED))
# name: text, unet, vae, then the parts of the UNet that may stay float32: head, modulation, stream
SD_EXPECTED = {
    "fp32": ("float32",) * 6,
    "fp16": ("float16", "float16", "float32", "float32", "float32", "float32"),
    "bf16": ("bfloat16", "bfloat16", "float32", "float32", "float32", "float32"),
    "fp16-plain": ("float16", "float16", "float32", "float16", "float16", "float16"),
    "bf16-plain": ("bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16"),
    "fp16-upcast": ("float16", "float16", "float32", "float32", "float32", "float32"),
    "fp16,attention=fp32": ("float16", "float16", "float32", "float32", "float32", "float32"),
    "fp16,unet=bf16": ("float16", "bfloat16", "float32", "float32", "float32", "float32"),
    "fp16,text=fp32,vae=fp16": ("float32", "float16", "float16", "float32", "float32", "float32"),
    "fp16,final_norm=off": ("float16", "float16", "float32", "float16", "float32", "float32"),
}


@pytest.mark.parametrize("text", SD_EXPECTED)
def test_parse_for_stable_diffusion(text: str) -> None:
    policy = parse(text, on_gpu=False, kind=UNET)
    keys = ("conv_out.bias", "up_blocks.1.resnets.2.time_emb_proj.weight", "conv_in.weight")
    parts = tuple(policy.stored_dtype(part) for part in ("text", "unet", "vae"))
    assert (*parts, *(policy.weight_dtype("unet", key) for key in keys)) == SD_EXPECTED[text]
    assert (policy.name, policy.kind) == (text, UNET)
    assert policy.residual_dtype("unet") == SD_EXPECTED[text][5]


def test_auto_for_stable_diffusion() -> None:
    assert parse("auto", on_gpu=True, kind=UNET) == SD_BASES["fp16"]
    assert parse("auto", on_gpu=False, kind=UNET) == SD_BASES["fp32"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [("bf16,unet=fp32", MMDIT), ("bf16,transformer=fp32", UNET), ("fp16,timestep=rounded", UNET)],
)
def test_what_the_other_family_has_is_refused(text: str, kind: DenoiserKind) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, on_gpu=False, kind=kind)
    assert str(caught.value).endswith(kind.syntax)


@pytest.mark.parametrize("text", ["fp16", "float16", "fp16-plain", "bf16,transformer=fp16", "fp16,text=bf16"])
def test_a_dtype_that_a_kind_refuses_is_refused_with_its_reason(text: str) -> None:
    kind = replace(MMDIT, bases=("fp32", "bf16"), prefers=("bf16",), refused={"float16": "its activations exceed it"})
    with pytest.raises(UsageError, match="its activations exceed it; use one of fp32, bf16"):
        parse(text, on_gpu=False, kind=kind)
    assert parse("bf16,text=fp16", on_gpu=False, kind=kind).text == "float16"


def test_every_weight_of_the_unet_has_its_dtype() -> None:
    """Of the whole manifest: in fp16 a weight is float32 exactly if it belongs to a place."""
    wide = {key for key in KEYS if SD_BASES["fp16"].weight_dtype("unet", key) == "float32"}
    tops = {"time_embedding", "add_embedding", "conv_in", "conv_norm_out", "conv_out"}
    names = {"time_emb_proj", "conv_shortcut"}
    assert wide == {key for key in KEYS if key.split(".")[0] in tops or key.split(".")[-2] in names}
    assert {SD_BASES["fp16-plain"].weight_dtype("unet", key) for key in KEYS} == {"float16"}
    vae = parse("fp16,vae=fp16", on_gpu=False, kind=UNET)
    assert {vae.weight_dtype("vae", key) for key in ("decoder.conv_in.weight", "decoder.conv_out.bias")} == {"float16"}


@pytest.mark.parametrize("policy", SD_BASES.values(), ids=SD_BASES)
def test_places_of_stable_diffusion(policy: Precision) -> None:
    places = policy.places()
    assert places.keys() == UNET.places.keys()
    assert places["final_norm"] == policy.weight_dtype("unet", "conv_out.weight")
    assert places["modulation"] == policy.weight_dtype("unet", "time_embedding.linear_1.bias")
    assert places["residual"] == policy.residual_dtype("unet") == policy.weight_dtype("unet", "conv_in.weight")
    assert {places[name] for name in ("timestep", "softmax", "group_norm", "guidance", "scheduler")} == {"float32"}


def test_summary_of_stable_diffusion() -> None:
    expected = "fp16 (text fp16, unet fp16, vae fp32; fp32: final_norm modulation residual)"
    assert SD_BASES["fp16"].summary() == expected
    assert SD_BASES["fp16-upcast"].summary().endswith("vae fp32; every product in fp32)")
    attending = parse("fp16,attention=fp32", on_gpu=False, kind=UNET)
    assert attending.summary().endswith("; attention in fp32)")


# How layers compute


@pytest.mark.parametrize(
    ("path", "scale"),
    [
        ("transformer_blocks.7.attn.to_q", 2**-3),
        ("transformer_blocks.59.attn.add_v_proj", 2**-3),
        ("transformer_blocks.7.attn.attend", 2**-3),
        ("transformer_blocks.7.attn.to_out.0", 2**-4),
        ("transformer_blocks.7.attn.to_add_out", 2**-4),
        ("transformer_blocks.7.txt_mlp.net.0.proj", 2**-5),
        ("transformer_blocks.7.img_mlp.net.2", 2**-5),
        ("transformer_blocks.7.img_mod.1", None),
        ("transformer_blocks.7.attn.norm_q", None),
        ("img_in", None),
        ("proj_out", None),
    ],
)
def test_what_is_scaled_in_float16(path: str, scale: float | None) -> None:
    """What goes into every product of a block, by a power of two; nothing under another policy or in another part."""
    expected = None if scale is None else Compute("float16", scale)
    assert BASES["fp16"].computes("transformer", path) == expected
    for other in ("fp32", "bf16", "fp16-plain"):
        assert BASES[other].computes("transformer", path) is None
    assert BASES["fp16"].computes("text", path) is None and BASES["fp16"].computes("vae", path) is None
    assert SD_BASES["fp16"].computes("unet", path) is None
    assert BASES["fp16-upcast"].computes("transformer", path) == Compute("float32")


def test_every_product_of_a_block_is_scaled() -> None:
    """Of the whole manifest: each layer but the FP32 places."""
    layers = {key.removesuffix(".weight") for key, use in DIT.items() if len(use.shape) == 2}
    scaled = {path for path in layers if BASES["fp16"].computes("transformer", path)}
    wide = {path for path in layers if dit_dtype(BASES["fp16"], f"{path}.weight") == "float32"}
    assert scaled == layers - wide and len(scaled) == 2 * 12


def test_what_is_upcast() -> None:
    attending = parse("fp16,attention=fp32", on_gpu=False, kind=UNET)
    assert attending.computes("unet", "mid_block.attentions.0.transformer_blocks.0.attn1.attend") == Compute("float32")
    assert attending.computes("unet", "conv_in") is None and attending.compute_dtype("unet") == "float16"
    upcast = SD_BASES["fp16-upcast"]
    assert upcast.computes("unet", "conv_in") == Compute("float32") == upcast.computes("text", "a.fc1")
    assert upcast.computes("vae", "decoder.conv_in") is None, "it is float32"
    assert (upcast.compute_dtype("unet"), upcast.stored_dtype("unet")) == ("float32", "float16")
    assert upcast.weight_dtype("unet", "mid_block.resnets.0.conv1.weight") == "float16"
    assert SD_BASES["fp32"].computes("unet", "conv_in") is None


@pytest.mark.parametrize("family", registry.FAMILIES, ids=lambda family: family.name)
def test_int8_is_bf16_but_for_products_and_lossy(family: Family) -> None:
    """A policy of every family, labelled, which no preset, no `auto` and no step of --fallback chooses."""
    kind = family.precision
    policy, plain = (precision.parse(name, on_gpu=True, kind=kind) for name in (INT8, "bf16"))
    assert replace(policy, name="bf16", int8=False) == plain and policy.is_reduced
    assert (precision.short("int8"), precision.short("float64")) == ("int8", "fp64")
    assert policy.summary().endswith("lossy: products in 8 bits)") and policy.places()["products"] == "int8, lossy"
    chosen = {*kind.bases, *kind.presets.values(), *kind.prefers, kind.without_units}
    assert not any(name.startswith("int8") for name in chosen) and kind.names == (*kind.bases, "int8 (lossy)")
    assert [higher(one, "transformer") for one in (policy, plain)] == ["fp32", "fp32"]
    with pytest.raises(UsageError, match="leave matmul=fp32 out"):
        precision.parse("int8,matmul=fp32", on_gpu=True, kind=kind)
    parts = ("text_encoder", "vae", "transformer")
    assert [policy.rounds(part, "a.weight") for part in parts] == [False, False, True]
    assert not policy.rounds("transformer", "a.weight", ONCE) and not plain.rounds("transformer", "a.weight")
