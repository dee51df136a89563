"""The functions and objects that a notebook shows: the same records as the commands', in tables, pictures and HTML."""

import inspect
import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch

import memcheck
from memcheck.bench.decoders import DecoderCase
from memcheck.bench.predict import predict_case
from memcheck.bench.profile import profile_case
from memcheck.core.errors import MemcheckError, UsageError
from memcheck.core.prediction import verdict
from memcheck.core.record import Record
from memcheck.ops.reference.naive_attention import naive_attention

SMALL = {"seq_len": [16, 32], "dim": 8, "heads": 2, "no_time": True}


@pytest.fixture(scope="module")
def results():
    return memcheck.profile(["naive", "softplus"], **SMALL)


class Text(HTMLParser):
    """The text and the tags of HTML, whose tags must all be closed."""

    EMPTY = ("img", "path")

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def test_profile_gives_the_records_of_the_command(results):
    assert [(record.operator, record.query_len, record.dim) for record in results] == [
        *(("naive", 16, 8), ("softplus", 16, 8), ("naive", 32, 8), ("softplus", 32, 8)),
    ]
    assert {record.status for record in results} == {"ok"}
    assert all(record.forward_ms is None for record in results)


def test_results_are_a_sequence(results):
    assert len(results) == 4
    assert isinstance(results[0], Record)
    assert isinstance(results[1:], memcheck.Results)
    assert len(results[1:]) == 3
    assert [*(results + results[:1])] == [*results, results[0]]


def test_results_are_chosen_by_their_fields(results):
    assert [record.kv_len for record in results.select(operator="naive")] == [16, 32]
    assert len(results.select(operator=["naive", "softplus"], seq_len=32)) == 2
    with pytest.raises(UsageError, match=r"select: operater='naive' is no field of a record; did you mean operator\?"):
        results.select(operater="naive")


def test_a_prediction_comes_beside_each_measurement():
    both = memcheck.profile("naive", **{**SMALL, "seq_len": 16}, predict=True)
    assert [record.source for record in both] == ["measured", "predicted"]
    assert both[0].backward_peak_bytes == both[1].backward_peak_bytes
    assert both.table("prediction")[0].rows
    assert "figures are as predicted, to the byte" in str(both.summary())


def test_a_sweep_keeps_its_records_in_a_folder(tmp_path):
    folder = tmp_path / "kept"
    grid = {"bsz": [1, 2], "seq_len": "16:32:x2", "dim": 8, "heads": 2, "device": "A100-40GB", "predict_only": True}
    swept = memcheck.sweep("naive", **grid, output=folder)
    assert len(swept) == 4
    assert {record.device_name for record in swept} == {"A100-40GB"}
    assert [record.to_json() for record in memcheck.load(folder)] == [record.to_json() for record in swept]
    command = json.loads((folder / "sweep.json").read_text())["command"]
    assert command.startswith("memcheck.sweep(bsz=[1, 2], seq_len=[16, 32], dim=[8], heads=[2], device='A100-40GB'")
    with pytest.raises(UsageError, match="holds a sweep"):
        swept.save(folder)


def test_a_sweep_without_a_folder_runs_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    swept = memcheck.sweep("softplus", seq_len=16, dim=[8, 16], no_time=True)
    assert [(record.status, record.dim) for record in swept] == [("ok", 8), ("ok", 16)]
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_records_of_other_callables_have_their_names():
    x = torch.randn(8, 8, requires_grad=True)
    records = {name: memcheck.measure_memory(fn, x) for name, fn in (("square", torch.square), ("sine", torch.sin))}
    mine = memcheck.Results(records)
    assert [record.operator for record in mine] == ["square", "sine"]
    assert "square" in Text(mine._repr_html_()).text
    assert records["square"].operator is None


def test_saved_results_are_loaded_and_replaced(results, tmp_path):
    results[:3].save(tmp_path / "results")
    assert results[1:].save(tmp_path / "results") == tmp_path / "results"
    loaded = memcheck.load(tmp_path / "results")
    assert len(loaded) == 4
    assert results.compare(loaded).grown() == []
    assert str(results.compare(tmp_path / "results")).endswith("Of 4 cases, 4 took the same memory to the byte.")
    assert (tmp_path / "results/records.csv").read_text().count("\n") == 5
    assert len(memcheck.load(tmp_path / "results", tmp_path / "results")) == 8


def test_whole_models_are_results_too(tmp_path):
    case = DecoderCase("tiny", context=16)
    models = memcheck.Results([profile_case(case, timed=False), predict_case(case).record])
    page = Text(models._repr_html_())
    assert "tiny" in page.text
    assert page.tags.count("img") == 1
    models.save(tmp_path)
    models.save(tmp_path)
    assert [record.to_json() for record in memcheck.load(tmp_path)] == [record.to_json() for record in models]


