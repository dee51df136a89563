"""Plots of records. Every line has its own colour, marker and dash, so that plots stay readable in greyscale."""

from memcheck.core.style import Style
from memcheck.report.plots.lines import named_lines
from memcheck.report.plots.pictures import Picture, Request, choose_pictures, plot_memory, svg_plots, write_plots
from memcheck.report.plots.scales import x_ticks
from memcheck.report.plots.timeline import plot_timeline

__all__ = [
    "Picture",
    "Request",
    "Style",
    "choose_pictures",
    "named_lines",
    "plot_memory",
    "plot_timeline",
    "svg_plots",
    "write_plots",
    "x_ticks",
]
