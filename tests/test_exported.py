"""The public names: sorted, all of them documented, and no others."""

import re
from pathlib import Path
from types import ModuleType

import tiered

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "api.md"


def test_the_exported_names_are_sorted_classes_before_functions() -> None:
    assert list(tiered.__all__) == sorted(tiered.__all__, key=lambda name: (name[0].islower(), name))


def test_the_documentation_has_a_heading_for_each_exported_name_and_for_no_other() -> None:
    headings = re.findall(r"^### `(\w+)", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(headings) == sorted(set(tiered.__all__) - {"__version__"})


def test_nothing_else_is_public() -> None:
    public = {
        name for name, value in vars(tiered).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(tiered.__all__) - {"__version__"}


def test_each_exported_class_and_function_has_a_docstring() -> None:
    bare = [name for name in tiered.__all__ if name != "__version__" and not getattr(tiered, name).__doc__]
    assert bare == []
