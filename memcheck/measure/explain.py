"""Details of a record: the tensors alive at each peak, and the saved tensors, counted by two independent methods."""

from __future__ import annotations

from memcheck.core.record import Record
from memcheck.core.units import format_bytes
from memcheck.measure.allocation_events import NOWHERE
from memcheck.measure.run import Run, Subject
from memcheck.measure.timeline import Block, Timeline, recorded

# Rows per phase; the rest is summed in one row.
MOST_ROWS = 20


def explain(record: Record, subject: Subject, limit_bytes: int | None, dense_grad: bool) -> None:
    """Fills alive_at_peak and saved_tensors, in one pass each, and adds a doubt if the passes disagree."""
    timeline, _ = recorded(subject, limit_bytes, dense_grad)
    record.alive_at_peak = [row for phase in timeline.peak for row in timeline.alive_at_peak(phase, MOST_ROWS)]
    record.doubts += _other_peaks(record, timeline)
    try:
        timeline, run = recorded(subject, limit_bytes, dense_grad, hooks=True)
    except RuntimeError as error:  # For example, torch.func.grad refuses hooks.
        record.doubts += (f"saved_tensors are not known: {str(error).partition(chr(10))[0]}",)
        return
    if run.saved_by_hooks is not None:
        allocators = {block.address: block.allocator for block in timeline.kept()}
        record.saved_tensors = [
            {"shape": kept.shape, "dtype": kept.dtype, "bytes": kept.bytes, "name": allocators.get(kept.address)}
            for kept in run.saved_tensors
        ]
        record.doubts += _other_saved_bytes(record, timeline, run)


def _other_peaks(record: Record, timeline: Timeline) -> tuple[str, ...]:
    found = []
    for phase, step in timeline.peak.items():
        measured = getattr(record, f"{phase}_peak_bytes")
        if measured is not None and measured != timeline.alive[step]:
            found.append(
                f"{phase}_peak_bytes is {measured:,} in one pass and {timeline.alive[step]:,} in the next, "
                "which alive_at_peak is of: what is called allocates differently each time"
            )
    return tuple(found)


def _other_saved_bytes(record: Record, timeline: Timeline, run: Run) -> tuple[str, ...]:
    if run.saved_by_hooks == record.saved_bytes:
        return ()
    reasons = []
    seen = {kept.address for kept in run.saved_tensors}
    unseen = [block for block in timeline.kept() if block.address not in seen]
    if unseen:
        blocks = ", ".join(f"{format_bytes(block.bytes)} of {_whose(block)}" for block in unseen[:3])
        more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
        reasons.append(f"the hooks did not see {blocks}{more}")
    left = {block.address for block in timeline.kept()}
    elsewhere = sum(kept.bytes for kept in run.saved_tensors if kept.address not in left)
    if elsewhere:
        reasons.append(
            f"they saw {format_bytes(elsewhere)} that was there before, or is gone by the end of the forward"
        )
    said = f"saved_bytes is {record.saved_bytes:,} by the allocator and {run.saved_by_hooks:,} by autograd's hooks"
    return (f"{said}: {'; '.join(reasons)}" if reasons else said,)


def _whose(block: Block) -> str:
    return "no operator (a Python number, say)" if block.allocator == NOWHERE else block.allocator
