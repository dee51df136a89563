"""Predicting from shapes: the trace on meta tensors, rules for scratch, the allocator's model, the replay."""
