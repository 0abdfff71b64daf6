"""Transformers of every family in files, in their authors' names, diffusers' or other programs': each tensor is that of
the folder, bit for bit; faults in the tables of names are seen, and bad files are refused in one line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import (
    tiny_anima,
    tiny_auraflow,
    tiny_chroma,
    tiny_ernie,
    tiny_flux,
    tiny_flux2,
    tiny_flux3,
    tiny_hunyuan,
    tiny_krea2,
    tiny_longcat,
    tiny_lumina,
    tiny_ovis,
    tiny_pixart,
    tiny_qwen21,
    tiny_sana,
    tiny_sd3,
    tiny_zimage,
)
from support.comfy_files import LAYOUTS, comfy
from support.gguf_files import fitting, write
from support.refusals import refused
from support.relative import largest

from qwenimg.common.networks.denoisers import (
    anima_names,
    aura_dit,
    aura_names,
    chroma_names,
    ernie_dit,
    ernie_names,
    flux2_names,
    flux3_names,
    flux_names,
    hunyuan_dit,
    hunyuan_names,
    krea2_dit,
    krea2_names,
    longcat_dit,
    longcat_names,
    lumina_dit,
    lumina_names,
    ovis_dit,
    ovis_names,
    pixart_dit,
    pixart_names,
    qwen21_names,
    sana_dit,
    sana_names,
    sd3_dit,
    sd3_names,
    zimage_dit,
    zimage_names,
)
from qwenimg.common.networks.denoisers.anima_dit import AnimaConfig
from qwenimg.common.networks.denoisers.aura_dit import AuraConfig
from qwenimg.common.networks.denoisers.chroma_dit import ChromaConfig
from qwenimg.common.networks.denoisers.ernie_dit import ErnieConfig
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.denoisers.flux3_dit import Flux3Config
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.denoisers.hunyuan_dit import HunyuanConfig
from qwenimg.common.networks.denoisers.krea2_dit import Krea2Config
from qwenimg.common.networks.denoisers.longcat_dit import LongCatConfig
from qwenimg.common.networks.denoisers.lumina_dit import LuminaConfig
from qwenimg.common.networks.denoisers.ovis_dit import OvisConfig
from qwenimg.common.networks.denoisers.pixart_dit import PixArtConfig
from qwenimg.common.networks.denoisers.qwen21_dit import Qwen21Config
from qwenimg.common.networks.denoisers.sana_dit import SanaConfig
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config
from qwenimg.common.networks.denoisers.zimage_dit import ZImageConfig
from qwenimg.common.parts.components import config_at
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.quant.bits import widened
from qwenimg.common.weights import part_names
from qwenimg.common.weights.keys import Place, Rows
from qwenimg.common.weights.values import read

Q8_0 = 0.02  # relative L2 of values in 8 bits with a scale for 32

Tensors = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Network:
    names: ModuleType  # the table under test
    like: Any  # what a file's shapes do not show
    converter: str = ""  # diffusers' own
    converted_width: int = 0  # that the converter has in its source, to be replaced by 96
    converted_rows: Mapping[str, str] = field(default_factory=dict)  # lines of its source, replaced
    ours: Callable[[str], str] = str  # our name of diffusers'
    coded: tuple[str, ...] = ("blocks.",)  # layers that ComfyUI quantizes


FLUX = Network(
    names=flux_names,
    like=FluxConfig(attention_head_dim=32, axes_dims_rope=(8, 12, 12)),
    converter="convert_flux_transformer_checkpoint_to_diffusers",
    converted_width=3072,
)
LONGCAT = Network(
    names=longcat_names,
    like=LongCatConfig(attention_head_dim=32, axes_dims_rope=(8, 12, 12)),
    ours=longcat_dit.rename,
)
OVIS = Network(
    names=ovis_names,
    like=OvisConfig(attention_head_dim=32, axes_dims_rope=(8, 12, 12)),
    ours=ovis_dit.rename,
)
CHROMA = Network(
    names=chroma_names,
    like=ChromaConfig(attention_head_dim=32, axes_dims_rope=(8, 12, 12)),
    converter="convert_chroma_transformer_checkpoint_to_diffusers",
    converted_width=3072,
)
FLUX2 = Network(
    names=flux2_names,
    like=Flux2Config(attention_head_dim=32, axes_dims_rope=(8, 8, 8, 8)),
    converter="convert_flux2_transformer_checkpoint_to_diffusers",
)
FLUX3 = Network(
    names=flux3_names,
    like=Flux3Config(attention_head_dim=32, axes_dims_rope=(8, 8, 8, 8)),
    converter="convert_flux3_transformer_checkpoint_to_diffusers",
)
Z_IMAGE = Network(
    names=zimage_names,
    like=ZImageConfig(dim=96, n_heads=3, axes_dims=(8, 12, 12), axes_lens=(640, 48, 48)),
    converter="convert_z_image_transformer_checkpoint_to_diffusers",
    ours=zimage_dit.rename,
    coded=(".attention.", ".feed_forward."),
)
SD3 = Network(
    names=sd3_names,
    like=SD3Config(),
    converter="convert_sd3_transformer_checkpoint_to_diffusers",
    ours=sd3_dit.rename,
)
QWEN21 = Network(
    names=qwen21_names,
    like=Qwen21Config(attention_head_dim=32, axes_dims_rope=(8, 12, 12)),
    converter="convert_qwen_image21_transformer_checkpoint_to_diffusers",
)


ERNIE = Network(
    names=ernie_names,
    like=ErnieConfig(hidden_size=96, num_attention_heads=3, rope_axes_dim=(8, 12, 12), text_in_dim=64),
    coded=("layers.",),
)


KREA2 = Network(
    names=krea2_names,
    like=Krea2Config(attention_head_dim=32, axes_dims_rope=(8, 12, 12)),
    converter="convert_krea2_transformer_checkpoint_to_diffusers",
    ours=krea2_dit.rename,
)


ANIMA = Network(
    names=anima_names,
    like=AnimaConfig(text_embed_dim=64),
    converter="convert_cosmos_transformer_checkpoint_to_diffusers",
)


LUMINA = Network(
    names=lumina_names,
    converter="convert_lumina2_to_diffusers",
    converted_rows={"q_dim = 2304": "q_dim = 128", "k_dim = v_dim = 768": "k_dim = v_dim = 64"},
    like=LuminaConfig(dim=128, n_heads=4, n_kv_heads=2, axes_dims=(8, 12, 12), axes_lens=(300, 48, 64), multiple_of=32),
    ours=lumina_dit.rename,
    coded=(".attention.", ".feed_forward."),
)


PIXART = Network(
    names=pixart_names,
    like=PixArtConfig(
        num_attention_heads=4, attention_head_dim=24, cross_attention_dim=96, caption_channels=64, sample_size=12
    ),
    ours=pixart_dit.rename,
)


AURAFLOW = Network(
    names=aura_names,
    converter="convert_auraflow_transformer_checkpoint_to_diffusers",
    like=AuraConfig(),
    ours=aura_dit.rename,
    coded=("_layers.", "_blocks."),
)


SANA_WIDE: dict[str, Any] = {
    "in_channels": 32, "out_channels": 32, "num_attention_heads": 3, "attention_head_dim": 32,
    "cross_attention_head_dim": 32, "cross_attention_dim": 96, "caption_channels": 64, "mlp_ratio": 2.0,
}  # fmt: skip
SANA = Network(
    names=sana_names,
    like=SanaConfig(num_attention_heads=3, num_cross_attention_heads=3, cross_attention_dim=96, caption_channels=64),
    converter="convert_sana_transformer_to_diffusers",
    ours=sana_dit.rename,
)


HUNYUAN = Network(
    names=hunyuan_names,
    like=HunyuanConfig(**(tiny_hunyuan.DIT | tiny_hunyuan.WIDE)),
    ours=hunyuan_dit.rename,
)


@dataclass(frozen=True)
class Case:
    """A network, a tiny model of it whose rows are whole blocks of codes, and its tensors in a file."""

    network: Network
    model: Callable[[], Any]
    file: Callable[[Any], Tensors]
    config: Callable[[Any], Any]


def state_dict(model: Any) -> Tensors:
    return {name: value.contiguous() for name, value in model.state_dict().items()}


def flat_pads(model: Any) -> Tensors:
    """As some converters write it: pad tokens of one dimension."""
    return {k: v.flatten() if "pad_token" in k else v for k, v in tiny_zimage.transformer_file(model).items()}


def as_in(kind: type, model: Any) -> Any:
    """Return the configuration that diffusers' model has."""
    fields = {name: model.config[name] for name in kind.__dataclass_fields__ if name in model.config}  # type: ignore[attr-defined]
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def flux_config(model: Any) -> FluxConfig:
    config = as_in(FluxConfig, model)
    return replace(config, out_channels=config.out_features)


