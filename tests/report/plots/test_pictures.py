"""Which pictures any set of records has, and the files and images they become."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from plotted import MIB, STYLES, grid, prediction, record

from memcheck.core.errors import UsageError
from memcheck.report.plots.pictures import check_axis, check_kind, inline_pictures, pictures_of, write_pictures

OPERATORS = {"naive": 40, "softplus": 4}


def names(records, **how) -> list[str]:
    found = [picture.name for picture in pictures_of(records, styles=STYLES, **how)]
    assert len(set(found)) == len(found)
    return found


def test_the_pictures_that_records_have() -> None:
    records = grid(OPERATORS, [256, 512], [64])
    assert names(records) == ["memory", "savings"]
    for row in records:
        row.saved_bytes, row.forward_ms = MIB, 1.0
    assert names(records) == ["memory", "kept", "time", "savings"]
    assert names(records, kinds=["saved_bytes"]) == ["saved-bytes"]
    assert names(records, kinds=["gradient_bytes"]) == names(records, x="dim") == names([]) == []
    decoding = [record("naive", n, MIB, None, mode="decode", state_bytes=n, saved_bytes=0) for n in (256, 512)]
    assert names(decoding) == ["decode"]


def test_what_cannot_be_compared_has_pictures_of_its_own() -> None:
    records = grid(OPERATORS, [256, 512], [64], dtype="float16") + grid(OPERATORS, [256, 512], [64])
    pictures = pictures_of(records, styles=STYLES, title="Attention", kinds=["memory", "savings"])
    assert [picture.name for picture in pictures] == [
        *("memory-float16", "savings-float16", "memory-float32", "savings-float32"),
    ]
    assert [picture.caption for picture in pictures[:2]] == [
        "Attention, float16: peak memory; float16, dim 64, train.",
        "Attention, float16: how many times less than naive; float16, dim 64, train.",
    ]
    assert pictures[0].draw().get_suptitle() == "Attention, float16: peak memory\nfloat16, dim 64, train"
    batches = grid(OPERATORS, [256, 512], [64], bsz=1) + grid(OPERATORS, [256, 512], [64], bsz=4)
    assert names(batches, kinds=["memory"]) == ["memory-batch-1", "memory-batch-4"]
    assert names(batches, kinds=["memory"], x="bsz") == ["memory"]
    combinator = grid({"combinator": 4}, [256, 512], [64])
    for row in combinator:
        row.kv_len = None
    assert names([*grid(OPERATORS, [256, 512], [64]), *combinator], kinds=["memory"]) == [
        *("memory-attention", "memory-token-operators"),
    ]
    alone = [prediction("naive", n, MIB, MIB, device="cuda", device_name="H200") for n in (256, 512)]
    assert pictures_of(alone, styles=STYLES)[0].caption.endswith("cuda, H200, float32, dim 64, train, predicted.")


def test_files_of_each_format(tmp_path: Path) -> None:
    records, seen = [record("naive", 256, MIB, MIB)], list[str]()

    def watch(pictures):
        for picture in pictures:
            yield picture
            seen.append(picture.name)

    folder = tmp_path / "new" / "folder"
    how = {"styles": STYLES, "formats": ["png", "svg", "pdf"], "watch": watch}
    paths = write_pictures(records, folder, **how)
    assert [path.name for path in paths] == ["memory.png", "memory.svg", "memory.pdf"]
    contents = [path.read_bytes() for path in paths]
    assert [content[:5] for content in contents] == [b"\x89PNG\r", b"<?xml", b"%PDF-"]
    assert "sequence length" in " ".join(ElementTree.parse(paths[1]).getroot().itertext())
    assert seen == ["memory"]
    # The same records are the same files.
    write_pictures(records, folder, **how)
    assert [path.read_bytes() for path in paths] == contents
    assert write_pictures([], tmp_path, styles=STYLES) == []


def test_images_in_a_page_need_no_network() -> None:
    """They hold their data, so that nothing of one reaches another or the page."""
    pictures = pictures_of(grid({"<naive> & co": 40, "naive": 4}, [256, 512], [64]), styles=STYLES, title='A & "B"')
    images = inline_pictures(pictures)
    assert [caption.partition(";")[0] for caption, _ in images] == [
        'A & "B": peak memory',
        'A & "B": how many times less than naive',
    ]
    for caption, image in images:
        element = ElementTree.fromstring(image.replace(">", "/>"))
        assert (element.tag, element.attrib["alt"]) == ("img", caption)
        kind, _, data = element.attrib["src"].partition(",")
        svg = base64.b64decode(data).decode()
        assert kind == "data:image/svg+xml;base64"
        assert "<naive> & co" in " ".join(ElementTree.fromstring(svg).itertext())
        outside = re.sub(r' xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>', "", svg)
        assert "http" not in outside


def test_names_of_kinds_and_axes() -> None:
    assert [check_kind(name, "kind") for name in ("savings", "saved-bytes", "forward_ms")] == [
        *("savings", "saved_bytes", "forward_ms"),
    ]
    assert [check_axis(name, "x") for name in (None, "seq-len", "kv_len")] == [None, "length", "kv_len"]
    with pytest.raises(UsageError, match=r"kind memry is unknown; did you mean memory\? Known: memory, kept, "):
        check_kind("memry", "kind")
    with pytest.raises(UsageError, match="x batch is unknown; known: seq-len, kv-len, query-len"):
        check_axis("batch", "x")


def test_the_users_matplotlib_stays_as_it_was() -> None:
    """In a process of its own, where nothing has chosen a backend yet."""
    code = """
import sys, tempfile, matplotlib
from pathlib import Path
matplotlib.rcParams["lines.linewidth"] = 7.0
before = matplotlib.rcParams.copy()
from memcheck.report.plots.pictures import write_pictures
from plotted import STYLES, grid
records = grid({"naive": 40, "softplus": 4}, [256, 512], [64])
paths = write_pictures(records, Path(tempfile.mkdtemp()), styles=STYLES)
assert dict.items(matplotlib.rcParams.copy()) == dict.items(before)
assert "matplotlib.pyplot" not in sys.modules
assert "stroke-width: 7" not in paths[1].read_text()
"""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "PYTHONPATH": paths})
