"""docs/trouble.md quotes messages that the program prints."""

from __future__ import annotations

import re

from support.rules import ROOT

PAGE = ROOT / "docs" / "trouble.md"
ROW = re.compile(r"^\| ([^|]+) \|", re.MULTILINE)
FEWEST = 4  # words of a message that the program has in this order
# Messages with a name or a number after every third word, and what the program has of them
SHORT = {
    "non-finite value at decoder.up_blocks.1..., operation conv2d, float16, ...; use --precision fp16,vae=fp32": (
        ": non-finite value at "
    ),
    "warning: the negative prompt has no effect at guidance 1": " has no effect ",
    "not done within 600 seconds": "not done within ",
}


def sources() -> str:
    """The text of the program, with strings over several lines joined."""
    files = [path for room in ("cli", "common", "backends") for path in sorted((ROOT / room).rglob("*.py"))]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in files))


def lost(page: str, program: str) -> list[str]:
    """The messages in the first column of the page's tables, none of whose parts is in the program."""
    messages = [text for cell in ROW.findall(page) for text in re.findall(r"`([^`]+)`", cell)]
    quoted = [text for text in messages if " " in text and not text.startswith(("qwenimg ", "-", "mlx "))]
    assert len(quoted) > 30
    return [text for text in quoted if not any(part in program for part in parts(text))]


def parts(message: str) -> list[str]:
    """All that is FEWEST words long in a message: names and numbers that it fills in are only in some of them."""
    words = message.split()
    return [" ".join(words[i : i + FEWEST]) for i in range(max(1, len(words) - FEWEST + 1))]


def test_every_quoted_message_is_in_the_program() -> None:
    program = sources()
    assert [
        text for text in lost(PAGE.read_text(encoding="utf-8"), program) if SHORT.get(text, text) not in program
    ] == []


def test_a_message_that_changed_is_seen() -> None:
    page = PAGE.read_text(encoding="utf-8").replace("the model is loading", "this sleeps for an hour")
    assert {*lost(page, sources())} - {*SHORT} == {"this sleeps for an hour"}
