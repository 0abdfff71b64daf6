"""A Stable Diffusion model, a folder in diffusers layout or one file: all checked before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad, is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.load_options import LoadOptions, Prediction
from qwenimg.common.families.opening import found_tokenizers, lacks
from qwenimg.common.families.stable_diffusion import prediction as predictions
from qwenimg.common.families.stable_diffusion import single_file
from qwenimg.common.families.stable_diffusion.absent_parts import absent_of_file, may_be_given, stand_ins
from qwenimg.common.families.stable_diffusion.kinds import KINDS
from qwenimg.common.families.stable_diffusion.single_file import PREDICTION, PREDICTIONS, Detected, SingleFile
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts.components import (
    given_twice,
    is_absent,
    on_paper,
    open_component,
    open_tokenizer,
    read_config,
)
from qwenimg.common.parts.texts.clip_files import open_text
from qwenimg.common.parts.texts.clip_tokenizer import find_clip_tokenizer
from qwenimg.common.parts.vae_files import open_vae
from qwenimg.common.prompts import clip as clip_tokenizer
from qwenimg.common.runtime.checkpoint import Checkpoint, Component, Reports, TokenizerFiles
from qwenimg.common.sampling.discrete import DiffusionConfig, parse_diffusion
from qwenimg.common.weights.plan import closed_on_failure

# pipeline class -> whether it is SDXL; the UNet shows the rest of its purpose.
PIPELINES = {
    "StableDiffusionPipeline": False,
    "StableDiffusionImg2ImgPipeline": False,
    "StableDiffusionInpaintPipeline": False,
    "StableDiffusionXLPipeline": True,
    "StableDiffusionXLImg2ImgPipeline": True,
    "StableDiffusionXLInpaintPipeline": True,
}
NETWORKS: Mapping[str, Network] = {
    "unet": unet.NETWORK,
    "vae": kl_vae.NETWORK,
    "text_encoder": clip.NETWORK,
    "text_encoder_2": clip.NETWORK,
}
FITS = (
    Fit(
        "the UNet wants text states of {} channels, the text encoders make {}",
        lambda configs: configs["unet"].cross_attention_dim,
        lambda configs: [sum(config.hidden_size for name, config in configs.items() if name.startswith("text"))],
    ),
    Fit(
        "the UNet makes {} channels, the VAE's latents have {}",
        lambda configs: configs["unet"].out_channels,
        lambda configs: [configs["vae"].latent_channels],
    ),
    Fit(
        "the UNet takes {} channels, the VAE's latents, alone or with a mask, have {}",
        lambda configs: configs["unet"].in_channels,
        lambda configs: [configs["vae"].latent_channels, 2 * configs["vae"].latent_channels + 1],
    ),
)
SIZES = {"base": 6, "refiner": 5}  # numbers beside the pooled text: sizes and crop; or sizes, crop and a score


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The properties of a model that its configurations show together."""

    sdxl: bool
    refiner: bool  # its UNet takes an aesthetic score in place of the target's size
    sees_mask: bool  # mask and masked picture go into the UNet beside the latents
    size_numbers: int  # that SDXL's UNet takes beside the pooled text
    native_size: int  # pixels a side that the model was trained on


def facts(checkpoint: Checkpoint) -> Facts:
    unet_config, vae_config = checkpoint["unet"].config, checkpoint["vae"].config
    last_text = list(checkpoint.texts.values())[-1].config
    pooled = last_text.projection_dim or 0
    numbers = ((unet_config.projection_class_embeddings_input_dim or 0) - pooled) // (
        unet_config.addition_time_embed_dim or 1
    )
    sdxl = unet_config.addition_embed_type == "text_time"
    return Facts(
        sdxl=sdxl,
        refiner=sdxl and numbers == SIZES["refiner"],
        sees_mask=unet_config.in_channels == 2 * vae_config.latent_channels + 1,
        size_numbers=numbers,
        native_size=(unet_config.sample_size or 64) * vae_config.scale,
    )


def open_checkpoint(path: Path, options: LoadOptions) -> Checkpoint:
    """Open the model in the folder or file `path`, with the parts that `options` has elsewhere. Raises ModelError and
    UsageError."""
    if is_file(path):
        return open_file(path, options)
    if options.tokenizer is not None:
        raise UsageError(f"--tokenizer is for a Stable Diffusion model in one file; {clean(path, 80)} has its own")
    return open_folder(path, options)


