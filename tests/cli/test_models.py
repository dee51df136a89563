"""`memcheck predict` and `fit` with --model and --hf-config."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo_of_models import loaded

import memcheck
from memcheck.__main__ import main, normalise
from memcheck.cli.flags import parse
from memcheck.cli.models import FloatsOnMeta
from memcheck.cli.requests import COMMANDS
from memcheck.core.devices import DEVICES, running, version_name
from memcheck.core.optimizers import turned_on
from memcheck.core.step import Step

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("net.py").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with net.py, and a table of probes that nothing else uses."""
    (tmp_path / "net.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which takes numbers of 8 bytes
    monkeypatch.setenv("MEMCHECK_PROBES", str(tmp_path / "probes.jsonl"))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What the command prints as JSON."""
    assert main([*words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def predicted(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return said(capsys, "predict", *words, "--no-changes")


def net() -> Any:
    spec = importlib.util.spec_from_file_location("net_of_the_test", "net.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIGURES = ("input_bytes", "parameter_bytes", "optimizer_bytes", "forward_peak_bytes", "saved_bytes")
FIGURES += ("backward_peak_bytes", "gradient_bytes", "optimizer_peak_bytes", "output_bytes")


@pytest.mark.extension
@pytest.mark.parametrize("reference", ["net.py:make", "net:make"])
def test_a_model_is_predicted_as_it_is_measured(reference: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, "--model", reference, "--device", "cpu")
    model, x = net().make()
    measured = memcheck.measure_memory(model, x, optimizer=torch.optim.AdamW)
    assert {name: found[name] for name in FIGURES} == {name: getattr(measured, name) for name in FIGURES}
    assert (found["operator"], found["bsz"], found["query_len"], found["certainty"]) == ("Net", 8, 64, "exact")
    peaks = [measured.forward_peak_bytes, measured.backward_peak_bytes, measured.optimizer_peak_bytes]
    assert found["need_bytes"] == max(size for size in peaks if size)
    assert sum(sums["peak"] for sums in found["modules"].values()) == found["need_bytes"]


@pytest.mark.extension
def test_checkpoints_are_predicted_as_they_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, "--model", "net.py:make", "--device", "cpu", "--checkpointing", "--optimizer", "sgd")
    model, x = net().make()
    assert turned_on(model)
    measured = memcheck.measure_memory(model, x, optimizer=torch.optim.SGD)
    assert {name: found[name] for name in FIGURES} == {name: getattr(measured, name) for name in FIGURES}


def test_flags_change_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    def need(*flags: str) -> int:
        return int(predicted(capsys, "--model", "net.py:make", "--device", "cpu", *flags)["need_bytes"])

    plain = need()
    assert need("--bsz", "16") > plain
    assert need("--seq-len", "32") < plain
    assert need("--dtype", "bf16") < plain
    assert need("--mode", "inference") < plain
    assert need("--checkpointing") < plain
    assert need("--loss", "net.py:square") != plain
    states = [
        predicted(capsys, "--model", "net.py:make", "--device", "cpu", *flags)["optimizer_bytes"]
        for flags in (["--optimizer", "none"], ["--optimizer", "sgd-momentum"], [], ["--steps", "1"])
    ]
    assert states[0] is None
    assert 0 < states[1] < states[2]
    assert states[3] == 0  # Before the very first step there is none.


@pytest.mark.parametrize("device", ["cpu", "RTX-4090"])
def test_a_function_makes_the_optimizer(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "net.py:configured", "--device", device, "--optimizer"]
    expected = predicted(capsys, *flags, "sgd-momentum")
    assert expected["optimizer_bytes"] == 4 * (8 * 8 + 8)
    for name in ("of_model", "of_parameters"):
        found = predicted(capsys, *flags, f"net.py:{name}")
        assert [found[figure] for figure in FIGURES] == [expected[figure] for figure in FIGURES]
    assert main(["predict", "--no-changes", *flags, "net.py:of_model"]) == 0
    assert "train, optimizer of_model." in capsys.readouterr().out


@pytest.mark.extension
def test_the_output_besides_the_loss_stays_alive(capsys: pytest.CaptureFixture[str]) -> None:
    """As in Python and in `y, loss = model(x)`, also where --loss names the same loss, unless it is dropped."""
    model, x = net().both()
    flags = ["--model", "net.py:both", "--device", "cpu", "--optimizer", "sgd"]
    for more, how in (
        ((), {}),
        (("--loss", "net.py:second"), {}),
        (("--no-keep-outputs",), {"keep_outputs": False}),
    ):
        found = predicted(capsys, *flags, *more)
        measured = memcheck.measure_memory(model, x, optimizer=torch.optim.SGD, **how)
        for name in (*FIGURES, "backward_from"):
            assert found[name] == getattr(measured, name)
    assert found["backward_from"] == "output[1]"


def test_the_verdict_says_where_the_backward_starts(capsys: pytest.CaptureFixture[str]) -> None:
    words = "Backward from output[1]."
    flags = ["--model", "net.py:both", "--device", "cpu", "--no-changes"]
    for command in (["predict"], ["fit", "--find", "bsz", "--memory-limit", "1MiB"]):
        assert main([*command, *flags]) == 0
        assert words in " ".join(capsys.readouterr().out.split())
    assert main(["predict", *flags, "--mode", "inference"]) == 0
    assert "Backward" not in capsys.readouterr().out


@pytest.mark.extension  # Without it, operators are doubts, so that changes may fit.
def test_the_verdict_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """300 KiB are too few even for all changes together, which need 486 KiB with AVX2 and 568 KiB with AVX-512."""
    flags = ["predict", "--model", "net.py:make", "--device", "cpu"]
    assert main([*flags, "--memory-limit", "300KiB", "--fail-on-oom"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    found = predicted(capsys, *flags[1:], "--memory-limit", "300KiB")
    assert out.startswith("Net does not fit cpu: a training step needs ")
    assert f"of the limit of 300 KiB. Memory runs out in the {found['oom_phase']}, in {found['oom_module']} (" in out
    assert f"The peak would be in the {found['peak_phase']}, in {found['peak_module']} (" in out
    assert (found["fits"], found["usable_bytes"]) == (False, 300 * 1024)
    assert main([*flags, "--memory-limit", "5MiB", "--fail-on-oom"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Net fits cpu: a training step needs ")
    assert "blocks.*.up" in out


def test_every_change_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "net.py:make", "--device", "cpu"]
    changes = said(capsys, "predict", *flags)["changes"]
    assert [change["change"] for change in changes] == [
        *("--checkpointing", "--bsz 4", "--autocast bf16", "--optimizer adafactor")
    ]
    for change in changes:
        assert predicted(capsys, *flags, *change["change"].split())["need_bytes"] == change["need_bytes"]


def test_all_changes_together_are_the_last_resort(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "net.py:make", "--device", "cpu", "--memory-limit", "300KiB", "--dtype", "bf16"]
    changes = said(capsys, "predict", *flags)["changes"]
    *single, last = changes
    assert not any(change["fits"] for change in single)
    assert last["change"] == " ".join(change["change"] for change in single)
    assert last["need_bytes"] < min(change["need_bytes"] for change in single)


@pytest.mark.parametrize("device", ["cpu", "A100-40GB"])
@pytest.mark.parametrize("function", ["three", "activation"])
def test_where_there_is_nothing_to_optimize_there_is_no_optimizer(
    function: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([], ["--clip-grad-norm", "1"]):
        assert main(["predict", "--model", f"net.py:{function}", "--device", device, *flags]) == 0
        printed = capsys.readouterr().out
        assert ", optimizer none" in printed
        assert "optimizer state" not in printed


def test_expandable_segments_are_offered_where_fragments_are_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    """The first step's state of Adam splits a large free block (pytorch/pytorch#35901)."""
    flags = ["predict", "--model", "net.py:fragments", "--device", "V100-16GB", "--optimizer", "adam"]
    changes = {change["change"]: change for change in said(capsys, *flags)["changes"]}
    assert changes["--expandable-segments"]["fits"]
    assert "--expandable-segments" not in {one["change"] for one in said(capsys, *flags, "--bsz", "1")["changes"]}
    assert main([*flags, "--expandable-segments", "--fail-on-oom", "--no-changes"]) == 0


def test_a_forward_may_keep_its_graph(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "net.py:make", "--device", "cpu"]
    plain = predicted(capsys, *flags, "--mode", "inference")
    kept = predicted(capsys, *flags, "--mode", "inference", "--enable-grad")
    trained = predicted(capsys, *flags, "--optimizer", "none")
    assert (plain["saved_bytes"], kept["saved_bytes"]) == (0, trained["saved_bytes"])
    assert kept["backward_peak_bytes"] is None


def test_flags_and_names_as_others_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--model", "net.py:make", "--device", "A10", "--bsz", "4", "--optimizer", "adamw"]
    other = ["--model", "net.py:make", "--gpu", "A10", "--batch-size", "4", "--optimizer", "AdamW"]
    usual, other = [*usual, "--dtype", "bf16", "--mode", "train"], [*other, "--dtype", "BF16", "--mode", "Train"]
    requests = [parse("predict", COMMANDS["predict"], normalise(words)) for words in (usual, other)]
    assert requests[0].asked == requests[1].asked
    assert main(["predict", "--attention-type", "Softmax", "--device", "t4", "--seq-len", "8"]) == 0
    assert capsys.readouterr().out.startswith("softmax fits T4")
    assert Step(torch.nn.Linear(1, 1), optimizer="RMSprop").optimizer == "rmsprop"


@pytest.mark.parametrize("words", ["devices", "predict --device list", "fit --device=list --find bsz"])
def test_devices_are_listed_with_their_sources(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    for name, device in DEVICES.items():
        line = next(line for line in printed.splitlines() if line.startswith(f"{name} "))
        assert line.endswith(device.source)
        assert f" {device.total_bytes / 2**30:.1f} " in line


@pytest.mark.extension
def test_compiling_is_no_change_that_nobody_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "net.py:flat", "--device", "cpu", "--memory-limit", "1KiB"]
    changes = said(capsys, "predict", *flags)["changes"]
    assert changes
    assert not any("--compile" in change["change"] for change in changes)


def test_a_model_without_layers_has_no_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    changes = said(capsys, "predict", "--model", "net.py:flat", "--device", "cpu")["changes"]
    assert [change["change"] for change in changes] == ["--autocast bf16", "--optimizer adafactor"]


def test_a_process_that_is_kept_goes_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted(capsys, "--model", "net.py:vast", "--device", "RTX-4090")
    (tmp_path / "other").mkdir()
    (tmp_path / "net.py").rename(tmp_path / "other/moved.py")
    monkeypatch.chdir(tmp_path / "other")
    assert predicted(capsys, "--model", "moved.py:vast", "--device", "RTX-4090")["fits"] is False


def test_nothing_of_its_size_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, "--model", "net.py:vast", "--device", "RTX-4090")
    assert found["fits"] is False
    assert found["need_bytes"] > 4 * 4 * 8 * 9 * 10**8  # The weight, its gradient and AdamW's two moments.