def flux(**changes: Any) -> Case:
    model = cache(partial(tiny_flux.tiny_dit, **(tiny_flux.WIDE | changes)))
    return Case(FLUX, model, tiny_flux.transformer_file, flux_config)


UNPOOLED_WIDE = {"attention_head_dim": 32, "axes_dims_rope": (8, 12, 12), "joint_attention_dim": 64}


def unpooled(network: Network, module: ModuleType, kind: type, **changes: Any) -> Case:
    """A network of FLUX.1's blocks without pooled text."""

    def config(model: Any) -> Any:
        made = as_in(kind, model)
        return replace(
            made, **({"pooled_projection_dim": 0} if kind is LongCatConfig else {"out_channels": made.out_features})
        )

    model = cache(partial(module.tiny_dit, **(UNPOOLED_WIDE | changes)))
    return Case(network, model, module.transformer_file, config)


def z_image(file: Callable[[Any], Tensors]) -> Case:
    return Case(Z_IMAGE, cache(partial(tiny_zimage.tiny_dit, **tiny_zimage.WIDE)), file, partial(as_in, ZImageConfig))


def sd3(kind: str) -> Case:
    model = cache(partial(tiny_sd3.tiny_dit, kind, **tiny_sd3.WIDE_DIT))
    return Case(SD3, model, tiny_sd3.transformer_file, partial(as_in, SD3Config))


