"""Every parameter of every public call, by its signature, with values of every kind: a new one is tried by itself.

A value is taken where the parameter's annotation has its kind, and else refused in one line that names the parameter.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwenimg
from qwenimg import Pipeline, QwenimgError, Result, UsageError


class Stranger:
    """A class, and a kind of object, that nothing takes."""


class NoPath:
    """A path that is no text: `os.fspath` refuses it."""

    def __fspath__(self) -> int:
        return 5


def function(*given: object) -> None:
    """A function."""


# Of each value the words of annotations that take it.
VALUES: list[tuple[Any, tuple[str, ...]]] = [
    (None, ("None",)),
    *((value, ("bool",)) for value in (True, False)),
    *((value, ("int", "float")) for value in (0, 3, -1, 10**19, 10**400)),
    *((value, ("float",)) for value in (0.5, -0.5, 1e308, float("nan"), float("inf"))),
    *((value, ("str",)) for value in ("", "x", "nul\0", "x" * 100_000, "\ud800", "\x1b[2J")),
    (Path("x"), ("Path",)),
    *((value, ("Sequence", "list", "tuple")) for value in ([], ["x"], [1], [None], [[1], [1, 2]], (1, 2))),
    *((value, ("Mapping", "dict")) for value in ({}, {"x": 1})),
    (function, ("Callable",)),
    *((value, ()) for value in (b"x", object(), Stranger, Stranger(), NoPath(), 1j, {1})),
    (np.int64(3), ("int", "float")),
    (np.float32(2), ("float",)),
    (np.bool_(True), ("bool",)),
    *((np.zeros(shape, kind), ("ndarray", "NDArray")) for shape in (0, 3, (1, 16, 4, 4)) for kind in "fd"),
    (np.zeros(()), ("ndarray", "NDArray", "float")),
    *((np.zeros((1, 16, 32, 32), kind), ("ndarray", "NDArray")) for kind in ("f", "?", "D", "M8[s]", "U2", "O")),
    *((np.zeros((32, 32, 3), kind), ("ndarray", "NDArray")) for kind in ("u1", "f", "O")),
    (np.array([1, "x"], object), ()),
    (np.array(None, object), ()),
]
SMALL: dict[str, Any] = {"prompt": "a red circle", "width": 32, "height": 32, "steps": 1}
# What the annotation of an option does not say: files are given as texts and paths.
PICTURE = ("str", "Path", "ndarray")
ELSEWHERE = {
    "lora": ("list", "tuple", "str", "Path"), "embedding": ("list", "tuple", "str", "Path"),
    "image": (*PICTURE, "list", "tuple"), "mask": PICTURE,
    "max_memory": ("int",), "control": ("list", "tuple", "str"), "outpaint": ("list", "tuple", "str"),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    opened = qwenimg.load("shapes", "cpu", "fp32")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def result(pipe: Pipeline) -> Result:
    return pipe(**SMALL)


def parameters(function_: Callable[..., Any]) -> list[inspect.Parameter]:
    return [one for one in inspect.signature(function_).parameters.values() if one.name != "self"]


def tried(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a call gave, and the line in which it was refused: anything else that it raises is a fault."""
    try:
        return call(), None
    except QwenimgError as error:
        return None, str(error)


def check(call: Callable[..., Any], given: dict[str, Any], one: inspect.Parameter) -> int:
    """Tries every value for one parameter; how many were refused."""
    refused = 0
    words = str(one.annotation) + "".join(ELSEWHERE.get(one.name, ()))
    for value, kinds in VALUES:
        label = f"{one.name}={type(value)!s} {value!r:.60}"
        try:
            made, line = tried(lambda value=value: call(**given | {one.name: value}))  # type: ignore[misc]
        except Exception as error:
            raise AssertionError(label) from error
        if line is None:
            assert any(kind in words for kind in kinds), f"{label} was taken"
            if isinstance(made, Pipeline):
                made.close()
            continue
        refused += 1
        assert line.isprintable() and len(line) < 500, (label, line)
        named = one.name in line or one.name.replace("_", "-") in line or one.name.rstrip("s") in line
        assert named or any(kind in words for kind in kinds), (label, line)
    return refused


@pytest.mark.parametrize("one", parameters(qwenimg.load), ids=lambda one: one.name)
@pytest.mark.sample(6)
def test_load(one: inspect.Parameter) -> None:
    assert check(qwenimg.load, {"model": "shapes", "backend": "cpu"}, one) > 20


@pytest.mark.parametrize("one", parameters(Pipeline.check), ids=lambda one: one.name)
@pytest.mark.sample(6)
def test_what_a_call_asks_for(pipe: Pipeline, one: inspect.Parameter) -> None:
    """`stream` refuses before its first step is asked for, and a call draws only what `check` takes."""
    given = SMALL | ({"image": np.zeros((32, 32, 3), np.uint8)} if one.name == "mask" else {})
    refused = {method.__name__: check(method, given, one) for method in (pipe.check, pipe.stream, pipe.estimate)}
    assert min(refused.values()) > 20 and len(set(refused.values())) == 1, refused


def test_a_call_refuses_as_its_check_does(pipe: Pipeline) -> None:
    for name, value in (
        ("few_steps", 5),
        ("latents", [[1], [1, 2]]),
        ("latents", range(10**15)),
        ("lora", np.zeros(3)),
        ("seed", True),
    ):
        with pytest.raises(UsageError, match=name.replace("_", "[-_]")):
            pipe(**SMALL | {name: value})


OTHERS: dict[str, dict[str, Any]] = {
    "prepare": {"prompts": ["a red circle"]},
    "adapt": {},
    "compile": {},
    "resolve": {"asked": {}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods(pipe: Pipeline, name: str) -> None:
    for one in parameters(getattr(Pipeline, name)):
        assert check(getattr(pipe, name), OTHERS[name], one) > 20


def test_every_public_method_is_tried() -> None:
    public = {name for name in vars(Pipeline) if not name.startswith("_") and callable(getattr(Pipeline, name))}
    without = {"headline", "plan_preview", "fit_preview", "free_transformer", "close"}  # arguments
    assert public == {*OTHERS, "check", "stream", "estimate", *without}


@pytest.mark.parametrize("name", ["save", "png"])
def test_a_result(result: Result, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"save": {"path": "a.png", "overwrite": True}, "png": {}}[name]
    for one in parameters(getattr(Result, name)):
        assert check(getattr(result, name), given, one) > 20
    assert all(entry.suffix == ".png" for entry in tmp_path.iterdir()), "and no temporary file"


# A closed pipeline


def test_every_method_of_a_closed_pipeline_says_so() -> None:
    closed = qwenimg.load("shapes", "cpu", "fp32")
    closed.close()
    closed.close()
    arguments = {"prompt": "a ring", "prompts": ["a ring"], "asked": {}}
    public = [name for name in vars(Pipeline) if not name.startswith("_") and callable(getattr(Pipeline, name))]
    for name in {*public, "__call__"} - {"close", "headline"}:
        method = getattr(closed, name)
        needed = {one.name: arguments[one.name] for one in parameters(method) if one.default is one.empty}
        with pytest.raises(UsageError, match="this pipeline is closed"):
            method(**{key: value for key, value in needed.items() if key in arguments})
    assert "closed" in repr(closed) and os.linesep not in closed.headline()
