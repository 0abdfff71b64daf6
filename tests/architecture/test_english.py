"""Plain English as far as a check can hold it: first words of docstrings, empty names, one class for one name."""

from __future__ import annotations

import pytest
from support import english
from support.rules import name_of, sources

# Fields whose names are keys of a file's format.
KEYS = frozenset(f"common/parity/passport/passport_schema.py: StationJson: {key}" for key in ("made", "own"))


def product() -> dict[str, str]:
    """Return the sources of the product by their names."""
    paths = sources("common", "backends", "cli", "src")
    return {name_of(path): path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("rule", [english.docstrings, english.empty_names])
def test_docstrings_and_names_of_the_product(rule) -> None:
    files = product()
    assert len(files) > 330
    faults = {f"{name}: {fault}" for name, source in files.items() for fault in rule(source)}
    assert sorted(faults - KEYS) == []


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('def f():\n    """Return the sum."""', 'def f():\n    """What is summed."""'),
        ('def f():\n    """[B L C] -> [B L H D]."""', 'def f():\n    """Of the values, the sum."""'),
        ('def f():\n    """Read it. Raises ModelError."""', 'def f():\n    """Reads it."""'),
        ('def f():\n    """Return whether x is finite."""', 'def f():\n    """Whether x is finite."""'),
        ("def f():\n    pass", 'async def f():\n    """The sum."""'),
        ('"""A list."""', '"""What is in a list."""'),
        ('class A:\n    """A list of numbers."""', 'class A:\n    """What has a list."""'),
        ('class A:\n    """The sum."""', 'class A:\n    """Return a list."""'),
        (
            'class A:\n    @property\n    def f(self):\n        """The sum."""',
            'class A:\n    @property\n    def f(self):\n        """Of the values."""',
        ),
        (
            'class A:\n    @cached_property\n    def f(self):\n        """The sum."""',
            'class A:\n    def f(self):\n        """The sum."""',
        ),
    ],
)
def test_the_check_of_docstrings(good: str, bad: str) -> None:
    assert english.docstrings(good) == []
    assert len(english.docstrings(bad)) == 1


def test_the_check_of_names() -> None:
    assert english.empty_names("missing = 1\nx.found = 2\nf(found=3)") == []
    assert english.empty_names("def f():\n    found = 1") == ["f: found"]
    assert english.empty_names("for made in x: pass") == [": made"]


def test_a_class_name_stands_once() -> None:
    assert english.duplicates(product()) == {}


def test_the_check_of_class_names() -> None:
    assert english.duplicates({"common/a.py": "class A: pass", "cli/b.py": "class B: pass"}) == {}
    assert english.duplicates({"common/a.py": "class A: pass", "cli/b.py": "class A: pass"}) == {
        "A": ["cli/b.py", "common/a.py"]
    }
    twins = {f"backends/{name}/stream.py": "class A: pass" for name in ("torch", "mlx")}
    assert english.duplicates(twins) == {}
