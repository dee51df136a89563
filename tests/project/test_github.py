"""The files that GitHub and pre-commit read: they parse, and agree with the project's own commands and versions."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"


def test_the_workflow_runs_the_script_that_ci_runs() -> None:
    steps = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]["test"]["steps"]
    assert steps[-2:] == [
        {"run": ".ci/run"},
        {"if": "github.event_name == 'schedule'", "run": "make test-nightly"},
    ]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize("form", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem)
def test_issue_forms_have_what_github_requires(form: Path) -> None:
    fields = yaml.safe_load(form.read_text())
    assert fields["name"]
    assert all(field["attributes"]["label"] for field in fields["body"])
    assert any(field.get("validations", {}).get("required") for field in fields["body"])


def test_pre_commit_formats_as_make_lint_does() -> None:
    revisions = {
        repo["repo"].rpartition("/")[2]: repo["rev"]
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    }
    pinned = re.search(r"clang-format==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert revisions["mirrors-clang-format"] == f"v{pinned[1]}"


def test_links_of_the_pages_for_github_lead_somewhere() -> None:
    for page in GITHUB.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
