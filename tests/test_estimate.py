"""`tiered.estimate`: the ZeRO paper's figures, and that every kind of bytes stands on exactly one tier."""

import pytest
import torch

from tiered.errors import ConfigError
from tiered.estimate import estimate

BILLION = 10**9


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 16.0), (1, 7.0), (2, 5.5), (3, 4.0)])
def test_a_billion_16_bit_parameters_on_four_ranks_cost_what_the_zero_paper_says(stage: int, gigabytes: float) -> None:
    found = estimate(BILLION, ranks=4, stage=stage, param_dtype=torch.float16)
    assert found.total == gigabytes * BILLION
    assert found.on("device") == found.total


def test_fp32_weights_have_no_second_master_and_cost_16_bytes_too() -> None:
    found = estimate(BILLION)
    assert found.total == 16 * BILLION
    assert "master" not in found.tiers["device"]
    assert found.tiers["device"]["param"] == 4 * BILLION


def test_gradients_may_have_a_dtype_of_their_own() -> None:
    found = estimate(10, param_dtype=torch.bfloat16, grad_dtype=torch.float32)
    assert found.tiers["device"]["grad"] == 40
    assert found.total == 10 * (2 + 4 + 12)


@pytest.mark.parametrize("params", [None, "host", "nvme"])
@pytest.mark.parametrize("optimizer", [None, "host", "nvme"])
def test_offloading_moves_bytes_and_neither_adds_nor_loses_any(params: str | None, optimizer: str | None) -> None:
    plain = estimate(1001, ranks=3, param_dtype=torch.bfloat16)
    moved = estimate(1001, ranks=3, param_dtype=torch.bfloat16, offload_params=params, offload_optimizer=optimizer)
    assert moved.total == plain.total
    kinds = [kind for tier in moved.tiers.values() for kind in tier]
    assert sorted(kinds) == ["exp_avg", "exp_avg_sq", "grad", "master", "param"]
    assert moved.tiers[params or "device"]["param"] == 334 * 2
    assert moved.tiers[optimizer or "device"]["exp_avg"] == 334 * 4


def test_the_optimizer_on_a_drive_leaves_the_gradients_in_ram() -> None:
    found = estimate(100, offload_params="nvme", offload_optimizer="nvme")
    assert dict(found.tiers["host"]) == {"grad": 400}
    assert found.on("device") == 0


def test_a_rank_keeps_the_larger_part_of_an_uneven_split() -> None:
    assert estimate(10, ranks=4).tiers["device"]["param"] == 3 * 4


def test_what_is_left_out_is_named() -> None:
    for word in ("activations", "gathered", "temporaries"):
        assert word in estimate(1).left_out


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"parameters": -1}, "parameters"),
        ({"ranks": 0}, "ranks"),
        ({"stage": 4}, "stage"),
        ({"param_dtype": torch.int8}, "param_dtype"),
        ({"grad_dtype": torch.int64}, "grad_dtype"),
        ({"offload_params": "disk"}, "offload_params"),
        ({"offload_optimizer": "ram"}, "offload_optimizer"),
        ({"offload_params": "host", "stage": 0}, "offload_params"),
        ({"offload_optimizer": "host", "stage": 0}, "offload_optimizer"),
    ],
)
def test_impossible_arguments_are_refused_by_name(wrong: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: got .*, expected "):
        estimate(**{"parameters": 8, **wrong})  # type: ignore[arg-type]


def test_asking_for_an_unknown_tier_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="device, host, nvme"):
        estimate(1).on("disk")
