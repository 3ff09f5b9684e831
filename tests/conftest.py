"""Shared set-up: makes `models` and `parity.harness` importable in every test process.

The tests directory goes to the end of the path, so that nothing in it can shadow an installed package and the
`tiered` under test is the one that is installed.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
