"""Worker threads of the CPU kernels (model/kernels/cpu/threads.h). Results do not depend on which
threads help, or whether any does."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.kernels import native_only, ours

pytestmark = native_only
MANY = 2 + 2 * (os.cpu_count() or 1)
"""More threads than this machine has cores, so that some are always in the middle of their work."""
SHAPES = [(1, 64, 512), (3, 192, 100), (40, 96, 800), (200, 128, 48)]


@pytest.fixture
def threads() -> Iterator[None]:
    ours().use_threads(MANY)
    yield
    ours().use_threads(1)


def products(seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    found = []
    for num_rows, width, num_out in SHAPES:
        x, w = (torch.randn(num, width, generator=made) for num in (num_rows, num_out))
        found.append(ours().linear(x, ours().pack(w), num_out))
    return found


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_callers_at_once_get_what_each_gets_alone(threads: None) -> None:
    ours().use_threads(1)
    alone = [products(seed) for seed in range(8)]
    ours().use_threads(MANY)
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(products, [seed % 8 for seed in range(400)]))
    assert all(same(found[i], alone[i % 8]) for i in range(400))


def pieces_of_two() -> None:
    """Split products in two pieces. The caller finishes its piece first, so the other thread has to
    wake up. Repeats often, because under load that thread may come too late to take any."""
    made = torch.Generator().manual_seed(0)
    packed = ours().pack(torch.randn(128, 4096, generator=made))
    many = [torch.randn(96, 4096, generator=made) for _ in range(24)]
    alone = [ours().linear(x, packed, 128) for x in many]
    ours().use_threads(2)
    for i in range(12):  # writes each result where another one was
        turned = [*many[i:], *many[:i]]
        assert same([ours().linear(x, packed, 128) for x in turned], [*alone[i:], *alone[:i]])


def test_a_piece_that_somebody_is_in_the_middle_of_is_waited_for() -> None:
    """Runs in a separate process, which the error would kill."""
    code = f"from {__name__} import pieces_of_two; pieces_of_two()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_nobody_waits_for_threads_that_do_not_come(threads: None) -> None:
    """A forked child has only the forking thread."""
    before = products(0)
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # ends a child that waits indefinitely
        os._exit(0 if same(products(0), before) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_torch_has_none_of_its_own_that_wait_on_the_same_cores(threads: None) -> None:
    assert torch.get_num_threads() == 1


def test_a_number_of_threads_that_is_none_is_refused() -> None:
    with pytest.raises(RuntimeError, match="threads: 0"):
        ours().use_threads(0)
