"""The bounds, targets and table of tools/gpu_check, on figures written by hand: needs no GPU."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check_report", ROOT / "tools" / "gpu_check_report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(step_s: float = 10.0) -> dict[str, Any]:
    step = {
        "parameters": 10**9,
        "tokens": 32768,
        "tokens_per_s": 32768 / step_s,
        "step_s": step_s,
        "compute_s": 8.0,
        "peak_allocated_bytes": 2**34,
        "adam_bytes": 28 * 10**9,
        **{f"needed_{way}_bytes": 40 * 10**9 for way in ("h2d", "d2h", "read", "write")},
        **{f"moved_{way}_bytes": 20 * 10**9 for way in ("h2d", "d2h", "read", "write")},
    }
    rates = {f"{whose}_{way}_bytes_per_s": 5e9 for whose in ("ours", "torch") for way in ("h2d", "d2h", "both")}
    return {
        "machine": {"gpu": "card", "cores": 16, "ram_bytes": 2**37},
        "sections": {"offload": {"outcome": "ok", "seconds_s": 60.0}},
        "link": {
            **rates,
            "asked_bytes": 2**31,
            "ours_locked_bytes": 2**31,
            "torch_locked_bytes": 2**32,
            "register_s_per_gib": 0.3,
        },
        "memory": {
            "dram_bytes_per_s": 7e9,
            **dict.fromkeys(("adam_bytes_per_s", "copy_bytes_per_s", "triad_bytes_per_s"), 7e9),
            "adam_share_of_dram": 1.0,
        },
        "drive": {"read_bytes_per_s": 5e9, "write_bytes_per_s": 4e9, "mixed_bytes_per_s": 6e9, "direct": True},
        "offload_32768": step,
    }


def test_the_bound_is_the_slowest_resource(report: ModuleType) -> None:
    bound = report.bounds(found())["offload_32768"]
    assert bound["terms_s"] == pytest.approx({"compute": 8.0, "h2d": 4.0, "d2h": 4.0, "update": 4.0, "drive": 20 / 3})
    assert (bound["binding"], bound["share_of_bound"]) == ("compute", pytest.approx(0.8))


def test_what_was_not_probed_bounds_nothing_and_is_named(report: ModuleType) -> None:
    figures = found()
    del figures["link"], figures["drive"]
    bound = report.bounds(figures)["offload_32768"]
    assert set(bound["terms_s"]) == {"compute", "update"}
    assert bound["not_probed"] == ["link", "drive"]


@pytest.mark.parametrize(("step_s", "met"), [(8.5, True), (9.5, False)])
def test_the_share_of_the_bound_has_a_target(report: ModuleType, step_s: float, met: bool) -> None:
    figures = found(step_s)
    figures["bounds"] = report.bounds(figures)
    assert report.targets(figures) == {"offload at 32k >= 90% of bound": met}


def test_deepspeed_is_compared_at_the_same_size_only(report: ModuleType) -> None:
    figures = found()
    figures["deepspeed_offload_32768"] = {"parameters": 10**9, "step_s": 12.0}
    assert report.targets(figures) == {"offload at 32k >= 1.3 x DeepSpeed": False}
    figures["deepspeed_offload_32768"]["parameters"] += 1
    assert report.targets(figures) == {}


def test_tests_that_all_skipped_have_not_passed(report: ModuleType) -> None:
    figures = {"tests": {"passed": 0, "failed": 0, "errors": 0, "skipped": 1}}
    assert report.targets(figures) == {"tests pass": False}


def test_the_table_says_what_binds_and_what_was_missed(report: ModuleType) -> None:
    figures = found(9.5)
    figures["bounds"] = report.bounds(figures)
    figures |= {"targets": report.targets(figures), "targets_judged": True}
    text = report.table(figures)
    assert "84% of compute" in text
    assert "MISSED            offload at 32k" in text
    assert "2.00 GiB, torch 4.00, asked 2.00" in text
