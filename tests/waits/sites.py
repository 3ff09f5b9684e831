"""The waits of the runtime, found in its source, and a way to import the package with one of them missing.

A wait is a statement that is nothing but a call of one of `VERBS`, anywhere in the package but in `BESIDE`.
With MISSING="zero/group.py:123" in the environment, and `waits/site` on Python's path, every process imports the
package without the statement at that line.

Invariant: the source on disk is never touched.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "tiered"
VERBS = {
    *("abandon", "drain", "order", "quiet", "settle", "settled", "wait"),
    *("synchronize", "wait_event", "wait_stream"),  # of torch.cuda
}
BESIDE = (  # the command waits for nothing, the emulation is what the tests run on, a simulation has a clock of its own
    *("cli/", "device/emulated.py", "schedule/clock.py", "schedule/optimum.py", "schedule/simulate.py"),
    "schedule/updates.py",
)
VARIABLE = "MISSING"


class Site(NamedTuple):
    """One wait: its file, line, the function around it, and its text."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def sites() -> list[Site]:
    """Every wait of the package, in order of file and line."""
    found: list[Site] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file.startswith(BESIDE):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                found += [Site(file, n.lineno, function.name, ast.unparse(n)) for n in _own(function) if is_wait(n)]
    return sorted(found)


def is_wait(node: ast.AST) -> bool:
    """Whether a statement is nothing but a wait."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called = node.value.func
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in VERBS


def _own(function: ast.FunctionDef) -> list[ast.AST]:
    """The nodes of a function that are not in a function inside it."""
    found: list[ast.AST] = []
    ahead: list[ast.AST] = list(function.body)
    while ahead:
        node = ahead.pop()
        found.append(node)
        if not isinstance(node, ast.FunctionDef):
            ahead += ast.iter_child_nodes(node)
    return found


class _Drop(ast.NodeTransformer):
    def __init__(self, line: int) -> None:
        self.line = line
        self.dropped = 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if node.lineno == self.line and is_wait(node):
            self.dropped += 1
            return ast.copy_location(_left(node.value), node)
        return self.generic_visit(node)


def _left(call: ast.expr) -> ast.stmt:
    """What stays of a wait: nothing, but that what it waits for is popped, so that a loop over it still ends."""
    awaited = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    pops = isinstance(awaited, ast.Call) and isinstance(awaited.func, ast.Attribute) and awaited.func.attr == "pop"
    return ast.Expr(awaited) if pops else ast.Pass()


def without(file: str, line: int) -> CodeType:
    """The code of a file of the package without the wait at `line`. Raises ValueError where there is none."""
    path = PACKAGE / file
    drop = _Drop(line)
    tree = ast.fix_missing_locations(drop.visit(ast.parse(path.read_text(encoding="utf-8"))))
    if drop.dropped != 1:
        raise ValueError(f"{file}:{line} is no wait")
    return compile(tree, str(path), "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Imports one module of the package from other code."""

    def __init__(self, module: str, code: CodeType) -> None:
        self._module = module
        self._code = code

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        return importlib.util.spec_from_loader(name, _Loader(self._code), origin=self._code.co_filename)


class _Loader(importlib.abc.Loader):
    def __init__(self, code: CodeType) -> None:
        self._code = code

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._code.co_filename
        exec(self._code, module.__dict__)


def _install(site: str) -> None:
    file, _, line = site.rpartition(":")
    module = "tiered." + file.removesuffix(".py").replace("/", ".")
    if module in sys.modules:
        raise RuntimeError(f"{module} was imported before its wait could be taken out")
    sys.meta_path.insert(0, _Finder(module, without(file, int(line))))


if site := os.environ.get(VARIABLE):
    _install(site)
