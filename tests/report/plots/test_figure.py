"""A figure shows every record: a mark, a line, a bar with its value, or a note that it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from plotted import MIB, STYLES, grid, key, labelled, points, prediction, record

from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.record import Record
from memcheck.report.plots.figure import figure, plot_figure
from memcheck.report.plots.style import distinct_styles, spaced


def drawn(records, kind: str = "memory", **how):
    return figure(records, kind, styles=STYLES, **how)


def test_a_line_per_operator_and_a_panel_per_peak() -> None:
    result = drawn(
        [
            record("naive", 512, 8 * MIB, 16 * MIB),
            record("softplus", 256, 1 * MIB, 2 * MIB),
            record("naive", 256, 2 * MIB, 4 * MIB),
            record("softplus", 512, 3 * MIB, 2 * MIB),
        ]
    )
    forward, both = result.axes
    assert points(forward) == {
        "naive": [(256, 2 * MIB), (512, 8 * MIB)],
        "softplus": [(256, 1 * MIB), (512, 3 * MIB)],
    }
    assert points(both) == {"naive": [(256, 4 * MIB), (512, 16 * MIB)], "softplus": [(256, 2 * MIB), (512, 3 * MIB)]}
    assert forward.get_ylim() == both.get_ylim()
    assert (forward.get_xscale(), forward.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in forward.get_xticklabels()] == ["512", "256"]
    assert {label.get_text() for label in forward.get_yticklabels()} == {"1 MiB", "2 MiB", "4 MiB", "8 MiB", "16 MiB"}
    assert key(result) == ["naive", "softplus"]
    assert [(line.get_color(), line.get_marker()) for line in forward.get_lines() if line.get_marker() != "None"] == [
        ("#D55E00", "s"),
        ("#009E73", "o"),
    ]
    assert [line.get_linestyle() for line in forward.get_lines() if line.get_label() == "_line"] == ["--", "-"]
    assert result.get_suptitle() == "Peak memory\nfloat32, dim 64, train"
    linear, _ = drawn([record("naive", n, n * MIB, n * MIB) for n in (1, 4)], log=False).axes
    assert (linear.get_xscale(), linear.get_yscale(), linear.get_ylim()[0]) == ("linear", "linear", 0)


@pytest.mark.parametrize(("phase", "counts"), [("forward", [1, 1]), ("backward", [0, 1])])
def test_out_of_memory_is_marked_above_all_points_where_it_happened(phase: str, counts: list[int]) -> None:
    peak = None if phase == "forward" else 4 * MIB
    ended = {"status": "oom", "oom_phase": phase}
    rows = [record(f"op{number}", 256, (number + 1) * MIB, 2 * MIB) for number in range(12)]
    rows += [record(f"op{number}", 512, peak, None, **ended) for number in range(12)]
    result = drawn(rows)
    for ax, count in zip(result.axes, counts, strict=True):
        heights = [line.get_ydata()[0] for line in ax.get_lines() if line.get_label() == "_oom"]
        highest = ax.transAxes.inverted().transform(ax.transData.transform((256, 12 * MIB)))[1]
        assert len(heights) == len(set(heights)) == 12 * count
        assert min(heights, default=1) > highest
    assert key(result)[-1] == "OOM"


@pytest.mark.parametrize("status", ["timeout", "killed"])
def test_cases_that_were_ended_are_marked(status: str) -> None:
    """A killed process knows no device, and is drawn with the others."""
    ended = record("naive", 512, None, None, status=status, device_name=None)
    result = drawn([record("naive", 256, MIB, MIB, device_name="A100"), ended])
    assert [[x for ((x, _),) in labelled(ax, f"_{status}")] for ax in result.axes] == [[512], [512]]
    assert key(result) == ["naive", status]


def test_unsupported_cases_are_named() -> None:
    missing = record("softmax/cudnn", 256, None, None, status="unsupported")
    result = drawn([record("naive", 256, MIB, MIB), record("naive", 512, MIB, MIB), missing])
    assert result.get_supxlabel() == "not drawn: softmax/cudnn (unsupported)"
    assert key(result) == ["naive"]


def terms(length: int, size: int, forward: int | None, backward: int | None, **fields):
    named = {"forward_peak_bytes": {"scores": size, "q": MIB}, "backward_peak_bytes": {"scores": 2 * size}}
    return record("naive", length, forward, backward, terms=named, **fields)


def test_measured_values_are_marks_and_predicted_ones_lines() -> None:
    """naive is measured and predicted, one size further; softplus is only predicted, and linear only measured."""
    records = [
        *(record("naive", n, n * MIB, 2 * n * MIB, device="cpu", device_name="a CPU") for n in (256, 512)),
        *(prediction("naive", n, 2 * n * MIB, n * MIB, device="cpu", device_name="cpu") for n in (256, 512, 1024)),
        *(prediction("softplus", n, MIB, 2 * MIB, device="cpu", device_name="cpu") for n in (256, 512)),
        *(record("linear", n, 3 * MIB, 3 * MIB, device="cpu", device_name="a CPU") for n in (256, 512)),
    ]
    result = drawn(records)
    forward, _ = result.axes
    assert points(forward) == {
        "naive": [(256, 256 * MIB), (512, 512 * MIB)],
        "linear": [(256, 3 * MIB), (512, 3 * MIB)],
    }
    assert labelled(forward, "_line") == [
        [(256, 512 * MIB), (512, 1024 * MIB), (1024, 2048 * MIB)],
        [(256, 3 * MIB), (512, 3 * MIB)],
        [(256, MIB), (512, MIB)],
    ]
    assert labelled(forward, "_skipped") == [[(1024, 2048 * MIB)], [(256, MIB), (512, MIB)]]
    hollow = [line.get_markerfacecolor() for line in forward.get_lines() if line.get_label() == "_skipped"]
    assert hollow == ["white", "white"]
    assert result.get_supxlabel() == (
        "marks: measured; lines: predicted, else from mark to mark; hollow: predicted, not run"
    )
    alone = drawn([prediction("naive", n, MIB, MIB, device="cuda", device_name="H200") for n in (256, 512)])
    assert alone.get_suptitle().endswith("cuda, H200, float32, dim 64, train, predicted")
    assert alone.get_supxlabel() == "hollow: predicted, not run"


def test_what_the_shapes_predict_is_a_line_too() -> None:
    """A case that was not run has its mark at that height, and so has one that ran out of memory."""
    result = drawn(
        [
            terms(256, MIB, 2 * MIB, 3 * MIB),
            terms(512, 4 * MIB, None, None, status="skipped"),
            terms(1024, 16 * MIB, None, None, status="oom", oom_phase="forward"),
        ]
    )
    forward, both = result.axes
    assert labelled(forward, "_line") == [[(256, 2 * MIB), (512, 5 * MIB), (1024, 17 * MIB)]]
    assert labelled(both, "_line") == [[(256, 2 * MIB), (512, 8 * MIB), (1024, 32 * MIB)]]
    assert points(both) == {"naive": [(256, 3 * MIB)]}
    assert labelled(both, "_skipped") == [[(512, 8 * MIB)]]
    assert labelled(both, "_oom") == [[(1024, 32 * MIB)]]
    assert key(result) == ["naive", "OOM", "not run"]


def test_a_prediction_far_above_a_linear_axis_is_at_its_edge() -> None:
    rows = [record("naive", 256, MIB, MIB), terms(512, 100 * MIB, None, None, status="skipped")]
    _, both = drawn(rows, log=False).axes
    (((x, height),),) = labelled(both, "_skipped")
    assert (x, 0.9 < height < 1) == (512, True)
    assert both.get_ylim()[1] < 2 * MIB


def test_predictions_of_another_device_are_in_no_figure_of_this_one() -> None:
    gpu = {"device": "cuda", "device_name": "NVIDIA A100-SXM4-40GB"}
    measured = [record("naive", n, n * MIB, n * MIB, **gpu) for n in (256, 512)]

    def of(name: str):
        return [prediction("naive", n, MIB, MIB, device="cuda", device_name=name) for n in (256, 512)]

    forward, _ = drawn([*measured, *of("A100-40GB")]).axes
    assert labelled(forward, "_line") == [[(256, MIB), (512, MIB)]]
    with pytest.raises(UsageError, match="a figure shows one setting, got NVIDIA A100-SXM4-40GB and H100-80GB"):
        drawn([*measured, *of("H100-80GB")])


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("dtype", ("float16", "float32")),
        ("mode", ("train", "inference")),
        ("device_name", ("A100", "H100")),
        ("kv_len", (256, None)),
    ],
)
def test_what_cannot_be_compared_is_refused(field: str, values: tuple) -> None:
    with pytest.raises(UsageError, match="a figure shows one setting, got "):
        drawn([record("naive", 256, MIB, MIB, **{field: value}) for value in values])


def test_a_single_size_is_bars_with_values() -> None:
    failed = {"status": "oom", "oom_phase": "backward"}
    rows = [record("softplus", 256, MIB, 2 * MIB), record("naive", 256, 5 * MIB, None, **failed)]
    rows += [prediction("softplus", 256, MIB, 3 * MIB), prediction("linear", 256, MIB, 3 * MIB)]
    result = drawn(rows)
    forward, both = result.axes
    assert [bar.get_width() for bar in forward.patches] == [MIB, 5 * MIB, MIB]
    assert [text.get_text() for text in both.texts] == ["2 MiB", "OOM", "3 MiB"]
    assert labelled(both, "_predicted") == [[(3 * MIB, 0)]]
    assert [bar.get_facecolor()[:3] == (1, 1, 1) for bar in both.patches] == [False, False, True]
    assert [label.get_text() for label in forward.get_yticklabels()] == ["softplus", "naive", "linear"]
    assert both.get_xlabel() == "at sequence length 256"
    assert result.get_supxlabel() == "black: predicted; hollow: predicted, not run"


def test_whole_models_are_a_figure_as_well() -> None:
    def model(operator: str, peak: int, **fields) -> Record:
        peaks = {f"{phase}_peak_bytes": peak * MIB for phase in ("forward", "backward", "optimizer")}
        return Record(**{"size": "small", "operator": operator, "query_len": 128, "mode": "train", **peaks, **fields})

    rows = [model("naive", 8), model("softmax", 6, size="small"), model("softmax", 7, size="large", dtype="bfloat16")]
    first, *_, step = drawn(rows).axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["naive", "softmax, small", "softmax, large"]
    assert [text.get_text() for text in step.texts] == ["8 MiB", "6 MiB", "7 MiB"]
    means = [(None, False), ("bfloat16", False), (None, True), ("bfloat16", True)]
    rows = [model("softmax", 8, autocast=autocast, checkpointing=on) for autocast, on in means]
    assert [label.get_text() for label in drawn(rows).axes[0].get_yticklabels()] == [
        "softmax, autocast off, no activation checkpoints",
        "softmax, autocast bfloat16, no activation checkpoints",
        "softmax, autocast off, activation checkpoints",
        "softmax, autocast bfloat16, activation checkpoints",
    ]
    rows = [model("naive", n, query_len=n, compiled=compiled) for n in (128, 256) for compiled in (False, True)]
    assert [points(ax)["naive"] for ax in drawn(rows).axes] == [[(128, 128 * MIB), (256, 256 * MIB)]] * 6


def test_eager_and_compiled_and_other_sizes_are_panels() -> None:
    rows = [
        record("naive", n, n * MIB, (2 + compiled) * n * MIB, compiled=compiled)
        for n in (256, 512)
        for compiled in (False, True)
    ]
    result = drawn(rows)
    titles = ["Forward, eager", "Forward + backward, eager", "Forward, compiled", "Forward + backward, compiled"]
    assert [ax.get_title() for ax in result.axes] == titles
    assert points(result.axes[3]) == {"naive": [(256, 3 * 256 * MIB), (512, 3 * 512 * MIB)]}
    # Of many panels, those of the whole pass alone.
    records = grid({"naive": 40, "softplus": 4}, [256, 512], [64, 128, 256, 512])
    records[-2] = record("naive", 512, None, None, dim=512, status="oom", oom_phase="forward")
    result = drawn(records)
    assert [ax.get_title() for ax in result.axes] == [f"token dimension {dim}" for dim in (64, 128, 256, 512)]
    assert points(result.axes[1])["naive"] == [(256, 2 * 40 * 256 * 128), (512, 2 * 40 * 512 * 128)]
    assert [len(labelled(ax, "_oom")) for ax in result.axes] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("queries", "keys", "label"),
    [
        ([4, 8], [4, 8], "sequence length"),
        ([4, 8], [8, 16], "key length, the query length in step"),
        ([4, 4], [8, 16], "key length, at query length 4"),
        ([4, 8], [8, 8], "query length, at key length 8"),
        ([4], [8], "at query length 4, key length 8"),
    ],
)
def test_lengths_are_named(queries: list[int], keys: list[int], label: str) -> None:
    rows = [record("naive", 1, MIB, MIB) for _ in queries]
    for row, query_len, kv_len in zip(rows, queries, keys, strict=True):
        row.query_len, row.kv_len = query_len, kv_len
    assert drawn(rows).axes[0].get_xlabel() == label


@pytest.mark.parametrize(
    ("x", "label"),
    [("bsz", "batch size"), ("heads", "heads"), ("factor", "compression factor"), ("dim", "token dimension")],
)
def test_any_size_is_an_axis(x: str, label: str) -> None:
    rows = [record("naive", 256, n * MIB, n * MIB, **{x: n}) for n in (2, 4)]
    forward, _ = drawn(rows, x=x).axes
    assert points(forward) == {"naive": [(2, 2 * MIB), (4, 4 * MIB)]}
    assert forward.get_xlabel() == f"{label}, at sequence length 256"
    rows.append(record("softplus", 256, MIB, MIB, **{x: None}))
    assert f"not drawn: softplus (no {label})" in drawn(rows, x=x).get_supxlabel()


def test_a_batch_size_is_the_axis_where_nothing_else_varies() -> None:
    rows = [record("naive", 256, n * MIB, n * MIB, bsz=n) for n in (1, 8)]
    assert drawn(rows).axes[0].get_xlabel() == "batch size, at sequence length 256"
    with pytest.raises(UsageError, match="got batch 1 and batch 8"):
        drawn([*rows, record("naive", 512, MIB, MIB, bsz=1)])


def test_two_rows_of_one_case_are_one_point() -> None:
    rows = [record("naive", n, size * MIB, MIB) for n, size in ((256, 1), (512, 1), (512, 3))]
    assert points(drawn(rows).axes[0]) == {"naive": [(256, MIB), (512, 3 * MIB)]}


def test_variants_of_an_operator_are_lines_of_their_own() -> None:
    rows = [record("naive", length, heads * MIB, heads * MIB, heads=heads) for length in (256, 512) for heads in (4, 8)]
    assert set(points(drawn(rows).axes[0])) == {"naive, 4 heads", "naive, 8 heads"}
    # Heads that grow with the dimension are one line.
    rows = [record("naive", 256, dim * MIB, dim * MIB, dim=dim, heads=dim // 64) for dim in (64, 128)]
    assert set(points(drawn(rows).axes[0])) == {"naive"}


def test_time_shows_medians_and_quartiles() -> None:
    records = grid({"naive": 40}, [256, 512], [64])
    for row, scale in zip(records, (1, 1000), strict=True):
        row.forward_ms, row.forward_ms_quartiles, row.backward_ms = 2.0 * scale, (1.5 * scale, 4.0 * scale), 5.0 * scale
    forward, backward = drawn(records, "time").axes
    assert points(forward) == {"naive": [(256, 2), (512, 2000)]}
    assert points(backward) == {"naive": [(256, 5), (512, 5000)]}
    (whiskers,) = forward.collections
    assert [segment.tolist() for segment in whiskers.get_segments()] == [
        [[256, 1.5], [256, 4]],
        [[512, 1500], [512, 4000]],
    ]
    assert "1.02 s" in {label.get_text() for label in forward.get_yticklabels()}


def test_decoding_shows_its_state_and_the_peak_of_a_step() -> None:
    records = [
        record(name, length, MIB, None, mode="decode", query_len=1, kv_len=length, state_bytes=size * length)
        for length in (256, 512)
        for name, size in (("naive", 40), ("softplus", 4))
    ]
    state, step = drawn(records, "decode").axes
    assert points(state) == {"naive": [(256, 40 * 256), (512, 40 * 512)], "softplus": [(256, 4 * 256), (512, 4 * 512)]}
    assert points(step)["naive"] == [(256, MIB), (512, MIB)]
    assert state.get_xlabel() == "key length, at query length 1"
    state, _ = drawn(records[:2], "decode").axes
    assert [bar.get_width() for bar in state.patches] == [40 * 256, 4 * 256]


def test_any_field_is_a_figure_and_zero_is_said() -> None:
    """Zero has no place on a logarithmic axis."""
    rows = [record(name, n, MIB, MIB, saved_bytes=size) for n in (256, 512) for name, size in (("a", 8), ("b", 0))]
    for kind in ("kept", "saved_bytes"):
        result = drawn(rows, kind)
        assert points(result.axes[0]) == {"a": [(256, 8), (512, 8)]}
        assert result.get_supxlabel() == "0 throughout: b"


def test_inference_has_one_panel() -> None:
    rows = [record("naive", length, length * MIB, None, mode="inference") for length in (1, 2)]
    assert [ax.get_title() for ax in drawn(rows).axes] == ["Forward"]


@pytest.mark.parametrize("lengths", [[256], [256, 512]])
@pytest.mark.parametrize("status", ["oom", "skipped", "error", "killed", "unsupported"])
def test_nothing_finished_is_still_a_picture(tmp_path, lengths: list[int], status: str) -> None:
    plot_figure([record("naive", length, None, None, status=status) for length in lengths], tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("records", "how"),
    [
        ([], {}),
        ([record("naive", 256, MIB, MIB)], {"kind": "time"}),
        ([record("naive", 256, MIB, MIB)], {"kind": "decode"}),
        ([record("naive", 256, MIB, MIB)], {"x": "dim"}),
    ],
)
def test_nothing_to_draw_is_an_error(records, how) -> None:
    with pytest.raises(MemcheckError, match=f"nothing to draw of .* in these {len(records)} records"):
        drawn(records, **how)


def test_names_without_a_style_are_told_apart() -> None:
    chosen = distinct_styles(["naive", *(f"mine {number}" for number in range(10))], STYLES)
    assert chosen["naive"] == STYLES["naive"]
    for part in ("marker", "colour"):
        assert len({getattr(style, part) for style in chosen.values()}) == 11
    assert len({(style.marker, str(style.dash)) for style in chosen.values()}) == 11


def test_contenders_are_told_apart_without_colour() -> None:
    from matplotlib.lines import Line2D

    from memcheck.bench.case import CONTENDERS

    styles = [(contender.style.marker, str(contender.style.dash)) for contender in CONTENDERS.values()]
    assert [style for style in styles if styles.count(style) > 1] == []
    # A letter as a marker looks like a misprint.
    assert all(isinstance(marker, tuple) or marker in Line2D.filled_markers for marker, _ in styles)


def test_crowded_ticks_are_thinned() -> None:
    assert spaced({256, 512, 1024}) == [1024, 512, 256]
    assert len(spaced(set(range(1000, 1100)))) <= 8
    assert spaced({5}) == [5]


def test_plotting_knows_records_only() -> None:
    code = (
        "import sys, memcheck.report.plots.pictures, memcheck.report.plots.timeline;"
        "assert not {'torch', 'matplotlib', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