FLUX2_WIDE = {"attention_head_dim": 32, "axes_dims_rope": (8, 8, 8, 8), "joint_attention_dim": 192}
QWEN21_WIDE = {"attention_head_dim": 32, "axes_dims_rope": (8, 12, 12), "context_in_dim": 64}


def qwen21(file: Callable[[Any], Tensors]) -> Case:
    model = cache(partial(tiny_qwen21.tiny_dit, **QWEN21_WIDE))
    return Case(QWEN21, model, file, lambda model: Qwen21Config(**(tiny_qwen21.DIT | QWEN21_WIDE)))


def flux2(*, guidance_embeds: bool) -> Case:
    changes = FLUX2_WIDE | {"guidance_embeds": guidance_embeds}
    model = cache(partial(tiny_flux2.tiny_dit, **changes))
    return Case(FLUX2, model, tiny_flux2.transformer_file, lambda model: Flux2Config(**(tiny_flux2.DIT | changes)))


def flux3(*, flow_map: bool) -> Case:
    changes = FLUX2_WIDE | {"joint_attention_dim": 64, "flow_map": flow_map}
    changes["cond_in_channels"] = (tiny_flux3.DIT | changes)["in_channels"]
    model = cache(partial(tiny_flux3.tiny_dit, **changes))
    return Case(FLUX3, model, tiny_flux3.transformer_file, lambda model: Flux3Config(**(tiny_flux3.DIT | changes)))


ERNIE_WIDE: dict[str, Any] = {
    "hidden_size": 96, "ffn_hidden_size": 128, "text_in_dim": 64, "rope_axes_dim": (8, 12, 12),
}  # fmt: skip

KREA2_WIDE: dict[str, Any] = {
    "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12), "intermediate_size": 128, "text_hidden_dim": 96,
    "text_intermediate_size": 64,
}  # fmt: skip


def krea2(file: Callable[[Any], Tensors]) -> Case:
    model = cache(partial(tiny_krea2.tiny_dit, **KREA2_WIDE))
    return Case(KREA2, model, file, lambda model: Krea2Config(**(tiny_krea2.DIT | KREA2_WIDE)))


ANIMA_WIDE: dict[str, Any] = {
    "attention_head_dim": 32, "mlp_ratio": 2.0, "text_embed_dim": 64, "adaln_lora_dim": 32,
}  # fmt: skip


def anima(file: Callable[[Any], Tensors]) -> Case:
    model = cache(partial(tiny_anima.tiny_dit, **ANIMA_WIDE))
    return Case(ANIMA, model, file, lambda model: AnimaConfig(**(tiny_anima.DIT | ANIMA_WIDE)))


def lumina(file: Callable[[Any], Tensors]) -> Case:
    def config(model: Any) -> LuminaConfig:
        fields = lumina_dit.NETWORK.fields(tiny_lumina.DIT | tiny_lumina.WIDE)
        return LuminaConfig(**{name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()})

    return Case(LUMINA, cache(partial(tiny_lumina.tiny_dit, **tiny_lumina.WIDE)), file, config)


def pixart(file: Callable[[Any], Tensors], **more: object) -> Case:
    """more: of a model that sees the size of its pictures."""

    def config(model: Any) -> PixArtConfig:
        return PixArtConfig(**(tiny_pixart.DIT | tiny_pixart.WIDE | more))

    return Case(PIXART, cache(partial(tiny_pixart.tiny_dit, **tiny_pixart.WIDE, **more)), file, config)


def auraflow(file: Callable[[Any], Tensors]) -> Case:
    model = cache(partial(tiny_auraflow.tiny_dit, **tiny_auraflow.WIDE))
    return Case(AURAFLOW, model, file, lambda model: AuraConfig(**(tiny_auraflow.DIT | tiny_auraflow.WIDE)))


def sana(kind: str, file: Callable[[Any], Tensors]) -> Case:
    changes = tiny_sana.KINDS[kind] | SANA_WIDE
    changes |= {"interpolation_scale": 1.0} if kind == "sana-2k" else {}  # that of its size, which a file shows
    network = SANA if kind == "sana-1.0" else replace(SANA, converter="")  # diffusers' knows no newer ones
    return Case(network, cache(partial(tiny_sana.tiny_dit, **changes)), file, partial(as_in, SanaConfig))


