"""The rules of the architecture as functions of source text; each returns what breaks it, and nothing when all is well.

`test_architecture.py` runs each on the project, and on a small bad example that it must catch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What may be called while a module is imported, besides our frozen dataclasses and named tuples: it makes a constant or
# describes a function, and touches nothing.
AT_IMPORT = {
    "TypeVar": "a type",
    "abstractmethod": "describes a method that a subclass has",
    "get_args": "a constant",
    "each_picture": "a constant: a frozen dataclass",
    "fits.text_states": "a constant: a named tuple",
    "fits.patches": "a constant: a named tuple",
    "whole_model": "a constant: a frozen dataclass",
    "block_scales": "a table of constants",
    "ParamSpec": "a type",
    "found_once": "describes a function, whose results are kept",
    "ContextVar": "a name for what each context has of its own",
    "re.compile": "a constant",
    "frozenset": "a constant",
    "set": "a constant",
    "bytes": "a constant",
    "range": "a constant",
    "MappingProxyType": "a constant",
    "dict.fromkeys": "a constant",
    "math.factorial": "a constant",
    "Fraction": "a constant",
    "torch.library.custom_op": "makes a function of ours known to torch by a name",
    "np.float32": "a constant",
    "getattr": "a framework's dtype by its name",
    "field": "a field of a dataclass",
    "replace": "a variant of a constant",
    "option": "a field of a dataclass, with what is known of it",
    "required": "the same",
    "options_of": "a table of constants",
    "inserted": "a table of constants",
    "by_name": "a table turned round",
    "flipped": "the same",
    "Path": "a path, which asks the file system nothing",
    "dataclass": "a decorator",
    "property": "a decorator",
    "cached_property": "a decorator",
    "staticmethod": "a decorator",
    "classmethod": "a decorator",
    "overload": "a decorator, for type checkers",
    "scheduler.setter": "a decorator",
    "contextmanager": "a decorator",
    "cache": "a decorator",
    "wraps": "a decorator",
    "fused": "a decorator of backends/mlx/ops/functions.py, which compiles when first called",
    "ops.computes": "a decorator of backends/torch/ops/cpu.py",
    "call_options.described": "a decorator, which describes a function",
    "torch.inference_mode": "a decorator",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CASTS = {"astype", "float", "double", "half", "bfloat16", "type", "type_as"}
CREATORS = {"array", "asarray", "tensor", "as_tensor"}
PRODUCTS = {"matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "block_masked_mm", "einsum", "tensordot"}
PRODUCTS |= {"scaled_dot_product_attention", "conv2d", "conv3d", "conv_general"}
FRAMEWORKS = {"torch", "mlx", "cuda", "metal", "mps"}
FOLDERS = {"common", "backends", "cli"}
# First words of a docstring that stand for no thing and no act.
NO_NOUN = {"As", "By", "For", "How", "If", "In", "Of", "On", "That", "What", "When", "Where", "Whether", "Which", "Why"}


def sources(*folders: str) -> list[Path]:
    """Every Python file in these folders of the project."""
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of names; what is called or indexed in it is left out."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return ""


def last(node: ast.AST) -> str:
    return dotted(node).rpartition(".")[2]


@cache
def parsed(source: str) -> ast.Module:
    """Of a file that many rules look at: nobody changes it."""
    return ast.parse(source)


@cache
def within(source: str) -> list[tuple[str, ast.AST]]:
    """Every node, with the qualified name of the function or class that it is in ("" at the top)."""

    def walk(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST]]:
        yield scope, node
        inner = f"{scope}.{node.name}".lstrip(".") if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else scope
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner)

    return list(walk(parsed(source), ""))


def found(source: str, broken: Callable[[ast.AST], bool]) -> list[str]:
    """`function: code` of every node of `source` that is `broken`."""
    return [f"{scope}: {ast.unparse(node)}" for scope, node in within(source) if broken(node)]


# Rule 4: casts


def casts(source: str) -> list[str]:
    """Calls that change a dtype. `.to` is one unless all that it is given is a device."""
    return found(source, _is_cast)


def _is_cast(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    keywords = {keyword.arg for keyword in node.keywords}
    if isinstance(node.func, ast.Attribute) and node.func.attr in CASTS:
        return True
    if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
        return not (all(map(_is_device, node.args)) and keywords <= {"device", "non_blocking", "copy"})
    return last(node.func) in CREATORS and ("dtype" in keywords or len(node.args) > 1)


def _is_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return dotted(node.func) == "torch.device"
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value not in ("float", "half", "double", "bfloat16")
    return last(node).lstrip("_") == "device"


def weight_dtypes(source: str) -> list[str]:
    """Where a weight is asked for its dtype: `layer.dtype` says what a layer computes in, however it is kept."""

    def broken(node: ast.AST) -> bool:
        asked = isinstance(node, ast.Attribute) and node.attr in ("dtype", "itemsize")
        return asked and last(node.value) in ("weight", "bias", "gamma")

    return found(source, broken)


# Products of matrices, which have their precision in ops/ only


def products(source: str) -> list[str]:
    """Matrix products and what is made of them, by operator or by name."""
    return found(source, _is_product)


def _is_product(node: ast.AST) -> bool:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Call):
        return False
    functional = dotted(node.func).endswith(("F.linear", "functional.linear"))  # `self.linear` is a layer
    return functional or last(node.func) in PRODUCTS


# Rule 6: strict, always


def lenient(source: str) -> list[str]:
    """`strict=False` anywhere but in zip, where it says that lengths may differ."""

    def broken(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and dotted(node.func) != "zip"
            and any(k.arg == "strict" and not _is_true(k.value) for k in node.keywords)
        )

    return found(source, broken)


def _is_true(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


# Rule 7: no bfloat16 through numpy


def to_numpy(source: str) -> list[str]:
    """Arrays of a backend that become numpy without passing `at_least_float32`, since numpy has no bfloat16."""

    def broken(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        taken = dotted(node.func) in ("np.array", "np.asarray") or _method(node) in ("numpy", "tolist", "__array__")
        return taken and not any(last(n.func) == "at_least_float32" for n in ast.walk(node) if isinstance(n, ast.Call))

    return found(source, broken)


def _method(node: ast.Call) -> str:
    """The method that is called on something computed or held, `x.f().numpy()`; "" for a function of `ops` or of a
    class's own."""
    attribute = isinstance(node.func, ast.Attribute) and dotted(node.func.value) not in ("self", "self.engine", "ops")
    return node.func.attr if attribute and isinstance(node.func, ast.Attribute) else ""