def open_folder(folder: Path, options: LoadOptions) -> Checkpoint:
    """Read every configuration and header of `folder` and of the parts that are elsewhere, and check them against the
    manifests. Raises ModelError and UsageError."""
    index = read_json(folder / "model_index.json")
    sdxl = PIPELINES[str(index.get("_class_name"))]
    texts = [""] if not sdxl else [part for part in ("", "_2") if _has(index, f"text_encoder{part}")]
    names = {"unet", "vae", *(f"text_encoder{part}" for part in texts)}
    networks = {name: network for name, network in NETWORKS.items() if name in names}
    present = [name for name in networks if is_file(folder / name / "config.json") or name not in may_be_given(options)]
    configs = {name: read_config(networks[name], folder / name) for name in present}
    kind = _kind(sdxl, texts, configs.get("unet"))
    text_configs = {name: config for name, config in configs.items() if name.startswith("text_encoder")}
    absent = [name for name in networks if name not in present]
    components = stand_ins(folder, kind, absent, configs.get("unet"), text_configs, options)
    scheduler = folder / "scheduler" / "scheduler_config.json"
    faults: dict[str, ModelError] = {}
    with closed_on_failure() as keep:
        for name in present:
            try:
                part = open_component(
                    networks[name], folder / name, configs[name], name, for_rewrite=options.for_rewrite
                )
            except ModelError as error:
                if name not in may_be_given(options):
                    raise
                part, faults[name] = on_paper(networks[name], configs[name], "float32"), error
            components[name] = part
            keep(part.plan)
        checkpoint = Checkpoint(
            source=folder,
            components={name: components[name] for name in networks},
            tokenizers={},
            scheduler=_scheduler(scheduler, options.prediction),
            zeros_for_empty=zeros_for_empty(index),
        )
        checkpoint = with_parts(checkpoint, options, sdxl=sdxl, faults=faults)
        tokenizers, reports = found_tokenizers(options, checkpoint.texts, lambda: _of_folder(checkpoint))
        return replace(checkpoint, tokenizers=tokenizers, reports=(*checkpoint.reports, *reports))


def _of_folder(checkpoint: Checkpoint) -> dict[str, TokenizerFiles]:
    """Return the tokenizers of a model in a folder. Raises ModelError."""
    folder = checkpoint.source
    return {
        name: open_tokenizer(folder / name.replace("text_encoder", "tokenizer"), clip_tokenizer.load, text.config)
        for name, text in checkpoint.texts.items()
    }


def zeros_for_empty(index: Mapping[str, object]) -> bool:
    """Return whether a model with this model_index.json has zeros for the states of an empty negative prompt."""
    sdxl = PIPELINES[str(index.get("_class_name"))]
    return sdxl and index.get("force_zeros_for_empty_prompt", True) is True


def _scheduler(path: Path, prediction: Prediction | None) -> DiffusionConfig:
    """Return the noise levels of a folder. Its word for the prediction may be any program's; the user's `prediction`
    counts before it. Raise ModelError."""
    data = read_json(path, infinities=True)
    if (stated := data.get("prediction_type")) is None and prediction is None:
        return parse_diffusion(data, path)
    known = prediction or (predictions.word(stated) if isinstance(stated, str) else None)
    if known is None:
        words = ", ".join(PREDICTIONS.values())
        raise bad(
            path, f"prediction_type is {clean(stated, 40)!r}, none of {words}: say it with --prediction eps, v or x0"
        )
    return parse_diffusion(data | {"prediction_type": PREDICTIONS[known]}, path)


def _reports(detected: Detected, *, given: bool) -> Reports:
    """Return the line about the prediction of a file, a notice if something states it, and the warnings. given: the
    user says it, and need not be told."""
    line = next(reason for reason in detected.reasons if reason.startswith(PREDICTION))
    about = [] if given else [("notice" if detected.stated else "stage", line)]
    return (*about, *(("warning", warning) for warning in detected.warnings))


def _kind(sdxl: bool, texts: list[str], config: UNetConfig | None) -> str:
    """Return the type of a folder, a key of KINDS."""
    if sdxl:
        return "sdxl" if "" in texts else "sdxl-refiner"
    return "sd2" if config is not None and config.cross_attention_dim == clip.OPEN_CLIP_H.hidden_size else "sd1"


def open_file(path: Path, options: LoadOptions) -> Checkpoint:
    """Open the model in the file `path` and the parts that are elsewhere, with the chosen tokenizer or one on this
    machine. Raises ModelError and UsageError."""
    opened = single_file.open_file(path, options.prediction, for_rewrite=options.for_rewrite)
    detected = opened.detected
    with ExitStack() as stack:
        stack.callback(opened.close)
        components = absent_of_file(opened, options) if detected.lacks else {}
        components |= opened.components
        names = ["unet", "vae", *(text.component for text in KINDS[detected.kind or "sd1"].texts)]
        checkpoint = Checkpoint(
            source=path,
            components={name: components[name] for name in names},
            tokenizers={},
            scheduler=parse_diffusion(single_file.scheduler_fields(detected), path),
            zeros_for_empty=detected.kind == "sdxl",
            reports=_reports(detected, given=options.prediction is not None),
        )
        checkpoint = with_parts(checkpoint, options, sdxl=detected.kind in ("sdxl", "sdxl-refiner"))
        stack.callback(checkpoint.close)
        tokenizers, reports = found_tokenizers(
            options, checkpoint.texts, lambda: _of_file(checkpoint, options, detected.pads)
        )
        stack.pop_all()
        return replace(checkpoint, tokenizers=tokenizers, reports=(*checkpoint.reports, *reports))


