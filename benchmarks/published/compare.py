"""Compares predictions with published measurements: `python benchmarks/published/compare.py timm --limit 20`.

A study is a table of published figures and a module that predicts its rows. Without a name, the studies are listed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from memcheck.core.devices import catalog_name
from memcheck.predict.evidence import DATA

if __name__ == "__main__":  # This folder leaves the path: its timm.py is not the library.
    sys.path = [*sys.path[1:], str(Path(__file__).parents[1])]

from published import compiled, cs336_attention, figures, memcheck_pyt, mlp, timm
from published.study import UNITS, Published, Result, Study, results_of

STUDIES: dict[str, Study] = {
    "figures": figures.STUDY,
    "mlp": mlp.STUDY,
    "timm": timm.STUDY,
    "memcheck_pyt": memcheck_pyt.STUDY,
    "cs336": cs336_attention.STUDY,
    "compiled": compiled.STUDY,
}
RESULTS = Path(__file__).parents[1] / "results" / "published"
FIXED = ["name", "source", "gpu", "metric", "published", "unit", "predicted", "equal", "error", "doubts", "reason"]
TOLERANCE = 0.003  # Share of the figure by which a row may be off without a doubt.
SMALLEST_PERCENT = 0.001  # Smaller errors are drawn as this.


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compare.py", description="Compares predictions with published figures.")
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"{', '.join(STUDIES)}; default: lists them")
    parser.add_argument("--limit", type=int, help="a random sample of so many rows, the same each time")
    parser.add_argument("--source", default="", help="only rows whose source has this text, such as litgpt")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="another file with the columns of the study's table")
    parser.add_argument("--stored", action="store_true", help="show the stored results and predict nothing")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write the results there, as STUDY.csv")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw predicted against published figures")
    given = parser.parse_args(words)
    if unknown := [name for name in given.studies if name not in STUDIES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(STUDIES)}")
    if not given.studies:
        print(*(f"{name:14}{study.title}" for name, study in STUDIES.items()), sep="\n")
    found = {name: stored(name) if given.stored else compared(name, given) for name in given.studies}
    for name, results in found.items():
        show(name, results)
        if given.output:
            write(name, results, given.output)
    if given.plot:
        plot(found, given.plot)
    return 0


def compared(name: str, given: argparse.Namespace) -> pd.DataFrame:
    study = STUDIES[name]
    rows = sampled([row for row in study.rows(given.rows) if given.source in row.source], given.limit)
    if not rows:
        sys.exit(f"compare.py: no row of {name} is from {given.source}")
    return pd.DataFrame(results_of(study, tqdm(rows, "predict", disable=None)))


def sampled(rows: Sequence[Published], limit: int | None) -> list[Published]:
    """A random sample of the rows, the same each time, in their order. A larger one has the rows of a smaller one."""
    order = random.Random(0).sample(range(len(rows)), len(rows))
    return [rows[index] for index in sorted(order[:limit])]


def stored(name: str) -> pd.DataFrame:
    """The results that are stored in the repository."""
    return pd.read_csv(RESULTS / f"{name}.csv", converters={"doubts": str, "reason": str})


def write(name: str, results: pd.DataFrame, folder: Path) -> None:
    """Writes the results. Those of the repository may be evidence for predictions, which is in memcheck/data."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = results.round({"predicted": 6, "error": 6})
    for tool in tools_in(results):
        rounded[tool] = results[tool].map("{:.4g}".format, na_action="ignore")
    rounded[FIXED + tools_in(results)].to_csv(folder / f"{name}.csv", index=False)
    if folder.resolve() == RESULTS.resolve() and STUDIES[name].is_evidence and "operators" in results:
        entries = evidence_in(results.to_dict("records"))
        text = "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n"
        (DATA / f"evidence_{name}.json").write_text(text, encoding="utf-8")


