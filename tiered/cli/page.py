"""One HTML page of recorded runs: values in, text out, and the file it goes to.

The page stands alone: styles, scripts and data are inside of it, and its policy lets it load nothing and run nothing
else. Names in it are others' (modules, threads, files): they are in its data as JSON that no parser of HTML sees an end
or a tag in, and its scripts put them on the page as text.

    page.html  the frame        page.css  how it looks, light and dark
    page.js    parts, tables, which step is chosen        chart.js  the drawn parts        units.js  numbers as text
"""

import base64
import contextlib
import dataclasses
import hashlib
import html
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

import tiered
from tiered.cli.progress import TIERS
from tiered.cli.recorded import MOST, Recording, Row
from tiered.cli.steps import Mean, Step, mean_of, steps_of

_LANES = 1000  # rows from here on are lanes, so many apart for each kind
_TOUCHING = 0.11  # microseconds by which rounding may let two events overlap
_DEEPEST = 8  # events inside of each other that get a line of their own


def page(recordings: Sequence[Recording]) -> str:
    """The whole page."""
    script = "\n".join(_resource(name) for name in ("units.js", "chart.js", "page.js"))
    style = _resource("page.css")
    parts = [part(recording) for recording in sorted(recordings, key=lambda one: one.rank)]
    return Template(_resource("page.html")).substitute(
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'",
        title=html.escape(f"{', '.join(one.path.name for one in recordings)} · tiered"),
        style=style,
        data=_inert({"most": MOST, "parts": parts}),
        script=script,
    )


def write(text: str, path: Path) -> None:
    """Puts the page at `path`, whole or not at all. Raises StorageError where it cannot."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with beside.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        beside.replace(path)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise tiered.StorageError(f"cannot write the page {path} ({reason}); expected a writable path") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def part(recording: Recording) -> dict[str, Any]:
    """What the page knows of one rank. Times of events are tenths of a microsecond, each start from the one before."""
    steps = steps_of(recording)
    kinds = list(dict.fromkeys(label.kind for label in recording.labels))
    groups = list(dict.fromkeys(label.group for label in recording.labels if label.group))
    places = {group: index for index, group in enumerate(groups)}
    return {
        "file": recording.path.name,
        "rank": recording.rank,
        "ended": recording.ended,
        "events": recording.events,
        "leftOut": recording.left_out,
        "kinds": kinds,
        "groups": groups,
        "labels": [[one.name, kinds.index(one.kind), places.get(one.group, -1)] for one in recording.labels],
        "rows": [_row(row) for row in sorted(recording.rows.values(), key=_order) if row.start],
        "occupancy": _occupancy(recording),
        "budgets": dict(recording.budgets),
        "steps": [_step(step) for step in steps],
        "mean": _mean(mean_of(steps)),
    }


def _row(row: Row) -> dict[str, Any]:
    lane = not row.is_loop and row.number >= _LANES
    name = row.name.rpartition(" ")[0] if lane else row.name
    return {"name": name or row.name, "lane": lane, "loop": row.is_loop, "tracks": _tracks(row)}


def _order(row: Row) -> tuple[bool, int]:
    return not row.is_loop, row.number


def _tracks(row: Row) -> list[dict[str, list[int]]]:
    """The events of a row by how many others each is inside of, so that those of one track lie apart."""
    start, duration = np.asarray(row.start), np.asarray(row.duration)
    order = np.lexsort((-duration, start))
    begins, ends = start[order].tolist(), (start + duration)[order].tolist()
    depths, around = [], list[float]()
    for begin, end in zip(begins, ends, strict=True):
        while around and around[-1] <= begin + _TOUCHING:
            around.pop()
        depths.append(min(len(around), _DEEPEST - 1))
        around.append(end)
    deep = np.asarray(depths)
    tracks = []
    for depth in range(int(deep.max()) + 1):
        chosen = order[deep == depth]
        tenths = np.rint(start[chosen] * 10).astype(np.int64)
        tracks.append(
            {
                "s": np.diff(tenths, prepend=0).tolist(),
                "d": np.rint(duration[chosen] * 10).astype(np.int64).tolist(),
                "l": np.asarray(row.label)[chosen].tolist(),
            }
        )
    return tracks


def _occupancy(recording: Recording) -> dict[str, list[float]]:
    told = sorted(recording.occupancy, key=lambda one: one[0])
    columns = {"t": [one[0] for one in told]}
    return columns | {tier: [one[index] for one in told] for index, tier in enumerate(TIERS, 1)}


def _step(step: Step) -> dict[str, Any]:
    limit = step.limit
    return {
        "n": step.number,
        "start": step.start,
        "end": step.end,
        "seconds": step.seconds,
        "stalls": _rounded(step.stalls),
        "bound": None if limit is None else limit.bound_s,
        "binding": "" if limit is None else limit.binding,
        "terms": {} if limit is None else _rounded(limit.terms),
    }


def _mean(mean: Mean | None) -> dict[str, Any] | None:
    return None if mean is None else dataclasses.asdict(mean)


def _rounded(table: Mapping[str, float]) -> dict[str, float]:
    return {name: round(seconds, 7) for name, seconds in table.items()}


def _resource(name: str) -> str:
    return resources.files("tiered.cli").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(data: object) -> str:
    """JSON that nothing but a parser of JSON sees anything in: no tag, no end of a script, no comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
