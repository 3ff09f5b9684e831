"""Weights go to Hugging Face's layout and come back bit for bit; a folder that is not sound is refused by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_save_load import DRIVE, Net, network, on_ranks, session, train
from models import Gpt
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from threaded_ranks import sharded
from torch import nn

import tiered

Values = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Sums have one order."""


def saved(folder: Path, **settings: Any) -> Values:
    """Train, save there, and say what the weights are."""
    with session(**settings) as (model, optimizer):
        train(model, optimizer, range(2))
        tiered.save(model, optimizer, folder)
        return {name: value.clone() for name, value in model.state_dict().items()}


def loaded(folder: Path, build: Callable[[], nn.Module] = Net) -> Values:
    torch.manual_seed(9)
    with sharded(build(), device="cpu") as (model, optimizer, _):
        tiered.load(model, optimizer, folder)
        assert optimizer.updates == 0, "moments are fresh"
        return {name: value.clone() for name, value in model.state_dict().items()}


def equal(got: Values, want: Values) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# --- round trips ---


@pytest.mark.parametrize("limit", ["5GB", 900, 1])
def test_weights_go_out_and_come_back_bit_for_bit_whole_or_in_shards(limit: int | str, tmp_path: Path) -> None:
    want = saved(tmp_path / "saved")
    assert tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf", max_shard_size=limit) == tmp_path / "hf"
    tiered.import_checkpoint(tmp_path / "hf", tmp_path / "back")
    equal(loaded(tmp_path / "back"), want)
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "hf", "back"}, "nothing is left beside"


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_several_ranks_saved_in_parts_is_one_tensor(ranks: int, tmp_path: Path) -> None:
    def program(rank: int) -> Values:
        with session(nvme=tmp_path, **DRIVE) as (model, optimizer):
            train(model, optimizer, range(2), rank, ranks)
            tiered.save(model, optimizer, tmp_path / "saved")
            return {name: value.clone() for name, value in model.state_dict().items()}

    want = on_ranks(ranks, program)[0]
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf")
    got = load_file(tmp_path / "hf" / "model.safetensors")
    equal(got, {name: want[name] for name in got})
    tiered.import_checkpoint(tmp_path / "hf", tmp_path / "back")
    equal(loaded(tmp_path / "back"), want)


def test_the_files_are_what_the_safetensors_library_reads_with_a_tied_tensor_once(tmp_path: Path) -> None:
    want = saved(tmp_path / "saved")
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    with safe_open(str(file), framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "last.weight": "first.weight"}
    got = load_file(file)
    assert got.keys() == want.keys() - {"last.weight"}
    equal(got, {name: want[name] for name in got})
    model = network(5)
    assert load_model(model, str(file)) == (set(), [])
    equal(dict(model.state_dict()), want)


def test_shards_are_filled_up_to_the_limit_and_the_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    want = saved(tmp_path / "saved")
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf", max_shard_size=1200)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    count = len(list((tmp_path / "hf").iterdir())) - 1
    assert count > 1
    shards = {f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)}
    assert set(index["weight_map"].values()) == shards
    assert index["metadata"]["total_size"] == sum(want[name].nbytes for name in index["weight_map"])
    for file in shards:
        held = load_file(tmp_path / "hf" / file)
        assert sum(value.nbytes for value in held.values()) <= 1200
        assert held.keys() == {name for name, where in index["weight_map"].items() if where == file}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_are_cast_as_torch_rounds_and_buffers_are_not(dtype: torch.dtype, tmp_path: Path) -> None:
    want = saved(tmp_path / "saved")
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf", dtype=dtype)
    got = load_file(tmp_path / "hf" / "model.safetensors")
    equal(
        got, {name: want[name] if name.startswith("norm.r") or "num" in name else want[name].to(dtype) for name in got}
    )
    tiered.import_checkpoint(tmp_path / "hf", tmp_path / "back")  # low precision in, exact in the masters
    precision = tiered.MixedPrecision(param_dtype=torch.bfloat16)
    with session(9, precision=precision) as (model, optimizer):
        tiered.load(model, optimizer, tmp_path / "back")
        held = {name: value.clone() for name, value in model.state_dict().items()}
    equal({name: held[name] for name in got}, {name: value.to(held[name].dtype) for name, value in got.items()})


