"""Files that are the same in every Qwen-Image folder in diffusers layout, beside weights and tokenizer."""

from __future__ import annotations

from qwenimg.common.families.qwen_image.variants import VARIANTS
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.runtime.checkpoint import Checkpoint

SCHEDULER: dict[str, object] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
INDEX: dict[str, object] = {
    "_class_name": "QwenImagePipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", qwen_dit.CLASS_NAME],
    "vae": ["diffusers", qwen_vae.CLASS_NAME],
}


def small_files(checkpoint: Checkpoint) -> dict[str, object]:
    """Return JSON by its path, for the folder `checkpoint.source`, which lacks these files."""
    index = INDEX | {"_class_name": VARIANTS[checkpoint.variant].pipeline}
    return {"model_index.json": index, "scheduler/scheduler_config.json": SCHEDULER}