def _of_file(checkpoint: Checkpoint, options: LoadOptions, pads: Mapping[str, str]) -> dict[str, TokenizerFiles]:
    """Return the tokenizers of a model in one file. Raises ModelError."""
    size = max(text.config.vocab_size for text in checkpoint.texts.values())
    tokenizer = find_clip_tokenizer(checkpoint.source, size, options.tokenizer, options.refined_tokenizer)
    return {
        name: open_tokenizer(tokenizer, partial(clip_tokenizer.load, pad=pads[name]), text.config)
        for name, text in checkpoint.texts.items()
    }


def with_parts(
    checkpoint: Checkpoint, options: LoadOptions, *, sdxl: bool, faults: Mapping[str, ModelError] | None = None
) -> Checkpoint:
    """Return `checkpoint` with the parts that `options` has in other folders or files, checked to belong together.
    `faults` are the errors of parts that have stand-ins. Raises ModelError and UsageError, and closes `checkpoint`."""
    changed, places = checkpoint, dict[str, Path]()
    try:
        for option, path in options.parts.items():
            name, part = _opened(changed, option, path)
            changed = changed.with_part(name, part)
            if name in places:
                raise given_twice(name, places[name], path)
            places[name] = path
        if absent := [name for name, part in changed.components.items() if is_absent(part)]:
            raise (faults or {}).get(absent[0]) or lacks(changed.source, absent)
        _check_kind(changed, sdxl=sdxl)
        given = options.part("transformer")
        if given is None or options.prediction is not None or is_folder(given):
            return changed
        return _as_stated(changed, given)
    except BaseException:
        changed.close()
        raise


def _opened(checkpoint: Checkpoint, part: str, path: Path) -> tuple[str, Component]:
    """Open one of PARTS, and return its name in the model; a text encoder's name shows in its tensors."""
    if part == "vae":
        return part, open_vae(kl_vae_names.LAYOUTS, path, checkpoint[part].config)
    if part != "transformer":
        return open_text(checkpoint, path)
    if is_folder(path):
        return "unet", open_component(unet.NETWORK, path, read_config(unet.NETWORK, path), "unet")
    return "unet", _unet_file(checkpoint, path)


def _unet_file(checkpoint: Checkpoint, path: Path) -> Component:
    """Open a UNet with ldm names, alone or in a whole model, or with diffusers' names and the model's configuration.
    Its prediction is of the kind of the model's UNet."""
    opened = _ldm_file(path)
    if opened is None:
        return open_component(unet.NETWORK, path, checkpoint["unet"].config, "unet")
    if "unet" not in opened.components:
        opened.close()
        raise ModelError(f"{clean(path, 120)}: holds no UNet")
    return opened.components["unet"]


def _ldm_file(path: Path) -> SingleFile | None:
    """Open the file `path` if it has ldm names; else return None."""
    header = peek(path)
    return single_file.open_file(path) if single_file.is_single_file(header.tensors) else None


def _as_stated(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Return `checkpoint` with the prediction that the file of another UNet states, if it states one; else that of the
    model stays. Raise ModelError."""
    usual = {name: key for key, name in PREDICTIONS.items()}[checkpoint.scheduler.prediction_type]
    decided = predictions.decide(peek(path), None, usual, "the model's")
    reports: Reports = tuple(("warning", warning) for warning in decided.warnings)
    if not decided.stated:
        return replace(checkpoint, reports=checkpoint.reports + reports)
    snr = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} if decided.zero_snr else {}
    scheduler = replace(checkpoint.scheduler, prediction_type=PREDICTIONS[decided.prediction], **snr)
    line = f"{PREDICTION}{decided.prediction} ({decided.reason} of {clean(path.name, 60)})"
    others = tuple(one for one in checkpoint.reports if not one[1].startswith(PREDICTION))
    return replace(checkpoint, scheduler=scheduler, reports=(*others, ("notice", line), *reports))


def _check_kind(checkpoint: Checkpoint, *, sdxl: bool) -> None:
    """Check that a model has texts, and the UNet of an SDXL pipeline if `sdxl`. Raise ModelError."""
    shown = clean(checkpoint.source)
    if not checkpoint.texts:
        raise ModelError(f"{shown}: has no text encoder")
    model = facts(checkpoint)
    if sdxl != model.sdxl:
        raise ModelError(f"{shown}: is of an SDXL pipeline, or its UNet of SDXL, but not both")
    if sdxl and model.size_numbers not in SIZES.values():
        raise ModelError(f"{shown}: the UNet takes {model.size_numbers} numbers beside the text; expected 6 or 5")


def _has(index: dict[str, object], name: str) -> bool:
    entry = index.get(name)
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None
