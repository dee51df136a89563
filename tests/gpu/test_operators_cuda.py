"""Operators on a GPU: the projections run there, and what has no kernel yet says so."""

import pytest
import torch

import memcheck
from memcheck.reference import projection as reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROUNDING = {torch.float64: 2**-53, torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["linear_r", "linear_l"])
def test_projections_agree_with_the_cpu_in_float64(name, dtype):
    x = torch.randn(3, 65, 33, dtype=dtype, device="cuda", requires_grad=True)
    w = torch.randn(33, 40, dtype=dtype, device="cuda", requires_grad=True)
    y = getattr(memcheck, name)(x, w)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in (x, w)]
    expected = getattr(reference, name)(*exact)
    expected.backward(gradient.double().cpu())
    for ours, theirs in ((y, expected), (x.grad, exact[0].grad), (w.grad, exact[1].grad)):
        error = (ours.double().cpu() - theirs).abs().max()
        # Sums of up to 3 * 65 products of normal numbers: none is larger than about 100.
        assert error <= 100 * (2 * ROUNDING[dtype] + 200 * min(2**-24, ROUNDING[dtype]))


def test_softplus_attention_says_that_it_has_no_kernel():
    q, k, v = (torch.randn(1, 4, 4, device="cuda") for _ in range(3))
    with pytest.raises(NotImplementedError, match=r"memcheck::softplus_attention.*CUDA"):
        memcheck.softplus_attention(q, k, v)


def test_tensors_on_two_devices_are_refused():
    q, k, v = (torch.randn(1, 4, 4) for _ in range(3))
    with pytest.raises(ValueError, match="softplus_attention: k must be on cpu as q is, got cuda:0"):
        memcheck.softplus_attention(q, k.cuda(), v)