def hunyuan(file: Callable[[Any], Tensors], **more: object) -> Case:
    """more: of a model that sees sizes."""

    def config(model: Any) -> HunyuanConfig:
        return HunyuanConfig(**(tiny_hunyuan.DIT | tiny_hunyuan.WIDE | more))

    return Case(HUNYUAN, cache(partial(tiny_hunyuan.tiny_dit, **tiny_hunyuan.WIDE, **more)), file, config)


CASES = {
    "flux-dev": flux(),
    "flux-schnell": flux(guidance_embeds=False),
    "flux-fill": flux(in_channels=384, out_channels=64),
    "flux2": flux2(guidance_embeds=False),
    "flux2-dev": flux2(guidance_embeds=True),
    "longcat": unpooled(LONGCAT, tiny_longcat, LongCatConfig),
    "ovis": unpooled(OVIS, tiny_ovis, OvisConfig),
    "ovis, its authors' names": replace(unpooled(OVIS, tiny_ovis, OvisConfig), file=tiny_ovis.authors_file),
    "chroma": unpooled(CHROMA, tiny_chroma, ChromaConfig, approximator_hidden_dim=64),
    "ernie": Case(
        ERNIE,
        cache(partial(tiny_ernie.tiny_dit, **ERNIE_WIDE)),
        state_dict,
        lambda model: ErnieConfig(**(tiny_ernie.DIT | ERNIE_WIDE)),
    ),
    "krea2": krea2(tiny_krea2.transformer_file),
    "krea2, diffusers' names": krea2(state_dict),
    "anima": anima(tiny_anima.transformer_file),
    "anima, diffusers' names": anima(state_dict),
    "auraflow": auraflow(tiny_auraflow.transformer_file),
    "auraflow, diffusers' names": auraflow(state_dict),
    "lumina": lumina(tiny_lumina.transformer_file),
    "lumina, diffusers' names": lumina(state_dict),
    "pixart": pixart(tiny_pixart.transformer_file),
    "pixart, alpha": pixart(tiny_pixart.transformer_file, use_additional_conditions=True),
    "pixart, diffusers' names": pixart(state_dict),
    **{kind: sana(kind, tiny_sana.transformer_file) for kind in tiny_sana.KINDS},
    "sana, diffusers' names": sana("sana", state_dict),
    "hunyuan": hunyuan(tiny_hunyuan.transformer_file),
    "hunyuan, 1.1": hunyuan(tiny_hunyuan.transformer_file, use_style_cond_and_image_meta_size=True),
    "hunyuan, diffusers' names": hunyuan(state_dict),
    "flux3": flux3(flow_map=True),
    "flux3-base": flux3(flow_map=False),
    "z-image": z_image(tiny_zimage.transformer_file),
    "z-image, diffusers' names": z_image(state_dict),
    "z-image, MLX_z-image's names": z_image(tiny_zimage.mlx_z_image_file),
    "qwen21, fused": qwen21(lambda model: tiny_qwen21.fused(model.state_dict())),
    "qwen21": qwen21(state_dict),
    **{f"sd3-{kind}": sd3(kind) for kind in tiny_sd3.KINDS},
}
IN_GGUF = CASES | {"z-image, flat pads": z_image(flat_pads)}


def opened(network: Network, path: Path, like: Any = None) -> tuple[Any, Arrays]:
    """The configuration of the transformer in a file, and its parameters."""
    layouts = network.names.LAYOUTS
    part = open_part(layouts, path, config_at(layouts.network, path, like or network.like), "transformer")
    arrays = {name: widened(read(entry)) for name, entry in part.plan.entries.items()}
    part.plan.close()
    return part.config, arrays


def expected(network: Network, tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Tensors of diffusers' names by ours."""
    values = {network.ours(key): value.float().numpy() for key, value in tensors.items()}
    if network is ERNIE:
        values[ernie_dit.KERNEL] = values[ernie_dit.KERNEL][:, :, 0, 0]
    tables = {SD3.names: (sd3_dit.TABLE,), AURAFLOW.names: (aura_dit.TABLE, aura_dit.REGISTER_TOKENS)}
    if network.names is sana_names:
        values = {key: value[:, :, 0, 0] if value.shape[2:] == (1, 1) else value for key, value in values.items()}
    return values | {key: values[key][0] for key in tables.get(network.names, ()) if key in values}


def same(arrays: Arrays, wanted: Arrays) -> None:
    assert arrays.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not np.array_equal(arrays[name], value)]


def converted(network: Network, tensors: Tensors) -> Tensors:
    """A file's tensors by diffusers' names, by its converter."""
    from diffusers.loaders import single_file_utils as theirs

    scope = dict(vars(theirs))
    if network.converted_width:
        width, source = f"inner_dim = {network.converted_width}", inspect.getsource(scope[network.converter])
        assert width in source
        exec(source.replace(width, "inner_dim = 96"), scope)
    if network.converted_rows:
        source = inspect.getsource(scope[network.converter])
        for line, ours in network.converted_rows.items():
            assert line in source
            source = source.replace(line, ours)
        exec(source, scope)
    result: Tensors = scope[network.converter](dict(tensors))
    return result