def evidence_in(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For each source, GPU and set of operators: the error of each program, by its last figure that is known."""
    errors: dict[tuple[str, str, tuple[str, ...]], list[float]] = {}
    for result in {result["name"]: result for result in results if pd.notna(result["error"])}.values():
        gpu = catalog_name(result["gpu"]) or catalog_name(f"NVIDIA {result['gpu']}")
        if result["operators"] and gpu is not None:
            key = result["source"], gpu, tuple(sorted(set(result["operators"])))
            errors.setdefault(key, []).append(round(result["error"], 5))
    return [dict(zip(("source", "gpu", "operators", "errors"), (*key, it), strict=True)) for key, it in errors.items()]


def tools_in(results: pd.DataFrame) -> list[str]:
    """Other tools whose estimates were published with the figures: each has a column with its errors."""
    return [column for column in results if column not in (*FIXED, "operators")]


def is_unexplained(results: pd.DataFrame) -> pd.Series:
    """Rows that are off by more than the tolerance, and whose prediction names no doubt."""
    return (results["equal"] == 0) & (results["error"].abs() > TOLERANCE) & (results["doubts"] == "")


def summary(results: pd.DataFrame) -> pd.DataFrame:
    """A row for each source: how many figures are equal as printed, and by how many percent the predictions are off."""
    percent = {column: 100 * results[column].abs() for column in ("error", *tools_in(results))}
    known = results["predicted"].notna() | (results["equal"] == 1)
    groups = results.assign(**percent, known=known, unexplained=is_unexplained(results)).groupby(
        ["source", "gpu", "metric"], sort=False
    )
    columns: dict[str, Any] = {
        "rows": ("name", "size"),
        "predicted": ("known", "sum"),
        "equal": ("equal", "sum"),
        "median %": ("error", "median"),
        "90 % within": ("error", lambda errors: errors.quantile(0.9, interpolation="higher")),
        "largest %": ("error", "max"),
        **{f"{tool} median %": (tool, "median") for tool in tools_in(results)},
        "unexplained": ("unexplained", "sum"),
    }
    return groups.agg(**columns).reset_index()


def show(name: str, results: pd.DataFrame) -> None:
    """Prints a row for each figure, why rows have no prediction, and the summary."""
    rows = results[["name", "metric", "published", "predicted", "unit"]].assign(
        percent=100 * results["error"], note=results["reason"].where(results["reason"] != "", results["doubts"])
    )
    print(rows.to_string(index=False, na_rep="-", float_format="{:.6g}".format, max_colwidth=60), end="\n\n")
    if any(reasons := results["reason"][(results["reason"] != "") & (results["equal"] == 0)]):
        print(reasons.value_counts().to_string(header=False), end="\n\n")
    table = summary(results)
    print(table.to_string(index=False, na_rep="-", float_format="{:.2f}".format, max_colwidth=60), end="\n\n")
    equal, known = table["equal"].sum(), table["predicted"].sum()
    print(f"{name}: {equal} of {known} predicted figures are equal as printed, {equal / max(known, 1):.1%}\n")


def plot(found: dict[str, pd.DataFrame], path: Path) -> None:
    """Draws predicted against published sizes, and the share of rows whose error is at most so many percent."""
    import matplotlib.pyplot as plt

    figure, (sizes, errors) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for marker, (name, results) in zip("o^sDvP", found.items(), strict=False):
        known = results[results["error"].notna()]
        gib = known["unit"].map(UNITS) / 2**30
        (points,) = sizes.plot(
            known["published"] * gib, known["predicted"] * gib, marker, ms=4, alpha=0.6, label=f"{name}: {len(known):,}"
        )
        for column, style in {"error": "-", **dict.fromkeys(tools_in(results), "--")}.items():
            percent = (100 * known[column].abs().dropna()).clip(lower=SMALLEST_PERCENT).sort_values()
            shares = [100 * number / len(percent) for number in range(1, len(percent) + 1)]
            label = name if column == "error" else f"{name} by {column}"
            errors.plot(percent, shares, style, drawstyle="steps-post", color=points.get_color(), label=label)
    sizes.axline((1, 1), slope=1, color="black", lw=0.8, ls=":")
    sizes.set(xscale="log", yscale="log", xlabel="measured, GiB", ylabel="predicted, GiB")
    errors.set(xscale="log", xlabel="error at most, %", ylabel="rows, %", ylim=(0, 101))
    for ax, place in ((sizes, "upper left"), (errors, (0.03, 0.28))):
        ax.legend(frameon=False, loc=place)
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
