"""Sweeps: every case gets one row, however it ends, and none runs twice."""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import context, start_server

from memcheck.bench import catalog
from memcheck.bench.case import Case
from memcheck.bench.catalog import make_case, make_combinator_case
from memcheck.bench.operators import load_plugin
from memcheck.bench.sweep.predicted_sweep import key as key_of_prediction
from memcheck.bench.sweep.run import (
    LocalProcesses,
    Progress,
    Settings,
    SweepRun,
    find_done,
    is_above,
    run_sweep,
    visible_device,
)
from memcheck.bench.sweep.store import FILE, read_records
from memcheck.bench.sweep.worker import CaseProcess, Job, work
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.record import Record
from memcheck.core.step import Place


def case(operator: str = "softmax", length: int = 8, **fields: Any) -> Case:
    sizes = {"bsz": 1, "query_len": length, "kv_len": length, "dim": 16, "heads": 2, "core_dim": None, "factor": None}
    return make_case(operator, **{**sizes, **fields})


def finished(case: Case) -> Record:
    return Record(**case.fields())


class Answers(Executor):
    """An executor that gives the answers of the test, and records the cases it was asked for."""

    def __init__(self, answer: Callable[[Case], Record | Exception] = finished, **machine: Any) -> None:
        self.answer = answer
        self.machine = {"device": "cpu", "device_name": "abacus", "device_total_bytes": 2**40, **machine}
        self.asked: list[Case] = []
        self.jobs: list[Job] = []

    def submit(self, function: Callable[..., Any], job: Job) -> Future:  # type: ignore[override]
        future: Future[Record] = Future()
        if job.facts_only:
            future.set_result(Record(**self.machine))
            return future
        self.asked.append(job.case)
        self.jobs.append(job)
        answer = self.answer(job.case)
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
        return future


def ends(status: str, **fields: Any) -> Callable[[Case], Record]:
    return lambda case: Record(**case.fields(), status=status, **fields)


def test_every_case_has_a_row_in_the_given_order(tmp_path) -> None:
    cases = [case(length=16), case(length=8), make_combinator_case("combinator", bsz=1, query_len=8, dim=16), case()]
    answers = Answers()
    records = run_sweep(cases, tmp_path, executor=answers)
    assert [(record.operator, record.query_len) for record in records] == [
        ("softmax", 16),
        ("softmax", 8),
        ("combinator", 8),
        ("softmax", 8),
    ]
    assert len(answers.asked) == len(read_records(tmp_path)) == 3
    assert {record.device_name for record in records} == {"abacus"}


def test_cases_run_from_small_to_large(tmp_path) -> None:
    answers = Answers()
    cases = [case("naive", 64), case("naive", 512), case("softplus", 512), case("naive", 8)]
    run_sweep(cases, tmp_path, executor=answers)
    order = [(case.operator, case.query_len) for case in answers.asked]
    assert order == [("naive", 8), ("naive", 64), ("softplus", 512), ("naive", 512)]


def test_the_same_again_runs_nothing(tmp_path) -> None:
    cases = [case(), case(length=16)]
    first = run_sweep(cases, tmp_path, executor=Answers(), memory_limit=2**30)
    whole = (tmp_path / FILE).read_bytes()
    answers = Answers()
    assert run_sweep(cases, tmp_path, executor=answers, memory_limit=2**30) == first
    assert answers.asked == []
    assert (tmp_path / FILE).read_bytes() == whole
    run_sweep([*cases, case(length=32)], tmp_path, executor=answers, memory_limit=2**30)
    assert answers.asked == [case(length=32)]


@pytest.mark.parametrize(
    ("other", "settings"),
    [
        (Answers(device_name="slide rule"), {}),
        (Answers(threads=7), {}),
        (Answers(torch_version="9.9"), {}),
        (Answers(), {"memory_limit": 2**31}),
        (Answers(), {"passes": 3}),
        (Answers(), {"timed": False}),
    ],
)
def test_what_changes_a_figure_is_another_case(tmp_path, other: Answers, settings: dict[str, Any]) -> None:
    run_sweep([case()], tmp_path, executor=Answers())
    run_sweep([case()], tmp_path, executor=other, **settings)
    assert other.asked == [case()]
    assert len(read_records(tmp_path)) == 2


