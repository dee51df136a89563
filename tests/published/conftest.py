"""benchmarks/published is no part of the installed package: its folder is added to the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
