"""Prints as JSON how the script was started, then ends with the requested exit code or error."""

import json
import subprocess
import sys

if __name__ == "__main__":
    child = "import bluewalm, torch; print(torch.ops.bluewalm_extension.linear_operator_l, bluewalm.__file__)"
    seen = {
        "name": __name__,
        "file": __file__,
        "argv": sys.argv,
        "path": sys.path[0],
        "main": sys.modules["__main__"].__dict__ is globals(),
        "child": subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout,
    }
    print(json.dumps(seen))
    if sys.argv[1] == "raise":
        raise RuntimeError("as asked")
    sys.exit(int(sys.argv[1]))
