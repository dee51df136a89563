"""Attention operators at the memory floor, and the truth about what any attention needs."""
