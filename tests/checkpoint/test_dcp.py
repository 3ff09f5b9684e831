"""Checkpoints go to torch.distributed.checkpoint, which FSDP2 loads on any ranks, and come back from what it saved."""

import errno
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.fsdp_worker import Tower, batch
from checkpoint.test_save_load import Net, network, on_ranks, outcome, session, train, uninterrupted
from checkpoint.test_save_load import equal as same_outcome
from ranks.launch import run_ranks
from safetensors.torch import load_file, save_file
from threaded_ranks import sharded
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import tiered
from tiered.checkpoint import boxes as geometry
from tiered.checkpoint import chunks, convert
from tiered.checkpoint import dcp as ours

WORKER = Path(__file__).with_name("fsdp_worker.py")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*"),
]


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a test are in several chunks."""
    monkeypatch.setattr(ours, "CHUNK_BYTES", 100)


def saved(folder: Path) -> Path:
    with session() as (model, optimizer):
        train(model, optimizer, range(3))
        return tiered.save(model, optimizer, folder)


def plain(seed: int = 9) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(seed)
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return model, torch.optim.AdamW([{"params": decays}, {"params": rest}], lr=1.0)


def loaded_plainly(folder: Path, model_key: str = "model", optimizer_key: str = "optim") -> dict[str, Any]:
    """What dcp.load puts into the state dicts of a plain model and optimizer."""
    model, optimizer = plain()
    state = {model_key: get_model_state_dict(model), optimizer_key: get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    return {"model": state[model_key], "optim": state[optimizer_key]}


# --- out ---


@pytest.mark.usefixtures("small_chunks")
def test_plain_torch_loads_every_value_and_setting_by_its_name(tmp_path: Path) -> None:
    with session() as (model, optimizer):
        train(model, optimizer, range(3))
        tiered.save(model, optimizer, tmp_path / "saved")
        want = outcome(model, optimizer)
        names = {id(p): name for name, p in model.named_parameters()}
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    assert tiered.export_checkpoint(tmp_path / "saved", tmp_path / "dcp", format="dcp") == tmp_path / "dcp"
    got = loaded_plainly(tmp_path / "dcp")
    torch.testing.assert_close(dict(got["model"]), want["values"], rtol=0, atol=0)
    states = {order[number]: state for number, state in want["state"].items()}
    for name, state in got["optim"]["state"].items():
        zeros = {key: torch.zeros_like(value) for key, value in state.items()}
        torch.testing.assert_close(state, states.get(name, zeros), rtol=0, atol=0)
    assert states.keys() <= got["optim"]["state"].keys()
    assert [group["lr"] for group in got["optim"]["param_groups"]] == [1e-2, 1e-2]
    assert [group["weight_decay"] for group in got["optim"]["param_groups"]] == [1e-2, 0.0]
    assert [group["betas"] for group in got["optim"]["param_groups"]] == [(0.9, 0.999)] * 2


@pytest.mark.parametrize("keys", [("model", ""), ("a", "a"), ("model", "model.0"), ("app.model", "app")])
def test_names_of_model_and_optimizer_that_could_not_be_told_apart_are_refused(
    keys: tuple[str, str], tmp_path: Path
) -> None:
    saved(tmp_path / "saved")
    with pytest.raises(tiered.UsageError, match="told apart"):
        tiered.export_checkpoint(tmp_path / "saved", tmp_path / "dcp", format="dcp", keys=keys)
    assert not (tmp_path / "dcp").exists()


def test_a_full_drive_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "saved")
    write = os.write

    def fails(descriptor: int, data: Any) -> int:
        if "__0_0" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    with monkeypatch.context() as patch, pytest.raises(tiered.StorageError, match="No space left"):
        patch.setattr(os, "write", fails)
        tiered.export_checkpoint(tmp_path / "saved", tmp_path / "dcp", format="dcp")
    assert not (tmp_path / "dcp").exists()


def test_who_loads_a_flattened_optimizer_state_finds_every_name(tmp_path: Path) -> None:
    """As torchtitan does. Where a parameter is named as a group is numbered, the name is the group's."""
    tiered.export_checkpoint(saved(tmp_path / "saved"), tmp_path / "dcp", format="dcp")
    model, optimizer = plain()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    nested = loaded_plainly(tmp_path / "dcp")["optim"]
    for group in nested["param_groups"]:
        for name in group["params"]:
            for setting, value in group.items():
                if setting != "params":
                    assert state["optim"][f"param_groups.{name}.{setting}"] == value
            for kind, value in nested["state"].get(name, {}).items():  # of one that is frozen none
                assert torch.equal(state["optim"][f"state.{name}.{kind}"], value)


