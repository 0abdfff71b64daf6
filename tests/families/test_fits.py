"""Parts that must fit each other: every published model's do, and each pair of a family's rows is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families import catalog, fits, registry
from qwenimg.common.families.family import Family

MODELS = {known.name: model for known in catalog.KNOWN.values() if (model := registry.published(known)) is not None}


@dataclass(frozen=True)
class Part:
    config: Any


class Wider:
    """A configuration with one number that is larger by one."""

    def __init__(self, config: Any, name: str) -> None:
        self._config, self._name = config, name

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return value + 1 if name == self._name else value


def refusal(family: Family, parts: Mapping[str, Any]) -> str | None:
    try:
        fits.check(Path("model"), parts, family.fits)
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_every_published_model_fit(name: str) -> None:
    assert refusal(MODELS[name].family, MODELS[name].checkpoint.components) is None


WIDTHS = {
    "z-image-turbo": "transformer.cap_feat_dim transformer.in_channels vae.latent_channels",
    "qwen-image": "transformer.joint_attention_dim text_encoder.hidden_size transformer.in_channels vae.z_dim",
    "qwen-image-2.1": "transformer.context_in_dim text_encoder.state_size transformer.in_channels vae.z_dim",
    "flux2-klein-4b": "transformer.joint_attention_dim text_encoder.state_size vae.patch_channels",
    "flux2-dev": "transformer.joint_attention_dim text_encoder.state_size vae.patch_channels",
    "flux3-klein": "transformer.joint_attention_dim text_encoder.state_size vae.patch_channels",
    "flux-dev": "text_encoder.hidden_size text_encoder_2.d_model transformer.out_features vae.latent_channels",
    "chroma1-hd": "transformer.joint_attention_dim text_encoder.d_model transformer.in_channels vae.latent_channels",
    "ernie-image": "transformer.text_in_dim text_encoder.state_size vae.patch_channels",
    "krea-2-raw": "text_encoder.state_size transformer.in_channels vae.z_dim",
    "auraflow": "transformer.joint_attention_dim text_encoder.d_model transformer.in_channels vae.latent_channels",
    "lumina-image-2": "transformer.cap_feat_dim text_encoder.state_size transformer.in_channels vae.latent_channels",
    "pixart-sigma": "transformer.caption_channels text_encoder.d_model transformer.in_channels vae.latent_channels",
    "sana-1.5": "transformer.caption_channels text_encoder.state_size transformer.in_channels vae.latent_channels",
    "hunyuan-dit": "transformer.cross_attention_dim text_encoder.hidden_size transformer.cross_attention_dim_t5 "
    "text_encoder_2.d_model transformer.in_channels vae.latent_channels",
    "stable-cascade": "transformer.clip_text_in_channels transformer.clip_text_pooled_in_channels "
    "decoder.clip_text_pooled_in_channels decoder.effnet_in_channels decoder.in_channels text_encoder.hidden_size "
    "vae.latent_channels",
    "anima": "text_conditioner.source_dim transformer.text_embed_dim transformer.in_channels vae.z_dim",
    "ovis-image": "transformer.joint_attention_dim text_encoder.state_size transformer.in_channels vae.latent_channels",
    "longcat-image": "transformer.joint_attention_dim text_encoder.hidden_size transformer.in_channels "
    "vae.latent_channels",
    "sd3-medium": "text_encoder_2.projection_dim text_encoder_3.hidden_size transformer.out_channels",
    "sd15": "unet.cross_attention_dim unet.in_channels vae.latent_channels",
    "sdxl": "text_encoder_2.hidden_size unet.out_channels",
}


@pytest.mark.parametrize(
    ("name", "changed"), [(name, path) for name, paths in WIDTHS.items() for path in paths.split()]
)
def test_a_part_of_another_width_is_refused(name: str, changed: str) -> None:
    model, (part, field) = MODELS[name], changed.split(".")
    parts = dict(model.checkpoint.components)
    number = getattr(parts[part].config, field)
    parts[part] = Part(Wider(parts[part].config, field))  # type: ignore[assignment]
    message = refusal(model.family, parts)
    print(message)
    assert message is not None and message.startswith("model: the ") and len(message) < 300
    assert str(number + 1) in message or "text_encoder" in part or part == "vae"


def test_every_family_has_such_rows() -> None:
    assert {model.family.name for model in MODELS.values() if model.family.fits} == {f.name for f in registry.FAMILIES}
    assert {MODELS[name].family.name for name in WIDTHS} == {family.name for family in registry.FAMILIES}