OTHER_FIELDS = {
    "operator": "naive",
    "bsz": 2,
    "query_len": 9,
    "kv_len": 9,
    "dim": 32,
    "heads": 4,
    "core_dim": 8,
    "factor": 2,
    "window": 2,
    "dtype": "float64",
    "causal": False,
    "mode": "inference",
    "compiled": True,
    "device": "cuda",
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Case)])
def test_each_field_makes_another_case(name: str) -> None:
    one, other = case(), dataclasses.replace(case(), **{name: OTHER_FIELDS[name]})
    sweep = SweepRun(Settings(), Answers().submit, workers=1)
    sweep.machines = {device: Record(device=device) for device in ("cpu", "cuda")}
    assert sweep.key(other) != sweep.key(one)
    assert sweep.key(case()) == sweep.key(one)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Case) if field.name != "device"])
def test_each_field_makes_another_prediction(name: str) -> None:
    gpu = Place("A100-80GB")
    one, other = case(), dataclasses.replace(case(), **{name: OTHER_FIELDS[name]})
    assert key_of_prediction(other, gpu, ()) != key_of_prediction(one, gpu, ())
    assert key_of_prediction(case(), gpu, ()) == key_of_prediction(one, gpu, ())


def test_what_changes_no_figure_is_the_same_case(tmp_path) -> None:
    run_sweep([case()], tmp_path, executor=Answers(device_free_bytes=5))
    again = Answers(device_free_bytes=6)
    run_sweep([case()], tmp_path, executor=again, max_seconds=5, workers=3)
    assert again.asked == []


def test_retry_is_for_what_may_go_better(tmp_path) -> None:
    statuses = dict(enumerate(["ok", "oom", "unsupported", "skipped", "error", "killed", "timeout"], start=1))
    cases = [case(heads=1, bsz=9 - number, length=number) for number in statuses]
    run_sweep(cases, tmp_path, executor=Answers(lambda case: ends(statuses[case.query_len])(case)))
    same, again = Answers(), Answers()
    run_sweep(cases, tmp_path, executor=same)
    assert same.asked == []
    records = run_sweep(cases, tmp_path, executor=again, retry=True)
    assert {statuses[case.query_len] for case in again.asked} == {"error", "killed", "timeout", "skipped"}
    assert [record.status for record in records] == ["ok", "oom", "unsupported", "ok", "ok", "ok", "ok"]
    assert [record.status for record in read_records(tmp_path)].count("ok") == 5


def test_above_out_of_memory_nothing_runs(tmp_path) -> None:
    answers = Answers(lambda case: ends("oom")(case) if case.query_len >= 16 else finished(case))
    cases = [case(length=8), case(length=16), case(length=32), case(length=8, bsz=9), case(length=32, dtype="float64")]
    records = run_sweep(cases, tmp_path, executor=answers)
    assert [record.status for record in records] == ["ok", "oom", "skipped", "ok", "oom"]
    assert records[2].reason == "not run: a smaller case, B1 S16 T16 E16 H2, was out of memory"
    assert records[2].device_name == "abacus"
    # And so does a later sweep, from the rows of this one.
    later = Answers()
    (record,) = run_sweep([case(length=64)], tmp_path, executor=later) and [read_records(tmp_path)[-1]]
    assert record.query_len == 64


def test_above_a_timeout_nothing_runs_but_can_be_tried_again(tmp_path) -> None:
    cases = [case(length=8), case(length=16)]
    records = run_sweep(cases, tmp_path, executor=Answers(ends("timeout", reason="stopped after 60 s")))
    assert [record.status for record in records] == ["timeout", "timeout"]
    assert records[1].reason == "not run: a smaller case, B1 S8 T8 E16 H2, took too long"
    again = Answers()
    run_sweep(cases, tmp_path, executor=again, retry=True)
    assert again.asked == cases


