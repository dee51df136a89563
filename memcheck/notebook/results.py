"""Results: records, with the tables, sentences and pictures of the commands, which a notebook shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from memcheck.bench.catalog import styles_of_contenders
from memcheck.bench.sweep.store import Store, read_records
from memcheck.core import html
from memcheck.core.errors import MemcheckError, UsageError, did_you_mean, unknown_name
from memcheck.core.record import Record, write_csv
from memcheck.report import accounting, cases, comparison, predictions
from memcheck.report.plots.pictures import KINDS, Picture, check_axis, check_kind, pictures_of
from memcheck.report.plots.style import image_element, shown
from memcheck.report.records import PIVOT_FIELDS, cs336_tables, main_tables, pivot_tables
from memcheck.report.tables import Sentences, Tables, to_html

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

TABLES = ("scaling", "prediction", "accounting", "cs336")
FIELDS = [field.name for field in dataclasses.fields(Record)]


class Results(Sequence[Record]):
    """A sequence of records. As the last line of a cell it shows the main picture and the table.

    Examples:
        >>> memcheck.Results({"mine": memcheck.measure_memory(mine, x), "theirs": memcheck.measure_memory(theirs, x)})

    Args:
        records: any records; with a mapping, each is shown under its name.
    """

    def __init__(self, records: Iterable[Record] | Mapping[str, Record]) -> None:
        if isinstance(records, Mapping):
            records = [dataclasses.replace(record, operator=name) for name, record in records.items()]
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Results: ...
    def __getitem__(self, index: int | slice) -> Record | Results:
        return Results(self.records[index]) if isinstance(index, slice) else self.records[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __add__(self, other: Iterable[Record]) -> Results:
        return Results([*self, *other])

    def __repr__(self) -> str:
        return repr(self.table()) if self.records else "no records"

    def _repr_html_(self) -> str:
        if not self.records:
            return html.fragment(html.macros().paragraphs(["No records."]))
        images = [html.macros().picture(image_element(one.draw(), one.caption, "png")) for one in self.pictures()[:1]]
        return html.fragment(*images, *map(to_html, self.table()))

    def select(self, **wanted: Any) -> Results:
        """The records whose fields have the values `wanted`: select(operator="naive", kv_len=[256, 1024]).

        seq_len stands for both lengths.

        Raises:
            UsageError: there is no such field.
        """
        chosen = self.records
        for name, value in wanted.items():
            if name not in (*FIELDS, "seq_len"):
                raise UsageError(f"select: {name}={value!r} is no field of a record{did_you_mean(name, FIELDS)}")
            values = value if isinstance(value, list | tuple | set) else [value]
            kept = {id(record) for one in values for record in cases.select(chosen, {name: str(one)})}
            chosen = [record for record in chosen if id(record) in kept]
        return Results(chosen)

    def summary(self) -> Sentences:
        """How many cases ran, how they ended, and what is doubtful, in sentences."""
        return Sentences(accounting.summary(self.records))

    def table(self, kind: str | None = None, *, units: bool = False) -> Tables:
        """The rows as a table.

        Args:
            kind: "scaling", "prediction", "accounting" or "cs336", as of `memcheck report`; or a field of the records
                in bytes or milliseconds, such as "saved_bytes", for a table by length, and by operator or dimension.
            units: bytes also in U, the bytes of one main tensor, and per query and key.

        Raises:
            UsageError: the kind is unknown.
        """
        if kind is None:
            return Tables(main_tables(self.records, units))
        if kind in PIVOT_FIELDS:
            return Tables(pivot_tables(self.records, kind))
        if kind == "scaling":
            return Tables([accounting.scaling_table(self.records)])
        if kind == "prediction":
            return Tables([predictions.prediction_table(self.records)])
        if kind == "accounting":
            return Tables(map(accounting.accounting_table, self.records))
        if kind == "cs336":
            return Tables(cs336_tables(self.records))
        raise unknown_name("table:", kind, [*TABLES, *PIVOT_FIELDS])

    def plot(
        self,
        kind: str | None = None,
        *,
        x: str | None = None,
        log: bool = True,
        title: str = "",
    ) -> Figure:
        """A picture of the records, as a matplotlib figure.

        Args:
            kind: memory, kept, time, decode or savings, or a field in bytes or ms such as "saved_bytes"; by default the
                first kind that the records allow.
            x: seq_len, query_len, kv_len, dim, bsz, heads, core_dim, factor or window; by default what varies.
            log: logarithmic axes, or with False linear ones.
            title: text before the title.

        Raises:
            UsageError: a name is unknown.
            MemcheckError: there is nothing to draw.
        """
        kinds = [check_kind(kind, "kind")] if kind else KINDS
        pictures = self.pictures(kinds=kinds, x=check_axis(x, "x"), log=log, title=title)
        if not pictures:
            raise MemcheckError(f"there is nothing to draw in these {len(self)} records")
        return shown(pictures[0].draw())

    def pictures(self, **how: Any) -> list[Picture]:
        """Every picture that the records allow. `how`: kinds, x, log and title, as memcheck report --plot has them."""
        return pictures_of(self.records, styles=styles_of_contenders(), **how)

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with a row per record, and a column per field that any of them has."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(record) for record in self]).dropna(axis="columns", how="all")

    def compare(self, after: Iterable[Record] | Path | str) -> comparison.Comparison:
        """These results beside later ones, `after`, or those of a folder, case by case: bytes to the byte.

        Raises:
            UsageError: the folder holds no records.
        """
        return comparison.compare(self.records, read_records(after) if isinstance(after, str | Path) else list(after))

    def save(self, folder: Path | str) -> Path:
        """Writes records.jsonl, which load() and the commands read, and records.csv into `folder`.

        Records of the same cases that are in the folder are replaced, others stay. Returns the folder.

        Raises:
            UsageError: it cannot be written to, or holds a sweep.
        """
        folder = Path(folder)
        store = Store(folder)
        store.begin()
        for record in self:
            store.append(record)
        write_csv(store.keep_newest(cases.case_and_place), folder / "records.csv")
        return folder


def load(folder: Path | str, *more: Path | str) -> Results:
    """The records of the `folder` of results, and of `more`, as `memcheck profile-attention`, `sweep` or save() wrote.

    Raises:
        UsageError: a folder holds no records.
    """
    return Results(record for one in (folder, *more) for record in read_records(one))
