"""Files that are the same in every Qwen-Image-2.1 folder in diffusers layout, beside weights and tokenizer, but for the
noise levels of Turbo."""

from __future__ import annotations

from qwenimg.common.families.qwen_image_21.checkpoint import SAMPLE_SIGMAS
from qwenimg.common.networks.denoisers import qwen21_dit
from qwenimg.common.networks.vaes import qwen21_vae
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import flow_match

PIPELINE = "QwenImage21Pipeline"
TURBO = (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568)
"""The noise levels of Turbo, at every size; it was distilled for these alone."""


def scheduler(levels: tuple[float, ...]) -> dict[str, object]:
    """Return the scheduler's configuration of the model with noise `levels` of its own, or without any."""
    by_size = {"base_shift": 0.5, "max_shift": 0.9, "shift_terminal": 0.02}
    return {
        "_class_name": flow_match.CLASS_NAME,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "num_train_timesteps": 1000,
        "shift": 1.0,
        "time_shift_type": "exponential",
        "use_dynamic_shifting": not levels,
        **({} if levels else by_size),
    }


def small_files(checkpoint: Checkpoint) -> dict[str, object]:
    """Return JSON by its path, for a folder that lacks these files."""
    levels = checkpoint.scheduler.sample_sigmas
    return {"model_index.json": index(levels), "scheduler/scheduler_config.json": scheduler(levels)}


def index(levels: tuple[float, ...]) -> dict[str, object]:
    """Return the content of model_index.json."""
    return {
        "_class_name": PIPELINE,
        "processor": ["transformers", "Qwen3VLProcessor"],
        "scheduler": ["diffusers", flow_match.CLASS_NAME],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "transformer": ["diffusers", qwen21_dit.CLASS_NAME],
        "vae": ["diffusers", qwen21_vae.CLASS_NAME],
        SAMPLE_SIGMAS: list(levels) or None,
    }
