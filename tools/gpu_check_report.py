"""What `tools/gpu_check` makes of its figures: the bound of each step, the targets, and the table.

Pure functions of the figures, with nothing to import, so that a kept JSON can be read again:

    python tools/gpu_check_report.py gpu_check.json        prints the table of an earlier run
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
OVERHEAD_SHARE, BOUND_SHARE, DEEPSPEED_RATIO = 0.03, 0.90, 1.3  # the targets
STEPS = ("offload_32768", "offload_8192", "offload_64", "offload_32", "nvme")  # the last of them; offload by tokens


def bounds(found: Figures) -> Figures:
    """For each measured step: seconds of each term that was probed, the bound, which term it is, and the share."""
    result: Figures = {}
    for name in (name for name in STEPS if "step_s" in found.get(name, {})):
        terms = bound_terms(found[name], found)
        binding = max(terms, key=lambda term: terms[term])
        result[name] = {
            "terms_s": terms,
            "bound_s": terms[binding],
            "binding": binding,
            "share_of_bound": terms[binding] / found[name]["step_s"],
            "not_probed": [part for part in ("link", "memory", "drive") if part not in found],
        }
    return result


def bound_terms(step: Figures, found: Figures) -> dict[str, float]:
    """Seconds that each resource needs at least, from bytes that must move and rates that were measured."""
    link, memory, drive = (found.get(name, {}) for name in ("link", "memory", "drive"))
    terms = {"compute": step["compute_s"]}
    for way in ("h2d", "d2h"):
        rates = [link[f"{whose}_{way}_bytes_per_s"] for whose in ("ours", "torch") if link]
        if rates:
            terms[way] = fewest(step, way) / max(rates)
    if memory:
        terms["update"] = step["adam_bytes"] / memory["dram_bytes_per_s"]
    if drive and step["needed_read_bytes"]:
        read, write = fewest(step, "read"), fewest(step, "write")
        terms["drive"] = max(
            read / drive["read_bytes_per_s"],
            write / drive["write_bytes_per_s"],
            (read + write) / max(drive[f"{way}_bytes_per_s"] for way in ("mixed", "read", "write")),
        )
    return terms


def fewest(step: Figures, way: str) -> float:
    """Of the bytes a formula needs and those that were moved, the fewer: neither waste nor caching flatters a bound."""
    return float(min(step[f"needed_{way}_bytes"], step[f"moved_{way}_bytes"]))


def targets(found: Figures) -> dict[str, bool]:
    """Which targets were met, of those that this run can judge."""
    judged: dict[str, bool] = {}
    if "passed" in found.get("tests", {}):
        tests = found["tests"]
        judged["tests pass"] = tests["passed"] > 0 and not tests["failed"] and not tests["errors"]
    if "overhead_share" in found.get("resident", {}):
        judged[f"resident overhead <= {OVERHEAD_SHARE:.0%}"] = found["resident"]["overhead_share"] <= OVERHEAD_SHARE
    share = found.get("bounds", {}).get("offload_32768", {}).get("share_of_bound")
    if share is not None:
        judged[f"offload at 32k >= {BOUND_SHARE:.0%} of bound"] = share >= BOUND_SHARE
    theirs, ours = found.get("deepspeed_offload_32768"), found.get("offload_32768")
    if theirs and ours and theirs["parameters"] == ours["parameters"]:
        ratio = theirs["step_s"] / ours["step_s"]
        judged[f"offload at 32k >= {DEEPSPEED_RATIO} x DeepSpeed"] = ratio >= DEEPSPEED_RATIO
    return judged


def table(found: Figures) -> str:
    """The figures for people, a line each."""
    lines = [_machine(found)]
    for name, part in found["sections"].items():
        said = part["outcome"].splitlines()  # a failure ends with what went wrong; the JSON has all of it
        outcome = said[0] if len(said) == 1 else f"{said[0].split(';')[0]}; {said[-1]}"
        lines.append(f"  {name:<10} {outcome} ({part['seconds_s']:.0f} s)")
    lines += ["", *_link(found.get("link")), *_memory(found.get("memory")), *_drive(found.get("drive"))]
    lines += [*_resident(found), *_steps(found)]
    if found.get("tests"):
        tests = found["tests"]
        counts = ", ".join(f"{tests[key]} {key}" for key in ("passed", "failed", "errors", "skipped"))
        measured = "".join(f"; {name} {value}" for name, value in tests["measured"].items())
        lines.append(f"tests/gpu         {counts}{measured}")
        lines += [f"                  {name}" for name in tests["failures"]]
    lines += [f"{'met   ' if met else 'MISSED'}            {name}" for name, met in found["targets"].items()]
    if not found["targets_judged"]:
        lines.append("no target is judged: they stand for a GPU at full size")
    return "\n".join(lines)


def _machine(found: Figures) -> str:
    machine, versions = found["machine"], found.get("versions", {})
    ram, cores = machine["ram_bytes"] / 2**30, machine["cores"]
    return f"{machine['gpu'] or 'no GPU'}, {cores} cores, {ram:.0f} GiB RAM, torch {versions.get('torch', '?')}"


def _link(link: Figures | None) -> list[str]:
    if not link:
        return []
    lines = []
    for way, name in (("h2d", "H2D alone"), ("d2h", "D2H alone"), ("both", "each of both")):
        ours, theirs = (link[f"{whose}_{way}_bytes_per_s"] / 1e9 for whose in ("ours", "torch"))
        lines.append(f"{name:<18}{ours:7.1f} GB/s registered {theirs:8.1f} GB/s torch pinned")
    asked, ours, theirs = (link[key] / 2**30 for key in ("asked_bytes", "ours_locked_bytes", "torch_locked_bytes"))
    locking = link["register_s_per_gib"]
    lines.append(f"page-locked       {ours:7.2f} GiB, torch {theirs:.2f}, asked {asked:.2f}; {locking:.2f} s per GiB")
    return lines


def _memory(memory: Figures | None) -> list[str]:
    if not memory:
        return []
    adam, copy, triad = (memory[f"{name}_bytes_per_s"] / 1e9 for name in ("adam", "copy", "triad"))
    share = memory["adam_share_of_dram"]
    return [f"CPU AdamW         {adam:7.1f} GB/s = {share:.0%} of memory (copy {copy:.1f}, triad {triad:.1f})"]


def _drive(drive: Figures | None) -> list[str]:
    if not drive:
        return []
    read, write, mixed = (drive[f"{way}_bytes_per_s"] / 1e9 for way in ("read", "write", "mixed"))
    how = "direct" if drive["direct"] else "through the page cache"
    return [f"drive             {read:7.2f} GB/s read, {write:.2f} write, {mixed:.2f} mixed, {how}"]


def _resident(found: Figures) -> list[str]:
    lines = []
    if "overhead_share" in found.get("resident", {}):
        row = found["resident"]
        lines.append(
            f"resident {_billions(row)}  {row['ours_step_s']:.4f} s, plain torch {row['plain_step_s']:.4f} s: "
            f"{row['overhead_share']:+.1%}; peak {_gib(row['ours_peak_bytes'])}, plain {_gib(row['plain_peak_bytes'])}"
        )
    if "step_s" in found.get("deepspeed_resident", {}):
        lines.append(f"  DeepSpeed       {found['deepspeed_resident']['step_s']:.4f} s")
    return lines


def _steps(found: Figures) -> list[str]:
    lines = []
    for name, bound in found["bounds"].items():
        row = found[name]
        kind = name.split("_")[0]
        terms = ", ".join(f"{term} {seconds:.2f}" for term, seconds in bound["terms_s"].items())
        lines.append(
            f"{kind:<8} {_billions(row)}  {row['tokens']} tokens: {row['step_s']:.3f} s, {row['tokens_per_s']:.0f} "
            f"tokens/s, {bound['share_of_bound']:.0%} of {bound['binding']} ({terms}); "
            f"peak {_gib(row['peak_allocated_bytes'])}"
        )
        theirs = found.get(f"deepspeed_{name}")
        if theirs:
            ratio = theirs["step_s"] / row["step_s"]
            lines.append(f"  DeepSpeed       {theirs['step_s']:.3f} s ({ratio:.2f} x ours)")
    return lines


def _billions(row: Figures) -> str:
    return f"{row['parameters'] / 1e9:7.2f} B"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
