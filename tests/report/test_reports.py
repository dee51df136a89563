"""Tables of records: every row and verdict is in them, units in their headings, and nothing breaks their syntax.

The folder expected has the whole outputs; EXPECTTEST_ACCEPT=1 writes them again.
"""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from json_lines import write_json_lines
from pinned import assert_pinned

from memcheck.__main__ import main
from memcheck.bench.catalog import make_case
from memcheck.bench.profile import profile_case
from memcheck.bench.sweep.store import read_records
from memcheck.core.record import UNKNOWN, Doubt, Record
from memcheck.core.units import format_time, three_digits
from memcheck.report.accounting import (
    accounting_table,
    doubt_details,
    doubt_lines,
    factors_per_doubling,
    fit_exponent,
    scaling_table,
    summary,
)
from memcheck.report.cases import pair, parse_wanted, select
from memcheck.report.predictions import prediction_table
from memcheck.report.records import (
    cs336_tables,
    decode_table,
    main_tables,
    pivot_tables,
    records_table,
    stacked_pivot,
    standard_tables,
    write_tables,
)
from memcheck.report.tables import BOLD, RED, Screen, Table, data_rows, render, to_text

MIB = 2**20
EXPECTED = Path(__file__).with_name("expected")
FORMS = {"table": "txt", "markdown": "md", "latex": "tex", "csv": "csv", "json": "json"}
HOSTILE = 'a|b\n<script>alert("x")</script> & 100 % _of_ {it} \\ `code`'
DRIFT = Doubt("forward times drift: median 1 ms", "drift", ("forward_ms",))


def busy(load: int) -> Doubt:
    return Doubt(f"the machine was busy before the timing began: load average {load} on 2 cores", "busy")


def record(operator: str = "naive", length: int = 256, dim: int = 64, **fields: object) -> Record:
    values = {
        "bsz": 2,
        "query_len": length,
        "kv_len": length,
        "dim": dim,
        "heads": 4 if operator != "softplus" else None,
        "core_dim": dim if operator == "softplus" else None,
        "dtype": "float32",
        "causal": True,
        "mode": "train",
        "compiled": False,
        "device": "cpu",
    }
    return Record(operator=operator, **{**values, **fields})  # type: ignore[arg-type]


def measured(operator: str = "naive", length: int = 256, dim: int = 64, **fields: object) -> Record:
    """naive: quadratic, all others linear."""
    unit = 2 * length * dim * 4
    scores = length * length * 8 if operator == "naive" else 0
    sizes = {
        "input_bytes": 3 * unit,
        "output_bytes": unit,
        "parameter_bytes": 0,
        "forward_peak_bytes": 4 * unit + 2 * scores,
        "saved_bytes": scores,
        "backward_peak_bytes": 7 * unit + 3 * scores,
        "gradient_bytes": 3 * unit,
        "workspace_bytes": 0,
        "forward_ms": length / 100,
        "backward_ms": length / 50,
    }
    return record(operator, length, dim, **{**sizes, **fields})


def out_of_memory(length: int = 1024, **fields: object) -> Record:
    words = {"status": "oom", "oom_phase": "forward", "oom_requested_bytes": 64 * MIB, "oom_in_use_bytes": 70 * MIB}
    return record("naive", length, **{**words, **fields})


def cells(table: Table, key: str) -> list[object]:
    return [row[[column.key for column in table.columns].index(key)] for row in table.rows]


def by_name(table: Table, key: str = "operator") -> dict[object, dict[str, object]]:
    return {row[key]: row for row in data_rows(table)}


