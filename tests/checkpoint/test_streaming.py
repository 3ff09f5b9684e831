"""A checkpoint passes through a bounded window in every format and direction, however large it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
MOST = 64 * MIB
PHASES = ("in from safetensors and torch.save", "out as safetensors", "out as torch.save", "out for dcp", "in from dcp")

PROGRAM = """
import json, shutil, sys
from pathlib import Path
import torch, tiered
from tiered.checkpoint import adamw, beside
from tiered.checkpoint.huggingface import write
from tiered.checkpoint.state import Moments, Source, State
from tiered.cli.memory import ResidentGrowth

torch.set_num_threads(1)
root = Path(sys.argv[1])

def values(out, start):
    torch.arange(start, start + out.numel(), out=out)

def source(*shape):
    return Source(shape, torch.float32, values)

def state(scale):
    # one tensor of half of all, so that none may be held whole, and small ones with odd sizes
    weights = {"large": source(26 * scale, 1024), **{f"small.{n}": source(scale, 999) for n in range(26)}}
    moments = {name: Moments(3, each, each) for name, each in weights.items()}
    group = {"params": list(weights), "lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
    return State(weights, moments=moments, groups=[group])

def rss():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

def run(scale, folder):
    made = state(scale)
    folder.mkdir()
    with beside.new_folder(folder / "hf", __import__("re").compile("x"), force=False) as new:
        write(new, made, 40 << 20)
    adamw.write(folder / "o.pt", made)
    steps = [
        lambda: tiered.import_checkpoint(folder / "hf", folder / "saved", optimizer=folder / "o.pt"),
        lambda: tiered.export_checkpoint(folder / "saved", folder / "hf", max_shard_size="40MiB", force=True),
        lambda: tiered.export_checkpoint(folder / "saved", folder / "o.pt", format="adamw", force=True),
        lambda: tiered.export_checkpoint(folder / "saved", folder / "dcp", format="dcp"),
        lambda: tiered.import_checkpoint(folder / "dcp", folder / "saved", force=True),
    ]
    found = []
    for step in steps:
        growth, before = ResidentGrowth(), rss()
        step()
        found.append([growth.peak_bytes(), rss() - before])
    size = sum(path.stat().st_size for path in (folder / "saved").rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return found, size

run(8, root / "warm")  # what is imported and allocated once does not count
print(json.dumps(run(1000, root / "large")))
"""


@pytest.mark.slow
def test_hundreds_of_megabytes_pass_with_a_growth_of_less_than_64_mib(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    growth, size = json.loads(done.stdout.splitlines()[-1])
    assert size > 600 * MIB
    for phase, (peak, kept) in zip(PHASES, growth, strict=True):
        print(f"{phase}: peak {peak / MIB:.0f} MiB, kept {kept / MIB:.0f} MiB")
        assert peak < MOST, f"{phase}: {peak / MIB:.0f} MiB"
        assert kept < MOST // 2, f"{phase}: {kept / MIB:.0f} MiB stay"
