"""`python -m memcheck.profile_attention`: flags, wrong flags, rows and files."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from forked import run_python

from memcheck.__main__ import main
from memcheck.bench import catalog
from memcheck.bench.case import Case
from memcheck.bench.sweep.run import Settings
from memcheck.bench.sweep.store import read_records
from memcheck.core.record import Doubt, Record
from memcheck.core.units import format_bytes
from memcheck.measure.measurement import machine_facts
from memcheck.report.cases import failure_note, pair
from memcheck.report.rows import unit_bytes

pytestmark = pytest.mark.extension

MIB = 2**20
SMALL = ["--seq-len", "8", "--dim", "16", "--heads", "2", "--no-time", "--device", "cpu"]


@pytest.fixture
def profile(tmp_path, capsys, monkeypatch):
    """Runs the command with JSON on stdout: exit code and records. No picture: it takes most of the time."""
    monkeypatch.setattr("memcheck.cli.running.figure.plot_figure", lambda *args, **kwargs: None)

    def run(*flags: str) -> tuple[int, list[Record]]:
        code = main(["profile-attention", "--output", str(tmp_path), "--format", "json", *flags])
        rows = json.loads(capsys.readouterr().out)
        return code, [Record.from_json(json.dumps(row)) for row in rows]

    return run


def replace_operator(monkeypatch: pytest.MonkeyPatch, name: str, operator: object) -> None:
    contender = dataclasses.replace(catalog.CONTENDERS[name], build=lambda case: operator)
    monkeypatch.setitem(catalog.CONTENDERS, name, contender)


def test_a_table_and_three_files(tmp_path, capsys) -> None:
    assert main(["profile-attention", *SMALL, "--output", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert "float32, batch 1, dim 16, 2 heads, factor 8, causal, train" in out
    for words in ("naive", "flash (cpu)", "softplus", "Peaks count everything that is alive", "memory.png"):
        assert words in out
    assert next(line.split()[-1] for line in out.splitlines() if re.search(r" 8 +[\d<]", line)) == "1.00"  # x least
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"records.jsonl", "records.csv", "memory.png"}
    assert all(path.stat().st_size for path in (tmp_path / "new").iterdir())


def test_records_survive_the_files(profile, tmp_path) -> None:
    code, records = profile(*SMALL)
    assert code == 0
    assert read_records(tmp_path) == records
    assert [(row.operator, row.backend, row.status) for row in records] == [
        ("naive", "eager", "ok"),
        ("softmax", "flash (cpu)", "ok"),
        ("softplus", "memcheck cpu", "ok"),
        ("linear-causal", "memcheck cpu", "ok"),
        ("compressed", "memcheck cpu", "ok"),
    ]


def test_the_door_and_underscores(tmp_path) -> None:
    flags = "--attention_type naive --bsz 2 --query_len 4 --kv_len 8 --dim 16 --heads 4 --core_dim 16 --device cpu"
    flags += f" --no_time --output {tmp_path} --format json"
    result = run_python("-m", "memcheck.profile_attention", *flags.split(), timeout=120)
    assert result.returncode == 0
    (row,) = json.loads(result.stdout)
    assert (row["bsz"], row["query_len"], row["kv_len"], row["dim"], row["heads"]) == (2, 4, 8, 16, 4)
    assert "note: --core-dim is not used by naive" in result.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--bsz 3", {"bsz": 3}),
        ("--core-dim 24", {"core_dim": 24, "heads": None}),
        ("--dtype bf16", {"dtype": "bfloat16"}),
        ("--dtype float64", {"dtype": "float64"}),
        ("--no-causal", {"causal": False}),
        ("--causal", {"causal": True}),
        ("--mode inference", {"mode": "inference", "saved_bytes": 0, "backward_peak_bytes": None}),
        ("--preset quick", {"bsz": 1}),
    ],
)
def test_flags_reach_the_record(profile, flags: str, expected: dict[str, object]) -> None:
    code, (record,) = profile(*SMALL, "--attention-type", "softplus", *flags.split())
    assert code == 0
    assert record.status == "ok"
    assert {field: getattr(record, field) for field in expected} == expected


def cases_on(device: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[list[Case], str]:
    """The cases that the command would run if the machine had this device, and the note in its header."""
    ran: list[tuple[list[Case], str]] = []
    command = "memcheck.cli.commands.profile_attention"
    monkeypatch.setattr(f"{command}.profile.find_device", lambda name: device)
    monkeypatch.setattr(f"{command}.running.run_cases", lambda cases, args, title, note: ran.append((cases, note)) or 0)
    assert main(["profile-attention", *flags]) == 0
    return ran[0]


def test_a_gpu_has_the_sizes_of_a_real_layer(monkeypatch) -> None:
    cases, note = cases_on("cuda:0", monkeypatch)
    assert {(case.dtype, case.bsz, case.dim, case.device) for case in cases} == {("bfloat16", 4, 2048, "cuda:0")}
    assert {case.heads for case in cases} == {16, None}
    assert sorted({case.query_len for case in cases}) == [512, 1024, 2048, 4096, 8192]
    words = "bf16, batch 4, dim 2048, 16 heads, lengths 512 to 8192"
    assert note == f"defaults of a GPU, where no flag says otherwise: {words}"
    cases, note = cases_on("cuda:0", monkeypatch, "--dtype", "fp32", "--bsz", "2", "--kv-len", "64", "--dim", "64")
    assert {(case.dtype, case.bsz, case.dim, case.query_len) for case in cases} == {("float32", 2, 64, 64)}
    assert note == "defaults of a GPU, where no flag says otherwise: 16 heads"
    cases, note = cases_on("cpu", monkeypatch)
    assert {(case.dtype, case.bsz, case.dim) for case in cases} == {("float32", 1, 256)}
    assert sorted({case.query_len for case in cases}) == [256, 512, 1024, 2048, 4096]
    assert note == ""


def test_types_are_a_list_or_repeated(profile) -> None:
    _, records = profile(*SMALL, "--attention-type", "softplus,naive", "--attention-type", "softmax/math,naive")
    assert [record.operator for record in records] == ["softplus", "naive", "softmax/math"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--seq-len 8,4", [(4, 4), (8, 8)]),
        ("--query-len 4", [(4, 4)]),
        ("--kv-len 4,8", [(4, 4), (8, 8)]),
        ("--query-len 2 --kv-len 4,8", [(2, 4), (2, 8)]),
        ("--query-len 2,4 --kv-len 4,8", [(2, 4), (4, 8)]),
    ],
)
def test_lengths(profile, flags: str, expected: list[tuple[int, int]]) -> None:
    _, records = profile("--dim", "8", "--no-time", "--attention-type", "softplus", *flags.split())
    assert [(record.query_len, record.kv_len) for record in records] == expected


def test_time_is_measured_unless_refused(profile) -> None:
    timed = [*SMALL[:-3], *SMALL[-2:], "--attention-type", "naive"]
    _, (record,) = profile(*timed, "--passes", "3")
    assert record.passes == 3
    assert record.forward_ms is not None
    assert record.backward_ms is not None
    _, (record,) = profile(*timed, "--no-time")
    assert record.passes is None


def test_flags_without_meaning_are_noted(tmp_path, capsys) -> None:
    main(["profile-attention", *SMALL, "--factor", "4", "--output", str(tmp_path)])
    err = capsys.readouterr().err
    assert "note: --factor is not used by naive, softmax, softplus, linear-causal\n" in err
    assert "note: --heads is not used by softplus\n" in err


@pytest.mark.parametrize(("limit", "phase"), [("40KiB", "forward"), ("64KiB", "backward")])
def test_out_of_memory_is_a_result(profile, limit: str, phase: str) -> None:
    flags = ["--seq-len", "64", "--dim", "16", "--heads", "1", "--no-time", "--attention-type", "naive"]
    code, (record,) = profile(*flags, "--memory-limit", limit)
    assert code == 0
    assert (record.status, record.oom_phase) == ("oom", phase)
    assert record.oom_requested_bytes
    assert record.oom_in_use_bytes
    assert f"OOM in {phase}: {format_bytes(record.oom_requested_bytes)} requested" in failure_note(record)


def test_a_limit_beyond_64_bits_limits_nothing(profile) -> None:
    code, (record,) = profile(*SMALL, "--attention-type", "softplus", "--memory-limit", "9" * 400 + "B")
    assert (code, record.status) == (0, "ok")


def test_inputs_beyond_the_limit_are_not_allocated(profile) -> None:
    code, (record,) = profile(*SMALL, "--attention-type", "softplus", "--memory-limit", "1KiB")
    assert (code, record.status, record.oom_phase) == (0, "oom", None)
    assert "the inputs alone do not fit" in record.reason


def test_what_is_known_to_exceed_the_machine_is_skipped(profile) -> None:
    code, (record,) = profile("--attention-type", "softplus", "--seq-len", "99999999999999", "--device", "cpu")
    assert (code, record.status, record.oom_phase) == (0, "skipped", "forward")
    assert re.fullmatch(r"predicted: forward peak .*, above the .* that this machine has left", record.reason)
    assert record.terms["forward_peak_bytes"]["q"] == 4 * 256 * 99999999999999


def test_inputs_beyond_the_machine_are_out_of_memory(profile) -> None:
    code, (record,) = profile("--attention-type", "softmax/efficient", "--seq-len", "99999999999999", "--device", "cpu")
    assert (code, record.status, record.oom_phase) == (0, "oom", None)
    assert "the inputs alone do not fit" in record.reason


def test_what_is_not_known_ends_at_the_memory_of_the_machine(profile, monkeypatch) -> None:
    """The kernel would end the process, not the case."""
    facts = machine_facts("cpu")
    monkeypatch.setattr(
        "memcheck.bench.profile.measurement.machine_facts", lambda device: {**facts, "device_free_bytes": 1 << 20}
    )
    monkeypatch.setattr("memcheck.bench.profile.known_terms", lambda case: None)
    flags = [*SMALL[2:], "--seq-len", "1024", "--attention-type", "naive", "--dtype", "bf16"]
    for limit in ([], ["--memory-limit", "999GiB"]):
        code, (record,) = profile(*flags, *limit)
        assert (code, record.status, record.oom_phase) == (0, "oom", "forward")


def test_seconds_are_those_of_the_case(profile, monkeypatch) -> None:
    given = []

    def measure_time(fn, *inputs, passes, max_seconds, **kwargs):
        given.append((passes, max_seconds))
        return {"passes": 1, "doubts": (Doubt("too few"),)}

    monkeypatch.setattr("memcheck.bench.profile.measurement.measure_time", measure_time)
    timed = [*SMALL[:-3], *SMALL[-2:], "--attention-type", "naive"]
    _, (record,) = profile(*timed, "--passes", "100", "--max-seconds-per-case", "100000")
    assert (record.passes, record.doubts) == (1, ("too few",))
    profile(*timed, "--passes", "100", "--max-seconds-per-case", "0")
    profile(*timed, "--max-seconds-per-case", "100000")
    (passes, seconds), *others = given
    assert passes == 100
    assert 0 < seconds < 100000  # what measuring memory left
    assert others == [(100, None), (10, 3.0)]


def test_no_second_is_left_for_times(profile) -> None:
    timed = [*SMALL[:-3], *SMALL[-2:], "--attention-type", "naive"]
    _, (record,) = profile(*timed, "--passes", "3", "--max-seconds-per-case", "0.000001")
    assert (record.status, record.passes, record.forward_ms) == ("ok", 0, None)
    assert "there are no times: measuring memory took too many of the seconds" in record.doubts[0]


def test_a_cpu_has_a_minute_for_a_case() -> None:
    given = {None: (60.0, None), 0.0: (None, None), 7.0: (7.0, 7.0)}
    for asked, (on_cpu, on_cuda) in given.items():
        settings = Settings(max_seconds=asked)
        assert (settings.seconds(Case("naive")), settings.seconds(Case("naive", device="cuda:0"))) == (on_cpu, on_cuda)


def test_decoding_is_a_table_of_its_own(tmp_path, capsys) -> None:
    flags = ["--mode", "decode", "--kv-len", "16,8", "--bsz", "2", "--attention-type", "naive,softplus,flex"]
    assert main(["profile-attention", *SMALL[2:], *flags, "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    records = read_records(tmp_path)
    assert [(record.kv_len, record.query_len, record.status) for record in records[:3]] == [
        (8, 1, "ok"),
        (8, 1, "ok"),
        (8, 1, "unsupported"),
    ]
    naive, softplus = records[:2]
    assert naive.state_bytes == 2 * 2 * 8 * 16 * 4
    assert naive.state_bytes_per_token == 2 * 16 * 4
    assert softplus.state_bytes_per_sequence == 2 * 16 * 4
    assert "flex has no decoding step" in out
    assert "what T tokens leave for the next one" in out
    assert re.search(r"\nnaive +eager .* 8 .* 0.00", out)


def test_explanations_follow_the_table(tmp_path, capsys, monkeypatch) -> None:
    alive = [{"phase": "forward", "name": f"aten::bmm {size}", "bytes": size} for size in (5, 2048, 7)]
    saved = [{"shape": [2, 3], "dtype": "torch.float32", "bytes": 24, "name": "aten::exp"}]

    def measure(fn, *inputs, details, **kwargs):
        assert details
        return Record(forward_peak_bytes=4096, saved_bytes=24, alive_at_peak=alive, saved_tensors=saved)

    monkeypatch.setattr("memcheck.bench.profile.measurement.measure_memory", measure)
    flags = [*SMALL, "--attention-type", "naive", "--explain", "2", "--output", str(tmp_path)]
    assert main(["profile-attention", *flags]) == 0
    assert (
        """naive, 8 x 8
  alive at the peak of the forward, 4 KiB:
         2 KiB  aten::bmm 2048
           7 B  aten::bmm 7
           5 B  1 more
  kept for backward, 24 B:
          24 B  float32 (2,3), of aten::exp
