"""Plots of records. Every line has its own colour, marker and dash, so that plots stay readable in greyscale."""
