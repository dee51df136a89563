"""`memcheck sweep`: grids from flags, presets and files, and sweeps that are stopped in every way there is."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import run_python

from memcheck.__main__ import main
from memcheck.bench import catalog
from memcheck.bench.sweep.store import FILE, Store, read_records
from memcheck.core.devices import device_named
from memcheck.core.record import Record
from memcheck.core.step import Place
from memcheck.report.cases import pair

SMALL = ["--attention-type", "naive,softplus", "--seq-len", "8:16:x2", "--dim", "16", "--heads", "2"]
PREDICTED = [*SMALL, "--predict-only"]
SMALL += ["--no-time", "--device", "cpu"]
SLEEPERS = """
    import time
    from memcheck.bench.catalog import register

    def doze(q, k, v):
        time.sleep(0.2)
        return q * 2

    def sleep(q, k, v):
        time.sleep(600)

    register("doze", doze)
    register("sleep", sleep)
"""


@pytest.fixture
def plan(capsys, tmp_path, monkeypatch) -> Callable[..., list[str]]:
    """The cases that --dry-run lists where there are no results yet."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> list[str]:
        assert main(["sweep", "--dry-run", "--device", "cpu", *flags]) == 0
        *cases, blank, total = capsys.readouterr().out.splitlines()
        assert blank == ""
        assert total.startswith(f"{len(cases)} cases, ")
        return [" ".join(line.split()) for line in cases]

    return run


@pytest.fixture
def sleepers(tmp_path) -> Path:
    path = tmp_path / "sleepers.py"
    path.write_text(textwrap.dedent(SLEEPERS))
    return path


@pytest.fixture
def no_files(monkeypatch) -> None:
    """Tables and pictures take most of the time."""
    monkeypatch.setattr("memcheck.cli.commands.sweep.write_pictures", lambda *args, **kwargs: [])
    monkeypatch.setattr("memcheck.cli.commands.sweep.write_tables", lambda *args, **kwargs: [])


def command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "memcheck", "sweep", "--output", str(folder), *flags]


def begin(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """Where tests run in the background they ignore Ctrl-C, and so would what they start."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command(folder, *flags),
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rows(folder: Path) -> list[str]:
    path = folder / FILE
    return path.read_text().splitlines() if path.exists() else []


def children(process: subprocess.Popen[str]) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread may have ended.
            found += map(int, (task / "children").read_text().split())
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a sweep with measured and predicted rows, and what it printed."""
    folder, out = tmp_path_factory.mktemp("swept") / "new" / "results", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["sweep", *SMALL, "--predict", "--output", str(folder)]) == 0
    return folder, out.getvalue()


@pytest.mark.extension
def test_rows_tables_and_plots(swept) -> None:
    folder, out = swept
    assert "[1/4] naive" in out
    assert "B1 S16 T16 E16 H2 float32: ok, peak" in out
    assert "4 cases: 4 ok; predicted: 4 cases: 4 ok\n\nWrote " in out
    records = read_records(folder)
    assert Counter((record.source, record.status) for record in records) == {
        ("measured", "ok"): 4,
        ("predicted", "ok"): 4,
    }
    both = pair(records)
    assert len(both) == 4
    assert all(measured.forward_peak_bytes == predicted.forward_peak_bytes for measured, predicted in both)
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert {".svg", ".png", ".csv", ".jsonl"} <= {path.suffix for path in written}
    assert all(path.stat().st_size for path in written)
    manifest = json.loads((folder / "sweep.json").read_text())
    assert manifest["command"] == f"memcheck sweep {' '.join(SMALL)} --predict --output {folder}"
    assert manifest["environment"]["torch_version"] == records[0].torch_version
    assert manifest["environment"]["device_name"] != "cpu"


@pytest.mark.extension
def test_the_same_again_runs_nothing(swept, tmp_path, capsys, no_files) -> None:
    folder = shutil.copytree(swept[0], tmp_path / "results")
    assert main(["sweep", *SMALL, "--predict", "--output", str(folder), "--format", "json"]) == 0
    printed = capsys.readouterr()
    records = [Record.from_json(json.dumps(row)) for row in json.loads(printed.out)]
    assert [record.source for record in records] == ["measured"] * 4 + ["predicted"] * 4
    assert sorted(map(Record.to_json, records)) == sorted(map(Record.to_json, read_records(folder)))
    assert printed.err.count("4 of 4 cases were done before") == 2
    assert "naive " not in printed.err
    assert main(["sweep", *PREDICTED, "--device", "cpu", "--output", str(folder)]) == 0
    assert len(rows(folder)) == 8


