"""The documentation as text: the README, the pages of docs/ in reading order, and those beside the kernels."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("measure", "sweep", "predict", "capacity", "report", "models")
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ORDER)]
PAGES += [path for path in sorted((ROOT / "docs").glob("*.md")) if path not in PAGES]
PAGES += [*sorted((ROOT / "docs/operators").glob("*.md")), *sorted((ROOT / "csrc").rglob("*.md"))]


def documentation() -> str:
    """All pages, one after the other."""
    return "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
