"""The plots show every record: a line, a bar, a mark, or a note that it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from plotted import MIB, STYLES, grid, labelled, marks, points, prediction, record, texts

from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.report.plots.lines import named_lines, spread_apart
from memcheck.report.plots.memory import memory_lines
from memcheck.report.plots.pictures import plot_memory
from memcheck.report.plots.scales import x_ticks
from memcheck.report.plots.series import views_along
from memcheck.report.plots.style import distinct_styles


@pytest.fixture
def plot(tmp_path):
    def draw(records: list[Record]):
        figure = plot_memory(
            records, tmp_path / "memory.png", styles=STYLES, title="Peak memory", subtitle="cpu, float32"
        )
        assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
        return figure

    return draw


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
    assert [bar.get_width() for bar in forward.patches] == [MIB, 5 * MIB]
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
    assert plot(rows).axes[0].get_xlabel().splitlines()[-1] == label


def test_two_rows_of_one_case_are_one_point(plot) -> None:
    rows = [
        record("naive", 256, MIB, 2 * MIB),
        record("naive", 512, MIB, 2 * MIB),
        record("naive", 512, 3 * MIB, 3 * MIB),
    ]
    assert points(plot(rows).axes[0]) == {"naive": [(256, MIB), (512, 3 * MIB)]}


def test_variants_of_an_operator_are_lines_of_their_own(plot) -> None:
    rows = [record("naive", length, heads * MIB, heads * MIB, heads=heads) for length in (256, 512) for heads in (4, 8)]
    assert set(points(plot(rows).axes[0])) == {"naive, 4 heads", "naive, 8 heads"}
    for row in rows:
        row.heads, row.compiled = 4, row.heads == 8
    assert set(points(plot(rows).axes[0])) == {"naive, eager", "naive, compiled"}


def test_heads_that_grow_with_the_dimension_are_one_line(plot) -> None:
    rows = [record("naive", 256, dim * MIB, dim * MIB, dim=dim, heads=dim // 64) for dim in (64, 128)]
    forward, _ = plot(rows).axes
    assert set(points(forward)) == {"naive"}
    assert forward.get_xlabel() == "token dimension, at sequence length 256"


@pytest.mark.parametrize(
    ("field", "values", "said"),
    [
        ("dtype", ("float16", "float32"), "one plot needs one dtype, got float16, float32"),
        ("mode", ("train", "inference"), "one plot needs one mode, got inference, train"),
        ("device_name", ("A100", "H100"), "one plot needs one device, got A100, H100"),
        ("bsz", (1, 8), "one plot needs one batch size, got 1, 8"),
        ("kv_len", (256, None), "one plot needs operators of one kind"),
    ],
)
def test_what_cannot_be_compared_is_refused(plot, field: str, values: tuple, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plot([record("naive", 256, MIB, MIB, **{field: value}) for value in values])


def test_two_varying_axes_are_an_overview(plot) -> None:
    figure = plot(grid({"naive": 1}, [256, 512], [64, 128]))
    assert [ax.get_title() for ax in figure.axes] == ["token dimension 64", "token dimension 128"]


def test_a_killed_process_knows_no_device_and_is_drawn_with_the_others(plot) -> None:
    killed = record("naive", 512, None, None, status="killed", device_name=None)
    forward, both = plot([record("naive", 256, MIB, MIB, device_name="A100"), killed]).axes
    assert marks(both, "killed") == marks(forward, "killed") == [("#D55E00", [512])]
    assert "naive killed" in texts(both)


SKIPPED = {"status": "skipped", "reason": "predicted"}


def predicted(length: int, size: int) -> Record:
    terms = {"forward_peak_bytes": {"scores": size, "q": MIB}, "backward_peak_bytes": {"scores": 2 * size}}
    return record("naive", length, None, None, terms=terms, **SKIPPED)


def test_a_predicted_case_is_hollow_at_its_predicted_height(plot) -> None:
    figure = plot([record("naive", 256, MIB, 2 * MIB), predicted(512, 4 * MIB)])
    forward, both = figure.axes
    assert labelled(forward, "_predicted") == [[(512, 5 * MIB)]]
    assert labelled(both, "_predicted") == [[(512, 8 * MIB)]]
    assert [line.get_markerfacecolor() for line in both.get_lines() if line.get_label() == "_predicted"] == ["white"]
    assert marks(both, "skipped") == []
    assert "naive 8 MiB predicted" in texts(both)
    assert "not run" in figure.get_supxlabel()


def test_without_terms_or_far_above_a_linear_axis_it_has_a_row(plot) -> None:
    unknown = record("naive", 512, None, None, **SKIPPED)
    _, both = plot([record("naive", 256, MIB, MIB), unknown]).axes
    assert marks(both, "skipped") == [("#D55E00", [512])]
    (view,) = views_along([record("naive", 256, MIB, MIB), predicted(512, 100 * MIB)], "length")
    _, both = memory_lines(view, STYLES, title="", subtitle="", log=False).axes
    assert labelled(both, "_predicted") == []
    assert marks(both, "skipped") == [("#D55E00", [512])]
    assert both.get_ylim()[1] < 2 * MIB


def test_rows_of_marks_lie_above_all_points(plot) -> None:
    rows = [record(f"op{number}", 256, (number + 1) * MIB, 2 * MIB) for number in range(12)]
    rows += [record(f"op{number}", 512, None, None, status="oom", oom_phase="forward") for number in range(12)]
    forward, _ = plot(rows).axes
    heights = [line.get_ydata()[0] for line in forward.get_lines() if line.get_label() == "_oom"]
    highest = forward.transAxes.inverted().transform(forward.transData.transform((256, 12 * MIB)))[1]
    assert len(heights) == len(set(heights)) == 12
    assert min(heights) > highest


def test_names_do_not_overlap() -> None:
    assert spread_apart([0, 50, 100], 13, 200) == [0, 50, 100]
    assert spread_apart([50, 50], 10, 200) == [45, 55]
    assert spread_apart([0, 0, 0], 10, 200) == [0, 10, 20]
    assert spread_apart([200, 200], 10, 200) == [190, 200]
    assert spread_apart([], 10, 200) == []


def test_names_without_a_style_are_told_apart() -> None:
    names = ["naive", *(f"mine {number}" for number in range(10))]
    chosen = distinct_styles(names, STYLES)
    assert chosen["naive"] == STYLES["naive"]
    assert len({style.marker for style in chosen.values()}) == 11
    assert len({(style.marker, str(style.dash)) for style in chosen.values()}) == 11
    assert len({style.colour for style in chosen.values()}) == 11


def test_contenders_are_told_apart_without_colour() -> None:
    from matplotlib.lines import Line2D

    from memcheck.bench.catalog import CONTENDERS

    styles = [(contender.style.marker, str(contender.style.dash)) for contender in CONTENDERS.values()]
    assert [style for style in styles if styles.count(style) > 1] == []
    # A letter as a marker looks like a misprint.
    assert all(isinstance(marker, tuple) or marker in Line2D.filled_markers for marker, _ in styles)


def test_zero_has_no_place_on_a_logarithmic_axis_and_is_said() -> None:
    from memcheck.report.plots.lines import line_figure
    from memcheck.report.plots.series import quantity_of

    rows = [record("linear", length, MIB, MIB, saved_bytes=0) for length in (256, 512)]
    (view,) = views_along(rows, "length")
    figure = line_figure(view, STYLES, quantities=[quantity_of("saved_bytes")], title="", subtitle="")
    assert figure.get_supxlabel() == "0 throughout: linear"


def test_crowded_ticks_are_thinned() -> None:
    assert x_ticks({256, 512, 1024}) == [1024, 512, 256]
    assert len(x_ticks(set(range(1000, 1100)))) <= 8
    assert x_ticks({5}) == [5]


def test_plotting_knows_records_only() -> None:
    """A stand-in for the package keeps its __init__, which loads torch, out of the question."""
    code = (
        "import sys, types; package = types.ModuleType('memcheck'); package.__path__ = ['memcheck'];"
        "sys.modules['memcheck'] = package; import memcheck.report.plots;"
        "assert not {'torch', 'matplotlib', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def both_kinds() -> list[Record]:
    """naive measured and predicted, one size further; softplus predicted only."""
    return [
        *(record("naive", n, n * MIB, 2 * n * MIB, device="cpu", device_name="a CPU") for n in (256, 512)),
        *(prediction("naive", n, n * MIB, n * MIB, device="cpu", device_name="cpu") for n in (256, 512, 1024)),
        *(prediction("softplus", n, MIB, 2 * MIB, device="cpu", device_name="cpu") for n in (256, 512)),
    ]


def test_predictions_are_dashed_beside_what_was_measured(plot) -> None:
    figure = plot(both_kinds())
    forward, both = figure.axes
    assert points(forward)["naive"] == [(256, 256 * MIB), (512, 512 * MIB)]
    assert labelled(forward, "_expected") == [[(n, n * MIB) for n in (256, 512, 1024)]]
    (dashed,) = [line for line in forward.get_lines() if line.get_label() == "_expected"]
    naive, softplus = named_lines(forward)
    assert (naive.get_linestyle(), dashed.is_dashed()) == ("-", True)
    # Nothing of softplus was run: its own dash, and hollow.
    assert points(forward)["softplus"] == [(256, MIB), (512, MIB)]
    assert (softplus.get_markerfacecolor(), naive.get_markerfacecolor()) == ("white", "#D55E00")
    assert {"naive 512 MiB (=)", "softplus 1 MiB"} <= texts(forward)
    assert "naive 1 GiB (2x)" in texts(both)
    (note,) = [text.get_text() for text in figure.texts if "dashed" in text.get_text()]
    assert note == "dashed: predicted; in brackets measured / predicted, = to the byte; hollow: predicted, not run"


def test_predictions_of_another_device_are_in_no_picture_of_this_one(plot) -> None:
    gpu = {"device": "cuda", "device_name": "NVIDIA A100-SXM4-40GB"}
    measured = [record("naive", n, n * MIB, n * MIB, **gpu) for n in (256, 512)]

    def of(name: str) -> list[Record]:
        return [prediction("naive", n, MIB, MIB, device="cuda", device_name=name) for n in (256, 512)]

    forward, _ = plot([*measured, *of("A100-40GB")]).axes
    assert labelled(forward, "_expected")
    with pytest.raises(UsageError, match="one plot needs one device, got H100-80GB, NVIDIA A100-SXM4-40GB"):
        plot([*measured, *of("H100-80GB")])


def test_a_predicted_end_is_hollow(plot) -> None:
    failed = {"status": "oom", "oom_phase": "forward"}
    ax, _ = plot([prediction("naive", 256, MIB, MIB), prediction("naive", 512, None, None, **failed)]).axes
    (cross,) = [line for line in ax.get_lines() if line.get_label() == "_oom"]
    assert (list(cross.get_xdata()), cross.get_markerfacecolor()) == ([512], "white")


def test_bars_have_a_dashed_frame_where_the_prediction_ends(plot) -> None:
    records = [record("naive", 256, 4 * MIB, 9 * MIB), prediction("naive", 256, 4 * MIB, 6 * MIB)]
    for ax, (size, predicted, words) in zip(
        plot(records).axes, [(4, 4, "4 MiB (=)"), (9, 6, "9 MiB (1.5x)")], strict=True
    ):
        bar, frame = ax.patches
        assert (bar.get_width(), frame.get_width()) == (size * MIB, predicted * MIB)
        assert not frame.get_fill()
        assert texts(ax) == {words}
