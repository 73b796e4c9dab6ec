"""Extensions made by a one-line patch and at most one new file, used in a copy of the tree."""

from pathlib import Path

from tests.example_patches import NEEDED, plant, run


def test_a_second_entrypoint_answers_and_refuses_as_the_first(
    small_model: Path, tmp_path: Path
) -> None:
    plant("echo_server", tmp_path)
    run(tmp_path, "tests.integration.second_entrypoint", str(small_model))


def test_a_drafter_of_ones_own_changes_no_token(small_model: Path, tmp_path: Path) -> None:
    plant("again_drafter", tmp_path, (*NEEDED, "benchmarks"))
    run(tmp_path, "tests.integration.last_token", str(small_model))


def test_a_counter_shows_up_in_the_status(small_model: Path, tmp_path: Path) -> None:
    plant("update_counter", tmp_path)
    run(tmp_path, "tests.integration.update_counter", str(small_model))
