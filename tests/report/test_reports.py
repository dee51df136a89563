"""Tables of records: every row and verdict is in them, units in their headings, and nothing breaks their syntax."""

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

from memcheck.__main__ import main
from memcheck.bench.catalog import make_case
from memcheck.bench.profile import profile_case
from memcheck.bench.sweep.store import read_records
from memcheck.core.record import Record
from memcheck.core.units import format_time, three_digits
from memcheck.report.accounting import accounting_table
from memcheck.report.cases import pair, parse_wanted, select
from memcheck.report.page import html_page
from memcheck.report.predictions import prediction_table
from memcheck.report.records import (
    cs336_tables,
    decode_table,
    pivot_tables,
    records_table,
    stacked_pivot,
    standard_tables,
    write_tables,
)
from memcheck.report.rows import LiveRows
from memcheck.report.scaling import factors_per_doubling, fit_exponent, scaling_table
from memcheck.report.summary import answer, doubt_details, doubt_lines, padded_against_packed, summary
from memcheck.report.tables import BOLD, RED, Screen, Table, data_rows, render, to_text

MIB = 2**20
HOSTILE = 'a|b\n<script>alert("x")</script> & 100 % _of_ {it} \\ `code`'


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


FAILURES = [
    ("oom", "OOM"),
    ("skipped", "skipped"),
    ("unsupported", "unsupported"),
    ("timeout", "timeout"),
    ("killed", "killed"),
    ("error", "error"),
]


@pytest.mark.parametrize(("status", "word"), FAILURES)
@pytest.mark.parametrize("form", ["table", "markdown", "latex"])
def test_a_verdict_stands_in_place_of_its_number(status: str, word: str, form: str) -> None:
    rows = [measured("softplus"), record("naive", status=status, reason=f"because it was {status}")]
    text = render([records_table(rows)], form)
    line = next(line for line in text.splitlines() if "naive" in line and "256" in line)
    # In the peaks, in what is kept and in both times; and once more where it is the status, too.
    assert line.count(word) == 5 + (status == word)
    assert f"because it was {status}" in text or status == "oom"


def test_data_hold_numbers_and_the_status_tells_why_not() -> None:
    table = records_table([measured("softplus"), out_of_memory()])
    rows = by_name(table)
    assert rows["softplus"]["forward_peak_mib"] == 4 * 2 * 256 * 64 * 4 / MIB
    assert rows["softplus"]["forward_peak_u"] == 4
    assert rows["naive"]["forward_peak_mib"] is None
    assert rows["naive"]["status"] == "oom"
    assert rows["naive"]["reason"] == "OOM in forward: 64 MiB requested, 70 MiB in use"
    (line,) = [line for line in csv.DictReader(io.StringIO(render([table], "csv"))) if line["operator"] == "naive"]
    assert line["forward_peak_mib"] == ""


def test_headings_hold_units() -> None:
    text = render([records_table([measured()], units=True)], "markdown")
    for heading in ("peak forward, MiB", "peak forward, U", "peak forward, B/ST", "kept for backward, MiB", "forward"):
        assert f" {heading} |" in text
    # Programs always get every unit; people only when they ask.
    table = records_table([measured()])
    assert "peak forward, U" not in render([table], "markdown")
    assert data_rows(table)[0]["forward_peak_u"] == 12
    assert {"unit": "ms", "key": "forward_ms", "title": "forward"} in json.loads(render([table], "json"))[0]["columns"]


def test_what_all_rows_share_is_in_the_title_alone() -> None:
    table = records_table([measured(), measured("softplus")])
    assert "float32, batch 2, dim 64, 4 heads, causal, train" in table.title
    shown = [column.key for column in table.to_people().columns]
    assert {"bsz", "dim", "dtype", "core_dim"}.isdisjoint(shown)
    assert {"bsz", "dim", "dtype", "core_dim"} <= set(data_rows(table)[0])
    assert "dim" in [column.key for column in records_table([measured(), measured(dim=32)]).to_people().columns]


BUSY = "the machine was busy before the timing began: load average {} on 2 cores"


