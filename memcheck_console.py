"""The console script `memcheck`. Beside the package, as importing anything inside it would load torch first."""

import importlib.util
import sys


def main() -> int:
    """Runs the command line with the package in place but not executed: it does that if a command needs it."""
    load_without_running()
    from memcheck.__main__ import main

    return main()


def load_without_running() -> None:
    """Puts the package in place, so that its modules can be imported without it."""
    if "memcheck" not in sys.modules and (spec := importlib.util.find_spec("memcheck")):
        sys.modules["memcheck"] = importlib.util.module_from_spec(spec)


def predict_in_this_process(requests_from: int, answers_to: int) -> None:
    """The work of a process that predicts compiled code: memcheck/predict/process.py starts it."""
    load_without_running()
    from memcheck.predict.process import serve

    serve(requests_from, answers_to)
