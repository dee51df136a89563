"""`python -m memcheck.profile_model` = `memcheck profile-model`."""

from memcheck.__main__ import door

if __name__ == "__main__":
    door("profile_model")
