"""Folders of all families with random weights, in diffusers layout, of published proportions, narrower and of fewer
layers.

    python tools/random_folders.py KIND FOLDER

For measurements: what they draw is noise. Needs no framework, but for FLUX.1, whose tokenizer is trained.
"""

from __future__ import annotations

import json
import struct
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image
from random_model import write_part, write_small_files
from tiny_tokenizer import write_tiny_tokenizer

from qwenimg.common.families.qwen_image import captions, variants
from qwenimg.common.families.qwen_image.variants import QwenVariant, of_kind
from qwenimg.common.families.stable_diffusion import control
from qwenimg.common.networks.denoisers import (
    anima_dit,
    aura_dit,
    chroma_dit,
    ernie_dit,
    flux2_dit,
    flux2_kv_dit,
    flux3_dit,
    flux_controlnet,
    flux_dit,
    hunyuan_dit,
    krea2_dit,
    longcat_dit,
    lumina_dit,
    ovis_dit,
    pixart_dit,
    qwen21_dit,
    qwen_controlnet,
    qwen_dit,
    sana_dit,
    sd3_dit,
    t2i_adapter,
    unet,
    unet_controlnet,
    unet_controlnet_union,
    zimage_control,
    zimage_dit,
)
from qwenimg.common.networks.encoders import (
    anima_conditioner,
    bert,
    clip,
    language_names,
    qwen3_vl_vision,
    qwen_vl_vision,
    redux,
    siglip_vision,
    t5,
)
from qwenimg.common.networks.encoders.decoder import GELU, DecoderConfig
from qwenimg.common.networks.encoders.qwen import QWEN2_5_VL, QWEN3, QWEN3_VL, Qwen3Config, Qwen3VLConfig, QwenVLConfig
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import dc_vae, flux2_vae, kl_vae, qwen21_vae, qwen_vae
from qwenimg.common.prompts.vocabulary import byte_symbols

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # for tokenizers that are trained

Parts = Mapping[str, tuple[Network, Any]]
BOS, EOS = "<|startoftext|>", "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Kind:
    model: str  # the known model that has its scheduler and model_index.json
    parts: Parts
    tokenizers: Mapping[str, Callable[[Path], None]] = field(
        default_factory=lambda: {"tokenizer": write_tiny_tokenizer}
    )
    pipeline: str = ""  # the class of the pipeline, if it is not the known model's
    dtype: str = "BF16"
    control: tuple[Network, Any] | None = None  # the network that controls its runs, and
    encoder: tuple[Network, Any] | None = None  # the image encoder of a Redux
    picture: str = ""  # the kind of its picture, for a network that has several


# Tokenizers


def _json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def vocabulary() -> dict[str, int]:
    """CLIP's without merges: bytes, bytes that end a word, start and end."""
    symbols = byte_symbols()
    tokens = [*symbols, *(f"{symbol}</w>" for symbol in symbols), BOS, EOS]
    return {token: i for i, token in enumerate(tokens)}


def write_clip_tokenizer(folder: Path) -> None:
    """CLIP's tokenizer with these words."""
    _json(folder / "vocab.json", vocabulary())
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    special = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS}
    _json(folder / "tokenizer_config.json", special | {"model_max_length": 77})


def write_t5_tokenizer(folder: Path) -> None:
    """T5's with letters for pieces, and a table of no characters."""
    special, letters = ["<pad>", "</s>", "<unk>"], [chr(ord("a") + i) for i in range(26)]
    table = struct.pack("<I", 4 * 256) + bytes(4 * 256) + b"\0"
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, "special": True} | plain for i, text in enumerate(special)],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": b64encode(table).decode()},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": [[text, 0.0] for text in special] + [[text, -3.0] for text in ("\u2581", *letters)],
        },
    }
    _json(folder / "tokenizer.json", document)


def write_pieces(folder: Path) -> None:
    """LLaMA's, trained."""
    from support.language_files import write_folder

    write_folder(folder, "pieces")


def write_trained_spiece(folder: Path) -> None:
    from support.spiece_files import trained, write_spiece

    write_spiece(folder, trained())


def write_trained_clip(folder: Path) -> None:
    from support.tiny_clip import write_tiny_clip_tokenizer

    write_tiny_clip_tokenizer(folder)