def test_a_grid_of_two_axes_has_few_pictures(tmp_path) -> None:
    grid = ["--attention-type", "naive,softplus", "--seq-len", "8,16", "--dim", "16,32", "--heads", "2"]
    assert main(["sweep", *grid, "--predict-only", "--device", "A100-40GB", "--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {"memory.png", "kept.png", "savings.png"}


@pytest.mark.extension
def test_a_closed_stdout_costs_no_row(tmp_path, monkeypatch, no_files) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["sweep", *SMALL, "--attention-type", "naive", "--seq-len", "8", "--output", str(tmp_path)]) == 0
    assert len(rows(tmp_path)) == 2


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("", 35),
        ("--preset quick", 35),
        # 9 dimensions at 5 lengths and 9 lengths at 5 dimensions, of which 5 by 5 in both; four contenders
        ("--preset memcheck-pyt", (45 + 45 - 25) * 4),
        ("--preset cs336", 4 * 5 * 2),
        ("--preset ato", 5 * 3),
        ("--preset ato --seq-len 64,128", 2 * 3),
        ("--preset memcheck-pyt --attention-type softplus", 65),
        ("--bsz 8 --seq-len 256:16384:x2 --dim 16,32,64,128", 5 * 7 * 4),
        ("--attention-type naive --attention-type softplus,combinator --dtype fp32,bf16 --mode train,inference", 60),
        ("--attention-type naive --query-len 4 --kv-len 8,16", 2),
        ("--attention-type naive --mode train,decode", 10),
        ("--attention-type naive --causal --compile", 5),
    ],
)
def test_counts_of_cases(plan, flags: str, count: int) -> None:
    cases = plan(*flags.split())
    assert len(set(cases)) == len(cases) == count


def test_the_presets_are_those_of_the_published_tables(plan) -> None:
    pyt = plan("--preset", "memcheck-pyt")
    assert "memcheck-pyt/naive B64 S8192 T8192 E8192 H8 float32: to run" in pyt
    assert "memcheck-pyt/softplus B64 S32 T32 E2048 R2048 float32: to run" in pyt
    assert "memcheck-pyt/combinator B64 S512 E32 float32: to run" in pyt
    cs336 = plan("--preset", "cs336")
    assert "cs336/naive B8 S16384 T16384 E128 float32: to run" in cs336
    assert "cs336/naive B8 S256 T256 E16 float32 compiled: to run" in cs336
    assert "naive B4 S8192 T8192 E512 H8 float16: to run" in plan("--preset", "ato")


def test_a_file_says_what_flags_say(tmp_path, plan) -> None:
    path = tmp_path / "grid.toml"
    path.write_text("""
        attention-type = ["naive", "softplus"]
        bsz = 2
        dtype = "bf16"
        causal = false
        [[grid]]
        seq-len = "8:32:x2"
        dim = [16, 32]
        [[grid]]
        seq_len = 64
        dim = 64
    """)
    cases = plan("--config", str(path))
    assert Counter(case.split()[0] for case in cases) == {"naive": 7, "softplus": 7}
    assert "naive B2 S64 T64 E64 H4 bfloat16: to run" in cases
    # The command line goes over it.
    cases = plan("--config", str(path), "--dtype", "fp32", "--kv-len", "128", "--attention-type", "softplus")
    assert cases == [f"softplus B2 S128 T128 E{dim} R{dim} float32: to run" for dim in (16, 32, 64)]


