"""Predicted terms, savings, time, one case over time, as pictures."""

from __future__ import annotations

import itertools
import types

import pytest
from plotted import MIB, STYLES, grid, labelled, marks, points, prediction, record, texts

from memcheck.core.errors import UsageError
from memcheck.core.model_record import ModelRecord
from memcheck.core.record import Record
from memcheck.core.style import KINDS, colour_of
from memcheck.report.plots.lines import time_lines
from memcheck.report.plots.models import PARTS, model_bars
from memcheck.report.plots.predictions import prediction_lines, terms_lines
from memcheck.report.plots.savings import savings_bars
from memcheck.report.plots.series import views_along
from memcheck.report.plots.timeline import MOST_LAYERS, MOST_STEPS, layers_of, plot_timeline

GIB = 2**30


def view(records: list[Record]):
    (only,) = views_along(records, "length")
    return only


def with_terms(row: Record, forward: int, backward: int) -> Record:
    row.terms = {"forward_peak_bytes": {"q": 1, "rest": forward - 1}, "backward_peak_bytes": {"all": backward}}
    return row


def test_predicted_terms_are_a_line_and_measurement_the_marks_on_it() -> None:
    records = [
        with_terms(record("naive", 256, MIB, 4 * MIB), MIB, 4 * MIB),
        with_terms(record("naive", 512, MIB, 6 * MIB), MIB, 5 * MIB),
        with_terms(record("naive", 1024, None, None, status="skipped"), MIB, 9 * MIB),
        record("softplus", 256, MIB, MIB),
    ]
    both, difference = terms_lines(view(records), STYLES, title="", subtitle="").axes
    assert labelled(both, "_terms naive") == [[(256, 4 * MIB), (512, 5 * MIB), (1024, 9 * MIB)]]
    assert points(both) == {"naive": [(256, 4 * MIB), (512, 6 * MIB)]}
    assert labelled(both, "_predicted") == [[(1024, 9 * MIB)]]
    assert points(difference) == {"naive": [(256, 0), (512, pytest.approx(0.2))]}
    assert texts(difference) == {"naive +20 % at most"}


def test_predicted_terms_that_are_met_to_the_byte_is_exact() -> None:
    records = [with_terms(record("naive", length, MIB, 2 * MIB), MIB, 2 * MIB) for length in (256, 512)]
    _, difference = terms_lines(view(records), STYLES, title="", subtitle="").axes
    assert texts(difference) == {"naive exact"}


def test_a_prediction_beside_measurement_has_its_ratio() -> None:
    records = [
        *(record("naive", n, MIB, size * MIB) for n, size in ((256, 4), (512, 6))),
        *(prediction("naive", n, MIB, 4 * MIB) for n in (256, 512, 1024)),
        *(record("softplus", n, MIB, MIB) for n in (256, 512)),
        *(prediction("softplus", n, MIB, MIB) for n in (256, 512)),
    ]
    both, ratio = prediction_lines(view(records), STYLES, title="", subtitle="").axes
    assert labelled(both, "_terms naive") == [[(n, 4 * MIB) for n in (256, 512, 1024)]]
    assert points(both)["naive"] == [(256, 4 * MIB), (512, 6 * MIB)]
    assert labelled(both, "_predicted") == [[(1024, 4 * MIB)]]
    assert points(ratio)["naive"] == [(256, 0), (512, 0.5)]
    assert ratio.yaxis.get_major_formatter()(0.5) == "1.5 x"
    assert ratio.get_title() == "measured / predicted"
    assert texts(ratio) == {"naive 1.5 x at most", "softplus exact"}


def test_savings_are_labelled_with_the_factor() -> None:
    records = grid({"softplus": 4, "naive": 40, "worse": 80}, [256, 512], [64])
    records.append(with_terms(record("naive", 1024, None, None, status="skipped"), MIB, 2 * 100 * 1024 * 64))
    records.append(record("softplus", 1024, 4 * 1024 * 64, 8 * 1024 * 64))
    records += [record("naive", 2048, None, None, status="oom"), record("softplus", 2048, MIB, MIB)]
    records.append(record("worse", 1024, None, None, status="oom", oom_phase="forward"))
    figure = savings_bars(view(records), STYLES, title="", subtitle="")
    ours, worse = figure.axes
    assert (ours.get_title(), worse.get_title()) == ("softplus", "worse")
    assert [bar.get_y() + bar.get_height() for bar in ours.patches] == pytest.approx([10, 10, 25])
    assert [bar.get_facecolor()[:3] == (1, 1, 1) for bar in ours.patches] == [False, False, True]
    assert [text.get_text() for text in ours.texts] == ["10.0x", "10.0x", "25x", "standard: OOM"]
    assert [text.get_text() for text in worse.texts] == ["0.50x", "0.50x", "OOM"]
    assert [label.get_text() for label in ours.get_xticklabels()] == ["256", "512", "1024", "2048"]


