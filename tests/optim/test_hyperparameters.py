"""Groups of another optimizer are known by their parameters, in whatever order they come."""

import pytest

from tiered.optim.hyperparameters import arranged

THERE = [{"params": ["a", "b"], "lr": 1}, {"params": ["c"], "lr": 2}]


@pytest.mark.parametrize(
    ("mine", "names", "lrs"),
    [
        ([["a", "b"], ["c"]], {}, [1, 2]),
        ([["c"], ["b", "a"]], {}, [2, 1]),
        ([["a"], ["b"], ["c"]], {}, [1, 1, 2]),
        ([["a", "b", "c"]], {}, [None]),
        ([["a", "c"], ["b"]], {}, [None, 1]),
        ([["a", "new"], ["c", "newer"]], {}, [1, 2]),
        ([["x"], ["y"]], {}, [1, 2]),  # all are new: as they come
        ([["x"], ["y"], ["z"]], {}, [1, 2, None]),
        ([["z"], ["x", "y"]], {"a": "x", "b": "y", "c": "z"}, [2, 1]),
    ],
)
def test_a_group_has_the_settings_of_the_one_its_parameters_were_in(
    mine: list[list[str]], names: dict[str, str], lrs: list[int | None]
) -> None:
    assert [None if group is None else group["lr"] for group in arranged(mine, THERE, names)] == lrs
