"""Which family a model on disk belongs to, and the pipeline for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.base.text import clean
from qwenimg.common.families.catalog import Recipe
from qwenimg.common.families.qwen_image import checkpoint as qwen_model
from qwenimg.common.families.qwen_image.checkpoint import Model
from qwenimg.common.families.qwen_image.model import QwenImage
from qwenimg.common.families.stable_diffusion import checkpoint, find_tokenizer
from qwenimg.common.families.stable_diffusion.checkpoint import SDModel, TextPart
from qwenimg.common.families.stable_diffusion.model import StableDiffusion
from qwenimg.common.families.stable_diffusion.single_file import Prediction
from qwenimg.common.hub import resolve
from qwenimg.common.hub.resolve import Resolved
from qwenimg.common.pipeline.diffusion_model import Family
from qwenimg.common.pipeline.request import Defaults
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.runtime import Notify
from qwenimg.common.weights.fingerprint import fingerprint
from qwenimg.common.weights.plan import LoadPlan
from qwenimg.common.weights.precision import Family as Name
from qwenimg.common.weights.precision import Precision

QWEN_WIDTH = 3072
"""Of the published transformer. One that was made smaller by leaving out layers keeps it, a toy has less."""


def open_model(
    path: Path, *, prediction: Prediction | None = None, vae: Path | None = None, tokenizer: Path | None = None
) -> Model | SDModel:
    """Everything about the files at `path` checked, no weight read. Raises ModelError and UsageError.

    prediction: in place of what the files say; vae: the VAE in another folder or file; tokenizer: the folder of that
    for a single file, which has none."""
    index = path / "model_index.json"
    if is_file(path):
        opened = checkpoint.open_file(path, prediction, tokenizer)
        return opened if vae is None else checkpoint.with_vae(opened, vae)
    if tokenizer is not None:
        raise UsageError(f"--tokenizer is for a Stable Diffusion model in one file; {clean(path, 80)} has its own")
    if is_file(index) and read_json(index).get("_class_name") in checkpoint.PIPELINES:
        opened = checkpoint.open_folder(path)
        opened = opened if prediction is None else checkpoint.with_prediction(opened, prediction)
        return opened if vae is None else checkpoint.with_vae(opened, vae)
    for option, value in (("--prediction", prediction), ("--vae", vae)):
        if value is not None:
            raise UsageError(f"{option} is for Stable Diffusion; {clean(path, 80)} is another model")
    return qwen_model.open_model(path)


def check_class(folder: Path) -> None:
    """Raises ModelError unless model_index.json is that of a pipeline that is supported."""
    index = folder / "model_index.json"
    if not is_file(index) or read_json(index).get("_class_name") not in checkpoint.PIPELINES:
        qwen_model.check_class(folder)


def open_refiner(base: Model | SDModel, path: Path) -> SDModel:
    """The refiner at `path` for `base`, whose tokenizer serves where a file has none. Raises ModelError and
    UsageError."""
    if not isinstance(base, SDModel) or not base.sdxl or base.refiner or base.sees_mask:
        raise UsageError("--refiner is for SDXL base models only")
    opened = checkpoint.open_file(path, also=base.texts[-1].tokenizer) if path.is_file() else open_model(path)
    fits = isinstance(opened, SDModel) and opened.sdxl and not opened.sees_mask
    if isinstance(opened, SDModel) and fits and opened.vae_config.latent_channels == base.vae_config.latent_channels:
        return opened
    opened.close()
    raise ModelError(f"{clean(path, 120)}: is no SDXL refiner for latents like the base's")


def name(opened: Model | SDModel) -> Name:
    return "sd" if isinstance(opened, SDModel) else "qwen"


def check_tokenizers(opened: Model | SDModel) -> None:
    """Reads them, which a backend would otherwise do after its framework is imported. Raises ModelError."""
    for part in opened.texts if isinstance(opened, SDModel) else (opened,):
        _ = part.words if isinstance(part, TextPart) else part.tokenizer


def labels(
    resolved: Resolved,
    opened: Model | SDModel,
    *,
    vae: Path | None,
    prediction: Prediction | None,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """What a recipe says of the options that a model was opened with: names, never paths, and fingerprints."""
    found: dict[str, Any] = {} if prediction is None else {"prediction": prediction}
    prints = {"model": fingerprint(_denoiser(opened).files)} if resolved.from_path else {}
    if tokenizer is not None:
        found["tokenizer"] = find_tokenizer.label(tokenizer)
    if vae is not None:
        found["vae"] = resolve.from_path(str(vae), vae).name
        prints["vae"] = fingerprint(opened.vae.files)
    return found | {"fingerprints": prints} if prints else found


def with_refiner(options: Mapping[str, Any], resolved: Resolved, opened: SDModel) -> dict[str, Any]:
    """`options` as `labels` gives them, and the refiner."""
    prints = options.get("fingerprints", {})
    if resolved.from_path:
        prints = prints | {"refiner": fingerprint(_denoiser(opened).files)}
    return {**options, "refiner": resolved.name} | ({"fingerprints": prints} if prints else {})


def _denoiser(opened: Model | SDModel) -> LoadPlan:
    return opened.unet if isinstance(opened, SDModel) else opened.transformer


def family(
    engine: Engine, opened: Model | SDModel, precision: Precision, notify: Notify, refiner: SDModel | None = None
) -> Family:
    """The model on `engine`."""
    if isinstance(opened, SDModel):
        return StableDiffusion(engine, opened, precision, notify, refiner)
    return QwenImage(engine, opened, precision, notify)


def defaults(opened: Model | SDModel, recipe: Recipe | None) -> Defaults:
    """What holds where a call does not say: the recipe's values, or for a model without one those of diffusers."""
    if isinstance(opened, SDModel):
        size = opened.native_size
        found = Defaults(width=size, height=size, negative_prompt="", guidance=7.5, strength=0.8, mask_strength=1.0)
        if opened.sdxl:
            found = replace(found, guidance=5.0, strength=0.3, mask_strength=0.9999)
    else:
        found = Defaults(qwen_sizes=opened.transformer_config.dim == QWEN_WIDTH)
    if recipe is None:
        return found
    return replace(
        found,
        width=recipe.width,
        height=recipe.height,
        steps=recipe.steps,
        guidance=recipe.guidance,
        negative_prompt=recipe.negative_prompt,
    )
