"""Tables of what is alive: by module, by line or operator, growing, and before and after a change."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from memcheck.core.script_record import LAYERS, Alive, Growth, Origin
from memcheck.core.units import UNITS
from memcheck.report.memory import NO_LINE, OUTSIDE
from memcheck.report.tables import Cell, Column, Table

# Rows of a table in text and on the page; the rest is combined in one row.
MOST_ROWS, MOST_ROWS_OF_PAGE = 12, 200
FORMAT = ",.2f"
PHASES_NOTE = "from forward, from backward, ...: all other blocks, by the phase that allocated them."
# On a narrow screen the last of these columns are left out first.
IMPORTANCE = (
    *("from forward", "from backward", "kept for backward", "other", "parameters", "optimizer state", "gradients"),
    *("from elsewhere", "from optimizer step", "buffers"),
)


def unit_of(whole: int) -> str:
    return "KiB" if whole < 8 * UNITS["MIB"] else "MiB" if whole < 64 * UNITS["GIB"] else "GiB"


def in_unit(size: int, unit: str) -> float:
    return size / UNITS[unit.upper()]


def size_of(alive: Iterable[Alive]) -> int:
    return sum(each.bytes for each in alive)


def line_of(place: Origin) -> str:
    return str(place.line) if place.line else NO_LINE


def module_table(
    alive: Sequence[Alive], title: str, unit: str, most: int, kinds: Sequence[str] = LAYERS, note: str = PHASES_NOTE
) -> Table:
    """What is alive by module, in a column for each kind of memory; each row adds up to its sum."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for each in alive:
        sums[each.place.module or OUTSIDE][each.place.layer] += each.bytes
    rows = sorted(sums.items(), key=lambda row: -row[1].total())
    rest, whole = rows[most:], sum(sums.values(), Counter[str]())
    rows = rows[:most] + ([(f"{len(rest)} others", sum((sizes for _, sizes in rest), Counter[str]()))] if rest else [])
    rows += [("all", whole)] if len(sums) > 1 else []

    def column(kind: str) -> Column:
        def read(row: tuple[str, Counter[str]]) -> Cell:
            return in_unit(row[1][kind], unit) if row[1][kind] else None

        key = f"{kind.replace(' ', '_')}_{unit.lower()}"
        return Column(key, kind, "", FORMAT, read=read, rank=1 + IMPORTANCE.index(kind))

    columns = [
        Column("module", "module", read=lambda row: row[0]),
        *map(column, kinds),
        Column(unit.lower(), "sum", "", FORMAT, read=lambda row: in_unit(row[1].total(), unit)),
    ]
    return Table.of("modules", title, columns, rows, [note])


def group_table(
    alive: Sequence[Alive], name: str, title: str, heading: str, key: Callable[[Origin], str], unit: str, most: int
) -> Table:
    """What is alive by the key, largest first, and the rest combined; the rows add up to the whole."""
    groups: dict[str, list[Alive]] = defaultdict(list)
    for each in alive:
        groups[key(each.place)].append(each)
    ordered = sorted(groups.items(), key=lambda item: -size_of(item[1]))
    if rest := ordered[most:]:
        ordered = [*ordered[:most], (f"{len(rest)} others", [each for _, members in rest for each in members])]
    whole = size_of(alive) or 1
    columns = [
        Column(heading, heading, read=lambda group: group[0]),
        Column(unit.lower(), unit, "", FORMAT, read=lambda group: in_unit(size_of(group[1]), unit)),
        Column("percent", "%", "", ".1f", read=lambda group: 100 * size_of(group[1]) / whole),
        Column("blocks", "blocks", "", ",", read=lambda group: sum(each.blocks for each in group[1])),
    ]
    return Table.of(name, title, columns, ordered)


def growth_table(growing: Sequence[Growth], step_name: str = "step") -> Table:
    unit, one = "MiB", step_name.partition(" ")[0]
    columns = [
        Column("line", "line", read=lambda growth: growth.place.where),
        Column("per_step", f"per {one}", unit, FORMAT, read=lambda growth: in_unit(growth.bytes_per_step, unit)),
        Column("blocks", f"blocks per {one}", "", ".3g", read=lambda growth: growth.blocks_per_step),
        Column("alive", "alive", unit, FORMAT, read=lambda growth: in_unit(growth.bytes, unit)),
    ]
    title = f"Alive more and more, by line of Python, and at the last {step_name}"
    return Table.of("growing", title, columns, growing[:MOST_ROWS])


def change_table(
    name: str, title: str, heading: str, sizes: Mapping[str, tuple[int, ...]], unit: str, most: int | None = None
) -> Table:
    """Bytes before and now, sorted by their difference.

    most: rows of names that changed. The others are added up in one row, and all in another.
    """
    names = sorted(sizes, key=lambda name: -abs(sizes[name][1] - sizes[name][0]))
    rows = [(name, *sizes[name]) for name in names]
    if most is not None:
        changed = [row for row in rows if row[1] != row[2]][:most]
        others = rows[len(changed) :]
        rest = [(f"{len(others)} others", *sums(others))] if others and changed else []
        rows = [*changed, *rest, ("all", *sums(rows))]
    columns = [
        Column(heading, heading, read=lambda row: row[0]),
        Column(f"before_{unit.lower()}", "before", unit, FORMAT, read=lambda row: in_unit(row[1], unit)),
        Column(f"now_{unit.lower()}", "now", unit, FORMAT, read=lambda row: in_unit(row[2], unit)),
        Column(f"change_{unit.lower()}", "change", unit, f"+{FORMAT}", read=lambda row: in_unit(row[2] - row[1], unit)),
    ]
    return Table.of(name, title, columns, rows)


def sums(rows: Iterable[tuple[Any, ...]]) -> tuple[int, int]:
    return sum(row[1] for row in rows), sum(row[2] for row in rows)
