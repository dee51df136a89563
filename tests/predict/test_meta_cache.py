"""Results of operators on meta tensors that are remembered by layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import memcheck
from memcheck.predict import meta_results

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.storage_offset(), value.untyped_storage().nbytes()
    return [layout(part) for part in value] if isinstance(value, tuple | list) else value


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_results, "_results", {})


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "sum": lambda: (aten.add.Tensor, meta(3, 1), meta(4, 1).t()),
    "promotion": lambda: (aten.mul.Tensor, meta(3, dtype=torch.int64), 2.5),
    "no promotion": lambda: (aten.mul.Tensor, meta(3, dtype=torch.int64), 2),
    "truth": lambda: (aten.mul.Tensor, meta(3, dtype=torch.bool), True),
    "product": lambda: (aten.addmm.default, meta(5), meta(3, 4), meta(4, 5)),
    "several": lambda: (aten.native_layer_norm.default, meta(2, 3, 8), [8], meta(8), meta(8), 1e-5),
    "list": lambda: (aten.cat.default, [meta(2, 3), meta(4, 3)]),
    "part of a storage": lambda: (aten.relu.default, meta(4, 6)[1:, ::2]),
    "view": lambda: (aten.view.default, meta(4, 6), [24]),
    "as it was": lambda: (aten.contiguous.default, meta(4, 6)),
    "in place": lambda: (aten.mul_.Tensor, meta(4, 6).t(), 2),
    "list in place": lambda: (aten._foreach_mul_.Scalar, [meta(4), meta(2, 3)], 2.0),
    "resized": lambda: (aten.resize_.default, meta(4, 6), [3, 5]),
    "transposed in place": lambda: (aten.t_.default, meta(4, 6)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_repeated_call_returns_what_the_kernel_does(call: Callable[[], tuple[Any, ...]]) -> None:
    for _ in range(3):
        func, *args = call()
        expected = layout(call()[0](*call()[1:]))
        output = meta_results.result_of(func, tuple(args), {})
        assert layout(output) == expected
        if func in (aten.mul_.Tensor, aten.resize_.default, aten.t_.default):
            assert output is args[0]
        if func is aten.view.default:
            assert output.untyped_storage()._cdata == args[0].untyped_storage()._cdata


def test_only_new_tensors_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    x = meta(4, 6)
    for _ in range(2):
        first, second = (meta_results.result_of(aten.relu.default, (x,), {}) for _ in range(2))
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert len(meta_results._results) == 1
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    meta_results.result_of(aten.relu.default, (x,), {})
    assert len(meta_results._results) == 2


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.image = torch.nn.Sequential(
            torch.nn.Conv1d(16, 16, 3), torch.nn.BatchNorm1d(16), torch.nn.ReLU(inplace=True)
        )
        self.lstm = torch.nn.LSTM(16, 8, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.embedding(tokens))
        return self.lstm(self.image(x.mT).mT)[0].square().mean()


@pytest.mark.parametrize("device", ["cpu", "A100-40GB"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
def test_predictions_are_those_of_the_kernels(device: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, tokens = Net(), torch.zeros(2, 12, dtype=torch.long)

    def predicted() -> dict[str, Any]:
        how: dict[str, Any] = {"device": device, "optimizer": optimizer}
        prediction = memcheck.predict_memory(model, tokens, **how)
        return {**dataclasses.asdict(prediction.record), "timeline": prediction.timeline}

    remembered = [predicted() for _ in range(2)]
    monkeypatch.setattr(meta_results, "result_of", lambda func, args, kwargs: func(*args, **kwargs))
    traced = predicted()
    assert remembered == [traced, traced]