def test_tables_and_sentences_are_those_of_the_commands(results):
    assert str(results.summary()).startswith("4 cases (cpu, ")
    assert repr(results) == repr(results.table())
    assert "x least" in repr(results)
    assert "kept for backward, MiB" in str(results.table("saved_bytes"))
    assert {column.key for column in results.table("saved_bytes")[0].columns} == {"length", "naive", "softplus"}
    assert results.table("scaling")[0].name == "scaling"
    assert len(results.table("accounting")) == 4
    assert results.table("cs336")
    frame = results.table().to_pandas()
    assert set(frame["operator"]) == {"naive", "softplus"}


def test_text_is_what_print_and_a_console_show(results):
    for shown in (results, results.table(), results.table()[0], results.summary(), results.compare(results)):
        assert str(shown) == repr(shown)
        assert "4 cases" in repr(shown)
        assert " at 0x" not in repr(shown)


def test_a_data_frame_has_the_fields_that_are_known(results):
    frame = results.to_pandas()
    assert list(frame["saved_bytes"]) == [record.saved_bytes for record in results]
    assert "forward_ms" not in frame


def test_plots_are_figures_that_show_themselves(results):
    figure = results.plot("memory", log=False, title="here")
    assert figure.get_suptitle().startswith("here")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert results.plot("saved_bytes", x="seq_len").axes


def test_results_show_an_answer_a_picture_and_a_table(results):
    page = Text(results._repr_html_())
    assert "x least" in page.text
    assert "peak forward, MiB" in page.text
    assert page.tags.count("img") == 1
    assert page.tags.count("tr") == 5
    assert "No records." in Text(memcheck.Results([])._repr_html_()).text


def test_what_records_say_is_text_in_html():
    record = Record(operator="<script>", status="error", reason="<b>no</b>", dtype="float32", mode="train", bsz=1)
    for shown in (record._repr_html_(), memcheck.Results([record])._repr_html_()):
        assert not {"script", "b"} & set(Text(shown).tags)


@pytest.mark.parametrize("parts", [lambda r: r.table(), lambda r: r.summary(), lambda r: r.compare(r)])
def test_parts_of_results_show_themselves(results, parts):
    assert "4 cases" in Text(parts(results)._repr_html_()).text


def test_a_measurement_shows_its_peaks_and_what_was_alive():
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    plain = Text(memcheck.measure_memory(naive_attention, q, k, v)._repr_html_())
    assert "kept for backward" in plain.text
    assert "svg" not in plain.tags
    record = memcheck.measure_memory(naive_attention, q, k, v, details=True)
    page = Text(record._repr_html_())
    assert "Alive at the peak of the backward:" in page.text
    assert "SoftmaxBackward0" in page.text
    assert page.tags.count("path") == 2
    assert {phase: max(sizes) for phase, sizes in record.over_time.items()} == {
        "forward": record.forward_peak_bytes,
        "backward": record.backward_peak_bytes,
    }
    assert Record.from_json(record.to_json()).over_time == record.over_time


def test_running_out_of_memory_is_said_first():
    q, k, v = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
    record = memcheck.measure_memory(naive_attention, q, k, v, memory_limit=2**15)
    assert "out of memory in the forward: 32 KiB requested" in Text(record._repr_html_()).text


def test_a_prediction_shows_its_modules_and_memory_over_time():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    prediction = memcheck.predict_memory(model, torch.randn(3, 8), device="A100-40GB")
    page = Text(prediction._repr_html_())
    first = verdict(prediction)
    assert first.startswith("Sequential fits A100-40GB: a training step needs ")
    assert repr(prediction).replace("\n", " ").startswith(first)
    assert page.text.strip().startswith(first)
    assert "Sequential by module: 212 parameters" in page.text
    assert "outside of submodules" in page.text
    assert "Alive at the peak" not in page.text
    assert "svg" in page.tags
    assert "212 parameters" in Text(prediction.layers._repr_html_()).text


def test_a_verdict_that_is_not_certain_says_so():
    x = torch.zeros(70_000, 32, device="meta", requires_grad=True)
    prediction = memcheck.predict_memory(torch.nn.LayerNorm(32), x, device="T4")
    assert prediction.unknown
    assert "It fits, as far as known: the run may need more." in Text(prediction._repr_html_()).text


