"""A sweep's store: appended rows survive any end of the process that wrote them."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import tempfile
import time
from pathlib import Path
from random import Random

import pytest
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st

from memcheck.bench.sweep.store import FILE, Store, StoreError, read_records
from memcheck.core.errors import UsageError
from memcheck.core.record import Record


def fill(folder: Path, count: int) -> None:
    with Store(folder).owned() as store:
        for number in range(count):
            store.append(Record(operator="naive", bsz=number), f"key {number}")


def sizes(folder: Path) -> list[int | None]:
    return [record.bsz for record in read_records(folder)]


def test_rows_are_records_with_keys(tmp_path) -> None:
    fill(tmp_path / "new", 2)
    rows = [json.loads(line) for line in (tmp_path / "new" / FILE).read_text().splitlines()]
    assert [row["key"] for row in rows] == ["key 0", "key 1"]
    assert Record.from_json(json.dumps(rows[1])) == Record(operator="naive", bsz=1)


def test_the_newest_of_a_key_counts(tmp_path) -> None:
    fill(tmp_path, 2)
    with Store(tmp_path).owned() as store:
        store.append(Record(operator="naive", bsz=7), "key 0")
        assert [record.bsz for record in store.records.values()] == [7, 1]
    assert sizes(tmp_path) == [7, 1]
    with Store(tmp_path).owned() as store:
        assert [record.bsz for record in store.records.values()] == [7, 1]


@pytest.mark.parametrize("half", [b'{"key": "key 2", "bs', b"\0\0\0", '"é'.encode()[:-1]])
def test_an_unfinished_last_line_is_cut_off(tmp_path, capsys, half: bytes) -> None:
    fill(tmp_path, 2)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole + half)
    assert sizes(tmp_path) == [0, 1]
    assert "its last line was left out" in capsys.readouterr().err
    with Store(tmp_path).owned() as store:
        assert "its last line was cut off" in capsys.readouterr().err
        store.append(Record(bsz=2), "key 2")
    assert (tmp_path / FILE).read_bytes().startswith(whole)
    assert sizes(tmp_path) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_only_a_broken_line_is_left_out(tmp_path, capsys) -> None:
    fill(tmp_path, 1)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'\0\0\0\n[1]\n\xff\n{"key": "key 9", "bsz": 1, "query_len": "x"}\n')
    with Store(tmp_path).owned() as store:
        store.append(Record(bsz=1), "key 1")
    assert sizes(tmp_path) == [0, 1]
    assert "line 2 was left out: it is no JSON" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{}", '{"schema": 1}', '{"key": "a sweep"}'])
def test_a_line_without_a_field_is_no_record(tmp_path, capsys, line: str) -> None:
    store = Store(tmp_path)
    store.append(Record(bsz=1))
    with store.path.open("a") as file:
        file.write(line + "\n")
    assert sizes(tmp_path) == [1]
    assert capsys.readouterr().err == f"note: {store.path}: line 2 was left out: it has no field of a record\n"
    assert store.keep_newest(lambda record: record.bsz) == [Record(bsz=1)]
    assert store.path.read_text().splitlines()[1] == line  # What cannot be read is kept.


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("forward_peak_bytes", "x", "forward_peak_bytes must be a whole number, got 'x'"),
        ("bsz", True, "bsz must be a whole number, got True"),
        ("dim", 1.5, "dim must be a whole number, got 1.5"),
        ("forward_ms", float("nan"), "forward_ms must be a number, got nan"),
        ("forward_ms_quartiles", [1.0], "forward_ms_quartiles must be two numbers, got [1.0]"),
        ("operator", "\ud800", "operator must be a string, got '\\ud800'"),
        ("causal", 1, "causal must be true or false, got 1"),
        ("doubts", "late", "doubts must be a list, got 'late'"),
        ("terms", {"saved_bytes": {"q": "4"}}, "terms.saved_bytes.q must be a whole number, got '4'"),
        ("saved_tensors", [1], "saved_tensors must be an object, got 1"),
        ("status", None, "status must be a string, got None"),
        ("schema", 2, "its schema is 2, and this memcheck reads 1"),
    ],
)
def test_only_a_record_with_wrong_types_is_left_out(tmp_path, capsys, field: str, value: object, said: str) -> None:
    fill(tmp_path, 2)
    first, second = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    (tmp_path / FILE).write_text("".join(json.dumps(row) + "\n" for row in (first, {**second, field: value})))
    assert sizes(tmp_path) == [0]
    assert capsys.readouterr().err == f"note: {tmp_path / FILE}: line 2 was left out: {said}\n"


def test_records_of_other_commands_are_read_and_left_alone(tmp_path) -> None:
    (tmp_path / FILE).write_text(Record(bsz=5).to_json() + "\n" + Record(bsz=5).to_json() + "\n")
    assert sizes(tmp_path) == [5, 5]
    with pytest.raises(UsageError, match="holds records that no sweep wrote"), Store(tmp_path).owned():
        pass


def test_two_sweeps_do_not_share_a_folder(tmp_path) -> None:
    with Store(tmp_path).owned():
        with pytest.raises(UsageError, match="is in use by another sweep"), Store(tmp_path).owned():
            pass
        assert sizes(tmp_path) == []
    with Store(tmp_path).owned():
        pass


@pytest.mark.isolated
def test_a_command_waits_for_a_sweep_of_another_process(tmp_path) -> None:
    """The command appends a row and drops replaced ones while the sweep appends; no row of either is lost."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with Store(tmp_path).owned() as store:
                os.write(writer, b"owned")
                for number in range(50):
                    store.append(Record(bsz=number), f"key {number}")
                    time.sleep(0.002)
        finally:
            os._exit(0)
    os.read(reader, 5)
    store = Store(tmp_path)
    store.append(Record(operator="naive"))
    kept = store.keep_newest(lambda record: (record.operator, record.bsz))
    os.waitpid(child, 0)
    assert [record.bsz for record in kept] == [*range(50), None]
    assert sizes(tmp_path) == [*range(50), None]


