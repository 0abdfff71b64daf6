"""A Stable Diffusion model, a folder in diffusers layout or one file: all checked before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse, read_json
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families.stable_diffusion import single_file
from qwenimg.common.families.stable_diffusion.find_tokenizer import find_clip_tokenizer
from qwenimg.common.families.stable_diffusion.single_file import Prediction
from qwenimg.common.networks import clip, kl_vae, unet
from qwenimg.common.networks.clip import CLIPConfig
from qwenimg.common.networks.kl_vae import KLVAEConfig
from qwenimg.common.networks.unet import UNetConfig
from qwenimg.common.prompts import clip as clip_tokenizer
from qwenimg.common.prompts.clip import CLIPTokenizer
from qwenimg.common.sampling.discrete import DiffusionConfig, parse_diffusion
from qwenimg.common.weights import plan as checkpoint
from qwenimg.common.weights.plan import LoadPlan
from qwenimg.common.weights.safetensors import read_header

# pipeline class -> whether it is SDXL; what a class is made for beyond that shows in its UNet.
PIPELINES = {
    "StableDiffusionPipeline": False,
    "StableDiffusionImg2ImgPipeline": False,
    "StableDiffusionInpaintPipeline": False,
    "StableDiffusionXLPipeline": True,
    "StableDiffusionXLImg2ImgPipeline": True,
    "StableDiffusionXLInpaintPipeline": True,
}
PREDICTIONS: Mapping[Prediction, str] = {"eps": "epsilon", "v": "v_prediction"}
SIZES = {"base": 6, "refiner": 5}  # numbers beside the pooled text: sizes and crop; or sizes, crop and a score


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """One CLIP text encoder and where its tokenizer is."""

    config: CLIPConfig
    plan: LoadPlan
    tokenizer: Path
    pad: str | None = None  # the padding token where the tokenizer is another model's

    @cached_property
    def words(self) -> CLIPTokenizer:
        """Its tokenizer, read and checked once. Raises ModelError."""
        found = clip_tokenizer.load(self.tokenizer, self.pad)
        found.check_vocabulary(self.config.vocab_size)
        return found


@dataclass(frozen=True, kw_only=True)
class SDModel:
    """An opened model. The plans hold their files open until `close`."""

    source: Path
    sdxl: bool
    unet_config: UNetConfig
    vae_config: KLVAEConfig
    scheduler: DiffusionConfig
    unet: LoadPlan
    vae: LoadPlan
    texts: tuple[TextPart, ...]
    zeros_for_empty: bool = False  # an empty negative prompt is zeros and not encoded

    @property
    def sees_mask(self) -> bool:
        """Whether mask and masked picture go into the UNet beside the latents."""
        return self.unet_config.in_channels == 2 * self.vae_config.latent_channels + 1

    @property
    def refiner(self) -> bool:
        """Whether its UNet takes an aesthetic score in place of the target's size."""
        return self.sdxl and self.size_numbers == SIZES["refiner"]

    @property
    def size_numbers(self) -> int:
        """How many numbers SDXL's UNet takes beside the pooled text."""
        config = self.unet_config
        pooled = self.texts[-1].config.projection_dim or 0
        return ((config.projection_class_embeddings_input_dim or 0) - pooled) // (config.addition_time_embed_dim or 1)

    @property
    def native_size(self) -> int:
        """Pixels a side that the model was trained on."""
        return (self.unet_config.sample_size or 64) * self.vae_config.scale

    @property
    def parameters(self) -> int:
        """Number of values that the forwards use."""
        return sum(plan.parameters for plan in (self.unet, self.vae, *(text.plan for text in self.texts)))

    def close(self) -> None:
        for plan in (self.unet, self.vae, *(text.plan for text in self.texts)):
            plan.close()


def open_folder(folder: Path) -> SDModel:
    """Reads every configuration and header of `folder` and holds them against the manifests. Raises ModelError."""
    index = read_json(folder / "model_index.json")
    name = str(index.get("_class_name"))
    if name not in PIPELINES:
        raise ModelError(f"{clean(folder)}: pipeline {clean(name)!r} is not supported; expected {', '.join(PIPELINES)}")
    sdxl = PIPELINES[name]
    parts = [""] if not sdxl else [part for part in ("", "_2") if _has(index, f"text_encoder{part}")]
    unet_config = _config(UNetConfig, folder / "unet", unet.CLASS_NAME, unet.unet_fields, unet.IGNORED_CONFIG)
    vae_config = _config(KLVAEConfig, folder / "vae", kl_vae.CLASS_NAME, kl_vae.vae_fields, kl_vae.IGNORED_CONFIG)
    scheduler = folder / "scheduler" / "scheduler_config.json"
    stored = unet.manifest(unet_config)
    plan, vae_folder = checkpoint.plan, folder / "vae"
    with checkpoint.closed_on_failure() as keep:
        return check(
            SDModel(
                source=folder,
                sdxl=sdxl,
                unet_config=unet_config,
                vae_config=vae_config,
                scheduler=parse_diffusion(read_json(scheduler, infinities=True), scheduler),
                unet=keep(plan(folder / "unet", "unet", stored, wanted=unet.used(stored))),
                vae=keep(plan(vae_folder, "vae", kl_vae.manifest(vae_config), rename=kl_vae.rename)),
                texts=tuple(_text(folder, part, keep) for part in parts),
                zeros_for_empty=sdxl and index.get("force_zeros_for_empty_prompt", True) is True,
            )
        )


