"""Memory over time: of one case, with what was alive at its peak."""

from __future__ import annotations

import types
from operator import attrgetter

import pytest
from plotted import MIB, key, labelled, points, texts

from memcheck.core.script_record import Course, Origin
from memcheck.core.units import KINDS, colour_of
from memcheck.report.plots.timeline import MOST_LAYERS, MOST_STEPS, layers_of, plot_timeline


def make_course(series: dict[str, list[int]]) -> Course:
    rows = enumerate(zip(*series.values(), strict=True))
    return Course.of([Origin(name, "forward") for name in series], [(step, None, sizes) for step, sizes in rows])


def make_timeline(series: dict[str, list[int]], **fields: object):
    course = make_course(series)
    values = {"steps": [point.event for point in course.points], "phases": [], "peak": {}} | fields
    return types.SimpleNamespace(course=course, alive=course.sums, **values)


def test_a_case_over_time(tmp_path) -> None:
    series = {"_softmax": [0, 4 * MIB, 4 * MIB, 0], "q": [MIB] * 4, "dq": [0, 0, MIB, 2 * MIB]}
    phases, peak = [("forward", 0, 1), ("backward", 2, 3)], {"forward": 1, "backward": 2}
    timeline = make_timeline(series, phases=phases, peak=peak)
    figure = plot_timeline(timeline, tmp_path / "timeline.svg", title="naive")
    ax, bar = figure.axes
    assert texts(ax) == {"forward", "backward"}
    assert points(ax) == {"forward peak 5 MiB": [(1.5, 5 * MIB)], "backward peak 6 MiB": [(2.5, 6 * MIB)]}
    assert key(figure) == ["forward peak 5 MiB", "backward peak 6 MiB"]
    # What lives longest lies at the bottom; the key names the topmost first.
    assert [layer.get_label() for layer in ax.collections] == ["q", "_softmax", "dq"]
    names = [text.get_text().strip() for text in bar.get_legend().get_texts()]
    assert names == ["dq, 1 MiB", "_softmax, 4 MiB", "q, 1 MiB"]
    assert [line.get_xdata()[0] for line in ax.get_lines() if line.get_label() == "_phase"] == [2]
    assert "_softmax" in (tmp_path / "timeline.svg").read_text()
    highest = [max(path.vertices[:, 1]) for layer in ax.collections for path in layer.get_paths()]
    assert highest == [MIB, 5 * MIB, 6 * MIB]


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
    kinds = {"parameters": "parameters", "gradients": "gradients", "optimizer state": "optimizer state"}
    bars = {name: to_rgba(KINDS[kind]) for name, kind in {**kinds, "kept for backward": "forward"}.items()}
    assert {name: drawn[name] for name in bars} == bars
    assert drawn.pop("z") not in drawn.values()
    assert colour_of("from backward") == KINDS["backward"]
    assert colour_of("3 others") == KINDS["others"]
    assert colour_of("aten::mm") is None


def test_small_layers_are_one() -> None:
    series = {f"tensor {number}": [number + 1, 0] for number in range(MOST_LAYERS + 5)}
    stack = layers_of(make_course(series), attrgetter("operator"), [0])
    assert len(stack.layers) == MOST_LAYERS + 1
    assert stack.layers["5 others"] == [1 + 2 + 3 + 4 + 5, 0]
    assert stack.tops == [sum(range(1, MOST_LAYERS + 6)), 0]


def test_a_long_timeline_keeps_its_peaks() -> None:
    sizes = [number % 7 for number in range(20 * MOST_STEPS)]
    sizes[12345] = 1000
    sizes[777] = 500
    stack = layers_of(make_course({"all": sizes}), attrgetter("operator"), [777, 12345])
    known = dict(zip(stack.steps, stack.tops, strict=True))
    assert len(known) <= MOST_STEPS + 4
    assert (known[777], known[12345]) == (500, 1000)
    assert (stack.steps[0], stack.steps[-1]) == (0, len(sizes) - 1)


def test_what_was_freed_unseen_hangs_below(tmp_path) -> None:
    timeline = make_timeline({"freed, from before": [0, -MIB], "q": [2 * MIB, 3 * MIB]}, peak={"forward": 1})
    ax, _ = plot_timeline(timeline, tmp_path / "timeline.png").axes
    assert ax.get_ylim()[0] < -MIB
    assert points(ax) == {"forward peak 2 MiB": [(1.5, 3 * MIB)]}


@pytest.mark.parametrize("series", [{}, {"q": []}, {"q": [0]}])
def test_an_empty_timeline_is_a_picture(tmp_path, series: dict[str, list[int]]) -> None:
    plot_timeline(make_timeline(series), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 1000
