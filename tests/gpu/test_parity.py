"""On a GPU the arithmetic is plain torch's there, and the tiers do not change it.

Groups that move are updated by the host's kernel whatever their tier: bit-equal. A resident group is updated by torch's
fused kernel on the GPU: within the tolerance that also holds against plain torch.
"""

from pathlib import Path

import pytest
import torch
from gpu.training import BUDGETED, HOST, MOVED, NVME, RESIDENT, observe, on_cpu, on_gpu, plain, sharded
from models import CONV, GPT, MOE, ODD, RECURRENT, SHORT_GPT, Case
from parity.harness import Placement, same

import tiered

CASES = [on_gpu(case) for case in (GPT, MOE, CONV, ODD, RECURRENT)]
SHORT = on_gpu(SHORT_GPT)
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights")  # cuDNN would like them in a layout of its own
TOLERANCE = 1e-4  # a hundredth of one step's usual change: where a weight lies decides which product kernel is chosen
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_name
@pytest.mark.parametrize("place", [HOST, RESIDENT], ids=lambda place: place.name)
def test_training_follows_plain_torch_on_the_gpu(case: Case, place: Placement, swap: Path, exact: None) -> None:
    with plain(case) as session:
        want = observe(session)
    with sharded(case, place, swap) as session:
        same(observe(session), want, exact=False, rtol=TOLERANCE, atol=TOLERANCE, where=place.name)


@by_name
@pytest.mark.parametrize("place", [NVME, BUDGETED], ids=lambda place: place.name)
def test_tiers_are_bit_equal_on_the_gpu(case: Case, place: Placement, swap: Path, exact: None) -> None:
    with sharded(case, HOST, swap) as session:
        want = observe(session)
    with sharded(case, place, swap) as session:
        same(observe(session), want, exact=True, where=f"{place.name} against {HOST.name}")


@pytest.mark.parametrize("place", MOVED, ids=lambda place: place.name)
def test_what_should_move_does(place: Placement, swap: Path) -> None:
    with sharded(on_gpu(GPT), place, swap) as session:
        session.train_on(range(2))
        stats = tiered.stats(session.model)
    assert stats.written_bytes["device"] > 4 * sum(p.numel() for p in GPT.build().parameters())
    assert stats.read_bytes["device"] > 0
    assert (stats.read_bytes["nvme"] > 0) == (place is NVME)


@pytest.mark.parametrize("place", [HOST, RESIDENT], ids=lambda place: place.name)
def test_the_callers_stream_is_the_compute_stream(place: Placement, swap: Path, exact: None) -> None:
    with sharded(SHORT, place, swap) as session:
        want = observe(session)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), sharded(SHORT, place, swap) as session:
        got = observe(session)
    side.synchronize()
    same(got, want, exact=True, where="on a stream of the caller's")


def test_a_model_that_is_closed_holds_its_trained_weights(swap: Path) -> None:
    with sharded(SHORT, NVME, swap) as session:
        session.train_on(range(2))
        trained = on_cpu(session.weights())
    same(on_cpu(dict(session.model.state_dict())), trained, exact=True, where="weights after close")


def test_gathered_values_can_be_edited_on_the_gpu(swap: Path) -> None:
    with sharded(SHORT, HOST, swap) as session:
        head = session.model.norm
        with tiered.gather(head, modify=True), torch.no_grad():
            assert head.weight.is_cuda
            head.weight.mul_(2)
        assert on_cpu(session.model.state_dict()["norm.weight"]).eq(2).all()