def test_doubts_are_one_line_under_the_table() -> None:
    rows = [measured("naive", 256 * n, doubts=(BUSY.format(n),)) for n in (1, 2)]
    rows += [measured("linear", doubts=("forward times drift: median 1 ms", BUSY.format(3)))]
    line = "Times of 3 of 4 rows are noisy: the machine was busy, passes drift; bytes are not affected."
    table = records_table([*rows, measured("softplus")])
    assert table.notes[-1] == line
    assert cells(table, "note") == [None] * 4
    assert [words for words in summary([*rows, measured("softplus")]) if "busy" in words] == [line]
    details = doubt_details([*rows, measured("softplus")])
    assert len(details) == 4
    assert details[0] == f"naive, S = T = 256: {BUSY.format(1)}"
    # Data formats keep every sentence.
    assert "load average 3" in str(by_name(table)["linear"]["doubts"])


def test_doubts_about_bytes_are_not_doubts_about_times() -> None:
    rows = [measured(doubts=(f"saved_bytes differ by {size} B", BUSY.format(1))) for size in (8, 16)]
    assert doubt_lines([*rows, measured()]) == [
        "Times of 2 of 3 rows are noisy: the machine was busy; bytes are not affected.",
        "Figures of 2 of 3 rows are uncertain: saved_bytes differ by 8 B.",
    ]
    unknown = record(source="predicted", doubts=("the workspace of a kernel",))
    assert doubt_lines([unknown]) == ["The predictions are bounds: the workspace of a kernel."]
    # Cases without times are not counted among those whose times are steady.
    skipped = record(status="skipped", reason="predicted")
    (line,) = doubt_lines([measured(doubts=(BUSY.format(1),)), measured("linear"), skipped])
    assert line.startswith("Times of 1 of 2 rows are noisy")


def test_doubts_are_one_line_in_every_format() -> None:
    drift = "forward times drift: median 1 ms"
    tables = [accounting_table(measured(doubts=(BUSY.format(1), drift)))]
    for form in ("table", "markdown", "latex"):
        text = render(tables, form)
        assert text.count("busy") == 1
        assert "The times are noisy: passes drift, the machine was busy; bytes are not affected." in text
        assert "median 1 ms" not in text
    assert "noisy" not in next(line for line in text.splitlines() if line.startswith(r"\caption"))
    page = html_page([measured(doubts=(BUSY.format(1), drift))], title="")
    assert page.count("are noisy") == 2  # Under "In short" and below the table.


def test_a_prediction_is_not_said_to_have_run_out() -> None:
    failed = {"status": "oom", "oom_phase": "forward", "source": "predicted"}
    (line,) = [words for words in summary([record(**failed)]) if "out of memory at" in words]
    assert "naive is predicted to run out of memory at batch 2, " in line
    assert doubt_lines([measured()]) == []


def test_footnotes_stay_out_of_a_caption() -> None:
    failed = record("softmax/cudnn", status="unsupported", reason="torch said no")
    text = render([records_table([measured(doubts=(BUSY.format(1),)), failed])], "latex")
    (caption,) = [line for line in text.splitlines() if line.startswith(r"\caption")]
    assert "torch said no" not in caption
    assert "noisy" not in caption
    body, _, below = text.partition(r"\end{tabular}")
    assert "torch said no" in below
    assert "noisy" in below
    assert "torch said no" not in body


def live(records: list[Record], width: int | None = None, **how: bool) -> str:
    rows = LiveRows(records, screen=Screen(width), **how)
    return "\n".join([rows.header(), *map(rows.row, records), rows.legend()])


def test_live_rows_are_as_wide_as_the_screen() -> None:
    quartiles = {"forward_ms_quartiles": (1.0, 1.5), "backward_ms_quartiles": (1.0, 1.5)}
    rows = [measured(name, 4096, backend="memcheck cpu", **quartiles) for name in ("naive", "linear-causal")]
    narrow, wide, whole = live(rows, 80), live(rows, 120), live(rows)
    for text, width in ((narrow, 80), (wide, 120)):
        assert max(map(len, text.splitlines())) <= width
    assert "backend" not in narrow.partition("Peaks")[0]
    assert "Not shown in 80 columns: backend; mask." in narrow
    for text in (wide, whole):
        assert "memcheck cpu" in text
        assert "Not shown" not in text
    # What matters most is on the narrowest of screens, too.
    for text in (live(rows, 40), narrow, wide, whole):
        for words in ("naive", "4096", "264.00", "398.00", "41.0 ms"):
            assert words in text
    assert "±" in narrow
    assert "±" not in live(rows, 70).partition("Peaks")[0]


