"""A text encoder, or another language model, as a writer."""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.base.errors import ModelError
from qwenimg.common.networks.encoders.decoder import DecoderConfig
from qwenimg.common.networks.encoders.qwen import Qwen3VLConfig, QwenVLConfig
from qwenimg.common.networks.encoders.vision_tower import TowerConfig
from qwenimg.common.parts.texts import levels
from qwenimg.common.parts.texts.states import RESIDENT
from qwenimg.common.parts.texts.writing import Writer
from qwenimg.common.pictures.patches import QWEN2_VL, QWEN3_VL
from qwenimg.common.prompts.chat import CHATML, QWEN3, QWEN_VL, Chat
from qwenimg.common.prompts.chats import find_chat
from qwenimg.common.prompts.language import LanguageTokenizer
from qwenimg.common.prompts.rewriting import OURS, Protocol
from qwenimg.common.runtime.checkpoint import Checkpoint, Component, TokenizerFiles
from qwenimg.common.runtime.residents import Residents

OTHER = "language model"  # the name in memory of one that is not the text encoder of the model that draws


def own_writer(residents: Residents, checkpoint: Checkpoint, seeing: bool = False, resident: str = RESIDENT) -> Writer:
    """Return the writer by the text encoder of `checkpoint`. seeing: about pictures too. resident: the name of its
    network in memory. Raises ModelError if it cannot write, or see."""
    name, part = text_encoder(checkpoint)
    tokenizer = checkpoint.tokenizers[name]
    whole, chat = level(part, seeing), CHATML
    if isinstance(tokenizer.tokenizer, LanguageTokenizer):  # of a model other than Qwen's
        chat = find_chat("", tokenizer.tokenizer)
    elif not isinstance(whole.config, QwenVLConfig | Qwen3VLConfig) and tokenizer.tokenizer.has(*QWEN3.special):
        chat = QWEN3
    return other_writer(residents, whole, tokenizer, chat, whole.config.eos_token_id, seeing, resident)


def other_writer(
    residents: Residents,
    part: Component,
    tokenizer: TokenizerFiles,
    chat: Chat,
    stops: Sequence[int],
    seeing: bool = False,
    resident: str = OTHER,
    protocol: Protocol = OURS,
) -> Writer:
    """Return the writer by a language model. chat: the text around what is asked without pictures; stops: the tokens
    that end a text, (): those of `chat`; protocol: how it is asked to rewrite a prompt. Raises ModelError if it cannot
    write, or see."""
    whole = level(part, seeing)
    form = None
    if isinstance(whole.config, TowerConfig):
        chat, form = QWEN_VL, QWEN3_VL if isinstance(whole.config, Qwen3VLConfig) else QWEN2_VL
    ends = [token for token in stops if 0 <= token < whole.config.vocab_size]
    return Writer(residents, whole, tokenizer, chat, form, ends, resident, protocol)


def text_encoder(checkpoint: Checkpoint) -> tuple[str, Component]:
    """Return the text encoder that is a language model, else any, and its name. Raises ModelError for none."""
    texts = list(checkpoint.texts.items())
    if not texts:
        raise ModelError("the model has no text encoder: give a language model by --with")
    return next(((name, part) for name, part in texts if isinstance(part.config, DecoderConfig)), texts[0])


def level(part: Component, seeing: bool) -> Component:
    """Return a language model with its head, and to see pictures with its vision tower. Raises ModelError."""
    return levels.describing(part) if seeing else levels.writing(part)
