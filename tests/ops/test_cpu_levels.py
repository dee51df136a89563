"""Kernels of the CPU at every level of its instructions, each level in one process."""

from __future__ import annotations

import pytest
import torch
from ops import test_compressed_attention, test_compressed_states, test_linear_attention, test_softplus_attention
from ops.checks import CPU_LEVELS, DTYPES, assert_contract, run, same_bits
from ops.operators import COMBINATOR, COMPRESSED, LINEAR, MODES, SOFTPLUS, Operator, Options, Sizes, compressed_contract
from ops.test_linear_attention_states import MIDDLE, assert_decay_is_right, make_inputs

from memcheck._extension import _C

CAUSAL: list[Options] = [{"causal": True}, {"causal": False}]
HEADS: list[Sizes] = [(2, 4, 2, 63, 129, 35), (1, 2, 1, 200, 600, 64), (1, 8, 2, 1, 300, 64)]
WINDOWS: list[Options] = [{"factor": 3, "window": 40, "mode": mode} for mode in ("causal", "strict")]
CASES: list[tuple[Operator, list[Sizes], list[Options]]] = [
    (SOFTPLUS, [(2, 63, 129, 35), (1, 257, 300, 33)], CAUSAL),
    (LINEAR, [LINEAR.middle, (1, 2, 1, 257, 300, 33, 65)], CAUSAL),
    (COMPRESSED, HEADS, [{"factor": 3, "mode": mode} for mode in MODES]),
    (COMPRESSED, [HEADS[0], (1, 2, 1, 200, 300, 64), HEADS[2]], WINDOWS),
    (COMBINATOR, [(2, 63, 65), (40, 128), (7, 3)], [{}]),
]


@pytest.mark.ci
@CPU_LEVELS
def test_every_cpu_level(level: str) -> None:
    assert _C.cpu_level() == level
    for it, shapes, options in CASES:
        for more in options:
            for dtype in DTYPES:
                for sizes in shapes:
                    assert_contract(it.contract(**more), *it.inputs(sizes, dtype))
    for dtype in DTYPES:
        assert_decay_is_right(*make_inputs(*MIDDLE, "per position", dtype))
    softplus = test_softplus_attention
    for more in CAUSAL:
        assert_contract(SOFTPLUS.contract(**more), *softplus.make_equal_terms(1, 400_000, -0.02, 0.85))
    softplus.assert_softplus_is_accurate()
    softplus.assert_softplus_of_16_bits_is_accurate(torch.bfloat16)
    softplus.assert_step_is_right(torch.float32, prompt=300)
    test_linear_attention.assert_step_is_right(torch.float32, prompt=300)
    test_compressed_attention.assert_steps_are_right(torch.float32, prompt=30, factor=8)
    assert_strides_and_threads_change_no_bit()
    test_compressed_states.assert_bits_of_a_query_do_not_depend_on_its_call()


def assert_strides_and_threads_change_no_bit() -> None:
    inputs, grad_y = COMPRESSED.inputs((1, 2, 1, 150, 300, 64), torch.bfloat16)
    function = compressed_contract(2).function
    results = run(function, inputs, grad_y)
    assert same_bits(results, run(function, [x.mT.contiguous().mT for x in inputs], grad_y.mT.contiguous().mT))
    torch.set_num_threads(3)
    assert same_bits(results, run(function, inputs, grad_y))
