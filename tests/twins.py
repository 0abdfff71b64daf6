"""Two files that are to be one model in two frameworks, compared as syntax trees.

`skeleton` is what a reader sees of a file: its classes, functions, arguments and attributes, in order. `body` is every
statement of it, in words that both frameworks share.
"""

from __future__ import annotations

import ast

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# The same thing by another name. Keys are whole dotted names.
SHARED = {
    "torch.nn.Module": "Module",
    "mlx.nn.Module": "Module",
    "torch.nn.Linear": "Module",
    "torch.nn.Embedding": "Module",
    "torch.nn.Conv2d": "Module",
    "torch.nn.Identity": "Identity",
    "mlx.nn.Identity": "Identity",
    "torch.cat": "concatenate",
    "mx.concatenate": "concatenate",
    "torch.dtype": "Dtype",
    "mx.Dtype": "Dtype",
    "torch.Tensor": "Array",
    "Tensor": "Array",
    "mx.array": "Array",
    "forward": "__call__",
    "TorchEngine": "Engine",
    "MLXEngine": "Engine",
}
FRAMEWORK_PACKAGES = ("torch", "mlx", "qwenimg.backends.torch", "qwenimg.backends.mlx")

Skeleton = list[str]


def skeleton(source: str, private: bool = True) -> Skeleton:
    """One line for each class, function, argument list and `self.` attribute, in the order of the file.

    Without `private`, names that begin with an underscore are left out (but not __init__ and its like).
    """
    lines: Skeleton = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            lines.append(f"class {_shared(node.name)}({', '.join(_shared(ast.unparse(base)) for base in node.bases)})")
            for item in node.body:
                lines += _member(item, _shared(node.name), private)
        elif isinstance(node, FUNCTIONS):
            lines += _function(node, "", private)
    return lines


def _member(node: ast.stmt, owner: str, private: bool) -> Skeleton:
    if isinstance(node, FUNCTIONS):
        return _function(node, f"{owner}.", private)
    if isinstance(node, ast.AnnAssign):
        return [f"{owner}.{ast.unparse(node.target)}"]
    if isinstance(node, ast.Assign):
        return [f"{owner}.{ast.unparse(target)}" for target in node.targets]
    return []


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str, private: bool) -> Skeleton:
    hidden = node.name.startswith("_") and not node.name.startswith("__")
    if hidden and not private:
        return []
    name = f"{owner}{_shared(node.name)}"
    arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    lines = [f"{name}({', '.join(arguments)})"]
    seen: dict[str, None] = {}
    for part in ast.walk(node):
        targets = (
            part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(part, ast.AnnAssign) else []
        )
        for target in targets:
            for item in ast.walk(target):
                if isinstance(item, ast.Attribute) and ast.unparse(item.value) == "self":
                    seen[item.attr] = None
    return lines + [f"{name}: self.{attribute}" for attribute in seen]


def _shared(name: str) -> str:
    return SHARED.get(name, name)


# Bodies


def body(source: str) -> list[str]:
    """Every statement of a model file, one text for each function, class or constant at the top, without imports of
    frameworks, documentation and annotations, in shared words. A list of layers is a list in both."""
    tree = _Shared().visit(ast.parse(source))
    return [ast.unparse(ast.fix_missing_locations(node)) for node in tree.body]


class _Shared(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST | None:
        if isinstance(node, (ast.Attribute, ast.Name)) and ast.unparse(node) in SHARED:
            return ast.Name(SHARED[ast.unparse(node)])
        return super().visit(node)

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        return None if all(alias.name.startswith(FRAMEWORK_PACKAGES) for alias in node.names) else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if (node.module or "").startswith(FRAMEWORK_PACKAGES) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.returns = _shared(node.name), None
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return node.args[0] if ast.unparse(node.func) == "torch.nn.ModuleList" else node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        return ast.keyword("axis" if node.arg == "dim" else node.arg, node.value)