def write_bert_tokenizer(folder: Path) -> None:
    from support.tiny_bert import write_vocabulary

    write_vocabulary(folder)


def write_mistral_tokenizer(folder: Path) -> None:
    from support.tiny_flux2_dev import tiny_tokenizer

    tiny_tokenizer().save_pretrained(folder)


def write_gemma_tokenizer(folder: Path) -> None:
    from support.tiny_lumina import tiny_tokenizer

    tiny_tokenizer().save_pretrained(folder)


# Qwen-Image

QWEN = qwen_dit.QwenDiTConfig(num_layers=6, num_attention_heads=8, joint_attention_dim=1024)
QWEN_TEXT = QwenVLConfig(
    hidden_size=1024, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=32000,
)  # fmt: skip
# A quarter of the published vision tower's width, and of its layers.
QWEN_SEEING = qwen_vl_vision.QwenVLVisionConfig(
    **vars(QWEN_TEXT) | {"mrope_section": (16, 24, 24)}, vision_depth=8, vision_width=320, vision_inner=856,
    vision_heads=4, full_layers=(1, 3, 5, 7),
)  # fmt: skip
CONTROL = qwen_controlnet.QwenControlNetConfig(num_layers=2, num_attention_heads=8, joint_attention_dim=1024)


def qwen(variant: QwenVariant, text: tuple[Network, Any], dit: qwen_dit.QwenDiTConfig = QWEN) -> Kind:
    parts = {
        "transformer": (qwen_dit.NETWORK, of_kind(dit, variant)),
        "vae": (qwen_vae.NETWORK, of_kind(qwen_vae.QwenVAEConfig(base_dim=48), variant)),
        "text_encoder": text,
    }
    return Kind(model="qwen-image", parts=parts, pipeline=variant.pipeline)


# Stable Diffusion

CROSS, PLAIN, UP_CROSS, UP = "CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"
SMALL_CLIP = clip.CLIPConfig(
    hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=6, vocab_size=len(vocabulary())
)
LARGE_CLIP = clip.CLIPConfig(
    hidden_size=640, intermediate_size=2560, num_hidden_layers=32, num_attention_heads=10, projection_dim=640,
    hidden_act="gelu", vocab_size=len(vocabulary()),
)  # fmt: skip
SD_VAE = kl_vae.KLVAEConfig(block_out_channels=(64, 128, 256, 256), layers_per_block=2, latent_channels=4)
SD15 = unet.UNetConfig(
    block_out_channels=(160, 320, 640, 640),
    down_block_types=(CROSS, CROSS, CROSS, PLAIN),
    up_block_types=(UP, UP_CROSS, UP_CROSS, UP_CROSS),
    cross_attention_dim=384,
)
SDXL = unet.UNetConfig(
    block_out_channels=(160, 320, 640),
    down_block_types=(PLAIN, CROSS, CROSS),
    up_block_types=(UP_CROSS, UP_CROSS, UP),
    layers_per_block=(2, 2, 2),
    attention_head_dim=(3, 5, 10),
    transformer_layers_per_block=(1, 2, 10),
    use_linear_projection=True,
    cross_attention_dim=1024,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=640 + 6 * 256,
)
SD3 = sd3_dit.SD3Config(
    num_layers=12, num_attention_heads=12, joint_attention_dim=1024, caption_projection_dim=768,
    pooled_projection_dim=1024, pos_embed_max_size=384, qk_norm="rms_norm", dual_attention_layers=tuple(range(6)),
)  # fmt: skip
SD3_T5 = t5.T5Config(vocab_size=4096, d_model=1024, d_ff=2560, num_layers=24, num_heads=16)

# FLUX and Z-Image