def by_number(case: Case, tensors: Tensors) -> Tensors:
    """The same, by a file whose values are their numbers in the model: for a network that diffusers reads no file
    of."""
    model = deepcopy(case.model())
    state, count = model.state_dict(), 0
    for name, value in state.items():
        state[name] = torch.arange(count, count + value.numel()).reshape(value.shape).float()  # exact below 2**24
        count += value.numel()
    model.load_state_dict(state)
    flat = torch.full((count,), torch.nan)
    own = {name: value for name, value in case.file(model).items() if name not in case.network.names.LAYOUTS.ignored}
    for name, numbers in own.items():
        flat[numbers.long()] = tensors[name]
    return {name: flat[value.long()] for name, value in state.items()}


def saved(path: Path, tensors: Tensors) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


# What is in a file


@pytest.mark.parametrize(
    "name",
    [
        "flux-dev",
        "flux-schnell",
        "chroma",
        "flux2",
        "flux2-dev",
        "flux3",
        "z-image",
        "qwen21, fused",
        "krea2",
        "anima",
        "auraflow",
        "lumina",
        "sana-1.0",
    ]
    + [f"sd3-{kind}" for kind in tiny_sd3.KINDS],
)
def test_the_reference_reads_the_file(name: str) -> None:
    case = CASES[name]
    same(
        expected(case.network, converted(case.network, case.file(case.model()))),
        expected(case.network, case.model().state_dict()),
    )


@pytest.mark.parametrize("prefix", part_names.DENOISERS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(14)
def test_every_tensor_is_that_of_the_model(tmp_path: Path, name: str, prefix: str) -> None:
    case = CASES[name]
    model = case.model()
    beside = {"vae.decoder.x": torch.ones(2)} if prefix else {}
    file = {prefix + key: value for key, value in case.file(model).items()}
    config, arrays = opened(case.network, saved(tmp_path / "a.safetensors", file | beside))
    same(arrays, expected(case.network, model.state_dict()))
    assert config == case.config(model)


@pytest.mark.parametrize("name", ["flux-dev", "longcat", "ovis", "chroma", "flux2", "flux2-dev", "flux3", "flux3-base"])
def test_diffusers_names_and_folders(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = case.model()
    model.save_pretrained(tmp_path / "transformer")
    saved(tmp_path / "plain.safetensors", model.state_dict())
    for place in ("transformer", "plain.safetensors"):
        config, arrays = opened(case.network, tmp_path / place)
        same(arrays, expected(case.network, model.state_dict()))
        if name in ("flux-dev", "chroma"):  # a configuration may leave it out
            config = replace(config, out_channels=config.out_features)
        assert config == case.config(model)


ARCHITECTURES = (
    ("flux-dev", "flux"), ("flux2", "flux"), ("flux2", "flux2"), ("z-image", "lumina2"),
    ("z-image, flat pads", "lumina2"), ("sd3-medium", "sd3"), ("qwen21, fused", "qwen_image"), ("qwen21", "qwen_image"),
    ("flux3", "flux3"), ("flux3-base", "flux"), ("longcat", "flux"), ("ovis", "flux"), ("chroma", "flux"),
    ("flux2-dev", "flux"),
    ("ernie", "ernie_image"),
    ("krea2", "krea2"),
    ("anima", "cosmos"),
    ("auraflow", "aura"),
    ("lumina", "lumina2"),
    ("pixart", "pixart"),
    ("sana", "sana"),
    ("hunyuan", "hydit"),
)  # fmt: skip
TYPES = [(*row, type) for row in ARCHITECTURES for type in ("F16", "Q8_0")]
TYPES += [(*row, type) for row in ARCHITECTURES[3:5] for type in ("BF16", "Q4_0")]


@pytest.mark.parametrize(("name", "architecture", "type"), TYPES)
@pytest.mark.sample(9)
def test_gguf(tmp_path: Path, name: str, architecture: str, type: str) -> None:
    """As converters write it: under the name of another architecture too. SD 3's table of positions is quantized by
    some, with its three dimensions."""
    case, path = IN_GGUF[name], tmp_path / "a.gguf"
    tensors = {key: value.numpy() for key, value in case.file(case.model()).items()}
    kinds = {key: type if key == "pos_embed" else fitting(value, type) for key, value in tensors.items()}
    write(path, {key: (value, kinds[key]) for key, value in tensors.items()}, architecture)
    worst = largest(opened(case.network, path)[1], expected(case.network, case.model().state_dict()))
    limit = 10 * Q8_0 if type == "Q4_0" else Q8_0
    print(f"{type}: at most {worst:.1e} (limit {limit})")
    assert worst <= limit


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        "flux-dev",
        "longcat",
        "ovis",
        "chroma",
        "ernie",
        "flux2",
        "flux3",
        "krea2",
        "anima",
        "auraflow",
        "lumina",
        "pixart",
        "sana",
        "hunyuan",
        "z-image",
        "qwen21, fused",
    ],
)
@pytest.mark.sample(5)
def test_comfyui_in_8_bits(tmp_path: Path, name: str, layout: str) -> None:
    """The parts of a fused tensor have its scale, and of scales for rows their own."""
    case, path, prefix = CASES[name], tmp_path / "a.safetensors", "model.diffusion_model."
    tensors = {prefix + key: value for key, value in case.file(case.model()).items()}
    written = comfy(tensors, layout, lambda name: any(part in name for part in case.network.coded))
    save_file(written.tensors, path, metadata=written.notes)
    decoded = {name.removeprefix(prefix): value for name, value in written.values.items() if name.startswith(prefix)}
    back = converted(case.network, decoded) if case.network.converter else by_number(case, decoded)
    same(opened(case.network, path)[1], expected(case.network, back))