# Rule 8: no work at import


@cache
def constant_classes() -> frozenset[str]:
    """The frozen dataclasses and named tuples of the product, whose making is a constant."""
    nodes = (node for path in sources("common", "backends", "cli") for node in parsed(path.read_text("utf-8")).body)
    return frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef) and _is_constant(node))


def _is_constant(node: ast.ClassDef) -> bool:
    frozen = [
        keyword
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and last(decorator.func) == "dataclass"
        for keyword in decorator.keywords
        if keyword.arg == "frozen" and _is_true(keyword.value)
    ]
    return bool(frozen) or "NamedTuple" in map(last, node.bases)


def work_at_import(source: str) -> list[str]:
    """What runs while the module is imported and is neither a definition nor a constant made by `AT_IMPORT`."""
    tree = parsed(source)
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:  # `_model = partial(KnownModel, family="x")` is the class with some of its fields
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and dotted(node.value.func) == "partial":
            classes |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return [found for statement in tree.body for found in _at_import(statement, classes)]


def _at_import(node: ast.AST, classes: set[str]) -> Iterator[str]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
            yield from _at_import(call, classes)
        parts = node.body if isinstance(node, ast.ClassDef) else [*node.args.defaults, *node.args.kw_defaults]
        for part in parts:
            yield from _at_import(part, classes) if part else ()
        return
    if isinstance(node, ast.Lambda) or _is_type_checking(node):
        return
    if isinstance(node, ast.Call) and not _allowed_at_import(node, classes):
        yield ast.unparse(node)
        return
    if isinstance(node, ast.stmt) and not _is_plain(node):
        yield ast.unparse(node)
        return
    for child in ast.iter_child_nodes(node):
        yield from _at_import(child, classes)


