"""Files beside the weights that a folder in diffusers layout has and a model in one file lacks."""

from __future__ import annotations

from qwenimg.common.families.stable_diffusion import single_file
from qwenimg.common.families.stable_diffusion.checkpoint import facts
from qwenimg.common.formats.headers import peek
from qwenimg.common.parts.small_files import padded_tokenizers
from qwenimg.common.runtime.checkpoint import Checkpoint


def small_files(checkpoint: Checkpoint) -> dict[str, dict[str, object]]:
    """Return JSON by its path, for the model in the file `checkpoint.source`; of tokenizers all but the vocabulary."""
    header = peek(checkpoint.source)
    predicts = {name: key for key, name in single_file.PREDICTIONS.items()}[checkpoint.scheduler.prediction_type]
    detected = single_file.detect(header, predicts)
    scheduler = single_file.scheduler_fields(detected)
    return {
        "model_index.json": _index(checkpoint, str(scheduler["_class_name"])),
        "scheduler/scheduler_config.json": scheduler,
        **padded_tokenizers(checkpoint, {name: detected.pads[name] for name in checkpoint.tokenizers}),
    }


def _index(checkpoint: Checkpoint, scheduler: str) -> dict[str, object]:
    model = facts(checkpoint)
    inpaint = "Inpaint" if model.sees_mask else "Img2Img" if model.refiner else ""
    parts: dict[str, object] = {
        "_class_name": f"StableDiffusion{'XL' if model.sdxl else ''}{inpaint}Pipeline",
        "scheduler": ["diffusers", scheduler],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    for part in ("", "_2") if model.sdxl else ("",):
        text = checkpoint.components.get(f"text_encoder{part}")
        kind = "CLIPTextModelWithProjection" if text and text.config.projection_dim else "CLIPTextModel"
        parts[f"text_encoder{part}"] = ["transformers", kind] if text else [None, None]
        parts[f"tokenizer{part}"] = ["transformers", "CLIPTokenizer"] if text else [None, None]
    if not model.sdxl:
        return parts | {"safety_checker": [None, None], "feature_extractor": [None, None]}
    return parts | {
        "force_zeros_for_empty_prompt": checkpoint.zeros_for_empty,
        **({"requires_aesthetics_score": True} if model.refiner else {}),
    }