STATUSES = ("oom", "skipped", "unsupported", "timeout", "killed", "error")
QUARTILES = {"forward_ms_quartiles": (1.0, 1.5), "backward_ms_quartiles": (1.0, 1.5)}
ROWS = [
    measured("softplus", backend="memcheck cpu", saved_bytes=100, forward_ms=0.0071, backward_ms=45200.0, **QUARTILES),
    measured("naive", doubts=(busy(1), DRIFT)),
    measured("linear", doubts=(Doubt("saved_bytes differ by 8 B"),)),
    *(record(f"x|{status}", status=status, reason=f"because it was {status}") for status in STATUSES),
    record("hostile", status="error", reason=HOSTILE),
    out_of_memory(512, terms={f"{phase}_peak_bytes": {"scores": 150 * MIB} for phase in ("forward", "backward")}),
    measured("naive", 512, status="oom", oom_phase="backward", backward_peak_bytes=None, backward_ms=None),
    measured("linear", 64, passes=1, **QUARTILES),
    measured("naive", 64),
]


@pytest.mark.parametrize("form", FORMS)
def test_rows_with_and_without_figures(form: str) -> None:
    """Verdicts stand in place of numbers and reasons below the table; what all rows share is in the title alone."""
    text = render([records_table(ROWS)], form)
    assert_pinned(EXPECTED / f"records.{FORMS[form]}", text)
    if form == "csv":
        lines = list(csv.DictReader(io.StringIO(text)))
        assert len(lines) == len(ROWS)
        assert {line["forward_peak_mib"] for line in lines if line["status"] == "error"} == {""}
    elif form == "markdown":
        rows = [line.replace(r"\|", "") for line in text.splitlines() if line.startswith("|")]
        assert len(rows) == len(ROWS) + 2
        assert len({row.count("|") for row in rows}) == 1


@pytest.mark.parametrize(("width", "units"), [(40, False), (80, False), (80, True), (120, False), (None, True)])
def test_a_terminal_has_the_columns_that_fit(width: int | None, units: bool) -> None:
    rows = [measured(name, 4096, backend="memcheck cpu", **QUARTILES) for name in ("naive", "linear-causal")]
    text = to_text(records_table(rows, units), Screen(width))
    assert_pinned(EXPECTED / f"width-{width}{'-units' * units}.txt", text)
    assert width in (40, None) or max(map(len, text.splitlines())) <= width


def test_programs_have_every_unit_and_setting() -> None:
    table = records_table([measured(), measured("softplus")])
    assert data_rows(table)[0]["forward_peak_u"] in (4, 12)
    assert {"bsz", "dim", "dtype", "core_dim"} <= set(data_rows(table)[0])
    assert {"unit": "ms", "key": "forward_ms", "title": "forward"} in json.loads(render([table], "json"))[0]["columns"]
    assert "dim" in [column.key for column in records_table([measured(), measured(dim=32)]).to_people().columns]


def test_rows_are_sorted_by_their_highest_peak_beside_the_least_of_the_same_sizes() -> None:
    rows = [measured(name, n) for n in (512, 256) for name in ("naive", "softplus", "linear")]
    rows += [measured(length=256, mode="inference", backward_peak_bytes=None), out_of_memory(512)]
    rows += [measured("linear", 256, dim=32)]
    fields = ("operator", "query_len", "dim", "mode", "times_least")
    assert [[row[name] for name in fields] for row in data_rows(records_table(rows))] == [
        ["linear", 256, 32, "train", None],
        ["softplus", 256, 64, "train", 1.0],
        ["linear", 256, 64, "train", 1.0],
        ["naive", 256, 64, "train", 19 / 7],
        ["naive", 256, 64, "inference", None],
        ["softplus", 512, 64, "train", 1.0],
        ["linear", 512, 64, "train", 1.0],
        ["naive", 512, 64, "train", 31 / 7],
        ["naive", 512, 64, "train", None],
    ]
    # Callables that are no cases of the catalog are compared with each other.
    named = [Record(operator=name, forward_peak_bytes=size) for name, size in (("square", 8), ("sine", 4))]
    assert [(row["operator"], row["times_least"]) for row in data_rows(records_table(named))] == [
        ("sine", 1),
        ("square", 2),
    ]


