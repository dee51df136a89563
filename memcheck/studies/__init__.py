"""Published tables beside ours, and what 16-bit arithmetic does to sums and training."""
