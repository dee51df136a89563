"""The mistakes that `make mutants` plants still have their places in the source."""

from pathlib import Path

import pytest
from project.mutants import MISTAKES, ROOT, Mistake


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_can_be_planted(mistake: Mistake) -> None:
    assert (ROOT / mistake.file).read_text().count(mistake.right) == 1
    assert mistake.wrong != mistake.right
    files = [word for word in mistake.tests if word.startswith("tests/")]
    assert files
    assert all(Path(ROOT, file).is_file() for file in files)