def test_what_several_ranks_saved_goes_out_whole(tmp_path: Path) -> None:
    def program(rank: int) -> dict[str, Any]:
        with session() as (model, optimizer):
            train(model, optimizer, range(2), rank, 3)
            tiered.save(model, optimizer, tmp_path / "saved")
            return outcome(model, optimizer)

    want = on_ranks(3, program)[0]
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "dcp", format="dcp")
    torch.testing.assert_close(dict(loaded_plainly(tmp_path / "dcp")["model"]), want["values"], rtol=0, atol=0)


def test_keys_may_be_nested_and_the_optimizer_left_out(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "dcp", format="dcp", keys=("app.model", "app.optim"))
    model, optimizer = plain()
    state = {"app": {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert state["app"]["optim"]["param_groups"][0]["lr"] == 1e-2
    with pytest.raises(tiered.UsageError, match="its names begin with app; say which"):
        tiered.import_checkpoint(tmp_path / "dcp", tmp_path / "back")
    tiered.import_checkpoint(tmp_path / "dcp", tmp_path / "back", keys=("app.model", "app.optim"))
    tiered.export_checkpoint(tmp_path / "back", tmp_path / "flat", format="dcp", keys=("", None))
    got = network(9).state_dict()
    dcp.load(got, checkpoint_id=tmp_path / "flat")
    torch.testing.assert_close(dict(got), dict(state["app"]["model"]), rtol=0, atol=0)
    assert {str(name).split(".")[0] for name in metadata(tmp_path / "flat").state_dict_metadata} == {
        name.split(".")[0] for name in got
    }
    tiered.import_checkpoint(tmp_path / "flat", tmp_path / "again", keys=("", "optim"))


def metadata(folder: Path) -> Any:
    return dcp.FileSystemReader(folder).read_metadata()


def test_a_tied_weight_is_there_once_under_both_names_and_zeros_take_no_place(tmp_path: Path) -> None:
    save_file({"w": torch.randn(1000, 300)}, tmp_path / "w.safetensors")
    tiered.import_checkpoint(tmp_path / "w.safetensors", tmp_path / "saved")
    body = convert.find(tmp_path / "saved").read()
    with sharded(model := nn.Linear(300, 1000, bias=False), device="cpu") as (_, optimizer, _):
        tiered.load(model, None, tmp_path / "saved", names={"weight": "w"})
        tiered.save(model, optimizer, tmp_path / "fresh")  # an optimizer that never took a step
    assert body.parameters["w"].step == 0
    tiered.export_checkpoint(tmp_path / "fresh", tmp_path / "dcp", format="dcp")
    size = sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir())
    assert size < 1000 * 300 * 4 + 40_000
    state = {"optim": {"state": {"weight": {"exp_avg": torch.ones(1000, 300)}}}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert not state["optim"]["state"]["weight"]["exp_avg"].any()
    saved(tmp_path / "net")
    tiered.export_checkpoint(tmp_path / "net", tmp_path / "tied", format="dcp")
    places = metadata(tmp_path / "tied").storage_data
    found = {index.fqn: place.offset for index, place in places.items()}
    assert found["model.first.weight"] == found["model.last.weight"]


# --- there and back ---


@pytest.mark.usefixtures("small_chunks")
def test_a_run_goes_on_bit_for_bit_from_what_went_out_and_came_back(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "dcp", format="dcp")
    tiered.import_checkpoint(tmp_path / "dcp", tmp_path / "back")
    with session(9, 1.0) as (model, optimizer):
        tiered.load(model, optimizer, tmp_path / "back")
        assert optimizer.updates == 3
        train(model, optimizer, range(3, 5))
        same_outcome(outcome(model, optimizer), uninterrupted())


def test_what_plain_torch_saved_comes_in_with_its_strides(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 7)).to(memory_format=torch.channels_last)
    model[1].weight = nn.Parameter(torch.randn(5, 7).t())
    want = {name: value.clone() for name, value in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    tiered.import_checkpoint(tmp_path / "dcp", tmp_path / "back")
    tiered.export_checkpoint(tmp_path / "back", tmp_path / "hf")
    torch.testing.assert_close(load_file(tmp_path / "hf" / "model.safetensors"), want, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("flat",)])
def test_what_two_ranks_of_fsdp_saved_comes_in_and_trains_on(form: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    ends = run_ranks(WORKER, ["save", str(folder), *form], 2, timeout=180)
    assert [end.returncode for end in ends] == [0, 0], ends[0].stdout
    want = torch.load(f"{folder}-want.pt", weights_only=False)
    tiered.import_checkpoint(folder, tmp_path / "back")
    torch.manual_seed(5)
    with sharded(Tower(), device="cpu") as (model, _, _):
        decays = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        optimizer = tiered.AdamW([{"params": decays}, {"params": rest, "weight_decay": 1.0}], lr=1.0)
        tiered.load(model, optimizer, tmp_path / "back")
        assert optimizer.updates == 3
        assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-2, 0.0]
        got = {name: value.clone() for name, value in model.state_dict().items()}
        torch.testing.assert_close(got, dict(want["model"]), rtol=0, atol=0)
        for seed in range(3, 5):
            model(batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        later = {name: value.clone() for name, value in model.state_dict().items()}
    torch.testing.assert_close(later, dict(want["later"]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_fsdp_load_an_export_and_train_on(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with sharded(Tower(), device="cpu") as (model, _, _):
        decays = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        optimizer = tiered.AdamW([{"params": decays}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)

        def go(seeds: range) -> dict[str, torch.Tensor]:
            for seed in seeds:
                model(batch(seed)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return {name: value.clone() for name, value in model.state_dict().items()}

        want = go(range(3))
        tiered.save(model, optimizer, tmp_path / "saved")
        later = go(range(3, 5))
    folder = tiered.export_checkpoint(tmp_path / "saved", tmp_path / "dcp", format="dcp")
    ends = run_ranks(WORKER, ["load", str(folder)], ranks, timeout=180)
    assert [end.returncode for end in ends] == [0] * ranks, ends[0].stdout
    got = torch.load(f"{folder}-got.pt", weights_only=False)
    torch.testing.assert_close(dict(got["model"]), want, rtol=0, atol=0)
    torch.testing.assert_close(dict(got["later"]), later, rtol=1e-5, atol=1e-6)
    assert got["optim"]["param_groups"][0]["lr"] == 1e-2


# --- boxes ---


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 4), (1, 5, 1, 2), (2, 2, 2, 2)])
def test_any_range_of_a_tensor_is_boxes_that_hold_its_elements_in_order(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    values = torch.arange(numel).view(shape)
    origin = (tuple(0 for _ in shape), shape)
    for start in range(numel):
        for stop in range(start, numel + 1):
            found = list(geometry.boxes(shape, start, stop))
            flat = [values[geometry.within(box, origin)].reshape(-1) for box in found]
            assert [int(v) for each in flat for v in each] == list(range(start, stop))
            for box, each in zip(found, flat, strict=True):
                assert geometry.position(box, origin) == int(each[0])


def test_boxes_that_overlap_leave_gaps_or_reach_out_are_told_from_those_that_fit() -> None:
    draw = random.Random(0)

    def cut(box: geometry.Box) -> list[geometry.Box]:
        offsets, sizes = box
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        if not axes or draw.random() < 0.3:
            return [box]
        axis = draw.choice(axes)
        at = draw.randrange(1, sizes[axis])
        low = (*sizes[:axis], at, *sizes[axis + 1 :])
        high = (*sizes[:axis], sizes[axis] - at, *sizes[axis + 1 :])
        moved = (*offsets[:axis], offsets[axis] + at, *offsets[axis + 1 :])
        return cut((offsets, low)) + cut((moved, high))

    for shape in [(5,), (4, 6), (3, 4, 5), ()] * 30:
        parts = cut((tuple(0 for _ in shape), shape))
        draw.shuffle(parts)
        assert geometry.exact(shape, parts)
        assert not geometry.exact(shape, [*parts, parts[0]])
        assert not geometry.exact(shape, parts[1:])
        if len(parts) > 1 and parts[0][1] != parts[1][1]:
            assert not geometry.exact(shape, [(parts[0][0], parts[1][1]), *parts[1:]])
        if shape:
            assert not geometry.exact(shape, [((-1, *parts[0][0][1:]), parts[0][1]), *parts[1:]])


@pytest.mark.parametrize("split", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_chunks_cut_in_any_dimension_are_read_in_the_order_of_the_tensor(
    split: tuple[int, ...], tmp_path: Path
) -> None:
    want = torch.randn(4, 6, 5)
    cuts = [
        [(0, size // 2), (size // 2, size - size // 2)] if axis in split else [(0, size)]
        for axis, size in enumerate(want.shape)
    ]
    boxes = [((a, b, c), (i, j, k)) for a, i in cuts[0] for b, j in cuts[1] for c, k in cuts[2]]
    random.Random(0).shuffle(boxes)
    out = ours._Out(tmp_path / "__0_0.distcp")
    with out:
        writing = ours._Writing(out)
        written = [
            (box, writing._save(want[geometry.within(box, ((0, 0, 0), want.shape))].contiguous())) for box in boxes
        ]
        writing._enter([("model", "w")], want.dtype, tuple(want.shape), written)
    (tmp_path / ".metadata").write_bytes(writing.metadata())
    with chunks.opened(tmp_path) as (tensors, _):
        source = tensors["model.w"]
        for start in range(0, source.numel, 7):
            part = torch.empty(min(23, source.numel - start))
            source.fill(part, start)
            assert torch.equal(part, want.reshape(-1)[start : start + 23])


# --- refused ---


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What plain torch saved."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def refused(folder: Path, kind: type[tiered.TieredError] = tiered.CorruptDataError) -> str:
    with pytest.raises(kind) as caught:
        tiered.import_checkpoint(folder, folder.parent / "back")
    assert not (folder.parent / "back" / "manifest.json").exists()
    return str(caught.value)


def place(made: Any, name: str) -> Any:
    return next(info for index, info in made.storage_data.items() if index.fqn == name)


def move(made: Any, name: str, **fields: Any) -> None:
    for field, value in fields.items():
        setattr(place(made, name), field, value)


def tensor(made: Any, name: str = "model.weight") -> Any:
    return made.state_dict_metadata[name]


def chunk(made: Any) -> Any:
    return tensor(made).chunks[0]


def reshape(made: Any, name: str) -> None:
    for each in getattr(tensor(made, name), "chunks", ()):
        if len(each.sizes) == 2:
            tensor(made, name).size = each.sizes = torch.Size([3, 2])


CRAFTED: dict[str, Callable[[Any], Any]] = {
    "a path out of the folder": lambda m: move(m, "model.weight", relative_path="../../etc/passwd"),
    "an absolute path": lambda m: move(m, "model.weight", relative_path="/etc/passwd"),
    "a path that is no text": lambda m: move(m, "model.weight", relative_path=3),
    "the metadata themselves": lambda m: move(m, "model.weight", relative_path=".metadata"),
    "a negative offset": lambda m: move(m, "model.weight", offset=-1),
    "an offset beyond the end": lambda m: move(m, "model.weight", offset=1 << 40),
    "an absurd length": lambda m: move(m, "model.weight", length=1 << 60),
    "a length that is no number": lambda m: move(m, "model.weight", length=1.5),
    "an extension": lambda m: move(m, "model.weight", transform_descriptors=["zstd"]),
    "no place": lambda m: [m.storage_data.pop(i) for i in list(m.storage_data) if i.fqn == "model.weight"],
    "an overflowing shape": lambda m: setattr(tensor(m), "size", torch.Size([1 << 40, 1 << 40])),
    "a gap between chunks": lambda m: setattr(chunk(m), "sizes", torch.Size([1, 3])),
    "a chunk that reaches out": lambda m: setattr(chunk(m), "sizes", torch.Size([3, 3])),
    "a chunk twice": lambda m: tensor(m).chunks.append(chunk(m)),
    "no chunks": lambda m: tensor(m).chunks.clear(),
    "chunks of other dimensions": lambda m: setattr(chunk(m), "offsets", torch.Size([0])),
    "a complex dtype": lambda m: setattr(tensor(m).properties, "dtype", torch.complex64),
    "chunks of another shape": lambda m: [reshape(m, name) for name in m.state_dict_metadata if "weight" in name],
    "a chunk of another dtype": lambda m: setattr(tensor(m).properties, "dtype", torch.float16),
    "names for tensors": lambda m: m.state_dict_metadata.update({"model.weight": "x"}),
    "no tensors": lambda m: setattr(m, "state_dict_metadata", None),
    "no places": lambda m: setattr(m, "storage_data", []),
    "code": lambda m: setattr(m, "planner_data", Evil()),
    "code as a name": lambda m: setattr(m, "planner_data", os.system),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_metadata_are_refused_by_name(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    made = metadata(folder)
    CRAFTED[name](made)
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    assert str(folder) in refused(folder)
    assert not (folder.parent / "evil").exists()


def test_metadata_that_are_cut_changed_or_no_pickle_give_one_kind_of_error(folder: Path) -> None:
    good = (folder / ".metadata").read_bytes()
    draw = random.Random(0)
    for attempt in range(300):
        at = draw.randrange(len(good))
        bad = good[:at] if attempt % 4 == 0 else good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :]
        (folder / ".metadata").write_bytes(bad)
        try:
            tiered.import_checkpoint(folder, folder.parent / "back", force=True)
        except (tiered.StorageError, tiered.UsageError):
            continue
    for text in (b"", b"\x80", b"{}", b"PK\3\4"):
        (folder / ".metadata").write_bytes(text)
        with pytest.raises(tiered.CorruptDataError, match="not sound metadata"):
            tiered.import_checkpoint(folder, folder.parent / "back", force=True)


def test_a_data_file_that_is_missing_or_cut_is_named(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    good = file.read_bytes()
    file.write_bytes(good[: len(good) // 2])
    assert "truncated" in refused(folder)
    assert str(file) in refused(folder)
    file.unlink()
    assert str(file) in refused(folder, tiered.StorageError)


def test_code_in_a_chunk_or_in_a_setting_is_refused_and_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    good = (folder / "__0_0.distcp").read_bytes()
    torch.save(Evil(), folder / "evil.pt")
    data = (folder / "evil.pt").read_bytes()
    (folder / "evil.pt").unlink()
    (folder / "__0_0.distcp").write_bytes(good + data)
    for name in ("model.weight", "optim.param_groups.0.lr"):
        made = metadata(folder)
        move(made, name, offset=len(good), length=len(data))
        before = (folder / ".metadata").read_bytes()
        (folder / ".metadata").write_bytes(pickle.dumps(made))
        assert "posix.mkdir" in refused(folder)
        (folder / ".metadata").write_bytes(before)
    assert not (folder.parent / "evil").exists()


def test_steps_that_are_plain_numbers_come_in(tmp_path: Path) -> None:
    state = {"state": {"w": {"step": 5, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}}
    groups = [{"params": ["w"], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}]
    dcp.save({"model": {"w": torch.ones(2)}, "optim": {**state, "param_groups": groups}}, checkpoint_id=tmp_path / "d")
    tiered.import_checkpoint(tmp_path / "d", tmp_path / "back")
    assert convert.find(tmp_path / "back").read().step == 5


def test_what_is_in_a_model_and_no_tensor_is_named(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2), "extra": "text"}}, checkpoint_id=tmp_path / "dcp")
    assert "model.extra" in refused(tmp_path / "dcp", tiered.UsageError)


def test_a_model_that_has_both_names_of_a_tied_weight_loads_where_moments_have_one(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(12, 12)).backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    for name in ("first.weight", "last.weight"):
        moments = state["optim"]["state"].pop("first.weight" if name == "last.weight" else name)
        state["optim"]["state"][name] = moments
        for group in state["optim"]["param_groups"]:
            group["params"] = [name if each == "first.weight" else each for each in group["params"]]
        dcp.save(state, checkpoint_id=tmp_path / name)
        tiered.import_checkpoint(tmp_path / name, tmp_path / f"{name}-back")
        with sharded(network(5), device="cpu") as (run, own, _):
            tiered.load(run, own, tmp_path / f"{name}-back")
            assert own.updates == 1
            index = [n for n, _ in run.named_parameters()].index("first.weight")
            assert torch.equal(own.state_dict()["state"][index]["exp_avg"], moments["exp_avg"])
