"""The two files that every Qwen-Image folder in diffusers layout has alike, for those that the project writes."""

from __future__ import annotations

from qwenimg.common.networks import qwen_dit, qwen_vae

# Qwen-Image's own
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
# The built-in model's: flat shapes in a small picture show through much more noise than a photograph does, so what is
# where, and of which shape, is settled at levels above 0.85, of which Qwen-Image's own shift has few.
SHAPES_SCHEDULER: dict[str, object] = SCHEDULER | {"base_shift": 2.2, "max_shift": 2.6}
INDEX: dict[str, object] = {
    "_class_name": "QwenImagePipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", qwen_dit.CLASS_NAME],
    "vae": ["diffusers", qwen_vae.CLASS_NAME],
}
