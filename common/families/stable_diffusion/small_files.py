"""Files beside the weights that a folder in diffusers layout has and a model in one file lacks."""

from __future__ import annotations

from qwenimg.common.base.config import read_json
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.stable_diffusion import single_file
from qwenimg.common.families.stable_diffusion.checkpoint import facts
from qwenimg.common.formats.headers import peek
from qwenimg.common.runtime.checkpoint import Checkpoint

TOKENIZER = "tokenizer_config.json"


def small_files(checkpoint: Checkpoint) -> dict[str, object]:
    """Return JSON by its path, for the model in the file `checkpoint.source`; of tokenizers all but the vocabulary."""
    header = peek(checkpoint.source)
    predicts = {name: key for key, name in single_file.PREDICTIONS.items()}[checkpoint.scheduler.prediction_type]
    detected = single_file.detect(header, predicts)
    scheduler = single_file.scheduler_fields(detected)
    files: dict[str, object] = {
        "model_index.json": _index(checkpoint, str(scheduler["_class_name"])),
        "scheduler/scheduler_config.json": scheduler,
    }
    for name, tokenizer in checkpoint.tokenizers.items():
        path = tokenizer.path / TOKENIZER
        config = read_json(path) if is_file(path) else {"tokenizer_class": "CLIPTokenizer"}
        files[f"{name.replace('text_encoder', 'tokenizer')}/{TOKENIZER}"] = config | {"pad_token": detected.pads[name]}
    return files


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
