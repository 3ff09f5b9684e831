"""One rank of a parity run, started by test_parity.py: carries out a list of jobs and saves what it saw of each.

Usage: worker.py JOBS OUT SWAP. JOBS is a JSON file of [scenario or fact, stage, placement]; OUT a folder, to which
rank r writes r.pt: the observations, in the order of the jobs, and the traceback of the job that ended the run, if one
did. All jobs run in one process group, and end by themselves: one that hangs prints where it waits before it is killed.
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from ranks.parity_facts import FACTS
from ranks.parity_run import Where
from ranks.parity_scenarios import SCENARIOS

PATIENCE_S = 60  # for one job


def main(jobs: list[tuple[str, int, str]], out: Path, swap: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen, error, start = [], None, time.monotonic()
    for name, stage, place in jobs:
        print(f"{time.monotonic() - start:6.1f} s: {name} / {stage} / {place}", flush=True)
        faulthandler.dump_traceback_later(PATIENCE_S)
        where = Where(rank=rank, ranks=ranks, parts=ranks, stage=stage, place=place, swap=swap)
        try:
            seen.append({**SCENARIOS, **FACTS}[name](where))
        except BaseException:
            error = traceback.format_exc()
            break
    torch.save({"seen": seen, "error": error}, out / f"{rank}.pt")
    if error is not None:
        sys.exit(error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3]))
    dist.destroy_process_group()
