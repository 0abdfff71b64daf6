"""The chat templates of other language models than the text encoders, and the choice for any model.

Unusual here:

- Gemma has no turn for an instruction: it stands before the question. LLaMA 2 has it inside the question's turn.
- LLaMA 2 has no special tokens for its turns: there a typed `[/INST]` cannot be told from the template's.
- Phi-3's special tokens drop the white space behind them, so that its template has none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qwenimg.common.base.safe_files import bad
from qwenimg.common.prompts.chat import CHATML, QWEN3, QWEN_VL, Chat
from qwenimg.common.prompts.language import LanguageTokenizer

_HEADER, _HEADED, _TURN = "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"
LLAMA3 = Chat(
    name="LLaMA 3",
    special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    text=f"<|begin_of_text|>{_HEADER}system{_HEADED}{{system}}{_TURN}"
    f"{_HEADER}user{_HEADED}{{user}}{_TURN}{_HEADER}assistant{_HEADED}",
    turn=f"{_TURN}{_HEADER}assistant{_HEADED}{{answer}}{_TURN}{_HEADER}user{_HEADED}{{user}}",
    stops=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
)
GEMMA = Chat(
    name="Gemma",
    special=("<bos>", "<start_of_turn>", "<end_of_turn>"),
    text="<bos><start_of_turn>user\n{system}\n\n{user}<end_of_turn>\n<start_of_turn>model\n",
    turn="<end_of_turn>\n<start_of_turn>model\n{answer}<end_of_turn>\n<start_of_turn>user\n{user}",
    stops=("<end_of_turn>", "<eos>"),
)
PHI3 = Chat(
    name="Phi-3",
    special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    text="<|system|>{ system}<|end|><|user|>{ user}<|end|><|assistant|>",
    turn="<|end|><|assistant|>{ answer}<|end|><|user|>{ user}",
    stops=("<|end|>", "<|endoftext|>"),
)
_ENDS = ("<s>", "</s>")
_TURNS = (*_ENDS, "[INST]", "[/INST]")
MISTRAL_SYSTEM = Chat(
    name="Mistral with an instruction",
    special=(*_TURNS, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    text="<s>[SYSTEM_PROMPT]{system}[/SYSTEM_PROMPT][INST]{user}[/INST]",
    turn="[/INST]{answer}</s>[INST]{user}",
    stops=("</s>",),
)
MISTRAL = Chat(
    name="Mistral",
    special=_TURNS,
    text="<s>[INST]{system}\n\n{user}[/INST]",
    turn="[/INST]{answer}</s>[INST]{user}",
    stops=("</s>",),
)
MISTRAL_PIECES = replace(MISTRAL, text="<s>[INST]{ system}\n\n{user}[/INST]", turn="[/INST]{ answer}</s>[INST]{ user}")
LLAMA2 = Chat(
    name="LLaMA 2",
    special=_ENDS,
    text="<s> [INST] <<SYS>>\n{system}\n<</SYS>>\n\n{user} [/INST]",
    turn=" [/INST]{ answer} </s><s> [INST]{ user}",
    stops=("</s>",),
)


@dataclass(frozen=True, kw_only=True)
class ChatRow:
    """Models with a chat template, which have its special tokens. kinds: their model types, none: any; pieces: whether
    their vocabulary is SentencePiece's, None: either."""

    chat: Chat
    kinds: frozenset[str] = frozenset()
    pieces: bool | None = None


CHATS = (
    ChatRow(chat=QWEN3, kinds=frozenset({"qwen3"})),
    ChatRow(chat=QWEN_VL, kinds=frozenset({"qwen2_5_vl", "qwen3_vl"})),
    ChatRow(chat=CHATML),
    ChatRow(chat=LLAMA3),
    ChatRow(chat=GEMMA),
    ChatRow(chat=PHI3),
    ChatRow(chat=MISTRAL_SYSTEM, pieces=False),
    ChatRow(chat=MISTRAL, pieces=False),
    ChatRow(chat=MISTRAL_PIECES, pieces=True),
    ChatRow(chat=LLAMA2, pieces=True),
)
"""The known templates: of a model the first counts that fits."""


def find_chat(kind: str, tokenizer: LanguageTokenizer) -> Chat:
    """Return the chat template of a model of the type `kind` with this tokenizer. Raises ModelError if none is
    known."""
    for row in CHATS:
        fits = row.pieces in (None, tokenizer.is_of_pieces) and (not row.kinds or kind in row.kinds)
        if fits and tokenizer.has(*row.chat.special):
            return row.chat
    names = ", ".join(dict.fromkeys(row.chat.name for row in CHATS))
    raise bad(tokenizer.file, f"has the special tokens of no known chat template ({names}): give a model made to chat")
