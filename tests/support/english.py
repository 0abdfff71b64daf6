"""The rules of plain English as functions of source text; each returns what breaks it, and nothing when all is well."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from support import rules

# First words of functions' docstrings. A new verb is added here, in the imperative.
VERBS = frozenset(
    re.findall(
        r"\w+",
        """
    Add Advance Announce Answer Append Apply Attend Begin Bring Build Call Cast Check Choose Claim Clean Climb Close
    Compare Compile Compute Concatenate Connect Convert Convolve Copy Count Create Cut Decide Declare Decode Delete
    Describe Do Download Draw Drop Embed Encode End Escape Evaluate Exchange Execute Fill Find Finish Fit Fix Follow
    Free Generate Get Give Guard Hash Have Hold Ignore Interpolate Judge Keep Kill Leave Let Link List Load Lock
    Look Make Map Mark Measure Meet Move Multiply Name Note Observe Open Pack Pad Parse Place Plan Predict Prefer
    Prepare Print Put Quantize Raise Read Receive Record Redirect Remove Rename Render Repeat Replace Report
    Resample Return Round Run Sample Save Say Scale Search Send Serve Set Share Shift Show Skip Sort Split Spread Stack
    Stand Start Stop Store Stream Stretch Switch Sync Take Tell Test Time Turn Unpack Update Validate Verify Wait
    Watch Wrap Write Yield
    """,
    )
)
# First words of no noun: a relative clause or a genitive whose noun the reader would have to guess.
NO_NOUN = frozenset(re.findall(r"\w+", "As By For How If In Of On That What When Where Whether Which Why With"))
# Names that say that a variable holds something, and not what.
EMPTY_NAMES = frozenset({"found", "made", "own", "said"})


def docstrings(source: str) -> list[str]:
    """Docstrings of functions that do not begin with a verb, and of modules, classes and properties that begin with no
    noun.

    A function of arrays may have its shapes as its docstring: `[B L C] -> [B L H D]`."""
    module = ast.get_docstring(rules.parsed(source)) or "A module."
    return [f"module: {module.splitlines()[0]}"] * (_first(module) in NO_NOUN) + [
        f"{scope}.{node.name}: {text.splitlines()[0]}".lstrip(".")
        for scope, node, text in _documented(source)
        if (_is_bad_noun(text) if _is_noun(node) else not text.startswith("[") and _first(text) not in VERBS)
    ]


def empty_names(source: str) -> list[str]:
    """Assignments to a name that does not say what it holds."""
    return rules.found(
        source, lambda node: isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES
    )


def classes_by_name(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the files that define each class, by name. Twins are one file; networks may name their layers alike."""
    places: dict[str, set[str]] = defaultdict(set)
    for file, source in files.items():
        if "/networks/" in file and file.startswith("backends/"):
            continue
        place = file.replace("backends/mlx/", "backends/torch/")
        for node in ast.walk(rules.parsed(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(place)
    return {name: sorted(files) for name, files in places.items()}


def duplicates(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the class names that stand in more than one file, with those files."""
    return {name: places for name, places in classes_by_name(files).items() if len(places) > 1}


def _documented(source: str) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for scope, node in rules.within(source):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            text := ast.get_docstring(node)
        ):
            yield scope, node, text


def _is_noun(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether `node` is a class or a property."""
    return isinstance(node, ast.ClassDef) or "property" in _last_words(node.decorator_list)


def _last_words(nodes: Iterable[ast.expr]) -> str:
    return " ".join(rules.last(node).replace("_", " ") for node in nodes)


def _is_bad_noun(text: str) -> bool:
    return _first(text) in NO_NOUN | VERBS - {"Plan", "Sample", "Test", "Time", "Store", "Stack"}


def _first(text: str) -> str:
    return text.split()[0].rstrip(".,:;`")
