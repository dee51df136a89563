"""Published figures of programs on GPUs: small ones are predicted as printed, and each row has a source or a reason."""

import functools

import pytest
import torch
from published import compare, figures, others, torchtitan
from published.study import NotPredicted, result_of

import memcheck

ROWS = {row.name: row for row in figures.STUDY.rows(None)}
# Of Liger-Kernel: losses, rotations, softmax, norms, feed-forwards; then torchtune's model, and attention of CS336.
SMALL = ("F001", "F019", "F027", "F033", "F048", "F072", "F083", "F119", "F186", "F229")


@pytest.mark.parametrize("name", SMALL)
def test_a_small_program_is_predicted_as_printed(name):
    row = ROWS[name]
    result = result_of(figures.STUDY, row, figures.STUDY.predict(row))
    assert result["equal"], result


def test_a_program_that_is_not_predicted_has_a_reason():
    for name in ("F138", "F161", "F187", "F256"):
        with pytest.raises(NotPredicted, match=r"FSDP|compiler|older"):
            figures.STUDY.predict(ROWS[name])


def test_every_row_has_a_source():
    known = [name for name, row in ROWS.items() if row.source.startswith(tuple(figures.SOURCES))]
    assert ROWS.keys() - known <= others.NOT_PREDICTED.keys()


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("newer", [False, True])
def test_reductions_of_march_2024_take_memory_of_their_own_stream(newer):
    split = functools.partial(torchtitan.split, selective=False, newer=newer)
    ranks = memcheck.Ranks(fsdp=8, split_by=split)
    found = memcheck.predict_memory(Tower(), torch.zeros(64, 512), device="H100-80GB", optimizer="adamw", ranks=ranks)
    streams = {}
    for allocation in found.trace.log.allocations:
        streams.setdefault(allocation.name, set()).add(allocation.stream)
    (of_gradients,) = streams["dlayers.0._checkpoint_wrapped_module.weight"]
    assert of_gradients != 0
    assert streams["reduce-scatter input"] == {0 if newer else of_gradients}  # Which reduces them.


@pytest.mark.ci
def test_reserved_memory_of_fsdp_is_the_stored_one():
    """It depends on the streams and on what is alive when a tensor is allocated."""
    stored = compare.stored("figures").set_index("name")["error"]["F166"]
    result = result_of(figures.STUDY, ROWS["F166"], figures.STUDY.predict(ROWS["F166"]))
    assert result["error"] == pytest.approx(stored, abs=1e-6)
