"""LoRAs of Flux.1, of models with its blocks, of Flux.2 and of FLUX.3 in the names of several trainers: the change of
each weight is that of diffusers' converters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import tiny_flux2 as klein
from support.flux_loras import Tensors, by_diffusers, check_changes, random
from support.refusals import refused
from support.tiny_flux import WIDE, tiny_dit, transformer_file

import qwenimg
from qwenimg.common.families import catalog, registry
from qwenimg.common.hub.describe import describe
from qwenimg.common.networks.denoisers import flux_dit, flux_names
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.parts import lora_layers
from qwenimg.common.parts.components import on_paper
from qwenimg.common.parts.lora_layers import denoiser_names
from qwenimg.common.weights.keys import Place
from qwenimg.common.weights.loras import lora
from qwenimg.common.weights.loras.lora import Deltas, read_lora
from qwenimg.common.weights.loras.lora_names import Names

RANK, ALPHA = 2, 3.0
FLOAT32 = 1e-6  # relative L2 of a change of a weight

PUBLISHED = (denoiser_names("transformer", on_paper(flux_dit.NETWORK, FluxConfig(guidance_embeds=True), "bfloat16")),)
D = 3072
# Modules of kohya's files: {name: (outputs, inputs)}
KOHYA = {
    "double_blocks_0_img_attn_qkv": (3 * D, D),
    "double_blocks_18_txt_attn_qkv": (3 * D, D),
    "double_blocks_1_img_attn_proj": (D, D),
    "double_blocks_1_txt_attn_proj": (D, D),
    "double_blocks_2_img_mlp_0": (4 * D, D),
    "double_blocks_2_txt_mlp_2": (D, 4 * D),
    "double_blocks_3_img_mod_lin": (6 * D, D),
    "double_blocks_3_txt_mod_lin": (6 * D, D),
    "single_blocks_0_linear1": (7 * D, D),
    "single_blocks_37_linear1": (7 * D, D),
    "single_blocks_1_linear2": (D, 5 * D),
    "single_blocks_2_modulation_lin": (3 * D, D),
}
XLABS = {
    "double_blocks.0.processor.qkv_lora1": (3 * D, D),
    "double_blocks.0.processor.qkv_lora2": (3 * D, D),
    "double_blocks.1.processor.proj_lora1": (D, D),
    "double_blocks.1.processor.proj_lora2": (D, D),
    "single_blocks.0.processor.qkv_lora": (3 * D, D),
    "single_blocks.1.processor.proj_lora": (D, 5 * D),
}


# Modules of the authors' layers in klein 4B: {name: (outputs, inputs)}
KLEIN = {
    "double_blocks.0.img_attn.qkv": (3 * D, D),
    "double_blocks.4.txt_attn.qkv": (3 * D, D),
    "double_blocks.1.img_attn.proj": (D, D),
    "double_blocks.1.txt_attn.proj": (D, D),
    "double_blocks.2.img_mlp.0": (6 * D, D),
    "double_blocks.2.img_mlp.2": (D, 3 * D),
    "double_blocks.3.txt_mlp.0": (6 * D, D),
    "double_blocks.3.txt_mlp.2": (D, 3 * D),
    "single_blocks.0.linear1": (9 * D, D),
    "single_blocks.19.linear2": (D, 4 * D),
}
# Twice as wide, with more blocks
DEV = {name.replace("blocks.19", "blocks.47"): (2 * rows, 2 * columns) for name, (rows, columns) in KLEIN.items()}


# Of Chroma, which has no layers of modulation, and of LongCat-Image, which has fewer blocks
CHROMA = {name: shape for name, shape in KOHYA.items() if "_mod" not in name}
LONGCAT = {name.replace("_18_", "_9_").replace("_37_", "_19_"): shape for name, shape in KOHYA.items()}
FLUX3 = {
    "content_mode_blocks.image.0.q_proj": (D, D),
    "content_mode_blocks.image.4.k_proj": (D, D),
    "content_mode_blocks.image_cond.1.v_proj": (D, D),
    "content_mode_blocks.image_cond.2.mlp_in": (6 * D, D),
    "txt_mode_blocks.3.attn_out": (D, D),
    "txt_mode_blocks.4.mlp_out": (D, 3 * D),
    "single_blocks.0.q_proj": (D, D),
    "single_blocks.27.mlp_in": (6 * D, D),
}


def kohya(modules: dict[str, tuple[int, int]] = KOHYA) -> Tensors:
    out: Tensors = {}
    for name, (outputs, inputs) in modules.items():
        module = f"lora_unet_{name.replace('.', '_')}"
        out[f"{module}.lora_down.weight"] = random(RANK, inputs)
        out[f"{module}.lora_up.weight"] = random(outputs, RANK)
        out[f"{module}.alpha"] = torch.tensor(ALPHA)
    return out


def ai_toolkit(modules: dict[str, tuple[int, int]]) -> Tensors:
    return {
        f"diffusion_model.{name}.lora_{side}.weight": random(*shape)
        for name, (outputs, inputs) in modules.items()
        for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
    }


def xlabs() -> Tensors:
    return {
        key: value
        for name, (outputs, inputs) in XLABS.items()
        for key, value in ((f"{name}.down.weight", random(RANK, inputs)), (f"{name}.up.weight", random(outputs, RANK)))
    }


def deltas_of(path: Path, tensors: Tensors, names: Names = PUBLISHED) -> Deltas:
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return lora.fit(read_lora(path), names)


def known_names(name: str) -> Names:
    model = registry.published(catalog.KNOWN[name])
    assert model is not None
    return lora_layers.names(model.checkpoint)


@pytest.mark.parametrize(
    ("converter", "written", "known"),
    [
        pytest.param("_convert_kohya_flux_lora_to_diffusers", kohya, "", id="kohya"),
        pytest.param("_convert_kohya_flux_lora_to_diffusers", partial(kohya, CHROMA), "chroma1-hd", id="Chroma"),
        pytest.param("_convert_kohya_flux_lora_to_diffusers", partial(kohya, LONGCAT), "longcat-image", id="LongCat"),
        pytest.param("_convert_xlabs_flux_lora_to_diffusers", xlabs, "", id="XLabs"),
        pytest.param(
            "_convert_kohya_flux2_lora_to_diffusers", partial(kohya, KLEIN), "flux2-klein-4b", id="Flux.2, kohya"
        ),
        pytest.param(
            "_convert_non_diffusers_flux2_lora_to_diffusers",
            partial(ai_toolkit, KLEIN),
            "flux2-klein-4b",
            id="Flux.2, ai-toolkit",
        ),
        pytest.param("_convert_kohya_flux2_lora_to_diffusers", partial(kohya, DEV), "flux2-dev", id="dev, kohya"),
        pytest.param(
            "_convert_non_diffusers_flux2_lora_to_diffusers",
            partial(ai_toolkit, DEV),
            "flux2-dev",
            id="dev, toolkit",
        ),
        pytest.param(
            "_convert_non_diffusers_flux3_lora_to_diffusers", partial(ai_toolkit, FLUX3), "flux3-klein", id="FLUX.3"
        ),
    ],
)
def test_changes_are_those_of_diffusers(
    tmp_path: Path, converter: str, written: Callable[[], Tensors], known: str
) -> None:
    expected, names = by_diffusers(converter, written()), known_names(known) if known else PUBLISHED
    changes = deltas_of(tmp_path / "a.safetensors", written(), names)["transformer"]
    check_changes(changes, expected)
    assert len(changes) == 14 or not known.startswith("flux2")


def test_info_of_double_blocks_alone(tmp_path: Path) -> None:
    """As XLabs publishes them."""
    save_file({key: value for key, value in xlabs().items() if key.startswith("double")}, tmp_path / "a.safetensors")
    said = describe(tmp_path / "a.safetensors")
    assert "fits: Flux.1" in said.lines and not said.faults, said


# Whole weights of a tiny model


def tiny() -> torch.nn.Module:
    return tiny_dit(**WIDE)


def names_of(model: torch.nn.Module) -> Names:
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    part = SimpleNamespace(network="flux_dit", config=None, plan=SimpleNamespace(shapes=shapes))
    return (denoiser_names("transformer", part),)  # type: ignore[arg-type]


def product(parts: Tensors) -> torch.Tensor:
    return parts["lora_up.weight"].double() @ parts["lora_down.weight"].double() * ALPHA / RANK


def of_rank(outputs: int, inputs: int) -> Tensors:
    alpha = torch.tensor(ALPHA)
    return {"lora_down.weight": random(RANK, inputs), "lora_up.weight": random(outputs, RANK), "alpha": alpha}


def loha(outputs: int, inputs: int) -> Tensors:
    a, b = {"hada_w1_a": random(outputs, RANK), "hada_w2_a": random(outputs, RANK) + 1}, random(RANK, inputs)
    return a | {"hada_w1_b": b, "hada_w2_b": b - 1, "alpha": torch.tensor(ALPHA)}


def loha_product(parts: Tensors) -> torch.Tensor:
    first, second = (parts[f"hada_w{n}_a"].double() @ parts[f"hada_w{n}_b"].double() for n in "12")
    return first * second * ALPHA / RANK


def lokr(outputs: int, inputs: int) -> Tensors:
    return {"lokr_w1": random(2, 4), "lokr_w2": random(outputs // 2, inputs // 4)}


def lokr_product(parts: Tensors) -> torch.Tensor:
    return torch.kron(parts["lokr_w1"].double(), parts["lokr_w2"].double())


KINDS = {"LoRA": (of_rank, product), "LoHa": (loha, loha_product), "LoKr": (lokr, lokr_product)}


def in_authors_names(model: torch.nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Tensors:
    """The weights of a file with its authors' names, with the changes that `change` makes to its matrices."""
    changed = {}
    for key, value in transformer_file(model).items():
        more = change(key, value) if key.endswith(".weight") and value.ndim == 2 else None
        changed[key] = value.double() if more is None else value.double() + more
    return changed


