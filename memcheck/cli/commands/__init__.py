"""One module per command with `run(args) -> exit code`. Flags and help are in memcheck.cli.parsers."""
