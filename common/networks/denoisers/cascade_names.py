"""Stable Cascade's UNets in files: their authors' names, which ComfyUI has too, and diffusers'.

Unusual about its authors' names: q, k and v of an attention are rows of one tensor, without a dot before its `weight`,
and the decoder's layer of the pooled text has another name than the prior's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from qwenimg.common.base.safe_files import bad
from qwenimg.common.networks.denoisers import cascade_unet
from qwenimg.common.networks.denoisers.cascade_unet import CascadeConfig
from qwenimg.common.networks.layout import QKV, Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place, Rows

HEAD_DIM, PATCH = 64, 2  # of all published ones, and of their decoders
_ATTENTION = re.compile(r"(.+\.attention)\.(?:to_([qkv])|to_out\.0)(?:\.(weight|bias))?")
_BLOCK = re.compile(r"(down|up)_blocks\.(\d{1,2})\.(\d{1,4})\.")
_REPEAT = re.compile(r"(down|up)_repeat_mappers\.(\d{1,2})\.(\d{1,4})\.weight")
_POOLED, _CLIP = "clip_txt_pooled_mapper.", "clip_mapper."
_LETTERS = {letter: index for index, letter in QKV}


def _place(name: str, config: CascadeConfig) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    if match := _ATTENTION.fullmatch(name):
        owner, letter, leaf = match.groups()
        if letter is None:
            return Place(f"{owner}.attn.out_proj.{leaf}")
        index = _LETTERS[letter]
        return Place(f"{owner}.attn.in_proj_{leaf}", Rows(index, index + 1, 3))
    return Place(name)


def _decoder_place(name: str, config: CascadeConfig) -> Place:
    """Return the same of the decoder."""
    return _place(name.replace(_POOLED, _CLIP), config)


def in_loras(path: str) -> Iterator[Place]:
    """Yield the names of a layer of attention in the LoRAs of sd-scripts and OneTrainer."""
    if match := _ATTENTION.fullmatch(path):
        owner, letter, _ = match.groups()
        yield Place(f"{owner}.attn.to_{letter}" if letter else f"{owner}.attn.out_proj")
        if letter:
            yield Place(f"{owner}.attn.in_proj.{_LETTERS[letter]}")


def _config(stored: StoredShapes, like: CascadeConfig) -> CascadeConfig:
    """Return the configuration for stored shapes. The channels of a head and the tokens of a pooled text are
    published ones, or those of `like`; a decoder sees patches of two latents a side."""
    widths, attends, counts = _levels(stored, "down")
    _, _, up_counts = _levels(stored, "up")
    is_prior = "clip_txt_mapper.weight" in stored
    [pooled] = stored.shape("clip_txt_pooled_mapper.bias", 1)
    side = 1 if is_prior else PATCH
    channels, pixels = stored.shape("clf.1.bias", 1)[0], side**2
    heads = [width // HEAD_DIM for width in widths]
    return stored.config(
        like,
        patch_size=side,
        in_channels=stored.shape("embedding.1.weight", 4)[1] // pixels,
        out_channels=channels // pixels,
        timestep_ratio_embedding_dim=stored.shape("down_blocks.0.1.mapper.weight", 2)[1],
        conditioning_dim=pooled // like.clip_seq,
        block_out_channels=widths,
        num_attention_heads=list(like.num_attention_heads) if tuple(widths) == like.block_out_channels else heads,
        down_num_layers_per_block=counts,
        up_num_layers_per_block=up_counts,
        down_blocks_repeat_mappers=_repeats(stored, "down", len(widths)),
        up_blocks_repeat_mappers=_repeats(stored, "up", len(widths)),
        attending=attends,
        clip_text_in_channels=stored.shape("clip_txt_mapper.weight", 2)[1] if is_prior else None,
        clip_text_pooled_in_channels=stored.shape("clip_txt_pooled_mapper.weight", 2)[1],
        clip_image_in_channels=stored.shape("clip_img_mapper.weight", 2)[1] if is_prior else None,
        effnet_in_channels=None if is_prior else stored.shape("effnet_mapper.0.weight", 4)[1],
        pixel_mapper_in_channels=stored.shape("pixels_mapper.0.weight", 4)[1]
        if "pixels_mapper.0.weight" in stored
        else None,
        kernel_size=stored.shape("down_blocks.0.0.depthwise.weight", 4)[-1],
        timestep_conditioning_type=[name for name in ("sca", "crp") if f"down_blocks.0.1.mapper_{name}.bias" in stored],
        one_size="down_downscalers.1.1.blocks.0.bias" in stored,
    )


def _levels(stored: StoredShapes, way: str) -> tuple[list[int], list[bool], list[int]]:
    """Return the width of each level of the way down or up, whether it attends, and its number of layers."""
    blocks: dict[int, int] = {}
    for match in filter(None, map(_BLOCK.match, stored.shapes)):
        if match[1] == way:
            blocks[int(match[2])] = max(blocks.get(int(match[2]), 0), 1 + int(match[3]))
    if sorted(blocks) != [*range(len(blocks))] or not blocks:
        raise bad(stored.path, f"lacks levels of the {way}_blocks: not a checkpoint as it is published")
    widths = [stored.shape(f"{way}_blocks.{level}.0.depthwise.bias", 1)[0] for level in sorted(blocks)]
    attends = [f"{way}_blocks.{level}.2.kv_mapper.1.bias" in stored for level in sorted(blocks)]
    counts = [blocks[level] // (3 if one else 2) for level, one in enumerate(attends)]
    return widths, attends, counts


def _repeats(stored: StoredShapes, way: str, levels: int) -> list[int]:
    """Return how often each level runs."""
    found = [match for match in map(_REPEAT.fullmatch, stored.shapes) if match and match[1] == way]
    return [1 + sum(int(match[2]) == level for match in found) for level in range(levels)]


_layouts = partial(Layouts, network=cascade_unet.NETWORK, config=_config)
PRIOR = _layouts(
    title="Stable Cascade's prior",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=("clip_txt_mapper.weight", "down_blocks.0.2.attention.attn.in_proj_weight"),
            place=_place,
        ),
        Layout(names="diffusers' names", signs=("clip_txt_mapper.weight", "down_blocks.0.2.attention.to_q.weight")),
    ),
    in_loras=in_loras,
)
DECODER = _layouts(
    title="Stable Cascade's decoder",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=("clip_mapper.weight", "effnet_mapper.0.weight"),
            place=_decoder_place,
        ),
        Layout(names="diffusers' names", signs=("clip_txt_pooled_mapper.weight", "effnet_mapper.0.weight")),
    ),
)
