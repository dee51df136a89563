"""Details of a record: tensors alive at the peaks, saved tensors, and the two counts of saved_bytes."""

import json
import math

import pytest
import torch
from small_attention import N, S, heads, leaf, naive_attention

import memcheck
from memcheck.core.record import Record
from memcheck.measure import explain as explanation
from memcheck.measure.measurement import measure_memory


def test_details_add_up_to_the_record():
    record = measure_memory(naive_attention, *heads(), details=True)
    plain = measure_memory(naive_attention, *heads())
    assert (record.forward_peak_bytes, record.backward_peak_bytes) == (
        plain.forward_peak_bytes,
        plain.backward_peak_bytes,
    )
    for phase in ("forward", "backward"):
        alive = sum(row["bytes"] for row in record.alive_at_peak if row["phase"] == phase)
        assert alive == getattr(record, f"{phase}_peak_bytes")
    assert record.saved_tensors == [{"shape": (2, 3, 17, 17), "dtype": "float32", "bytes": S, "name": "aten::_softmax"}]
    assert (record.saved_bytes, record.doubts) == (S, ())
    assert Record.from_json(record.to_json()).saved_tensors[0]["shape"] == [2, 3, 17, 17]


def test_without_details_there_are_none():
    record = measure_memory(naive_attention, *heads())
    assert (record.saved_tensors, record.alive_at_peak, record.doubts) == (None, None, ())


def test_a_saved_view_counts_as_its_storage():
    record = measure_memory(lambda x: x.exp()[:2].sin(), leaf(10, 10), details=True)
    assert record.saved_tensors == [
        {"shape": (10, 10), "dtype": "float32", "bytes": 400, "name": "aten::exp"},
    ]
    assert record.saved_bytes == 400


def test_our_operators_save_what_their_records_say():
    inputs = leaf(2, 300, 16), leaf(2, 16, 300), leaf(2, 16, 300)
    record = measure_memory(memcheck.softplus_attention, *inputs, details=True)
    assert sum(row["bytes"] for row in record.saved_tensors) == record.saved_bytes > 0
    assert record.doubts == ()


def test_numbers_that_hooks_do_not_see_are_doubts():
    record = measure_memory(lambda q: torch.softmax(q / math.sqrt(5), -1), leaf(7), details=True)
    assert record.doubts == (
        "saved_bytes is 8 by the allocator and 0 by autograd's hooks: "
        "the hooks did not see 8 B of no operator (a Python number, say)",
    )


def test_what_a_context_keeps_by_itself_is_a_doubt():
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.hidden = x.exp()
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.hidden

    record = measure_memory(Hidden.apply, leaf(100), details=True)
    assert (record.saved_bytes, record.saved_tensors) == (400, [])
    assert (
        "400 by the allocator and 0 by autograd's hooks: the hooks did not see 400 B of aten::exp" in record.doubts[0]
    )


def test_a_weight_that_was_not_named_is_a_doubt():
    weight = leaf(100)
    record = measure_memory(lambda x: x * weight, leaf(100), details=True)
    [doubt] = record.doubts
    assert "0 by the allocator and 400 by autograd's hooks: they saw 400 B that was there before" in doubt
    assert measure_memory(lambda x: x * weight, leaf(100), details=True, parameters=[weight]).doubts == ()


def test_function_transforms_are_explained_in_part():
    record = measure_memory(torch.func.grad(lambda x: x.exp().sum()), torch.randn(100), details=True)
    assert (record.status, record.saved_tensors) == ("ok", None)
    assert sum(row["bytes"] for row in record.alive_at_peak) == record.forward_peak_bytes
    assert record.doubts[-1].startswith("saved_tensors are not known: torch.func")


def test_inference_saves_nothing():
    record = measure_memory(naive_attention, *heads(), backward=False, details=True)
    assert (record.saved_tensors, record.doubts) == ([], ())
    assert {row["phase"] for row in record.alive_at_peak} == {"forward"}


def test_what_allocates_differently_each_time_is_a_doubt():
    sizes = iter((100, 200, 300))
    record = measure_memory(lambda: torch.zeros(next(sizes)), backward=False, details=True)
    assert record.forward_peak_bytes == 400
    assert record.doubts[0].startswith("forward_peak_bytes is 400 in one pass and 800 in the next")


@pytest.mark.isolated
def test_running_out_of_a_budget_is_explained():
    record = measure_memory(naive_attention, *heads(), memory_limit=3 * N + S + 100, details=True)
    assert (record.status, record.oom_phase, record.saved_tensors) == ("oom", "forward", None)
    assert record.alive_at_peak[0]["name"] == "aten::bmm"
    json.loads(record.to_json())


def test_details_are_left_out_if_the_machine_ran_out_of_memory(monkeypatch):
    def full(x):
        calls.append(x)
        raise torch.OutOfMemoryError("full")

    calls = []
    monkeypatch.setattr(explanation, "recorded", None)
    assert measure_memory(full, leaf(3), details=True).status == "oom"
    assert len(calls) == 1
