"""A report's table of Stanford's CS336: attention written by hand, eager and compiled, batch 8, one head, float32."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from memcheck.core.prediction import Prediction
from memcheck.core.step import Place, Step
from memcheck.core.trace import WORKSPACE
from memcheck.ops.reference.cs336_attention import cs336_attention
from memcheck.predict.api import predict_memory

from .study import DATA, Published, Study, read_rows

BATCH = 8
# The table names neither its GPU nor its torch. This is a GPU of the same kind with enough memory, and a torch that
# keeps two cuBLAS workspaces, as the published figures do.
PLACE = Place("A100-80GB", torch_version=(2, 7))
WORKSPACES = 2 * 8_519_680
BLOCK = 512  # Of a number, which was there before the forward as well, and what blocks are multiples of.
FIGURES = {"kept": "saved_activations_mib", "forward": "forward_peak_mib", "backward": "backward_peak_mib"}


def published(path: Path | None) -> list[Published]:
    return [
        Published(
            f"{'compiled' if row['compiled'] == 'True' else 'eager'} S{row['seq_len']} dim {row['d_model']}",
            "CS336 report, attention",
            "not named",
            row[column],
            "MiB",
            metric,
            given=row,
        )
        for row in read_rows(path or DATA / "cs336_attention_eager_vs_compiled.csv")
        for metric, column in FIGURES.items()
    ]


@functools.cache
def predicted(length: int, dim: int, compiled: bool) -> Prediction:
    """The script's pass: the sum of what the attention returns, and its backward."""
    q, k, v = (torch.empty(BATCH, length, dim, device="meta", requires_grad=True) for _ in range(3))
    return predict_memory(Step(cs336_attention, (q, k, v), loss=torch.sum, compile=compiled), PLACE)


def predict(row: Published) -> Prediction:
    return predicted(int(row.given["seq_len"]), int(row.given["d_model"]), row.given["compiled"] == "True")


def figure(prediction: Prediction, row: Published) -> int:
    """Peaks with what was there before the forward: q, k, v and one more tensor of that size, workspaces, and a block.

    The published backward has what another pass keeps on top, because its graph was still alive.
    """
    saved = prediction.record.saved_bytes or 0
    if row.metric == "kept":
        return saved
    terms = prediction.terms[f"{row.metric}_peak_bytes"]
    before = 4 * terms["q"] + WORKSPACES + BLOCK
    new = (size for name, size in terms.items() if name not in ("q", "k", "v", WORKSPACE, f"{WORKSPACE} 2"))
    own = sum(-(-size // BLOCK) * BLOCK for size in new)
    return before + own + (saved if row.metric == "backward" else 0)


STUDY = Study(
    "A report's table of CS336 on a GPU that is not named", published, predict, figure=figure, is_evidence=False
)
