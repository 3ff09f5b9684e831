"""The shape of the tree, read from its syntax: who may import whom, and how large files and functions may grow.

Each rule is a function from a parsed file to complaints. It is run over the tree, which must give none, and over a
small wrong example, which must give one: so no rule can pass by looking at nothing.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

BASE = {"errors", "config"}
MAY_IMPORT = {
    # folder or file of tiered/: what of tiered/ it may import besides itself. Downwards only.
    "errors": set[str](),
    "config": {"errors"},
    "timeline": BASE,
    "stats": BASE | {"timeline"},
    "estimate": BASE,
    "io": BASE,
    "device": BASE,
    "schedule": BASE | {"stats"},
    "store": BASE | {"stats", "io", "device"},
    "zero": BASE | {"stats", "device", "schedule", "store"},
    "optim": BASE | {"stats", "device", "schedule", "store", "zero"},
    "checkpoint": BASE | {"stats", "device", "store", "zero", "optim"},
    "api": BASE | {"stats", "timeline", "io", "device", "schedule", "store", "zero", "optim"},
    "inspection": BASE | {"io", "optim", "checkpoint"},
    "__init__": BASE | {"stats", "estimate", "zero", "optim", "checkpoint", "inspection", "api"},
    "cli": BASE | {""},  # "" is the package itself: its public names
    "__main__": {"cli"},
}
ONLY_IN = {
    # what only some files may name: a module, and the files or folders it may be named in
    "tiered._native": ("io/", "optim/kernels.py"),
    "torch.distributed": ("zero/collectives.py",),
    "torch.distributed.checkpoint": ("checkpoint/dcp.py",),  # files, no calls between ranks
    "torch.cuda": ("device/cuda.py",),
}
FILE_LINES, FUNCTION_LINES, ARGUMENTS = 420, 70, 9


def layer(name: str) -> str:
    """The folder or file of tiered/ that holds the file `name` ("store/pool.py" -> "store")."""
    return name.split("/")[0].removesuffix(".py")


def named_modules(tree: ast.AST, name: str) -> Iterator[str]:
    """Dotted names a file imports or reaches as an attribute of torch: "torch.cuda", "tiered.store.pool"."""
    package = ["tiered", *name.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def upward_imports(tree: ast.AST, name: str) -> Iterator[str]:
    """Imports of a layer that the file's own may not know."""
    own = layer(name)
    for module in named_modules(_imports_alone(tree), name):
        parts = module.split(".")
        if parts[0] != "tiered" or parts[1:2] == ["_native"]:
            continue
        other = parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""
        if other != own and other not in MAY_IMPORT[own]:
            yield f"{name} imports {module}; {own} may import {sorted(MAY_IMPORT[own])}"


def misplaced_names(tree: ast.AST, name: str) -> Iterator[str]:
    """Mentions of what only one file may touch; of two rules the narrower one holds."""
    for module in named_modules(tree, name):
        guarded = max((guard for guard in ONLY_IN if (module + ".").startswith(guard + ".")), key=len, default=None)
        if guarded is not None and not name.startswith(places := ONLY_IN[guarded]):
            yield f"{name} uses {module}; only {', '.join(places)} may"


FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}


def homeless_tensors(tree: ast.AST, name: str) -> Iterator[str]:
    """New tensors that do not say on which device: they would go wherever the user's default device is."""
    for node in ast.walk(tree):
        made = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
        if not made or not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        if not name.startswith("cli/") and "device" not in {keyword.arg for keyword in node.keywords}:
            yield f"{name}:{node.lineno} torch.{node.func.attr} does not say on which device"


def oversized(tree: ast.Module, name: str) -> Iterator[str]:
    """Functions too long or with too many arguments, and a file without its contract."""
    if ast.get_docstring(tree) is None:
        yield f"{name} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            count = sum(argument.arg not in ("self", "cls") for argument in given)
            if lines > FUNCTION_LINES:
                yield f"{name}:{node.lineno} {node.name} has {lines} lines, at most {FUNCTION_LINES}"
            if count > ARGUMENTS:
                yield f"{name}:{node.lineno} {node.name} takes {count} arguments, at most {ARGUMENTS}"