@pytest.mark.parametrize(("device", "dtype"), [("A100-40GB", "bfloat16"), ("T4", "float32"), ("cpu", "float32")])
def test_a_factory_finds_the_gpu_that_is_predicted_for(
    device: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = predicted(capsys, "--model", "net.py:asks", "--device", device)
    assert (found["status"], found["dtype"]) == ("ok", dtype)
    assert not torch.cuda.is_available()


def test_integers_are_real_and_floats_are_not() -> None:
    with FloatsOnMeta():
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert torch.linspace(0, 1, 3).tolist() == [0, 0.5, 1]
        assert torch.ones(2, dtype=torch.bool).all()
        assert torch.full((2,), 3).tolist() == [3, 3]
        assert torch.arange(0.5, 2.0).tolist() == [0.5, 1.5]  # Of one dimension, and mixed with integers.
        for made in (torch.randn(2), torch.full((2,), -1.0), torch.nn.Linear(2, 2).weight):
            assert made.device.type == "meta"


def test_inputs_by_position_and_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    by_position = predicted(capsys, "--model", "net.py:required", "--bsz", "4", "--device", "cpu")
    by_name = predicted(capsys, "--model", "net.py:named", "--device", "cpu")
    assert by_position["need_bytes"] == by_name["need_bytes"]


def test_doubts_are_counted_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["predict", "--model", "net.py:make", "--device", "24GiB", "--no-changes"]
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "(--doubts)" in out
    assert "\ndoubt: " not in out
    assert main([*flags, "--doubts"]) == 0
    assert "\ndoubt: cuBLAS's workspace" in capsys.readouterr().out


def test_layers_are_a_tree(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    flags = ["predict", "--model", "net.py:make", "--device", "24GiB", "--no-changes", "--layers"]
    assert main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "Net by module: 25,386 parameters" in lines
    assert any(line.startswith(" blocks.") and " Block " in line for line in lines)
    assert main([*flags, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    whole = found["layers"][0]
    assert whole["path"] == ""
    assert (whole["saved_bytes"], whole["parameter_bytes"]) == (found["saved_bytes"], found["parameter_bytes"])
    assert [layer["outputs"] for layer in found["layers"] if layer["path"] == "head"] == [[[8, 64, 10]]]


def test_a_model_is_explained_by_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model", "net.py:make", "--device", "24GiB", "--no-changes", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "and kept for backward, by operator" in out
    assert "\noptimizer state " in out
    assert "\naten::relu " in out


def test_a_factory_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model", "net.py:fails"]) == 1
    line = next(number for number, line in enumerate(SOURCE.splitlines(), 1) if "no weights" in line)
    said = f"--model net.py:fails failed: KeyError: 'no weights', at net.py:{line}\n"
    assert capsys.readouterr().err.endswith(said)


def test_an_error_of_the_model_names_the_module_and_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = next(number for number, line in enumerate(SOURCE.splitlines(), 1) if "self.down(self.up" in line)
    for command in ("predict", "fit --find bsz", "predict --traceback"):
        assert main([*command.split(), "--model", "net.py:broken", "--device", "T4"]) == 1
        printed = capsys.readouterr()
        *before, last = printed.err.splitlines()
        assert last.startswith("memcheck: the model cannot be predicted: RuntimeError: ")
        assert last.endswith(f", in blocks.2.down, at net.py:{line}")
        assert ("Traceback (most recent call last):" in before) == ("--traceback" in command)
        assert "--traceback" in command or not before


def test_a_step_that_accumulates_and_clips(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "net.py:make", "--device", "cpu", "--optimizer", "sgd", "--torch-version"]
    flags += [version_name(running())]
    once, four = (predicted(capsys, *flags, *more) for more in ((), ("--accumulate", "4", "--clip-grad-norm", "1")))
    how: dict[str, Any] = {"accumulate": 4, "clip_grad_norm": 1.0, "optimizer": "sgd"}
    python = memcheck.predict_memory(net().Net(32), torch.randn(8, 64, 32), **how).record
    assert four["forward_peak_bytes"] == once["forward_peak_bytes"] + once["gradient_bytes"]
    assert (four["forward_peak_bytes"], four["optimizer_peak_bytes"]) == (
        python.forward_peak_bytes,
        python.optimizer_peak_bytes,
    )
    assert four["optimizer_peak_bytes"] > once["optimizer_peak_bytes"]
    assert main(["predict", *flags, "--accumulate", "4", "--clip-grad-norm", "0.5"]) == 0
    version = version_name(running())
    assert f"optimizer sgd, accumulate 4, clipped to 0.5, torch {version}." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", ["predict --optimizer adamw", "fit --model no.py:make", "fit --hf-config no.json"])
def test_usage_errors_need_no_torch(words: str) -> None:
    code = "import sys, memcheck.__main__ as it; code = it.main(); print('torch' in sys.modules); sys.exit(code)"
    command = [sys.executable, "-c", code, *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (2, "False\n")


# fit.


@pytest.mark.parametrize("find", ["bsz", "seq-len"])
def test_the_largest_size_of_a_model(find: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "net.py:make", "--device", "cpu", "--memory-limit", "1MiB", "--optimizer", "sgd"]
    flags += {"bsz": [], "seq-len": ["--bsz", "1"]}[find]
    step = {"bsz": 1, "seq-len": 64}[find]
    found = said(capsys, "fit", *flags, "--find", find)
    assert found["largest"] > 0
    for size, fits in ((found["largest"], True), (found["largest"] + step, False)):
        assert predicted(capsys, *flags, f"--{find}", str(size))["fits"] is fits
    (checkpoints,) = [change for change in found["changes"] if change["change"] == "--checkpointing"]
    assert checkpoints["largest"] > found["largest"]
    for size, fits in ((checkpoints["largest"], True), (checkpoints["largest"] + step, False)):
        assert predicted(capsys, *flags, "--checkpointing", f"--{find}", str(size))["fits"] is fits


def test_the_verdict_about_the_largest_size(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["fit", "--model", "net.py:make", "--find", "bsz", "--no-changes", "--device", "cpu", "--memory-limit"]
    assert main([*flags, "2MiB"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("The largest batch that fits cpu is ")
    assert " of the limit of 2 MiB. " in out
    assert " Memory runs out " in out
    assert main([*flags, "1KiB", "--fail-on-oom"]) == 3
    assert capsys.readouterr().out.startswith("Not even batch 1 fits cpu: it needs ")
    assert main([*flags, "8MiB", "--up-to", "2"]) == 0
    assert "more may fit (--up-to)" in " ".join(capsys.readouterr().out.split())


def test_one_of_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "net.py:make", "--device", "cpu", "--threads", "64"]
    whole, rank = (predicted(capsys, *flags, *more) for more in ([], ["--fsdp", "8", "--rank", "3"]))
    assert rank["parameter_bytes"] * 7 < whole["parameter_bytes"]
    assert (whole["buffers"], "all-gathered parameters" in rank["buffers"]) == ({}, True)
    assert main(["predict", *flags, "--fsdp", "8", "--no-changes"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "rank 0 of 8 of FSDP2 (" in out
    assert "Collectives hold at the peak: all-gathered parameters" in out


def test_the_largest_batch_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "net.py:make", "--find", "bsz", "--device", "cpu", "--memory-limit", "2MiB", "--no-changes"]
    whole, rank = (said(capsys, "fit", *flags, *more)["largest"] for more in ([], ["--fsdp", "8"]))
    assert 0 < whole < rank


# Tables of probes.


@pytest.mark.extension
def test_a_table_of_probes_is_carried(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "net.py:smooth", "--bsz", "4096"]
    table = ["--probes", "table.jsonl"]
    here = predicted(capsys, *flags, *table)
    rows = Path("table.jsonl").read_text()
    assert predicted(capsys, *flags, *table) == here == predicted(capsys, *flags, "--device", "cpu")
    assert here["certainty"] == "exact"
    assert Path("table.jsonl").read_text() == rows != ""
    cpu = json.loads(rows.splitlines()[0])["machine"][-1]
    Path("table.jsonl").write_text(rows.replace(cpu, "elsewhere"))
    carried = predicted(capsys, *flags, *table)
    assert (carried["certainty"], carried["need_bytes"]) == ("exact", here["need_bytes"])
    assert Path("table.jsonl").read_text() == rows.replace(cpu, "elsewhere")


def test_a_table_of_several_machines_needs_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    row = json.dumps({"format": 3, "machine": [3, torch.__version__, "old"], "operator": "aten::add", "key": []})
    Path("table.jsonl").write_text(f"{row}\n{row.replace('[3', '[4')}\n")
    flags = ["predict", "--model", "net.py:make", "--probes", "table.jsonl"]
    assert main(flags) == 2
    assert "one machine is needed, choose by --threads; it has 3 threads" in capsys.readouterr().err
    assert predicted(capsys, *flags[1:], "--threads", "4")["threads"] == 4
    Path("table.jsonl").write_text(row.replace(torch.__version__, "1.0"))
    assert main(flags) == 2
    assert "is of torch 1.0, and this is torch" in capsys.readouterr().err


# Operators of the catalog.


def test_what_would_make_an_operator_fit_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["predict", "--bsz", "8", "--seq-len", "512", "--device", "cpu", "--memory-limit", "40MiB"]
    assert main(flags) == 0
    table = capsys.readouterr().out.partition("What would help, one change at a time")[2]
    changes = [line for line in table.splitlines() if line.startswith(("--bsz", "--dtype", "--attention-type"))]
    lines = {line.partition("  ")[0]: " yes " in f"{line} " for line in changes}
    assert {"--bsz 4", "--dtype bf16", "--attention-type softmax"} <= lines.keys()
    for change, fits in lines.items():
        words = change.split()
        assert main([*flags, *words, "--fail-on-oom"]) == (0 if fits else 3), change
    assert lines["--attention-type softmax"]


# Models of transformers.


@pytest.fixture
def llama() -> Path:
    """A tiny configuration."""
    pytest.importorskip("transformers")
    loaded().with_stubs_of_torchvision()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}
    Path("config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    return Path("config.json")


@pytest.mark.filterwarnings("ignore")
def test_a_configuration_with_yarn_is_predicted(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 512}
    llama.write_text(json.dumps(json.loads(llama.read_text()) | {"rope_parameters": rope}))
    found = predicted(capsys, "--hf-config", str(llama), "--bsz", "2", "--seq-len", "24", "--device", "cpu")
    assert found["status"] == "ok"


@pytest.mark.filterwarnings("ignore")
def test_a_configuration_is_predicted_as_it_is_measured(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    flags = ["--hf-config", str(llama), "--bsz", "2", "--seq-len", "24", "--device", "cpu"]
    found = predicted(capsys, *flags, "--attention", "eager")
    config = transformers.LlamaConfig.from_json_file(str(llama))
    config._attn_implementation, config.use_cache = "eager", False
    ids, labels = torch.ones(2, 24, dtype=torch.int64), torch.ones(2, 24, dtype=torch.int64)
    how: dict[str, Any] = {"optimizer": torch.optim.AdamW}
    model = transformers.LlamaForCausalLM(config)
    measured = memcheck.measure_memory(model, input_ids=ids, labels=labels, **how)
    assert {name: found[name] for name in FIGURES} == {name: getattr(measured, name) for name in FIGURES}
    assert (found["operator"], found["fits"]) == ("LlamaForCausalLM", True)


@pytest.mark.extension
@pytest.mark.filterwarnings("ignore")
def test_a_configuration_with_our_attention_is_predicted(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    from memcheck.integrations.transformers import register

    values = {**json.loads(llama.read_text()), "memcheck_factor": 4, "memcheck_window": 6}
    llama.write_text(json.dumps(values))
    flags = ["--hf-config", str(llama), "--bsz", "2", "--seq-len", "24", "--device", "cpu", "--optimizer", "none"]
    found = predicted(capsys, *flags, "--attention", "memcheck_compressed")
    register()
    config = transformers.LlamaConfig.from_json_file(str(llama))
    config._attn_implementation, config.use_cache = "memcheck_compressed", False
    ids, labels = torch.ones(2, 24, dtype=torch.int64), torch.ones(2, 24, dtype=torch.int64)
    measured = memcheck.measure_memory(transformers.LlamaForCausalLM(config), input_ids=ids, labels=labels)
    for name in ("forward_peak_bytes", "saved_bytes", "backward_peak_bytes"):
        assert found[name] == getattr(measured, name), name


@pytest.mark.filterwarnings("ignore")
def test_what_helps_a_configuration(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--hf-config", str(llama), "--bsz", "2", "--seq-len", "64", "--device", "cpu", "--attention", "eager"]
    changes = {change["change"]: change["need_bytes"] for change in said(capsys, "predict", *flags)["changes"]}
    assert {"--checkpointing", "--bsz 1", "--attention sdpa", "--autocast bf16"} <= changes.keys()
    flags[-1] = "sdpa"
    assert predicted(capsys, *flags)["need_bytes"] == changes["--attention sdpa"]
    flags = ["--hf-config", str(llama), "--seq-len", "16", "--device", "cpu", "--memory-limit", "2MiB"]
    assert said(capsys, "fit", *flags, "--find", "bsz", "--no-changes")["largest"] > 1


@pytest.mark.filterwarnings("ignore")
def test_wrong_configurations_end_in_one_line(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, words in (
        ("[", "--hf-config wrong.json cannot be read"),
        ("{}", "it has no model_type"),
        ('{"model_type": "lama"}', "transformers has no model_type lama; did you mean llama?"),
    ):
        Path("wrong.json").write_text(text)
        assert main(["predict", "--hf-config", "wrong.json", "--device", "cpu"]) == 2
        printed = capsys.readouterr()
        assert words in printed.err
        assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert main(["predict", "--hf-config", str(llama), "--seq-len", "999", "--device", "cpu", "--no-changes"]) == 0
    assert "note: max_position_embeddings is 64" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["predict", "--hf-config", "config.json"]) == 2
    printed = capsys.readouterr().err
    assert "--hf-config needs transformers: pip install transformers" in printed
    assert printed.count("\n") == 1