def test_doubts_are_one_line_each() -> None:
    rows = [measured("naive", 256 * n, doubts=(busy(n),)) for n in (1, 2)]
    rows += [measured("linear", doubts=(DRIFT, busy(3)))]
    rows += [measured("softplus", doubts=(Doubt(f"saved_bytes differ by {size} B"),)) for size in (8, 16)]
    rows += [record(source="predicted", doubts=(Doubt("the workspace of a kernel", UNKNOWN),))]
    skipped = record(status="skipped", reason="predicted")  # It has no times, and does not count among those that have.
    assert doubt_lines([*rows, measured(), skipped]) == [
        "Times of 3 of 6 rows are noisy: the machine was busy, passes drift; bytes are not affected.",
        "Figures of 2 of 7 rows are uncertain: saved_bytes differ by 8 B.",
        "The predictions are bounds: the workspace of a kernel.",
    ]
    details = doubt_details(rows)
    assert len(details) == 7
    assert details[0].endswith(busy(1))
    assert doubt_lines([measured()]) == []


def test_colours_are_for_terminals_alone(monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("COLUMNS", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert Screen.of(io.StringIO()) == Screen(None, False)
    assert Screen.of(Terminal()) == Screen(80, True)
    monkeypatch.setenv("COLUMNS", "100")
    assert Screen.of(Terminal()) == Screen(100, True)
    assert Screen.of(io.StringIO()) == Screen(100, False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert Screen.of(Terminal()) == Screen(100, False)
    table = records_table([measured(), record("flex", status="timeout")])
    assert RED not in to_text(table, Screen(100))
    coloured = to_text(table, Screen(100, True))
    assert BOLD in coloured
    assert f"{RED} timeout" in coloured


def test_pivots() -> None:
    """Length by dimension for each operator, or by operator where there is one dimension; no row is lost."""
    rows = [measured(name, n, d) for name in ("naive", "softplus") for n in (256, 512) for d in (64, 32)]
    rows += [out_of_memory(), measured("naive", 256, 128), measured("naive", 256, 128, source="predicted")]
    factors = [measured("compressed", n, factor=factor) for factor in (4, 8) for n in (256, 512)]
    factors += [measured("compressed", 256, factor=8, query_len=128)]
    single = [measured(name, n) for name in ("naive", "softplus") for n in (256, 512)]
    tables = [*pivot_tables(rows, "forward_peak_bytes"), *pivot_tables(single, "forward_ms")]
    assert_pinned(EXPECTED / "pivots.txt", render([*tables, *pivot_tables(factors, "saved_bytes")], "table"))
    assert_pinned(EXPECTED / "stacked.csv", render([stacked_pivot(rows, "forward_ms")], "csv"))


CS336 = (
    "d_model,seq_len,forward_ms,backward_ms,mem_after_inputs_mib,mem_before_backward_mib,saved_activations_mib,"
    "forward_peak_mib,backward_peak_mib,status,compiled"
)
DATA = Path(__file__).parents[2] / "benchmarks/published/data"
CS336_ROWS = (DATA / "cs336_attention_eager_vs_compiled.csv").read_text().splitlines()


def test_cs336_has_the_columns_of_the_published_table() -> None:
    assert CS336_ROWS[0] == CS336
    rows = [measured("cs336/naive", n, 16, compiled=compiled) for compiled in (True, False) for n in (512, 256)]
    (table,) = cs336_tables([*rows, record("cs336/naive", 1024, 16, status="oom", oom_phase="forward")])
    text = render([table], "csv")
    assert text.splitlines()[0] == CS336
    assert cells(table, "seq_len") == [256, 256, 512, 512, 1024]
    assert cells(table, "compiled") == [False, True, False, True, False]
    assert text.splitlines()[-1] == "16,1024,,,,,,,,oom,False"
    first = data_rows(table)[0]
    assert first["mem_before_backward_mib"] - first["mem_after_inputs_mib"] == first["saved_activations_mib"]


CUBLAS_MIB = 16.25  # of workspaces, in every published figure of memory


@pytest.mark.extension
def test_cs336_columns_meet_the_published_ones() -> None:
    case = make_case(
        "cs336/naive", bsz=8, query_len=256, kv_len=256, dim=16, heads=1, core_dim=None, factor=None, causal=False
    )
    (table,) = cs336_tables([profile_case(case, timed=False)])
    (ours,) = data_rows(table)
    (theirs,) = (
        row
        for row in csv.DictReader(CS336_ROWS)
        if (row["d_model"], row["seq_len"], row["compiled"]) == ("16", "256", "False")
    )
    for field in ("mem_after_inputs_mib", "mem_before_backward_mib", "forward_peak_mib"):
        assert ours[field] == pytest.approx(float(theirs[field]) - CUBLAS_MIB, rel=0.01)
    assert ours["saved_activations_mib"] == pytest.approx(float(theirs["saved_activations_mib"]), rel=0.01)


def test_decoding_has_columns_of_its_own() -> None:
    state = {"mode": "decode", "query_len": 1, "forward_peak_bytes": 3 * MIB, "forward_ms": 0.25}
    row = record("softmax", **state, state_bytes=2 * MIB, state_bytes_per_sequence=MIB, state_bytes_per_token=4096.0)
    skipped = record("naive", mode="decode", query_len=1, status="skipped", reason="predicted: 93 GiB")
    table = decode_table([row, skipped, measured()])
    assert_pinned(EXPECTED / "decode.txt", render([table], "table"))
    assert (data_rows(table)[0]["state_bytes_per_token"], data_rows(table)[0]["state_mib"]) == (4096, 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (0.000488, "0.000488"), (0.0999, "0.0999"), (1, "1.00"), (12.345, "12.3"), (1048.6, "1049")],
)
def test_times_show_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert three_digits(value) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0.0071, "7.10 us"),
        (0.00042, "420 ns"),
        (0.9994, "999 us"),
        (0.9996, "1.00 ms"),
        (1.234, "1.23 ms"),
        (999.6, "1.00 s"),
        (45_200, "45.2 s"),
        (7_200_000, "7200 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(milliseconds: float, text: str) -> None:
    assert format_time(milliseconds) == text


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 1.5])
def test_exponents_of_exact_powers_are_found(exponent: float) -> None:
    fit = fit_exponent([(x, 3 * x**exponent) for x in (32, 64, 128, 512)])
    assert fit is not None
    assert fit.value == pytest.approx(exponent, abs=1e-9)
    assert fit.high == pytest.approx(fit.low, abs=1e-6)


