"""Whole models: their cases, closed formulas, predictions and profiles."""
