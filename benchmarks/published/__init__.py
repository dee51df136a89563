"""Published measurements of GPUs, and what memcheck predicts of them: `python benchmarks/published/compare.py`."""
