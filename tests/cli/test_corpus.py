"""The corpus: one text across its files, batches that depend on the seed alone, and errors that name the file."""

from pathlib import Path

import pytest
import torch

from tiered.cli.corpus import LEFT_OUT, Corpus
from tiered.errors import ConfigError, StorageError


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for path, text in zip(files, (b"abc", b"d", b"efghij"), strict=True):
        path.write_bytes(text)
    return files


def test_windows_read_across_the_seams_of_the_files(parts: list[Path]) -> None:
    corpus = Corpus(parts)
    text = b"abcdefghij"
    assert corpus.nbytes == len(text)
    for start in range(len(text)):
        for stop in range(start, len(text) + 1):
            assert corpus.window(start, stop - start) == text[start:stop]


def test_the_target_of_each_byte_is_the_next_byte(parts: list[Path]) -> None:
    tokens, targets = Corpus(parts).batch(range(5), batch=5, context=4, seed=1, index=0)
    assert tokens.shape == targets.shape == (5, 4)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)  # the text is the alphabet


def test_a_batch_depends_on_seed_and_index_alone(parts: list[Path]) -> None:
    corpus = Corpus(parts)
    torch.manual_seed(0)
    first, _ = corpus.batch(range(64), batch=64, context=2, seed=3, index=5)
    torch.manual_seed(1)
    again, _ = Corpus(parts).batch(range(64), batch=64, context=2, seed=3, index=5)
    other_index, _ = corpus.batch(range(64), batch=64, context=2, seed=3, index=6)
    other_seed, _ = corpus.batch(range(64), batch=64, context=2, seed=4, index=5)
    assert torch.equal(first, again)
    assert not torch.equal(first, other_index)
    assert not torch.equal(first, other_seed)


def test_the_rows_that_ranks_take_of_a_batch_are_the_batch(parts: list[Path]) -> None:
    corpus = Corpus(parts)
    joined = corpus.batch(range(6), batch=6, context=3, seed=2, index=4)
    shares = [corpus.batch(rows, batch=6, context=3, seed=2, index=4) for rows in (range(2), range(2, 4), range(4, 6))]
    assert torch.equal(torch.cat([tokens for tokens, _ in shares]), joined[0])
    assert torch.equal(torch.cat([targets for _, targets in shares]), joined[1])


def test_every_window_of_the_text_can_be_drawn(parts: list[Path]) -> None:
    tokens, _ = Corpus(parts).batch(range(500), batch=500, context=3, seed=0, index=0)
    assert set(tokens[:, 0].tolist()) == set(b"abcdefg")


def test_the_default_is_the_standard_library_without_what_differs_between_installations() -> None:
    corpus = Corpus.standard_library()
    names = [path.as_posix() for path in corpus._files]
    assert any(name.endswith("/argparse.py") for name in names)
    assert names == [path.as_posix() for path in Corpus.standard_library()._files]
    root = Path(next(name for name in names if name.endswith("/argparse.py"))).parent
    assert not any(LEFT_OUT & set(Path(name).relative_to(root).parts) for name in names)
    corpus.require(10**6)


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "no such file"), ("folder", "not a regular file"), ("empty", "is empty")]
)
def test_a_file_that_cannot_be_text_is_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
        Corpus([tmp_path / name])


def test_a_text_shorter_than_one_sequence_is_refused(parts: list[Path]) -> None:
    Corpus(parts).require(10)
    with pytest.raises(ConfigError, match="got 10 bytes in all, expected at least 11"):
        Corpus(parts).require(11)


def test_a_file_that_shrinks_or_goes_while_training_is_an_error_that_names_it(parts: list[Path]) -> None:
    corpus = Corpus(parts)
    parts[2].write_bytes(b"ef")
    with pytest.raises(StorageError, match="c: got 2 bytes at 0, expected 6"):
        corpus.window(4, 6)
    parts[1].unlink()
    with pytest.raises(StorageError, match="b: cannot be read any more"):
        corpus.window(3, 1)
