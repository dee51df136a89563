"""When a script ends on a simulated GPU: steps, or rounds of them, that allocate the same."""

from __future__ import annotations

import pytest

from memcheck.simulated.ending import Ending


def end_of(allocated: list[int], steps: int | None = None) -> tuple[int, str | None]:
    """The step after which a script with these steps ends, and why; its last step and None if it is not ended."""
    ending = Ending(steps)
    for number, size in enumerate(allocated, 1):
        try:
            ending.after_step(number, number, (size, 1, 2))
        except SystemExit:
            return number, ending.sentence
    return len(allocated), ending.sentence


LATER = "; what would come later, such as evaluation or saving, was not run: --whole runs it."


@pytest.mark.parametrize(
    ("allocated", "step", "reason"),
    [
        ([9, 5, 5, 5, 5, 5], 4, "the last three allocated the same"),
        ([5, 5, 5], 3, "the last three allocated the same"),
        ([9, 1, 2, 1, 2, 1, 2, 1], 7, "the last three rounds of two steps allocated the same"),
        ([9, 9, *[1, 1, 2] * 3], 11, "the last three rounds of three steps allocated the same"),
        ([9, *[1, 1, 1, 2] * 4], 4, "the last three allocated the same"),
        ([9, *[1, 1, 2, 2] * 4], 13, "the last three rounds of four steps allocated the same"),
    ],
)
def test_a_script_ends_when_its_steps_repeat(allocated: list[int], step: int, reason: str) -> None:
    assert end_of(allocated) == (step, f"Ended after {step} optimizer steps, as {reason}{LATER}")


@pytest.mark.parametrize("allocated", [[], [1, 1], [1, 2, 1, 2, 1], [1, 2, 3, 4, 5] * 4, list(range(100))])
def test_steps_that_differ_do_not_end_it(allocated: list[int]) -> None:
    assert end_of(allocated) == (len(allocated), None)


def test_a_number_of_steps_is_kept_to() -> None:
    assert end_of([1] * 9, steps=7) == (7, f"Ended after 7 optimizer steps, as --steps asks{LATER}")
    assert end_of([1, 2], steps=1) == (1, f"Ended after 1 optimizer step, as --steps asks{LATER}")
    assert end_of([1] * 9, steps=20) == (9, None)


def test_another_optimizer_begins_anew_and_steps_of_several_are_told_apart() -> None:
    ending = Ending()
    ending.after_step(1, 1, (5,))
    ending.after_step(2, 3, (5,))
    ending.after_step(1, 4, (5,))
    ending.after_step(2, 6, (5,))
    with pytest.raises(SystemExit):
        ending.after_step(3, 8, (5,))
    assert ending.sentence == (
        f"Ended after 3 steps of the optimizer that steps most often, as the last three allocated the same{LATER}"
    )


def test_a_script_that_goes_on_is_ended_at_its_next_step() -> None:
    ending = Ending(steps=1)
    for step in (1, 2):
        with pytest.raises(SystemExit, match="0"):
            ending.after_step(step, step, (step,))
    assert ending.sentence is not None
    assert ending.sentence.startswith("Ended after 1 optimizer step,")
