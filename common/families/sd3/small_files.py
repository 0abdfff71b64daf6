"""Files beside the weights that a Stable Diffusion 3 folder in diffusers layout has and a model in one file lacks."""

from __future__ import annotations

from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.networks import kl_vae, sd3_dit
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import flow_match

SCHEDULER: dict[str, object] = {
    "_class_name": flow_match.CLASS_NAME,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": False,
}


def small_files(checkpoint: Checkpoint) -> dict[str, object]:
    """Return JSON by its path, for the model in the file `checkpoint.source`."""
    index: dict[str, object] = {
        "_class_name": "StableDiffusion3Pipeline",
        "scheduler": ["diffusers", flow_match.CLASS_NAME],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "transformer": ["diffusers", sd3_dit.CLASS_NAME],
        "vae": ["diffusers", kl_vae.CLASS_NAME],
    }
    has_t5 = T5 in checkpoint.components
    index |= {T5: ["transformers", "T5EncoderModel"] if has_t5 else [None, None]}
    index |= {"tokenizer_3": ["transformers", "T5TokenizerFast"] if has_t5 else [None, None]}
    return {"model_index.json": index, "scheduler/scheduler_config.json": SCHEDULER}
