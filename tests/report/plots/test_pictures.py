"""Which pictures a set of records makes sense of, and the files and inline images they become."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from plotted import MIB, STYLES, grid, marks, points, prediction, record

from memcheck.core.errors import UsageError
from memcheck.core.record import Record
from memcheck.report.plots.pictures import PictureRequest, choose_pictures, svg_plots, write_plots
from memcheck.report.plots.series import quantity_of
from memcheck.report.plots.style import dark_colour

OPERATORS = {"naive": 40, "softplus": 4}


def chosen(records: list[Record], **request: object) -> dict[str, bool]:
    pictures = choose_pictures(records, styles=STYLES, title="Attention", request=PictureRequest(**request))
    assert len({picture.name for picture in pictures}) == len(pictures)
    return {picture.name: picture.main for picture in pictures}


def test_one_varying_length() -> None:
    assert chosen(grid(OPERATORS, [256, 512], [64])) == {"memory": True, "memory-linear": False, "savings": True}


def test_one_varying_dimension() -> None:
    assert chosen(grid(OPERATORS, [256], [64, 128])) == {"memory": True, "memory-linear": False, "savings": True}


def test_lengths_and_dimensions() -> None:
    assert chosen(grid(OPERATORS, [256, 512], [64, 128])) == {
        "memory-length": True,
        "memory-length-dim-64": False,
        "memory-length-dim-128": False,
        "memory-dim": True,
        "memory-dim-length-256": False,
        "memory-dim-length-512": False,
        "savings": True,
    }


def batches(lengths: tuple[int, ...]) -> list[Record]:
    """softplus on these sequences, padded and packed."""
    padded, packed = max(lengths) * len(lengths), sum(lengths)
    return [
        record("softplus", max(lengths), 4 * padded, 8 * padded, bsz=len(lengths), lengths=lengths),
        record("softplus", packed, 4 * packed, 8 * packed, bsz=1, lengths=lengths),
    ]


def test_padded_and_packed_batches_share_a_picture() -> None:
    records = [*batches((512, 512)), *batches((512, 256)), *batches((512, 52))]
    assert chosen(records) == {"memory": True, "memory-linear": False}
    assert chosen(batches((512, 52))) == {"memory": True}
    assert list(chosen([*records, *grid(OPERATORS, [256, 512], [64], bsz=2)])) == [
        *("memory-packed-and-padded-batches", "memory-linear-packed-and-padded-batches"),
        *("memory-attention", "memory-linear-attention", "savings-attention"),
    ]
    (picture, *_) = choose_pictures(records, styles=STYLES, title="")
    ax = picture.draw().axes[0]
    assert ax.get_xlabel() == "used tokens, %"
    assert points(ax) == {
        "softplus, padded": [(55, 4096), (75, 4096), (100, 4096)],
        "softplus, packed": [(55, 4 * 564), (75, 4 * 768), (100, 4096)],
    }


def test_a_kind_that_is_named_has_every_picture() -> None:
    names = chosen(grid(OPERATORS, [256, 512], [64, 128]), kinds=["savings"])
    assert names == {"savings-dim-64": True, "savings-dim-128": False}


def test_an_axis_and_a_scale_that_are_named() -> None:
    records = grid(OPERATORS, [256, 512], [64])
    assert chosen(records, kinds=["memory"], log=False) == {"memory-linear": False}
    assert chosen(records, kinds=["memory"], x="length", log=True) == {"memory": True}
    assert chosen(records, kinds=["memory"], x="kv_len", log=True) == {"memory": True}
    assert chosen(records, x="dim") == {}
    assert chosen(records, quantity=quantity_of("saved_bytes")) == {}
    assert chosen(records, quantity=quantity_of("forward_peak_bytes")) == {"forward-peak-bytes-length": True}


def test_query_and_key_lengths_that_vary_apart() -> None:
    records = [
        record("naive", 0, MIB, MIB, query_len=query_len, kv_len=kv_len)
        for query_len in (1, 16)
        for kv_len in (64, 128)
    ]
    names = chosen(records, kinds=["memory"])
    assert {"memory-query-len", "memory-kv-len", "memory-kv-len-query-len-16-dim-64"} <= set(names)


def test_what_cannot_be_compared_has_pictures_of_its_own() -> None:
    records = grid(OPERATORS, [256, 512], [64], dtype="float16") + grid(OPERATORS, [256, 512], [64])
    pictures = choose_pictures(records, styles=STYLES, title="Attention")
    assert {"memory-float16", "memory-float32"} <= {picture.name for picture in pictures}
    assert pictures[0].caption.startswith("Attention, float16: peak memory against sequence length")


def test_the_combinator_is_beside_no_attention() -> None:
    records = grid(OPERATORS, [256, 512], [64]) + grid({"combinator": 4}, [256, 512], [64])
    for row in records[-2:]:
        row.kv_len = None
    assert {"memory-attention", "memory-token-operators"} <= set(chosen(records))


def test_decoding_shows_its_state() -> None:
    records = [
        record(name, length, MIB, None, mode="decode", query_len=1, kv_len=length, state_bytes=size * length)
        for length in (256, 512)
        for name, size in OPERATORS.items()
    ]
    (picture,) = choose_pictures(records, styles=STYLES, title="Attention")
    state, step = picture.draw().axes
    assert picture.name == "decode"
    assert points(state) == {"naive": [(256, 40 * 256), (512, 40 * 512)], "softplus": [(256, 4 * 256), (512, 4 * 512)]}
    assert points(step)["naive"] == [(256, MIB), (512, MIB)]
    assert state.get_xlabel() == "key length, at query length 1"


def test_the_overview_has_a_panel_for_each_fixed_value() -> None:
    records = grid(OPERATORS, [256, 512], [64, 128, 256])
    records[-2] = record("naive", 512, None, None, dim=256, status="oom", oom_phase="forward")
    (picture,) = [one for one in choose_pictures(records, styles=STYLES, title="") if one.name == "memory-length"]
    figure = picture.draw()
    assert [ax.get_title() for ax in figure.axes] == [f"token dimension {dim}" for dim in (64, 128, 256)]
    assert points(figure.axes[1])["naive"] == [(256, 2 * 40 * 256 * 128), (512, 2 * 40 * 512 * 128)]
    assert points(figure.axes[2])["naive"] == [(256, 2 * 40 * 256 * 256)]
    assert [marks(ax) for ax in figure.axes] == [[], [], [("#D55E00", [512])]]
    (key,) = figure.legends
    assert [text.get_text() for text in key.get_texts()][:2] == ["naive", "softplus"]


def test_no_records_no_pictures(tmp_path) -> None:
    assert write_plots([], tmp_path, styles=STYLES, title="Nothing") == []
    assert svg_plots([], styles=STYLES) == []


@pytest.mark.parametrize("lengths", [[256], [256, 512]])
@pytest.mark.parametrize("status", ["oom", "skipped", "error", "killed", "unsupported"])
def test_nothing_finished_is_still_a_picture(tmp_path, lengths: list[int], status: str) -> None:
    records = [record("naive", length, None, None, status=status) for length in lengths]
    paths = write_plots(records, tmp_path, styles=STYLES, title="Nothing", formats=["png"])
    assert "memory.png" in [path.name for path in paths]


def test_files_of_each_format(tmp_path) -> None:
    records = [record("naive", 256, MIB, MIB)]
    paths = write_plots(records, tmp_path / "new" / "folder", styles=STYLES, title="One", formats=["png", "svg", "pdf"])
    starts = [path.read_bytes()[:5] for path in paths]
    assert [path.name for path in paths] == ["memory.png", "memory.svg", "memory.pdf"]
    assert starts == [b"\x89PNG\r", b"<?xml", b"%PDF-"]
    assert all(ElementTree.parse(path) for path in paths[1:2])
    with pytest.raises(UsageError, match="format gif is unknown; known: png, svg, pdf"):
        write_plots(records, tmp_path, styles=STYLES, title="One", formats=["gif"])


def test_progress_is_told_of_each_picture(tmp_path) -> None:
    seen: list[str] = []

    def watch(pictures):
        for picture in pictures:
            yield picture
            seen.append(picture.name)

    records, how = grid(OPERATORS, [256], [64]), {"styles": STYLES, "title": "", "watch": watch}
    write_plots(records, tmp_path, formats=["svg"], **how)
    assert seen == ["memory"]
    svg_plots(records, **how)
    assert seen == ["memory"] * 2


def test_overviews_alone(tmp_path) -> None:
    records, how = grid(OPERATORS, [256, 512], [64, 128]), {"styles": STYLES, "title": "", "formats": ["svg"]}
    overviews = ["memory-length.svg", "memory-dim.svg", "savings.svg"]
    assert [path.name for path in write_plots(records, tmp_path, every=False, **how)] == overviews
    every = {path.name for path in write_plots(records, tmp_path, **how)}
    assert every > {*overviews, "memory-length-dim-64.svg", "memory-dim-length-512.svg"}


def test_the_same_records_are_the_same_file(tmp_path) -> None:
    def drawn() -> bytes:
        records, request = grid(OPERATORS, [256, 512], [64]), PictureRequest(kinds=["memory"], log=True)
        (path,) = write_plots(records, tmp_path, styles=STYLES, title="", formats=["svg"], request=request)
        return path.read_bytes()

    assert drawn() == drawn()


def test_inline_images_share_a_page() -> None:
    records = grid({"<naive> & co": 40, "naive": 4}, [256, 512], [64])
    images = svg_plots(records, styles=STYLES, title="A & B")
    page = "".join(svg for _, svg in images)
    ids = re.findall(r'\bid="([^"]+)"', page)
    used = re.findall(r'(?:href="|url\()#([^")]+)', page)
    assert [caption.partition(";")[0] for caption, _ in images] == [
        "A & B: peak memory against sequence length, at token dimension 64",
        "A & B: how many times less than naive, at token dimension 64",
    ]
    assert len(ids) == len(set(ids)) > 20
    assert used
    assert set(used) <= set(ids)
    assert "<?xml" not in page
    assert "<!DOCTYPE" not in page
    # A rule for all elements would reach those of the page.
    assert re.findall(r"<style[^>]*>(.)", page) == ["#"] * 2 * len(images)
    for caption, svg in images:
        pair = ElementTree.fromstring(f"<div>{svg}</div>")
        for root in pair:
            assert root.find("{http://www.w3.org/2000/svg}title").text == caption
            words = " ".join(root.itertext())
            assert "<naive> & co" in words
            assert "sequence length" in words
        # One for wide windows, with panels side by side, and one for narrow windows, with panels in a column.
        wide, narrow = ([float(size) for size in root.attrib["viewBox"].split()[2:]] for root in pair)
        assert wide[0] > wide[1]
        assert narrow[0] == pytest.approx(4.8 * 72)
        assert narrow[1] > narrow[0] or "savings" in pair[0].attrib["id"]
        hidden = re.findall(r"@media \((\w+)-width: [\d.]+rem\) { #([\w-]+) { display: none } }", svg)
        assert hidden == [("max", pair[0].attrib["id"]), ("min", pair[1].attrib["id"])]


def test_colours_change_on_a_dark_page() -> None:
    ((_, svg), *_) = svg_plots(grid({"naive": 40, "softplus": 4}, [256, 512], [64]), styles=STYLES, title="")
    used = set(re.findall(r"var\((--[\w-]+), #", svg))
    rules = re.findall(r"@media screen and \(prefers-color-scheme: dark\) { #[\w-]+ { (.*?) } }", svg)
    given = {name: colour for rule in rules for name, colour in re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", rule)}
    assert len(rules) == 2
    assert used <= given.keys()
    assert {colour for name, colour in given.items() if name.endswith("-ffffff")} == {"#16191c"}
    assert not re.search(r"(?<=[a-z]: )#[0-9a-fA-F]{6}", re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL))


@pytest.mark.parametrize(
    ("colour", "dark"), [("#000000", "#e6e9eb"), ("#ffffff", "#16191c"), ("#e69f00", "#e69f00"), ("#332288", None)]
)
def test_dark_colours_become_lighter(colour: str, dark: str | None) -> None:
    found = dark_colour(colour)
    assert found == dark or (dark is None and int(found[1:3], 16) > int(colour[1:3], 16))


def test_the_users_matplotlib_stays_as_it_was() -> None:
    """In a process of its own, where nothing has chosen a backend yet."""
    code = """
