"""A report's table of Stanford's CS336: attention written by hand, eager and compiled, batch 8, one head, float32."""

from __future__ import annotations

from pathlib import Path

from memcheck.bench.case_predictions import predict_case
from memcheck.bench.catalog import make_case
from memcheck.core.place import Place
from memcheck.predict.allocation_log import WORKSPACE
from memcheck.predict.replay import Prediction

from .study import DATA, NotPredicted, Published, Study, read_rows

BATCH = 8
# The table names neither its GPU nor its torch. This is a GPU of the same kind with enough memory, and a torch that
# keeps two cuBLAS workspaces, as the published figures do.
PLACE = Place("A100-80GB", torch_version=(2, 7))
WORKSPACES = 2 * 8_519_680
BLOCK = 512  # Of a number, which was there before the forward as well.
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


def predict(row: Published) -> Prediction:
    if row.given["compiled"] == "True":
        raise NotPredicted("the compiler decides what is allocated")
    length = int(row.given["seq_len"])
    sizes = {"bsz": BATCH, "query_len": length, "kv_len": length, "dim": int(row.given["d_model"]), "heads": 1}
    return predict_case(make_case("cs336/naive", core_dim=None, factor=None, **sizes), PLACE)


def figure(prediction: Prediction, row: Published) -> int:
    """Peaks with what was there before the forward: q, k, v and one more tensor of that size, workspaces, and a block.

    The published backward has what another pass keeps on top, because its graph was still alive.
    """
    saved = prediction.record.saved_bytes or 0
    if row.metric == "kept":
        return saved
    terms = prediction.terms[f"{row.metric}_peak_bytes"]
    before = 4 * terms["q"] + WORKSPACES + BLOCK
    own = sum(size for name, size in terms.items() if name not in ("q", "k", "v", WORKSPACE, f"{WORKSPACE} 2"))
    return before + own + (saved if row.metric == "backward" else 0)


STUDY = Study("A report's table of CS336 on a GPU that is not named", published, predict, figure=figure)