def test_windows_of_compressed_attention(tmp_path, plan, capsys) -> None:
    names = ["--attention-type", "naive,compressed", "--seq-len", "64"]
    expected = ["naive B1 S64 T64 E256 H4 float32: to run"]
    expected += [f"compressed B1 S64 T64 E256 H4 C8 W{window} float32: to run" for window in (16, 32)]
    assert plan(*names, "--window", "16,32") == expected
    path = tmp_path / "grid.toml"
    path.write_text('attention-type = ["naive", "compressed"]\nseq-len = 64\nwindow = [16, 32]\n')
    assert plan("--config", str(path)) == expected
    path.write_text('attention-type = "naive"\nwindow = 16\n')
    assert main(["sweep", "--config", str(path), "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "memcheck: --window is only for compressed, got --attention-type naive\n"


def test_a_gpu_has_the_sizes_of_a_real_layer(plan, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr("memcheck.cli.commands.sweep.profile.find_device", lambda name: "cuda:0")
    quick = plan("--attention-type", "softplus", "--preset", "quick")
    assert "softplus B4 S8192 T8192 E2048 R2048 bfloat16: to run" in quick
    assert "softplus B4 S4096 T4096 E512 R512 bfloat16: to run" in quick
    assert len(quick) == 5 + 4 - 1
    assert plan("--attention-type", "naive", "--seq-len", "64") == ["naive B4 S64 T64 E2048 H16 bfloat16: to run"]
    given = "--attention-type naive --seq-len 64 --bsz 2 --dtype fp32 --dim 32 --heads 2"
    assert plan(*given.split()) == ["naive B2 S64 T64 E32 H2 float32: to run"]
    # Presets of published tables keep their sizes.
    assert "memcheck-pyt/naive B64 S8192 T8192 E8192 H8 float32: to run" in plan("--preset", "memcheck-pyt")
    monkeypatch.setattr("memcheck.cli.commands.sweep.profile.find_device", lambda name: "cpu")
    assert "naive B1 S2048 T2048 E256 H4 float32: to run" in plan()


def test_the_header_names_the_defaults_of_a_gpu(tmp_path, capsys, no_files, monkeypatch) -> None:
    monkeypatch.setattr("memcheck.cli.run_requests.Sweep.place", lambda options: Place(device_named("A100-40GB")))
    sizes = ["--attention-type", "softplus", "--seq-len", "64", "--dim", "64"]
    assert main(["sweep", *sizes, "--predict-only", "--output", str(tmp_path)]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "defaults of a GPU, where no flag says otherwise: bf16, batch 4, 16 heads"


def test_a_file_over_a_preset(tmp_path, plan) -> None:
    path = tmp_path / "grid.toml"
    path.write_text('preset = "ato"\nseq-len = [64, 128]\npasses = 3\n')
    assert len(plan("--config", str(path))) == 6
    assert len(plan("--config", str(path), "--preset", "quick")) == 5 * 2 * 4


@pytest.mark.extension
def test_a_folder_in_use_is_refused(tmp_path, capsys) -> None:
    with Store(tmp_path).owned():
        assert main(["sweep", *SMALL, "--output", str(tmp_path)]) == 2
    assert "is in use by another sweep: wait for it, or name another folder" in capsys.readouterr().err


@pytest.mark.extension
def test_long_sweeps_say_so_first(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(
        "memcheck.cli.commands.sweep.run_sweep", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert main(["sweep", "--preset", "memcheck-pyt", "--device", "cpu", "--output", str(tmp_path)]) == 130
    printed = capsys.readouterr()
    assert " hours of arithmetic on a CPU; Ctrl-C keeps finished cases" in printed.out
    assert "the same command continues: memcheck sweep --preset memcheck-pyt" in printed.err


@pytest.mark.extension
def test_errors_are_seen_in_the_exit_code(tmp_path, no_files, monkeypatch, sleepers) -> None:
    sleepers.write_text("from memcheck.bench.catalog import register\nregister('wrong', lambda q, k, v: q @ v)\n")
    monkeypatch.setitem(catalog.CONTENDERS, "wrong", None)
    del catalog.CONTENDERS["wrong"]
    flags = f"--plugin {sleepers} --attention-type wrong,naive --seq-len 8 --no-time --device cpu".split()
    assert main(["sweep", *flags, "--output", str(tmp_path / "results")]) == 1
    assert Counter(record.status for record in read_records(tmp_path / "results")) == {"error": 1, "ok": 1}


def test_kill_9_loses_nothing_that_was_done(tmp_path, sleepers) -> None:
    flags = f"--plugin {sleepers} --attention-type doze --seq-len 8:256:x2 --no-time --device cpu".split()
    folder = tmp_path / "results"
    process = begin(folder, *flags)
    wait_for(lambda: len(rows(folder)) >= 2)
    workers = children(process)
    process.kill()
    process.wait(timeout=60)
    done = rows(folder)
    assert workers
    wait_for(lambda: all(map(gone, workers)))
    again = run_python(*command(folder, *flags)[1:], timeout=300)
    assert again.returncode == 0
    # The row that it may have been writing is the only one that may be cut off.
    whole = [line for line in done if line.endswith("}")]
    assert rows(folder)[: len(whole)] == whole
    assert [record.query_len for record in read_records(folder)] == [8, 16, 32, 64, 128, 256]
    assert f"{len(whole)} of 6 cases were done before" in again.stdout


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tmp_path, sleepers) -> None:
    flags = f"--plugin {sleepers} --attention-type doze,sleep --seq-len 8 --no-time --device cpu".split()
    folder = tmp_path / "results"
    process = begin(folder, *flags, "--max-seconds-per-case", "0")
    assert "[1/2] doze" in process.stdout.readline()
    workers = children(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().splitlines() == [
        f"stopped; finished cases are kept in {folder}, and the same command continues: memcheck sweep "
        f"--output {folder} {' '.join(flags)} --max-seconds-per-case 0"
    ]
    assert workers
    wait_for(lambda: all(map(gone, workers)))


@pytest.mark.ci
def test_a_full_disk_ends_the_sweep_in_one_line(tmp_path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))

    full = subprocess.run(command(tmp_path, *SMALL), capture_output=True, text=True, timeout=300, preexec_fn=limit)
    assert full.returncode == 1
    (line,) = full.stderr.splitlines()
    assert f"{tmp_path / FILE} takes no more rows: File too large; finished cases are kept in {tmp_path}, and" in line
    done = rows(tmp_path)
    assert 0 < len(done) < 4
    assert run_python(*command(tmp_path, *SMALL)[1:], timeout=300).returncode == 0
    assert rows(tmp_path)[: len(done)] == done
    assert len(rows(tmp_path)) == 4


@pytest.mark.ci
@pytest.mark.isolated
def test_dask_with_a_worker_that_dies(tmp_path) -> None:
    """A real cluster of processes: the sweep ends with a row for every case."""
    distributed = pytest.importorskip("distributed")
    path = tmp_path / "dies.py"
    # The parent of a case's process is the dask worker; the flag makes it die once.
    path.write_text(
        textwrap.dedent(f"""
            import os, pathlib, signal, time
            from memcheck.bench.catalog import register

            def kills_its_worker(q, k, v):
                flag = pathlib.Path({str(tmp_path / "died")!r})
                if not flag.exists():
                    flag.touch()
                    os.kill(os.getppid(), signal.SIGKILL)
                    time.sleep(600)
                return q * 2

            register("kills-its-worker", kills_its_worker)
        """)
    )
    names = "kills-its-worker,naive,softplus"
    flags = ["--plugin", str(path), "--attention-type", names, "--seq-len", "8", "--no-time", "--device", "cpu"]
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as cluster:
        folder = tmp_path / "results"
        assert main(["sweep", *flags, "--dask", cluster.scheduler_address, "--output", str(folder)]) == 0
    assert (tmp_path / "died").exists()
    records = read_records(folder)
    assert Counter(record.operator for record in records) == dict.fromkeys(names.split(","), 1)
    assert {record.status for record in records} == {"ok"}


# Sweeps that run nothing.


def test_a_preset_is_filled_without_running_anything(tmp_path, capsys, no_files, monkeypatch) -> None:
    monkeypatch.setattr("memcheck.bench.sweep.worker.CaseProcess.ask", None)
    flags = ["sweep", "--preset", "memcheck-pyt", "--predict-only", "--device", "a100-40gb", "--output", str(tmp_path)]
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "[  1/260] memcheck-pyt/naive      B64 S512 T512 E32 H8 float32: predicted ok, peak" in out
    assert "predicted: 260 cases: " in out
    records = read_records(tmp_path)
    assert len(records) == 260
    assert {(row.source, row.device, row.device_name) for row in records} == {("predicted", "cuda", "A100-40GB")}
    assert {row.status for row in records} >= {"ok", "oom"}
    manifest = json.loads((tmp_path / "sweep.json").read_text())
    assert manifest["environment"]["device_name"] == "A100-40GB"
    assert manifest["command"].startswith("memcheck sweep --preset memcheck-pyt --predict-only")
    assert sum(manifest["statuses"].values()) == 260


@pytest.mark.extension
def test_predictions_go_on_where_they_stopped(tmp_path, capsys, no_files) -> None:
    flags = ["sweep", *PREDICTED, "--output", str(tmp_path), "--format", "json"]
    assert main([*flags, "--device", "A10", "--seq-len", "8"]) == 0
    assert main([*flags, "--device", "A10"]) == 0
    printed = capsys.readouterr()
    assert "2 of 4 cases were done before" in printed.err
    assert len(rows(tmp_path)) == 4
    # Another device, another limit: other predictions.
    assert main([*flags, "--device", "24GiB"]) == 0
    assert main([*flags, "--device", "A10", "--memory-limit", "1KiB"]) == 0
    assert len(rows(tmp_path)) == 12
    assert Counter(row.status for row in read_records(tmp_path)) == {"ok": 8, "oom": 4}


def test_a_dry_run_says_what_is_to_be_predicted(plan, tmp_path, no_files, capsys) -> None:
    flags = [*PREDICTED, "--output", str(tmp_path), "--device", "L40S"]
    assert "naive B1 S8 T8 E16 H2 float32: to predict" in plan(*flags)
    assert main(["sweep", *flags]) == 0
    capsys.readouterr()
    assert "naive B1 S8 T8 E16 H2 float32: ok" in plan(*flags)


def test_a_combination_that_fits_no_operator_is_a_predicted_row_too(tmp_path, no_files) -> None:
    flags = ["--attention-type", "naive", "--dim", "16", "--heads", "2,3", "--seq-len", "8", "--predict-only"]
    assert main(["sweep", *flags, "--device", "T4", "--output", str(tmp_path)]) == 0
    assert [(row.heads, row.source, row.status) for row in read_records(tmp_path)] == [
        (2, "predicted", "ok"),
        (3, "predicted", "skipped"),
    ]
