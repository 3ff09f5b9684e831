"""An update of states on a device, whose parameters and gradients come from the host: any cut, nothing else changed.

The device is emulated: its copies come late, and what it has not been given yet reads as NaN. Leaves whole steps of a
model to tests/parity and tests/ranks.
"""

import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tiered.config import Emulation
from tiered.device.emulated import EmulatedDevice
from tiered.optim import crossing
from tiered.optim.crossing import Crossing
from tiered.optim.kernels import Segment
from tiered.stats import Meter
from tiered.zero.group import ParamGroup
from tiered.zero.runtime import Runtime

NUMEL = 704
SEGMENTS = [(32, 65), (96, 160), (192, 692)]


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice(Emulation(max_delay_s=1e-2, seed=3))
    yield made
    made.close()


def segments() -> list[Segment]:
    base = Segment(start=0, stop=0, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, step=2)
    return [replace(base, start=start, stop=stop) for start, stop in SEGMENTS]


class Apart:
    """A group whose states are on a device, with some values."""

    def __init__(self, param_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(1)
        master = torch.randn(NUMEL, generator=g)
        self.states = {"exp_avg": torch.randn(NUMEL, generator=g) * 0.1, "exp_avg_sq": torch.rand(NUMEL, generator=g)}
        if param_dtype != torch.float32:
            self.states["master"] = master
        self.blocks = self.states
        self.spec = types.SimpleNamespace(shard_numel=NUMEL)
        self.host = {"param": master.to(param_dtype), "grad": torch.randn(NUMEL, generator=g).to(grad_dtype)}

    def on_device(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        return self.states[kind]

    def updated(self, device: EmulatedDevice, factor: float = 0.5) -> dict[str, torch.Tensor]:
        runtime = cast(Runtime, types.SimpleNamespace(device=device, meter=Meter()))
        group = cast(ParamGroup, self)
        done: Any = Crossing(runtime, [group], factor)
        done.update(segments(), group, 0, self.host)
        return {kind: values.clone() for kind, values in {**self.states, **self.host}.items()}


DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]


@pytest.mark.parametrize("dtypes", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("piece", [33, 300])
def test_the_cut_into_pieces_changes_nothing_beyond_rounding(
    piece: int, dtypes: tuple[torch.dtype, torch.dtype], device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Apart(*dtypes).updated(device)
    monkeypatch.setattr(crossing, "_PIECE", piece)
    for kind, values in Apart(*dtypes).updated(device).items():
        torch.testing.assert_close(values, whole[kind], msg=lambda text, kind=kind: f"{kind}: {text}")


@pytest.mark.parametrize("dtypes", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_the_update_is_torchs_and_elements_outside_every_segment_keep_their_bits(
    dtypes: tuple[torch.dtype, torch.dtype], device: EmulatedDevice
) -> None:
    before, after = Apart(*dtypes), Apart(*dtypes)
    got = after.updated(device)
    for start, stop in SEGMENTS:
        param = before.states.get("master", before.host["param"])[start:stop].clone()
        grad = before.host["grad"][start:stop].float() * 0.5
        exp_avg = before.states["exp_avg"][start:stop].lerp(grad, 0.1)
        exp_avg_sq = before.states["exp_avg_sq"][start:stop] * 0.99 + 0.01 * grad * grad
        param.mul_(1 - 1e-2 * 0.1)
        param -= 1e-2 * (exp_avg / (1 - 0.9**2)) / ((exp_avg_sq / (1 - 0.99**2)).sqrt() + 1e-6)
        torch.testing.assert_close(got["exp_avg"][start:stop], exp_avg)
        torch.testing.assert_close(got["exp_avg_sq"][start:stop], exp_avg_sq)
        torch.testing.assert_close(got["param"][start:stop], param.to(dtypes[0]))
    inside = torch.zeros(NUMEL, dtype=torch.bool)
    for start, stop in SEGMENTS:
        inside[start:stop] = True
    for kind, values in {**before.states, **before.host}.items():
        assert torch.equal(got[kind][~inside], values[~inside]), kind
    assert torch.equal(got["grad"], before.host["grad"])


def test_a_device_without_room_for_the_pieces_changes_nothing(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = Apart(*DTYPES[0]), Apart(*DTYPES[0])

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise MemoryError("the device is full")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError):
        after.updated(device)
    for kind, values in {**before.states, **before.host}.items():
        assert torch.equal({**after.states, **after.host}[kind], values), kind
