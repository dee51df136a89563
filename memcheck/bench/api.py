"""The public functions that predict: a case of the catalog, any model with its inputs, and the largest that fits; and
the one that writes a record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memcheck._extension import MISSING
from memcheck.bench import predict as catalog
from memcheck.core.arguments import (
    autocast_given,
    bytes_given,
    callable_given,
    optimizer_given,
    takes_inputs,
    takes_no_inputs_of,
    whole_number,
)
from memcheck.core.case import Case
from memcheck.core.devices import Device, device_given
from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.core.step import check_step, number_of_steps
from memcheck.predict.probed import Probe
from memcheck.predict.ranks import Ranks
from memcheck.predict.replay import Prediction, target_for
from memcheck.predict.torch_versions import running

if TYPE_CHECKING:
    from memcheck.bench.capacity import Search
    from memcheck.bench.probe import CpuProbe

# What predict_memory takes beside a case of the catalog, which says all else itself.
OF_CASES = (
    *("device", "limit_bytes", "dense_grad", "threads", "expandable_segments", "torch_version", "drops_workspaces"),
)


@takes_no_inputs_of(Case, OF_CASES)
@takes_inputs
def predict_memory(
    model: Callable[..., Any] | Case,
    *inputs: Any,
    kwargs: dict[str, Any] | None = None,
    device: Device | torch.device | str | None = None,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | str | None = None,
    loss: Callable[[Any], Any] | None = None,
    backward: bool = True,
    autocast: torch.dtype | str | None = None,
    steps: int | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    set_to_none: bool = True,
    keeps_outputs: bool = True,
    limit_bytes: int | str | None = None,
    dense_grad: bool = False,
    threads: int | None = None,
    expandable_segments: bool = False,
    torch_version: Sequence[int] | str | None = None,
    drops_workspaces: bool = True,
    probe: Probe | bool = True,
    ranks: Ranks | None = None,
    **keywords: Any,
) -> Prediction:
    """The record that measuring model(*inputs, **keywords) on the device would give. Nothing of its size is allocated.

    model: a module, a method of one, or another callable; or a case of the catalog, with the device as its only input.
        Model and inputs may be real or on meta. They are copied to meta and are not modified, and what the model stores
        elsewhere is put back.
    kwargs: further keyword inputs of the model, whatever their names. A keyword that the model has, too, must be given
        here; with kwargs={} such a keyword is the one described here.
    device: a memcheck.core.devices.Device, or a name for device_named there: "A100-40GB", "cpu", "40GiB".
    optimizer: makes the optimizer: lambda parameters: torch.optim.AdamW(parameters). Its step follows the backward.
        Or a name of the command line's: "adamw". It may also return another object with a step(), such as one that
        steps by a torch.amp.GradScaler, whose check finds all gradients finite.
    loss: makes the tensor that the backward starts from out of the model's output. By default it starts from
        output.loss, or output["loss"]; else from the only scalar that requires grad; else from every output that does.
        The record's backward_from says which it is.
    backward: with False the forward runs under no_grad.
    autocast: the dtype of a torch.autocast around model and loss, or its name, "bf16". A model may also enter
        torch.autocast itself.
    steps: 1 predicts the very first step, in which the optimizer makes its state; 2 and more a step in the steady
        state.
    accumulate: backwards of a step. The figures are those of the last one, in which the gradients of the others are
        alive.
    clip_grad_norm: the norm to which gradients are clipped before the optimizer's step.
    set_to_none: with False, zero_grad keeps the gradients, as zeros.
    keeps_outputs: what the model and the loss return stays alive until the step ends, as in `logits, loss = model(x)`.
        With False only the tensors that the backward starts from do, as in the Trainer of transformers.
    limit_bytes: a budget as in memcheck.measure_memory; on CUDA a per-process limit of segments. Or a text, "40GiB".
    dense_grad: the gradient of each output is a full tensor, instead of one element expanded.
    threads: of the CPU; torch's number by default. expandable_segments: as in PYTORCH_ALLOC_CONF.
    torch_version: the version to predict for, such as (2, 7) or "2.13"; that of this process by default. If either
        version is newer than the newest that predictions were compared with, no figure is exact.
    drops_workspaces: free cuBLAS's workspaces after each phase, as a measurement does. A program keeps those of both
        of its threads.
    probe: on the CPU, runs each operator without a rule once, alone, and stores what it allocates, in memory and in a
        table on disk (memcheck.bench.probe.table_path). With False these operators are unknown. A Probe replaces it.

    Running out of memory is a result: status "oom", the phase, the request and the bytes in use. Compiled models are
    "skipped", and so is a model that reads values which do not follow from inputs and parameters. Allocations that
    shapes do not determine are named in `unknown` and in the record's doubts. On CUDA the allocator of the process has
    cached nothing yet.

    ValueError: steps or accumulate is below 1, an optimizer or accumulate is given without a backward, or
    clip_grad_norm or set_to_none=False without an optimizer; or a name, a version or a number is none. TypeError: a
    keyword belongs to the model as well as to this function, or to neither; or a case is given a keyword besides
    device, limit_bytes, dense_grad, threads, expandable_segments, torch_version and drops_workspaces.
    """
    how: dict[str, Any] = {"limit_bytes": bytes_given("limit_bytes", limit_bytes), "dense_grad": dense_grad}
    how |= {"expandable_segments": expandable_segments, "drops_workspaces": drops_workspaces}
    if isinstance(model, Case):
        named = device if device is not None else (inputs[0] if inputs else "cpu")
        return catalog.predict_memory(model, named, threads=threads, torch_version=torch_version, **how)
    if not callable(model):
        raise ValueError(f"model must be callable, got {model!r}")
    if ranks is not None and not isinstance(ranks, Ranks):
        raise ValueError(f"ranks must be a memcheck.Ranks, got {ranks!r}")
    # Tensor parallelism leaves some parameters whole, and functions of lists take no DTensors among other tensors.
    one_by_one = {"foreach": False} if ranks is not None and ranks.kind == "tp" else {}
    makes = optimizer_given(optimizer, **one_by_one)
    if dense_grad and not backward:
        raise ValueError("dense_grad needs a backward, got backward=False")
    check_step(accumulate, backward, makes, clip_grad_norm, set_to_none, keeps_outputs)
    count = number_of_steps(steps, makes is not None)
    device = device_given(device)
    target = target_for(device, threads, torch_version)
    if not isinstance(probe, bool | None) and not hasattr(probe, "check"):
        raise ValueError(f"probe must be True, False or a Probe, got {probe!r}")
    from memcheck.predict.model import Call, predict_call

    ways = (
        callable_given("loss", loss),
        backward,
        makes,
        autocast_given(autocast),
        count,
        accumulate,
        clip_grad_norm,
        set_to_none,
        keeps_outputs,
    )
    call = Call(model, inputs, {**keywords, **(kwargs or {})}, *ways, ranks=ranks)
    as_here = target.threads == torch.get_num_threads() and target.torch_version == running()
    here = device.kind == "cpu" and as_here
    chosen = (default_probe() if here else None) if probe is True else probe or None
    return predict_call(call, device, target, probe=chosen, **how)


PROBES: dict[str, CpuProbe] = {}


def default_probe() -> CpuProbe:
    """The probe of this process, with the table on disk. Without the extension it only looks there."""
    from memcheck.bench.probe import CarriedProbe, CpuProbe, Table, environment, table_path

    path = table_path()
    if MISSING is not None:
        return PROBES.setdefault(str(path), CarriedProbe(Table(path), environment()))
    return PROBES.setdefault(str(path), CpuProbe(Table(path)))


def calibrate(model: Callable[..., Any], *inputs: Any, path: Path | str, **how: Any) -> Prediction:
    """Probes the operators of a call on this machine's CPU and adds them to the table at `path`.

    Another machine can use the table: MEMCHECK_PROBES=path. Other arguments and the result are those of predict_memory.

    TypeError: it is given a device, threads, a torch_version or a probe. Operators run on this machine, in as many
    threads as torch.set_num_threads says.
    """
    from memcheck.bench.probe import CpuProbe, Table

    for name in ("device", "threads", "torch_version", "probe"):
        if name in how:
            raise TypeError(f"calibrate takes no {name}: operators run here, in torch's threads and version")
    return predict_memory(model, *inputs, device="cpu", probe=CpuProbe(Table(Path(path))), **how)


@dataclass(frozen=True)
class Largest:
    """The largest size that fits, and the predictions for it and for the next size.

    size: 0 if nothing fits.
    at: the prediction at that size.
    beyond: the prediction at the next size, which does not fit; None if every size that was allowed fits.
    tried: the number of sizes that were predicted.
    """

    size: int
    step: int
    at: Prediction | None
    beyond: Prediction | None
    tried: int

    @classmethod
    def of(cls, search: Search, start: int) -> Largest:
        """What the search finds if it begins at that size."""
        size, found = search.largest(start), search.found
        return cls(size, search.step, found.get(size), found.get(size + search.step), len(found))


def largest(
    make_inputs: Callable[[int], Any],
    model: Callable[..., Any],
    device: Device | torch.device | str,
    *,
    step: int = 1,
    most: int = 2**30,
    start: int = 256,
    limit_bytes: int | str | None = None,
    **how: Any,
) -> Largest:
    """The largest size n at which model(*make_inputs(n)) fits the device. Other arguments are those of predict_memory.

    make_inputs: returns the inputs of a size: a tensor, a tuple of arguments, or a dict of keyword arguments. It is
        called with meta as the default device, so that factories allocate nothing.
    step: sizes are its multiples. most: the largest size that is tried. start: the first size that is tried.

    UsageError: the device has no limit. ValueError: step, most or start is below 1, or most is below step.
    """
    device, limit_bytes = device_given(device), bytes_given("limit_bytes", limit_bytes)
    step, start = whole_number("step", step), whole_number("start", start)
    most = whole_number("most", most, least=step)
    if isinstance(model, Case):
        raise TypeError("largest takes a model; memcheck.bench.capacity.find_capacity and memcheck fit take a case")
    if device.usable_bytes is None and limit_bytes is None:
        raise UsageError(f"{device.name} has no limit; set one, such as limit_bytes='16GiB'")

    def predict(size: int) -> Prediction:
        with torch.device("meta"):
            made = make_inputs(size)
        keywords = {**(how.get("kwargs") or {}), **made} if isinstance(made, dict) else how.get("kwargs")
        inputs = () if isinstance(made, dict) else tuple(made) if isinstance(made, tuple | list) else (made,)
        given = {**how, "device": device, "limit_bytes": limit_bytes, "kwargs": keywords}
        return predict_memory(model, *inputs, **given)

    from memcheck.bench.capacity import Search
    from memcheck.predict.interpolate import fits_by_interpolation

    def guess(predicted: dict[int, Prediction], size: int) -> bool | None:
        return fits_by_interpolation(predicted, size, limit_bytes, how.get("expandable_segments", False))

    return Largest.of(Search(predict, step, most, guess), start)


def write_record(folder: Path | str, record: Record, *, name: str) -> Path:
    """Writes the record to folder/records.jsonl as the case `name`, for memcheck compare, report and plot.

    A measured record replaces the measured one of that name, and a predicted record the predicted one; all other lines
    stay as they are. Processes may write to a folder at the same time. The folder is created if needed.

    Returns the path of the file. TypeError: it is no record; that of a prediction is prediction.record.
    ValueError: the name is empty or longer than a line.
    """
    if not isinstance(record, Record):
        raise TypeError(f"write_record takes a Record, such as prediction.record, got {type(record).__name__}")
    if len(name.splitlines()) != 1 or not name.strip():
        raise ValueError(f"name must be one line of text, got {name!r}")
    from memcheck.bench.sweep.store import Store

    return Store(folder).replace(f"{record.source}: {name}", dataclasses.replace(record, operator=name))