def test_savings_need_a_standard() -> None:
    with pytest.raises(UsageError, match="the savings need a standard to compare with, got none of naive"):
        savings_bars(view(grid({"softplus": 4, "linear": 4}, [256, 512], [64])), STYLES, title="", subtitle="")


def test_time_shows_medians_and_quartiles() -> None:
    records = grid({"naive": 40}, [256, 512], [64])
    for row, scale in zip(records, (1, 1000), strict=True):
        row.forward_ms, row.forward_ms_quartiles, row.backward_ms = 2.0 * scale, (1.5 * scale, 4.0 * scale), 5.0 * scale
    records.append(record("naive", 1024, None, None, status="timeout"))
    forward, backward = time_lines(view(records), STYLES, title="", subtitle="").axes
    assert points(forward) == {"naive": [(256, 2), (512, 2000)]}
    assert points(backward) == {"naive": [(256, 5), (512, 5000)]}
    (whiskers,) = forward.collections
    assert [segment.tolist() for segment in whiskers.get_segments()] == [
        [[256, 1.5], [256, 4]],
        [[512, 1500], [512, 4000]],
    ]
    assert marks(forward, "timeout") == [("#D55E00", [1024])]
    assert texts(forward) == {"naive timeout", "naive 2.00 s"}


def make_timeline(series: dict[str, list[int]], **fields: object):
    steps = list(range(len(next(iter(series.values()), []))))
    values = {"steps": steps, "phases": [], "peak": {}} | fields
    return types.SimpleNamespace(series=series, **values)


def test_a_case_over_time(tmp_path) -> None:
    series = {"_softmax": [0, 4 * MIB, 4 * MIB, 0], "q": [MIB] * 4, "dq": [0, 0, MIB, 2 * MIB]}
    phases, peak = [("forward", 0, 1), ("backward", 2, 3)], {"forward": 1, "backward": 2}
    timeline = make_timeline(series, phases=phases, peak=peak)
    figure = plot_timeline(timeline, tmp_path / "timeline.svg", title="naive")
    ax, bar = figure.axes
    assert texts(ax) == {"forward", "backward", "forward peak 5 MiB", "backward peak 6 MiB"}
    assert labelled(ax, "_peak") == [[(1.5, 5 * MIB)], [(2.5, 6 * MIB)]]
    # What lives longest lies at the bottom; the key names the topmost first.
    assert [layer.get_label() for layer in ax.collections] == ["q", "_softmax", "dq"]
    names = [text.get_text().strip() for text in bar.get_legend().get_texts()]
    assert names == ["dq, 1 MiB", "_softmax, 4 MiB", "q, 1 MiB"]
    assert [line.get_xdata()[0] for line in ax.get_lines() if line.get_label() == "_phase"] == [2]
    assert "_softmax" in (tmp_path / "timeline.svg").read_text()
    highest = [max(path.vertices[:, 1]) for layer in ax.collections for path in layer.get_paths()]
    assert highest == [MIB, 5 * MIB, 6 * MIB]


