"""Messages that are passed on, and the warnings that recipes have of them."""

from __future__ import annotations

from qwenimg.common.runtime.runtime import WARNINGS, Notices


def test_warnings_are_of_a_picture_or_of_all() -> None:
    heard: list[tuple[str, str]] = []
    notices = Notices(lambda kind, text: heard.append((kind, text)))
    notices("stage", "opening")
    notices("warning", "of the model")
    with notices.of_picture():
        notices("warning", "of the first")
        notices("warning", "of the first")
        notices("notice", "x")
        assert notices.warnings == ["of the model", "of the first"]
    notices("warning", "in between")
    with notices.of_picture():
        assert notices.warnings == ["of the model", "in between"]
        notices("warning", "of the model")
        assert notices.warnings == ["of the model", "in between"], "each once"
    assert heard.count(("warning", "of the first")) == 2, "all are passed on"


def test_a_recipe_has_so_many_and_no_more() -> None:
    notices = Notices(lambda kind, text: None)
    with notices.of_picture():
        for i in range(1000):
            notices("warning", str(i))
        assert len(notices.warnings) == WARNINGS
