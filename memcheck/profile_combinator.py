"""`python -m memcheck.profile_combinator` = `memcheck profile-combinator`."""

from memcheck.__main__ import door

if __name__ == "__main__":
    door("profile_combinator")