def test_a_prediction_of_a_model_sums_what_is_alive_by_operator():
    layers = [torch.nn.Linear(64, 64), torch.nn.GELU()] * 3
    words = repr(memcheck.predict_memory(torch.nn.Sequential(*layers), torch.zeros(64, 64), optimizer="adamw"))
    assert words.count("aten::gelu") == words.count("optimizer state") == 1


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"seq_length": 8}, "profile: seq_length=8 is no argument; did you mean seq_len?"),
        ({"output": "here"}, "profile: output='here' is no argument; known: attention_type"),
        ({"attention_type": "softmx"}, "attention_type softmx is unknown; did you mean softmax? Known: naive"),
        (
            {"attention_type": []},
            "attention_type must be at least one name, got an empty list; leave it out for the default",
        ),
        ({"dim": 2.5}, "dim must look like 8, 16,32"),
        ({"dim": 6, "heads": 4}, "dim must be divisible by heads for naive, got dim 6 heads 4"),
        ({"mode": "decode", "query_len": 3}, "query_len must be 1 in mode decode, got 3"),
        ({"query_len": 5, "kv_len": 3}, "use causal=False or more keys"),
        ({"memory_limit": "40"}, "memory_limit 40: 40 what?"),
    ],
)
def test_errors_name_the_keyword_the_rule_and_the_value(keywords, message):
    with pytest.raises(UsageError) as error:
        memcheck.profile(**{"attention_type": "naive", **keywords})
    assert message in str(error.value)
    assert "--" not in str(error.value)


def test_errors_of_tables_and_plots_name_what_was_meant(results):
    with pytest.raises(UsageError, match=r"table: save_bytes is unknown; did you mean saved_bytes\? Known: "):
        results.table("save_bytes")
    with pytest.raises(UsageError, match=r"kind memry is unknown; did you mean memory\? Known: "):
        results.plot("memry")
    with pytest.raises(MemcheckError, match="nothing to draw in these 4 records"):
        results.plot("decode")


def test_values_may_be_torchs_own():
    half = memcheck.profile("naive", **{**SMALL, "seq_len": 16}, dtype=torch.float64, memory_limit=100)
    assert [(record.dtype, record.status) for record in half] == [("float64", "oom")]


@pytest.mark.parametrize("function", [memcheck.profile, memcheck.sweep])
def test_help_lists_the_keywords(function):
    names = list(inspect.signature(function).parameters)
    assert names[0] == "attention_type"
    assert {"seq_len", "dim", "bsz", "heads", "dtype", "device", "mode"} <= set(names)
    assert all(f"\n    {name}: " in function.__doc__ for name in names)
    assert "--" not in function.__doc__


def test_importing_memcheck_does_not_load_them():
    code = "import sys, memcheck; assert 'memcheck.notebook' not in sys.modules; memcheck.load; from memcheck import *"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        memcheck.nothing  # noqa: B018


def test_steps_are_profiled() -> None:
    """Memory, times and a prediction of each, as measure_memory and predict_memory give them."""
    model, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
    steps = [memcheck.Step(model, x, optimizer="adamw"), memcheck.Step(model, x, backward=False)]
    found = memcheck.profile(steps, predict=True, passes=2, device="cpu")
    assert [(record.operator, record.source) for record in found] == [
        *[("Linear", "measured")] * 2,
        *[("Linear", "predicted")] * 2,
    ]
    for record, step in zip(found[:2], steps, strict=True):
        assert record.forward_peak_bytes == memcheck.measure_memory(step).forward_peak_bytes
        assert record.passes == 2
        assert record.forward_ms is not None
    assert [record.backward_peak_bytes for record in found[2:]] == [found[0].backward_peak_bytes, None]
    (limited,) = memcheck.profile(steps[1], place=memcheck.Place("cpu", memory_limit="1KiB"), no_time=True)
    assert (limited.forward_ms, limited.oom_phase) == (None, None)
    with pytest.raises(UsageError, match="profile: seq_len is for operators, not for Steps"):
        memcheck.profile(steps[0], seq_len=8)
    with pytest.raises(UsageError, match="sweep takes operators of the catalog; profile takes Steps"):
        memcheck.sweep(steps)


def test_a_place_stands_for_its_options() -> None:
    place = memcheck.Place("cpu", memory_limit="1GiB")
    given, spoken = (
        memcheck.profile("naive", place=place, **SMALL),
        memcheck.profile("naive", device="cpu", memory_limit="1GiB", **SMALL),
    )
    assert [record.backward_peak_bytes for record in given] == [record.backward_peak_bytes for record in spoken]
    predicted = memcheck.sweep("naive", seq_len=16, dim=8, heads=2, place=memcheck.Place("T4"), predict_only=True)
    assert predicted[0].device_name == "T4"
    with pytest.raises(UsageError, match="place: device is given twice"):
        memcheck.profile("naive", place=place, device="cpu", **SMALL)
    with pytest.raises(UsageError, match="place: threads is for predictions of a Step"):
        memcheck.profile("naive", place=memcheck.Place("cpu", threads=2), **SMALL)