def test_the_confidence_interval_is_that_of_the_t_distribution() -> None:
    """Three points leave one degree of freedom, whose t is 12.706."""
    fit = fit_exponent([(1, 1), (math.e, math.e), (math.e**2, math.e**2.3)])
    assert fit is not None
    assert fit.high is not None
    residual = [0.05, -0.1, 0.05]
    error = math.sqrt(sum(r * r for r in residual) / 1 / 2)
    assert fit.value == pytest.approx(1.15)
    assert fit.high - fit.value == pytest.approx(12.7062 * error, rel=1e-4)


def test_few_points_say_so() -> None:
    assert fit_exponent([(4, 4)]) is None
    assert fit_exponent([(4, 0), (8, 0)]) is None
    two = fit_exponent([(4, 4), (8, 16)])
    assert (two.value, two.low) == (pytest.approx(2), None)  # type: ignore[union-attr]
    assert "two points" in str(two)
    assert factors_per_doubling([(4, 1), (16, 16), (32, 0)]) == [4, None]


def test_scaling_shows_the_exponent_that_a_constant_hides() -> None:
    rows = [measured(name, n) for name in ("naive", "softplus") for n in (256, 512, 1024)]
    failed = out_of_memory(2048, oom_phase="backward", input_bytes=1, output_bytes=1, forward_peak_bytes=3)
    data = {(row["case"], row["quantity"]): row for row in data_rows(scaling_table([*rows, failed]))}
    forward = data["naive", "peak forward"]
    assert forward["points"] == 3
    assert forward["exponent"] < 1.95
    assert forward["exponent_beyond_held"] == pytest.approx(2)
    assert data["softplus", "peak forward"]["exponent"] == pytest.approx(1)
    assert data["softplus", "peak forward"]["exponent_beyond_held"] is None
    assert data["softplus", "kept for backward"]["exponent"] is None
    assert data["naive", "kept for backward"]["factors_per_doubling"] == "4.00 4.00"
    assert data["naive", "forward time"]["exponent"] == pytest.approx(1)
    text = render([scaling_table(rows)], "table")
    assert "none taken" in text
    assert "95 %" in text


