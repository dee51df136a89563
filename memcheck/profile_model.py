"""`python -m memcheck.profile_model` = `memcheck profile-model`."""

from memcheck.__main__ import run_command

if __name__ == "__main__":
    run_command("profile_model")
