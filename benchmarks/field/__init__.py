"""Configurations of published measurements: `memcheck published NAME --predict` predicts them.

A study is a module with a `STUDY = field.Study(...)`: the rows that were published, and a function that returns the
prediction of one. See memcheck/studies/field.py.
"""
