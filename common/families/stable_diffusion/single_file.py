"""A Stable Diffusion checkpoint in one file: its type by its header, with the reasons, and its load plans.

No shape shows what a model was trained to predict: see `prediction`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import bad, closed_on_error
from qwenimg.common.families.description import TYPE
from qwenimg.common.families.load_options import Prediction
from qwenimg.common.families.stable_diffusion import prediction as predictions
from qwenimg.common.families.stable_diffusion.kinds import KINDS, unet_config
from qwenimg.common.formats import gguf
from qwenimg.common.formats.headers import open_header
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.networks.denoisers import unet, unet_names
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.encoders.clip_names import USED_H
from qwenimg.common.networks.layout import Layouts, Naming
from qwenimg.common.networks.vaes import kl_vae_names
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.parts.open_file import check_known, open_named
from qwenimg.common.parts.texts.clip_files import Text
from qwenimg.common.parts.vae_files import latent_channels
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import check_architecture
from qwenimg.common.weights.part_names import DENOISERS, VAES

# Tensors that a file may have beside the models: whole names, and prefixes that end in a dot.
_IGNORED = frozenset(
    {
        # the noise schedule, which follows from the type of the model
        "alphas_cumprod", "alphas_cumprod_prev", "betas", "log_one_minus_alphas_cumprod", "logvar",
        "posterior_log_variance_clipped", "posterior_mean_coef1", "posterior_mean_coef2", "posterior_variance",
        "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod",
        "sqrt_recipm1_alphas_cumprod", "scale_factor", "denoiser.sigmas", "global_step",
        # markers: see `prediction`
        "v_pred", "ztsnr",
    }
)  # fmt: skip
_IGNORED_TEXT = frozenset(  # after the prefix of a text encoder: buffers, and tensors for CLIP's images
    {
        "logit_scale",
        "model.logit_scale",
        "model.attn_mask",
        "model.text_projection",  # of OpenCLIP-H
        "text_projection",  # beside a ViT-L, whose projection no pipeline uses
        "transformer.text_projection.weight",
        "transformer.text_model.text_projection",
        "transformer.text_model.embeddings.position_ids",
        "transformer.embeddings.position_ids",
    }
)
_IGNORED_PREFIXES = (
    "model_ema.",  # averaged weights, a second copy of the UNet under names without dots
    "first_stage_model.loss.",  # the VAE's discriminator and perceptual loss, for training
    "first_stage_model.model_ema.",
    "loss.",
    "embedding_manager.",  # of textual inversion during training
)
_OTHERS = (*DENOISERS[:-1], "text_encoders.")  # of whole models of other families, with such a VAE
LATENTS = 4  # channels; a VAE of another number is another family's
_ARCHITECTURES = unet.NETWORK.architectures  # of a GGUF file
_EDM = {"edm_mean": "Playground model", "edm_vpred.sigma_max": "CosXL model"}
_PART = "a part of another model goes beside -m, with --transformer or --text-encoder"
PREDICTION = "prediction: "  # the start of the line about it
PREDICTIONS: Mapping[Prediction, str] = {"eps": "epsilon", "v": "v_prediction", "x0": "sample"}
_TEXT_LAYER = re.compile(r"(?:model\.transformer\.resblocks|transformer\.text_model\.encoder\.layers)\.(\d{1,3})\.")
_CHANNELS = {4: "text to image", 9: "inpainting: latents, mask and masked picture"}
_OTHER_CHANNELS = {5: "depth to image", 7: "the 4x upscaler", 8: "InstructPix2Pix"}


@dataclass(frozen=True, kw_only=True)
class Detected:
    """The type of a file by its header. `kind` is a key of KINDS, or None for a VAE alone; an absent part has no
    prefix."""

    kind: str | None
    prediction: Prediction = "eps"
    stated: bool = False  # the file, one beside it or the user states the prediction
    zero_snr: bool = False  # the schedule ends at a signal of exactly zero
    unet: str | None = None
    vae: str | None = None
    texts: tuple[Text, ...] = ()
    lacks: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()  # a line for each fact, with its reason
    warnings: tuple[str, ...] = ()  # of what is stated of the prediction

    @property
    def pads(self) -> dict[str, str]:
        """The padding token for each text encoder of its type, also for one that it lacks."""
        return {text.component: text.pad for text in KINDS[self.kind].texts} if self.kind else {}


@dataclass(frozen=True, kw_only=True, eq=False)
class SingleFile:
    """An opened file: the components that it has.

    A VAE alone does not show the scale of its latents: replace its `scaling_factor` by the one of the model that it is
    used with."""

    path: Path
    detected: Detected
    components: Mapping[str, Component]
    ignored: int  # known tensors that are not used

    @property
    def unet(self) -> UNetConfig | None:
        return self.components["unet"].config if "unet" in self.components else None

    @property
    def texts(self) -> dict[str, CLIPConfig]:
        return {name: part.config for name, part in self.components.items() if part.role == "text"}

    def close(self) -> None:
        """Close the file; nothing can be read after that."""
        for part in self.components.values():
            part.plan.close()


# Detection


def is_single_file(tensors: Mapping[str, Stored]) -> bool:
    """Return whether a file with these tensors has a UNet or a VAE with ldm names."""
    return prefixes(tensors) != (None, None)


def reads(header: Header) -> bool:
    """Return whether a file with this header is such a checkpoint. A GGUF file may name another architecture."""
    return gguf.may_be(header, _ARCHITECTURES) and is_single_file(header.tensors)


def detect(header: Header, prediction: Prediction | None = None) -> Detected:
    """Return the type of a file from its header; `prediction` overrides the detected one. Raises ModelError."""
    tensors, path = header.tensors, header.file.path
    check_architecture(header, _ARCHITECTURES, "Stable Diffusion model", _PART)
    unet, vae = prefixes(tensors)
    if edm := next((f"{title} ({sign})" for sign, title in _EDM.items() if sign in tensors), None):
        raise bad(
            path, f"is a {edm}, with levels of noise of its own: not supported; use Stable Diffusion 1.x, 2.x or XL"
        )
    if unet is None and vae is None:
        raise bad(path, "is no Stable Diffusion checkpoint in one file: give the folder of the model")
    kind, reason = _kind(tensors, unet)
    if kind is None:
        return Detected(
            kind=None,
            vae=vae,
            lacks=("unet", "text encoder"),
            reasons=(f"{TYPE}a VAE alone ({vae}decoder.*); use it beside a model",),
        )
    channels = 4
    if unet is not None:
        channels = tensors[unet + unet_names.SIGN].shape[1] if len(tensors[unet + unet_names.SIGN].shape) == 4 else 0
    if channels not in _CHANNELS:
        purpose = _OTHER_CHANNELS.get(channels, "of an unknown kind")
        raise bad(path, f"is {KINDS[kind].title} with {channels} input channels ({purpose}): not supported")
    decided = predictions.decide(header, prediction, *_usual(kind, channels))
    wanted = {text.component: text.within(tensors) for text in KINDS[kind].texts} | {"vae": vae, "unet": unet}
    texts = tuple(text for text in wanted.values() if isinstance(text, Text))
    lacks = [component for component, part in wanted.items() if part is None]
    return Detected(
        kind=kind,
        prediction=decided.prediction,
        stated=decided.stated,
        zero_snr=bool(decided.zero_snr),
        unet=unet,
        vae=vae,
        texts=texts,
        lacks=tuple(lacks),
        reasons=(
            f"{TYPE}{KINDS[kind].title}{' for inpainting' if channels != LATENTS else ''} ({reason})",
            *([f"input: {channels} channels ({_CHANNELS[channels]})"] if unet is not None else []),
            f"{PREDICTION}{decided.prediction} ({decided.reason})",
            *([f"schedule: zero terminal SNR ({decided.zero_snr})"] if decided.zero_snr else []),
            *([f"lacks: {', '.join(lacks)}; add them by --unet, --vae and --text-encoder"] if lacks else []),
        ),
        warnings=decided.warnings,
    )


def prefixes(tensors: Mapping[str, Stored]) -> tuple[str | None, str | None]:
    """Return the prefixes of the UNet's and the VAE's names; None for an absent part. A VAE of other latents than a
    UNet here has, or beside a denoiser that is none, is another family's."""
    naming = unet_names.LAYOUTS.find_placed(tensors)
    unet = naming.prefix if naming else None
    alone = unet is None and latent_channels(tensors) == LATENTS
    inside = ("", *VAES) if alone else VAES
    vae = next((prefix for prefix in inside if prefix + kl_vae_names.SIGN in tensors), None)
    if unet is None and vae:
        first = tensors.get(f"{vae}decoder.conv_in.weight")
        is_own = first is not None and first.shape[1:2] == (LATENTS,)
        vae = vae if is_own and not any(name.startswith(_OTHERS) for name in tensors) else None
    return unet, vae


