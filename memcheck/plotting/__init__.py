"""Records as pictures. Lines differ in colour, marker and dash: in greyscale and to the colour-blind they still do."""

from memcheck.plotting.lines import named_lines
from memcheck.plotting.memory import plot_memory
from memcheck.plotting.pictures import Picture, Request, choose_pictures, svg_plots, write_plots
from memcheck.plotting.published import plot_published
from memcheck.plotting.scales import x_ticks
from memcheck.plotting.style import UNKNOWN_STYLE, Style
from memcheck.plotting.timeline import Timeline, plot_timeline

__all__ = [
    "UNKNOWN_STYLE",
    "Picture",
    "Request",
    "Style",
    "Timeline",
    "choose_pictures",
    "named_lines",
    "plot_memory",
    "plot_published",
    "plot_timeline",
    "svg_plots",
    "write_plots",
    "x_ticks",
]
