"""Files that are the same in every Flux.1 folder in diffusers layout, beside weights and tokenizers; the scheduler's
differs in its shift."""

from __future__ import annotations

from qwenimg.common.families.flux.variants import VARIANTS
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import flow_match

INDEX: dict[str, object] = {
    "_class_name": "FluxPipeline",
    "scheduler": ["diffusers", flow_match.CLASS_NAME],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", flux_dit.CLASS_NAME],
    "vae": ["diffusers", kl_vae.CLASS_NAME],
}


def scheduler(*, distilled: bool) -> dict[str, object]:
    """Return the scheduler's configuration of dev, or of schnell, which is `distilled` to few steps."""
    return {
        "_class_name": flow_match.CLASS_NAME,
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": 1.0 if distilled else 3.0,
        "use_dynamic_shifting": not distilled,
    }


def small_files(checkpoint: Checkpoint) -> dict[str, object]:
    """Return JSON by its path, for the folder `checkpoint.source`, which lacks these files."""
    index = INDEX | {"_class_name": VARIANTS[checkpoint.variant].pipeline}
    return {"model_index.json": index, "scheduler/scheduler_config.json": scheduler(distilled=checkpoint.distilled)}
