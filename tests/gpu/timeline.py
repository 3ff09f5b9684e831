"""What a GPU did when, read from a profile: kernels, copies, and the driver's calls.

Reads the trace that torch.profiler exports, as the categories in it (`kernel`, `gpu_memcpy`, `cuda_runtime`) are
documented and the same over torch's versions. Times are microseconds.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Span = tuple[float, float]
MARK = "profiled work"


@dataclass(frozen=True)
class Timeline:
    """Spans of kernels; spans, names and bytes of copies; names of the driver's calls."""

    kernels: list[Span]
    copies: list[tuple[Span, str, int]]
    calls: list[str]

    @classmethod
    def of(cls, work: Any, folder: Path) -> "Timeline":
        """Profile `work()` and all it has started."""
        path = folder / "trace.json"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the profiler's own, which differ from version to version
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                with record_function(MARK):
                    work()
                torch.cuda.synchronize()
            profiler.export_chrome_trace(str(path))
        return cls.read(json.loads(path.read_text())["traceEvents"])

    @classmethod
    def read(cls, events: list[dict[str, Any]]) -> "Timeline":
        """From a trace's events; calls are those made while the mark was open, by any thread."""
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for event in sorted((e for e in events if "dur" in e), key=lambda e: e["ts"]):
            by_kind.setdefault(event.get("cat", ""), []).append(event)
        marks = [span(event) for event in by_kind.get("user_annotation", []) if event["name"] == MARK]
        start, end = marks[0]
        return cls(
            kernels=[span(event) for event in by_kind.get("kernel", [])],
            copies=[(span(e), e["name"], int(e["args"].get("bytes", 0))) for e in by_kind.get("gpu_memcpy", [])],
            calls=[event["name"] for event in by_kind.get("cuda_runtime", []) if start <= event["ts"] <= end],
        )

    def copies_of_the_link(self) -> list[tuple[Span, str, int]]:
        """Copies between host and device."""
        return [copy for copy in self.copies if "HtoD" in copy[1] or "DtoH" in copy[1]]

    def copy_share_under_kernels(self) -> float:
        """Of the time of the link's copies, the share during which a kernel ran."""
        spans = [copy for copy, _, _ in self.copies_of_the_link()]
        whole = sum(end - start for start, end in spans)
        return sum(covered(one, merged(self.kernels)) for one in spans) / whole

    def compute_us(self) -> float:
        """Time during which some kernel ran."""
        return sum(end - start for start, end in merged(self.kernels))


def span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def merged(spans: list[Span]) -> list[Span]:
    """The union of spans, in order and apart from each other."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def covered(one: Span, others: list[Span]) -> float:
    """How much of a span lies under `others`, which are apart from each other."""
    return sum(max(0.0, min(one[1], end) - max(one[0], start)) for start, end in others)
