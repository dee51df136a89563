"""What the documentation shows runs, and is what the operators compute."""

import argparse
import doctest
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import run_python
from pages import PAGES, documentation

import memcheck
from memcheck.ops.reference.naive_attention import naive_attention
from memcheck.ops.reference.softplus_attention import softplus

ROOT = Path(__file__).parents[2]


def run_equivalent(function, names):
    """Executes the docstring's lines on the names, and returns what they are bound to afterwards."""
    examples = doctest.DocTestParser().get_examples(function.__doc__)
    assert examples, f"{function.__name__} has no lines under 'Equivalent to:'"
    for example in examples:
        exec(example.source, names)
    return names


ROOMS = (memcheck, memcheck.nn, memcheck.distributed)
PUBLIC = {f"{room.__name__}.{name}": getattr(room, name) for room in ROOMS for name in room.__all__}


def test_the_api_pages_have_every_public_name():
    shown = "".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    documented = re.findall(r"^\.\. auto\w+:: (\S+)$", shown, re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert PUBLIC.keys() - {"memcheck.nn", "memcheck.distributed"} <= set(documented)


@pytest.mark.ci
@pytest.mark.parametrize(
    "function", [shown for shown in PUBLIC.values() if "Examples:" in (shown.__doc__ or "")], ids=lambda it: it.__name__
)
def test_the_examples_of_a_docstring_run(function, tmp_path, monkeypatch):
    model, x = torch.nn.Linear(512, 4), torch.randn(4, 512)
    shown = {name: getattr(memcheck, name) for name in ("Step", "Place")}
    given = {"memcheck": memcheck, "torch": torch, "model": model, "x": x, **shown}
    if function is memcheck.Step:
        given |= {"model": lambda x, mask, labels=None: x * mask, "mask": x, "labels": None}
    given |= {"mine": model, "theirs": torch.nn.Linear(512, 8)}
    monkeypatch.chdir(tmp_path)
    history = ROOT / "tests/data/histories/Da1sypetals-snapshot-0-ec612c.json.gz"
    Path("snapshot.pickle").write_bytes(history.read_bytes())
    run_equivalent(function, given)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_softplus_attention_equals_its_docstring():
    q, k, v = random(2, 5, 3), random(2, 3, 7), random(2, 3, 7)
    names = run_equivalent(memcheck.softplus_attention, {"torch": torch, "q": q, "k": k, "v": v, "eps": 1e-6})
    torch.testing.assert_close(memcheck.softplus_attention(q, k, v), names["y"])


def test_softplus_attention_step_equals_its_docstring():
    q, k, v = random(2, 1, 3), random(2, 3, 4), random(2, 3, 4)
    state = (random(2, 3).abs(), random(2, 3))
    given = {"q": q, "k": k, "v": v, "state": state, "eps": 1e-6, "softplus": softplus}
    names = run_equivalent(memcheck.softplus_attention_step, given)
    y, (z, a) = memcheck.softplus_attention_step(q, k, v, state)
    torch.testing.assert_close((y, z, a), (names["y"], names["z"], names["a"]))


def phi(x):
    return torch.where(x > 0, x + 1, x.masked_fill(x > 0, 0).exp())


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": False},
        {"causal": True, "normalize": False, "decay": random(2, 2, 6).sigmoid()},
        {"causal": True, "log_decay": -random(2, 2, 6).exp()},
    ],
)
def test_linear_attention_equals_its_docstring(options):
    q, k, v = random(2, 4, 3, 5), random(2, 2, 6, 5), random(2, 2, 6, 7)
    given = {
        "torch": torch,
        "q": q,
        "k": k,
        "v": v,
        "eps": 1e-6,
        "normalize": True,
        "decay": None,
        "log_decay": None,
        **options,
    }
    names = run_equivalent(memcheck.linear_attention, given)
    torch.testing.assert_close(memcheck.linear_attention(q, k, v, **options), names["y"])


def test_linear_attention_step_equals_its_docstring():
    q, k, v = random(2, 4, 1, 5), random(2, 2, 3, 5), random(2, 2, 3, 7)
    state = (random(2, 2, 5, 7), random(2, 2, 5).abs())
    given = {"q": q, "k": k, "v": v, "state": state, "eps": 1e-6, "phi": phi}
    names = run_equivalent(memcheck.linear_attention_step, given)
    y, (m, z) = memcheck.linear_attention_step(q, k, v, state)
    torch.testing.assert_close((y, m, z), (names["y"], names["m"], names["z"]))


