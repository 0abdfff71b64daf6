"""The stage before the transformer: the text encoder alone, on what prompts mean.

The published text encoder is a language model that understood its prompts long before it met the transformer. This one
is small and new, so it first learns to tell from a prompt's last token what is on the picture: how many objects, of
which colour, shape and size, where, and on which background. The layers that answer are dropped afterwards. Without
this stage most of the second stage goes into learning words by way of pictures (measured: after 100,000 pictures the
model still took one object's colour for the background's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qwenimg.backends.torch import ops
from qwenimg.backends.torch.networks.encoders.decoder import Decoder
from qwenimg.common.families.qwen_image.variants import DRAWS as TEMPLATE
from qwenimg.common.networks.encoders import decoder
from qwenimg.common.networks.encoders.qwen import QwenVLConfig
from qwenimg.common.prompts import qwen
from qwenimg.common.shapes import scenes as shapes
from training import folder as train_folder
from training import scenes as train_scenes
from training.config import ShapesConfig
from training.data import TEXT_KIND, generator, padded, prompt
from training.optimizer import Optimizer
from training.scenes import Object, Scene
from training.vae import fresh, initialise

EMBEDDING = 0.5  # deviation of the token embeddings at the start
NONE = "none"
ARRANGEMENTS = ("one", "two", "three", "and", *shapes.RELATIONS)
ATTRIBUTES = ("shape", "color", "size")
SHAPES, COLORS, SIZES = (*shapes.SHAPES, NONE), (*shapes.PALETTE, NONE), (*shapes.SIZES, NONE)
CLASSES: dict[str, tuple[str, ...]] = {
    "arrangement": ARRANGEMENTS,
    "position": (*shapes.POSITIONS, NONE),
    "background": shapes.BACKGROUNDS,
    "first shape": SHAPES,
    "first color": COLORS,
    "first size": SIZES,
    "second shape": SHAPES,
    "second color": COLORS,
    "second size": SIZES,
}
"""What is asked about a scene, and the answers that there are."""


class Texts(NamedTuple):
    ids: Tensor  # [B S]
    last: Tensor  # [B], the index of each prompt's last token
    answers: Tensor  # [B questions], indices into `CLASSES`


class Reader(torch.nn.Module):
    """The text encoder, and one linear layer for all questions."""

    def __init__(self, config: QwenVLConfig):
        super().__init__()
        self.text_encoder = new_text_encoder(config)
        self.answers = ops.Linear(config.hidden_size, sum(map(len, CLASSES.values())))


def new_text_encoder(config: QwenVLConfig) -> Decoder:
    """Untrained, in float32."""
    made = Decoder(config, torch.float32)
    initialise(made)
    torch.nn.init.normal_(made.embed_tokens.weight, std=EMBEDDING)
    return made


def states_of(encoder: Decoder, config: QwenVLConfig, ids: Tensor) -> Tensor:
    """Token ids [B S] -> states [B S C], on the device of `ids`."""
    cos, sin = decoder.text_table(config, ids.shape[1])
    return encoder(ids, (ops.table(cos, torch.float32, ids.device), ops.table(sin, torch.float32, ids.device)))


class TextStage:
    """What the loop needs of a stage: parameters, batches, a loss, and the folder to write."""

    def __init__(self, config: ShapesConfig, device: torch.device, tell: Callable[[str], None]):
        self.config, self.device = config, device
        self.vocabulary = train_folder.vocabulary()
        self.text = train_folder.text_config(config.size, self.vocabulary.size)
        folder = config.out / "tokenizer"
        train_folder.write_tokenizer(folder, self.vocabulary)
        self.tokenizer = qwen.load(folder)
        torch.manual_seed(config.seed)
        self.model = Reader(self.text)
        if config.init is not None:
            fresh(self.model.text_encoder, train_folder.read_text(config.init / "text_encoder", self.text))
        self.model.to(device).train()

    def blocks(self) -> list[torch.nn.Module]:
        """The modules that gradient checkpointing wraps."""
        return list(self.model.text_encoder.layers)

    def optimizer(self, parameters: Mapping[str, torch.nn.Parameter]) -> Optimizer:
        return Optimizer(parameters, [name for name, p in parameters.items() if p.ndim == 2 and ".layers." in name])

    def count(self, step: int) -> int:
        return self.config.batch

    def batch(self, step: int) -> Texts:
        rng = generator(self.config.seed, TEXT_KIND, step)
        scenes = [train_scenes.random_scene(rng) for _ in range(self.config.batch)]
        prompts = [prompt(scene, rng, simple=False, drop=False) for scene in scenes]
        ids, lengths = padded([TEMPLATE.fill(self.tokenizer, text).ids for text in prompts])
        answers = np.array([answers_of(scene) for scene in scenes])
        values = (ids, np.array(lengths) - 1, answers)
        return Texts(*(torch.from_numpy(value).to(self.device) for value in values))

    def loss(self, batch: Texts, rows: slice) -> Tensor:
        """Mean cross-entropy of the answers, in nats a question."""
        ids, last, answers = (values[rows] for values in batch)
        states = states_of(self.model.text_encoder, self.text, ids)
        logits = self.model.answers(states[torch.arange(len(ids), device=self.device), last])
        parts = logits.float().split([len(values) for values in CLASSES.values()], dim=1)
        losses = [torch.nn.functional.cross_entropy(part, answers[:, i]) for i, part in enumerate(parts)]
        return torch.stack(losses).mean()

    def write(self, weights: Mapping[str, Tensor]) -> None:
        prefix = "text_encoder."
        text = {n.removeprefix(prefix): v for n, v in weights.items() if n.startswith(prefix)}
        train_folder.write_text(self.config.out / "text_encoder", self.text, text, self.vocabulary)


def answers_of(scene: Scene) -> list[int]:
    """The index of the right answer to each question of `CLASSES`. The first of two objects is the one whose place
    the prompt tells, in English the one that it names first. (Asked for the one on the left or above instead, which
    takes the order and the relation at once, the text encoder told two objects apart no better than by chance.)"""
    objects = scene.objects if scene.relation else scene.objects[:1]
    arrangement = scene.relation or ARRANGEMENTS[len(scene.objects) - 1]
    right = {"arrangement": arrangement, "position": scene.position or NONE, "background": scene.background}
    for which, thing in zip(("first", "second"), (*objects, None), strict=False):
        right |= {f"{which} {name}": _attribute(thing, name) for name in ATTRIBUTES}
    return [values.index(right[question]) for question, values in CLASSES.items()]


def _attribute(thing: Object | None, name: str) -> str:
    return NONE if thing is None else str(getattr(thing, name))