import sys, tempfile, matplotlib
from pathlib import Path
matplotlib.rcParams["lines.linewidth"] = 7.0
before = matplotlib.rcParams.copy()
from memcheck.report.plots.pictures import svg_plots, write_plots
from plotted import STYLES, grid
records = grid({"naive": 40, "softplus": 4}, [256, 512], [64])
write_plots(records, Path(tempfile.mkdtemp()), styles=STYLES, title="")
assert dict.items(matplotlib.rcParams.copy()) == dict.items(before)
assert "matplotlib.pyplot" not in sys.modules
(picture, *_) = svg_plots(records, styles=STYLES)
assert "stroke-width: 7" not in picture[1]
"""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "PYTHONPATH": paths})


def test_a_view_without_the_standard_has_no_savings() -> None:
    records = [*grid(OPERATORS, [256, 512], [64]), *grid({"softplus": 4, "linear": 4}, [256, 512, 1024], [128])]
    assert chosen(records, kinds=["savings"]) == {"savings": True}


def test_decoding_at_one_length_is_bars() -> None:
    sizes = {"mode": "decode", "query_len": 1, "kv_len": 256}
    records = [record(name, 256, MIB, None, state_bytes=size, **sizes) for name, size in OPERATORS.items()]
    (picture,) = choose_pictures(records, styles=STYLES, title="")
    state, _ = picture.draw().axes
    assert [bar.get_width() for bar in state.patches] == [40, 4]
    assert state.get_xlabel() == "memory\nat query length 1, key length 256"
    failed = [record("naive", 256, None, None, status="oom", **sizes)]
    assert choose_pictures(failed, styles=STYLES, title="") == []


def test_predictions_have_a_picture_where_something_was_measured() -> None:
    sizes = [(256, MIB), (512, 2 * MIB)]
    predicted = [prediction("naive", n, size, size) for n, size in sizes]
    assert "prediction" not in {picture.name for picture in choose_pictures(predicted, styles=STYLES, title="")}
    measured = [record("naive", n, size, size) for n, size in sizes]
    both = {picture.name: picture for picture in choose_pictures([*measured, *predicted], styles=STYLES, title="")}
    assert both["prediction"].caption.startswith("Prediction beside measurement")
    assert both["memory"].caption.endswith("train.")


def test_a_picture_of_predictions_says_so() -> None:
    rows = [prediction("naive", n, MIB, MIB, device="cuda", device_name="H200") for n in (256, 512)]
    (memory, *_) = choose_pictures(rows, styles=STYLES, title="")
    assert memory.caption.endswith("cuda, H200, float32, dim 64, train, predicted.")
