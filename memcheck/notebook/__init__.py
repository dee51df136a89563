"""What a person types in a notebook: commands as functions, and their results as objects that show themselves."""

from memcheck.notebook.commands import profile, sweep
from memcheck.notebook.results import Results, load

__all__ = ["Results", "load", "profile", "sweep"]
