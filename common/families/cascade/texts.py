"""The text of Stable Cascade: the last states of OpenCLIP's bigG without its last norm, those of padding too, which no
token sees, and the pooled vector."""

from __future__ import annotations

from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.parts.texts.clip_texts import ClipKey, ClipTexts
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents


class CascadeTexts(ClipTexts):
    """The states [77n C] and the pooled vector [P] of prompts."""

    def __init__(self, residents: Residents, checkpoint: Checkpoint):
        super().__init__(residents, checkpoint, penultimate=False)

    def used_states(self, config: CLIPConfig, clip_skip: int) -> tuple[int, bool]:
        skipped, _ = super().used_states(config, clip_skip)
        return skipped, False

    def tokens(self, key: ClipKey) -> list[object]:
        """Return them with a word that tells these states from those behind the norm."""
        return [*super().tokens(key), "not normed"]
