"""Files that are the same in every Z-Image folder in diffusers layout, beside weights and tokenizer; the scheduler's
differs in its shift."""

from __future__ import annotations

from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import flow_match

INDEX: dict[str, object] = {
    "_class_name": "ZImagePipeline",
    "scheduler": ["diffusers", flow_match.CLASS_NAME],
    "text_encoder": ["transformers", "Qwen3Model"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", zimage_dit.CLASS_NAME],
    "vae": ["diffusers", kl_vae.CLASS_NAME],
}


def scheduler(shift: float) -> dict[str, object]:
    """Return the scheduler's configuration of the model with this shift."""
    return {
        "_class_name": flow_match.CLASS_NAME,
        "num_train_timesteps": 1000,
        "shift": shift,
        "use_dynamic_shifting": False,
    }


def small_files(checkpoint: Checkpoint) -> dict[str, object]:
    """Return JSON by its path, for the folder `checkpoint.source`, which lacks these files."""
    return {"model_index.json": INDEX, "scheduler/scheduler_config.json": scheduler(checkpoint.scheduler.shift)}
