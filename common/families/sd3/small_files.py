"""Files beside the weights that a Stable Diffusion 3 folder in diffusers layout has and a model in one file lacks."""

from __future__ import annotations

from qwenimg.common.base.config import read_json
from qwenimg.common.base.safe_files import is_file
from qwenimg.common.families.sd3.texts import T5
from qwenimg.common.networks.denoisers import sd3_dit
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.prompts.clip import EOS_PAD, OPEN_CLIP_PAD
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.sampling import flow_match

SCHEDULER: dict[str, object] = {
    "_class_name": flow_match.CLASS_NAME,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": False,
}


PADS = {"text_encoder": EOS_PAD, "text_encoder_2": OPEN_CLIP_PAD}
"""The padding token of each CLIP, which a vocabulary that is found elsewhere does not show."""
_CONFIG = "tokenizer_config.json"


def small_files(checkpoint: Checkpoint) -> dict[str, object]:
    """Return JSON by its path, for the model in the file `checkpoint.source`; of tokenizers all but the vocabulary."""
    index: dict[str, object] = {
        "_class_name": "StableDiffusion3Pipeline",
        "scheduler": ["diffusers", flow_match.CLASS_NAME],
        "transformer": ["diffusers", sd3_dit.CLASS_NAME],
        "vae": ["diffusers", kl_vae.CLASS_NAME],
        T5: [None, None],
        "tokenizer_3": [None, None],
    }
    files: dict[str, object] = {"model_index.json": index, "scheduler/scheduler_config.json": SCHEDULER}
    for name, tokenizer in checkpoint.tokenizers.items():
        folder = name.replace("text_encoder", "tokenizer")
        index[name] = ["transformers", "T5EncoderModel" if name == T5 else "CLIPTextModelWithProjection"]
        index[folder] = ["transformers", "T5TokenizerFast" if name == T5 else "CLIPTokenizer"]
        if name in PADS:
            path = tokenizer.path / _CONFIG
            config = read_json(path) if is_file(path) else {"tokenizer_class": "CLIPTokenizer"}
            files[f"{folder}/{_CONFIG}"] = config | {"pad_token": PADS[name]}
    return files
