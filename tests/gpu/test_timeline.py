"""The reading of a profile, on traces written by hand: needs no GPU."""

from gpu.timeline import MARK, Timeline, covered, merged


def event(cat: str, name: str, start: float, end: float, nbytes: int = 0) -> dict[str, object]:
    return {"cat": cat, "name": name, "ts": start, "dur": end - start, "args": {"bytes": nbytes}}


def test_spans_that_touch_or_overlap_are_one() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_a_span_is_covered_by_the_parts_that_lie_under_others() -> None:
    assert covered((1, 10), [(0, 2), (4, 5), (9, 20)]) == 3


def test_the_share_counts_only_copies_over_the_link() -> None:
    timeline = Timeline.read(
        [
            event("user_annotation", MARK, 0, 20),
            event("kernel", "product", 0, 10),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 15, 100),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 10, 100),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 50, 90, 100),
        ]
    )
    assert timeline.copy_share_under_kernels() == 0.75
    assert timeline.compute_us() == 10


def test_the_profiles_own_waits_are_no_calls_of_the_work() -> None:
    calls = ["cudaDeviceSynchronize", "cudaLaunchKernel", "cudaStreamSynchronize", "cudaDeviceSynchronize"]
    trace = [event("cuda_runtime", name, at, at + 0.5) for at, name in enumerate(calls)]
    assert Timeline.read([*trace, event("user_annotation", MARK, 0.9, 2.6)]).calls == calls[1:3]