def split(tensors: Tensors, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a file by diffusers' names: of a fused one its rows, by another rule than the product's."""
    width = model.config.num_attention_heads * model.config.attention_head_dim
    for index in range(model.config.num_single_layers):
        fused = tensors[f"single_blocks.{index}.linear1.weight"]
        parts = fused.split([width, width, width, 4 * width])
        for name, part in zip(("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), parts, strict=True):
            yield f"single_transformer_blocks.{index}.{name}.weight", part
    for index in range(model.config.num_layers):
        for stream, form in (("img", "to_{}"), ("txt", "add_{}_proj")):
            parts = tensors[f"double_blocks.{index}.{stream}_attn.qkv.weight"].chunk(3)
            for letter, part in zip("qkv", parts, strict=True):
                yield f"transformer_blocks.{index}.attn.{form.format(letter)}.weight", part
    shift, scale = tensors["final_layer.adaLN_modulation.1.weight"].chunk(2)
    yield "norm_out.linear.weight", torch.cat([scale, shift])
    yield "proj_out.weight", tensors["final_layer.linear.weight"]


@pytest.mark.parametrize("form", ["diffusion_model.{}", "lora_unet_{}"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_its_authors_takes_a_change(tmp_path: Path, kind: str, form: str) -> None:
    model, (parts_of, change_of) = tiny(), KINDS[kind]
    written: Tensors = {}

    def change(key: str, value: torch.Tensor) -> torch.Tensor:
        path = key.removesuffix(".weight")
        module = form.format(path.replace(".", "_") if form.endswith("_{}") else path)
        parts = parts_of(*value.shape)
        written.update({f"{module}.{role}": part for role, part in parts.items()})
        return change_of(parts)

    changed = in_authors_names(model, change)
    deltas = deltas_of(tmp_path / "a.safetensors", written, names_of(model))["transformer"]
    state, matrices = model.state_dict(), [n for n, v in model.state_dict().items() if v.ndim == 2]
    assert deltas.keys() == set(matrices)
    worst = 0.0
    for name, expected in split(changed, model):
        [one] = deltas[name]
        ours = state[name].numpy() + one.added(state[name].numpy())
        worst = max(worst, float(np.linalg.norm(ours - expected.numpy()) / np.linalg.norm(expected.numpy())))
    print(f"{kind} in {form}: at most {worst:.1e} (limit {FLOAT32})")
    assert worst <= FLOAT32


def test_dora_of_a_fused_layer(tmp_path: Path) -> None:
    """The norm is over rows, which the parts of a fused layer have for themselves."""
    model, key = tiny(), "single_blocks.0.linear1"
    weight = transformer_file(model)[f"{key}.weight"].double()
    parts = of_rank(*weight.shape) | {"dora_scale": random(len(weight), 1).abs() + 0.5}
    changed = weight + product(parts)
    expected = parts["dora_scale"].double() * changed / changed.norm(dim=1, keepdim=True)
    written = {f"diffusion_model.{key}.{role}": part for role, part in parts.items()}
    deltas = deltas_of(tmp_path / "a.safetensors", written, names_of(model))["transformer"]
    state = model.state_dict()
    names = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]
    for name, rows in zip(names, expected.split([96, 96, 96, 384]), strict=True):
        stored = state[f"single_transformer_blocks.0.{name}.weight"].numpy()
        ours = stored + deltas[f"single_transformer_blocks.0.{name}.weight"][0].added(stored)
        assert float(np.linalg.norm(ours - rows.numpy()) / np.linalg.norm(rows.numpy())) <= FLOAT32


def test_diffusers_names(tmp_path: Path) -> None:
    model, written = tiny(), {}
    matrices = {name: value for name, value in model.state_dict().items() if value.ndim == 2}
    for name, value in matrices.items():
        path = name.removesuffix(".weight")
        written[f"transformer.{path}.lora_A.weight"] = random(RANK, value.shape[1])
        written[f"transformer.{path}.lora_B.weight"] = random(value.shape[0], RANK)
    assert deltas_of(tmp_path / "a.safetensors", written, names_of(model))["transformer"].keys() == matrices.keys()


# Faults and bad files


def test_a_wrong_split_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = flux_names.place

    def turned(name: str) -> Place:
        there = place(name)
        begin, end, of = there.rows
        if of != 7:
            return there
        return there._replace(rows=there.rows._replace(begin=0, end=4) if end == 7 else there.rows._replace(
            begin=begin + 4, end=end + 4
        ))  # fmt: skip

    monkeypatch.setattr(flux_names, "place", turned)
    with pytest.raises(AssertionError):
        test_every_layer_of_its_authors_takes_a_change(tmp_path, "LoRA", "lora_unet_{}")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (of_rank(3 * 96 - 3, 96), "makes [285, 96] of a weight [288, 96]"),
        (of_rank(96, 96), "makes [96, 96] of a weight [288, 96]"),
        (of_rank(288, 96) | {"dora_scale": random(1, 96)}, "of the inputs of several layers at once"),
    ],
)
def test_bad_modules_are_refused(tmp_path: Path, parts: Tensors, message: str) -> None:
    written = {f"lora_unet_double_blocks_0_img_attn_qkv.{role}": part for role, part in parts.items()}
    assert message in refused(deltas_of, tmp_path / "a.safetensors", written, names_of(tiny()))


def test_a_layer_and_a_part_of_it(tmp_path: Path) -> None:
    fused = {f"lora_unet_double_blocks_0_img_attn_qkv.{role}": part for role, part in of_rank(288, 96).items()}
    plain = {f"lora_unet_transformer_blocks_0_attn_to_k.{role}": part for role, part in of_rank(96, 96).items()}
    assert "are of one weight" in refused(deltas_of, tmp_path / "a.safetensors", fused | plain, names_of(tiny()))


# Pictures of Flux.2


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_klein_fused_and_beside_are_alike(tiny_flux2: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """A LoRA of every layer of the transformer, in diffusers' names."""
    shapes = {name: value.shape for name, value in klein.tiny_dit().state_dict().items() if value.ndim == 2}
    path = tmp_path / "every.safetensors"
    save_file(
        {
            f"transformer.{name.removesuffix('.weight')}.lora_{side}.weight": 0.1 * random(*shape)
            for name, (outputs, inputs) in shapes.items()
            for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
        },
        path,
    )
    pipe = qwenimg.load(tiny_flux2["flux2-klein"], backend=backend, precision="fp32")
    plain, fused, beside = (
        pipe("a ring", width=48, height=32, steps=2, seed=5, **more).latents
        for more in ({}, {"lora": str(path), "lora_mode": "fuse"}, {"lora": str(path), "lora_mode": "side"})
    )
    error, change = (float(np.linalg.norm(one - fused) / np.linalg.norm(fused)) for one in (beside, plain))
    print(f"{backend}: {error:.1e} apart, {change:.1e} from no LoRA")
    assert error < 1e-4 < 1e-2 < change