def _kind(tensors: Mapping[str, Stored], prefix: str | None) -> tuple[str | None, str]:
    """Return the type and the reason: its text encoders, or the layers of a UNet alone; a VAE alone has no type."""
    for kind, sign in (
        ("sdxl", "conditioner.embedders.1."),
        ("sdxl", "cond_stage_model.1."),
        ("sdxl-refiner", "conditioner.embedders.0.model."),
        ("sd2", "cond_stage_model.model."),
        ("sd2", f"cond_stage_model.transformer.text_model.encoder.layers.{USED_H - 1}."),
        ("sd1", "cond_stage_model.transformer."),
    ):
        if any(key.startswith(sign) for key in tensors):
            return kind, f"text encoder {sign}*"
    if prefix is None:
        return None, ""
    projection = tensors.get(f"{prefix}middle_block.1.proj_in.weight")
    keys = tensors.get(f"{prefix}middle_block.1.transformer_blocks.0.attn2.to_k.weight")
    width = keys.shape[-1] if keys and keys.shape else 0
    if f"{prefix}label_emb.0.0.weight" in tensors:
        return ("sdxl-refiner" if width == 1280 else "sdxl"), f"size embedding label_emb, text width {width}"
    if projection and len(projection.shape) == 2:
        return "sd2", f"linear projections in the attentions, text width {width}"
    return "sd1", f"1x1 convolutions in the attentions, text width {width}"


