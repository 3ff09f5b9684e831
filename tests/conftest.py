"""Shared set-up: makes `models` and `parity.harness` importable in every test process.

The tests directory goes to the end of the path, so that nothing in it can shadow an installed package and the
`tiered` under test is the one that is installed. Ctrl-C means what it means at a terminal, here and in every process a
test starts: a run in the background (`nohup`, some CI) inherits an ignored SIGINT.
"""

import signal
import sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.append(str(Path(__file__).parent))