@pytest.mark.parametrize("strict", [False, True])
def test_compressed_attention_equals_its_docstrings(strict):
    q, k, v = random(2, 4, 5, 3), random(2, 2, 7, 3), random(2, 2, 7, 3)
    sink, options = random(4), {"factor": 2, "strict": strict}
    given = {"torch": torch, "q": q, "k": k, "v": v, "sink": sink, "window": 2, **options}
    names = run_equivalent(memcheck.compressed_attention, given)
    torch.testing.assert_close(memcheck.compressed_attention(q, k, v, **options), names["y"])
    torch.testing.assert_close(memcheck.compressed_attention(q, k, v, window=2, **options), names["y_with_window"])
    expected = (names["y_with_sink"], names["lse_with_sink"])
    torch.testing.assert_close(memcheck.compressed_attention(q, k, v, sink=sink, return_lse=True, **options), expected)
    kc, vc = random(2, 2, 4, 3), random(2, 2, 4, 3)
    given = {"torch": torch, "q": q, "kc": kc, "vc": vc, "factor": 2, "kv_len": 7, "strict": strict}
    names = run_equivalent(memcheck.compressed_attention_pooled, given)
    y = memcheck.compressed_attention_pooled(q, kc, vc, factor=2, kv_len=7, strict=strict)
    torch.testing.assert_close(y, names["y"])


def test_compressed_attention_steps_equal_their_docstrings():
    q, k, v = random(2, 4, 1, 3), random(2, 2, 10, 3), random(2, 2, 10, 3)
    state = memcheck.compressed_attention_state(k[:, :, :6], v[:, :, :6], factor=4)
    given = {"k": k[:, :, :6], "v": v[:, :, :6], "factor": 4}
    torch.testing.assert_close(tuple(state), run_equivalent(memcheck.compressed_attention_state, given)["state"])
    for t in range(6, 10):
        new = {"q": q, "k": k[:, :, t : t + 1], "v": v[:, :, t : t + 1]}
        given = {"torch": torch, "compressed_attention_pooled": memcheck.compressed_attention_pooled, "state": state}
        names = run_equivalent(memcheck.compressed_attention_step, {**given, **new, "factor": 4, "strict": False})
        y, state = memcheck.compressed_attention_step(*new.values(), state, factor=4)
        expected = tuple(names[name] for name in ("kc", "vc", "k_sum", "v_sum", "positions", "factor"))
        torch.testing.assert_close((y, *state), (names["y"], *expected))


@pytest.mark.parametrize("projection", [memcheck.linear_r, memcheck.linear_l])
def test_projections_equal_their_docstrings(projection):
    x, w = random(2, 5, 3), random(3, 4)
    names = run_equivalent(projection, {"x": x, "w": w})
    torch.testing.assert_close(projection(x, w), names["y"])


def test_combinator_equals_its_docstring():
    x, weight = random(2, 5, 3), random(2, 3, 3)
    names = run_equivalent(memcheck.combinator, {"torch": torch, "x": x, "weight": weight})
    torch.testing.assert_close(memcheck.combinator(x, weight), names["y"])


