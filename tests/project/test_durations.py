"""Tests that take 2 seconds or more are marked slow by a table, which one command writes."""

import os

import durations


def test_slow_tests_are_there() -> None:
    """Rows of tests that were renamed are gone, so that none is taken for a fast one."""
    assert [test for test in durations.slow_tests() if not durations.is_there(test)] == []


def test_durations_of_a_run_replace_those_before(tmp_path, monkeypatch) -> None:
    own = f"tests.project.{os.path.splitext(os.path.basename(__file__))[0]}"
    cases = {"test_slow_tests_are_there": 3.0, "test_durations_of_a_run_replace_those_before": 1.0, "test_gone": 9.0}
    text = "".join(f'<testcase classname="{own}" name="{name}" time="{time}"/>' for name, time in cases.items())
    (tmp_path / "rest.xml").write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    file = tmp_path / "durations.csv"
    file.write_text(f"test,seconds\n{own.replace('.', '/')}.py::test_durations_of_a_run_replace_those_before,5.0\n")
    monkeypatch.setattr(durations, "FILE", file)
    monkeypatch.setattr(durations, "is_there", lambda test: "gone" not in test)
    durations.write([tmp_path / "rest.xml"])
    assert durations.slow_tests() == {f"{own.replace('.', '/')}.py::test_slow_tests_are_there": 3.0}


def test_a_slow_test_is_marked_unless_it_is_the_smoke_of_its_kind(request) -> None:
    """make test leaves the first out and runs the second."""
    slow = durations.slow_tests()
    for item in request.session.items:
        if item.nodeid in slow:
            assert bool(item.get_closest_marker("slow")) != bool(item.get_closest_marker("smoke"))