def test_scaling_by_dimension_and_by_keys_alone() -> None:
    rows = [measured("softplus", 256, d) for d in (32, 64, 128)]
    rows += [measured("linear", n, query_len=128) for n in (256, 512)]
    axes = {(row["case"], row["axis"]) for row in data_rows(scaling_table(rows))}
    assert {axis for case, axis in axes if str(case).startswith("softplus")} == {"dim"}
    assert {axis for case, axis in axes if str(case).startswith("linear")} == {"T"}
    assert not scaling_table([measured()]).rows


def test_accounting_sets_predicted_beside_measured() -> None:
    terms = {
        "forward_peak_bytes": {"q": 10, "k": 10, "v": 10, "y": 10, "probabilities": 100, "scores": 100},
        "saved_bytes": {"probabilities": 100},
        "backward_peak_bytes": {"q": 10, "k": 10, "v": 10, "y": 10, "grad_y, expanded": 4, "gradient": 200, "dv": 10},
    }
    row = record(
        terms=terms,
        input_bytes=30,
        output_bytes=10,
        parameter_bytes=0,
        gradient_bytes=30,
        workspace_bytes=100,
        forward_peak_bytes=243,
        saved_bytes=100,
        backward_peak_bytes=254,
        saved_tensors=[{"shape": [5, 5], "dtype": "float32", "bytes": 100}],
        alive_at_peak=[
            {"phase": "forward", "name": "aten::mul", "bytes": 100},
            {"phase": "forward", "name": "aten::_softmax", "bytes": 100},
            {"phase": "forward", "name": "aten::full", "bytes": 3},
            {"phase": "backward", "name": "aten::bmm", "bytes": 200},
        ],
    )
    tables = [accounting_table(row), accounting_table(measured(doubts=(busy(1),)))]
    assert_pinned(EXPECTED / "accounting.txt", render(tables, "table"))


def test_accounting_of_a_peak_before_the_output_is_there() -> None:
    terms = {
        "forward_peak_bytes": {"q": 10, "scores": 100},
        "saved_bytes": {"scores": 20},
        "backward_peak_bytes": {"q": 10, "y": 10, "scores": 20, "grad y expanded": 4, "d scores": 200},
    }
    rows = {line["component"]: line for line in data_rows(accounting_table(record(terms=terms)))}
    assert rows["output"]["predicted_bytes"] == 10
    # 244 less inputs, output, what is kept, the gradient of q and the one that came in.
    assert rows["workspace"]["predicted_bytes"] == 190
    decoding = record(mode="decode", terms={**terms, "state_bytes": {"keys": 5}}, state_bytes=5, input_bytes=9)
    rows = {line["component"]: line for line in data_rows(accounting_table(decoding))}
    assert rows["keys"]["predicted_bytes"] == 5
    assert rows["inputs"]["predicted_bytes"] is None


