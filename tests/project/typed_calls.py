"""Calls of the public API as users write them, and the types that mypy must infer. test_typing.py checks them."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import assert_type

import memcheck
import memcheck.compat
from memcheck import CompressedAttentionState, CompressedAttentionWindowState, MemoryTracker, Ranks, Results, nn
from memcheck.bench.capacity import largest_case
from memcheck.bench.case import Case
from memcheck.bench.catalog import make_case
from memcheck.compat import softplus_attention as closed_module
from memcheck.core.devices import Device, device_named
from memcheck.core.prediction import Largest, Prediction
from memcheck.core.record import Record
from memcheck.core.timeline import Timeline
from memcheck.core.trace import Peak
from memcheck.integrations.transformers import StateCache, register
from memcheck.measure.timeline import record_timeline
from memcheck.ops import gradcheck
from memcheck.report.comparison import Comparison

Pair = tuple[Tensor, Tensor]
Sums = tuple[Tensor, ...]  # softplus attention's, with rests or without
LinearSums = tuple[Tensor | Any, ...]  # the second may be None
BlocksOrWindow = CompressedAttentionState | CompressedAttentionWindowState


def operators(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
    assert_type(memcheck.combinator(q, k, low_memory=True), Tensor)
    assert_type(memcheck.linear_r(q, k), Tensor)
    assert_type(memcheck.linear_l(q, k), Tensor)
    assert_type(memcheck.softplus_attention(q, k, v, causal=False), Tensor)
    assert_type(memcheck.softplus_attention(q, k, v, cu_seqlens=cu_seqlens), Tensor)
    assert_type(memcheck.softplus_attention(q, k, v, return_state=True), tuple[Tensor, Sums])
    y, (z, a) = memcheck.softplus_attention(q, k, v, return_state=True)
    assert_type(memcheck.softplus_attention(q, k, v, initial_state=(z, a)), Tensor)
    memcheck.softplus_attention(q, k, v, casual=False)  # type: ignore[call-overload]
    assert_type(memcheck.linear_attention(q, k, v, causal=True, lengths=cu_seqlens, padding="left"), Tensor)
    y, state = memcheck.linear_attention(q, k, v, causal=True, return_state=True)
    assert_type(state, LinearSums)
    assert_type(memcheck.linear_attention(q, k, v, causal=True, initial_state=state), Tensor)
    retention = memcheck.linear_attention(q, k, v, causal=True, normalize=False, decay=y, return_state=True)
    assert_type(retention, tuple[Tensor, LinearSums])
    assert_type(memcheck.compressed_attention(q, k, v, factor=8, sink=y), Tensor)
    assert_type(memcheck.compressed_attention_pooled(q, k, v, factor=8, kv_len=64), Tensor)
    y, lse = memcheck.compressed_attention_pooled(q, k, v, factor=8, kv_len=64, return_lse=True)
    assert_type(memcheck.merge_attention([y, y], [lse, lse]), Pair)
    assert_type(memcheck.compressed_attention(q, k, v, factor=8, return_lse=True), Pair)
    y, lse, continued = memcheck.compressed_attention(q, k, v, factor=8, return_lse=True, return_state=True)
    assert_type(memcheck.compressed_attention(q, k, v, factor=8, lengths=cu_seqlens, initial_state=continued), Tensor)


def decoding(q: Tensor, k: Tensor, v: Tensor) -> None:
    y, sums = memcheck.softplus_attention_step(q, k, v)
    assert_type(y, Tensor)
    assert_type(memcheck.softplus_attention_step(q, k, v, sums), tuple[Tensor, Sums])
    y, rests = memcheck.softplus_attention_step(q, k, v, sums, state_rest=True)
    assert_type(memcheck.softplus_attention_step(q, k, v, rests), tuple[Tensor, Sums])
    y, matrices = memcheck.linear_attention_step(q, k, v, feature_map="identity")
    assert_type(memcheck.linear_attention_step(q, k, v, matrices, log_decay=y), tuple[Tensor, LinearSums])
    blocks = memcheck.compressed_attention_state(k, v, factor=8)
    assert_type(blocks, BlocksOrWindow)
    assert_type(memcheck.compressed_attention_step(q, k, v, blocks, factor=8), tuple[Tensor, BlocksOrWindow])
    y, window = memcheck.compressed_attention(q, k, v, factor=8, window=4, return_state=True)
    assert_type(memcheck.compressed_attention(q, k, v, factor=8, window=4, initial_state=window), Tensor)


def modules(x: Tensor, cu_seqlens: Tensor) -> None:
    softplus = nn.SoftplusSelfAttention(512, nn.heuristic_core_dim(512), dtype=torch.bfloat16)
    assert_type(softplus(x), Tensor)
    y, sums = softplus(x, return_state=True)
    assert_type(y, Tensor)
    assert_type(softplus.step(x, sums)[0], Tensor)
    linear = nn.LinearSelfAttention(512, 8, kv_heads=2, decay="retnet", device="cuda")
    assert_type(linear(x, cu_seqlens=cu_seqlens), Tensor)
    y, state = linear.step(x)
    assert_type(linear(x, initial_state=state, return_state=True)[0], Tensor)
    compressed = nn.CompressedSelfAttention(512, 8, factor=16, compression="convolution")
    assert_type(compressed(x, lengths=cu_seqlens, padding="left"), Tensor)
    y, blocks = compressed(x, return_state=True)
    assert_type(y, Tensor)
    assert_type(compressed.step(x, blocks)[0], Tensor)
    y, several = compressed(x, cu_seqlens=cu_seqlens, return_state=True)
    assert_type(compressed(x, cu_seqlens=cu_seqlens, initial_state=several), Tensor)
    assert_type(nn.Combinator(512, low_memory=True)(x), Tensor)
    assert_type(nn.QueryProjection(512, 256)(x) @ nn.KeyProjection(512, 256)(x), Tensor)
    assert_type(nn.OutProjection(512, 256)(nn.ValueProjection(512, 256)(x)), Tensor)
    decoder = nn.Decoder(50257, 512, 1408, layers=4, heads=8, context=1024, attention="linear")
    assert_type(decoder(x, cu_seqlens=cu_seqlens), Tensor)
    assert_type(closed_module.Combinator(512)(x), Tensor)
    assert_type(closed_module.attention_operator(x, x, x), Tensor)
    assert_type(memcheck.compat.install(), list[str])


def over_processes(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert_type(memcheck.distributed.softplus_attention(q, k, v, same_bits=False), Tensor)
    assert_type(memcheck.distributed.softplus_attention(q, k, v, return_state=True), tuple[Tensor, Sums])
    assert_type(memcheck.distributed.linear_attention(q, k, v, causal=True), Tensor)
    assert_type(memcheck.distributed.linear_attention(q, k, v, causal=True, return_state=True)[0], Tensor)
    assert_type(memcheck.distributed.compressed_attention(q, k, v, factor=8), Tensor)
    assert_type(memcheck.distributed.compressed_attention(q, k, v, factor=8, return_lse=True), Pair)


def measuring(model: torch.nn.Module, x: Tensor) -> None:
    record = memcheck.measure_memory(model, x, optimizer=torch.optim.AdamW, loss=lambda y: y.mean(), details=True)
    assert_type(record, Record)
    assert_type(record.forward_peak_bytes, int | None)
    with memcheck.track(model, x, memory_limit=2**30) as memory:
        memory.hold(model(x))
    assert_type(memory, MemoryTracker)
    assert_type(memory.peak_bytes + memory.by_device["cpu"].peak_bytes, int)
    assert_type([kept.bytes for kept in memory.saved_tensors], list[int])
    assert_type(record_timeline(model, x), Timeline)
    assert_type(memcheck.write_record("results", record, name="mine"), Path)
    assert_type(Record.from_json(record.to_json()), Record)


def predicting(model: torch.nn.Module, x: Tensor) -> None:
    prediction = memcheck.predict_memory(
        model, x, device="RTX-4090", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3)
    )
    assert_type(prediction, Prediction)
    assert_type(prediction.fits, bool | None)
    assert_type(prediction.peak, Peak | None)
    assert_type(prediction.record, Record)
    assert_type(memcheck.predict_memory(model, x, ranks=Ranks(fsdp=8), torch_version=(2, 13)), Prediction)
    assert_type(memcheck.predict_memory(model, x, kwargs={"steps": 5}, optimizer="adamw", autocast="bf16"), Prediction)
    assert_type(memcheck.predict_memory(model, x, probes="probes.jsonl"), Prediction)
    found = memcheck.largest(lambda n: torch.empty(n, 512), model, "A100-40GB", optimizer=torch.optim.AdamW)
    assert_type(found, Largest)
    assert_type(found.at, Prediction | None)
    case, device = make_case("softplus", heads=8, core_dim=None, factor=None, dim=512), device_named("40GiB")
    assert_type(case, Case)
    assert_type(memcheck.predict_memory(case, device), Prediction)
    assert_type(device, Device)
    assert_type(largest_case(case, "seq_len", memcheck.Place(device)), Largest)


def results(record: Record) -> None:
    found = memcheck.profile(["naive", "softplus"], seq_len=[64, 128], dim=64)
    assert_type(found, Results)
    assert_type(memcheck.sweep(preset="quick", output="results/"), Results)
    assert_type(memcheck.load("results/", Path("more")) + found, Results)
    assert_type(Results({"mine": record}).select(operator="mine")[:2], Results)
    assert_type(found[0], Record)
    assert_type([one.operator for one in found], list[str | None])
    assert_type(found.plot("memory"), Figure)
    assert_type(found.to_pandas(), pd.DataFrame)
    assert_type(found.compare("results/"), Comparison)
    assert_type(found.save("results"), Path)
    assert_type(str(found.summary()) + str(found.table("scaling")), str)


def other_libraries(program: torch.export.ExportedProgram) -> None:
    program.run_decompositions(memcheck.decompositions())
    register()
    assert_type(StateCache(), StateCache)
    assert_type(gradcheck.check(gradcheck.configurations_of(["combinator"])[0]).ok, bool)


@pytest.mark.memcheck_limit("24 MiB", device="cpu")
def test_of_a_user(memcheck_memory: MemoryTracker) -> None:
    assert_type(memcheck_memory.peak_bytes, int)
