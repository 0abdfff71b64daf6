"""A tiny FLUX.2 dev folder, written by diffusers and transformers, with nothing in it that is all ones or zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.language_files import REGEXES, byte_level
from support.tiny_ernie import VISION
from support.tiny_flux2 import SCHEDULER, TEXT, tiny_dit, tiny_vae
from support.tiny_model import randomise

MARKERS = ("<pad>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
VOCABULARY = 710
CHAT = (
    "{{ bos_token }}{% for message in messages %}{% set text = message.content[0].text %}"
    "{{ '[SYSTEM_PROMPT]' + text + '[/SYSTEM_PROMPT]' if message.role == 'system' else '[INST]' + text + '[/INST]' }}"
    "{% endfor %}"
)


def tiny_text_encoder(seed: int = 3, **changes: object) -> Any:
    """transformers' model that sees, with as many layers as have states taken behind them, and two more."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    fields = TEXT | {"num_hidden_layers": 32, "tie_word_embeddings": False, "vocab_size": VOCABULARY}
    text = MistralConfig(**(fields | {"sliding_window": None, "rms_norm_eps": 1e-5} | changes))
    config = Mistral3Config(text_config=text, vision_config=PixtralVisionConfig(**VISION), tie_word_embeddings=False)
    model = Mistral3ForConditionalGeneration(config)
    randomise(model, seed)
    return model.eval()


def tiny_tokenizer() -> Any:
    """A tokenizer of Mistral's kind, which splits texts as LLaMA 3's, as that of the published model does, and has its
    pads on the left. The published model has it in a PixtralProcessor, which gives it the same texts, and wants
    torchvision."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    data = json.loads(byte_level("tekken"))
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = REGEXES["llama-bpe"]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token=MARKERS[0],
        additional_special_tokens=list(MARKERS[1:]),
        padding_side="left",
        chat_template=CHAT,
    )


def write_tiny_flux2_dev(folder: Path, *, shard: str = "400KB", **sizes: object) -> None:
    """Write the whole folder through Flux2Pipeline.save_pretrained, with shards of at most `shard`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Pipeline

    pipeline = Flux2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(),
        tokenizer=tiny_tokenizer(),
        transformer=tiny_dit(guidance_embeds=True, **sizes),
    )
    part = folder.with_suffix(".part")
    pipeline.save_pretrained(part, max_shard_size=shard)
    part.rename(folder)
