"""Savings: how many times as much memory the standard needs, as bars with their values."""

from __future__ import annotations

import pytest
from plotted import MIB, STYLES, grid, record

from memcheck.core.errors import UsageError
from memcheck.report.plots.figure import drawn_views
from memcheck.report.plots.savings import fullest_view, savings

OPERATORS = {"naive": 40, "softplus": 4}


def test_bars_have_their_values() -> None:
    records = grid({"softplus": 4, "naive": 40, "worse": 80}, [256, 512], [64])
    terms = {"forward_peak_bytes": {"all": MIB}, "backward_peak_bytes": {"all": 2 * 100 * 1024 * 64}}
    records.append(record("naive", 1024, None, None, status="skipped", terms=terms))
    records.append(record("softplus", 1024, 4 * 1024 * 64, 8 * 1024 * 64))
    records += [record("naive", 2048, None, None, status="oom"), record("softplus", 2048, MIB, MIB)]
    records.append(record("worse", 1024, None, None, status="oom", oom_phase="forward"))
    (view,) = drawn_views(records, None)
    figure = savings(view, styles=STYLES, title="")
    ours, worse = figure.axes
    assert (ours.get_title(), worse.get_title()) == ("softplus", "worse")
    assert [bar.get_y() + bar.get_height() for bar in ours.patches] == pytest.approx([10, 10, 25])
    assert [bar.get_facecolor()[:3] == (1, 1, 1) for bar in ours.patches] == [False, False, True]
    assert [text.get_text() for text in ours.texts] == ["10.0x", "10.0x", "25x", "standard: OOM"]
    assert [text.get_text() for text in worse.texts] == ["0.50x", "0.50x", "OOM"]
    assert [label.get_text() for label in worse.get_xticklabels()] == ["256", "512", "1024", "2048"]
    low, high = ours.get_ylim()
    assert low < 0.4
    assert high > 32


def test_they_need_a_standard() -> None:
    (view,) = drawn_views(grid({"softplus": 4, "linear": 4}, [256, 512], [64]), None)
    with pytest.raises(UsageError, match="the savings need a standard to compare with, got none of naive"):
        savings(view, styles=STYLES, title="")


def test_they_are_of_the_fullest_view_with_a_standard() -> None:
    records = [*grid(OPERATORS, [256, 512], [64]), *grid({"softplus": 4, "linear": 4}, [256, 512, 1024], [128])]
    view = fullest_view(drawn_views(records, None))
    assert view is not None
    assert view.words() == "token dimension 64"
    assert fullest_view(drawn_views(grid(OPERATORS, [256], [64]), None)) is None
    assert fullest_view(drawn_views(grid(OPERATORS, [256, 512], [64], mode="decode"), None)) is None
