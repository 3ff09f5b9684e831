"""AdamW's state goes to plain torch, which trains on with it, and comes back; a pickle that is more
than plain data is refused."""

import contextlib
import copy
import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_save_load import Net, equal, network, outcome, session, train, uninterrupted
from safetensors.torch import load_file, save_file
from threaded_ranks import sharded
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import tiered
from tiered.checkpoint import inert
from tiered.checkpoint.foreign import File
from tiered.checkpoint.state import Source, constant
from tiered.checkpoint.torchfile import TorchFile, write


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


class Smooth(Net):
    """Every gradient is more than the noise of rounding, which a bias before a norm has alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.gain
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x).square().mean() + self.nothing.sum()


def smooth(seed: int = 0) -> Smooth:
    torch.manual_seed(seed)
    return Smooth()


@contextlib.contextmanager
def smooth_session(seed: int = 0, lr: float = 1e-2) -> Iterator[tuple[nn.Module, tiered.AdamW]]:
    with sharded(model := smooth(seed), device="cpu"):
        decays = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decays}, {"params": rest, "weight_decay": 0.0}]
        yield model, tiered.AdamW(groups, lr=lr, max_grad_norm=1.0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint after three steps."""
    with session() as (model, optimizer):
        train(model, optimizer, range(3))
        return tiered.save(model, optimizer, tmp_path / "saved")


def exported(saved: Path) -> tuple[Path, Path]:
    """Its weights and its optimizer's state."""
    return (
        tiered.export_checkpoint(saved, saved.parent / "hf") / "model.safetensors",
        tiered.export_checkpoint(saved, saved.parent / "optimizer.pt", format="adamw"),
    )


def plain_optimizer(model: nn.Module, lr: float = 1.0) -> torch.optim.AdamW:
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decays}, {"params": rest, "weight_decay": 0.5}], lr=lr)


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        model(torch.randn(12, 12, generator=torch.Generator().manual_seed(seed))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# --- out ---


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_torch_trains_on_as_the_run_would_have(mmap: bool, tmp_path: Path) -> None:
    with smooth_session() as (run, own):
        train(run, own, range(3))
        weights, file = exported(tiered.save(run, own, tmp_path / "saved"))
        train(run, own, range(3, 5))
        want = {name: value.clone() for name, value in run.state_dict().items()}
    model = smooth(9)
    model.load_state_dict({**load_file(weights), "last.weight": load_file(weights)["first.weight"]})
    optimizer = plain_optimizer(model)
    optimizer.load_state_dict(torch.load(file, weights_only=True, mmap=mmap))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-2, 0.0]
    train_plain(model, optimizer, range(3, 5))
    torch.testing.assert_close(dict(model.state_dict()), want, rtol=1e-5, atol=1e-6)


def test_the_state_is_what_torch_calls_it_to_the_last_bit(saved: Path) -> None:
    with session(9) as (model, optimizer):
        tiered.load(model, optimizer, saved)
        names = {id(p): name for name, p in model.named_parameters()}
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        want = {order[number]: state for number, state in optimizer.state_dict()["state"].items()}
    _, file = exported(saved)
    got = torch.load(file, weights_only=True)
    assert got.keys() == {"state", "param_groups"}
    torch.testing.assert_close(got["state"], want, rtol=0, atol=0)
    assert "never" not in got["state"], "a parameter without updates has no state, as in torch"
    reference = get_optimizer_state_dict(plain := network(), plain_optimizer(plain))
    assert [group.keys() for group in got["param_groups"]] == [group.keys() for group in reference["param_groups"]]
    assert [group["params"] for group in got["param_groups"]] == [g["params"] for g in reference["param_groups"]]
    assert [type(group["betas"]) for group in got["param_groups"]] == [tuple, tuple]


def test_names_go_into_an_optimizer_whatever_the_order_of_its_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with session() as (model, optimizer):
        train(model, optimizer, range(2))
        saved = tiered.save(model, optimizer, tmp_path / "saved")
    _, file = exported(saved)
    held = torch.load(file, weights_only=True)
    model = network(1)
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())), lr=1.0)
    held["param_groups"] = [
        {**held["param_groups"][0], "params": [n for g in held["param_groups"] for n in g["params"]]}
    ]
    set_optimizer_state_dict(model, optimizer, held, options=StateDictOptions(strict=False))
    got = get_optimizer_state_dict(model, optimizer)["state"]
    torch.testing.assert_close({n: got[n] for n in held["state"]}, held["state"], rtol=0, atol=0)


def test_every_storage_is_aligned_and_passes_its_checksum(saved: Path) -> None:
    _, file = exported(saved)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        data = file.read_bytes()
        for info in archive.infolist():
            name, extra = (
                int.from_bytes(data[info.header_offset + at : info.header_offset + at + 2], "little") for at in (26, 28)
            )
            if "/data/" in info.filename:
                assert (info.header_offset + 30 + name + extra) % 64 == 0


