"""Records as text, tables, comparisons and HTML. This package reads records only; it needs neither torch nor
operators.
"""

from memcheck.report.accounting import accounting_table
from memcheck.report.cases import common_case, failure_note, is_predicted, pair, parse_wanted, select
from memcheck.report.comparison import Comparison, compare, comparison_table, comparison_words, environment_changes
from memcheck.report.page import html_page
from memcheck.report.predictions import prediction_table, terms_table, unknown_words
from memcheck.report.records import (
    check_pivot,
    cs336_tables,
    decode_table,
    main_tables,
    pivot_tables,
    records_table,
    standard_tables,
    write_tables,
)
from memcheck.report.rows import LiveRows, explanation, unit_bytes
from memcheck.report.scaling import scaling_table
from memcheck.report.summary import answer, doubt_details, doubt_lines, next_step, summary
from memcheck.report.tables import Screen, Table, render, to_text, write_files

__all__ = [
    "Comparison",
    "LiveRows",
    "Screen",
    "Table",
    "accounting_table",
    "answer",
    "check_pivot",
    "common_case",
    "compare",
    "comparison_table",
    "comparison_words",
    "cs336_tables",
    "decode_table",
    "doubt_details",
    "doubt_lines",
    "environment_changes",
    "explanation",
    "failure_note",
    "html_page",
    "is_predicted",
    "main_tables",
    "next_step",
    "pair",
    "parse_wanted",
    "pivot_tables",
    "prediction_table",
    "records_table",
    "render",
    "scaling_table",
    "select",
    "standard_tables",
    "summary",
    "terms_table",
    "to_text",
    "unit_bytes",
    "unknown_words",
    "write_files",
    "write_tables",
]