def open_file(
    path: Path, prediction: Prediction | None = None, tokenizer: Path | None = None, also: Path | None = None
) -> SDModel:
    """The model in the file `path`, with the `tokenizer` in that folder or the one that is found for it, maybe in the
    folder `also`. Raises ModelError."""
    opened = single_file.open_file(path, prediction)
    found = opened.found
    with ExitStack() as stack:
        stack.callback(opened.close)
        if opened.unet is None or opened.vae is None or found.lacks:
            lacking = ", ".join(found.lacks)
            raise ModelError(f"{clean(path, 120)}: lacks {lacking}: give a file or a folder that has the whole model")
        size = max(config.vocab_size for config in opened.texts.values())
        tokenizer = find_clip_tokenizer(path, size, tokenizer, also)
        model = check(
            SDModel(
                source=path,
                sdxl=found.kind in ("sdxl", "sdxl-refiner"),
                unet_config=opened.unet,
                vae_config=opened.vae,
                scheduler=parse_diffusion(single_file.scheduler_fields(found), path),
                unet=opened.plans["unet"],
                vae=opened.plans["vae"],
                texts=tuple(
                    TextPart(config=config, plan=opened.plans[name], tokenizer=tokenizer, pad=opened.pads[name])
                    for name, config in opened.texts.items()
                ),
                zeros_for_empty=found.kind == "sdxl",
            )
        )
        stack.pop_all()
        return model


def with_vae(model: SDModel, path: Path) -> SDModel:
    """`model` with the VAE in the folder or file `path`. Raises ModelError, and then `model` is closed."""
    with ExitStack() as stack:
        stack.callback(model.close)
        config, plan = _vae_folder(path) if is_folder(path) else _vae_file(model, path)
        stack.callback(plan.close)
        changed = check(replace(model, vae_config=config, vae=plan))
        if set(model.vae.files).isdisjoint(model.unet.files):  # not one file that the others are still read from
            model.vae.close()
        stack.pop_all()
        return changed


def _vae_folder(folder: Path) -> tuple[KLVAEConfig, LoadPlan]:
    config = _config(KLVAEConfig, folder, kl_vae.CLASS_NAME, kl_vae.vae_fields, kl_vae.IGNORED_CONFIG)
    return config, checkpoint.plan(folder, "vae", kl_vae.manifest(config), rename=kl_vae.rename)


def _vae_file(model: SDModel, path: Path) -> tuple[KLVAEConfig, LoadPlan]:
    """A VAE in ldm names, alone or in a whole model, or in diffusers names without its configuration: the widths are
    its own, the scale of the latents is the model's, which no file of this kind says."""
    header = read_header(path)
    header.file.close()
    if single_file.is_single_file(header.tensors):
        opened = single_file.open_file(path)
        if opened.vae is None:
            opened.close()
            raise ModelError(f"{clean(path, 120)}: holds no VAE")
        scales = {name: getattr(model.vae_config, name) for name in ("scaling_factor", "shift_factor")}
        return replace(opened.vae, **scales), opened.plans["vae"]
    return model.vae_config, checkpoint.plan(path, "vae", kl_vae.manifest(model.vae_config), rename=kl_vae.rename)


def with_prediction(model: SDModel, prediction: Prediction) -> SDModel:
    """`model` whose UNet is taken to predict noise or velocity."""
    return replace(model, scheduler=replace(model.scheduler, prediction_type=PREDICTIONS[prediction]))


def check(model: SDModel) -> SDModel:
    """`model`; raises ModelError where its components do not belong together."""
    shown, config = clean(model.source), model.unet_config
    widths = sum(text.config.hidden_size for text in model.texts)
    if not model.texts:
        raise ModelError(f"{shown}: has no text encoder")
    if widths != config.cross_attention_dim:
        raise ModelError(f"{shown}: the UNet wants text states of {config.cross_attention_dim} channels, not {widths}")
    z = model.vae_config.latent_channels
    if config.out_channels != z or config.in_channels not in (z, 2 * z + 1):
        raise ModelError(
            f"{shown}: the UNet takes {config.in_channels} and makes {config.out_channels} channels; the VAE has {z}: "
            f"{z}, or {2 * z + 1} for inpainting, and {z} are supported"
        )
    if model.sdxl != (config.addition_embed_type == "text_time"):
        raise ModelError(f"{shown}: is of an SDXL pipeline, or its UNet of SDXL, but not both")
    if model.sdxl and model.size_numbers not in SIZES.values():
        raise ModelError(f"{shown}: the UNet takes {model.size_numbers} numbers beside the text; expected 6 or 5")
    return model


def _text(folder: Path, part: str, keep: Callable[[LoadPlan], LoadPlan]) -> TextPart:
    path = folder / f"text_encoder{part}"
    try:
        config = parse(CLIPConfig, clip.text_fields(read_json(path / "config.json")), source=path / "config.json")
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{clean(path / 'config.json')}: {error}") from None
    plan = keep(checkpoint.plan(path, "text_encoder", clip.manifest(config), rename=clip.rename))
    return TextPart(config=config, plan=plan, tokenizer=folder / f"tokenizer{part}")


def _config(cls: Any, folder: Path, class_name: str, fields: Any, ignored: frozenset[str]) -> Any:
    path = folder / "config.json"
    data = read_json(path)
    name = data.get("_class_name", class_name)
    if name != class_name:
        raise ModelError(f"{clean(path)}: is of class {clean(name, 60)!r}; expected {class_name!r}")
    try:
        found = fields(data)
    except ModelError as error:
        raise ModelError(f"{clean(path)}: {error}") from None
    return parse(cls, found, source=path, ignored=ignored)


def _has(index: dict[str, object], name: str) -> bool:
    entry = index.get(name)
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None
