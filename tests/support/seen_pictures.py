"""Prompts with pictures for Qwen's text encoders with vision towers, of 6 x 6 pixels to a patch and 2 x 2 to a slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from qwenimg import backends
from qwenimg.common.networks.encoders.vision_tower import PicturePlace
from qwenimg.common.networks.network import Network
from qwenimg.common.parts.components import open_component, read_config
from support.policies import FP32
from support.tiny_model import TEXT, randomise

SLOT = 600  # the token of a picture's slots
VISION = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_heads": 4,
    "out_hidden_size": 60,
    "patch_size": 6,
    "window_size": 48,  # 4 x 4 slots
    "fullatt_block_indexes": [1, 3],
}


def theirs(seed: int = 3) -> Any:
    """transformers' Qwen2.5-VL, tiny."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(text_config=TEXT | {"vocab_size": 640}, vision_config=VISION, image_token_id=SLOT)
    model = Qwen2_5_VLForConditionalGeneration(config)
    randomise(model, seed)
    return model.eval()


class Seen(NamedTuple):
    """A picture: its patches, their rows and columns."""

    patches: np.ndarray
    rows: int
    columns: int


def seen(rows: int, columns: int, seed: int = 0) -> Seen:
    """A picture of random patches. It has two equal taps in time."""
    values = np.random.default_rng(seed).standard_normal((rows * columns, 3, 1, 6, 6)).astype(np.float32)
    return Seen(np.repeat(values, 2, axis=2).reshape(rows * columns, -1), rows, columns)


def prompt(parts: list[int | Seen]) -> tuple[list[int], list[PicturePlace], list[Seen]]:
    """Ids of so many tokens of text and of pictures, and the pictures and their places."""
    rng, ids, places = np.random.default_rng(5), list[int](), list[PicturePlace]()
    for part in parts:
        if isinstance(part, Seen):
            places.append(PicturePlace(len(ids), part.rows // 2, part.columns // 2))
            ids += [SLOT] * (part.rows * part.columns // 4)
        else:
            ids += rng.integers(3, 500, part).tolist()
    return ids, places, [part for part in parts if isinstance(part, Seen)]


def opened(folder: Path, backend: str, network: Network) -> tuple[Any, Any]:
    """The engine, and the network with the weights of `folder`."""
    part = open_component(network, folder, read_config(network, folder), "it")
    engine = backends.load(backend)
    return engine, engine.open(part.network, part.config, part.stored(FP32), FP32)


def states(engine: Any, ours: Any, ids: list[int], places: list[PicturePlace], pictures: list[Seen]) -> np.ndarray:
    return np.asarray(engine.numpy(ours.encode(ids, places, [ours.slots(*one) for one in pictures])))


def reference_inputs(ids: list[int], pictures: list[Seen]) -> dict[str, torch.Tensor]:
    """The arguments of transformers' model."""
    tokens = torch.tensor([ids])
    if not pictures:
        return {"input_ids": tokens}
    return {
        "input_ids": tokens,
        "pixel_values": torch.from_numpy(np.concatenate([one.patches for one in pictures])),
        "image_grid_thw": torch.tensor([[1, one.rows, one.columns] for one in pictures]),
        "mm_token_type_ids": (tokens == SLOT).int(),
    }
