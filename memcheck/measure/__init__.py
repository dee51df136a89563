"""Measuring: the tracker, a measured run, its time, its timeline."""
