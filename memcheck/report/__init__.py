"""Records as text, tables, comparisons and HTML. This package reads records only; it needs neither torch nor
operators.
"""

from memcheck.report.accounting import accounting_table
from memcheck.report.cases import parse_wanted, select
from memcheck.report.comparison import Comparison, compare, comparison_table, comparison_words, environment_changes
from memcheck.report.page import html_page
from memcheck.report.pairing import is_predicted, pair
from memcheck.report.predictions import prediction_row, prediction_table, unknown_words
from memcheck.report.records import (
    check_pivot,
    cs336_tables,
    decode_table,
    is_cs336,
    pivot_tables,
    records_table,
    standard_tables,
    write_tables,
)
from memcheck.report.rows import (
    DECODING,
    NAMES,
    common_case,
    failure_note,
    legend,
    mask,
    number,
    table_header,
    table_row,
    unit_bytes,
)
from memcheck.report.scaling import scaling_table
from memcheck.report.summary import summary
from memcheck.report.tables import Table, render, write_files

__all__ = [
    "DECODING",
    "NAMES",
    "Comparison",
    "Table",
    "accounting_table",
    "check_pivot",
    "common_case",
    "compare",
    "comparison_table",
    "comparison_words",
    "cs336_tables",
    "decode_table",
    "environment_changes",
    "failure_note",
    "html_page",
    "is_cs336",
    "is_predicted",
    "legend",
    "mask",
    "number",
    "pair",
    "parse_wanted",
    "pivot_tables",
    "prediction_row",
    "prediction_table",
    "records_table",
    "render",
    "scaling_table",
    "select",
    "standard_tables",
    "summary",
    "table_header",
    "table_row",
    "unit_bytes",
    "unknown_words",
    "write_files",
    "write_tables",
]
