"""Tiny ERNIE-Image folders and networks, written by diffusers and transformers, with nothing in them that is all ones
or zeros. Of the two folders one has the configuration of a text encoder that is published, whose tokenizer puts a token
before a text; the other has the model type and the tokenizer of Ministral 3 as transformers saves them today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.language_files import byte_level
from support.tiny_flux2 import tiny_vae
from support.tiny_language import YARN
from support.tiny_model import randomise

DIT: dict[str, Any] = {
    "hidden_size": 66,
    "num_attention_heads": 3,
    "num_layers": 3,
    "ffn_hidden_size": 90,
    "in_channels": 32,
    "out_channels": 32,
    "text_in_dim": 60,
    "rope_axes_dim": (6, 8, 8),
}
TEXT: dict[str, Any] = {
    "hidden_size": 60, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 14, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
    "tie_word_embeddings": True, "sliding_window": None,
}  # fmt: skip
VISION = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 12,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
VOCABULARY = 702
LIMIT = 2048


def tiny_dit(seed: int = 1, **changes: object) -> Any:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import ErnieImageTransformer2DModel

    model = ErnieImageTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        parameter.data += 1 if name.endswith("_ln.weight") else 0
    return model.eval()


def tiny_text_encoder(seed: int = 3, *, kind: str = "mistral", **changes: object) -> Any:
    """transformers' model that sees, of which the language model encodes. kind: its model type."""
    from transformers import Ministral3Config, Mistral3Config, Mistral3Model, MistralConfig, PixtralVisionConfig

    scaled = {key: value for key, value in YARN.items() if kind != "mistral" or key != "llama_4_scaling_beta"}
    fields = TEXT | {"vocab_size": VOCABULARY, "rope_parameters": scaled} | changes
    made = (MistralConfig if kind == "mistral" else Ministral3Config)(**fields)
    model = Mistral3Model(Mistral3Config(text_config=made, vision_config=PixtralVisionConfig(**VISION)))
    randomise(model, seed)
    return model.eval()


def tiny_tokenizer(*, before: bool) -> Any:
    """A tokenizer of Mistral's kind. before: it puts a token before each text."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    data = json.loads(byte_level("tekken"))
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text] if before else [text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=LIMIT,
    )


def write_tiny_ernie(folder: Path, *, turbo: bool = False, shard: str = "400KB", **sizes: object) -> None:
    """Write the whole folder through the pipeline's save_pretrained, with shards of at most `shard`, without the model
    that writes prompts."""
    from diffusers import ErnieImagePipeline, FlowMatchEulerDiscreteScheduler

    pipeline = ErnieImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(kind="ministral3" if turbo else "mistral"),
        tokenizer=tiny_tokenizer(before=not turbo),
        transformer=tiny_dit(**sizes),
        pe=None,
        pe_tokenizer=None,
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