@pytest.mark.extension
def test_accounting_agrees_with_a_measurement() -> None:
    """Of naive attention, the predicted parts are the record's, each to the byte."""
    from memcheck.bench.catalog import make_case
    from memcheck.bench.profile import known_terms, profile_case

    case = make_case("naive", heads=2, core_dim=None, factor=None, bsz=2, query_len=32, kv_len=48, dim=16)
    row = profile_case(case, timed=False)
    row.terms = known_terms(case)
    for line in data_rows(accounting_table(row)):
        assert line["difference_bytes"] in (0, None), line
    assert sum(line["difference_bytes"] == 0 for line in data_rows(accounting_table(row))) >= 8


def test_the_summary_counts() -> None:
    rows = [*ROWS, measured("flex", doubts=(Doubt("few passes"),)), measured("linear", mode="decode")]
    rows += [record(source="predicted", device_name="T4", status=status) for status in ("ok", "oom", "skipped")]
    assert_pinned(EXPECTED / "summary.txt", "\n".join(summary(rows)))


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("operator=naive", ["naive", "naive"]),
        ("seq-len=512", ["naive", "softplus"]),
        ("seq_len=512,operator=softplus", ["softplus"]),
        ("causal=true,query-len=256", ["naive"]),
        ("dim=7", []),
    ],
)
def test_cases_are_picked(words: str, kept: list[str]) -> None:
    rows = [measured(), measured(length=512), measured("softplus", 512)]
    assert [row.operator for row in select(rows, parse_wanted(words))] == kept


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [measured(name, n, d) for name in ("naive", "softplus") for n in (256, 512) for d in (64, 32)]
    write_json_lines([*rows, out_of_memory()], tmp_path / "records.jsonl")
    return tmp_path


def test_files_hold_every_table(folder: Path) -> None:
    records = read_records(folder)
    paths = write_tables(records, folder)
    assert all(path.stat().st_size for path in paths)
    names = {path.name for path in paths}
    assert {"tables.md", "tables.json", "records.csv", "records.tex", "scaling.csv"} <= names
    titles = [table["title"] for table in json.loads((folder / "tables.json").read_text())]
    assert titles == [table.title for table in standard_tables(records)]
    assert len(paths) == 2 + 2 * len(titles)
    with (folder / "tables" / "records.csv").open() as lines:
        assert len(list(csv.DictReader(lines))) == len(records)


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "latex", "json"])
@pytest.mark.parametrize(
    "flags", [[], ["--pivot", "forward_ms,saved_bytes"], ["--scaling"], ["--accounting"], ["--cs336"]]
)
def test_every_table_in_every_format(folder: Path, capsys, form: str, flags: list[str]) -> None:
    assert main(["report", str(folder), "--format", form, *flags]) == 0
    out = capsys.readouterr().out
    if form == "json":
        assert json.loads(out)
    assert "forward" in out
    assert len(out) > 200


def test_the_command_writes_what_it_printed(folder: Path, tmp_path: Path, capsys) -> None:
    to = tmp_path / "out"
    assert main(["report", str(folder), "--pivot", "saved_bytes", "--output", str(to)]) == 0
    printed = capsys.readouterr()
    assert len(list((to / "tables").iterdir())) == 2 * 2
    assert str(to / "tables.md") in printed.err


