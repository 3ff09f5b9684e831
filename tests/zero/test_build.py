"""What a module must be to be sharded; what is not is refused by name, before anything is touched."""

import pytest
import torch
from torch import nn

import tiered


def test_two_parameters_over_the_same_memory_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    before = model[0].weight.clone()
    with pytest.raises(tiered.UsageError, match=r"'0.weight' and '1.weight' share memory"):
        tiered.shard(model, tiered.Config(device="cpu"))
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)


def test_parameters_side_by_side_in_one_storage_are_two() -> None:
    whole = torch.arange(8.0)
    model = nn.Module()
    model.left, model.right = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    with tiered.shard(model, tiered.Config(device="cpu")):
        assert torch.equal(torch.cat([model.left, model.right]), whole)


def test_an_expanded_parameter_is_refused_by_name() -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.ones(1).expand(5))
    with pytest.raises(tiered.UsageError, match="'wide' repeats its memory"):
        tiered.shard(model, tiered.Config(device="cpu"))


def test_backward_after_close_is_a_named_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tiered.shard(model, tiered.Config(device="cpu"))
    loss = model(torch.ones(1, 4)).sum()
    tiered.close(model)
    with pytest.raises(tiered.UsageError, match="its weights are gone"):
        loss.backward()


def test_a_parameter_kept_past_a_close_without_weights_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tiered.shard(model, tiered.Config(device="cpu"))
    kept = model[0].weight
    tiered.close(model, keep_weights=False)
    assert model[0].weight.is_meta
    with pytest.raises(tiered.UsageError, match=r"'0.weight' are gone"):
        kept.sum()


def test_a_second_optimizer_starts_from_fresh_moments() -> None:
    def train(fresh: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        with tiered.shard(model, tiered.Config(device="cpu")):
            optimizer = tiered.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
            if not fresh:
                (1000 * model(torch.ones(2, 4))).sum().backward()
                optimizer.step()  # moves nothing, at lr 0, but leaves moments
                optimizer.zero_grad()
            optimizer = tiered.AdamW(model.parameters(), lr=0.1)
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            return model.state_dict()["weight"]

    torch.testing.assert_close(train(fresh=False), train(fresh=True), rtol=0, atol=0)


def test_an_edit_through_data_inside_forward_is_kept_wherever_the_weight_lives(tmp_path: object) -> None:
    class Clamped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.clamp_(-0.01, 0.01)
            return super().forward(x)

    model = nn.Sequential(*(Clamped(32, 32) for _ in range(6)))
    config = tiered.Config(
        device="cpu", host_budget="1MiB", device_budget="16KiB", nvme=str(tmp_path), param_tier="nvme"
    )
    with tiered.shard(model, config), torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 32))
        assert all(float(v.abs().max()) <= 0.01 for k, v in model.state_dict().items() if k.endswith("weight"))


def test_a_gradient_clipped_inside_gather_is_clipped() -> None:
    model = nn.Linear(4, 4)
    with tiered.shard(model, tiered.Config(device="cpu")):
        optimizer = tiered.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        with tiered.gather(model):
            assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) > 1
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(1e-3, rel=1e-3)