def test_the_master_of_a_model_in_low_precision_is_what_goes_out(tmp_path: Path) -> None:
    want = saved(tmp_path / "saved", precision=tiered.MixedPrecision(param_dtype=torch.bfloat16))
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf")
    got = load_file(tmp_path / "hf" / "model.safetensors")
    assert got["blocks.1.weight"].dtype is torch.float32
    equal(got, {name: want[name] for name in got})


def test_a_value_that_a_dtype_cannot_hold_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.tensor([1.0, 7e4])}, tmp_path / "big.safetensors")
    with pytest.raises(tiered.UsageError, match=r"'b': element 1 is 70000\.0, which torch\.float16 does not hold"):
        tiered.import_checkpoint(tmp_path / "big.safetensors", tmp_path / "back", dtype=torch.float16)
    assert list((tmp_path / "back").iterdir()) == []
    tiered.import_checkpoint(tmp_path / "big.safetensors", tmp_path / "back")
    with pytest.raises(tiered.UsageError, match="'b': element 1"):
        tiered.export_checkpoint(tmp_path / "back", tmp_path / "hf", dtype=torch.float16)
    assert {path.name for path in tmp_path.iterdir()} == {"big.safetensors", "back"}


def test_every_bit_of_nan_infinity_and_signed_zero_passes(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, -0x400001, 0x7F800000, -0x800000, -0x80000000, 1], dtype=torch.int32)
    save_file({"x": bits.view(torch.float32)}, tmp_path / "x.safetensors")
    tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back")
    tiered.export_checkpoint(tmp_path / "back", tmp_path / "hf")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["x"].view(torch.int32), bits)


def test_what_was_imported_goes_out_again_as_it_came(tmp_path: Path) -> None:
    values = {
        "w": torch.randn(3, 2),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "e": torch.ones(0, 4),
    }
    values["half"] = torch.randn(5).half()
    save_file(values, tmp_path / "any-name.safetensors")
    tiered.import_checkpoint(tmp_path / "any-name.safetensors", tmp_path / "back")
    tiered.export_checkpoint(tmp_path / "back", tmp_path / "hf")
    equal(load_file(tmp_path / "hf" / "model.safetensors"), values)


def test_the_last_of_several_checkpoints_is_exported(tmp_path: Path) -> None:
    with session() as (model, optimizer):
        for seed in range(2):
            train(model, optimizer, range(seed, seed + 1))
            tiered.save(model, optimizer, tmp_path / "run", keep=2)
        want = model.state_dict()["gain"].clone()
    tiered.export_checkpoint(tmp_path / "run", tmp_path / "hf")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["gain"], want)


# --- tied, with and without their other name ---


def test_a_tied_model_loads_whichever_of_its_names_a_file_has(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Gpt()
    want = {name: value.clone() for name, value in plain.state_dict().items()}
    names: dict[int, list[str]] = {}
    for name, param in plain.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    (first, second), *_ = (each for each in names.values() if len(each) > 1)
    for number, left in enumerate(({first}, {second}, set())):
        save_file({n: v.clone() for n, v in want.items() if n not in left}, tmp_path / f"{number}.safetensors")
        tiered.import_checkpoint(tmp_path / f"{number}.safetensors", tmp_path / f"back{number}")
        equal(loaded(tmp_path / f"back{number}", type(plain)), want)


def test_names_tied_here_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in network().state_dict().items()}
    values["last.weight"] += 1
    save_file(values, tmp_path / "x.safetensors")
    tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back")
    with (
        sharded(network(), device="cpu") as (model, optimizer, _),
        pytest.raises(tiered.UsageError, match=r"1 of the checkpoint not used \(last\.weight\)"),
    ):
        tiered.load(model, optimizer, tmp_path / "back")


# --- names ---


def test_names_change_one_by_one_or_by_their_beginning_both_ways(tmp_path: Path) -> None:
    want = saved(tmp_path / "saved")
    out = {"gain": "scale", "blocks.": "model.layers.", "norm.": "model.norm."}
    tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf", names=out)
    got = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(got["scale"], want["gain"])
    assert torch.equal(got["model.layers.1.weight"], want["blocks.1.weight"])
    assert torch.equal(got["model.norm.running_var"], want["norm.running_var"])
    assert not {name for name in got if name.startswith(("blocks", "norm"))}
    tiered.import_checkpoint(tmp_path / "hf", tmp_path / "back", names={v: k for k, v in out.items()})
    equal(loaded(tmp_path / "back"), want)


