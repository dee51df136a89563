"""Runs the notebooks in place: `make notebooks`, or `python notebooks/execute.py 1_tour` for one of them.

Each runs in its own folder, on the Python that runs this file and the memcheck beside it, with two threads. What
differs from run to run (times of cells, versions) is left out of the file, and the image of the cell with the tag
"picture" becomes pictures/NAME.png.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, 1 where a notebook ends in an error, 2 for a name that is none."""
    parser = argparse.ArgumentParser(prog="execute.py", description="Runs notebooks in place and keeps their pictures.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="1_tour; all of them where none is named")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where they are; default: beside this file")
    parser.add_argument("--seconds", type=int, default=120, help="that a cell may take (120)")
    args = parser.parse_args(arguments)
    found = {path.stem: path for path in sorted(args.folder.glob("*.ipynb"))}
    names = [name.removesuffix(".ipynb") for name in args.names] or list(found)
    if unknown := [name for name in names if name not in found]:
        print(f"execute.py: no notebook {', '.join(unknown)}; there are {', '.join(found)}", file=sys.stderr)
        return 2
    return max([run(found[name], args.seconds) for name in names], default=0)


def run(path: Path, seconds: int) -> int:
    """One notebook, in place; one that ends in an error stays as it was."""
    notebook, start = nbformat.read(path, as_version=4), time.perf_counter()
    try:
        execute(notebook, path.parent, seconds)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return 1
    strip(notebook)
    if warnings := printed_to_stderr(notebook):
        print(f"{path.name}: a reader would see\n{warnings}", file=sys.stderr)
        return 1
    nbformat.write(notebook, path)
    if (image := picture_of(notebook)) is not None:
        pictures = path.parent / "pictures"
        pictures.mkdir(exist_ok=True)
        (pictures / f"{path.stem}.png").write_bytes(image)
    print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1000:.0f} kB")
    return 0


def execute(notebook: NotebookNode, folder: Path, seconds: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        # A profile of IPython's of its own, so that no start-up file of a user's takes part.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"PYTHONPATH": os.pathsep.join(paths), "IPYTHONDIR": home, "OMP_NUM_THREADS": "2"}
        client = NotebookClient(
            notebook, km=kernel_manager(home), timeout=seconds, record_timing=False, coalesce_streams=True
        )
        client.execute(cwd=str(folder), env={**os.environ, **more}, cleanup_kc=True)


def kernel_manager(home: str) -> AsyncKernelManager:
    """python3 is the interpreter that runs this file, whatever kernels the machine has by that name.

    It is spoken to by files, not ports: several notebooks may run at once, and none takes another's.
    """
    return AsyncKernelManager(
        kernel_name=KERNEL["name"],
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        transport="ipc",
        connection_file=str(Path(home) / "kernel.json"),
    )


def strip(notebook: NotebookNode) -> None:
    notebook.metadata = NotebookNode(kernelspec=KERNEL, language_info={"name": "python"})
    for cell in notebook.cells:
        cell.metadata = NotebookNode({name: value for name, value in cell.metadata.items() if name == "tags"})
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = NotebookNode()
            output.pop("transient", None)


def printed_to_stderr(notebook: NotebookNode) -> str:
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return "".join(output.text for output in outputs if output.get("name") == "stderr")


def picture_of(notebook: NotebookNode) -> bytes | None:
    """The PNG of the cell with the tag, None where no cell has one."""
    for cell in notebook.cells:
        if "picture" in cell.metadata.get("tags", ()):
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    return base64.b64decode(output.data["image/png"])
    return None


if __name__ == "__main__":
    sys.exit(main())
