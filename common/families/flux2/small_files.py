"""Files that are the same in every Flux.2 klein folder in diffusers layout, beside weights and tokenizer, but for
whether it is distilled."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import flux2_dit
from qwenimg.common.networks.vaes import flux2_vae
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import flow_match

PIPELINE = "Flux2KleinPipeline"
SCHEDULER: dict[str, object] = {
    "_class_name": flow_match.CLASS_NAME,
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


def small_files(checkpoint: Checkpoint) -> dict[str, object]:
    """Return JSON by its path, for a folder that lacks these files."""
    return {"model_index.json": index(checkpoint.distilled), "scheduler/scheduler_config.json": SCHEDULER}


def index(distilled: bool) -> dict[str, object]:
    """Return the content of model_index.json."""
    return {
        "_class_name": PIPELINE,
        "is_distilled": distilled,
        "scheduler": ["diffusers", flow_match.CLASS_NAME],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", flux2_dit.CLASS_NAME],
        "vae": ["diffusers", flux2_vae.CLASS_NAME],
    }
