"""`python -m memcheck.gradcheck` = `memcheck gradcheck`."""

from memcheck.__main__ import run_command

if __name__ == "__main__":
    run_command("gradcheck")
