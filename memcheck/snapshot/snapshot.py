"""Snapshots of torch's CUDA allocator: read, analysed and shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcheck.allocator import AllocatorSettings
from memcheck.core import html, units
from memcheck.core.devices import Device
from memcheck.core.errors import UsageError, unknown_name
from memcheck.core.options import named
from memcheck.core.snapshot_record import SnapshotRecord
from memcheck.core.step import Place
from memcheck.report import alive, snapshots
from memcheck.report.plots import style, timeline
from memcheck.report.tables import Sentences, Tables, to_html
from memcheck.snapshot import analysis, files
from memcheck.snapshot.recording import ForeignDataError, recordings_of
from memcheck.snapshot.what_if import what_would_fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Snapshot:
    """What a snapshot of torch's CUDA allocator says. As the last line of a cell it shows the answer, the picture and
    the tables.

    Examples:
        >>> snapshot = memcheck.Snapshot.load("snapshot.pickle")
        >>> snapshot.record.peak.allocated_bytes
        >>> memcheck.Snapshot.load("snapshot.pickle", device="L40S").table("what-if")

    Args:
        records: a SnapshotRecord for each device that has events or segments, the one with the most reserved memory
            first.
    """

    def __init__(self, records: Sequence[SnapshotRecord]) -> None:
        if isinstance(records, str | Path):
            raise TypeError(f"a Snapshot is made of records; memcheck.Snapshot.load({str(records)!r}) reads a file")
        self.records = sorted(records, key=lambda record: -record.peak_reserved_bytes)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        settings: str | Sequence[str] | None = None,
        device: Device | str | None = None,
        memory_limit: int | str | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Snapshot:
        """Reads a file of torch.cuda.memory._dump_snapshot: a pickle, of which only plain data is read so that no code
        of it runs, or the same as JSON; either may be compressed by gzip.

        Args:
            path: the file.
            settings: what to replay the recorded requests under, as in PYTORCH_ALLOC_CONF, beside the recorded
                settings: a text such as "expandable_segments:True,max_split_size_mb:256", or several; default: a few
                usual ones.
            device: the GPU to replay them on, such as "L40S" or "40GiB".
            memory_limit: what the process may reserve there, in bytes or as "78GiB". Default of both: what it could
                reserve if memory ran out, else no limit.
            progress: is called with the bytes of the file that were read since its last call.

        Raises:
            UsageError: the file cannot be read, is torn or no snapshot; a setting or a device is unknown.
        """
        path = Path(path)
        place = Place(device, memory_limit)
        limit = None if device is None and memory_limit is None else place.room_bytes
        texts = [settings] if isinstance(settings, str) else settings
        for text in texts or ():
            try:
                AllocatorSettings.parse(text)
            except ValueError as error:
                raise UsageError(f"{named('settings')} {text}: {error} (write it as in PYTORCH_ALLOC_CONF)") from None
        what_if = partial(what_would_fit, settings=texts, limit_bytes=limit)
        with files.uncollected():
            try:
                recordings = recordings_of(files.read_data(path, progress))
            except ForeignDataError as error:
                raise UsageError(f"{path} is no memory snapshot: {error}") from None
            if not recordings:
                raise UsageError(f"{path} has no segments and no events of any device")
            records = [analysis.analyse(recording, str(path), what_if) for recording in recordings]
        gpu = None if device is None else (place.for_device.name, place.for_device.total_bytes)
        return cls([dataclasses.replace(record, gpu=gpu) for record in records])

    @property
    def record(self) -> SnapshotRecord:
        """The record of the device with the most reserved memory."""
        return self.records[0]

    def __repr__(self) -> str:
        return units.few_lines(self.summary())

    def _repr_html_(self) -> str:
        macros, parts = html.macros(), []
        for record in self.records:
            parts += [
                macros.listed(snapshots.snapshot_sentences(record)),
                macros.picture(style.image_element(figure_of(record), snapshots.name_of(record), "png")),
            ]
            parts += map(to_html, snapshots.snapshot_tables(record, alive.MOST_ROWS))
        return html.fragment(*parts)

    def summary(self) -> Sentences:
        """Whether memory ran out and why, the peak, what would have fitted, and how true that is."""
        return Sentences(sentence for record in self.records for sentence in snapshots.snapshot_sentences(record))

    def table(self, kind: str | None = None) -> Tables:
        """Tables of each device. `kind`: "what-if", "lines", "modules", "sizes", "pools" or "growing"; default: all.

        Raises:
            UsageError: the kind is unknown.
        """
        kinds = ("what-if", "lines", "modules", "sizes", "pools", "growing")
        if kind is not None and kind not in kinds:
            raise unknown_name("table:", kind, kinds)
        tables = (table for record in self.records for table in snapshots.snapshot_tables(record, alive.MOST_ROWS))
        return Tables(table for table in tables if kind in (None, table.name))

    def plot(self) -> Figure:
        """What was alive by line over the events, and what was reserved, as a matplotlib figure."""
        return style.shown(figure_of(self.record))

    def compare(self, after: Snapshot) -> Tables:
        """What was alive at the peaks of this snapshot and of `after`, by line of Python."""
        return Tables([snapshots.comparison_of(self.record, after.record)[1]])

    def to_dict(self) -> dict[str, Any]:
        """The record of the device with the most reserved memory as data, as `memcheck snapshot --format json`."""
        return snapshots.snapshot_object(self.record)


def figure_of(record: SnapshotRecord) -> Figure:
    return timeline.snapshot_figure(record, title=f"Memory of {snapshots.name_of(record)}", subtitle=record.settings)