def test_units_are_shown_on_request() -> None:
    rows = [measured(), measured("softplus")]
    header = live(rows).partition("naive")[0]
    assert " U " not in header
    header = live(rows, units=True).partition("naive")[0]
    assert header.count(" U ") == 3
    assert header.count("B/ST") == 3
    # They outrank the times where there is no room for both.
    narrow = live(rows, 80, units=True)
    assert " U" in narrow.partition("naive")[0]
    assert "Not shown in 80 columns: " in narrow


def test_a_failed_live_row_says_why() -> None:
    before = record("naive", status="oom", oom_phase="forward", oom_requested_bytes=MIB, oom_in_use_bytes=MIB)
    late = measured("naive", status="oom", oom_phase="backward", backward_peak_bytes=None, backward_ms=None)
    rows = LiveRows([before, late])
    assert rows.row(before).splitlines() == ["naive" + rows.row(before)[5:]]
    assert rows.row(before).endswith("256  OOM in forward: 1 MiB requested, 1 MiB in use")
    first, second = rows.row(late).splitlines()
    assert "OOM" in first
    assert second == "  OOM in backward"


def test_without_times_there_are_no_columns_of_them() -> None:
    assert "median" in live([measured()])
    assert "median" not in live([measured()], timed=False)
    assert live([measured()], timed=False).splitlines()[1].split() == ["forward", "backward", "backward"]


def test_a_long_reason_is_wrapped() -> None:
    refused = record("softmax/cudnn", status="unsupported", reason="no backend takes it " * 8)
    lines = LiveRows([refused], screen=Screen(80)).row(refused).splitlines()
    assert lines[0].split() == ["softmax/cudnn", "256"]
    assert len(lines) == 4
    assert all(line.startswith("  no") or (line.startswith("  ") and len(line) <= 80) for line in lines[1:])


def test_small_figures_are_not_0() -> None:
    text = live([measured("softplus", saved_bytes=100, forward_ms=0.0071, backward_ms=45200.0)])
    (row,) = [line for line in text.splitlines() if line.startswith("softplus")]
    assert "<0.01" in row
    assert "7.10 us" in row
    assert "45.2 s" in row


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


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, capsys) -> None:
    write_json_lines([measured()], tmp_path / "records.jsonl")
    assert main(["report", str(tmp_path), "--output", "/proc/none"]) == 2
    assert "--output /proc/none cannot be written to: " in capsys.readouterr().err


@pytest.mark.parametrize("form", ["table", "markdown", "latex", "csv", "json"])
def test_a_hostile_reason_breaks_no_format(form: str) -> None:
    rows = [measured("softplus"), record("naive", status="error", reason=HOSTILE)]
    table = records_table(rows)
    text = render([table], form)
    if form == "json":
        assert json.loads(text)[0]["rows"][1]["reason"].startswith("a|b <script>")
    elif form == "csv":
        assert [line["operator"] for line in csv.DictReader(io.StringIO(text))] == ["softplus", "naive"]
    elif form == "markdown":
        assert r"a\|b \<script\>" in text
    elif form == "latex":
        assert r"\& 100 \% \_of\_ \{it\}" in text
    else:
        assert HOSTILE.split("\n")[0] in text


