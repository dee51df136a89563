"""Where memory runs out: the search, and `memcheck fit`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from plotted import key, labelled, points

from memcheck.__main__ import main
from memcheck.bench import catalog
from memcheck.bench.capacity import largest_case, resized
from memcheck.bench.case import Case
from memcheck.bench.catalog import make_case, make_combinator_case
from memcheck.bench.predict import predict_case
from memcheck.core.devices import Device, device_named
from memcheck.core.errors import UsageError
from memcheck.core.prediction import Largest, Prediction
from memcheck.core.record import Record
from memcheck.core.step import Place
from memcheck.predict.api import Search
from memcheck.report.capacity import capacity_table
from memcheck.report.plots.savings import Limit, capacity_figure, plot_capacity
from memcheck.report.tables import data_rows, to_text

GPU = Device("box", "cuda", (8, 0), 2**30, 2**30, "made up")
SMALL = Device("small", "cuda", (8, 0), 2**30, 2**30, "made up")


def attention(name: str = "naive", **fields) -> Case:
    sizes = {"bsz": 2, "query_len": 8, "kv_len": 8, "dim": 64, "heads": 4, "core_dim": None, "factor": None, **fields}
    return make_case(name, **sizes)


def verdict(case: Case, status: str) -> Prediction:
    asked = 7 if status == "oom" else None
    reason = None if status == "ok" else f"{status}, as it happens"
    phase = "backward" if status == "oom" else None
    record = Record(status=status, oom_phase=phase, oom_requested_bytes=asked, oom_in_use_bytes=asked, reason=reason)
    return Prediction(case, Place(GPU), record, {}, True, ())


def judged(
    fits: Callable[[int], bool],
    tried: list[int] | None = None,
    no: str = "oom",
    name: str = "naive",
    start: int | None = None,
    step: int = 1,
    up_to: int = 2**30,
) -> Largest:
    """The largest key length by these verdicts."""

    def predict(size: int) -> Prediction:
        case = resized(attention(name), "seq_len", size)
        if tried is not None:
            tried.append(size)
        return verdict(case, "ok" if fits(size) else no)

    return Search(predict, step, up_to).largest(start or 256)


@pytest.mark.parametrize("largest", [1, 2, 3, 255, 256, 257, 1000, 4095, 4096, 4097, 123_456_789])
@pytest.mark.parametrize("start", [None, 1, 77, 4096, 10**6])
def test_the_last_that_fits_and_the_first_that_does_not(largest: int, start: int | None) -> None:
    tried: list[int] = []
    found = judged(lambda n: n <= largest, tried, start=start)
    assert (found.size, found.gaps) == (largest, ())
    assert found.at is not None
    assert found.beyond is not None
    assert (found.at.case.kv_len, found.at.record.status) == (largest, "ok")
    assert (found.beyond.case.kv_len, found.beyond.record.status) == (largest + 1, "oom")
    assert len(tried) == len(set(tried)) == found.tried < 100


@pytest.mark.parametrize("largest", [100, 5000])
def test_steps(largest: int) -> None:
    tried: list[int] = []
    found = judged(lambda n: n <= largest, tried, step=64)
    assert (found.size, found.step) == (largest // 64 * 64, 64)
    assert all(size % 64 == 0 for size in tried)


def test_nothing_fits() -> None:
    found = judged(lambda n: False)
    assert (found.size, found.at, found.unpredicted) == (0, None, None)
    assert found.beyond is not None
    assert found.edge.case.kv_len == 1


def test_nothing_is_known() -> None:
    tried: list[int] = []
    found = judged(lambda n: False, tried, no="skipped")
    assert (found.size, found.unpredicted) == (0, "skipped, as it happens")
    assert len(tried) < 10


@pytest.mark.parametrize("most", [1, 100, 256, 1000])
def test_the_search_has_an_end(most: int) -> None:
    tried: list[int] = []
    found = judged(lambda n: True, tried, up_to=most)
    assert (found.size, found.beyond) == (most, None)
    assert max(tried) == most


@pytest.mark.parametrize(
    ("fits", "largest"),
    [
        # Odd lengths need a copy more: the limit is not where bisection alone would have it.
        (lambda n: n <= (900 if n % 2 else 1000), 1000),
        (lambda n: n <= (900 if n % 64 else 1024), 1024),
        # A dent, and room above it.
        (lambda n: n <= 500 or 512 <= n <= 513, 513),
        # Room that bisection misses, and a second search in it.
        (lambda n: n <= 300 or 325 <= n <= 350, 350),
    ],
)
def test_a_larger_size_that_fits_all_the_same_is_found(fits, largest: int) -> None:
    found = judged(fits, start=1)
    assert found.size == largest
    assert fits(found.size)
    assert not fits(found.size + 1)
    assert not any(map(fits, found.gaps))


def test_sizes_keep_to_what_operators_take() -> None:
    heads, core = attention(heads=4), attention("softplus")
    assert (core.core_dim, resized(core, "dim", 96).core_dim) == (64, 96)
    assert resized(attention("softplus", core_dim=32), "dim", 96).core_dim == 32
    assert largest_case(heads, "dim", Place("1MiB"), step=6).step == 12
    token = make_combinator_case("combinator", bsz=1, query_len=8, dim=64)
    assert resized(token, "seq_len", 9).kv_len is None
    step = attention(mode="decode")
    assert (resized(step, "seq_len", 9).query_len, resized(step, "seq_len", 9).kv_len) == (1, 9)


@pytest.mark.extension
@pytest.mark.parametrize(
    ("name", "axis"), [("naive", "seq_len"), ("softplus", "bsz"), ("linear-causal", "dim"), ("compressed", "seq_len")]
)
def test_predictions_agree_with_the_answer(name: str, axis: str) -> None:
    """By predict_case itself: as many bytes as there are fit, and one step more does not."""
    found = largest_case(attention(name), axis, Place(SMALL))
    assert found.size > 0
    for size, status in ((found.size, "ok"), (found.size + found.step, "oom")):
        assert predict_case(resized(found.edge.case, axis, size), SMALL).record.status == status
    limited = largest_case(attention(name), axis, Place(SMALL, 2**28))
    assert 0 < limited.size < found.size


@pytest.mark.parametrize(
    ("axis", "device", "more", "words"),
    [
        ("heads", GPU, {}, "find heads is unknown; known: seq-len, bsz, dim"),
        ("bsz", device_named("cpu"), {}, "device cpu has no limit to find"),
        ("dim", GPU, {"up_to": 3}, "up_to must be at least the step of 4, got 3"),
    ],
)
def test_searches_that_cannot_be(axis: str, device: Device, more: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        largest_case(attention(), axis, Place(device), **more)


def test_no_size_is_predicted_twice() -> None:
    tried: list[int] = []

    def predict(size: int) -> Prediction:
        tried.append(size)
        return verdict(attention(), "ok" if size < 10 else "oom")

    search = Search(predict, 1, 100)
    assert [search.fits(size) for size in (9, 10, 9, 10)] == [True, False, True, False]
    assert tried == [9, 10]


# The table and the command.


def some_capacities() -> list[Largest]:
    rules: dict[str, Callable[[int], bool]] = {
        "naive": lambda n: n <= (900 if n % 64 else 1024),
        "softplus": lambda n: True,
        "linear": lambda n: False,
    }
    naive, *found = (judged(rules[name], name=name, up_to=2**12) for name in rules)
    return [
        dataclasses.replace(naive, gaps=(1023,)),
        *found,
        judged(lambda n: False, no="skipped", name="softmax", up_to=2**12),
    ]


def test_the_table_says_how_each_search_ended() -> None:
    table = capacity_table(some_capacities(), "seq_len")
    rows = {row["operator"]: row for row in data_rows(table)}
    assert {name: row["largest"] for name, row in rows.items()} == {
        **{"naive": 1024, "softplus": 2**12, "linear": 0, "softmax": None},
    }
    assert {name: row["runs_out_in"] for name, row in rows.items()} == {
        **{"naive": "backward", "softplus": None, "linear": "backward", "softmax": None},
    }
    text = to_text(table)
    assert "The largest sequence length that fits box (1,024 MiB usable): " in text
    for words in (
        "not everything below fits: ",
        "the search ended at 4,096: more may fit (--up-to)",
        "not even 1 fits",
        "softmax: skipped, as it happens",
        "box: made up.",
    ):
        assert words in text


@pytest.fixture
def fit(capsys) -> Callable[..., dict]:
    def run(*flags: str) -> dict:
        assert main(["fit", "--format", "json", *flags]) == 0
        return json.loads(capsys.readouterr().out)  # one object, and nothing else

    return run


SIZES = ["--bsz", "2", "--dim", "64", "--heads", "4", "--device", "512MiB"]


@pytest.mark.extension
def test_json_is_one_object_with_both_sides_of_the_edge(fit) -> None:
    said = fit(*SIZES, "--attention-type", "naive,softplus,flex")
    assert said["device"]["usable_bytes"] == 512 * 2**20
    naive, softplus, flex = said["capacities"]
    assert 0 < naive["largest"] < softplus["largest"]
    for row in (naive, softplus):
        assert row["next"] == row["largest"] + 1
        assert row["runs_out_in"] in ("forward", "backward")
        record, beyond = (Record.from_json(json.dumps(row[name])) for name in ("record", "next_record"))
        assert (record.query_len, record.kv_len, record.status) == (row["largest"], row["largest"], "ok")
        assert (beyond.query_len, beyond.status, beyond.source) == (row["next"], "oom", "predicted")
    assert flex["largest"] > 0


def test_the_exit_code_for_scripts(capsys) -> None:
    flags = ["fit", "--attention-type", "naive", "--fail-on-oom", "--heads", "1", "--dim", "16", "--up-to", "64"]
    assert main([*flags, "--device", "256MiB"]) == 0
    assert main([*flags, "--device", "1KiB"]) == 3
    assert main([*(flag for flag in flags if flag != "--fail-on-oom"), "--device", "1KiB"]) == 0


def test_a_table_for_several_sizes(capsys) -> None:
    flags = ["--attention-type", "naive,combinator", "--bsz", "1,2", "--device", "256MiB", "--dim", "64"]
    assert main(["fit", *flags]) == 0
    out = capsys.readouterr().out
    assert "The largest sequence length that fits 256MiB (256 MiB usable): float32, dim 64, " in out
    assert out.count("\nnaive") == out.count("\ncombinator") == 2
    for words in ("runs out", "256MiB: as given", "Everything is predicted, nothing was run."):
        assert words in out


@pytest.mark.parametrize(("find", "step"), [("bsz", 1), ("dim", 4), ("seq-len", 8)])
def test_what_is_looked_for(fit, find: str, step: int) -> None:
    given = [*{"--bsz": "2", "--dim": "64", "--seq-len": "32"}.items()]
    sizes = [word for flag, value in given if flag != f"--{find}" for word in (flag, value)]
    steps = [] if find == "dim" else ["--step", str(step)]
    said = fit(*sizes, "--find", find, *steps, "--device", "256MiB", "--attention-type", "naive")
    (row,) = said["capacities"]
    assert row["step"] == step
    assert row["largest"] % step == 0
    field = {"seq-len": "query_len"}.get(find, find)
    assert (row["record"][field], row["next_record"][field]) == (row["largest"], row["largest"] + step)


@pytest.mark.extension
def test_a_core_dimension_that_is_given_stays(fit) -> None:
    flags = ["--find", "dim", "--attention-type", "softplus", "--device", "256MiB", "--heads", "4"]
    (row,) = fit(*flags, "--core-dim", "4", "--up-to", "64")["capacities"]
    assert (row["record"]["dim"], row["record"]["core_dim"]) == (64, 4)
    (row,) = fit(*flags, "--up-to", "64")["capacities"]
    assert (row["record"]["dim"], row["record"]["core_dim"]) == (64, 64)


def test_modes_and_dtypes(fit) -> None:
    def largest(*flags: str) -> int:
        (row,) = fit(*SIZES, "--attention-type", "naive", *flags)["capacities"]
        return int(row["largest"])

    assert largest("--mode", "inference") > largest("--mode", "train")
    assert largest("--mode", "decode") > 10 * largest("--mode", "inference")
    assert largest("--dtype", "fp64") < largest("--dtype", "fp32")
    assert largest("--memory-limit", "256MiB") < largest()
    assert largest("--up-to", "100") == 100


def test_an_operator_that_fails_is_named(tmp_path: Path, capsys) -> None:
    plugin = tmp_path / "clumsy.py"
    plugin.write_text(
        "from memcheck.bench.catalog import register\n"
        "register('clumsy', lambda q, k, v: q[5:] @ k)\n"
        "register('plain', lambda q, k, v: q + v)\n"
    )
    try:
        flags = ["fit", "--plugin", str(plugin), "--device", "256MiB"]
        assert main([*flags, "--attention-type", "plain"]) == 0
        assert "\nplain " in capsys.readouterr().out
        assert main([*flags, "--attention-type", "clumsy"]) == 1
        printed = capsys.readouterr()
        assert "memcheck: clumsy cannot be predicted: " in printed.err
        assert (printed.out, printed.err.count("\n")) == ("", 1)
    finally:
        for name in ("clumsy", "plain"):
            catalog.CONTENDERS.pop(name, None)


# The picture.


@pytest.fixture
def drawn(monkeypatch) -> list:
    """What the command draws, and how, but not drawn."""
    calls: list = []
    monkeypatch.setattr(
        "memcheck.cli.commands.fit.plot_capacity", lambda edges, path, **how: calls.append((edges, how))
    )
    return calls


@pytest.mark.parametrize(
    ("flags", "along", "places"),
    [
        ("--bsz 1,2", "bsz", [1, 2]),
        ("--dim 32,64,128 --bsz 3", "dim", [32, 64, 128]),
        ("--bsz 3", "bsz", [3 * 2**power for power in range(7)]),
        ("--find bsz --seq-len 8:32:x2", "seq_len", [8, 16, 32]),
    ],
)
def test_what_a_picture_is_drawn_against(drawn, tmp_path: Path, flags: str, along: str, places: list[int]) -> None:
    picture = ["--plot", str(tmp_path / "capacity.png"), "--device", "256MiB"]
    assert main(["fit", "--attention-type", "naive,flex", *flags.split(), *picture]) == 0
    ((edges, how),) = drawn
    assert how["along"] == along
    assert [edge.x for edge in edges["naive"]] == places
    assert next(iter(edges)) == "naive"


def test_the_capacity_as_a_picture(tmp_path: Path) -> None:
    curves = {
        "naive": [Limit(1, 1000), Limit(2, 700), Limit(4, 0)],
        "softplus": [Limit(1, 4096, open=True), Limit(2, 4096, open=True), Limit(4, 2000)],
    }
    path = tmp_path / "capacity.svg"
    figure = plot_capacity(curves, path, styles={}, found="seq_len", along="bsz", title="Where it ends", note="and so")
    (ax,) = figure.axes
    assert points(ax) == {
        "naive": [(1, 1000), (2, 700)],
        "softplus": [(1, 4096), (2, 4096), (4, 2000)],
    }
    assert labelled(ax, "_open") == [[(1, 4096), (2, 4096)]]
    ((cross,),) = labelled(ax, "_nothing")
    assert cross[0] == 4
    assert key(figure) == ["naive", "softplus"]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("batch size", "largest sequence length that fits")
    assert "hollow: the search ended there" in path.read_text()
    assert "and so" in path.read_text()


def test_a_picture_of_nothing_is_still_one() -> None:
    figure = capacity_figure({"naive": [Limit(1, 0)]}, {}, found="dim", along="seq_len", title="")
    assert len(labelled(figure.axes[0], "_nothing")) == 1
