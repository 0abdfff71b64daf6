"""Text states of prompts with pictures, which a text encoder with a vision tower sees in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.base.shape import Shape
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks.encoders.qwen3_vl_vision import Qwen3VLVisionConfig
from qwenimg.common.networks.encoders.qwen_vl_vision import QwenVLVisionConfig
from qwenimg.common.networks.encoders.vision_tower import PicturePlace
from qwenimg.common.numbers.noise import sha256
from qwenimg.common.parts.texts.states import PromptTexts, States
from qwenimg.common.pictures import patches
from qwenimg.common.pictures.patches import PictureForm
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array, PictureEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage

PAD = "<|image_pad|>"
VISION = f"<|vision_start|>{PAD}<|vision_end|>"
NO_LIMIT = 1 << 30  # tokens: prompts with pictures are not cut
KEPT = 16  # copies of pictures
UNCOUNTED = 512  # tokens that a prompt counts as, besides its pictures, if they are not counted

SeeingConfig: TypeAlias = QwenVLVisionConfig | Qwen3VLVisionConfig


@dataclass(frozen=True)
class SeenPicture:
    """A picture as patches are made of it, by its hash."""

    sha256: str
    pixels: Uint8 = field(compare=False, repr=False)


class SeenPictures:
    """The latest pictures as the text encoder sees them, as `copy` makes them of an image and, for a model that sees
    them in another size each time, of width and height."""

    def __init__(self, copy: Callable[..., Uint8]):
        self._copy = copy
        self._kept: dict[str, SeenPicture] = {}

    def of(self, image: Uint8, *size: int) -> SeenPicture:
        """Return `image` as it is seen, in a `size` if the model sees it in several."""
        name = " ".join(map(str, (f"{image.shape[1]}x{image.shape[0]}", *size, sha256(image))))
        if name not in self._kept:
            drop_oldest(self._kept, KEPT - 1)
            self._kept[name] = SeenPicture(name, self._copy(image, *size))
        return self._kept[name]

    def clear(self) -> None:
        self._kept.clear()


@dataclass(frozen=True)
class PicturePrompt:
    """A prompt with the pictures that are seen with it."""

    text: str
    pictures: tuple[SeenPicture, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PictureTemplate:
    """The text around prompts with pictures, and the form in which the pictures are seen."""

    template: Template
    before: Callable[[int], str]  # the text in front of the prompt, for a number of pictures: a VISION for each
    form: PictureForm


class PictureTexts(PromptTexts[PicturePrompt]):
    """The text states [1 S C] of prompts with pictures."""

    feed_forward = 3  # it is gated

    def __init__(
        self,
        residents: Residents,
        checkpoint: Checkpoint,
        around: PictureTemplate,
        alone: Callable[[Component], Component] | None = None,
    ):
        """Set the parts. alone: returns the part of the text encoder that prompts without pictures need, a TextEncoder;
        None for a model whose prompts all have pictures."""
        super().__init__(residents, checkpoint.texts)
        self.around, self.template, self._alone = around, around.template, alone
        [self._tokenizer] = checkpoint.tokenizers.values()

    @property
    def encoder(self) -> Component:
        [component] = self.encoders.values()
        return component

    @property
    def config(self) -> SeeingConfig:
        config: SeeingConfig = self.encoder.config
        return config

    def fill(self, prompt: PicturePrompt) -> tuple[list[int], list[PicturePlace]]:
        """Return the ids of `prompt` in the template, with one for each slot of a picture, and the pictures' places.
        Raises UsageError."""
        check_prompt(prompt.text)
        tokenizer, pad = self._tokenizer.tokenizer, self._tokenizer.tokenizer.special(PAD)
        before = self.around.before(len(prompt.pictures))
        filled = tokenizer.ids(self.template.text.replace("{}", before + prompt.text))
        if filled.count(pad) != len(prompt.pictures):
            raise UsageError(f"the prompt has {PAD}, which stands for a picture: leave it out")
        ids, places, sizes = list[int](), list[PicturePlace](), iter(self._slots(prompt))
        for token in filled:
            if token == pad:
                columns, rows = next(sizes)
                places.append(PicturePlace(len(ids), rows, columns))
                ids += [pad] * (rows * columns)
            else:
                ids.append(token)
        return ids, places

    def shapes(self, key: PicturePrompt) -> list[Shape]:
        return [(1, len(self.fill(key)[0]) - self.template.dropped, self.config.state_size)]

    def tokens(self, key: PicturePrompt) -> list[object]:
        """Return the ids, the hashes of the pictures, and the number of states that are dropped."""
        return [self.fill(key)[0], [picture.sha256 for picture in key.pictures], self.template.dropped]

    def cut(self, prompt: PicturePrompt) -> str:
        """Return nothing: no prompt is cut."""
        return ""

    def lengths(self, prompts: Sequence[PicturePrompt], counted: bool) -> list[int]:
        return [count - self.template.dropped for count in self._token_counts(prompts, counted)]

    def encodings(self, prompts: Sequence[PicturePrompt], counted: bool) -> list[Stage]:
        return [self._encoding(prompts, max(self._token_counts(prompts, counted)))]

    def encode(self, keys: Sequence[PicturePrompt]) -> Iterator[States]:
        """Encode `keys` one after the other; a picture that several have is seen once."""
        slots: dict[str, Array] = {}

        def encoded(encoder: PictureEncoder, prompt: PicturePrompt) -> States:
            for picture in prompt.pictures:
                if picture.sha256 not in slots:
                    slots[picture.sha256] = encoder.slots(*self.patches(picture))
            ids, places = self.fill(prompt)
            seen = places, [slots[picture.sha256] for picture in prompt.pictures]
            asked: Any = (ids, *seen, *self.pads(ids)) if self._sees(keys) else (ids,)
            used = self.used(self.computed(lambda: encoder.encode(*asked)), prompt)
            return (np.ascontiguousarray(used),)

        yield from self.run(self._encoding(keys, max(self._token_counts(keys, True))), encoded, keys)

    def pads(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the number of pads at the end of `ids`, for a family whose encoder takes it."""
        return ()

    def used(self, states: NDArray[Any], prompt: PicturePrompt) -> NDArray[Any]:
        """Return those of the states [1 S C] of `prompt` that condition an image."""
        return states[:, self.template.dropped :]

    def places(self, prompt: PicturePrompt) -> list[PicturePlace]:
        """Return the places of the pictures of `prompt` among its states."""
        _, places = self.fill(prompt)
        return [place._replace(start=place.start - self.template.dropped) for place in places]

    def _sees(self, prompts: Sequence[PicturePrompt]) -> bool:
        """Return whether encoding `prompts` takes the vision tower."""
        return self._alone is None or any(prompt.pictures for prompt in prompts)

    def _slots(self, prompt: PicturePrompt) -> list[tuple[int, int]]:
        """Return the columns and rows of slots of each picture. Raises UsageError."""
        return slots_of(prompt.pictures, self.config, self.around.form) if prompt.pictures else []

    def patches(self, picture: SeenPicture) -> tuple[np.ndarray, int, int]:
        """Return the patches of a picture [L, values], and their rows and columns."""
        return patches_of(picture, self.config, self.around.form)

    def _token_counts(self, prompts: Sequence[PicturePrompt], counted: bool) -> list[int]:
        """Return the number of tokens of each filled template."""
        if counted:
            return [len(self.fill(prompt)[0]) for prompt in prompts]
        slots = (sum(columns * rows for columns, rows in self._slots(prompt)) for prompt in prompts)
        return [self.template.dropped + UNCOUNTED + count for count in slots]

    def _encoding(self, prompts: Sequence[PicturePrompt], length: int) -> Stage:
        """Return the stage that encodes prompts of at most `length` tokens, and their pictures before that."""
        if not self._sees(prompts):
            assert self._alone is not None
            return self.stage(self._alone(self.encoder), 1, length)
        stage = self.stage(self.encoder, 1, length)
        [split] = stage.splits
        vision = vision_bytes(self.runtime, self.encoder, [size for prompt in prompts for size in self._slots(prompt)])
        return replace(stage, splits=(replace(split, activations=max(split.activations, vision)),))


