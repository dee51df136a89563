"""Tables of what 16-bit arithmetic does: long sums, a network's stages under autocast, and gradient underflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memcheck.report.rows import short_dtype as short
from memcheck.report.tables import Cell, Column, Table

if TYPE_CHECKING:
    from memcheck.studies.accumulation import Accumulation, LibrarySum, Underflow
    from memcheck.studies.autocast_stages import Stage, StagesRun

DTYPE_COLUMNS = {
    "input_dtype": "input",
    "output_dtype": "output",
    "output_gradient_dtype": "output gradient",
    "parameter_gradient_dtype": "param. gradient",
}
NETWORK = (
    "x in fp32 -> fc1 -> relu -> ln -> qkv; sdpa and memcheck's linear_attention read its q, k, v side by side; add -> "
    "fc2, the logits -> loss, cross entropy. Kept: for backward, beside x, targets and parameters."
)


def sum_name(it: Accumulation | LibrarySum) -> str:
    return f"{it.steps} x {it.value:g}"


def accumulation_table(accumulations: Sequence[Accumulation]) -> Table:
    """One row per combination of dtypes, with both sums side by side."""
    names = list(dict.fromkeys(map(sum_name, accumulations)))
    columns = [Column("accumulator_dtype", "sum s"), Column("addend_dtype", "addend x")]
    for name in names:
        columns += [
            Column(f"{name}: x", name, "x is", ".8f"),
            Column(f"{name}: sum", name, "s", ".6f"),
            Column(f"{name}: error", name, "off by", ".6f"),
            Column(f"{name}: relative_error", name, "relative", ".4%"),
            Column(f"{name}: stopped_after", name, "stops after"),
        ]
    rows: dict[tuple[str, str], list[Cell]] = {}
    for it in accumulations:
        kinds = str(short(it.accumulator_dtype)), str(short(it.addend_dtype))
        key = kinds[0], f"{kinds[1]} -> {kinds[0]}" if it.converted else kinds[1]
        row = rows.setdefault(key, list(key))
        row += [it.addend, it.sum, it.absolute_error, it.relative_error, it.stopped_after]
    title = "s = 0, then s += x, one after the other: both sums should be 10"
    return Table("accumulation", title, columns, list(rows.values()), list(accumulation_words(accumulations)))


def accumulation_words(accumulations: Sequence[Accumulation]) -> Iterator[str]:
    for it in accumulations:
        if it.accumulator_dtype != "float32":
            yield spacing_words(it)
    mixed = [it for it in accumulations if it.accumulator_dtype == "float32" != it.addend_dtype]
    if mixed and all(it.sum == it.addend * it.steps for it in mixed):
        yield (
            "s in fp32, x in 16 bits: s is the exact sum of what x is; all of the error is that of x. "
            "Converting x first changes nothing: torch adds in the wider of the two dtypes."
        )


def spacing_words(it: Accumulation) -> str:
    """Explains the error of a narrow accumulator: the distance between its numbers compared with the addend."""
    run = f"{short(it.accumulator_dtype)}, {sum_name(it)}"
    if it.stopped_after is None:
        return (
            f"{run}: does not stop, but its numbers near {it.sum:.7g} are {it.spacing:.7g} apart, and each step "
            f"adds a multiple of that in place of x = {it.addend:.7g}."
        )
    return (
        f"{run}: stops at {it.sum:.7g}, where the next number is {it.spacing:.7g} further. x = {it.addend:.7g} "
        f"is less than half of that: {it.sum:.7g} + x is {it.sum:.7g} again."
    )


def library_table(sums: Sequence[LibrarySum], accumulations: Sequence[Accumulation]) -> Table:
    """One row per library call, after the loop in the dtype of x."""
    groups = list(dict.fromkeys((sum_name(it), it.addend_dtype) for it in sums))
    loop = {(sum_name(it), it.addend_dtype): it.sum for it in accumulations if it.accumulator_dtype == it.addend_dtype}
    rows: list[list[Cell]] = [["s += x, in a loop", "as x", *(loop.get(group) for group in groups)]]
    for way in dict.fromkeys(it.way for it in sums):
        by_group = {(sum_name(it), it.addend_dtype): it for it in sums if it.way == way}
        rows.append([way, result_words(list(by_group.values())), *(by_group[group].sum for group in groups)])
    columns = [
        Column("way", "the same sum by"),
        Column("result_dtype", "result"),
        *(Column(f"{name}: {dtype}", name, f"{short(dtype)} x", ".6f") for name, dtype in groups),
    ]
    title = "16-bit x by one call instead of a loop"
    return Table("one_call", title, columns, rows, list(library_words(sums, loop)))


def result_words(sums: Sequence[LibrarySum]) -> str:
    if all(it.result_dtype == it.addend_dtype for it in sums):
        return "as x"
    return ", ".join(dict.fromkeys(str(short(it.result_dtype)) for it in sums))


def library_words(sums: Sequence[LibrarySum], loop: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """Explains the library sums. loop: the loop's result, by sum_name and the dtype of x."""
    ways = list(dict.fromkeys(it.way for it in sums))
    inexact = {it.way for it in sums if not it.rounded_once}
    exact = [way for way in ways if way not in inexact]
    if exact:
        yield (
            f"The exact sum of what x is, rounded once, to the dtype of the result: {', '.join(exact)}. "
            "A state that goes from token to token in 16 bits is a loop; memcheck's states are in fp32."
        )
    for way in ways:
        of_way = [it for it in sums if it.way == way]
        if way in inexact and all(it.sum == loop.get((sum_name(it), it.addend_dtype)) for it in of_way):
            result = result_words(of_way)
            though = "" if result == "as x" else f", though the parameter and its gradient are in {result}"
            yield f"The sums of the loop, from torch itself: {way}. It adds in the dtype of x{though}."
        elif way in inexact:
            yield f"Neither: {way}."