def test_markdown_rows_have_as_many_cells_as_headings() -> None:
    text = render([records_table([measured(), record("x|y", status="error", reason=HOSTILE)])], "markdown")
    lines = [line.replace(r"\|", "") for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 4


def test_pivots_are_length_by_dimension_for_each_operator() -> None:
    rows = [measured(name, n, d) for name in ("naive", "softplus") for n in (256, 512) for d in (64, 32)]
    naive, softplus = pivot_tables([*rows, out_of_memory()], "forward_peak_bytes")
    assert "naive" in naive.title
    assert "MiB" in naive.title
    assert [column.title for column in naive.columns] == ["N", "dim 32", "dim 64"]
    assert [row[0] for row in naive.rows] == ["256", "512", "1024"]
    assert naive.rows[0][2] == rows[0].forward_peak_bytes / MIB  # type: ignore[operator]
    assert naive.rows[2] == ["1024", None, "OOM"]
    # Its core dimension follows dim, and so splits nothing.
    assert len(softplus.rows) == 2


def test_pivots_of_one_dimension_set_operators_side_by_side() -> None:
    rows = [measured(name, n) for name in ("naive", "softplus") for n in (256, 512)]
    (table,) = pivot_tables([*rows, out_of_memory(512, dtype="bfloat16")], "forward_ms")[:1]
    assert [column.title for column in table.columns] == ["N", "naive", "softplus"]
    assert table.rows[1] == ["512", 5.12, 5.12]


def test_no_pivot_loses_a_row() -> None:
    """Two factors of one operator are two tables, not one that holds the last."""
    rows = [measured("compressed", n, factor=factor) for factor in (4, 8) for n in (256, 512)]
    rows += [measured("compressed", 256, factor=8, query_len=128)]
    tables = pivot_tables(rows, "forward_ms")
    assert sum(cell is not None for table in tables for row in table.rows for cell in row[1:]) == len(rows)
    assert "128 x 256" in [row[0] for table in tables for row in table.rows]


def test_stacked_pivots_say_which_case_a_row_is_of() -> None:
    rows = [measured(name, n, d) for name in ("naive", "softplus") for n in (256, 512) for d in (64, 32)]
    rows += [measured("naive", 256, 128)]
    table = stacked_pivot(rows, "forward_ms")
    assert [column.title for column in table.columns] == ["case", "N", "dim 32", "dim 64", "dim 128"]
    assert [row[:2] for row in table.rows] == [
        ["naive, batch 2, 4 heads, float32, causal, train", "256"],
        ["naive, batch 2, 4 heads, float32, causal, train", "512"],
        ["softplus, batch 2, float32, causal, train", "256"],
        ["softplus, batch 2, float32, causal, train", "512"],
    ]
    assert table.rows[0][2:] == [2.56, 2.56, 2.56]
    assert table.rows[2][2:] == [2.56, 2.56, None]


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
    assert [data["operator"] for data in data_rows(table)] == ["softmax", "naive"]
    assert data_rows(table)[0]["state_bytes_per_token"] == 4096
    assert data_rows(table)[0]["state_mib"] == 2
    assert "skipped" in render([table], "table")


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


def test_the_answer_names_the_most_and_the_least() -> None:
    rows = [measured(name, n) for name in ("naive", "linear", "softplus") for n in (256, 4096)]
    rows[3].backward_peak_bytes = 15 * MIB
    most, least = rows[1].backward_peak_bytes, rows[5].backward_peak_bytes
    assert most is not None
    assert least is not None
    assert answer(rows)[0].startswith(f"At S = T = 4096, naive needs {most / least:.0f} times as much as softplus: ")
    assert f" {most / MIB:.0f} MiB against {least / MIB:.3g}. Between them: linear " in answer(rows)[0]
    # One operator is compared with itself.
    (words,) = answer(rows[:2])
    assert words.startswith(
        "naive needs 398 MiB at its peak, in the backward, at S = T = 4096: 168 times as much as at"
    )
    assert answer([measured(), measured("softmax")])[0].startswith("At S = T = 256, ")
    assert answer([record("flex", status="unsupported", reason="no")]) == []


def test_out_of_memory_says_what_is_needed_in_all() -> None:
    terms = {"forward_peak_bytes": {"scores": 100 * MIB}, "backward_peak_bytes": {"scores": 150 * MIB}}
    (words,) = answer([out_of_memory(terms=terms)])
    assert "64 MiB requested, 70 MiB in use; the case needs 150 MiB in all" in words
    # Not where a phase is unknown.
    (words,) = answer([out_of_memory(terms={"forward_peak_bytes": {"scores": 100 * MIB}})])
    assert "in all" not in words


def test_padded_against_packed_is_of_one_size() -> None:
    """Of the largest dimension, and measured if there are measurements."""
    layouts = {"padded": {"bsz": 2, "length": 60}, "packed": {"bsz": 1, "length": 64}}
    rows = [
        record(dim=dim, lengths=(60, 4), source=source, forward_peak_bytes=MIB * dim, backward_peak_bytes=0, **batch)
        for dim in (32, 64)
        for source in ("measured", "predicted")
        for batch in layouts.values()
    ]
    (words,) = padded_against_packed(rows)
    assert words == "Padded against packed, sequences of 60, 4, dim 64: naive 64 MiB against 64."


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
    rows = {(line["moment"], line["component"]): line for line in data_rows(accounting_table(row))}
    for part, size in {"inputs": 30, "output": 10, "parameters": 0, "gradients": 30, "workspace": 100}.items():
        assert (rows["in all", part]["predicted_bytes"], rows["in all", part]["difference_bytes"]) == (size, 0), part
    total = rows["peak forward", "sum"]
    assert (total["predicted_bytes"], total["measured_bytes"], total["difference_bytes"]) == (240, 243, 3)
    assert rows["peak forward", "not predicted"]["measured_as"] == "aten::full"
    assert rows["peak forward", "scores"]["measured_as"] == "aten::mul or aten::_softmax"
    assert rows["peak forward", "q"]["measured_bytes"] is None
    assert rows["kept for backward", "probabilities"]["measured_as"] == "(5, 5) float32"
    assert rows["peak backward", "gradient"]["measured_as"] == "aten::bmm"


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
    from memcheck.bench.case_predictions import closed_terms
    from memcheck.bench.catalog import make_case
    from memcheck.bench.profile import profile_case

    case = make_case("naive", heads=2, core_dim=None, factor=None, bsz=2, query_len=32, kv_len=48, dim=16)
    row = profile_case(case, timed=False)
    row.terms = closed_terms(case)
    for line in data_rows(accounting_table(row)):
        assert line["difference_bytes"] in (0, None), line
    assert sum(line["difference_bytes"] == 0 for line in data_rows(accounting_table(row))) >= 8


def test_accounting_without_terms_says_so() -> None:
    table = accounting_table(measured())
    assert any("No terms" in note for note in table.notes)
    assert all(line["predicted_bytes"] is None for line in data_rows(table))


def test_the_summary_says_who_needs_least_and_most_and_what_failed() -> None:
    rows = [measured(name, n) for name in ("naive", "softplus", "linear") for n in (256, 512)]
    rows += [measured("softplus", 1024), out_of_memory(1024), out_of_memory(2048)]
    rows += [record("softmax/cudnn", status="unsupported", reason="torch said no")]
    rows += [record("flex", status="timeout", reason="60 s"), measured("linear", 64, doubts=("few passes",))]
    text = "\n".join(summary(rows))
    assert "12 cases of naive, softplus, linear, softmax/cudnn and flex" in text
    assert "8 ran to the end" in text
    assert "At S = T = 512, naive needs " in text
    assert " times as much as softplus: " in text
    assert "naive ran out of memory at batch 2, S = T = 1024, dim 64, float32 (OOM in forward" in text
    assert "), and in 1 case more." in text
    assert "1 case unsupported here: softmax/cudnn: torch said no" in text
    assert "1 case out of time: flex: 60 s" in text
    assert "Figures of 1 of 12 rows are uncertain: few passes." in text


@pytest.mark.parametrize(("status", "word"), FAILURES)
def test_a_summary_of_one_failure(status: str, word: str) -> None:
    text = "\n".join(summary([record(status=status, reason="so it was")]))
    assert "1 cases" not in text
    assert "none ran to the end" in text
    assert "so it was" in text or status == "oom"


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--pivot forward_sm", "--pivot forward_sm is unknown; known: input_bytes"),
        ("--case operator", "--case must look like operator=softplus,seq-len=512"),
        ("--case weight=3", "--case must look like"),
        ("--case operator=flex", "--case operator=flex fits none of the 9 rows"),
        ("--format xml", "invalid choice: 'xml'"),
    ],
)
def test_wrong_flags_end_in_one_line(folder: Path, capsys, flags: str, words: str) -> None:
    assert main(["report", str(folder), *flags.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert words in printed.err


def test_a_folder_without_records_is_said(tmp_path: Path, capsys) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    (tmp_path / "records.jsonl").write_text("")
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no rows" in capsys.readouterr().err


def test_reports_know_records_only() -> None:
    """A stand-in for the package keeps its __init__, which loads torch, out of the question."""
    code = (
        "import sys, types; package = types.ModuleType('memcheck'); package.__path__ = ['memcheck'];"
        "sys.modules['memcheck'] = package; from memcheck.report import records, tables;"
        "from memcheck.core.record import Record;"
        "assert not {'pandas', 'scipy', 'jinja2'} & set(sys.modules);"
        "tables.render(records.standard_tables([Record(operator='x', status='oom')]), 'markdown');"
        "assert not {'torch', 'matplotlib', 'memcheck.bench.catalog'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Predictions beside what was measured.


def foreseen(operator: str = "naive", length: int = 256, **fields: object) -> Record:
    values = {"forward_peak_bytes": 3 * MIB, "saved_bytes": MIB, "backward_peak_bytes": 4 * MIB, "exact": True}
    return record(operator, length, **{"source": "predicted", "device_name": "cpu", **values, **fields})


def found(operator: str = "naive", length: int = 256, **fields: object) -> Record:
    values = {"forward_peak_bytes": 3 * MIB, "saved_bytes": MIB, "backward_peak_bytes": 6 * MIB, "device_name": "EPYC"}
    return record(operator, length, **{**values, **fields})


def test_a_prediction_stands_beside_the_measurement_of_its_case() -> None:
    table = prediction_table([found(), foreseen(), found(length=512), foreseen("softplus")])
    (row,) = data_rows(table)
    assert (row["case"], row["status"], row["predicted_status"]) == ("naive, S = T = 256", "ok", "ok")
    assert (row["forward_peak_measured_mib"], row["forward_peak_predicted_mib"], row["forward_peak_ratio"]) == (3, 3, 1)
    assert (row["backward_peak_measured_mib"], row["backward_peak_predicted_mib"]) == (6, 4)
    assert (row["backward_peak_ratio"], row["exact"]) == (1.5, True)
    text = render([table], "table")
    assert "1.5 x" in text
    assert "2 of 3 figures are as predicted, to the byte; 1 of 1 verdicts are." in text.replace("\n", " ")
    assert "Furthest off: peak backward of naive" in text.replace("\n", " ")


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


def test_a_verdict_that_was_not_foreseen_shows() -> None:
    out = {"status": "oom", "oom_phase": "backward", "backward_peak_bytes": None}
    table = prediction_table([found(), foreseen(**out), found(length=512, **out), foreseen(length=512, **out)])
    first, second = data_rows(table)
    assert (first["status"], first["predicted_status"], first["backward_peak_ratio"]) == ("ok", "oom in backward", None)
    assert first["backward_peak_measured_mib"] == 6
    assert second["status"] == second["predicted_status"] == "oom in backward"
    assert "1 of 2 verdicts are." in render([table], "table").replace("\n", " ")


def test_predicted_rows_are_never_taken_for_measured_ones() -> None:
    rows = [row for n in (256, 512) for row in (found(length=n), foreseen(length=n, backward_peak_bytes=n * MIB))]
    assert [row["source"] for row in data_rows(records_table(rows))] == ["measured", "predicted"] * 2
    assert "source" in render([records_table(rows)], "table")
    assert "source" not in render([records_table(rows[::2])], "table")
    titles = [table.title for table in pivot_tables(rows, "backward_peak_bytes")]
    assert len(titles) == 2
    assert [title.endswith("predicted") for title in titles] == [False, True]
    words = [row["case"] for row in data_rows(scaling_table(rows)) if row["quantity"] == "peak backward"]
    assert words == ["naive", "naive, predicted"]
    assert "prediction" in {table.name for table in standard_tables(rows)}
    assert "prediction" not in {table.name for table in standard_tables(rows[::2])}


def test_the_summary_tells_both_apart() -> None:
    rows = [found(), found("softplus"), foreseen(), foreseen("softplus", status="skipped", reason="not predicted")]
    first, *_, predictions, agreed = summary(rows)
    assert first.startswith("2 cases of naive and softplus")
    assert predictions.startswith("2 cases predicted for cpu: 1 fit, 0 run out of memory, nothing is known of 1;")
    assert "figures are as predicted, to the byte" in agreed
    only, *_ = summary(rows[2:])
    assert only == predictions


def test_the_report_shows_them(tmp_path: Path, capsys) -> None:
    write_json_lines([found(), foreseen()], tmp_path / "records.jsonl")
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "Prediction beside measurement, 1 case" in capsys.readouterr().out
    assert "Prediction beside measurement, 1 case" in (tmp_path / "page.html").read_text()
    assert main(["report", str(tmp_path), "--case", "source=predicted", "--format", "csv"]) == 0
    assert capsys.readouterr().out.count("\nnaive,") == 1