def python_of(text):
    """The blocks of Python."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("source", python_of(README), ids=lambda source: source.partition("\n")[0])
def test_each_block_of_the_readme_runs_alone(source, tmp_path):
    code = f"import os; os.chdir({str(tmp_path)!r})\n{source}"
    done = run_python("-c", code, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_workflow_of_the_documentation_compares_what_its_script_writes(tmp_path, monkeypatch, capsys):
    yaml = pytest.importorskip("yaml")
    from memcheck.__main__ import main

    page = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
    (source,) = [source for source in python_of(page) if "write_record" in source]
    (workflow,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    steps = yaml.safe_load(workflow)["jobs"]["memory"]["steps"]
    commands = [line for step in steps for line in step.get("run", "").splitlines() if line.startswith("memcheck ")]
    for name, text in ((".", source), ("base", source), ("grown", source.replace("4, 256,", "4, 320,"))):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        exec(text, {})
    monkeypatch.chdir(tmp_path)
    assert len(commands) == 2
    assert [main(shlex.split(command.partition(">>")[0])[1:]) for command in commands] == [0, 0]
    printed = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if " same " in line]
    assert "training step" in rows
    assert (tmp_path / "memory.html").exists()
    assert main(["compare", "memory", "grown/memory", "--fail-on-growth", "10%"]) == 1
    (shown,) = re.findall(r"```text\n(2 of 2 cases grew.*?)```", page, re.DOTALL)
    if torch.__version__.startswith("2.13."):  # Others may need other bytes.
        assert shown in capsys.readouterr().out


@pytest.mark.ci
@pytest.mark.isolated
def test_the_python_of_the_documentation_runs(tmp_path, monkeypatch):
    # Tests that a page shows are run by tests/cli/test_pytest_plugin.py, models by tests/integrations, snapshots by
    # tests/snapshot, simulated GPUs by tests/simulated.
    elsewhere = ("def test_", "import transformers", "snapshot.pickle", "memcheck.simulate(")
    sources = [source for source in python_of(documentation()) if not any(word in source for word in elsewhere)]
    small = {name: torch.randn(1, 2, 64, 16, requires_grad=True) for name in "qkv"}
    names = {
        "model": torch.nn.Linear(8, 4),
        "x": torch.randn(3, 8, requires_grad=True),
        "naive": naive_attention,
        "my_attention": naive_attention,
        **small,
    }
    monkeypatch.chdir(tmp_path)
    for source in sources:
        exec(source, names)
        names |= small  # The README's own are 128 times as long.
    written = {"timeline.png", "memory.pickle", "trace.json.gz", "results", "memory", "before"}
    assert {path.name for path in tmp_path.iterdir()} == written
    assert len(names["records"]) == 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    linked = {page.parent / target.split()[0] for target in re.findall(r"\]\(([^)#:]+)\)", text)}
    named = {ROOT / path for path in re.findall(r"`((?:csrc|memcheck|tests|benchmarks)/[\w./]+)`", text)}
    assert [path for path in sorted(linked | named) if not path.exists()] == []


def headings_of(page):
    """The anchors of a page, as GitHub and the site make them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_heading_a_page_links_to_is_there(page):
    links = re.findall(r"\]\(([^)#:]*\.md|)#([\w-]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if link[1] not in headings_of(page.parent / link[0] if link[0] else page)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(ROOT / "docs")], ids=lambda it: it.stem)
def test_a_page_is_no_longer_than_a_reader_reads(page):
    words = len(page.read_text(encoding="utf-8").split())
    assert words <= 2200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_table_has_its_header(page):
    """An empty line inside of a table makes text of the rows after it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    starts = re.findall(r"(?<!\|\n)^\|.*\n(.*)", text, re.MULTILINE)
    assert [line for line in starts if not line.startswith(("| ---", "|:--"))] == []


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_bytes()) <= 12 * 1024


def test_the_documentation_names_every_contender_and_public_name():
    from memcheck.bench.case import CONTENDERS

    text = documentation()
    assert [name for name in [*CONTENDERS, *memcheck.__all__] if name not in text] == []


@pytest.fixture(scope="module")
def figures():
    """docs/figures.py, which writes figures into the pages."""
    return runpy.run_path(str(ROOT / "docs/figures.py"))


@pytest.mark.extension
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the pages show what torch 2.13 needs")
@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- end -->" in page.read_text()], ids=lambda it: it.stem)
def test_the_figures_of_a_page_are_those_of_the_results(figures, page):
    text = page.read_text(encoding="utf-8")
    assert figures["written"](text) == text, "python docs/figures.py writes them again"


def test_the_example_of_a_split_sequence_runs_in_two_processes():
    """torchrun's own way, a process for each rank."""
    script = ROOT / "docs/examples/split_sequence.py"
    assert len(script.read_text().splitlines()) <= 30
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has y [1, 4, 500, 16], and the gradient of one process") == 2


@pytest.mark.isolated
def test_the_runs_that_the_documentation_compares_differ_as_it_says(tmp_path, capsys, monkeypatch):
    """The edit is the one that the page shows."""
    from memcheck.__main__ import main

    page = (ROOT / "docs/run.md").read_text()
    script = Path("docs/examples/train.py")
    shutil.copytree(ROOT / script.parent, tmp_path / script.parent)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--device", "cpu", "--output", "before", str(script)]) == 0
    (edit,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    old, new = ("".join(re.findall(rf"^{re.escape(sign)}(.*\n)", edit, re.MULTILINE)) for sign in "-+")
    assert old in script.read_text()
    script.write_text(script.read_text().replace(old, new))
    assert main(["run", "--device", "cpu", "--output", "after", str(script)]) == 0
    capsys.readouterr()
    assert main(["compare", "before", "after"]) == 0
    compared = capsys.readouterr().out
    assert ["peak", "83.86", "67.92", "-15.94"] in [line.split() for line in compared.splitlines()]
    if torch.__version__.startswith("2.13."):  # Others have other numbers of small blocks.
        assert compared in page


@pytest.fixture
def report_of(tmp_path, capsys, monkeypatch):
    """What memcheck run says of an example script, and docs/run.md, both without what differs from run to run."""
    from memcheck.__main__ import main

    def steady(text):
        """Without seconds, without the number of events, as torch makes some on its first use of a module, and without
        the memory of the process.
        """
        process = r"The process grows [\d.]+ MiB|process, .*"
        return re.sub(rf"after [\d.e+-]+ s\b|[\d,]+ allocations|{process}", "some", text)

    def report(script, *flags):
        code = main(["run", "--device", "cpu", "--output", str(tmp_path), *flags, f"docs/examples/{script}"])
        assert code == bool(flags)
        return steady(capsys.readouterr().err).partition("\n\nWrote")[0].strip()

    monkeypatch.chdir(ROOT)
    return report, steady((ROOT / "docs/run.md").read_text())


@pytest.mark.isolated
def test_the_report_of_the_example_script_is_what_memcheck_run_says(report_of):
    report, page = report_of
    whole = report("train.py")
    if torch.__version__.startswith("2.13."):  # Others have other names and numbers of small blocks.
        assert whole in page
    peak = re.compile(r"The peak was [\d.]+ MiB")
    assert peak.findall(whole) == peak.findall(page)[:1]
    refused = re.search(r"^Memory ran out.*$", report("train.py", "--memory-limit", "64MiB"), re.MULTILINE)
    assert refused[0].partition(" in use")[0] in page


@pytest.mark.isolated  # The process reuses memory that was freed before, and grows later.
def test_the_report_of_the_leaking_script_is_what_memcheck_run_says(report_of):
    report, page = report_of
    sentences, _, rest = report("leak.py").partition("The peak was")
    assert sentences.count("\n") == 3
    assert sentences in page
    assert rest[rest.index("Alive more and more") :].partition("\n\nAlive at")[0] in page


def applied(diff, text):
    """The text with the change of a diff without line numbers."""
    lines = diff.splitlines()
    before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] != other) for other in "+-")
    assert text.count(before) == 1, before
    return text.replace(before, after)


