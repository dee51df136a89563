"""`python -m memcheck.gradcheck` = `memcheck gradcheck`."""

from memcheck.__main__ import door

if __name__ == "__main__":
    door("gradcheck")
