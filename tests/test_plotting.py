"""The plots show every record: a line, a bar, a mark, or a note that it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memcheck.plotting import Style, named_lines, plot_memory, x_ticks
from memcheck.records import Record

STYLES = {"naive": Style("#D55E00", "s", "--"), "softplus": Style("#009E73", "o", "-")}
MIB = 2**20


def record(operator: str, length: int, forward: int | None, backward: int | None, **fields: object) -> Record:
    return Record(
        operator=operator,
        query_len=length,
        kv_len=length,
        mode="train",
        forward_peak_bytes=forward,
        backward_peak_bytes=backward,
        **fields,
    )


@pytest.fixture
def plot(tmp_path):
    def draw(records: list[Record]):
        figure = plot_memory(
            records, tmp_path / "memory.png", styles=STYLES, title="Peak memory", subtitle="cpu, float32"
        )
        assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
        return figure

    return draw


def texts(ax) -> set[str]:
    return {text.get_text() for text in ax.texts}


def points(ax) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in named_lines(ax)}


def marks(ax) -> list[tuple[str, list[float]]]:
    return [(line.get_color(), list(line.get_xdata())) for line in ax.get_lines() if line.get_label() == "_oom"]


def test_a_line_per_operator_and_panel(plot) -> None:
    figure = plot(
        [
            record("naive", 512, 8 * MIB, 16 * MIB),
            record("softplus", 256, 1 * MIB, 2 * MIB),
            record("naive", 256, 2 * MIB, 4 * MIB),
            record("softplus", 512, 3 * MIB, 2 * MIB),
        ]
    )
    forward, both = figure.axes
    assert points(forward) == {
        "naive": [(256, 2 * MIB), (512, 8 * MIB)],
        "softplus": [(256, 1 * MIB), (512, 3 * MIB)],
    }
    assert points(both) == {"naive": [(256, 4 * MIB), (512, 16 * MIB)], "softplus": [(256, 2 * MIB), (512, 3 * MIB)]}
    assert {"naive 8 MiB", "softplus 3 MiB"} <= texts(forward)
    assert forward.get_ylim() == both.get_ylim()
    assert [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in named_lines(forward)] == [
        ("#D55E00", "s", "--"),
        ("#009E73", "o", "-"),
    ]


def test_out_of_memory_is_marked_where_it_happened(plot) -> None:
    failed = {"status": "oom", "oom_phase": "backward"}
    forward, both = plot([record("naive", 256, MIB, 2 * MIB), record("naive", 512, 4 * MIB, None, **failed)]).axes
    assert points(forward)["naive"][-1] == (512, 4 * MIB)
    assert marks(forward) == []
    assert points(both)["naive"] == [(256, 2 * MIB)]
    assert marks(both) == [("#D55E00", [512])]
    assert "naive OOM" in texts(both)


def test_out_of_memory_in_forward_is_marked_in_both(plot) -> None:
    failed = {"status": "oom", "oom_phase": "forward"}
    figure = plot([record("naive", 256, MIB, 2 * MIB), record("naive", 512, None, None, **failed)])
    assert [len(marks(ax)) for ax in figure.axes] == [1, 1]


def test_the_missing_are_named(plot) -> None:
    missing = record("softmax/cudnn", 256, None, None, status="unsupported")
    figure = plot([record("naive", 256, MIB, MIB), record("naive", 512, MIB, MIB), missing])
    assert figure.get_supxlabel() == "not drawn: softmax/cudnn (unsupported)"


def test_a_single_length_is_bars(plot) -> None:
    failed = {"status": "oom", "oom_phase": "backward"}
    figure = plot([record("softplus", 256, MIB, 2 * MIB), record("naive", 256, 5 * MIB, None, **failed)])
    forward, both = figure.axes
    assert [bar.get_height() for bar in forward.patches] == [MIB, 5 * MIB]
    assert texts(both) == {"2 MiB", "OOM"}


def test_inference_has_one_panel(plot) -> None:
    rows = [record("naive", length, length * MIB, None) for length in (1, 2)]
    for row in rows:
        row.mode = "inference"
    assert [ax.get_title() for ax in plot(rows).axes] == ["Forward"]


@pytest.mark.parametrize("lengths", [[256], [256, 512]])
def test_nothing_to_draw_is_still_a_picture(plot, lengths: list[int]) -> None:
    plot([record("naive", length, None, None, status="error") for length in lengths])
    plot([record("naive", length, None, None, status="oom", oom_phase="forward") for length in lengths])


@pytest.mark.parametrize(
    ("queries", "keys", "label"),
    [
        ([4, 8], [4, 8], "sequence length"),
        ([4, 4], [8, 16], "key length, at query length 4"),
        ([4, 8], [8, 8], "query length, at key length 8"),
        ([4], [8], "at query length 4, key length 8"),
    ],
)
def test_lengths_are_named(plot, queries: list[int], keys: list[int], label: str) -> None:
    rows = [record("naive", 1, MIB, MIB) for _ in queries]
    for row, query_len, kv_len in zip(rows, queries, keys, strict=True):
        row.query_len, row.kv_len = query_len, kv_len
    assert plot(rows).axes[0].get_xlabel() == label


def test_crowded_ticks_are_thinned() -> None:
    assert x_ticks({256, 512, 1024}) == [1024, 512, 256]
    assert len(x_ticks(set(range(1000, 1100)))) <= 8
    assert x_ticks({5}) == [5]


def test_plotting_knows_records_only() -> None:
    """A stand-in for the package keeps its __init__, which loads torch, out of the question."""
    code = (
        "import sys, types; package = types.ModuleType('memcheck'); package.__path__ = ['memcheck'];"
        "sys.modules['memcheck'] = package; import memcheck.plotting;"
        "assert not {'torch', 'matplotlib', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