# Exit codes of commands that fail on purpose.
REFUSED = ("--seq-length", "H10")


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the pages show what torch 2.13 needs")
@pytest.mark.ci
@pytest.mark.parametrize("name", ["first-minutes", "questions", "tutorial"])
def test_a_page_shows_what_a_terminal_prints(name, tmp_path):
    """Its commands in their order, with its changes of the script: the lines of the page are among those printed, in
    their order.
    """
    page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    # As a dict, because readline sets COLUMNS behind the back of os.environ.
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "COLUMNS": "", "PYTHONPATH": str(ROOT)}
    for folder in ("docs", "tests", "benchmarks"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for source in python_of(page):
        if "def test_" in source:
            (tmp_path / "test_memory.py").write_text(source)
    script, ran = tmp_path / "train.py", 0
    for kind, text in re.findall(r"```(console|diff)\n(.*?)```", page, re.DOTALL):
        if kind == "diff":
            script.write_text(applied(text, script.read_text()))
            continue
        command, *shown = text.splitlines()
        program, *words = shlex.split(command.removeprefix("$ "))
        simulates = words[:1] in (["run"], ["fit"]) and bool({"RTX-4090", "H100-80GB"} & {*words})
        if program == "memcheck" and not simulates:
            done = run_python("-m", "memcheck", *words, cwd=tmp_path, env=environment, timeout=300)
        else:  # pytest loads its plugins before torch, and a simulated GPU must be there before it.
            words = ["-m", "memcheck", *words] if simulates else words
            program = sys.executable if simulates or program == "python" else program
            done = subprocess.run(
                [program, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
            )
        assert (done.returncode == 2) == any(word in words for word in REFUSED), done.stderr
        # Columns are wider where the process takes a GB.
        printed = iter(re.sub(" +", " ", re.sub(r"in [\d.]+s", "in some", done.stdout + done.stderr)).splitlines())
        lines = [re.sub(" +", " ", re.sub(r"in [\d.]+s", "in some", line)) for line in shown if line != "..."]
        assert [line for line in lines if line not in printed] == [], f"{command}\n{done.stdout}{done.stderr}"
        ran += bool(shown)
    assert ran >= 6


def test_the_tables_of_the_documentation_are_those_of_the_committed_records():
    from memcheck.bench.sweep.store import read_records
    from memcheck.report.models import models_table, parts_tables
    from memcheck.report.records import records_table
    from memcheck.report.tables import Screen, to_text

    records = read_records(ROOT / "benchmarks/results/quick")
    assert len(records) == 25
    text = documentation()
    assert to_text(records_table(records), Screen(120)) in text
    *_, longest = to_text(records_table(records), Screen(80)).partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert longest in (ROOT / "README.md").read_text(encoding="utf-8")
    models = read_records(ROOT / "benchmarks/results/model")
    measured = [record for record in models if record.source == "measured"]
    assert [record.operator for record in measured] == ["naive", "softmax", "linear", "compressed", "softplus"]
    assert to_text(models_table(measured), Screen(160)) in text
    assert to_text(parts_tables(models)[1]) in text


def test_the_capacity_of_the_documentation_is_what_fit_says(capsys, monkeypatch):
    """Only answers without unknowns are compared; the others hold until more is known of them."""
    from memcheck.__main__ import main

    monkeypatch.setattr("memcheck.predict.replay.devices.running", lambda: (2, 13))  # The torch that the page shows.
    text = documentation()
    (command,) = re.findall(r"^\$ memcheck (fit .*--dim 512 --heads 8)$", text, re.MULTILINE)
    assert main([*command.split(), "--attention-type", "naive,softmax", "--format", "json"]) == 0
    known = [row for row in json.loads(capsys.readouterr().out)["capacities"] if not row["unknown"]]
    assert known
    for row in known:
        assert re.search(rf"^{row['operator']} +{row['largest']:,} ", text, re.MULTILINE)


@pytest.fixture(scope="module")
def pages():
    """docs/conf.py, which generates pages from the code."""
    return runpy.run_path(str(ROOT / "docs/conf.py"))


def test_the_page_of_commands_has_every_flag_and_example(pages):
    from memcheck.cli.flags import parser_of, split_help
    from memcheck.cli.requests import COMMANDS

    page, _, common = pages["command_page"]().partition("## Common flags")
    sections = re.split(r"^## memcheck (.*)$", page, flags=re.MULTILINE)[1:]
    assert sections[::2] == list(COMMANDS)
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        shown = [action for action in parser_of(name, COMMANDS[name])._actions if action.help != argparse.SUPPRESS]
        flags = {flag for action in shown for flag in action.option_strings} - {"-h", "--help"}
        assert set(re.findall(r"(?<=`)--?[\w-]+", text)) == flags
        assert re.findall(r"^\$ (.*)$", text, re.MULTILINE) == split_help(COMMANDS[name])[1]
        also = re.findall(r"(?<=`)--?[\w-]+", text.partition("[Common flags]")[2])
        assert set(also) <= set(re.findall(r"(?<=`)--?[\w-]+", common))
        assert "|  |" not in text


def test_the_page_of_records_explains_every_field(pages):
    import dataclasses

    from memcheck.core.record import Record

    rows = re.findall(r"^\| `(\w+)` \| `.*` \| (.+) \|$", pages["record_page"](), re.MULTILINE)
    assert [name for name, _ in rows] == [field.name for field in dataclasses.fields(Record)]


@pytest.mark.parametrize(
    ("name", "function"), [("commands", "command_page"), ("options", "option_page"), ("records", "record_page")]
)
def test_the_committed_reference_pages_are_current(pages, name, function):
    committed = (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8")
    assert committed == pages[function](), "python docs/conf.py writes the pages again"


def test_links_to_reference_pages_are_to_their_headings(pages):
    headings = {
        name: {
            heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", pages[function](), re.MULTILINE)
        }
        for name, function in (("commands", "command_page"), ("options", "option_page"), ("records", "record_page"))
    }
    links = re.findall(r"reference/(\w+)\.md#([\w-]+)", documentation())
    assert links
    assert [link for link in links if link[1] not in headings[link[0]]] == []