FLUX = flux_dit.FluxConfig(
    num_layers=3, num_single_layers=6, num_attention_heads=8, joint_attention_dim=1024, pooled_projection_dim=256,
    guidance_embeds=True,
)  # fmt: skip
FLUX_CONTROL = flux_controlnet.FluxControlNetConfig(
    num_layers=2, num_single_layers=2, num_attention_heads=8, joint_attention_dim=1024, pooled_projection_dim=256,
    num_mode=7,
)  # fmt: skip
REDUX = redux.ReduxConfig(redux_dim=576, txt_in_features=FLUX.joint_attention_dim)
SIGLIP = siglip_vision.SiglipVisionConfig(
    hidden_size=576, intermediate_size=2152, num_hidden_layers=9, num_attention_heads=8
)
FLUX_CLIP = clip.CLIPConfig(vocab_size=589, hidden_size=256, intermediate_size=1024, num_attention_heads=4)
FLUX_VAE = replace(kl_vae.FLUX_1, block_out_channels=(64, 128, 256, 256))
FLUX2 = flux2_dit.Flux2Config(
    num_layers=2, num_single_layers=8, num_attention_heads=8, joint_attention_dim=1536, guidance_embeds=False
)
FLUX2_TEXT = Qwen3Config(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=28, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=32000,
)  # fmt: skip
FLUX2_VAE = flux2_vae.Flux2VAEConfig(block_out_channels=(64, 128, 256, 256))
MISTRAL = DecoderConfig(
    hidden_size=512, intermediate_size=2048, num_hidden_layers=32, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, vocab_size=32000, rms_norm_eps=1e-5, rope_theta=1e9,
)  # fmt: skip
SANA = sana_dit.SanaConfig(
    num_layers=6, num_attention_heads=18, num_cross_attention_heads=9, cross_attention_head_dim=64,
    cross_attention_dim=576, caption_channels=768, qk_norm=sana_dit.QK_NORM,
)  # fmt: skip
SANA_VAE = dc_vae.DCVAEConfig(
    encoder_block_out_channels=(64, 128, 256, 256, 512, 512), decoder_block_out_channels=(64, 128, 256, 256, 512, 512)
)
FLUX3 = flux3_dit.Flux3Config(
    num_layers=2, num_single_layers=8, num_attention_heads=8, joint_attention_dim=4096, flow_map=True
)
FLUX3_TEXT = Qwen3VLConfig(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=33, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, vocab_size=32000, tie_word_embeddings=True,
)  # fmt: skip
FLUX_T5 = t5.T5Config(d_model=1024, d_ff=2560, num_layers=8, num_heads=16)
PIXART = pixart_dit.PixArtConfig(num_layers=14, caption_channels=1024, use_additional_conditions=True)
HUNYUAN = hunyuan_dit.HunyuanConfig(
    num_attention_heads=8, hidden_size=704, num_layers=20, cross_attention_dim=512, cross_attention_dim_t5=1024,
    pooled_projection_dim=512,
)  # fmt: skip
BERT = bert.BertConfig(
    vocab_size=23510, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8
)
CHROMA = chroma_dit.ChromaConfig(
    num_layers=3, num_single_layers=6, num_attention_heads=8, joint_attention_dim=1024, approximator_hidden_dim=1280
)
AURAFLOW = aura_dit.AuraConfig(
    num_mmdit_layers=2, num_single_dit_layers=8, num_attention_heads=4, caption_projection_dim=1024,
    joint_attention_dim=1024,
)  # fmt: skip
AURAFLOW_T5 = replace(FLUX_T5, shares_bias=False)
LONGCAT = longcat_dit.LongCatConfig(num_layers=3, num_single_layers=6, num_attention_heads=8, joint_attention_dim=1024)
ZIMAGE = zimage_dit.ZImageConfig(
    axes_lens=(1536, 512, 512), dim=1024, n_layers=8, n_heads=8, n_kv_heads=8, cap_feat_dim=1024
)
ZIMAGE_CONTROL = zimage_control.ZImageControlConfig(
    control_layers_places=(0, 2, 4, 6), dim=ZIMAGE.dim, n_heads=ZIMAGE.n_heads, n_kv_heads=ZIMAGE.n_kv_heads
)
ZIMAGE_TEXT = Qwen3Config(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=32000,
)  # fmt: skip
ERNIE = ernie_dit.ErnieConfig(
    hidden_size=1024, num_attention_heads=8, num_layers=9, ffn_hidden_size=3072, text_in_dim=768
)
MINISTRAL = DecoderConfig(
    hidden_size=768, intermediate_size=2304, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=2,
    head_dim=128, vocab_size=32000, rms_norm_eps=1e-5, rope_theta=1e6, tie_word_embeddings=True,
)  # fmt: skip
KREA2 = krea2_dit.Krea2Config(
    num_layers=8, num_attention_heads=8, num_key_value_heads=2, intermediate_size=2816, text_hidden_dim=512,
    text_num_attention_heads=4, text_num_key_value_heads=4, text_intermediate_size=1408,
)  # fmt: skip
KREA2_TEXT = replace(FLUX3_TEXT, num_hidden_layers=36)
QWEN21 = qwen21_dit.Qwen21Config(num_layers=8, num_attention_heads=8, context_in_dim=1024)
QWEN21_TEXT = qwen3_vl_vision.Qwen3VLVisionConfig(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=9, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=32000, vision_depth=6, vision_width=576, vision_inner=2152, vision_heads=8, deep_layers=(1, 3, 5),
)  # fmt: skip

