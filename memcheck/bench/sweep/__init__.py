"""Sweeps: a grid of cases, the processes that run them, and the folder that keeps their records."""
