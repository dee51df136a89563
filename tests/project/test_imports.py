"""What `import memcheck` loads. The layers of the packages are checked by import-linter in `make lint`."""

import json
import subprocess
import sys

HEAVY = ("matplotlib", "pandas", "scipy", "jinja2")
UPPER = ("memcheck.report", "memcheck.studies", "memcheck.cli")


def test_import_loads_no_report_and_no_plotting() -> None:
    code = "import json, sys, memcheck, torch; torch.ops.memcheck.combinator; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded = json.loads(done.stdout)
    assert [name for name in loaded if name in HEAVY or name.startswith(UPPER)] == []
    assert len([name for name in loaded if name.split(".")[0] == "memcheck"]) <= 70
