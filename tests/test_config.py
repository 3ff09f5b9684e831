"""Every setting has one spelling and a range; what is wrong is named with what would work."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tiered.config import Config, Emulation, MixedPrecision, format_size, parse_size
from tiered.errors import ConfigError

SIZES = [
    (0, 0), (123, 123), ("0", 0), ("7", 7), ("7B", 7), (" 2 KiB ", 2048), ("2kb", 2000), ("3K", 3072),
    ("1.5MiB", 3 << 19), ("1.5MB", 1_500_000), ("20GiB", 20 << 30), ("20GB", 20 * 10**9), ("20g", 20 << 30),
    ("1TiB", 1 << 40),
]  # fmt: skip


@pytest.mark.parametrize(("text", "nbytes"), SIZES)
def test_a_size_is_whole_bytes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1 2", "1XiB", "1e9", "0x10", "1,5GiB", -1, 1.5, True, None, [1], "١ GiB"]
)
def test_what_is_no_size_is_refused_with_field_and_value(text: Any) -> None:
    with pytest.raises(ConfigError, match="host_budget=") as caught:
        parse_size(text, "host_budget")
    assert repr(text) in str(caught.value)
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (64 << 20, "64.0 MiB"), (5 << 40, "5.0 TiB")]
)
def test_a_size_for_people_has_a_unit(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1 << 20, 3 << 30, 7 << 40])
def test_a_size_for_people_reads_back(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


def test_a_config_holds_bytes_and_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = Config(host_budget="2GiB", device_budget=5, nvme=["here", Path("/there"), "~/swap", "a/../b"])
    assert (config.host_budget, config.device_budget) == (2 << 30, 5)
    assert config.directories == (tmp_path / "here", Path("/there"), Path("/home/somebody/swap"), tmp_path / "b")
    assert Config(nvme="/x").directories == Config(nvme=Path("/x")).directories == (Path("/x"),)
    assert Config().directories == ()


def test_a_generator_of_directories_is_read_once_and_kept() -> None:
    config = Config(nvme=(f"/drive{index}" for index in range(2)))
    assert config.directories == config.directories == (Path("/drive0"), Path("/drive1"))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"device": "tpu"}, r"device='tpu'.*'cpu'"),
    ({"device_budget": "lots"}, "device_budget='lots'"),
    ({"host_budget": -5}, "host_budget=-5"),
    ({"param_tier": "disk"}, "param_tier='disk'.*'nvme'"),
    ({"optimizer_tier": None}, "optimizer_tier=None"),
    ({"param_tier": "nvme"}, "param_tier='nvme' needs a swap directory"),
    ({"optimizer_tier": "nvme", "nvme": []}, "optimizer_tier='nvme' needs a swap directory"),
    ({"nvme": ["/a", "/b/../a"]}, "the same directory is named twice"),
    ({"nvme": ""}, "nvme=''"),
    ({"nvme": ["/a", 3]}, r"nvme=\['/a', 3\]"),
    ({"stage": 0}, "stage=0.*use 1 .*2 .*3"),
    ({"stage": True}, "stage=True.*use 1"),
    ({"budgets": "machine"}, "budgets='machine'.*'rank' or 'node'"),
    ({"rank_timeout_s": 0}, "rank_timeout_s=0.*above 0"),
    ({"rank_timeout_s": float("inf")}, "rank_timeout_s=inf.*above 0"),
    ({"rank_timeout_s": "30s"}, "rank_timeout_s='30s'.*seconds"),
    ({"initial_values": "mine"}, "initial_values='mine'.*'rank0' or 'equal'"),
    ({"io_threads": 0}, "io_threads=0.*1 to 256"),
    ({"io_threads": 2.0}, r"io_threads=2\.0"),
    ({"io_threads": 1000}, "io_threads=1000"),
    ({"drive_timeout_s": 0}, "drive_timeout_s=0.*above 0, or None"),
    ({"drive_timeout_s": float("nan")}, "drive_timeout_s=nan"),
    ({"drive_timeout_s": "30s"}, "drive_timeout_s='30s'.*seconds"),
    ({"precision": torch.float16}, r"precision=torch\.float16.*tiered\.MixedPrecision"),
    ({"emulation": {"poison": True}}, r"emulation=.*tiered\.Emulation"),
    ({"groups": ("Linear",)}, "groups="),
    ({"groups": (nn.Linear(1, 1),)}, "groups="),
]


@pytest.mark.parametrize(("settings", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_an_impossible_setting_names_field_value_and_what_works(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        Config(**settings)


def test_a_refusal_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="stage"):
        Config(stage=4)


def test_settings_cannot_be_changed_or_given_by_place() -> None:
    config = Config()
    for name in ("host_budget", "nvme"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, None)
    with pytest.raises(TypeError):
        Config("cpu")  # type: ignore[misc]


def test_a_replaced_setting_is_checked_too() -> None:
    config = Config(host_budget="1GiB", nvme="/x", groups=[nn.Linear])  # type: ignore[arg-type]
    assert dataclasses.replace(config, io_threads=3) == dataclasses.replace(config, io_threads=3)
    assert dataclasses.replace(config, io_threads=3).directories == (Path("/x"),)
    assert config.groups == (nn.Linear,)
    with pytest.raises(ConfigError, match="io_threads"):
        dataclasses.replace(config, io_threads=-1)


def test_precision_takes_the_dtypes_it_names() -> None:
    for dtype in (None, torch.float32, torch.bfloat16, torch.float16):
        MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
    for field in ("param_dtype", "reduce_dtype"):
        for wrong in (torch.float64, torch.int8, "float16"):
            with pytest.raises(ConfigError, match=f"{field}=.*bfloat16"):
                MixedPrecision(**{field: wrong})


@pytest.mark.parametrize("field", ["h2d_bytes_per_s", "d2h_bytes_per_s"])
@pytest.mark.parametrize("speed", [0, -1.0, float("nan")])
def test_a_link_has_a_positive_speed(field: str, speed: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Emulation(**{field: speed})


@pytest.mark.parametrize("delay", [-0.1, float("nan")])
def test_a_delay_is_not_negative(delay: float) -> None:
    with pytest.raises(ConfigError, match="max_delay_s"):
        Emulation(max_delay_s=delay)
