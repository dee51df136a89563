"""Records as text, tables, comparisons and HTML. This package reads records alone, without torch and operators."""
