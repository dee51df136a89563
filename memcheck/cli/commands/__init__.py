"""One module per command: a docstring of one line (its help), `add_arguments(parser)` and `run(args) -> exit code`."""