def test_a_file_of_sd3_without_its_table(tmp_path: Path) -> None:
    model = CASES["sd3-medium"].model()
    config, values = opened(SD3, saved(tmp_path / "a.safetensors", tiny_sd3.transformer_file(model, table=False)))
    assert values.keys() == expected(SD3, model.state_dict()).keys() - {sd3_dit.TABLE}
    assert config.pos_embed_max_size == 384


# Faults


def linear1_rows(name: str, place: Place, orders: tuple[int, int, int, int], of: int) -> Place:
    """The places of q, k, v and the feed-forward among `of` parts of a fused layer."""
    if "linear1" not in place.key:
        return place
    part = ("to_q", "to_k", "to_v").index(name.split(".")[-2]) if name.split(".")[-2][:3] == "to_" else 3
    begin = orders[part]
    return place._replace(rows=Rows(begin, begin + (4 if part == 3 and begin == 0 else 1), of))


def streams(key: str) -> str:
    other = {"img_attn.qkv": "txt_attn.qkv", "txt_attn.qkv": "img_attn.qkv"}
    return re.sub("(img|txt)_attn.qkv", lambda match: other[match[0]], key)


def turned(place: Place, of: int) -> Place:
    """The parts of a fused tensor back to front."""
    begin = place.rows.begin
    return place._replace(rows=Rows(of - 1 - begin, of - begin, of)) if place.rows.of == of else place


Lookup = Callable[[str], Place]
FAULTS: dict[str, tuple[str, Callable[[Lookup, str], Place], bool]] = {
    "flux: linear1 split as three and one": (
        "flux-dev", lambda place, name: linear1_rows(name, place(name), (0, 1, 2, 3), 4), True,
    ),
    "flux: linear1 with the feed-forward first": (
        "flux-dev", lambda place, name: linear1_rows(name, place(name), (4, 5, 6, 0), 7), False,
    ),
    "flux: halves not swapped": ("flux-dev", lambda place, name: place(name)._replace(decode=None), False),
    "flux: keys for queries": (
        "flux-dev",
        lambda place, name: place(name.replace("to_q", "to_x").replace("to_k", "to_q").replace("to_x", "to_k")),
        False,
    ),
    "flux2: halves not swapped": ("flux2", lambda place, name: place(name)._replace(decode=None), False),
    "flux2: keys for queries": (
        "flux2",
        lambda place, name: place(name.replace("to_q.", "to_x.").replace("to_k.", "to_q.").replace("to_x.", "to_k.")),
        False,
    ),
    "flux2: streams exchanged": (
        "flux2", lambda place, name: place(name)._replace(key=streams(place(name).key)), False,
    ),
    "flux2: fused in single blocks too": (
        "flux2",
        lambda place, name: place(name)._replace(rows=Rows(0, 1, 3)) if "linear1" in place(name).key else place(name),
        True,
    ),
    "z-image: rows in another order": ("z-image", lambda place, name: turned(place(name), 3), False),
    "z-image: the same norm twice": ("z-image", lambda place, name: place(name.replace("norm_k", "norm_q")), True),
    "z-image: refiners exchanged": (
        "z-image",
        lambda place, name: place(
            name.replace("noise_refiner.0", "noise_refiner.9").replace("noise_refiner.1", "noise_refiner.0")
        ),
        True,
    ),
    "qwen21: halves exchanged": ("qwen21, fused", lambda place, name: turned(place(name), 2), False),
}  # fmt: skip
"""A case, the place of a tensor with the fault, and whether the file is refused; otherwise a tensor differs."""


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, wrong, is_refused = FAULTS[fault]
    case = CASES[name]
    path = saved(tmp_path / "a.safetensors", case.file(case.model()))
    monkeypatch.setattr(case.network.names, "place", partial(wrong, case.network.names.place))
    if is_refused:
        refused(opened, case.network, path)
        return
    _, arrays = opened(case.network, path)
    with pytest.raises(AssertionError):
        same(arrays, expected(case.network, case.model().state_dict()))