def stages_table(plain: StagesRun, cast: StagesRun) -> Table:
    """One row per stage, without and with autocast."""
    columns = [Column("stage", "stage"), Column("parameter_dtype", "parameters")]
    for key, title in (*DTYPE_COLUMNS.items(), ("kept_bytes", "kept, B")):
        form = "," if key == "kept_bytes" else ""
        columns += [Column(f"{key}_{autocast}", title, autocast, form) for autocast in ("off", "on")]
    columns.append(Column("kept_dtypes_on", "kept, B", "on: dtypes"))
    rows: list[list[Cell]] = []
    for off, on in zip(plain.stages, cast.stages, strict=True):
        dtypes = [short(getattr(stage, key)) for key in DTYPE_COLUMNS for stage in (off, on)]
        kept = ", ".join(str(short(dtype)) for dtype in on.kept_dtypes) or None
        rows.append([off.name, short(off.parameter_dtype), *dtypes, off.kept_bytes, on.kept_bytes, kept])
    rows.append(["all", *[None] * (len(columns) - 4), plain.saved_bytes, cast.saved_bytes, None])
    dtype = str(short(cast.autocast_dtype))
    title = f"The stages of a small network, on {cast.device}, with autocast off and on (to {dtype})"
    return Table("stages", title, columns, rows, [NETWORK, *observations(plain, cast)])


def observations(plain: StagesRun, cast: StagesRun) -> Iterator[str]:
    """Noteworthy observations in these two runs, one sentence each."""
    dtype = str(short(cast.autocast_dtype))
    stages = {stage.name: stage for stage in cast.stages}
    yield norm_words(stages["ln"])
    yield loss_words(stages["loss"])
    yield from gradient_words(cast.stages, dtype)
    yield from copy_words(cast, dtype)
    yield kept_words(plain, cast)


def norm_words(ln: Stage) -> str:
    made = dict.fromkeys(str(short(kept.dtype)) for kept in ln.kept if kept.what == f"made by {ln.name}")
    return (
        f"ln: {short(ln.input_dtype)} in, {short(ln.output_dtype)} out, with parameters in "
        f"{short(ln.parameter_dtype)}; its mean and 1/std are kept in {', '.join(made) or 'no dtype'}."
    )


def loss_words(loss: Stage) -> str:
    words = f"loss: {short(loss.output_dtype)}, of logits that are {short(loss.input_dtype)}"
    copies = [cast for cast in loss.casts if cast.dtype == loss.input_dtype]
    return f"{words}, copied to {short(copies[0].to_dtype)} first ({copies[0].bytes:,} B)." if copies else f"{words}."


