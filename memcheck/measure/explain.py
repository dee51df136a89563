"""Details of a record: the tensors alive at each peak, and the saved tensors, counted by two independent methods."""

from __future__ import annotations

from memcheck.core.record import Doubt, Record
from memcheck.core.timeline import Timeline
from memcheck.core.units import format_bytes, highest
from memcheck.measure.recorders import NOWHERE
from memcheck.measure.run import MeasuredCall, MeasuredRun
from memcheck.measure.timeline import recorded

# Rows per phase; the rest is summed in one row.
MOST_ROWS = 20
# Numbers of over_time per phase.
MOST_STEPS = 200


def explain(record: Record, call: MeasuredCall, limit_bytes: int | None) -> None:
    """Fills alive_at_peak, over_time and saved_tensors, in two passes, and adds a doubt if the passes disagree."""
    timeline, _ = recorded(call, limit_bytes)
    record.alive_at_peak = [row for phase in timeline.peak for row in timeline.alive_at_peak(phase, MOST_ROWS)]
    phases = {name: timeline.alive[first : last + 1] for name, first, last in timeline.phases}
    record.over_time = {name: [sums[step] for step in highest(sums, MOST_STEPS)] for name, sums in phases.items()}
    record.doubts += _other_peaks(record, timeline)
    try:
        timeline, run = recorded(call, limit_bytes, hooks=True)
    except RuntimeError as error:  # For example, torch.func.grad refuses hooks.
        record.doubts += (Doubt(f"saved_tensors are not known: {str(error).partition(chr(10))[0]}"),)
        return
    if run.saved_by_hooks is not None:
        allocators = {block.address: block.allocator for block in timeline.kept()}
        record.saved_tensors = [
            {"shape": kept.shape, "dtype": kept.dtype, "bytes": kept.bytes, "name": allocators.get(kept.address)}
            for kept in run.saved_tensors
        ]
        record.doubts += _other_saved_bytes(record, timeline, run)


def _other_peaks(record: Record, timeline: Timeline) -> tuple[Doubt, ...]:
    """A doubt for each phase whose peak differs between two passes."""
    peaks = {phase: (getattr(record, f"{phase}_peak_bytes"), timeline.alive[at]) for phase, at in timeline.peak.items()}
    return tuple(
        Doubt(
            f"{phase}_peak_bytes is {measured:,} in one pass and {again:,} in the next, "
            "which alive_at_peak is of: what is called allocates differently each time",
            fields=(f"{phase}_peak_bytes",),
        )
        for phase, (measured, again) in peaks.items()
        if measured not in (None, again)
    )


def _other_saved_bytes(record: Record, timeline: Timeline, run: MeasuredRun) -> tuple[Doubt, ...]:
    """A doubt if the allocator and autograd's hooks disagree, with the reasons that are known."""
    if record.saved_bytes in (None, run.saved_by_hooks):
        return ()
    kept, reasons = timeline.kept(), []
    seen = {tensor.address for tensor in run.saved_tensors}
    if unseen := [block for block in kept if block.address not in seen]:
        names = {NOWHERE: "no operator (a Python number, say)"}
        blocks = [f"{format_bytes(it.bytes)} of {names.get(it.allocator, it.allocator)}" for it in unseen[:3]]
        more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
        reasons.append(f"the hooks did not see {', '.join(blocks)}{more}")
    left = {block.address for block in kept}
    if elsewhere := sum(tensor.bytes for tensor in run.saved_tensors if tensor.address not in left):
        reasons.append(
            f"they saw {format_bytes(elsewhere)} that was there before, or is gone by the end of the forward"
        )
    doubt = f"saved_bytes is {record.saved_bytes:,} by the allocator and {run.saved_by_hooks:,} by autograd's hooks"
    return (Doubt(": ".join([doubt, "; ".join(reasons)]) if reasons else doubt, fields=("saved_bytes",)),)
