"""One module per command, with run(request) -> exit code. The requests are in memcheck.cli.requests."""