def test_labels_of_close_peaks_do_not_cross(tmp_path) -> None:
    """Neither each other nor, where there is room, the line between the phases."""
    sizes = [MIB] * 100
    sizes[38], sizes[42], sizes[44] = 9 * MIB, 9 * MIB, 9 * MIB
    phases = [("forward", 0, 39), ("backward", 40, 99)]
    timeline = make_timeline({"q": sizes}, phases=phases, peak={"forward": 38, "backward": 42, "step": 44})
    figure = plot_timeline(timeline, tmp_path / "timeline.png", title="")
    ax, _ = figure.axes
    figure.draw_without_rendering()
    labels = [text for text in ax.texts if "peak" in text.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    line = ax.transData.transform((40, 0))[0]
    assert boxes[0].x1 <= line + 1
    assert boxes[1].x0 >= line - 1
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_a_bar_shows_what_is_alive_at_the_peak(tmp_path) -> None:
    series = {"inputs": [MIB, MIB, MIB], "gradients": [0, 0, 3 * MIB], "y": [0, 8 * MIB, 0], "tiny": [0, 1, 0]}
    figure = plot_timeline(make_timeline(series, peak={"forward": 1}), tmp_path / "timeline.png")
    _, bar = figure.axes
    assert [patch.get_height() for patch in bar.patches if patch.get_height() > 1] == [MIB, 8 * MIB]
    # What is not alive at the peak has no size, and what is too thin to be seen no name.
    assert sorted(text.get_text() for text in bar.get_legend().get_texts()) == [
        "gradients",
        "inputs, 1 MiB",
        "y, 8 MiB",
    ]


def test_a_narrow_spike_has_an_outline(tmp_path) -> None:
    sizes = [MIB] * MOST_STEPS
    sizes[700] = 9 * MIB
    figure = plot_timeline(make_timeline({"q": sizes}, peak={"forward": 700}), tmp_path / "timeline.png")
    ax, _ = figure.axes
    ((*outline,),) = labelled(ax, "_outline")
    assert max(outline, key=lambda point: point[1]) == (700, 9 * MIB)
    assert {layer.get_linewidth()[0] for layer in ax.collections} == {0}


def test_a_kind_of_memory_has_one_colour_everywhere(tmp_path) -> None:
    from matplotlib.colors import to_rgba

    series = {"parameters": [MIB], "gradients": [MIB], "optimizer state": [MIB], "kept for backward": [MIB], "z": [MIB]}
    ax, _ = plot_timeline(make_timeline(series), tmp_path / "timeline.png").axes
    drawn = {layer.get_label(): tuple(layer.get_facecolor()[0]) for layer in ax.collections}
    bars = {name: to_rgba(colour) for name, colour, _ in PARTS.values()}
    assert {name: drawn[name] for name in bars} == bars
    assert drawn.pop("z") not in drawn.values()
    assert colour_of("from backward") == KINDS["backward"]
    assert colour_of("3 others") == KINDS["others"]
    assert colour_of("aten::mm") is None


def test_small_layers_are_one() -> None:
    series = {f"tensor {number}": [number + 1, 0] for number in range(MOST_LAYERS + 5)}
    stack = layers_of(make_timeline(series, peak={"forward": 0}))
    assert len(stack.layers) == MOST_LAYERS + 1
    assert stack.layers["5 others"] == [1 + 2 + 3 + 4 + 5, 0]
    assert stack.tops == [sum(range(1, MOST_LAYERS + 6)), 0]


def test_a_long_timeline_keeps_its_peaks() -> None:
    sizes = [number % 7 for number in range(20 * MOST_STEPS)]
    sizes[12345] = 1000
    sizes[777] = 500
    stack = layers_of(make_timeline({"all": sizes}, peak={"forward": 777, "backward": 12345}))
    known = dict(zip(stack.steps, stack.tops, strict=True))
    assert len(known) <= MOST_STEPS + 4
    assert (known[777], known[12345]) == (500, 1000)
    assert (stack.steps[0], stack.steps[-1]) == (0, len(sizes) - 1)


def test_what_was_freed_unseen_hangs_below(tmp_path) -> None:
    timeline = make_timeline({"freed, from before": [0, -MIB], "q": [2 * MIB, 3 * MIB]}, peak={"forward": 1})
    ax, _ = plot_timeline(timeline, tmp_path / "timeline.png").axes
    assert ax.get_ylim()[0] < -MIB
    assert texts(ax) == {"forward peak 2 MiB"}
    assert labelled(ax, "_peak") == [[(1.5, 3 * MIB)]]


@pytest.mark.parametrize("series", [{}, {"q": []}, {"q": [0]}])
def test_an_empty_timeline_is_a_picture(tmp_path, series: dict[str, list[int]]) -> None:
    plot_timeline(make_timeline(series), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 1000


def model(size: int, **fields: object) -> ModelRecord:
    values = {
        "operator": "naive",
        "device": "cuda",
        "device_name": "T4",
        "device_total_bytes": 15 * GIB,
        "status": "ok",
    }
    return ModelRecord(**{**values, "parameter_bytes": size * GIB, "peak_bytes": size * GIB, **fields})  # type: ignore[arg-type]


def test_bars_of_models_show_what_the_gpu_has() -> None:
    (ax,) = model_bars([model(8), model(12, operator="softplus")], title="", subtitle="").axes
    assert [line.get_xdata()[0] for line in ax.get_lines() if line.get_label() == "_capacity"] == [15]
    assert texts(ax) == {"memory of T4: 15 GiB"}
    assert ax.get_xlim()[1] > 15
    # A GPU far larger than all bars is named, so that the bars stay long.
    (ax,) = model_bars([model(1, device_name="H200", device_total_bytes=100 * GIB)], title="", subtitle="").axes
    assert ax.get_xlim()[1] < 2
    assert ax.get_xlabel().splitlines()[1:] == ["H200 has 100 GiB, 100 times as much as the longest bar"]
    (ax,) = model_bars([model(8, device="cpu")], title="", subtitle="").axes
    assert not [line for line in ax.get_lines() if line.get_label() == "_capacity"]
