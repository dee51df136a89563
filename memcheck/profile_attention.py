"""`python -m memcheck.profile_attention` = `memcheck profile-attention`."""

from memcheck.__main__ import run_command

if __name__ == "__main__":
    run_command("profile_attention")
