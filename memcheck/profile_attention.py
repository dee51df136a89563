"""`python -m memcheck.profile_attention` = `memcheck profile-attention`."""

from memcheck.__main__ import door

if __name__ == "__main__":
    door("profile_attention")