def _usual(kind: str, channels: int) -> tuple[Prediction, str]:
    """Return what the UNet of a type usually predicts, and the reason."""
    if kind == "sd2" and channels == 4:
        return "v", "not stored; SD 2.x for 768 pixels is v, for 512 pixels (base) give --prediction eps"
    return "eps", f"not stored; {'SD 2.x for inpainting' if kind == 'sd2' else KINDS[kind].title} is eps"


# Opening


def open_file(path: Path, prediction: Prediction | None = None, *, for_rewrite: bool = False) -> SingleFile:
    """Check every tensor of `path` and plan its components. Raises ModelError: a tensor that is missing, unknown, of
    another shape or in a dtype that is not read."""
    header = open_header(path)
    with closed_on_error(header.file):
        return _opened(header, detect(header, prediction), for_rewrite)


def scheduler_fields(detected: Detected) -> dict[str, object]:
    """Return the content of `scheduler/scheduler_config.json` in the published folder of this type."""
    common: dict[str, object] = {
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "num_train_timesteps": 1000,
        "prediction_type": PREDICTIONS[detected.prediction],
        "steps_offset": 1,
    }
    if detected.zero_snr:  # as its authors sample it: the last timestep must be among the steps
        common |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    if detected.kind in ("sdxl", "sdxl-refiner"):
        spacing = {} if detected.zero_snr else {"timestep_spacing": "leading"}
        return {"_class_name": "EulerDiscreteScheduler", "interpolation_type": "linear", **common, **spacing}
    if detected.kind == "sd2" or detected.zero_snr:
        return {"_class_name": "DDIMScheduler", "clip_sample": False, "set_alpha_to_one": False, **common}
    return {"_class_name": "PNDMScheduler", "set_alpha_to_one": False, "skip_prk_steps": True, **common}


def _opened(header: Header, detected: Detected, for_rewrite: bool) -> SingleFile:
    path, components = header.file.path, dict[str, Component]()
    kind = KINDS[detected.kind or "sd1"]
    title = kind.title if detected.kind else "a VAE"
    ignored = (*_IGNORED, *_IGNORED_PREFIXES)

    def opened(name: str, prefix: str, layouts: Layouts, like: Any) -> None:
        layouts = replace(layouts, title=title, ignored=ignored)
        naming = Naming(layouts.rows[0], prefix)
        components[name] = open_named(header, layouts, naming, like, name, for_rewrite=for_rewrite)

    if detected.unet is not None and detected.kind is not None:
        config = partial(unet_config, kind=detected.kind, prediction=detected.prediction)
        opened("unet", detected.unet, replace(unet_names.LAYOUTS, config=config), None)
    if detected.vae is not None:
        like = KLVAEConfig(scaling_factor=kind.scaling_factor, sample_size=kind.sample_size * 8)
        opened("vae", detected.vae, kl_vae_names.LAYOUTS, like)
    for text in detected.texts:
        components[text.component] = text.open(header, for_rewrite=for_rewrite)
    used = {key for part in components.values() for key in part.plan.known}
    check_known(path, [key for key in header.tensors if key not in used and not _is_ignored(key)], title)
    return SingleFile(path=path, detected=detected, components=components, ignored=len(header.tensors) - len(used))


def _is_ignored(key: str) -> bool:
    if key in _IGNORED or key.startswith(_IGNORED_PREFIXES):
        return True
    for owner in ("cond_stage_model.1.", "cond_stage_model.", "conditioner.embedders.0.", "conditioner.embedders.1."):
        if key.startswith(owner):
            rest = key.removeprefix(owner)
            layer = _TEXT_LAYER.match(rest)
            cut = owner == "cond_stage_model." and layer and int(layer[1]) >= USED_H
            return bool(cut) or rest in _IGNORED_TEXT
    return False
