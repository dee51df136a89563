"""What torch.compile saves and costs: training steps of GPT-2 and of Llama 3 8B, predicted eager and compiled.

`python benchmarks/compiled_models.py` writes benchmarks/results/compiled_models.csv and prints the table of
docs/compiled.md. It takes minutes: Inductor generates the code of all layers.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path

import pandas as pd

from memcheck.__main__ import main as memcheck

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "compiled_models.csv"
EXAMPLES = ROOT / "docs" / "examples"
MODELS = {
    "decoder of the tutorial, 8 x 512 tokens, float32": ["--model", f"{EXAMPLES}/tutorial.py:make"],
    "GPT-2, 8 x 1024 tokens, float32": ["--model", f"{EXAMPLES}/model.py:make_fused", "--bsz", "8"],
    "GPT-2, attention written out": ["--model", f"{EXAMPLES}/model.py:make", "--bsz", "8"],
    "Llama 3 8B, 1 x 2048 tokens, bfloat16": [
        *("--hf-config", f"{EXAMPLES}/llama-8b.json", "--bsz", "1", "--seq-len", "2048", "--dtype", "bf16"),
    ],
}
DEVICES = ("H100-80GB", "RTX-4090")
FIGURES = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "need_bytes")


def main() -> None:
    rows = []
    for name, flags in MODELS.items():
        for device in DEVICES:
            for code in ("eager", "compiled"):
                start, printed = time.perf_counter(), io.StringIO()
                how = [
                    "--device",
                    device,
                    "--no-changes",
                    "--format",
                    "json",
                    *(["--compile"] if code != "eager" else []),
                ]
                with contextlib.redirect_stdout(printed):
                    memcheck(["predict", *flags, *how])
                found = json.loads(printed.getvalue())
                figures = {figure: found.get(figure) for figure in FIGURES}
                doubts = "; ".join(doubt["sentence"] for doubt in found["doubts"] if "pads" in doubt["sentence"])
                seconds = round(time.perf_counter() - start, 1)
                row = {"model": name, "gpu": device, "code": code, "status": found["status"], **figures}
                rows.append({**row, "doubts": doubts, "reason": found["reason"], "seconds": seconds})
                print(rows[-1], flush=True)
    frame = pd.DataFrame(rows)
    frame.to_csv(RESULTS, index=False)
    shown = frame[["model", "gpu", "code", "status", *FIGURES]].copy()
    shown[list(FIGURES)] = (shown[list(FIGURES)] / 2**30).round(2)
    print(shown.to_markdown(index=False))


if __name__ == "__main__":
    main()