def _allowed_at_import(node: ast.Call, classes: set[str]) -> bool:
    name = dotted(node.func)  # click.* describes commands and options
    module, _, short = name.rpartition(".")
    name = short if module in ("contextlib", "dataclasses", "functools", "typing", "types") else name
    joins = (
        isinstance(node.func, ast.Attribute) and node.func.attr == "join" and isinstance(node.func.value, ast.Constant)
    )
    of_a_table = name.endswith((".values", ".items"))
    classes = classes | constant_classes()
    if name == "partial":
        return dotted(node.args[0]) in AT_IMPORT.keys() | classes
    return name in AT_IMPORT or name in classes or joins or of_a_table or name.startswith("click.")


def _is_plain(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(isinstance(name, (ast.Name, ast.Tuple)) for name in targets)
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING" and not node.orelse


# Rules 1 and 9: common names no framework


def frameworks(source: str) -> list[str]:
    """Frameworks in code: in a name, or in text that is not documentation. Whole words, and parts of names."""
    tree = parsed(source)
    documentation = {
        id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    }

    def words(node: ast.AST) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            return node.value
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return node.name
        return getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or ""

    texts = [(scope, words(node)) for scope, node in within(source)]
    split = [
        (scope, text, set("".join(c if c.isalnum() else " " for c in text.lower()).split())) for scope, text in texts
    ]
    return [f"{scope}: {text}" for scope, text, parts in split if parts & FRAMEWORKS]


# Rule 10: scripts, tests and second copies


def scripts(source: str) -> list[str]:
    """`if __name__ == ...`, and imports of a test framework."""

    def broken(node: ast.AST) -> bool:
        if isinstance(node, ast.If):
            return any(dotted(part) == "__name__" for part in ast.walk(node.test))
        return bool({"pytest", "unittest", "hypothesis"} & imported(node))

    return found(source, broken)


def bare_imports(source: str) -> list[str]:
    """Imports of `common`, `backends` or `cli` by that name: each would be a second copy of the module."""
    return found(source, lambda node: bool(FOLDERS & imported(node)))


def imported(node: ast.AST) -> set[str]:
    """The top-level packages that one statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {(node.module or "").partition(".")[0]}
    if isinstance(node, ast.Call) and last(node.func) in ("import_module", "__import__", "find_spec") and node.args:
        name = node.args[0]
        return (
            {name.value.partition(".")[0]} if isinstance(name, ast.Constant) and isinstance(name.value, str) else set()
        )
    return set()


# Plain English, as far as a check can hold it


def riddles(source: str) -> list[str]:
    """Docstrings that begin with a relative clause or a genitive: the reader has to guess its noun."""
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    texts = [ast.get_docstring(node) or "" for _, node in within(source) if isinstance(node, documented)]
    return [text.splitlines()[0] for text in texts if text.partition(" ")[0] in NO_NOUN]


# Files that import each other in a circle


def circles(files: dict[str, str]) -> list[list[str]]:
    """Groups of files that import each other in a loop, by name. An import within a function, or for types, counts.

    files: sources by name from the root, `common/base/text.py`. An import of a package alone reaches its `__init__`."""
    modules = {_module(name): name for name in files}
    arrows = {name: _imports(_module(name), source, modules) - {name} for name, source in files.items()}
    reached = {name: _reached(name, arrows) for name in files}
    loops = {frozenset({name} | {other for other in reached[name] if name in reached[other]}) for name in files}
    return sorted(sorted(loop) for loop in loops if len(loop) > 1)


def _module(name: str) -> str:
    """`qwenimg.common.base.text` of `common/base/text.py`, `qwenimg` of `src/qwenimg/__init__.py`."""
    path = name.removeprefix("src/qwenimg/").removesuffix(".py").removesuffix("__init__").rstrip("/")
    return f"qwenimg.{path.replace('/', '.')}".rstrip(".")


def _imports(module: str, source: str, modules: dict[str, str]) -> set[str]:
    """The files of `modules` that `source` imports: for `from a import b` the module a.b if there is one, else a."""
    reached = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            reached |= {modules[alias.name] for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom):
            folder = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*folder, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]
            reached |= {modules[name] for name in names if name in modules}
    return reached


def _reached(name: str, arrows: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [name]
    while ahead:
        new = arrows[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen
