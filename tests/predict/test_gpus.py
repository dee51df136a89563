"""Predictions for GPUs that are not here: models run on them, simulated in a process of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from predict.compared import figures
from torch import Tensor, nn
from torch.nn import functional

import memcheck
from memcheck.core.errors import UnsupportedError, UsageError
from memcheck.core.step import Place, Step
from memcheck.core.trace import EMPTY_CACHE
from memcheck.predict import process
from memcheck.predict import run as predict_run
from memcheck.simulated.facts import scratch_of
from memcheck.simulated.scratch import Target, call_of

pytestmark = [pytest.mark.extension]

A100 = {"device": "A100-40GB"}


class Layer(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def layers() -> nn.Module:
    return nn.Sequential(Layer(), Layer(), nn.Linear(64, 100))


def test_a_step_has_the_tensors_of_the_cpu_and_the_library_s_workspace() -> None:
    model, x = layers(), torch.randn(4, 32, 64)
    how: dict[str, Any] = {"optimizer": "adamw", "loss": lambda y: y.square().mean(), "keep_outputs": False}
    gpu, cpu = (memcheck.predict_memory(model, x, device=device, **how) for device in ("A100-40GB", "cpu"))
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert gpu.fits
    assert gpu.record.optimizer_bytes == 2 * 4 * elements  # The step counters are on the host.
    for name in ("input_bytes", "parameter_bytes", "output_bytes", "gradient_bytes"):
        assert getattr(gpu.record, name) == getattr(cpu.record, name)
    assert "cuBLAS workspace" in gpu.terms["forward_peak_bytes"]
    for phase in ("forward", "backward", "optimizer"):
        assert sum(gpu.terms[f"{phase}_peak_bytes"].values()) == getattr(gpu.record, f"{phase}_peak_bytes")


def test_a_second_prediction_is_like_the_first() -> None:
    found = [memcheck.predict_memory(layers(), torch.randn(4, 32, 64), optimizer="adamw", **A100) for _ in range(2)]
    assert figures(found[0].record) == figures(found[1].record)


def test_what_does_not_fit() -> None:
    found = memcheck.predict_memory(layers(), torch.randn(64, 512, 64), memory_limit="64MiB", device="T4")
    assert (found.fits, found.record.status, found.record.oom_phase) == (False, "oom", "forward")
    assert (found.record.reason or "").startswith("predicted: ")
    assert (found.segments_bytes or 0) > 64 * 2**20


@pytest.mark.timeout(60)
def test_the_largest_size_fits_and_the_next_one_does_not() -> None:
    found = memcheck.largest(lambda n: torch.empty(n, 32, 64), layers(), memory_limit="256MiB", **A100)
    assert found.size > 100
    assert (found.at.fits, found.beyond.fits) == (True, False)


def test_contents_decide_as_on_a_gpu() -> None:
    """Small integers are sent with their contents, and comparisons of them are computed."""
    ids = torch.tensor([0, 3, 3, 7])
    found = memcheck.predict_memory(lambda x: x[ids.to(x.device) > 2].cumsum(0), of_ones(4, 8), **A100)
    assert found.record.output_bytes == 3 * 8 * 4


def of_ones(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 100]


def test_an_error_of_the_model_has_its_traceback() -> None:
    with pytest.raises(IndexError, match="out of bounds") as raised:
        memcheck.predict_memory(Failing(), torch.ones(2, 3), **A100)
    assert "return x[:, 100]" in str(raised.value.__cause__)
    assert memcheck.predict_memory(nn.Linear(2, 2), torch.ones(2, 2), **A100).fits


def test_what_cannot_be_sent_is_refused_with_what_works() -> None:
    layer = nn.Linear(2, 2)
    layer.lock = threading.Lock()
    with pytest.raises(UnsupportedError, match=r"cannot be sent .*lock.*memcheck run --device.*memcheck.simulate"):
        memcheck.predict_memory(layer, torch.ones(2, 2), **A100)


def test_a_process_that_ends_is_named_and_replaced() -> None:
    with pytest.raises(UnsupportedError, match=r"^the process that simulates the GPU ended with exit code 7"):
        memcheck.predict_memory(lambda x: __import__("os")._exit(7), torch.ones(2, 2), **A100)
    assert memcheck.predict_memory(nn.Linear(2, 2), torch.ones(2, 2), **A100).fits
    process.end_all()
    assert memcheck.predict_memory(nn.Linear(2, 2), torch.ones(2, 2), **A100).fits


def test_a_process_that_crashes_is_named() -> None:
    """As torch 2.13 does in the backward of a group norm on the CPU whose input is channels_last and needs no grad."""
    with pytest.raises(
        UnsupportedError, match=r"^the process that simulates the GPU crashed inside torch \(SIGSEGV\)$"
    ):
        memcheck.predict_memory(
            lambda x: __import__("os").kill(__import__("os").getpid(), 11), torch.ones(2, 2), **A100
        )
    assert memcheck.predict_memory(nn.Linear(2, 2), torch.ones(2, 2), **A100).fits


def test_the_peaks_place_is_an_operator_or_a_node() -> None:
    """Not the scratch that it allocated last: of the gradient of a group norm, "ds and db"."""
    x = torch.randn(2, 64, 24, 24)
    peak = memcheck.predict_memory(nn.GroupNorm(8, 64), x, **A100).peak
    assert peak is not None
    assert (peak.phase, peak.operator) == ("backward", "NativeGroupNormBackward0")


# What composite and fused operators of torch keep and take, in bytes kept for the backward: x has 9,216 numbers.
KEPT = {
    "log_sigmoid": (nn.LogSigmoid(), 0),
    "batch norm in eval": (nn.Sequential(nn.Unflatten(0, (8, 12)), nn.BatchNorm1d(12).eval()), 0),  # cuDNN's.
    "loss with logits": (nn.BCEWithLogitsLoss(), 0),
    "soft margin": (nn.SoftMarginLoss(reduction="none"), 0),
    # Zeros in place of the state, the gates of input and state, and what the one kernel keeps.
    "lstm cell": (nn.LSTMCell(96, 96), 4 * 9216 * (1 + 3 * 4)),
    "gru cell": (nn.GRUCell(96, 96), 4 * 9216 * (1 + 2 * 3 + 5)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_fused_operators_keep(name: str) -> None:
    module, kept = KEPT[name]
    inputs = [torch.randn(96, 96) for _ in range(2 if name in ("loss with logits", "soft margin") else 1)]
    found = memcheck.predict_memory(module, *inputs, **A100)
    assert found.record.saved_bytes == kept, found.terms["saved_bytes"]


def test_a_bilinear_needs_the_workspace_of_both_threads() -> None:
    found = memcheck.predict_memory(nn.Bilinear(96, 96, 96), torch.randn(96, 96), torch.randn(96, 96), **A100)
    assert found.record.library_workspace_bytes == 2 * 8519680


def test_what_cudnn_keeps_of_a_recurrent_layer_is_a_doubt() -> None:
    found = memcheck.predict_memory(nn.LSTM(96, 96), torch.randn(5, 4, 96), **A100)
    assert "what aten::_cudnn_rnn takes beside its outputs" in map(str, found.unknown)


def test_threads_that_ask_for_a_gpu_each_have_their_answer() -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.cuda.is_available()
            return super().forward(x)

    found: list[int | None] = []
    model, x = Asks(8, 8), torch.randn(4, 8)

    def predict() -> None:
        found.append(memcheck.predict_memory(model, x, **A100).record.backward_peak_bytes)

    threads = [threading.Thread(target=predict) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    predict()
    assert len(set(found)) == 1
    assert len(found) == 3


def test_torchs_accelerator_is_the_gpu() -> None:
    """Both are asked for by `import diffusers`."""

    def model(x: Tensor) -> Tensor:
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        return x * 2

    assert memcheck.predict_memory(model, torch.ones(2, 2), **A100).fits


def test_compiling_without_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict_run.importlib.util, "find_spec", lambda name: None)
    step, place = Step(nn.Linear(2, 2), torch.ones(2, 2), compile=True), Place("A100-40GB")
    with pytest.raises(UsageError, match=r"^compile for a GPU needs triton: pip install triton$"):
        predict_run.predicted_once(step, place, None)


def test_the_users_model_stays_as_it_is() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(2, 2)
    layer.seen = []
    layer.register_forward_hook(lambda module, *_: module.seen.append(1))
    before = layer.weight.detach().clone()
    memcheck.predict_memory(layer, x, optimizer="adamw", **A100)
    assert layer.seen == []
    assert layer.weight.grad is None
    assert torch.equal(layer.weight, before)


def test_the_model_sees_the_gpu_that_is_predicted() -> None:
    def asks(x: Tensor) -> Any:
        found = torch.cuda.get_device_properties(0)
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 1)
        assert (found.name, found.multi_processor_count) == ("A100-40GB", 108)
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.cuda.mem_get_info()[1] > 2**35
        assert torch.cuda.get_device_name() == "A100-40GB"
        return x.bfloat16() if torch.cuda.get_device_capability() >= (8, 0) else x

    record = memcheck.predict_memory(asks, of_ones(512, 512), **A100).record
    assert record.output_bytes == 2 * 512 * 512
    assert not torch.cuda.is_available()


def asks_for_bfloat16(x: Tensor) -> Tensor:
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.is_bf16_supported(including_emulation=False) == (torch.cuda.get_device_capability() >= (8, 0))
    return x * 2


@pytest.mark.parametrize("device", ["T4", "A100-40GB"])
def test_what_torch_itself_asks(device: str) -> None:
    how: dict[str, Any] = {"optimizer": "adamw", "autocast": "fp16", "clip_grad_norm": 1.0}
    encoder = nn.TransformerEncoderLayer(8, 2)
    assert memcheck.predict_memory(encoder, torch.rand(2, 3, 8), device=device, **how).record.status == "ok"
    assert memcheck.predict_memory(asks_for_bfloat16, of_ones(2, 4), device=device).record.status == "ok"


def test_an_error_that_only_a_gpu_gives_is_raised() -> None:
    def refuses(x: Tensor) -> Tensor:
        if x.is_cuda:
            raise ValueError("there is no kernel for it")
        return x * x

    with pytest.raises(ValueError, match="there is no kernel for it"):
        memcheck.predict_memory(refuses, of_ones(2, 3), **A100)
    assert memcheck.predict_memory(refuses, of_ones(2, 3)).fits


class MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] + torch.zeros(4, 4)


class MixedStep:
    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.add_(torch.zeros(parameter.shape))


class WithHost(nn.Module):
    """Calls a function of itself, its input x (4,4) and a tensor (4,4) on the CPU."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.linear, self.cell, self.lstm = nn.Linear(4, 4), nn.LSTMCell(4, 4), nn.LSTM(4, 4)
        self.gru, self.embedding, self.conv = nn.GRUCell(4, 4), nn.Embedding(5, 4), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x, torch.zeros(4, 4))


MIXED: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "sum": lambda m, x, host: host + x,
    "in place": lambda m, x, host: (x * 1).add_(host),
    "cat": lambda m, x, host: torch.cat([x, host]),
    "product": lambda m, x, host: x @ host,
    "batched": lambda m, x, host: torch.bmm(x[None], host[None]),
    "convolution": lambda m, x, host: functional.conv1d(x[None], host[..., None]),
    "attention": lambda m, x, host: functional.scaled_dot_product_attention(x[None], host[None], x[None]),
    "gathered": lambda m, x, host: x.gather(0, host.long()),
    "written": lambda m, x, host: x.index_put((torch.zeros(4).long(),), host),
    "loss": lambda m, x, host: functional.mse_loss(x, host),
    "classes": lambda m, x, host: functional.cross_entropy(x, host[0].long()),
    "a layer": lambda m, x, host: m.linear(host),
    "a convolution": lambda m, x, host: m.conv(host[None]),
    "an embedding": lambda m, x, host: m.embedding(host.long()),
    "a cell": lambda m, x, host: m.cell(x, (host, host))[0],
    "another cell": lambda m, x, host: m.gru(x, host),
    "a network": lambda m, x, host: m.lstm(x[None], (host[None], host[None]))[0],
    "memcheck": lambda m, x, host: memcheck.softplus_attention(x[None], host[None], x[None]),
}
ALIKE: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a number": lambda m, x, host: x * host[0, 0] + torch.tensor(2.0),
    "indices": lambda m, x, host: x[host[0].long()],
    "a mask": lambda m, x, host: x[host[0] > -1],
    "copied": lambda m, x, host: (x * 1).copy_(host) + host.to(x.device) + host.type_as(x),
    "by itself": lambda m, x, host: x * float((host + host).sum()),
}
STEPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a backward": (MixedBackward.apply, {}),
    "an optimizer": (nn.Linear(4, 4), {"optimizer": MixedStep}),
    "a loss": (nn.Linear(4, 4), {"loss": lambda y: (y - torch.zeros(4, 4)).sum()}),
}


@pytest.mark.parametrize("name", [*MIXED, *STEPS])
def test_tensors_on_the_cpu_among_those_of_a_gpu_are_named(name: str) -> None:
    model, how = (WithHost(MIXED[name]), {}) if name in MIXED else STEPS[name]
    record = memcheck.predict_memory(model, torch.rand(4, 4, requires_grad=True), **A100, **how).record
    assert record.status == "skipped", record
    assert (record.reason or "").startswith("not predicted: ")
    assert "cpu" in (record.reason or "").lower()


def test_what_a_gpu_takes_from_the_cpu_is_predicted() -> None:
    for name, function in ALIKE.items():
        prediction = memcheck.predict_memory(WithHost(function), torch.rand(4, 4), **A100)
        assert prediction.record.status == "ok", (name, prediction.record.reason)


def test_what_is_saved_on_the_cpu_is_not_on_the_gpu() -> None:
    def on_the_cpu(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return x.sin() * x

    record = memcheck.predict_memory(on_the_cpu, of_ones(4), **A100).record
    assert (record.status, record.saved_bytes) == ("ok", 0)


@pytest.mark.parametrize(
    ("dtype", "attention", "scratch"),
    [
        (torch.float32, "aten::bmm", None),  # Efficient attention takes no groups.
        (torch.bfloat16, "aten::_scaled_dot_product_flash_attention", "dk of every head"),
    ],
)
def test_grouped_heads(dtype: torch.dtype, attention: str, scratch: str | None) -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    qkv = [torch.zeros(2, count, 24, 8, dtype=dtype, device="meta", requires_grad=True) for count in (4, 2, 2)]
    prediction = memcheck.predict_memory(grouped, *qkv, device="RTX-4090")
    assert prediction.trace is not None
    assert attention in prediction.trace.operators
    assert prediction.record.gradient_bytes == sum(x.nbytes for x in qkv)
    assert scratch is None or scratch in {allocation.name for allocation in prediction.trace.log.allocations}


@pytest.mark.parametrize(("rows", "is_known"), [(1000, True), (70_000, False)])
def test_layer_norm(rows: int, is_known: bool) -> None:
    x = torch.zeros(rows, 32, device="meta", requires_grad=True)
    unknown = memcheck.predict_memory(nn.LayerNorm(32), x, device="RTX-4090").unknown
    assert unknown == (() if is_known else ("the partial sums of layer_norm's backward",))


def test_dropout_keeps_a_mask_of_bytes() -> None:
    x = of_ones(8, 20, 48)
    assert memcheck.predict_memory(nn.Dropout(0.2), x, device="RTX-4090").record.saved_bytes == x.numel()


def test_clipping_takes_lists() -> None:
    prediction = memcheck.predict_memory(
        layers(), torch.randn(4, 32, 64), optimizer="adamw", clip_grad_norm=1.0, **A100
    )
    assert prediction.trace is not None
    assert {"aten::_foreach_norm", "aten::_foreach_mul_"} <= set(prediction.trace.operators)


def test_a_search_for_algorithms_empties_the_cache_once() -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))
    x = torch.empty(2, 8, 8, 8, device="meta")

    def emptied() -> int:
        trace = memcheck.predict_memory(model, x, optimizer="sgd", **A100).trace
        assert trace is not None
        return sum(allocation.name == EMPTY_CACHE for allocation in trace.log.allocations)

    assert emptied() == 0
    with torch.backends.cudnn.flags(benchmark=True):
        assert emptied() == 2  # A forward and a backward: the layers are equal, and so are all passes.


HALVES_TO_FLOAT: dict[str, tuple[str | None, Callable[[Tensor], Tensor]]] = {
    "softmax": (None, lambda x: functional.softmax(x, -1, dtype=torch.float32)),
    "a method": (None, lambda x: x.log_softmax(dim=-1, dtype=torch.float32)),
    "softmax under autocast": ("float16", lambda x: torch.softmax(x, -1)),
}


@pytest.mark.parametrize("name", HALVES_TO_FLOAT)
def test_cuda_widens_a_softmax_of_float16_as_it_computes_it(name: str) -> None:
    """at::softmax copies other dtypes first."""
    autocast, function = HALVES_TO_FLOAT[name]

    def forward_peak(dtype: torch.dtype) -> int:
        x = torch.randn(64, 1024, dtype=dtype).requires_grad_()
        lower = None if autocast is None else dtype
        found = memcheck.predict_memory(function, x, device="H200", autocast=lower, training=True)
        return found.record.forward_peak_bytes or 0

    assert forward_peak(torch.bfloat16) - forward_peak(torch.float16) == 64 * 1024 * 4


@pytest.mark.parametrize(
    ("shape", "dims", "sums", "counters"),
    [
        # Blocks of 32 x 4 threads, with 4 columns each: 24 groups of columns, and 1728 blocks at once.
        ((25216, 3072), [0], 4 * 3072 * 72 * 32 * 4, 4 * 24),
        # 6304 values of each thread: shared by as many blocks as leave 256 of them.
        ((16 * 25216, 768), [0], 4 * 768 * 394 * 32 * 4, 4 * 6),
        # Blocks of 32 x 16 threads, which reduce rows and images: 64 results, and 432 blocks at once.
        ((16, 64, 112, 112), [0, 2, 3], 4 * 64 * 7, 4 * 64),
        # A single result: blocks of 512 threads with 4 values each.
        ((2**20,), [0], 4 * 128, 4),
        # A block alone has no sums.
        ((1024, 1481), [0], 0, 0),
        ((4096, 300), [1], 0, 0),
    ],
)
def test_blocks_that_share_a_sum(shape: tuple[int, ...], dims: list[int], sums: int, counters: int) -> None:
    """By hand, from setReduceConfig in aten/src/ATen/native/cuda/Reduce.cuh."""
    x = torch.empty(shape, device="meta")
    found = memcheck.predict_memory(lambda x: x.sum(dims), x, backward=False, **A100)
    assert (found.record.workspace_bytes or 0) == sums + counters


def test_group_norm() -> None:
    x = torch.empty(4, 6, 5, 5, device="meta")
    found = memcheck.predict_memory(nn.GroupNorm(3, 6), x, backward=False, **A100)
    assert (found.record.workspace_bytes, found.unknown) == (2 * 4 * 6 * 4 + 2 * 4 * 3 * 4, ())  # And the statistics.


def test_sums_at_places_sort_them() -> None:
    def summed(table: Tensor, places: Tensor, values: Tensor) -> Tensor:
        return table.index_put((places,), values, accumulate=True)

    given = torch.empty(10, 4, device="meta"), torch.zeros(7, dtype=torch.int64), torch.empty(7, 4, device="meta")
    found = memcheck.predict_memory(summed, *given, backward=False, **A100)
    assert found.unknown == ("what sorting 7 places takes",)
    assert (found.record.workspace_bytes or 0) >= 4 * 8 * 7


def test_an_estimate_of_cudnns_workspace_is_named_as_one() -> None:
    found = memcheck.predict_memory(nn.Conv2d(16, 32, 3, padding=1), torch.empty(2, 16, 8, 8, device="meta"), **A100)
    assert not found.exact
    assert any("cuDNN" in words for words in found.unknown)
    depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
    assert memcheck.predict_memory(depthwise, torch.empty(2, 16, 8, 8, device="meta"), **A100).unknown == ()


def test_norms_of_a_list_have_a_partial_sum_for_each_chunk() -> None:
    parts = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in (10, 3 * 64 * 1024 + 1)]
    func = torch.ops.aten._foreach_norm.Scalar
    found = scratch_of(call_of(func, (parts, 2), {}, func(parts, 2), Target("cuda", architecture=(8, 0))))
    assert [part.bytes for part in found if not isinstance(part, str)] == [2 * 4 * 4]
