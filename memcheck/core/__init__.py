"""Shared basics: records, cases, devices, units, errors, tensors. It imports nothing else of memcheck."""
