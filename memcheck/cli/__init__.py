"""The command line: options that commands share, and a module for each command."""