@pytest.mark.parametrize(
    ("fields", "above"),
    [
        ({"length": 16}, True),
        ({"bsz": 2}, True),
        ({"bsz": 2, "length": 4}, False),
        ({}, False),
        ({"heads": 4}, False),
        ({"length": 16, "dtype": "float16"}, False),
        ({"length": 16, "mode": "inference"}, False),
        ({"length": 16, "causal": False}, False),
        ({"length": 16, "operator": "naive"}, False),
        ({"length": 16, "device": "cuda:0"}, False),
    ],
)
def test_above(fields: dict[str, Any], above: bool) -> None:
    assert is_above(case(**fields), case()) is above


def test_the_terms_skip_what_cannot_fit(tmp_path) -> None:
    answers = Answers(device_free_bytes=2**21)
    cases = [case("naive", 16), case("naive", 128), case("naive", 1024)]
    records = run_sweep(cases, tmp_path, executor=answers, memory_limit=2**20)
    assert answers.asked == cases[:2]
    assert records[2].reason == "predicted: forward peak 17.3 MiB, above the limit of 1 MiB"
    (record,) = run_sweep([cases[2]], tmp_path, executor=answers, memory_limit=2**40)
    assert record.status == "skipped"
    assert record.reason.startswith("predicted: forward peak 17.3 MiB, above the 2 MiB that this machine has")


def test_a_wrong_case_is_a_row(tmp_path) -> None:
    wrong = dataclasses.replace(case(), heads=3)
    answers = Answers()
    record, _ = run_sweep([wrong, case()], tmp_path, executor=answers)
    assert (record.status, record.heads) == ("skipped", 3)
    assert record.reason == "dim must be divisible by heads for softmax, got dim 16 heads 3"
    assert answers.asked == [case()]


def test_a_broken_executor_ends_the_sweep_and_keeps_its_rows(tmp_path) -> None:
    answers = Answers(lambda case: finished(case) if case.query_len < 16 else BrokenProcessPool("it died"))
    with pytest.raises(MemcheckError, match="the executor takes no more cases: BrokenProcessPool it died"):
        run_sweep([case(), case(length=16)], tmp_path, executor=answers)
    assert [record.query_len for record in read_records(tmp_path)] == [8]


def test_a_worker_that_dies_of_a_case_costs_that_case(tmp_path) -> None:
    class KilledWorker(Exception):  # noqa: N818
        pass

    killed, error, ok = run_sweep(
        [case(bsz=1), case(bsz=2), case(bsz=3)],
        tmp_path,
        executor=Answers(lambda case: {1: KilledWorker("gone"), 2: OSError("lost")}.get(case.bsz) or finished(case)),
    )
    assert (killed.status, killed.reason) == ("killed", "KilledWorker: gone")
    assert (error.status, error.reason) == ("error", "OSError: lost")
    assert ok.status == "ok"


def test_times_of_neighbours_are_doubtful(tmp_path) -> None:
    answers = Answers(ends("ok", forward_ms=1.0))
    (alone,) = run_sweep([case()], tmp_path / "1", executor=answers)
    (beside,) = run_sweep([case()], tmp_path / "2", executor=answers, workers=3)
    assert alone.doubts == ()
    assert beside.doubts == ("timed with 3 cases at once, maybe on the same cores",)


def test_progress_and_the_manifest(tmp_path) -> None:
    told: list[Progress] = []
    cases = [case(length=8), case(length=16)]
    run_sweep(cases, tmp_path, executor=Answers(), progress=told.append, command="memcheck sweep")
    assert [(step.record and step.record.query_len, len(step.left), step.total) for step in told] == [
        (None, 2, 2),
        (8, 1, 2),
        (16, 0, 2),
    ]
    manifest = json.loads((tmp_path / "sweep.json").read_text())
    assert manifest["command"] == "memcheck sweep"
    assert manifest["environment"]["device_name"] == "abacus"
    assert manifest["started"] <= manifest["ended"]
    assert manifest["statuses"] == {"ok": 2}