# Bad files

Change = Callable[[Tensors], Any]


def without(*names: str) -> Change:
    """Without the tensors whose names end so."""
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if key.endswith(names)]


def changed(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Change:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


def renamed(old: str, new: str) -> Change:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def each(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({key: change(value) for key, value in tensors.items() if part in key})


def nothing_else(tensors: Tensors) -> None:
    tensors.clear()
    tensors["x"] = torch.ones(2)


LINEAR1 = "single_blocks.1.linear1.weight"
QKV = "layers.1.attention.qkv.weight"
LN_Q = "joint_blocks.0.x_block.attn.ln_q.weight"
QUERY_NORM = "double_blocks.0.img_attn.norm.query_norm.scale"
BAD: dict[str, tuple[tuple[Change, str], ...]] = {
    "flux-dev": (
        (without(LINEAR1), f"lacks tensor '{LINEAR1}'"),
        (without("double_blocks.1.txt_mlp.2.bias"), "lacks tensor 'double_blocks.1.txt_mlp.2.bias'"),
        (without("img_in.weight"), "lacks tensor 'img_in.weight'"),
        (without("guidance_in.in_layer.weight"), "holds unknown tensor 'guidance_in.in_layer.bias'"),
        (changed("distilled_guidance_layer.x", 3), "holds unknown tensor 'distilled_guidance_layer.x'"),
        (changed("double_blocks.7.img_mlp.0.weight", 3), "lacks tensor"),
        (changed(LINEAR1, 671, 96), f"tensor '{LINEAR1}'"),
        (changed(LINEAR1, 0, 96), f"tensor '{LINEAR1}'"),
        (changed("img_in.weight", 96), "has not 2 dimensions in tensor 'img_in.weight'"),
        (changed("img_in.weight", 0, 64), "'num_attention_heads' is 0"),
        (changed(QUERY_NORM, 0), "'attention_head_dim' is 0"),
        (changed("final_layer.adaLN_modulation.1.bias", 191), "tensor 'final_layer.adaLN_modulation.1.bias'"),
        (changed("txt_in.bias", 96, dtype=torch.int64), "is I64, which is not read"),
    ),
    "flux2": (
        (without(LINEAR1), f"lacks tensor '{LINEAR1}'"),
        (without("double_blocks.1.txt_mlp.2.weight"), "lacks tensor 'double_blocks.1.txt_mlp.2.weight'"),
        (without("img_in.weight"), "lacks tensor 'img_in.weight'"),
        (changed("guidance_in.in_layer.weight", 96, 64), "lacks tensor"),
        (changed("img_in.bias", 96), "holds unknown tensor 'img_in.bias'"),
        (changed("double_blocks.7.img_mlp.0.weight", 3, 3), "lacks tensor"),
        (changed(LINEAR1, 863, 96), f"tensor '{LINEAR1}'"),
        (changed(LINEAR1, 0, 96), f"tensor '{LINEAR1}'"),
        (changed("img_in.weight", 96), "has not 2 dimensions in tensor 'img_in.weight'"),
        (changed("img_in.weight", 0, 32), "'num_attention_heads' is 0"),
        (changed(QUERY_NORM, 0), "'attention_head_dim' is 0"),
        (changed("final_layer.adaLN_modulation.1.weight", 191, 96), "tensor 'final_layer.adaLN_modulation.1.weight'"),
        (changed("txt_in.weight", 96, 192, dtype=torch.int64), "is I64, which is not read"),
    ),
    "z-image": (
        (changed(QKV, 289, 96), QKV),
        (changed(QKV, 96, 96), QKV),
        (changed(QKV, 0, 96), QKV),
        (without(QKV), f"lacks tensor '{QKV}'"),
        (changed("layers.1.attention.to_q.weight", 96, 96), "unknown tensor 'layers.1.attention.to_q.weight'"),
        (changed("layers.9.ffn_norm1.weight", 96), "layers.3"),  # a gap: layer 3 is asked for
        (changed("layers.0.attention.q_norm.weight", 31), "q_norm.weight' has shape [31]"),
        (changed("layers.0.attention.q_norm.weight", 0), "axes_dims [8, 12, 12] must be three numbers"),
        (changed("x_embedder.weight", 96, 64, 1, 1), "x_embedder.weight"),
        (changed("x_embedder.weight", 0, 64), "x_embedder.weight' has shape [0, 64]"),
        (changed("layers.0.attention_norm1.weight", 0), "'dim' is 0"),
        (without("cap_embedder.1.weight"), "cap_embedder.1.weight"),
        (changed("final_layer.linear.weight", 64, 96, dtype=torch.int64), "final_layer.linear.weight"),
        (changed("siglip_embedder.1.weight", 96, 64), "Z-Image-Omni or -Edit"),
        (renamed("layers.0.adaLN_modulation.0.weight", "layers.0.adaLN_modulation.1.weight"), "Lumina-Image 2.0"),
        (lambda tensors: tensors.pop("layers.0.adaLN_modulation.0.weight"), "no transformer of Z-Image"),
    ),
    "z-image, MLX_z-image's names": (
        (without("x_pad_token"), "lacks tensor 'x_pad_token'"),
        (without("final_layer.linear.bias"), "lacks tensor 'final_layer.linear.bias'"),
        (changed("layers.1.attention.to_q.weight", 96, 95), "layers.1.attention.to_q.weight' has shape [96, 95]"),
        (changed("layers.1.attention.to_out.0.weight", 96, 96), "unknown tensor 'layers.1.attention.to_out.0.weight'"),
        (changed("layers.1.attention.to_q.weight", 96, 12, dtype=torch.uint32), "holds codes (U32) without scales"),
        (changed("layers.0.attention_norm1.weight", 96, 1), "layers.0.attention_norm1.weight"),
        (changed("layers.0.adaLN_modulation.0.weight", 384, 96), "lacks tensor 'cap_embedder.0.weight'"),
        (renamed("t_embedder.linear1.weight", "t_embedder.mlp.layers.0.weight"), "or MLX_z-image's"),
    ),
    "sd3-medium": (
        (without("final_layer.linear.weight"), "lacks tensor 'final_layer.linear.weight'"),
        (without("joint_blocks.1.x_block.mlp.fc2.bias"), "lacks tensor 'joint_blocks.1.x_block.mlp.fc2.bias'"),
        (changed("pos_embed", 1, 360, 128), "pos_embed"),
        (changed("x_embedder.proj.weight", 0, 16, 2, 2), "'num_attention_heads' is 0"),
        (changed(LN_Q, 63), "attention_head_dim"),
        (changed(LN_Q, 0), "'attention_head_dim' is 0"),
        (changed(LN_Q), "has not 1 dimensions"),
        (changed("x_embedder.proj.weight", 128, 16, 3, 3), "x_embedder.proj.weight"),
        (
            changed("joint_blocks.2.context_block.attn.qkv.weight", 385, 128),
            "joint_blocks.2.context_block.attn.qkv.weight",
        ),
    ),
    "qwen21, fused": (
        (changed("x.y", 2), "holds unknown tensor 'x.y'"),
        (without("img_in.weight"), "img_in.weight"),
        (without("1.attn.to_q.weight"), "transformer_blocks.1.attn.to_q.weight"),
        (each("0.img_mlp.gate_up", lambda value: value[:-1]), "gate_up.weight"),
        (each("proj_out.weight", lambda value: value[:, :-1]), "proj_out.weight"),
        (each("norm_q", lambda value: value[None]), "norm_q.weight"),
        (nothing_else, "holds no transformer of Qwen-Image-2.1"),
    ),
}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [pytest.param(name, *row, id=f"{name}: {row[1]}") for name, some in BAD.items() for row in some],
)
@pytest.mark.sample(27)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str, change: Change, message: str) -> None:
    case = CASES[name]
    tensors = case.file(case.model())
    change(tensors)
    text = refused(opened, case.network, saved(tmp_path / "bad.safetensors", tensors))
    assert message in text and "bad.safetensors" in text