def test_a_checkpoint_of_weights_alone_has_no_state_to_export(tmp_path: Path) -> None:
    with session() as (model, _):
        tiered.save(model, None, tmp_path / "saved")
    with pytest.raises(tiered.UsageError, match="weights alone"):
        tiered.export_checkpoint(tmp_path / "saved", tmp_path / "optimizer.pt", format="adamw")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


# --- in ---


def test_a_run_goes_on_bit_for_bit_from_what_went_out_and_came_back(saved: Path, tmp_path: Path) -> None:
    weights, file = exported(saved)
    tiered.import_checkpoint(weights, tmp_path / "back", optimizer=file)
    with session(9, 1.0) as (model, optimizer):
        tiered.load(model, optimizer, tmp_path / "back")
        assert optimizer.updates == 3
        train(model, optimizer, range(3, 5))
        equal(outcome(model, optimizer), uninterrupted())


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer)


def counted_with_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's own state dict, where it was given names."""
    named_params = [p for p in model.named_parameters()]
    groups = [[p for p in named_params if p[1].dim() > 1], [p for p in named_params if p[1].dim() <= 1]]
    again = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.5}], lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    return again.state_dict()


@pytest.mark.parametrize("form", [named, counted_with_names])
def test_the_state_of_plain_torch_comes_in_and_training_goes_on(
    form: Callable[[nn.Module, torch.optim.Optimizer], dict[str, Any]], tmp_path: Path
) -> None:
    model = smooth()
    optimizer = plain_optimizer(model, 1e-2)
    train_plain(model, optimizer, range(3))
    torch.save(form(model, optimizer), tmp_path / "optimizer.pt")
    save_file({k: v.clone() for k, v in model.state_dict().items() if k != "last.weight"}, tmp_path / "m.safetensors")
    tiered.import_checkpoint(tmp_path / "m.safetensors", tmp_path / "back", optimizer=tmp_path / "optimizer.pt")
    train_plain(model, optimizer, range(3, 5))
    with smooth_session(9, 1.0) as (run, own):
        tiered.load(run, own, tmp_path / "back")
        assert own.updates == 3
        assert [group["weight_decay"] for group in own.param_groups] == [1e-2, 0.5]
        train(run, own, range(3, 5))
        got = {name: value.clone() for name, value in run.state_dict().items()}
    torch.testing.assert_close(got, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def test_moments_of_low_precision_come_in_as_fp32(tmp_path: Path) -> None:
    value = torch.randn(3, 4).bfloat16()
    state = {"state": {"w": {"step": torch.tensor(2.0), "exp_avg": value, "exp_avg_sq": value.abs()}}}
    groups = [{"params": ["w"], "lr": torch.tensor(0.1), "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}]
    torch.save({**state, "param_groups": groups}, tmp_path / "o.pt")
    save_file({"w": torch.ones(3, 4)}, tmp_path / "w.safetensors")
    tiered.import_checkpoint(tmp_path / "w.safetensors", tmp_path / "back", optimizer=tmp_path / "o.pt")
    tiered.export_checkpoint(tmp_path / "back", tmp_path / "again.pt", format="adamw")
    got = torch.load(tmp_path / "again.pt", weights_only=True)
    assert torch.equal(got["state"]["w"]["exp_avg"], value.float())
    assert got["param_groups"][0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).view(3, 4).t(),
        lambda: torch.arange(12.0).view(3, 4)[:, 1:3],
        lambda: torch.arange(3.0).view(3, 1).expand(3, 4),
        lambda: torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch.arange(120.0).view(2, 3, 20)[1, 1:, ::3],
        lambda: torch.tensor(2.5),
        lambda: torch.zeros(0, 3),
        lambda: nn.Parameter(torch.arange(4.0).view(2, 2).half()),
        lambda: torch.tensor([True, False]),
    ],
)
def test_tensors_of_any_strides_are_read_as_they_are(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    want = make().detach()
    torch.save({"x": make(), "y": [want, (1, 2.5, None, "a", True, -(1 << 40))]}, tmp_path / "x.pt")
    with File(tmp_path / "x.pt") as file:
        value = TorchFile(file).value
        assert value["y"][1] == (1, 2.5, None, "a", True, -(1 << 40))
        source = value["x"]
        assert isinstance(source, Source)
        assert torch.equal(source.whole(), want)
        for start in range(source.numel):  # from anywhere to anywhere
            out = torch.empty(min(5, source.numel - start), dtype=source.dtype)
            source.fill(out, start)
            assert torch.equal(out, want.reshape(-1)[start : start + 5])


def test_what_is_written_is_what_torch_reads(tmp_path: Path) -> None:
    values = [torch.randn(3, 2), torch.tensor(1.5), torch.ones(0, 2), torch.arange(3), torch.ones(2).bfloat16()]
    descriptor = os.open(tmp_path / "x.pt", os.O_RDWR | os.O_CREAT)
    write(descriptor, {"tensors": [constant(v) for v in values], "plain": {"a": (1, None, 2.5)}})
    got = torch.load(tmp_path / "x.pt", weights_only=True)
    assert got["plain"] == {"a": (1, None, 2.5)}
    torch.testing.assert_close(got["tensors"], values, rtol=0, atol=0)


# --- what does not fit ---


def files(folder: Path, change: Callable[[dict[str, Any]], None]) -> tuple[Path, Path]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    change(state)
    torch.save(state, folder / "o.pt")
    save_file(model.state_dict(), folder / "m.safetensors")
    return folder / "m.safetensors", folder / "o.pt"


def group(state: dict[str, Any]) -> dict[str, Any]:
    return state["param_groups"][0]


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "names without weights": (
        lambda s: (s["state"].update(a=s["state"]["bias"], b=s["state"]["bias"]), group(s)["params"].extend("abc")),
        r"3 of the optimizer's state that have no weights \('a', 'b', 'c'\)",
    ),
    "state in no group": (lambda s: group(s)["params"].remove("bias"), r"in none of its parameter groups \('bias'\)"),
    "another shape": (lambda s: s["state"]["bias"].update(exp_avg=torch.ones(3)), r"'bias' has shape \(2,\)"),
    "a moment missing": (lambda s: s["state"]["bias"].pop("exp_avg"), r"'bias' has exp_avg_sq, step"),
    "amsgrad's state": (lambda s: s["state"]["bias"].update(max_exp_avg_sq=torch.ones(2)), "max_exp_avg_sq"),
    "amsgrad": (lambda s: group(s).update(amsgrad=True), "amsgrad=True"),
    "Adam": (lambda s: group(s).update(decoupled_weight_decay=False), "decoupled_weight_decay"),
    "half a step": (lambda s: s["state"]["bias"].update(step=torch.tensor(1.5)), "step that is no count"),
    "a negative step": (lambda s: s["state"]["bias"].update(step=-1), "step that is no count"),
    "a step that is nan": (lambda s: s["state"]["bias"].update(step=torch.tensor(float("nan"))), "no count"),
    "no lr": (lambda s: group(s).pop("lr"), "lacks one of lr"),
    "an lr that is nan": (lambda s: group(s).update(lr=float("nan")), "lacks one of lr"),
    "a negative lr": (lambda s: group(s).update(lr=-1.0), "lr=-1.0"),
    "one beta": (lambda s: group(s).update(betas=(0.9,)), "betas"),
    "a setting that is no number": (lambda s: group(s).update(other=[1, {}]), "'other'"),
    "counted parameters": (lambda s: group(s).update(params=[0, 1]), "get_optimizer_state_dict"),
    "moments that are whole numbers": (lambda s: s["state"]["bias"].update(exp_avg=torch.arange(2)), "no floating"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_is_no_state_of_these_weights_is_named_before_anything_is_written(name: str, tmp_path: Path) -> None:
    change, says = MISFITS[name]
    weights, optimizer = files(tmp_path, change)
    with pytest.raises(tiered.UsageError, match=says):
        tiered.import_checkpoint(weights, tmp_path / "back", optimizer=optimizer)
    assert not (tmp_path / "back").exists()


def test_moments_of_a_tensor_of_whole_numbers_are_refused(tmp_path: Path) -> None:
    weights, optimizer = files(tmp_path, lambda _: None)
    save_file({"weight": torch.ones(2, 3), "bias": torch.arange(2)}, weights)
    with pytest.raises(tiered.UsageError, match=r"no floating tensors \('bias'\)"):
        tiered.import_checkpoint(weights, tmp_path / "back", optimizer=optimizer)


def test_weights_named_by_hand_take_their_moments_with_them(tmp_path: Path) -> None:
    weights, optimizer = files(tmp_path, lambda _: None)
    tiered.import_checkpoint(weights, tmp_path / "back", optimizer=optimizer, names={"": "model."})
    tiered.export_checkpoint(tmp_path / "back", tmp_path / "o2.pt", format="adamw", names={"model.bias": "b"})
    got = torch.load(tmp_path / "o2.pt", weights_only=True)
    assert got["state"].keys() == {"model.weight", "b"}
    assert got["param_groups"][0]["params"] == ["model.weight", "b"]


# --- hostile ---


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


class Slots:
    pass


def pickled(value: Any, protocol: int) -> bytes:
    return pickle.dumps(value, protocol=protocol)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value", [Evil(), {"state": Evil()}, Slots(), print, open, [{1, 2}], 1j, b"bytes", bytearray(3)]
)
def test_a_pickle_that_asks_for_anything_is_refused_and_nothing_is_run(
    value: Any, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(inert.Unreadable):
        inert.read(pickled(value, protocol), {"collections.OrderedDict"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_pickles_of_every_protocol_that_torch_has_used_are_read(protocol: int) -> None:
    value = {
        "a": [1, -1, 300, 70_000, 1 << 40, -(1 << 70), 2.5, None, True, False, "ü" * 300, (), (1,), (1, 2, 3, 4)],
        5: {},
    }
    value["again"] = value["a"]
    got = inert.read(pickled(value, protocol), ())
    assert got == value
    assert inert.read(pickled(OrderedDict(a=1), protocol), {"collections.OrderedDict"}) == {"a": 1}


def test_a_file_of_torch_with_code_in_it_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights, optimizer = files(tmp_path, lambda s: s.update(extra=Evil()))
    with pytest.raises(tiered.CorruptDataError, match=r"asks for 'posix\.mkdir'") as caught:
        tiered.import_checkpoint(weights, tmp_path / "back", optimizer=optimizer)
    assert caught.value.filename == str(optimizer)
    assert not (tmp_path / "evil").exists()
    torch.save({"state": {}, "param_groups": []}, optimizer, _use_new_zipfile_serialization=False)
    with pytest.raises(tiered.CorruptDataError, match="zip"):
        tiered.import_checkpoint(weights, tmp_path / "back", optimizer=optimizer)


BOMBS: dict[str, bytes] = {
    "a memo of a huge number": b"\x80\x02}r\xff\xff\xff\xff.",
    "a text longer than the file": b"\x80\x04X\xff\xff\xff\x7fabc.",
    "a bytearray longer than memory": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\x00\x00.",
    "a frame longer than memory": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}",
    "an empty stack": b"\x80\x02.",
    "a mark alone": b"\x80\x02(.",
    "no end": b"\x80\x02}",
    "nothing": b"",
    "a tuple as a key, in tuples": b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",
    "a number of many digits": b"I" + b"9" * 100_000 + b"\n.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_made_to_exhaust_its_reader_is_refused(name: str) -> None:
    with contextlib.suppress(inert.Unreadable):
        assert inert.read(BOMBS[name], ()) == {}


def test_a_file_whose_lists_hold_each_other_many_times_is_read_once_each(tmp_path: Path) -> None:
    value: Any = "x"
    for _ in range(14):
        value = [value] * 50
    torch.save({"state": {}, "param_groups": [], "laughs": value}, tmp_path / "o.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    tiered.import_checkpoint(tmp_path / "m.safetensors", tmp_path / "back", optimizer=tmp_path / "o.pt")


def test_a_file_of_torch_cut_or_changed_anywhere_gives_one_kind_of_error(tmp_path: Path) -> None:
    weights, optimizer = files(tmp_path, lambda _: None)
    good = optimizer.read_bytes()
    draw = random.Random(0)
    for attempt in range(400):
        at = draw.randrange(len(good))
        bad = good[:at] if attempt % 4 == 0 else good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :]
        optimizer.write_bytes(bad)
        try:
            tiered.import_checkpoint(weights, tmp_path / "back", optimizer=optimizer, force=True)
        except (tiered.CorruptDataError, tiered.UsageError):
            continue


def tampered(good: bytes, change: Callable[[dict[str, bytes]], None], compress: int = zipfile.ZIP_STORED) -> bytes:
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    change(parts)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compress) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("change", "compress"),
    [
        (lambda parts: parts.pop("o/data.pkl"), zipfile.ZIP_STORED),
        (lambda parts: parts.pop("o/data/1"), zipfile.ZIP_STORED),
        (lambda parts: parts.update({"o/data/1": b"1234"}), zipfile.ZIP_STORED),
        (lambda parts: parts.update({"o/byteorder": b"big"}), zipfile.ZIP_STORED),
        (lambda parts: parts.update({"b/data.pkl": b""}), zipfile.ZIP_STORED),
        (lambda parts: parts.update({"o/data.pkl": b""}), zipfile.ZIP_STORED),
        (lambda parts: None, zipfile.ZIP_DEFLATED),
    ],
)
def test_a_zip_that_is_not_as_torch_writes_it_is_refused(
    change: Callable[[dict[str, bytes]], None], compress: int, tmp_path: Path
) -> None:
    weights, optimizer = files(tmp_path, lambda _: None)
    optimizer.write_bytes(tampered(optimizer.read_bytes(), change, compress))
    with pytest.raises(tiered.CorruptDataError) as caught:
        tiered.import_checkpoint(weights, tmp_path / "back", optimizer=optimizer)
    assert caught.value.filename == str(optimizer)
    assert not (tmp_path / "back").exists()
