"""Published figures of programs on GPUs: small ones are predicted as printed, and each row has a source or a reason."""

import pytest

from memcheck.studies.field import FOLDER, NotPredicted, result_of, study_named

if not FOLDER.is_dir():
    pytest.skip("an installed package has no studies of GPUs", allow_module_level=True)
STUDY = study_named("figures")
ROWS = {row.name: row for row in STUDY.rows(None)}
# Of Liger-Kernel: losses, rotations, softmax, norms, feed-forwards; then torchtune's model, and attention of CS336.
SMALL = ("F001", "F019", "F027", "F033", "F048", "F072", "F083", "F119", "F186", "F229")


@pytest.mark.parametrize("name", SMALL)
def test_a_small_program_is_predicted_as_printed(name):
    row = ROWS[name]
    result = result_of(STUDY, row, STUDY.predict(row))
    assert result.equal, result


def test_a_program_that_cannot_be_said_has_a_reason():
    for name in ("F138", "F161", "F187", "F256"):
        with pytest.raises(NotPredicted, match=r"FSDP|compiler|older"):
            STUDY.predict(ROWS[name])


def test_every_row_has_a_source():
    sources = STUDY.predict.__globals__["SOURCES"]
    reasons = STUDY.predict.__globals__["others"].NOT_PREDICTED
    assert [
        name for name, row in ROWS.items() if name not in reasons and not row.source.startswith(tuple(sources))
    ] == []