LUMINA = lumina_dit.LuminaConfig(
    dim=1152, n_layers=8, n_heads=12, n_kv_heads=4, cap_feat_dim=768, ffn_dim_multiplier=0.6
)
GEMMA = DecoderConfig(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
    head_dim=96, vocab_size=32000, rms_norm_eps=1e-6, tie_word_embeddings=True, hidden_act=GELU, post_norms=True,
    centred_norms=True, query_scale=96**-0.5, embedding_scale=768**0.5, attn_logit_softcapping=50.0,
    sliding_window=4096, sliding_layers=(0, 2, 4, 6, 8, 10),
)  # fmt: skip
OVIS = ovis_dit.OvisConfig(num_layers=2, num_single_layers=6, num_attention_heads=8, joint_attention_dim=1024)
OVIS_TEXT = replace(ZIMAGE_TEXT, tie_word_embeddings=True)
ANIMA_TEXT = Qwen3Config(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
    vocab_size=32000,
)  # fmt: skip
KINDS = {
    "qwen": qwen(variants.TEXT, (QWEN2_5_VL, QWEN_TEXT)),
    # Of more layers, so that two of them are little of it.
    "deep": qwen(variants.TEXT, (QWEN2_5_VL, QWEN_TEXT), replace(QWEN, num_layers=24)),
    "edit": qwen(variants.EDIT_2511, (qwen_vl_vision.NETWORK, QWEN_SEEING)),
    "layered": qwen(variants.LAYERED, (captions.NETWORK, replace(QWEN_SEEING, writes=True))),
    "control": replace(qwen(variants.TEXT, (QWEN2_5_VL, QWEN_TEXT)), control=(qwen_controlnet.NETWORK, CONTROL)),
    "sd15": Kind(
        model="sd15",
        parts={
            "unet": (unet.NETWORK, SD15),
            "vae": (kl_vae.NETWORK, SD_VAE),
            "text_encoder": (clip.NETWORK, SMALL_CLIP),
        },
        tokenizers={"tokenizer": write_clip_tokenizer},
        dtype="F16",
    ),
    "sdxl": Kind(
        model="sdxl",
        parts={
            "unet": (unet.NETWORK, SDXL),
            "vae": (kl_vae.NETWORK, SD_VAE),
            "text_encoder": (clip.NETWORK, SMALL_CLIP),
            "text_encoder_2": (clip.NETWORK, LARGE_CLIP),
        },
        tokenizers={"tokenizer": write_clip_tokenizer, "tokenizer_2": write_clip_tokenizer},
        dtype="F16",
    ),
    "sd3": Kind(
        model="sd3.5-medium",
        parts={
            "transformer": (sd3_dit.NETWORK, SD3),
            "text_encoder": (clip.NETWORK, replace(SMALL_CLIP, projection_dim=384)),
            "text_encoder_2": (clip.NETWORK, LARGE_CLIP),
            "text_encoder_3": (t5.NETWORK, SD3_T5),
            "vae": (kl_vae.NETWORK, kl_vae.STABLE_DIFFUSION_3),
        },
        tokenizers={
            "tokenizer": write_clip_tokenizer,
            "tokenizer_2": write_clip_tokenizer,
            "tokenizer_3": write_t5_tokenizer,
        },
        dtype="F16",
    ),
    "flux": Kind(
        model="flux-dev",
        parts={
            "transformer": (flux_dit.NETWORK, FLUX),
            "text_encoder": (clip.NETWORK, FLUX_CLIP),
            "text_encoder_2": (t5.NETWORK, FLUX_T5),
            "vae": (kl_vae.NETWORK, FLUX_VAE),
        },
        tokenizers={"tokenizer": write_trained_clip, "tokenizer_2": write_trained_spiece},
    ),
    "flux2": Kind(
        model="flux2-klein-base-4b",
        parts={
            "transformer": (flux2_dit.NETWORK, FLUX2),
            "text_encoder": (QWEN3, FLUX2_TEXT),
            "vae": (flux2_vae.NETWORK, FLUX2_VAE),
        },
    ),
    "flux2-kv": Kind(
        model="flux2-klein-9b-kv",
        parts={
            "transformer": (flux2_kv_dit.NETWORK, FLUX2),
            "text_encoder": (QWEN3, FLUX2_TEXT),
            "vae": (flux2_vae.NETWORK, FLUX2_VAE),
        },
    ),
    "flux2-dev": Kind(
        model="flux2-dev",
        parts={
            "transformer": (flux2_dit.NETWORK, replace(FLUX2, guidance_embeds=True)),
            "text_encoder": (language_names.MISTRAL_SMALL_3.network, MISTRAL),
            "vae": (flux2_vae.NETWORK, FLUX2_VAE),
        },
        tokenizers={"tokenizer": write_mistral_tokenizer},
    ),
    "flux3": Kind(
        model="flux3-klein",
        parts={
            "transformer": (flux3_dit.NETWORK, FLUX3),
            "text_encoder": (QWEN3_VL, FLUX3_TEXT),
            "vae": (flux2_vae.NETWORK, FLUX2_VAE),
        },
        tokenizers={"text_encoder": write_tiny_tokenizer},
    ),
    "chroma": Kind(
        model="chroma1-hd",
        parts={
            "transformer": (chroma_dit.NETWORK, CHROMA),
            "text_encoder": (t5.NETWORK, FLUX_T5),
            "vae": (kl_vae.NETWORK, FLUX_VAE),
        },
        tokenizers={"tokenizer": write_trained_spiece},
    ),
    "pixart": Kind(
        model="pixart-alpha",
        parts={
            "transformer": (pixart_dit.NETWORK, PIXART),
            "text_encoder": (t5.NETWORK, FLUX_T5),
            "vae": (kl_vae.NETWORK, SD_VAE),
        },
        tokenizers={"tokenizer": write_trained_spiece},
    ),
    "hunyuan": Kind(
        model="hunyuan-dit",
        parts={
            "transformer": (hunyuan_dit.NETWORK, HUNYUAN),
            "text_encoder": (bert.NETWORK, BERT),
            "text_encoder_2": (t5.NETWORK, FLUX_T5),
            "vae": (kl_vae.NETWORK, SD_VAE),
        },
        tokenizers={"tokenizer": write_bert_tokenizer, "tokenizer_2": write_trained_spiece},
    ),
    "auraflow": Kind(
        model="auraflow",
        parts={
            "transformer": (aura_dit.NETWORK, AURAFLOW),
            "text_encoder": (t5.UMT5, AURAFLOW_T5),
            "vae": (kl_vae.NETWORK, SD_VAE),
        },
        tokenizers={"tokenizer": write_pieces},
        dtype="F16",
    ),
    "longcat": Kind(
        model="longcat-image",
        parts={
            "transformer": (longcat_dit.NETWORK, LONGCAT),
            "text_encoder": (QWEN2_5_VL, QWEN_TEXT),
            "vae": (kl_vae.NETWORK, FLUX_VAE),
        },
    ),
    "anima": Kind(
        model="anima",
        parts={
            "transformer": (anima_dit.NETWORK, anima_dit.AnimaConfig(num_layers=4, num_attention_heads=8)),
            "text_encoder": (QWEN3, ANIMA_TEXT),
            "text_conditioner": (anima_conditioner.NETWORK, anima_conditioner.ConditionerConfig(num_layers=2)),
            "vae": (qwen_vae.NETWORK, qwen_vae.QwenVAEConfig()),
        },
        tokenizers={"tokenizer": write_tiny_tokenizer, "t5_tokenizer": write_t5_tokenizer},
    ),
    "sana": Kind(
        model="sana-1.5",
        parts={
            "transformer": (sana_dit.NETWORK, SANA),
            "text_encoder": (language_names.GEMMA_2.network, GEMMA),
            "vae": (dc_vae.NETWORK, SANA_VAE),
        },
        tokenizers={"tokenizer": write_gemma_tokenizer},
    ),
    "ernie": Kind(
        model="ernie-image",
        parts={
            "transformer": (ernie_dit.NETWORK, ERNIE),
            "text_encoder": (language_names.MINISTRAL_3.network, MINISTRAL),
            "vae": (flux2_vae.NETWORK, FLUX2_VAE),
        },
        tokenizers={"tokenizer": write_mistral_tokenizer},
    ),
    "krea2": Kind(
        model="krea-2-raw",
        parts={
            "transformer": (krea2_dit.NETWORK, KREA2),
            "text_encoder": (QWEN3_VL, KREA2_TEXT),
            "vae": (qwen_vae.NETWORK, qwen_vae.QwenVAEConfig(base_dim=48)),
        },
    ),
    "lumina": Kind(
        model="lumina",
        parts={
            "transformer": (lumina_dit.NETWORK, LUMINA),
            "text_encoder": (language_names.GEMMA_2.network, GEMMA),
            "vae": (kl_vae.NETWORK, FLUX_VAE),
        },
        tokenizers={"tokenizer": write_gemma_tokenizer},
    ),
    "ovis": Kind(
        model="ovis-image",
        parts={
            "transformer": (ovis_dit.NETWORK, OVIS),
            "text_encoder": (QWEN3, OVIS_TEXT),
            "vae": (kl_vae.NETWORK, FLUX_VAE),
        },
    ),
    "z-image": Kind(
        model="z-image-turbo",
        parts={
            "transformer": (zimage_dit.NETWORK, ZIMAGE),
            "text_encoder": (QWEN3, ZIMAGE_TEXT),
            "vae": (kl_vae.NETWORK, FLUX_VAE),
        },
    ),
    "qwen21": Kind(
        model="qwen-image-2.1",
        parts={
            "transformer": (qwen21_dit.NETWORK, QWEN21),
            "text_encoder": (qwen3_vl_vision.NETWORK, QWEN21_TEXT),
            "vae": (qwen21_vae.NETWORK, qwen21_vae.Qwen21VAEConfig(base_dim=32, decoder_base_dim=48)),
        },
        tokenizers={"processor": write_tiny_tokenizer},
    ),
}