def test_an_empty_key_puts_a_beginning_before_every_other_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b.c": torch.ones(2)}, tmp_path / "x.safetensors")
    tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back", names={"": "model.", "a": "first"})
    tiered.export_checkpoint(tmp_path / "back", tmp_path / "hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"first", "model.b.c"}


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"x": "y", "z.": "q."}, r"2 that fit no name \('x', 'z\.'\)"),
        ({"a": "b.c"}, r"1 that several would have \('b\.c'\)"),
    ],
)
def test_names_that_fit_nothing_or_fall_together_are_named_before_anything_is_written(
    names: dict[str, str], says: str, tmp_path: Path
) -> None:
    save_file({"a": torch.ones(1), "b.c": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(tiered.UsageError, match=says):
        tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back", names=names)
    assert not (tmp_path / "back").exists()


def test_what_a_model_misses_of_an_import_is_named_when_it_loads(tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in network().state_dict().items() if name != "never"}
    save_file({**values, "other": torch.ones(2)}, tmp_path / "x.safetensors")
    tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back")
    with sharded(network(), device="cpu") as (model, optimizer, _), pytest.raises(tiered.UsageError) as refusal:
        tiered.load(model, optimizer, tmp_path / "back")
    assert "1 missing in the checkpoint (never)" in str(refusal.value)
    assert "1 of the checkpoint not used (other)" in str(refusal.value)


# --- refused ---


def crafted(folder: Path, header: Any, data: bytes = b"\0" * 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


HOSTILE: dict[str, Any] = {
    "a gap before the first": entry(shape=[3], data_offsets=[4, 16]),
    "an overlap": {**entry(), "v": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}},
    "data beyond the end": entry(shape=[5], data_offsets=[0, 20]),
    "data that nobody has": entry(shape=[3], data_offsets=[0, 12]),
    "an absurd shape": entry(shape=[1 << 62, 1 << 62]),
    "a shape of many absurd sizes": entry(shape=[1 << 52] * 10_000),
    "a negative size": entry(shape=[-2, -2]),
    "a size that is no number": entry(shape=["4"]),
    "a size that is true": entry(shape=[4, True]),
    "offsets backwards": entry(data_offsets=[16, 0]),
    "one offset": entry(data_offsets=[16]),
    "no offsets": {"w": {"dtype": "F32", "shape": [4]}},
    "a list for an entry": {"w": []},
    "a list for the header": [],
    "metadata that are no texts": {**entry(), "__metadata__": {"format": 1}},
    "no json": b"not json",
    "no text": b"\xff\xfe\xff\xff",
    "a name twice": b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, '
    b'"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
    "a deep nest": b"[" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_crafted_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = crafted(tmp_path / "hf", HOSTILE[name])
    with pytest.raises(tiered.CorruptDataError, match=r"not (a )?sound") as caught:
        tiered.import_checkpoint(folder, tmp_path / "back")
    assert caught.value.filename == str(folder / "model.safetensors")
    assert not (tmp_path / "back").exists()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", [0, 1, (1 << 64) - 1, 1 << 40, 10_000])
def test_a_header_of_absurd_length_is_refused_without_being_read(length: int, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}" + b"\0" * 100)
    with pytest.raises(tiered.CorruptDataError, match=f"a header of {length}"):
        tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(40), "b": torch.ones(3, 3)}, tmp_path / "x.safetensors")
    good = (tmp_path / "x.safetensors").read_bytes()
    for length in {0, 4, 8, 20, len(good) - 200, len(good) - 1}:
        (tmp_path / "x.safetensors").write_bytes(good[:length])
        with pytest.raises(tiered.CorruptDataError, match="truncated"):
            tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back")
    (tmp_path / "x.safetensors").write_bytes(good + b"\0")
    with pytest.raises(tiered.CorruptDataError):
        tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_dtypes_that_there_are_not_are_named(tmp_path: Path) -> None:
    folder = crafted(tmp_path / "hf", entry(dtype="F8_E4M3", shape=[16]))
    with pytest.raises(tiered.UsageError, match=r"'w' of .* has dtype 'F8_E4M3'"):
        tiered.import_checkpoint(folder, tmp_path / "back")
    save_file({"wide": torch.ones(2, dtype=torch.float64)}, tmp_path / "x.safetensors")
    with pytest.raises(tiered.UsageError, match=r"'wide'.*--dtype fp32"):
        tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back")
    tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "back", dtype=torch.float32)
    with pytest.raises(tiered.ConfigError, match="dtype"):
        tiered.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "other", dtype=torch.int8)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "..", ".hidden", "", "a\0b", 7, None, ["x"]]
)
def test_an_index_that_names_a_file_elsewhere_is_refused(name: Any, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"w": name}}))
    with pytest.raises(tiered.CorruptDataError, match="no name of a file beside it") as caught:
        tiered.import_checkpoint(tmp_path / "hf", tmp_path / "back")
    assert caught.value.filename == str(index)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    saved(tmp_path / "saved")
    return tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf", max_shard_size=1200)