def slots_of(pictures: Sequence[SeenPicture], config: SeeingConfig, form: PictureForm) -> list[tuple[int, int]]:
    """Return the columns and rows of slots of each picture. Raises UsageError."""
    shapes = (picture.pixels.shape for picture in pictures)
    sizes = (patches.whole_blocks(width, height, config.slot, form) for height, width, _ in shapes)
    return [(width // config.slot, height // config.slot) for width, height in sizes]


def patches_of(picture: SeenPicture, config: SeeingConfig, form: PictureForm) -> tuple[np.ndarray, int, int]:
    """Return the patches of a picture [L, values], and their rows and columns."""
    return patches.patches(picture.pixels, config.patch_size, config.merge_size, config.taps_in_time, form)


def vision_bytes(runtime: Runtime, encoder: Component, sizes: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of the vision tower's activations for one picture after another, of `sizes` in slots.

    Each patch has two residuals, q, k and v with q and k in float32 too, and the widths of the feed-forward."""
    config: SeeingConfig = encoder.config
    count = max((columns * rows for columns, rows in sizes), default=0) * config.merge_size**2
    widths = 8 * config.vision_width + config.vision_feed_forward * config.vision_inner
    score_bytes = scores(config.vision_heads, 1, count, runtime.engine.workspace.score_bytes)
    return runtime.call_bytes(encoder, count * widths * 4 + score_bytes)