def test_a_folder_without_rows_or_rights(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"holds no records.jsonl"):
        read_records(tmp_path)
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="cannot be written to: Not a directory"),
        Store(tmp_path / "file" / "results").owned(),
    ):
        pass


def test_a_full_disk_leaves_whole_rows(tmp_path, monkeypatch) -> None:
    fill(tmp_path, 2)
    whole = (tmp_path / FILE).read_bytes()
    write = os.write

    def write_ten_bytes_then_fail(file: int, data: bytes) -> int:
        if not data.startswith(b"{"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:10])

    monkeypatch.setattr(os, "write", write_ten_bytes_then_fail)
    with Store(tmp_path).owned() as store:
        with pytest.raises(StoreError, match=r"records.jsonl takes no more rows: No space left on device"):
            store.append(Record(bsz=2), "key 2")
        assert "key 2" not in store.records
    with pytest.raises(StoreError, match=r"records.jsonl takes no more rows: No space left on device"):
        Store(tmp_path).append(Record(bsz=2))
    assert (tmp_path / FILE).read_bytes() == whole


@pytest.mark.isolated
def test_a_file_that_may_not_grow_leaves_whole_rows(tmp_path) -> None:
    """The system refuses a write in the middle of a line."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    with pytest.raises(StoreError, match="takes no more rows: File too large"):
        fill(tmp_path, 100)
    rows = sizes(tmp_path)
    assert rows == list(range(len(rows)))
    assert 1 < len(rows) < 100


# Random ends of processes.


@cases(100)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**6)), max_size=8),
    st.integers(0, 4000),
    st.binary(max_size=40),
)
def test_a_torn_write_costs_only_its_row(rows: list[tuple[int, int]], cut: int, garbage: bytes) -> None:
    """Rows before any cut remain, also where other bytes than the row's were written, and the next row is whole."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Store(folder).owned() as store:
            ends = [0]
            for key, value in rows:
                store.append(Record(bsz=value), f"key {key}")
                ends.append((folder / FILE).stat().st_size)
        cut = min(cut, ends[-1])
        torn = (folder / FILE).read_bytes()[:cut] + garbage.replace(b"\n", b"")
        (folder / FILE).write_bytes(torn)
        whole = dict(rows[: sum(end <= cut for end in ends) - 1])
        with Store(folder).owned() as store:
            assert {key: record.bsz for key, record in store.records.items()} == {
                f"key {k}": n for k, n in whole.items()
            }
            store.append(Record(bsz=7), "next")
        assert sizes(folder) == [*whole.values(), 7]


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_moment_keeps_the_rows_before_it(tmp_path, seed: int) -> None:
    random = Random(seed)
    child = os.fork()
    if child == 0:
        try:
            fill(tmp_path, 10**6)
        finally:
            os._exit(1)
    while not (tmp_path / FILE).exists() or (tmp_path / FILE).stat().st_size == 0:
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with Store(tmp_path).owned() as store:
        kept = [record.bsz for record in store.records.values()]
        assert kept == list(range(len(kept)))
        assert kept
        store.append(Record(bsz=7), "next")
    assert sizes(tmp_path) == [*kept, 7]