"""
        in capsys.readouterr().out
    )


def test_traces_and_snapshots_are_files_of_their_own(tmp_path, capsys, monkeypatch) -> None:
    written = []

    def write(step, *, path):
        assert step.backward
        assert step.model(*step.inputs).shape == step.inputs[0].shape
        written.append(path.name)
        path.touch()
        return path

    def trace(*args, **kwargs):
        write(*args, **kwargs)
        return [{"name": "aten::bmm", "calls": 2, "self_ms": 1.5, "share": 1.0}]

    monkeypatch.setattr("memcheck.bench.profile.export.write_snapshot", write)
    monkeypatch.setattr("memcheck.bench.profile.export.write_trace", trace)
    flags = [*SMALL, "--output", str(tmp_path), "--snapshot", str(tmp_path / "s.pickle")]
    assert main(["profile-attention", *flags, "--attention-type", "naive", "--trace", str(tmp_path / "t.json.gz")]) == 0
    assert written == ["s.pickle", "t.json.gz"]
    out = capsys.readouterr().out
    assert "naive, what took the time:" in out
    assert "aten::bmm" in out
    assert f"{tmp_path}/s.pickle, {tmp_path}/t.json.gz" in out
    written.clear()
    main(["profile-attention", *flags, "--attention-type", "naive,softmax/math,softmax/cudnn"])
    assert written == ["s-naive-8x8.pickle", "s-softmax-math-8x8.pickle"]


def test_timelines_are_pictures(tmp_path, capsys) -> None:
    flags = [*SMALL, "--output", str(tmp_path), "--timeline", str(tmp_path / "t.svg"), "--no-time"]
    assert main(["profile-attention", *flags, "--attention-type", "naive,softplus"]) == 0
    assert f"{tmp_path}/t-naive-8x8.svg, {tmp_path}/t-softplus-8x8.svg" in capsys.readouterr().out
    picture = (tmp_path / "t-naive-8x8.svg").read_text()
    assert "naive: what is alive, by what allocated it" in picture
    assert "aten::_softmax" in picture


def test_a_plugin_brings_an_operator(profile, tmp_path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("from memcheck.bench.catalog import register\nregister('values', lambda q, k, v: 2 * v)\n")
    flags = [*SMALL, "--plugin", str(plugin), "--attention-type", "values,naive"]
    try:
        for _ in range(2):  # a file is imported once
            code, (ours, naive) = profile(*flags)
            assert (code, ours.operator, ours.status, naive.status) == (0, "values", "ok", "ok")
        assert (ours.backend, ours.causal) == ("custom", None)
        assert ours.output_bytes == 8 * 16 * 4
    finally:
        catalog.CONTENDERS.pop("values", None)


@pytest.mark.parametrize("command", ["profile-attention", "sweep"])
def test_what_a_plugin_prints_is_not_in_the_json(command: str, tmp_path, capfd) -> None:
    plugin = tmp_path / "plugin.py"
    source = "def f(q, k, v):\n    print('called')\n    return 2 * v\nprint('imported')\nregister('chatty', f)\n"
    plugin.write_text(f"from memcheck.bench.catalog import register\n{source}")
    flags = [*SMALL, "--plugin", str(plugin), "--attention-type", "chatty", "--format", "json"]
    try:
        assert main([command, *flags, "--output", str(tmp_path)]) == 0
    finally:
        catalog.CONTENDERS.pop("chatty", None)
    printed = capfd.readouterr()
    assert [row["operator"] for row in json.loads(printed.out)] == ["chatty"]
    assert "imported" in printed.err


def test_unsupported_alone_is_a_failure(profile) -> None:
    code, (record,) = profile(*SMALL, "--attention-type", "softmax/efficient")
    assert code == 1
    assert (record.status, record.backend) == ("unsupported", None)
    assert record.reason is not None
    assert "No viable backend" in record.reason
    code, _ = profile(*SMALL, "--attention-type", "softmax/efficient,naive")
    assert code == 0


def test_a_device_without_a_kernel_is_unsupported(profile, monkeypatch) -> None:
    def refuse(q, k, v):
        raise NotImplementedError("softplus_attention: no kernel for this device")

    replace_operator(monkeypatch, "softplus", refuse)
    code, records = profile(*SMALL, "--attention-type", "softplus,naive")
    assert code == 0
    assert (records[0].status, records[0].reason) == ("unsupported", "softplus_attention: no kernel for this device")


def test_an_error_is_a_row_and_the_rest_goes_on(profile, monkeypatch) -> None:
    def fail(q, k, v):
        raise ValueError("q is upside down")

    replace_operator(monkeypatch, "naive", fail)
    code, records = profile(*SMALL)
    assert code == 1
    assert [record.status for record in records] == ["error", "ok", "ok", "ok", "ok"]
    assert (records[0].reason, records[0].query_len) == ("ValueError: q is upside down", 8)


def test_rows_before_a_crash_are_kept(profile, tmp_path, monkeypatch) -> None:
    def interrupt(q, k, v):
        raise KeyboardInterrupt

    replace_operator(monkeypatch, "softmax", interrupt)
    assert main(["profile-attention", *SMALL, "--output", str(tmp_path)]) == 130
    assert [record.operator for record in read_records(tmp_path)] == ["naive"]


def test_records_of_other_cases_are_kept(profile, tmp_path) -> None:
    """And those of the same case are replaced; what this version cannot read stays as it is."""
    profile("--attention-type", "naive,softmax", *SMALL)
    future = '{"schema": 99}\n'
    with (tmp_path / "records.jsonl").open("a") as lines:
        lines.write(future + '{"operator": "cut o')
    _, (record,) = profile("--attention-type", "naive", *SMALL, "--memory-limit", "1KiB")
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    assert future in lines
    rows = [Record.from_json(line) for line in lines if line != future]
    assert [(row.operator, row.status) for row in rows] == [("softmax", "ok"), ("naive", "oom")]
    assert rows[1] == record
    assert len((tmp_path / "records.csv").read_text().splitlines()) == 3


def test_units() -> None:
    case = {"bsz": 2, "query_len": 3, "kv_len": 5, "dim": 8, "dtype": "bfloat16"}
    assert unit_bytes(Record(**case)) == 2 * 3 * 8 * 2
    assert unit_bytes(Record(**case, core_dim=4)) == 2 * 3 * 4 * 2
    assert unit_bytes(Record()) is None


def test_predictions_stand_under_what_was_measured(tmp_path, capsys) -> None:
    flags = [*SMALL, "--attention-type", "naive", "--mode", "inference", "--predict"]
    assert main(["profile-attention", *flags, "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\nnaive, S = T = 8 .* same .* same ", out)
    assert "same: equal to the byte; otherwise measured / predicted" in out
    assert (tmp_path / "memory.png").stat().st_size


@pytest.mark.parametrize("mode", ["train", "inference", "decode"])
def test_predictions_are_rows_of_their_own_kind(profile, tmp_path, mode: str) -> None:
    code, records = profile(*SMALL, "--attention-type", "naive,softplus", "--mode", mode, "--predict")
    assert code == 0
    assert [(row.operator, row.source) for row in records] == [
        ("naive", "measured"),
        ("softplus", "measured"),
        ("naive", "predicted"),
        ("softplus", "predicted"),
    ]
    assert sorted(map(Record.to_json, read_records(tmp_path))) == sorted(map(Record.to_json, records))
    both = pair(records)
    assert len(both) == 2
    for measured, predicted in both:
        assert predicted.exact
        for name in ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes", "state_bytes"):
            assert getattr(predicted, name) == getattr(measured, name)


def test_what_the_limit_does_to_both(profile) -> None:
    _, (measured, predicted) = profile(*SMALL, "--attention-type", "naive", "--memory-limit", "2KiB", "--predict")
    assert (measured.status, predicted.status) == ("oom", "oom")
    assert (predicted.source, predicted.oom_phase) == ("predicted", "forward")


def test_a_predictor_that_fails_costs_its_row_alone(profile, monkeypatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr("memcheck.bench.sweep.predicted_sweep.predict_case", fail)
    code, (measured, predicted) = profile(*SMALL, "--attention-type", "naive", "--predict")
    assert (code, measured.status, predicted.status) == (0, "ok", "error")
    assert predicted.reason == "ZeroDivisionError: no such luck"
