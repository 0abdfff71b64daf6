"""A Stable Diffusion 3.5 medium folder of published proportions at half the width and half the layers, with random
weights.

For measurements: what it draws is noise. Needs neither framework, nor diffusers or transformers.
"""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from pathlib import Path
from typing import Any

from random_sd import vocabulary, write_clip_tokenizer
from wide_checkpoint import write_part, write_small_files

from qwenimg.common.networks.denoisers import sd3_dit
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config
from qwenimg.common.networks.encoders import clip, t5
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae

DIT = SD3Config(
    num_layers=12, num_attention_heads=12, joint_attention_dim=1024, caption_projection_dim=768,
    pooled_projection_dim=1024, pos_embed_max_size=384, qk_norm="rms_norm", dual_attention_layers=tuple(range(6)),
)  # fmt: skip
CLIP = CLIPConfig(
    hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=6, projection_dim=384,
    vocab_size=len(vocabulary()),
)  # fmt: skip
CLIP_2 = CLIPConfig(
    hidden_size=640, intermediate_size=2560, num_hidden_layers=32, num_attention_heads=10, projection_dim=640,
    hidden_act="gelu", vocab_size=len(vocabulary()),
)  # fmt: skip
T5 = T5Config(vocab_size=4096, d_model=1024, d_ff=2560, num_layers=24, num_heads=16)
T5_TOKENS = {
    "tokenizer_class": "T5TokenizerFast",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "model_max_length": 512,
    "extra_ids": 0,
}


def write_random_sd3(folder: Path, dtype: str = "F16") -> None:
    """A complete folder in diffusers layout, stored as `dtype`, with the published VAE. model_index.json is written
    last."""
    parts: dict[str, tuple[Network, Any]] = {
        "transformer": (sd3_dit.NETWORK, DIT),
        "text_encoder": (clip.NETWORK, CLIP),
        "text_encoder_2": (clip.NETWORK, CLIP_2),
        "text_encoder_3": (t5.NETWORK, T5),
        "vae": (kl_vae.NETWORK, kl_vae.STABLE_DIFFUSION_3),
    }
    for name, (network, config) in parts.items():
        write_part(folder / name, network, config, dtype)
    write_clip_tokenizer(folder / "tokenizer")
    write_clip_tokenizer(folder / "tokenizer_2")
    _json(folder / "tokenizer_3" / "tokenizer.json", t5_tokenizer())
    _json(folder / "tokenizer_3" / "tokenizer_config.json", T5_TOKENS)
    write_small_files(folder, "sd3.5-medium")


def t5_tokenizer() -> dict[str, Any]:
    """T5's with letters for pieces, and a table of no characters."""
    special, letters = ["<pad>", "</s>", "<unk>"], [chr(ord("a") + i) for i in range(26)]
    table = struct.pack("<I", 4 * 256) + bytes(4 * 256) + b"\0"
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, "special": True} | plain for i, text in enumerate(special)],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": b64encode(table).decode()},
        "pre_tokenizer": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, end, {"Sequence": {"id": "B", "type_id": 0}}, end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": [[text, 0.0] for text in special] + [[text, -3.0] for text in ("\u2581", *letters)],
        },
    }


def _json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
