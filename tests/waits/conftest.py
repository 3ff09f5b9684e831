"""Gates for what runs beside the thread that tests are on."""

from collections.abc import Iterator

import pytest
from waits.gate import Gate

from tiered.device import emulated
from tiered.io.swapfile import SwapSpace


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate for the links of emulated devices, by their threads' names: "tiered-h2d" and "tiered-d2h"."""
    made = Gate()
    monkeypatch.setattr(emulated.Link, "_sleep", lambda link, nbytes: made.pass_through(nbytes))
    yield made
    made.open()


@pytest.fixture
def slow_drive(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate that holds reads of drives too, under the name "drive"."""
    monkeypatch.setattr(SwapSpace, "read", gate.holding("drive", SwapSpace.read))
    return gate
