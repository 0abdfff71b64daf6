"""A Qwen-Image folder in diffusers layout: its configurations and load plans, all checked before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from qwenimg.common.base.config import parse, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.base.text import clean
from qwenimg.common.networks import qwen_dit, qwen_vae, qwen_vl
from qwenimg.common.networks.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.qwen_vae import QwenVAEConfig
from qwenimg.common.networks.qwen_vl import QwenVLConfig
from qwenimg.common.prompts import qwen
from qwenimg.common.prompts.qwen import QwenTokenizer
from qwenimg.common.weights import plan as checkpoint
from qwenimg.common.weights.plan import LoadPlan

if TYPE_CHECKING:
    from qwenimg.common.sampling.flow_match import FlowMatchConfig

PIPELINE = "QwenImagePipeline"
SCHEDULER = "FlowMatchEulerDiscreteScheduler"
_OTHERS = (
    ("QwenImage21", "is a Qwen-Image-2.1 model, another architecture, which this version does not support"),
    ("QwenImageLayered", "is a Qwen-Image-Layered model, which makes layers of an image: not supported yet"),
    ("QwenImageEdit", "is a Qwen-Image-Edit model, which edits images: this version makes images from text only"),
    ("StableDiffusion", "is a Stable Diffusion model: not supported yet"),
)
_SCHEDULER_IGNORED = frozenset({"steps_offset", "max_sigma"})

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class Model:
    """An opened folder. The plans hold their files open until `close`."""

    folder: Path
    transformer_config: QwenDiTConfig
    text_config: QwenVLConfig
    vae_config: QwenVAEConfig
    transformer: LoadPlan
    text: LoadPlan
    vae: LoadPlan

    @cached_property
    def tokenizer(self) -> QwenTokenizer:
        """Read and checked once. Raises ModelError."""
        found = qwen.load(self.folder / "tokenizer")
        found.check_vocabulary(self.text_config.vocab_size)
        return found

    def schedule_config(self) -> FlowMatchConfig:
        """Of scheduler/scheduler_config.json. Raises ModelError."""
        from qwenimg.common.sampling.flow_match import FlowMatchConfig

        path = self.folder / "scheduler" / "scheduler_config.json"
        return _config(FlowMatchConfig, path, SCHEDULER, _SCHEDULER_IGNORED)

    @property
    def parameters(self) -> int:
        """Number of values that the forwards use."""
        return sum(plan.parameters for plan in (self.transformer, self.text, self.vae))

    def close(self) -> None:
        for plan in (self.transformer, self.text, self.vae):
            plan.close()


def open_model(folder: Path) -> Model:
    """Reads every configuration and header of `folder` and holds them against the manifests. Raises ModelError."""
    check_class(folder)
    dit_config = _config(
        QwenDiTConfig, folder / "transformer" / "config.json", qwen_dit.CLASS_NAME, qwen_dit.IGNORED_CONFIG
    )
    vae_config = _config(QwenVAEConfig, folder / "vae" / "config.json", qwen_vae.CLASS_NAME, qwen_vae.IGNORED_CONFIG)
    text_config = read_text_config(folder / "text_encoder" / "config.json")
    _check_fit(folder, dit_config, text_config, vae_config)
    stored = qwen_vae.manifest(vae_config)
    plan, text_folder = checkpoint.plan, folder / "text_encoder"
    with checkpoint.closed_on_failure() as keep:
        return Model(
            folder=folder,
            transformer_config=dit_config,
            text_config=text_config,
            vae_config=vae_config,
            transformer=keep(plan(folder / "transformer", "transformer", qwen_dit.manifest(dit_config))),
            text=keep(plan(text_folder, "text_encoder", qwen_vl.manifest(text_config), rename=qwen_vl.rename)),
            vae=keep(plan(folder / "vae", "vae", stored, wanted=qwen_vae.still(stored))),
        )


def check_class(folder: Path) -> None:
    """Raises ModelError unless model_index.json is that of a pipeline that makes images from text with Qwen-Image."""
    index = folder / "model_index.json"
    if not is_file(index):
        raise ModelError(
            f"{clean(folder)}: no model_index.json here; expected a folder in diffusers layout (transformer/ or unet/, "
            f"text_encoder/, vae/, tokenizer/, scheduler/), or a Stable Diffusion file"
        )
    name = str(read_json(index).get("_class_name"))
    if name == PIPELINE:
        return
    for start, reason in _OTHERS:
        if name.startswith(start):
            raise ModelError(f"{clean(folder)}: {reason}")
    raise ModelError(f"{clean(index)}: pipeline {clean(name)!r} is not supported; expected {PIPELINE!r}")


def _config(cls: type[Config], path: Path, class_name: str, ignored: frozenset[str]) -> Config:
    data = read_json(path)
    name = data.get("_class_name", class_name)
    if str(name).startswith("QwenImage21"):
        raise ModelError(f"{clean(path)}: {_OTHERS[0][1]}")
    if name != class_name:
        raise ModelError(f"{clean(path)}: is of class {clean(name, 60)!r}; this version knows {class_name!r}")
    return parse(cls, data, source=path, ignored=ignored)


def read_text_config(path: Path) -> QwenVLConfig:
    """The configuration of the text encoder in the file `path`. Raises ModelError."""
    try:
        fields = qwen_vl.language_fields(read_json(path))
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{clean(path)}: {error}") from None
    return parse(QwenVLConfig, fields, source=path)


def _check_fit(folder: Path, dit: QwenDiTConfig, text: QwenVLConfig, vae: QwenVAEConfig) -> None:
    """Raises ModelError where the components of a folder do not belong together."""
    if dit.joint_attention_dim != text.hidden_size:
        raise ModelError(
            f"{clean(folder)}: the transformer wants text states of {dit.joint_attention_dim} channels, "
            f"the text encoder makes {text.hidden_size}"
        )
    if dit.in_channels != vae.z_dim * dit.patch_size**2 or dit.out_features != dit.in_channels:
        raise ModelError(
            f"{clean(folder)}: the transformer takes {dit.in_channels} and makes {dit.out_features} channels, "
            f"the VAE's latents have {vae.z_dim} in patches of {dit.patch_size} x {dit.patch_size}"
        )
