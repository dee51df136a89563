"""`python -m memcheck.profile_combinator` = `memcheck profile-combinator`."""

from memcheck.__main__ import run_command

if __name__ == "__main__":
    run_command("profile_combinator")
