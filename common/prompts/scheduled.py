"""Prompts whose text changes during a run, as users of Stable Diffusion write them.

Grammar and effects follow the AUTOMATIC1111 web UI, for which prompts are shared:

- `[from:to:when]` is `from` up to `when` and then `to`; either may be empty, and `[to:when]` is `[:to:when]`;
- `when` with a point is a share of all calls of the model, else the number of a call;
- `[a|b|c]` is a, b and c in turn, one call each; an option may be empty;
- all this nests; a backslash makes the next character plain text, and stays there for `weighted`;
- brackets that are none of this are text, and so is the whole prompt if it has a `|` outside of alternations or ends
  with a lone backslash.

The calls of a run are counted from 0 and texts end with calls, as there, so that call 0 belongs to the first text too:
`[a|b]` is a, a, b, a, b and `[a:b:3]` is a in four calls. A sampler with two calls of the model in a step has twice as
many as steps (`Sampler.calls`), and a run from an image, which leaves out the first steps, as many as a whole one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

from qwenimg.common.base.errors import UsageError

MAX_CHANGES = 500  # schedules and alternations of a prompt
MAX_TEXTS = 256  # different ones that a prompt becomes

_TOKEN = re.compile(r"\\.|[\[\]():|]|[^\\\[\]():|]+")
_WHEN = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class TimedText:
    """A text of a prompt, up to the call of the model with the number `last`."""

    last: int
    text: str


@dataclass(frozen=True)
class _Schedule:
    before: Nodes
    after: Nodes
    when: str

    def last(self, calls: int) -> int:
        """Return the number of the last call that has `before`."""
        number = float(self.when)
        return int(max(min(number * calls if "." in self.when else number, calls), -1))

    def at(self, call: int, calls: int) -> Nodes:
        return self.before if call <= self.last(calls) else self.after


@dataclass(frozen=True)
class _Alternation:
    options: Sequence[Nodes]

    def at(self, call: int, calls: int) -> Nodes:
        return self.options[(call - 1) % len(self.options)]


Node: TypeAlias = "str | _Schedule | _Alternation"
Nodes: TypeAlias = "Sequence[Node]"


def changes(prompt: str) -> bool:
    """Return whether `prompt` has a schedule or an alternation."""
    return any(not isinstance(node, str) for node in _parse(prompt))


def first_change(prompt: str) -> str | None:
    """Return the first schedule or alternation as it is written, or None. Raises UsageError for too many."""
    tokens, divisions = _tokens(prompt), _divisions(prompt)
    if not divisions:
        return None
    start = min(divisions)
    return "".join(tokens[start : divisions[start][-1] + 1])


def texts(prompt: str, calls: int) -> tuple[TimedText, ...]:
    """Return the texts of `prompt` in a run of `calls` calls, in order. Raises UsageError for too many."""
    nodes = _parse(prompt)
    timed, different = list[TimedText](), dict[str, str]()  # one string for all calls that have it
    for last in sorted(_ends(nodes, calls)):
        text = _text(nodes, last, calls)
        text = different.setdefault(text, text)
        if len(different) > MAX_TEXTS:
            raise UsageError(f"the prompt becomes more than {MAX_TEXTS} different texts; give fewer alternations")
        timed.append(TimedText(last, text))
    return tuple(timed)


def text_at(texts: Sequence[TimedText], call: int) -> str:
    """Return the text of a call, counted from 0; after the end, the last."""
    return next((one.text for one in texts if call <= one.last), texts[-1].text)


def _ends(nodes: Nodes, calls: int) -> set[int]:
    """Return the calls after which a text may change."""
    ends, rest = {calls}, list(nodes)
    while rest:
        node = rest.pop()
        if isinstance(node, _Schedule):
            last = node.last(calls)
            ends |= {last} if last >= 1 else set()
            rest += [*node.before, *node.after]
        elif isinstance(node, _Alternation):
            ends |= set(range(1, calls + 1))
            rest += [inner for option in node.options for inner in option]
    return ends


def _text(nodes: Nodes, call: int, calls: int) -> str:
    parts, rest = list[str](), list(reversed(nodes))
    while rest:
        node = rest.pop()
        if isinstance(node, str):
            parts.append(node)
        else:
            rest.extend(reversed(node.at(call, calls)))
    return "".join(parts)


# The grammar


@dataclass
class _Bracket:
    """An open bracket, and the text read since."""

    index: int
    separators: list[int] = field(default_factory=list)
    raw: bool = False  # True: it has brackets or colons inside that are plain text


def _parse(prompt: str) -> Nodes:
    """Return the nodes of `prompt`; a single text for one that is not of the grammar."""
    divisions = _divisions(prompt)
    return _nodes(_tokens(prompt), divisions) if divisions else [prompt]


def _tokens(prompt: str) -> list[str]:
    return _TOKEN.findall(prompt)


def _divisions(prompt: str) -> dict[int, list[int]]:
    """Return the schedules and alternations of `prompt`, none for one that is not of the grammar: for each opening
    bracket its separators and its closing one. Raises UsageError for too many."""
    tokens = _tokens(prompt)
    if len(prompt) != sum(map(len, tokens)):  # a lone backslash
        return {}
    divisions = _changes(tokens)
    divided = {index for indices in divisions.values() for index in indices}
    if any(token == "|" and index not in divided for index, token in enumerate(tokens)):
        return {}
    if len(divisions) > MAX_CHANGES:
        raise UsageError(f"the prompt has {len(divisions)} schedules and alternations, at most {MAX_CHANGES} are read")
    return divisions


def _changes(tokens: Sequence[str]) -> dict[int, list[int]]:
    """Return the schedules and alternations: for each opening bracket its separators and its closing one."""
    divisions: dict[int, list[int]] = {}
    opened: list[_Bracket] = [_Bracket(-1)]
    for index, token in enumerate(tokens):
        top = opened[-1]
        if token in ("[", "("):
            opened.append(_Bracket(index))
        elif token in (":", "|"):
            top.separators.append(index)
        elif token in ("]", ")"):
            if top.index < 0 or tokens[top.index] + token not in ("[]", "()"):
                top.raw = True
                continue
            opened.pop()
            kind = _kind(tokens, top, index)
            opened[-1].raw |= kind == "raw"
            if kind == "change":
                divisions[top.index] = [*top.separators, index]
    return divisions


def _kind(tokens: Sequence[str], bracket: _Bracket, end: int) -> str:
    """Return the kind of the bracket that closes at `end`: "change", "plain" or "raw" (text)."""
    separators = bracket.separators
    kinds = {tokens[index] for index in separators}
    if bracket.raw or len(kinds) > 1:
        return "raw"
    if not kinds:
        return "plain"
    if tokens[bracket.index] == "(":
        return "plain" if kinds == {":"} and len(separators) == 1 else "raw"
    if kinds == {"|"}:
        return "change"
    when = tokens[separators[-1] + 1].strip() if end - separators[-1] == 2 else ""
    return "change" if len(separators) <= 2 and _WHEN.fullmatch(when) else "raw"


def _nodes(tokens: Sequence[str], divisions: dict[int, list[int]]) -> Nodes:
    """Return the nodes of `tokens` with `divisions` from `_divisions`; all other brackets are text."""
    ends = {index for indices in divisions.values() for index in indices}
    opened: list[tuple[int, list[list[Node]]]] = [(-1, [[]])]
    for index, token in enumerate(tokens):
        start, sections = opened[-1]
        if index in divisions:
            opened.append((index, [[]]))
        elif index not in ends:
            sections[-1].append(token)
        elif index != divisions[start][-1]:
            sections.append([])
        else:
            opened.pop()
            opened[-1][1][-1].append(_change(tokens[divisions[start][0]], [_joined(one) for one in sections]))
    return _joined(opened[0][1][0])


def _joined(nodes: Nodes) -> Nodes:
    """Return `nodes` with neighbouring texts as one."""
    groups = groupby(nodes, lambda node: isinstance(node, str))
    return [one for is_text, run in groups for one in (["".join(map(str, run))] if is_text else run)]


def _change(separator: str, sections: Sequence[Nodes]) -> _Schedule | _Alternation:
    if separator == "|":
        return _Alternation(sections)
    *before, after, [when] = sections
    return _Schedule(before[0] if before else (), after, str(when).strip())