@pytest.mark.parametrize(("name", "title"), [("flux-dev", "Flux.1"), ("flux2", "FLUX.2")])
def test_other_files(tmp_path: Path, name: str, title: str) -> None:
    network, gguf = CASES[name].network, tmp_path / "other.gguf"
    path = saved(tmp_path / "other.safetensors", {"x": torch.ones(2)})
    assert f"holds no transformer of {title}" in refused(opened, network, path)
    write(gguf, {"x": (np.ones((2, 2), np.float32), "F32")}, "sd3")
    assert "is a GGUF file of 'sd3'" in refused(opened, network, gguf)


def test_a_gguf_file_of_another_architecture(tmp_path: Path) -> None:
    case, path = CASES["z-image"], tmp_path / "z.gguf"
    write(path, {key: (value.numpy(), "F32") for key, value in case.file(case.model()).items()}, "flux")
    assert "'flux'" in refused(opened, case.network, path)


@pytest.mark.parametrize(
    ("name", "like", "message"),
    [
        ("flux-dev", FluxConfig(), "axes_dims_rope [16, 56, 56] must be three numbers"),
        ("z-image", ZImageConfig(), "axes_dims [32, 48, 48] must be three numbers"),
    ],
)
def test_the_axes_are_those_of_the_model(tmp_path: Path, name: str, like: Any, message: str) -> None:
    case = CASES[name]
    path = saved(tmp_path / "a.safetensors", case.file(case.model()))
    assert message in refused(opened, case.network, path, like)
    if name == "z-image":
        axes = (1536, 64, 64)
        assert opened(case.network, path, replace(case.network.like, axes_lens=axes))[0].axes_lens == axes
