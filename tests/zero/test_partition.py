"""Where parameters lie in a flat shard, and which modules are gathered by themselves."""

import random

import pytest
import torch
from torch import nn

from tiered.zero.partition import ALIGN, ShardSpec, find_units, layout, overlap

SHAPES = {
    "odd": [(7, 5), (13,), (1, 1, 3)],
    "0-dim": [()],
    "empty": [(0,), (0, 5), (3, 0)],
    "empty between": [(5,), (0,), (33,), (0, 2), ()],
    "aligned": [(32,), (64, 2)],
    "nothing": [],
    "large and small": [(100, 100), (1,), (31,), (32,), (33,)],
}


def spec_of(shapes: list[tuple[int, ...]], ranks: int) -> ShardSpec:
    return layout([torch.Size(shape) for shape in shapes], ranks)


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_slots_are_aligned_apart_and_inside_equal_shards(shapes: list[tuple[int, ...]], ranks: int) -> None:
    spec = spec_of(shapes, ranks)
    assert [slot.shape for slot in spec.slots] == [torch.Size(shape) for shape in shapes]
    assert all(slot.numel == slot.shape.numel() and slot.start % ALIGN == 0 for slot in spec.slots)
    assert all(before.stop <= after.start for before, after in zip(spec.slots, spec.slots[1:], strict=False))
    assert all(slot.stop <= spec.numel for slot in spec.slots)
    assert spec.numel == spec.shard_numel * ranks > 0
    assert spec.shard_numel % ALIGN == 0, "a shard is 64-byte aligned in 16 bits"
    wanted = sum(-(-slot.numel // ALIGN) * ALIGN for slot in spec.slots)
    assert spec.numel - wanted < ALIGN * ranks or (wanted == 0 and spec.numel == ALIGN * ranks)


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_ranks_own_every_element_of_every_parameter_exactly_once(shapes: list[tuple[int, ...]], ranks: int) -> None:
    spec = spec_of(shapes, ranks)
    owners = torch.zeros(spec.numel, dtype=torch.int64)
    for slot in spec.slots:
        for rank in range(ranks):
            start, stop = overlap(slot, *spec.shard(rank))
            assert start <= stop
            if start < stop:
                assert slot.start <= start
                assert stop <= slot.stop
                assert rank * spec.shard_numel <= start
                assert stop <= (rank + 1) * spec.shard_numel
            owners[start:stop] += 1
    expected = torch.zeros(spec.numel, dtype=torch.int64)
    for slot in spec.slots:
        expected[slot.start : slot.stop] = 1
    assert torch.equal(owners, expected)


@pytest.mark.parametrize("seed", range(3))
def test_random_layouts_are_covered_too(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        shapes = [tuple(draw.randint(0, 9) for _ in range(draw.randint(0, 3))) for _ in range(draw.randint(0, 6))]
        ranks = draw.randint(1, 5)
        test_ranks_own_every_element_of_every_parameter_exactly_once(shapes, ranks)
        test_slots_are_aligned_apart_and_inside_equal_shards(shapes, ranks)


# --- units ---


def names(model: nn.Module, *classes: type[nn.Module]) -> list[str]:
    return [unit.name for unit in find_units(model, classes or None)]


class Block(nn.Module):
    """A layer of a stack, made of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Tied(nn.Module):
    """An embedding that is the head's weight, around a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight


def test_elements_of_a_module_list_are_units_and_not_the_layers_inside_them() -> None:
    found = names(Tied())
    assert found[0] == ""
    assert {"blocks.0", "blocks.1", "blocks.2"} <= set(found)
    assert not any(name.startswith("blocks.0.") for name in found)


def test_every_parameter_is_owned_once_and_a_tied_one_is_borrowed() -> None:
    model = Tied()
    units = find_units(model, None)
    owned = [id(p) for unit in units for p in unit.params]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
    borrowers = [unit.name for unit in units if any(p is model.embed.weight for p in unit.borrowed)]
    owners = [unit.name for unit in units if any(p is model.embed.weight for p in unit.params)]
    assert len(owners) == 1
    assert set(owners + borrowers) & {"head", ""}
    assert model.scale in units[0].params


def test_elements_of_a_sequential_are_units_outside_other_elements() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert names(model) == ["", "0", "2"]


def test_a_small_element_stays_with_what_is_around_it() -> None:
    model = nn.ModuleDict({"all": nn.ModuleList([nn.Linear(200, 200), nn.Linear(2, 2)])})
    assert "all.0" in names(model)
    assert "all.1" not in names(model)


def test_a_large_single_layer_is_a_unit_of_its_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Linear(64, 64)
            self.small = nn.Linear(2, 2)

    assert names(Net()) == ["", "big"]


def test_modules_without_a_forward_of_their_own_are_never_units() -> None:
    model = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4)])
    found = names(nn.Sequential(model))
    assert "0" not in found
    assert "0.0" not in found


def test_classes_replace_the_default_rule() -> None:
    class Layer(nn.Linear):
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.ModuleList(nn.Sequential(Layer(4, 4), nn.Linear(4, 4)) for _ in range(2))

    assert names(Net(), Layer) == ["", "stack.0.0", "stack.1.0"]
    assert names(Net(), nn.Sequential) == ["", "stack.0", "stack.1"]
    assert names(Net(), nn.Conv2d) == [""]


def test_a_model_that_is_one_layer_is_one_unit() -> None:
    model = nn.Linear(3, 3)
    (unit,) = find_units(model, None)
    assert (unit.name, unit.module, unit.borrowed) == ("", model, ())
    assert list(unit.params) == list(model.parameters())


def test_a_module_used_twice_is_one_unit() -> None:
    shared = nn.Linear(4, 4)
    units = find_units(nn.Sequential(shared, nn.ReLU(), shared), None)
    assert [unit.module for unit in units].count(shared) == 1
