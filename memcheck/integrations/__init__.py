"""Plug points of other libraries. Each module imports its library, so none is loaded with memcheck."""
