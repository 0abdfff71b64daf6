"""Text states of prompts with pictures, which Qwen-Image-Edit's text encoder sees in the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.shape import Shape
from qwenimg.common.families.qwen_image.variants import VISION, QwenVariant
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks.encoders.qwen_vl_vision import PicturePlace, QwenVLVisionConfig
from qwenimg.common.parts.texts.states import PromptTexts, States
from qwenimg.common.pictures import patches
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array, PictureEncoder
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.stages import Stage

PAD = "<|image_pad|>"
UNCOUNTED = 512  # tokens that a prompt counts as, besides its pictures, if they are not counted


@dataclass(frozen=True)
class SeenPicture:
    """A picture as patches are made of it, by its hash."""

    sha256: str
    pixels: Uint8 = field(compare=False, repr=False)


@dataclass(frozen=True)
class EditPrompt:
    """A prompt with the pictures that are seen with it."""

    text: str
    pictures: tuple[SeenPicture, ...]


class EditTexts(PromptTexts[EditPrompt]):
    """The text states [1 S C] of prompts with pictures."""

    feed_forward = 3  # it is gated

    def __init__(self, residents: Residents, checkpoint: Checkpoint, variant: QwenVariant):
        super().__init__(residents, checkpoint.texts)
        self.variant, self.template = variant, variant.template
        [self._tokenizer] = checkpoint.tokenizers.values()

    @property
    def encoder(self) -> Component:
        [component] = self.encoders.values()
        return component

    @property
    def config(self) -> QwenVLVisionConfig:
        config: QwenVLVisionConfig = self.encoder.config
        return config

    def fill(self, prompt: EditPrompt) -> tuple[list[int], list[PicturePlace]]:
        """Return the ids of `prompt` in the template, with one for each slot of a picture, and the pictures' places.
        Raises UsageError."""
        check_prompt(prompt.text)
        tokenizer, pad = self._tokenizer.tokenizer, self._tokenizer.tokenizer.special(PAD)
        before = (f"Picture {i}: {VISION}" if self.variant.numbered else VISION for i in self._numbers(prompt))
        filled = tokenizer.ids(self.template.text.replace("{}", "".join(before) + prompt.text))
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

    def states(self, prompts: Sequence[EditPrompt]) -> list[Array]:
        """Return the states of each prompt on the device."""
        return [self.runtime.engine.array(states) for (states,) in self.arrays(prompts)]

    def shapes(self, key: EditPrompt) -> list[Shape]:
        return [(1, len(self.fill(key)[0]) - self.template.dropped, self.config.state_size)]

    def tokens(self, key: EditPrompt) -> list[object]:
        """Return the ids, the hashes of the pictures, and the number of states that are dropped."""
        return [self.fill(key)[0], [picture.sha256 for picture in key.pictures], self.template.dropped]

    def cut(self, prompt: EditPrompt) -> str:
        """Return nothing: no prompt is cut."""
        return ""

    def lengths(self, prompts: Sequence[EditPrompt], counted: bool) -> list[int]:
        return [count - self.template.dropped for count in self._token_counts(prompts, counted)]

    def encodings(self, prompts: Sequence[EditPrompt], counted: bool) -> list[Stage]:
        return [self._encoding(prompts, max(self._token_counts(prompts, counted)))]

    def encode(self, keys: Sequence[EditPrompt]) -> Iterator[States]:
        """Encode `keys` one after the other; a picture that several have is seen once."""
        slots: dict[str, Array] = {}

        def encoded(encoder: PictureEncoder, prompt: EditPrompt) -> States:
            for picture in prompt.pictures:
                if picture.sha256 not in slots:
                    slots[picture.sha256] = encoder.slots(*self._patches(picture))
            ids, places = self.fill(prompt)
            asked = ids, places, [slots[picture.sha256] for picture in prompt.pictures]
            states = encoder.encode(*asked)
            self.runtime.check_finite(states, "text encoder", "text", lambda: encoder.encode(*asked))
            used = self.runtime.engine.numpy(states)[:, self.template.dropped :]
            return (np.ascontiguousarray(used, np.float32),)

        yield from self.run(self._encoding(keys, max(self._token_counts(keys, True))), encoded, keys)

    def _numbers(self, prompt: EditPrompt) -> range:
        return range(1, len(prompt.pictures) + 1)

    def _slots(self, prompt: EditPrompt) -> list[tuple[int, int]]:
        """Return the columns and rows of slots of each picture. Raises UsageError."""
        slot = self.config.slot
        shapes = (picture.pixels.shape for picture in prompt.pictures)
        sizes = (patches.whole_blocks(width, height, slot) for height, width, _ in shapes)
        return [(width // slot, height // slot) for width, height in sizes]

    def _patches(self, picture: SeenPicture) -> tuple[np.ndarray, int, int]:
        config = self.config
        return patches.patches(picture.pixels, config.patch_size, config.merge_size, config.taps_in_time)

    def _token_counts(self, prompts: Sequence[EditPrompt], counted: bool) -> list[int]:
        """Return the number of tokens of each filled template."""
        if counted:
            return [len(self.fill(prompt)[0]) for prompt in prompts]
        slots = (sum(columns * rows for columns, rows in self._slots(prompt)) for prompt in prompts)
        return [self.template.dropped + UNCOUNTED + count for count in slots]

    def _encoding(self, prompts: Sequence[EditPrompt], length: int) -> Stage:
        """Return the stage that encodes prompts of at most `length` tokens, and their pictures before that.

        In the vision tower each patch has two residuals, q, k and v with q and k in float32 too, and the feed-forward's
        three widths."""
        stage, config = self.stage(self.encoder, 1, length), self.config
        largest = max((columns * rows for prompt in prompts for columns, rows in self._slots(prompt)), default=0)
        count, limit = largest * config.merge_size**2, self.runtime.engine.workspace.score_bytes
        widths = 8 * config.vision_width + 3 * config.vision_inner
        vision = count * widths * 4 + scores(config.vision_heads, 1, count, limit)
        split = stage.splits[0]
        activations = max(split.activations, self.runtime.call_bytes(self.encoder, vision))
        return replace(stage, splits=(replace(split, activations=activations),))