def test_reports_know_records_only() -> None:
    code = (
        "import sys; from memcheck.report import records, tables;"
        "from memcheck.core.record import Record;"
        "assert not {'pandas', 'scipy', 'jinja2'} & set(sys.modules);"
        "tables.render(records.standard_tables([Record(operator='x', status='oom')]), 'markdown');"
        "assert not {'torch', 'matplotlib', 'memcheck.bench.catalog'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Predictions beside what was measured.


def foreseen(operator: str = "naive", length: int = 256, **fields: object) -> Record:
    values = {"forward_peak_bytes": 3 * MIB, "saved_bytes": MIB, "backward_peak_bytes": 4 * MIB, "certainty": "exact"}
    return record(operator, length, **{"source": "predicted", "device_name": "cpu", **values, **fields})


def found(operator: str = "naive", length: int = 256, **fields: object) -> Record:
    values = {"forward_peak_bytes": 3 * MIB, "saved_bytes": MIB, "backward_peak_bytes": 6 * MIB, "device_name": "EPYC"}
    return record(operator, length, **{**values, **fields})


def test_a_prediction_stands_beside_the_measurement_of_its_case() -> None:
    out = {"status": "oom", "oom_phase": "backward", "backward_peak_bytes": None}
    same = [found(length=512, **out), foreseen(length=512, **out)]
    rows = [
        found(),
        foreseen(),
        *same,
        found("linear"),
        foreseen("linear", **out),
        found(length=1024),
        foreseen("flex"),
    ]
    table = prediction_table(rows)
    assert_pinned(EXPECTED / "prediction.txt", render([table], "table"))
    assert data_rows(table)[0]["backward_peak_ratio"] == 1.5
    # It is a table of a report, if there are predictions.
    assert [table.name for table in main_tables(rows)] == ["records", "prediction"]
    assert [table.name for table in main_tables(rows[::2])] == ["records"]


@pytest.mark.parametrize(
    ("measured_on", "predicted_for", "together"),
    [
        ({"device": "cpu", "device_name": "EPYC", "threads": 2}, {"device": "cpu", "threads": 2}, True),
        ({"device": "cpu", "device_name": "EPYC", "threads": 2}, {"device": "cpu", "threads": 4}, False),
        ({"device": "cpu"}, {"device": "cuda", "device_name": "H200"}, False),
        ({"device": "cuda", "device_name": "NVIDIA H200"}, {"device": "cuda", "device_name": "H200"}, True),
        ({"device": "cuda", "device_name": "NVIDIA H200"}, {"device": "cuda", "device_name": "NVIDIA H200"}, True),
        ({"device": "cuda", "device_name": "NVIDIA H100 PCIe"}, {"device": "cuda", "device_name": "H100-80GB"}, True),
        (
            {"device": "cuda", "device_name": "NVIDIA H100 PCIe"},
            {"device": "cuda", "device_name": "H100-80GB-SXM"},
            False,
        ),
        ({"device": "cuda", "device_name": "NVIDIA L4"}, {"device": "cuda", "device_name": "24GiB"}, False),
    ],
)
def test_only_predictions_for_the_same_device_stand_beside_it(measured_on, predicted_for, together: bool) -> None:
    assert bool(pair([found(**measured_on), foreseen(**predicted_for)])) is together


def test_the_last_of_several_predictions_counts() -> None:
    ((_, prediction),) = pair([foreseen(saved_bytes=1), found(), foreseen(saved_bytes=2)])
    assert prediction.saved_bytes == 2


def test_predicted_rows_are_never_taken_for_measured_ones() -> None:
    rows = [row for n in (256, 512) for row in (found(length=n), foreseen(length=n, backward_peak_bytes=n * MIB))]
    assert [row["source"] for row in data_rows(records_table(rows))] == ["measured", "predicted"] * 2
    assert "source" in render([records_table(rows)], "table")
    assert "source" not in render([records_table(rows[::2])], "table")
    titles = [table.title for table in pivot_tables(rows, "backward_peak_bytes")]
    assert [title.endswith("predicted") for title in titles] == [False, True]
    words = [row["case"] for row in data_rows(scaling_table(rows)) if row["quantity"] == "peak backward"]
    assert words == ["naive", "naive, predicted"]


def test_the_report_shows_them(tmp_path: Path, capsys) -> None:
    write_json_lines([found(), foreseen()], tmp_path / "records.jsonl")
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "Prediction beside measurement, 1 case" in capsys.readouterr().out
    assert "Prediction beside measurement, 1 case" in (tmp_path / "page.html").read_text()
    assert main(["report", str(tmp_path), "--case", "source=predicted", "--format", "csv"]) == 0
    assert capsys.readouterr().out.count("\nnaive,") == 1