def scattered_states(tree: ast.AST, name: str) -> Iterator[str]:
    """Classes whose `_state` is set by more than one method besides `__init__`, or is set from outside."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            methods = [node for node in owner.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
            setters = [method.name for method in methods if any(_sets_state(method))]
            changing = [method for method in setters if method != "__init__"]
            if len(changing) > 1:
                yield f"{name} {owner.name}: _state is set by {', '.join(changing)}; one method may"
    for target in _sets_state(tree):
        if not (isinstance(target.value, ast.Name) and target.value.id == "self"):
            yield f"{name}:{target.lineno} sets the _state of another object"


def _sets_state(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "_state" and isinstance(node.ctx, ast.Store):
            yield node


def _imports_alone(tree: ast.AST) -> ast.Module:
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return ast.Module(body=list(found), type_ignores=[])


def _package_files() -> list[tuple[str, ast.Module]]:
    package = ROOT / "tiered"
    found = [(path.relative_to(package).as_posix(), path) for path in sorted(package.rglob("*.py"))]
    return [(name, ast.parse(path.read_text(encoding="utf-8"))) for name, path in found]


RULES = [upward_imports, misplaced_names, homeless_tensors, oversized, scattered_states]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: object) -> None:
    files = _package_files()
    assert len(files) > 20, "the check looks in the wrong place"
    assert [complaint for name, tree in files for complaint in rule(tree, name)] == []  # type: ignore[operator]


def test_every_file_belongs_to_a_known_layer() -> None:
    unknown = {layer(name) for name, _ in _package_files()} - set(MAY_IMPORT)
    assert unknown == set(), "say in MAY_IMPORT what the new folder may import"


def test_the_layers_have_no_cycle() -> None:
    placed: set[str] = set()
    while ready := {name for name in MAY_IMPORT if name not in placed and MAY_IMPORT[name] - {""} <= placed}:
        placed |= ready
    assert placed == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (upward_imports, "store/pool.py", "from tiered.zero.group import ParamGroup"),
        (upward_imports, "store/pool.py", "from ..optim import adamw"),
        (upward_imports, "zero/group.py", "import tiered.io.swapfile"),
        (upward_imports, "schedule/plan.py", "from tiered import store"),
        (upward_imports, "errors.py", "from tiered.config import Config"),
        (upward_imports, "io/engine.py", "def late():\n    from tiered.api import shard"),
        (upward_imports, "zero/group.py", "import tiered"),
        (misplaced_names, "zero/group.py", "import torch.distributed as dist"),
        (misplaced_names, "zero/group.py", "from torch import distributed"),
        (misplaced_names, "checkpoint/dcp.py", "import torch.distributed as dist"),
        (misplaced_names, "checkpoint/dcp.py", "from torch.distributed import tensor"),
        (misplaced_names, "checkpoint/save.py", "from torch.distributed.checkpoint import metadata"),
        (misplaced_names, "zero/collectives.py", "import torch.distributed.checkpoint"),
        (misplaced_names, "device/base.py", "import torch\ntorch.cuda.synchronize()"),
        (misplaced_names, "store/store.py", "from tiered import _native"),
        (misplaced_names, "optim/adamw.py", "from .._native import adamw"),
        (homeless_tensors, "zero/group.py", "torch.empty(3, dtype=torch.float32)"),
        (oversized, "api.py", "x = 1"),
        (oversized, "api.py", "'''Contract.'''\ndef long():\n" + "    pass\n" * FUNCTION_LINES),
        (oversized, "api.py", "'''Contract.'''\ndef wide(a, b, c, d, e, *, f, g, h, i, j): pass"),
        (
            scattered_states,
            "store/block.py",
            "class Block:\n def one(self):\n  self._state = 1\n def two(self):\n  self._state = 2",
        ),
        (scattered_states, "store/store.py", "def fetch(block):\n block._state = 3"),
    ],
)
def test_the_rule_finds_what_it_forbids(rule: object, name: str, source: str) -> None:
    assert list(rule(ast.parse(source), name))  # type: ignore[operator]


def test_files_stay_short_and_open_with_their_contract() -> None:
    complaints = []
    sources = [path for folder in ("tiered", "csrc") for path in sorted((ROOT / folder).rglob("*"))]
    for path in sources:
        if path.suffix in {".py", ".h", ".cpp"}:
            lines = path.read_text(encoding="utf-8").splitlines()
            if len(lines) > FILE_LINES:
                complaints.append(f"{path.relative_to(ROOT)} has {len(lines)} lines, at most {FILE_LINES}")
            if path.suffix != ".py" and not (lines and lines[0].startswith(("//", "/*"))):
                complaints.append(f"{path.relative_to(ROOT)} does not open with a comment")
    assert complaints == []


def test_tests_and_tools_say_what_they_hold() -> None:
    tools = [path for path in (ROOT / "tools").iterdir() if path.is_file()]
    scripts = [path for path in tools if path.read_text(encoding="utf-8").startswith("#!/usr/bin/env python")]
    files = sorted((ROOT / "tests").rglob("*.py")) + scripts
    bare = [path for path in files if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None]
    assert [str(path.relative_to(ROOT)) for path in bare] == []
