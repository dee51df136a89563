"""memcheck run --device RTX-4090: a script on a simulated GPU, each in a process of its own."""

from __future__ import annotations

import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pinned import assert_pinned
from simulated.commands import ROOT, STUBS, Ran, memcheck_run

from memcheck.__main__ import main

pytestmark = pytest.mark.extension

MIB = 2**20


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    """Runs a script with the text on a simulated T4."""

    def run_text(text: str, *flags: str, device: str = "T4", words: tuple[str, ...] = ()) -> Ran:
        (tmp_path / "script.py").write_text(text)
        return memcheck_run(tmp_path, "--device", device, *flags, "script.py", *words)

    return run_text


def on_gpu(example: str) -> str:
    """The example of the documentation on a GPU, with more steps."""
    text = (ROOT / "docs" / "examples" / example).read_text()
    moved = text.replace("model = Decoder()", 'model = Decoder().to("cuda")').replace("range(4)", "range(1000)")
    return moved.replace("(BATCH, LENGTH + 1))", '(BATCH, LENGTH + 1), device="cuda")')


def test_the_report_begins_with_the_verdict_and_says_how_far_it_ran(run: Callable[..., Ran], tmp_path: Path) -> None:
    done = run(on_gpu("train.py"))
    assert done.code == 0
    sentences = re.sub(r"[\d,.]+( KiB| MiB| bytes| allocations)", r"N\1", "\n".join(done.report))
    assert_pinned(Path(__file__).parent / "expected" / "run.txt", sentences)
    record = done.record
    assert record["simulated"] is True
    assert record["device_name"] == "T4"
    assert record["steps"] == 4
    assert record["peak"]["bytes"] <= record["reserved_bytes"] < record["usable_bytes"]
    page = (tmp_path / "out" / "run.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert all(sentence in page for sentence in done.report[:1])
    assert (tmp_path / "out" / "run.png").stat().st_size > 10_000


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other versions allocate otherwise")
def test_the_page_shows_what_it_says() -> None:
    def steady(text: str) -> str:
        return re.sub(r"after [\d.]+ s\b", "after S s", text)

    page = steady((ROOT / "docs" / "simulated-gpu.md").read_text())
    with tempfile.TemporaryDirectory() as folder:
        for words in ((), ("--batch", "24")):
            done = memcheck_run(ROOT, "--output", folder, "--device", "RTX-4090", "docs/examples/gpt.py", *words)
            sentences = "\n".join(done.report[: 4 if words else None])
            assert sentences in page
    assert (
        "memcheck: docs/examples/gpt.py:40: a number (float32) that a simulated GPU does not compute reads 1; --doubts"
        in done.err
    )


OUT_OF_MEMORY = """
import sys, torch
kept = []
def fill():
    while True:
        kept.append(torch.zeros(256, 2**20, device="cuda"))
try:
    fill()
except torch.OutOfMemoryError as error:
    if sys.argv[1:]:
        raise
    print(len(kept), "GiB")
"""


@pytest.mark.smoke
def test_memory_runs_out_where_the_target_has_no_more(run: Callable[..., Ran], tmp_path: Path) -> None:
    done = run(OUT_OF_MEMORY, words=("raise",))
    assert done.code == 1
    assert (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total cap" in done.err
    )
    assert re.search(r'File ".*script.py", line 6, in fill', done.err)
    assert done.report[0] == (
        "Simulated T4 (13.8 GiB for torch): it does not fit. Peak 13 GiB of tensors, 13 GiB reserved, at script.py:6."
    )
    assert re.search(r"asked for 1 GiB with 13 GiB in use, outside of any phase, at script.py:6 \(fill\)", done.err)
    assert done.record["ran_out"]
    assert done.record["refusal"]["requested_bytes"] == 1024 * MIB
    assert (tmp_path / "out" / "run-snapshot.pickle").exists()


def test_memory_that_runs_out_and_is_caught_is_counted(run: Callable[..., Ran]) -> None:
    """Under a limit, which the verdict names in place of what the GPU has."""
    done = run(OUT_OF_MEMORY * 2, "--memory-limit", "4GiB", device="A100-80GB")
    assert (done.code, done.out) == (0, "4 GiB\n4 GiB\n")
    assert done.report[0].startswith("Simulated A100-80GB (4 GiB for torch): it fits. Peak 4 GiB of tensors, ")
    failed = next(line for line in done.report if "failed" in line)
    assert failed.startswith(
        "2 allocations failed, and the script caught the error and went on: 1 at script.py:6, 1 at script.py:18. "
    )
    assert "with 4 GiB of 4 GiB in use" in failed


STEPS = """
import sys, torch
from torch import nn
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def train(steps):
    for step in range(steps):
        try:
            model(torch.randn(8, 64, device="cuda")).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        except Exception:
            print("caught")
        finally:
            print(step, end=" ")
train(20)
print("after")
"""


def test_the_end_is_no_error_and_counts_steps_of_the_optimizer(run: Callable[..., Ran]) -> None:
    done = run(STEPS)
    assert (done.code, done.out, done.record["error"]) == (0, "0 1 2 3 4 5 6 7 ", None)
    assert done.record["ended"].startswith("Ended after 4 optimizer steps, as the last three allocated the same; what")
    assert done.record["ended"] in done.report


def test_steps_and_whole_set_the_end(run: Callable[..., Ran]) -> None:
    assert run(STEPS, "--steps", "6").out == " ".join(map(str, range(12))) + " "
    done = run(STEPS, "--whole")
    assert done.out.endswith("19 after\n")
    assert done.record["ended"] is None


TAKE_TURNS = """
import torch
from torch import nn
makes, judges = nn.Linear(64, 512).cuda(), nn.Linear(512, 1).cuda()
optimizers = [torch.optim.Adam(model.parameters()) for model in (judges, makes)]
for step in range(40):
    fake = makes(torch.randn(128, 64, device="cuda"))
    for optimizer in optimizers[: 2 if step % 2 else 1]:
        optimizer.zero_grad()
        judges(fake).mean().backward(retain_graph=True)
        optimizer.step()
"""


def test_optimizers_that_take_turns_end_after_equal_rounds(run: Callable[..., Ran]) -> None:
    done = run(TAKE_TURNS)
    assert re.match(
        r"Ended after \d steps of the optimizer that steps most often, as the last three rounds of two steps allocated",
        done.record["ended"],
    )


READS = """
import torch
x = torch.randn(2**22, device="cuda")
for _ in range(3):
    print(x.sum().item())
print(float(x.mean()), torch.arange(4, device="cuda").sum().item())
"""


def test_numbers_that_are_not_computed_are_announced_once_and_listed_by_line(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    done = run(READS, "--doubts")
    assert done.out == "1.0\n1.0\n1.0\n1.0 6\n"
    said = [line for line in done.err.splitlines() if line.startswith("memcheck: ")]
    assert len(said) == 1
    assert said[0].startswith("memcheck: script.py:5: ")
    assert said[0].endswith("; --doubts lists such lines")
    listed = done.err.partition("What the simulated GPU answered and does not know, by line of Python\n")[2]
    assert re.search(r"^script.py:5 +3  ", listed, re.MULTILINE)
    assert re.search(r"^script.py:6 +1  ", listed, re.MULTILINE)
    reads = [(doubt["line"], doubt["count"]) for doubt in done.record["line_doubts"] if "number" in doubt["what"]]
    assert reads == [(5, 3), (6, 1)]
    assert (
        "What the simulated GPU answered and does not know, by line of Python"
        in (tmp_path / "out" / "run.html").read_text()
    )


SAVES = """
import io, os, numpy, torch
from torch import nn
large, small = nn.Linear(8192, 4096).cuda(), nn.Linear(8, 8).cuda()
for name, model in (("large.pt", large), ("small.pt", small)):
    torch.save({"model": model.state_dict(), "step": 3}, name)
    torch.save(model, f=name)
buffer = io.BytesIO()
torch.save(large.state_dict(), buffer)
import torch.distributed.checkpoint as checkpoint
checkpoint.save({"model": large.state_dict()}, checkpoint_id="folder")
checkpoint.async_save({"model": large.state_dict()}, checkpoint_id="folder").result()
host = large.weight.detach().cpu()
numpy.save("large.npy", host.numpy())
numpy.savez("large.npz", weight=host.numpy())
numpy.save("real.npy", numpy.ones(2**24, numpy.float64))
print(buffer.tell(), sorted(name for name in os.listdir() if name not in ("out", "script.py")))
torch.load("large.pt")
"""


def test_large_checkpoints_are_not_written_and_small_ones_are(run: Callable[..., Ran]) -> None:
    done = run(SAVES)
    assert done.out == "0 ['real.npy', 'small.pt']\n"
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'large.pt'" in done.err
    said = [line for line in done.err.splitlines() if " is not written, " in line]
    assert said[0] == (
        "memcheck: large.pt is not written, as a simulated GPU does not compute its tensors (128 MiB); loading it "
        "raises FileNotFoundError"
    )
    assert [line.split()[1] for line in said] == ["large.pt", "a", "folder", "large.npy", "large.npz"]
    assert [file["path"] for file in done.record["unwritten"]][:3] == ["large.pt", "a buffer", "folder"]
    assert any(
        line.startswith("Not written, as their tensors are not computed: large.pt (128 MiB), a buffer (128 MiB), ")
        for line in done.report
    )


@pytest.mark.ci
def test_safetensors_of_large_tensors_are_not_written(
    run: Callable[..., Ran], require_package: Callable[[str], None]
) -> None:
    require_package("safetensors")
    done = run(
        """
import os, torch
from safetensors.torch import save_file
save_file({"weight": torch.zeros(2**25, device="cuda")}, "large.safetensors")
save_file({"weight": torch.zeros(8)}, "small.safetensors")
print(sorted(name for name in os.listdir() if name.endswith("safetensors")))
"""
    )
    assert done.out == "['small.safetensors']\n"
    assert "large.safetensors is not written, " in done.err


CHILDREN = """
import multiprocessing, os, subprocess, sys, torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.full((4,), float(torch.cuda.is_available()))

if __name__ == "__main__":
    code = "import torch; print(torch.cuda.is_available(), torch.ones(3, device='cuda').device)"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    for kind in ("fork", "spawn"):
        batches = torch.utils.data.DataLoader(Data(), 4, num_workers=1, multiprocessing_context=kind)
        print(kind, [batch.cuda().shape[0] for batch in batches])
    code = "import sys; print('torch' in sys.modules, [name for name in sys.modules if 'memcheck' in name])"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    os.makedirs("own", exist_ok=True)
    with open("own/sitecustomize.py", "w") as file:
        file.write("print('own', end=' ')")
    environment = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"] + os.pathsep + "own"}
    code = "import sys; print(any('children' in folder for folder in sys.path))"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment).stdout.strip())
"""


def test_processes_that_the_script_starts_see_the_gpu(run: Callable[..., Ran]) -> None:
    """Only where they import torch. The user's own sitecustomize runs, and sys.path is the usual one."""
    done = run(CHILDREN)
    assert done.out.splitlines() == [
        "True cuda:0",
        "fork [4, 4]",
        "spawn [4, 4]",
        "False []",
        "own False",
    ], done.err


def test_a_snapshot_is_written_and_read(run: Callable[..., Ran], tmp_path: Path, capsys: Any) -> None:
    done = run(STEPS, "--snapshot", "script.pickle")
    assert done.code == 0
    with (tmp_path / "script.pickle").open("rb") as file:
        trace = pickle.load(file)["device_traces"][0]
    assert sum(entry["action"] == "alloc" for entry in trace) > 20
    assert main(["snapshot", str(tmp_path / "script.pickle")]) == 0
    assert "The peak on cuda:0 was " in capsys.readouterr().out


def test_two_runs_are_compared(run: Callable[..., Ran], tmp_path: Path, capsys: Any) -> None:
    run(STEPS)
    (tmp_path / "out").rename(tmp_path / "before")
    run(STEPS.replace("randn(8, 64", "randn(16, 64"), device="40GiB")
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "Figures, " in said
    assert "device: a simulated T4 -> a simulated 40GiB" in said


def test_a_module_runs_and_an_operator_without_an_answer_ends_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "package.py").write_text(
        "import sys, torch\n"
        "x = torch.ones(2**20, device='cuda')\n"
        "print(sys.argv[1:], torch.cuda.is_available())\n"
        "raise NotImplementedError('torch.cuda.one_day')\n"
    )
    done = memcheck_run(tmp_path, "--device", "rtx 4090", "-m", "package", "--steps", "3")
    assert (done.code, done.out) == (1, "['--steps', '3'] True\n")
    assert done.report[0].startswith(
        "Simulated RTX-4090 (22.9 GiB for torch): it failed, and fitted until then. Peak 4 MiB of tensors, "
    )
    assert "failed (NotImplementedError: torch.cuda.one_day)" in done.report[1]


LIGHTNING = """
import lightning.pytorch as lightning
from torch import nn

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)
    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.zeros(256, dtype=torch.long))
trainer = lightning.Trainer(
    max_epochs=2, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False, enable_progress_bar=False
)
trainer.fit(Module(), torch.utils.data.DataLoader(data, 8))
print("after")
"""
TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, number):
        tokens = torch.arange(32) + number
        return {"input_ids": tokens, "labels": tokens}

model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000))
arguments = TrainingArguments(
    "trainer", per_device_train_batch_size=8, fp16=True, save_steps=2, report_to=[], auto_find_batch_size=True
)
Trainer(model=model, args=arguments, train_dataset=Data()).train()
print("after")
"""
ACCELERATE = """
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
model = nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512, 64)), 8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
try:
    for (x,) in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
finally:
    accelerator.end_training()
print("after")
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("package", "text"), [("lightning", LIGHTNING), ("transformers", TRAINER), ("accelerate", ACCELERATE)]
)
def test_frameworks_take_the_end_for_no_failure(
    run: Callable[..., Ran], require_package: Callable[[str], None], package: str, text: str
) -> None:
    require_package(package)
    done = run(STUBS + text)
    assert done.code == 0, done.err
    assert "after" not in done.out
    assert "Traceback" not in done.err
    assert done.record["ended"].startswith("Ended after 4 optimizer steps, as the last three allocated the same;")