def test_settings_reach_the_job(tmp_path) -> None:
    answers = Answers()
    run_sweep(
        [case(), case(length=9, device="cuda:0")], tmp_path, executor=answers, memory_limit=2**30, passes=7, timed=False
    )
    run_sweep([case(length=16)], tmp_path, executor=answers, max_seconds=0)
    run_sweep([case(length=32, device="cuda:0")], tmp_path, executor=answers, max_seconds=3)
    assert {job.case.query_len: job.max_seconds for job in answers.jobs} == {8: 60, 9: None, 16: None, 32: 3}
    assert {(job.limit_bytes, job.passes, job.timed) for job in answers.jobs[:2]} == {(2**30, 7, False)}
    assert Job.from_json(answers.jobs[0].to_json()) == answers.jobs[0]


def test_what_is_done_is_found_without_writing(tmp_path) -> None:
    assert find_done([case()], tmp_path / "none") == {}
    assert not (tmp_path / "none").exists()
    run_sweep([case()], tmp_path, executor=Answers())
    assert list(find_done([case(), case(length=16)], tmp_path, executor=Answers())) == [case()]
    assert find_done([case()], tmp_path, executor=Answers(threads=3)) == {}


def test_devices_are_those_that_this_process_sees(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_device("1") == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible_device("1") == "6"
    pool = LocalProcesses(3, ["0", "1"], isolate=False)
    assert [process.environment["CUDA_VISIBLE_DEVICES"] for process in pool.processes] == ["4", "6", "4"]
    pool.close()
    with pytest.raises(UsageError, match="devices is for processes of this machine"):
        run_sweep([case(device="cuda:0")], tmp_path / "unused", executor=Answers(), devices=["0"])
    assert not (tmp_path / "unused").exists()


# From here on in real processes.

MISBEHAVING = """
    import os, signal, time
    from memcheck.bench.catalog import register

    def kill(q, k, v):
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(q, k, v):
        os.write(2, b"first\\nthe last words\\n")
        os._exit(3)

    def sleep(q, k, v):
        time.sleep(600)

    def refuse(q, k, v):
        raise RuntimeError(f"process {os.getpid()}")

    def chatter(q, k, v):
        print('{"final": true, "record": {}}', flush=True)
        os.write(1, b"no answer\\n")
        return q * 2

    def slow(q, k, v):
        slow.calls += 1  # the second is the first timed
        time.sleep(600 if slow.calls > 1 else 0)
        return q * 2

    slow.calls = 0

    for operator in (kill, crash, sleep, refuse, chatter, slow):
        register(operator.__name__, operator)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> Path:
    for name in ("kill", "crash", "sleep", "refuse", "chatter", "slow"):
        monkeypatch.setitem(catalog.CONTENDERS, name, None)  # taken out again after the test
        del catalog.CONTENDERS[name]
    path = tmp_path / "misbehaving.py"
    path.write_text(textwrap.dedent(MISBEHAVING))
    return path


def sweep_of(names: str, folder: Path, plugin: Path, **settings: Any) -> dict[str, Record]:
    load_plugin(str(plugin))
    cases = [case(name) for name in names.split()]
    return {record.operator: record for record in run_sweep(cases, folder, plugins=[plugin], **settings)}


@pytest.mark.smoke
@pytest.mark.extension
def test_every_outcome_of_a_case_is_a_row(tmp_path, plugin) -> None:
    records = sweep_of("kill crash refuse chatter naive", tmp_path, plugin, max_seconds=0, passes=3)
    assert [record.status for record in records.values()] == ["killed", "error", "error", "ok", "ok"]
    assert records["kill"].reason == "its process was killed by SIGKILL"
    assert records["crash"].reason == "its process ended with exit code 3: the last words"
    assert records["refuse"].reason.startswith("RuntimeError: process ")
    assert records["naive"].passes == 3
    assert len(read_records(tmp_path)) == 5


@pytest.mark.extension
def test_a_case_that_takes_too_long_ends(tmp_path, plugin) -> None:
    """The limit ends the timing first, and then the case."""
    records = sweep_of("sleep slow", tmp_path, plugin, max_seconds=3)
    assert (records["sleep"].status, records["slow"].status) == ("timeout", "ok")
    assert records["sleep"].reason == "stopped after 3 s (--max-seconds-per-case)"
    assert records["slow"].forward_peak_bytes
    assert records["slow"].forward_ms is None
    assert records["slow"].doubts == ("the timing was cut off: 3 s were allowed for the case",)


@pytest.mark.extension
@pytest.mark.parametrize("isolate", [False, True])
def test_processes_are_used_again_unless_isolated(tmp_path, plugin, isolate: bool) -> None:
    load_plugin(str(plugin))
    cases = [case("refuse", length) for length in (8, 16)]
    records = run_sweep(cases, tmp_path, plugins=[plugin], isolate=isolate)
    processes = {record.reason for record in records}
    assert len(processes) == (2 if isolate else 1)
    assert str(os.getpid()) not in str(processes)


@pytest.mark.extension
def test_a_case_is_compiled_as_in_a_new_process(monkeypatch) -> None:
    """Without a reset, the second length would be compiled as one of any length."""
    inputs_of: list[set[type]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        inputs_of.append({type(x) for x in inputs})
        return graph.forward

    compiled = torch.compile(lambda q: q * 2, backend=backend)
    monkeypatch.setitem(catalog.CONTENDERS, "compiled", None)  # taken out again after the test
    del catalog.CONTENDERS["compiled"]
    catalog.register("compiled", lambda q, k, v: compiled(q))
    for length in (8, 12):
        record = work(Job(case("compiled", length), timed=False), on_memory=lambda record: None)
        assert record.status == "ok", record.reason
    assert len(inputs_of) >= 2
    assert torch.SymInt not in set().union(*inputs_of)


def test_a_plugin_that_changes_runs_its_own_cases_again(tmp_path, plugin) -> None:
    load_plugin(str(plugin))
    cases = [case(), case("chatter")]
    run_sweep(cases, tmp_path, plugins=[plugin], executor=Answers())
    plugin.write_text(plugin.read_text() + "# changed\n")
    answers = Answers()
    run_sweep(cases, tmp_path, plugins=[plugin], executor=answers)
    assert answers.asked == [case("chatter")]


@pytest.mark.extension
def test_a_contender_of_this_process_alone_is_told_from_a_plugin(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(catalog.CONTENDERS, "mine", catalog.CONTENDERS["softmax"])
    record = work(Job(case("mine")), lambda record: None)
    assert record.status == "ok"
    monkeypatch.delitem(catalog.CONTENDERS, "mine")
    record = work(Job(dataclasses.replace(case(), operator="mine")), lambda record: None)
    assert record.status == "error"
    assert record.reason == "mine is not known there: register it in a file, and name that as a plugin"


def test_a_process_ends_with_the_one_that_asked() -> None:
    """The pipe closes, as after kill -9 of the sweep."""
    process = CaseProcess()
    process.ask(Job(case(), facts_only=True))
    child = process._process
    assert child is not None
    child.stdin.close()
    assert child.wait(timeout=60) == 0


def test_a_closed_process_leaves_no_file_open() -> None:
    process = CaseProcess()
    process.ask(Job(case(), facts_only=True))
    child, stderr = process._process, process._stderr
    assert child is not None
    assert stderr is not None
    process.close()
    assert (child.stdin.closed, child.stdout.closed, stderr.closed) == (True, True, True)
    with pytest.raises(RuntimeError, match="no job is taken any more"):
        process.ask(Job(case(), facts_only=True))


def test_a_worker_ends_with_its_sweep() -> None:
    process = CaseProcess()
    process.ask(Job(case(), facts_only=True))
    child = process._process
    assert child is not None
    child.stdout.close()
    child.stdin.write(Job(case("naive", 256)).to_json() + "\n")
    child.stdin.flush()
    try:
        child.wait(timeout=30)
    finally:
        process.end()


@pytest.mark.parametrize("kind", [pytest.param("threads", marks=pytest.mark.ci), "processes"])
def test_executors_of_the_standard_library(tmp_path, plugin, kind: str) -> None:
    start_server()
    with ThreadPoolExecutor(2) if kind == "threads" else ProcessPoolExecutor(2, mp_context=context) as executor:
        records = sweep_of("kill naive softmax", tmp_path, plugin, executor=executor, timed=False)
    assert [record.status for record in records.values()] == ["killed", "ok", "ok"]
