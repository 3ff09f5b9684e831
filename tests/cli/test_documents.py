"""The documents tell the truth: the example of the README runs as printed, its tree names the files there are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_of_the_readme_runs_and_stays_within_its_budgets(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert found is not None
    check = "\npeaks = tiered.stats(model).peak_bytes\ntiered.close(model, keep_weights=False)"
    program = found[1].replace("\ntiered.close(model, keep_weights=False)", check)
    assert program != found[1]
    program += "\nassert peaks['host'] <= 64 << 20 and peaks['device'] <= 16 << 20 and peaks['nvme'] > 0, peaks\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1", "2", "3", "4"]
    assert list(tmp_path.iterdir()) == []


def test_the_tree_of_the_readme_names_every_file_and_no_other() -> None:
    block = README.split("## The tree")[1].split("```")[1]
    told: set[str] = set()
    folder = ""
    for line in block.splitlines():
        if line.strip():
            name = line.split()[0]
            inside = line.startswith("  ")
            folder = folder if inside else name if name.endswith("/") else ""
            told.add(folder + name if inside else name)
    kinds = {"csrc": "*.[ch]*", "tiered": "*.[pjch][yst]*", "tools": "*", "docs": "*.md"}
    there = {path.relative_to(ROOT).as_posix() for top, kind in kinds.items() for path in (ROOT / top).rglob(kind)}
    there = {name for name in there if (ROOT / name).is_file() and "__pycache__" not in name}
    listed = {name for name in told if name.split("/")[0] in kinds and not name.endswith("/")}
    assert listed == {name for name in there if not name.endswith("/__init__.py")} | {"tiered/__init__.py"}


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "measurements").glob("*.json")), ids=lambda path: path.name)
def test_a_measurement_tells_no_path_of_the_machine_it_was_made_on(path: Path) -> None:
    assert not re.findall(r'"(?:/|~|[A-Z]:\\)[^"]*"', path.read_text(encoding="utf-8"))