KINDS |= {
    "sd15-controlnet": replace(KINDS["sd15"], control=(unet_controlnet.NETWORK, control.config_like(SD15))),
    "sd15-adapter": replace(
        KINDS["sd15"], control=(t2i_adapter.NETWORK, t2i_adapter.T2IAdapterConfig(channels=SD15.block_out_channels))
    ),
    "sdxl-union": replace(
        KINDS["sdxl"], control=(unet_controlnet_union.NETWORK, control.union_like(SDXL)), picture="depth"
    ),
    "flux-control": replace(KINDS["flux"], control=(flux_controlnet.NETWORK, FLUX_CONTROL), picture="depth"),
    "flux-redux": replace(KINDS["flux"], control=(redux.NETWORK, REDUX), encoder=(siglip_vision.NETWORK, SIGLIP)),
    "z-image-control": replace(KINDS["z-image"], control=(zimage_control.NETWORK, ZIMAGE_CONTROL)),
}


def write_folder(folder: Path, name: str, dtype: str = "", **configs: Any) -> None:
    """Write the model `name`, stored as `dtype`; model_index.json is written last. `configs`: other configurations of
    parts, by their folders."""
    kind = KINDS[name]
    for part, (network, config) in kind.parts.items():
        write_part(folder / part, network, configs.get(part, config), dtype or kind.dtype)
    for place, write_tokenizer in kind.tokenizers.items():
        write_tokenizer(folder / place)
    if kind.control is not None:  # the control network and its picture, in a folder of their own
        place = folder / "controlnet"
        if kind.encoder is not None:
            write_part(place / "image_encoder", *kind.encoder, kind.dtype)
        write_part(place / "image_embedder" if kind.encoder else place, *kind.control, kind.dtype)
        Image.new("RGB", (512, 512), (40, 90, 200)).save(place / "picture.png")
    write_small_files(folder, kind.model, kind.pipeline)


def controlled(path: Path, name: str) -> str:
    """Return the control of runs of the model `name` at `path`, if it has one."""
    kind, net = KINDS[name], path / "controlnet"
    return f"{net}={kind.picture}{'@' * bool(kind.picture)}{net}/picture.png" if kind.control else ""


if __name__ == "__main__":
    write_folder(Path(sys.argv[2]), sys.argv[1])