def test_a_shard_that_is_missing_is_named(shards: Path, tmp_path: Path) -> None:
    gone = sorted(shards.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(tiered.StorageError) as caught:
        tiered.import_checkpoint(shards, tmp_path / "back")
    assert caught.value.filename == str(gone)
    assert not (tmp_path / "back").exists()


def test_all_that_an_index_and_its_shards_say_differently_is_named(shards: Path, tmp_path: Path) -> None:
    index = shards / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    file = body["weight_map"].pop("never")
    body["weight_map"] |= {"ghost": file, "spirit": file}
    index.write_text(json.dumps(body))
    with pytest.raises(tiered.CorruptDataError) as caught:
        tiered.import_checkpoint(shards, tmp_path / "back")
    assert f"2 missing (ghost in {file}, spirit in {file})" in str(caught.value)
    assert f"1 not in the index (never in {file})" in str(caught.value)


def test_a_folder_without_safetensors_says_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(tiered.StorageError, match=r"expected model\.safetensors"):
        tiered.import_checkpoint(tmp_path / "hf", tmp_path / "back")
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(tiered.StorageError, match=r"'pytorch_model\.bin' is a pickle"):
        tiered.import_checkpoint(tmp_path / "hf", tmp_path / "back")
    for name in ("a", "b"):
        (tmp_path / "hf" / f"{name}.safetensors").write_bytes(b"")
    with pytest.raises(tiered.StorageError, match=r"a\.safetensors, b\.safetensors"):
        tiered.import_checkpoint(tmp_path / "hf", tmp_path / "back")
    with pytest.raises(tiered.StorageError):
        tiered.import_checkpoint(tmp_path / "nowhere", tmp_path / "back")


def test_a_file_that_is_a_pipe_is_refused_and_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    os.mkfifo(tmp_path / "hf" / "model.safetensors")
    with pytest.raises(tiered.StorageError, match="no regular file"):
        tiered.import_checkpoint(tmp_path / "hf", tmp_path / "back")
    os.unlink(tmp_path / "hf" / "model.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "hf" / "model.safetensors").symlink_to(tmp_path / "blob")  # as in the caches of model hubs
    tiered.import_checkpoint(tmp_path / "hf", tmp_path / "back")


def test_loading_a_folder_of_another_format_says_what_makes_a_checkpoint_of_it(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "hf" / "model.safetensors")
    with (
        sharded(nn.Linear(2, 2), device="cpu") as (model, optimizer, _),
        pytest.raises(tiered.StorageError, match=r"'model\.safetensors'.*tiered import"),
    ):
        tiered.load(model, optimizer, tmp_path / "hf")


def test_a_buffer_that_safetensors_has_no_dtype_for_is_named(tmp_path: Path) -> None:
    plain = nn.Linear(2, 2)
    plain.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    with sharded(plain, device="cpu") as (model, optimizer, _):
        tiered.save(model, optimizer, tmp_path / "saved")
    with pytest.raises(tiered.UsageError, match=r"turns \(torch\.complex64\)"):
        tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_bytes_of_a_checkpoint_that_have_changed_are_never_exported(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*/*.safetensors")
    good = file.read_bytes()
    file.write_bytes(good[:-60] + bytes([good[-60] ^ 1]) + good[-59:])
    with pytest.raises(tiered.CorruptDataError, match="not those that were written"):
        tiered.export_checkpoint(tmp_path / "saved", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_name_that_a_safetensors_header_has_for_itself_is_refused(tmp_path: Path) -> None:
    with session() as (model, optimizer):
        tiered.save(model, optimizer, tmp_path / "saved")
        name = next(iter(model.state_dict()))
    with pytest.raises(tiered.UsageError, match="__metadata__"):
        tiered.export_checkpoint(tmp_path / "saved", tmp_path / "out", names={name: "__metadata__"})
    assert not (tmp_path / "out").exists()
