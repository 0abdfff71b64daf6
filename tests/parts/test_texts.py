"""Text states of any kind of text encoder: what is encoded when, what is kept, and what is forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np

from qwenimg.common.parts.texts.states import States, Texts

EACH = 4 * 10  # bytes of the states of one letter


class Letters(Texts[str]):
    """Each key is a letter, with ten numbers; `calls` says what was encoded together."""

    feed_forward = 2

    def __init__(self, letters: int = 100):
        component = SimpleNamespace(plan=SimpleNamespace(same_deltas=lambda other: other == "as before"))
        super().__init__(SimpleNamespace(runtime=SimpleNamespace(prompts=None)), {"text_encoder": component})  # type: ignore[arg-type, dict-item]
        self.budget, self.calls = letters * EACH, list[str]()

    def shapes(self, key: str) -> list[tuple[int, ...]]:
        return [(2, 3), (4,)]

    def tokens(self, key: str) -> list[object]:
        return [key]

    def encode(self, keys: Sequence[str]) -> Iterator[States]:
        self.calls.append("".join(keys))
        for key in keys:
            yield np.full((2, 3), ord(key), np.float32), np.full(4, ord(key), np.float32)

    def firsts(self, keys: Sequence[str]) -> str:
        return "".join(chr(int(states[0][0, 0])) for states in self.arrays(keys))


def test_each_is_encoded_once() -> None:
    texts = Letters()
    assert texts.firsts("abba") == "abba" and texts.firsts("cab") == "cab"
    assert texts.calls == ["ab", "c"]
    assert texts.has("abc") and not texts.has("ad")
    assert [one.shape for one in texts.arrays("a")[0]] == texts.shapes("a")


def test_what_is_announced_is_encoded_with_the_first_as_far_as_the_budget_goes() -> None:
    texts = Letters(3)
    texts.announce("abcdefg")
    assert texts.calls == ["abc"]
    assert texts.firsts("ab") == "ab" and texts.calls == ["abc"]
    assert texts.firsts("d") == "d" and texts.calls[1:] == ["def"], "from there on, for what was drawn is not needed"
    assert not texts.has("a")
    assert texts.firsts("xyzw") == "xyzw" and texts.calls[2:] == ["xyzw"], "what is needed is encoded whatever it takes"


def test_nothing_announced_needs_no_text_encoder() -> None:
    texts = Letters()
    texts.announce("")
    assert texts.calls == []


def test_other_loras_forget_the_states_and_not_what_is_announced() -> None:
    texts = Letters()
    texts.announce("ab")
    for plan, calls in (("as before", ["ab"]), ("changed", ["ab", "ab"])):
        texts.renew({"text_encoder": SimpleNamespace(plan=plan)})  # type: ignore[dict-item]
        texts.encoders = Letters().encoders
        assert texts.firsts("a") == "a" and texts.calls == calls
    texts.close()
    assert texts.firsts("a") == "a" and texts.calls[2:] == ["a"]