def gradient_words(stages: Sequence[Stage], dtype: str) -> Iterator[str]:
    """Describes the parameters' gradients of the stages that computed with copies of their parameters."""
    copied = [stage for stage in stages if any(cast.of_parameter for cast in stage.casts) and stage.rounded_gradient]
    kinds = ", ".join(dict.fromkeys(str(short(it.parameter_gradient_dtype)) for it in stages if it.parameter_dtype))
    if copied:
        yield (
            f"Gradients of parameters are {kinds}, but every number in those of "
            f"{', '.join(stage.name for stage in copied)} fits {dtype}: they were computed in {dtype} and copied."
        )


def copy_words(run: StagesRun, dtype: str) -> Iterator[str]:
    copies = run.parameter_copies
    held = [copy for copy in copies if copy.name in {kept.what for stage in run.stages for kept in stage.kept}]
    size, held_size = (sum(copy.bytes for copy in some) for some in (copies, held))
    if copies:
        yield (
            f"Autocast made {dtype} copies of {len(copies)} parameters, {size:,} B beside the "
            f"{run.parameter_bytes:,} B of all parameters. Autograd keeps {held_size:,} B of them until the backward "
            f"({', '.join(copy.what for copy in held) or 'none'}); the cache held the others until the region ended, "
            f"{run.freed_bytes:,} B."
        )


def kept_words(plain: StagesRun, cast: StagesRun) -> str:
    copies = {copy.name for copy in cast.parameter_copies}
    weights = sum(kept.bytes for stage in cast.stages for kept in stage.kept if kept.what in copies)
    return (
        f"Kept for backward: {plain.saved_bytes:,} B without autocast, {cast.saved_bytes:,} B with it, "
        f"{cast.saved_bytes - weights:,} B without the copies of weights, which do not grow with the batch."
    )


def kept_table(run: StagesRun) -> Table:
    """Lists the tensors that each stage keeps, unless an earlier row or the caller holds their storage."""
    columns = [Column("stage", "stage"), Column("what", "keeps"), Column("dtype", "dtype"), Column("shape", "shape")]
    columns.append(Column("bytes", "B", format=","))
    rows: list[list[Cell]] = [
        [stage.name, kept.what, short(kept.dtype), f"({','.join(map(str, kept.shape))})", kept.bytes]
        for stage in run.stages
        for kept in stage.kept
        if kept.bytes
    ]
    title = f"What is kept for backward with autocast on (to {short(run.autocast_dtype)})"
    return Table("kept", title, columns, rows, list(sharing_words(run)))


def sharing_words(run: StagesRun) -> Iterator[str]:
    yield "Bytes are those of whole storages, also if a tensor is a part of one: q, k and v lie in the output of qkv."
    for stage in run.stages:
        shared = dict.fromkeys(kept.what for kept in stage.kept)
        if shared and not stage.kept_bytes:
            yield f"{stage.name} keeps {', '.join(shared)}, which is held already."


def underflow_table(underflows: Sequence[Underflow]) -> Table:
    columns = [
        Column("dtype", "y", read=lambda it: short(it.dtype)),
        Column("scale", "loss times", format=",.0f"),
        Column("output_gradient", "gradient of y", format=".4g"),
        Column("parameter_gradient", "gradient of w", format=".4g"),
        Column("relative_error", "off by", format=".2%"),
    ]
    title = "y = w x under autocast, loss = 1e-8 y, w in fp32: both gradients should be 1e-8, times the scale for y"
    return Table.of("underflow", title, columns, underflows, underflow_words(underflows))


def underflow_words(underflows: Sequence[Underflow]) -> Iterator[str]:
    lost = [it for it in underflows if it.output_gradient == 0]
    saved = [it for it in underflows if it.scale != 1 and it.output_gradient != 0]
    for it in lost:
        yield (
            f"{short(it.dtype)} has no number between 0 and 5.96e-08 (2^-24): the gradient of y flushes to 0, and that "
            "of w with it, though w is fp32. bf16 has fp32's exponents."
        )
    for it in saved:
        yield (
            f"torch.amp.GradScaler multiplies the loss by {it.scale:,.0f} and divides the gradients of parameters by "
            f"it before the step: {short(it.dtype)} needs it, bf16 does not."
        )
