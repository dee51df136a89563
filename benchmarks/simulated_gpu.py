"""Measures what a simulated GPU costs: processor seconds of programs that run on it, beside what else can run them.

    python benchmarks/simulated_gpu.py [--nanogpt FOLDER] [--only NAME ..] [--output FILE]

Each program runs in a process of its own, on a simulated A100-40GB. FOLDER has nanoGPT's train.py and model.py
(github.com/karpathy/nanoGPT), which run with random tokens. generate needs transformers. Under FakeTensorMode,
torch.distributed._tools.mem_tracker.MemTracker runs the same step of GPT-2.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICE = "A100-40GB"
HERE = Path(__file__).resolve()
EXAMPLE = HERE.parents[1] / "docs/examples/gpt.py"
STEPS = 5
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--inside", choices=[*INSIDE], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        print(json.dumps(INSIDE[args.inside]()))
        return
    programs: dict[str, Callable[[], Row]] = {name: lambda name=name: inside(name) for name in INSIDE}
    programs["run docs/examples/gpt.py"] = lambda: run(EXAMPLE)
    if args.nanogpt is not None:
        programs |= nanogpt(args.nanogpt.resolve())
    rows = []
    for name, measure in programs.items():
        if not args.only or name in args.only:
            rows.append({"program": name, **measure()})
            print(rows[-1], flush=True)
    from harness import write_result

    print(f"wrote {write_result('simulated_gpu', rows, args.output)}")


def timed(command: list[Any], **options: Any) -> tuple[Row, str]:
    """Seconds and processor seconds of a process and its children, the largest one's memory, and what it printed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with exit code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {"seconds": time.perf_counter() - start, "processor_seconds": spent, "host_peak_bytes": used.ru_maxrss * 1024}
    return row, printed


def inside(name: str) -> Row:
    row, printed = timed([sys.executable, HERE, "--inside", name])
    return {**row, **json.loads(printed.splitlines()[-1])}


def run(script: Path, *arguments: str, folder: Path | None = None) -> Row:
    """memcheck run of the script, with cold caches of compiled code."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "memcheck", "run", "--device", DEVICE, "--output", scratch, script, *arguments]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(scratch, "compiled"))}
        row, _ = timed(command, cwd=folder or scratch, env=environment)
        found = json.loads(Path(scratch, "run.json").read_text(encoding="utf-8"))
        return {**row, "peak_bytes": found["peak"]["bytes"]}


def nanogpt(folder: Path) -> dict[str, Callable[[], Row]]:
    quick = ("--gradient_accumulation_steps=2", "--eval_iters=2")
    cases = {"as it is": (), "eager, 2 passes": (*quick, "--compile=False"), "compiled, 2 passes": quick}

    def measured(*arguments: str) -> Row:
        import numpy

        with tempfile.TemporaryDirectory() as scratch:
            for name in ("train.py", "model.py", "configurator.py"):
                shutil.copy(folder / name, scratch)
            data = Path(scratch, "data", "openwebtext")
            data.mkdir(parents=True)
            for name in ("train.bin", "val.bin"):
                numpy.random.default_rng(0).integers(50257, size=1 << 20, dtype=numpy.uint16).tofile(data / name)
            return run(Path("train.py"), *arguments, folder=Path(scratch))

    return {f"nanoGPT, {name}": lambda them=them: measured(*them) for name, them in cases.items()}


def start() -> Row:
    """What simulating adds to the import of torch and the first tensor."""
    begun = time.process_time()
    import memcheck

    memcheck.simulate(DEVICE)
    found = time.process_time() - begun
    import torch

    torch.zeros(1).cuda()
    everything = time.process_time() - begun
    command = (
        "import time; begun = time.process_time(); import torch; torch.zeros(1); print(time.process_time() - begun)"
    )
    alone = float(subprocess.check_output([sys.executable, "-c", command], text=True))
    return {"before_torch": found, "with_torch": everything, "torch_alone": alone, "added": everything - alone}


def gpt2(device: str, mode: Any = None) -> tuple[Any, Any, Any]:
    """The model, its optimizer, and a function that trains a step. mode: makes its parameters fake tensors."""
    import importlib.util

    import torch

    spec = importlib.util.spec_from_file_location("gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.GPT()
    if mode is None:
        model.to(device)
    else:  # nn.TransformerEncoder copies its layers, and a copy of a fake tensor has a mode of its own.
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(mode.from_tensor(parameter.data)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(8, example.LENGTH, dtype=torch.long, device=device)
    tokens = tokens if mode is None else mode.from_tensor(tokens)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, optimizer, step


def times_of(step: Callable[[], None], before: Callable[[], object] = bool) -> Row:
    def once() -> float:
        before()
        begun = time.process_time()
        step()
        return time.process_time() - begun

    first, *later = (once() for _ in range(1 + STEPS))
    return {"first_step": first, "later_step": sorted(later)[STEPS // 2]}


def gpt2_step(has_history: bool = False) -> Row:
    import memcheck

    memcheck.simulate(DEVICE)
    import torch

    *_, step = gpt2("cuda")
    if has_history:
        torch.cuda.memory._record_memory_history()
    times = times_of(step)
    return {**times, "peak_bytes": torch.cuda.max_memory_allocated()}


def gpt2_step_with_history() -> Row:
    return gpt2_step(has_history=True)


def gpt2_step_by_mem_tracker() -> Row:
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode()
    model, optimizer, step = gpt2("cpu", mode)  # Without a GPU it takes no CUDA device.
    with mode:
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            times = times_of(step, tracker.reset_mod_stats)
        peaks = tracker.get_tracker_snapshot("peak")
    return {**times, "peak_bytes": peaks[torch.device("cpu")]["Total"]}


def generate() -> Row:
    """200 tokens of a GPT-2 of 12 layers, with a cache."""
    import memcheck

    memcheck.simulate(DEVICE)
    import torch
    import transformers
    from zoo import with_stubs_of_torchvision

    _library = with_stubs_of_torchvision()
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).cuda().eval()
    tokens = torch.zeros(1, 16, dtype=torch.long, device="cuda")
    begun = time.process_time()
    model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=200, min_new_tokens=200)
    return {"generate": time.process_time() - begun, "peak_bytes": torch.cuda.max_memory_allocated()}


INSIDE: dict[str, Callable[[], Row]] = {
    "start": start,
    "step of GPT-2": gpt2_step,
    "step of GPT-2, with history and frames": gpt2_step_with_history,
    "step of GPT-2, MemTracker under FakeTensorMode": gpt2_step_by_mem_tracker,
    "generate": generate,
}


if __name__ == "__main__":
    main()
