"""Check for the CPU's tokens, the same bits in both forms, and no host wait inside a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.say import Say
from benchmarks.harness.engines import Bench, greedy, load
from benchmarks.harness.held_out import held_out
from tandem.core.config import TINY_MODEL
from tandem.core.request import Request
from tandem.model.loaded import LoadedModel

NUM_TOKENS = 60
CYCLES = 4_000_000_000
"""Two seconds of a processor's clock."""


def run(device: Device, say: Say) -> None:
    sets = [] if device.is_rehearsal else ["decode.device=cuda", "model.kernels=triton"]
    reference = load(TINY_MODEL, "model.kernels=torch")
    asked = requests(4 if device.is_rehearsal else 12)
    wanted = Bench(reference, num_drafts=0, max_rows=len(asked), page_size=64).generate(*asked)
    for dtype in ("float32", "bfloat16"):
        loaded = load(TINY_MODEL, f"model.dtype={dtype}", *sets)
        for n in range(4):
            eager, eager_bits = answers(loaded, asked, n, is_captured=False)
            captured, captured_bits = answers(loaded, asked, n, is_captured=True)
            again, again_bits = answers(loaded, asked, n, is_captured=True)
            as_on_a_cpu = sum(a == b for a, b in zip(eager, wanted, strict=True)) / len(asked)
            forms_equal = eager == captured and same(eager_bits, captured_bits)
            runs_equal = captured == again and same(captured_bits, again_bits)
            say(
                f"{dtype}, n = {n}",
                is_right=forms_equal and runs_equal and (dtype != "float32" or as_on_a_cpu == 1),
                as_on_a_cpu=as_on_a_cpu,
                forms_equal=forms_equal,
                runs_equal=runs_equal,
                form=loaded.exec_mode,
            )
    found = waits(load(TINY_MODEL, "model.dtype=bfloat16", *sets), device)
    say("waits of the host", is_right=not found, found=found)
    if not device.is_rehearsal:
        say("a program is made while a transfer waits", is_right=is_made_beside(loaded))


def requests(num: int) -> list[Request]:
    lengths = held_out(num, 20, 200, seed=5)
    return [greedy(f"r{i}", ids, NUM_TOKENS, ignore_eos=True) for i, ids in enumerate(lengths)]


def answers(
    loaded: LoadedModel, asked: list[Request], num_drafts: int, is_captured: bool
) -> tuple[list[tuple[list[int], str]], list[torch.Tensor]]:
    loaded.dispatch.eager_reason = "" if is_captured else "to be compared"
    bench = Bench(loaded, num_drafts=num_drafts, max_rows=len(asked), page_size=64, num_pages=400)
    while bench.decode.has_work():
        bench.decode.step()
    told = bench.generate(*asked)
    bench.check_empty()
    return told, bench.all_caches()


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether the caches are equal, except the dummy page, whose content is arbitrary."""
    return all(torch.equal(a[1:], b[1:]) for a, b in zip(some, others, strict=True))


def waits(loaded: LoadedModel, device: Device) -> str:
    """Return torch's message about the first host wait in a step of each form; "" if there is
    none."""
    for is_captured in (False, True):
        loaded.dispatch.eager_reason = "" if is_captured else "to be compared"
        bench = Bench(loaded, num_drafts=3, max_rows=4, page_size=64)
        while bench.decode.has_work():
            bench.decode.step()
        for request in requests(4):
            bench.start(request)
        bench.decode.step()
        try:
            with no_waits(device):
                for _ in range(5):
                    bench.decode.step()
        except RuntimeError as error:
            return f"{'captured' if is_captured else 'eager'}: {error}"
    return ""


def is_made_beside(loaded: LoadedModel) -> bool:
    """Return whether a program can be made while another stream is busy.

    This is the case during a transfer whose peer waits for this rank.
    """
    program, x = (
        loaded.kernels.make_replayable(lambda x: (x + 1,)),
        torch.ones(8, device=loaded.device),
    )
    program(x)
    over = torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        torch.cuda._sleep(CYCLES)
        over.record()
    program(x)
    is_made = program.is_ready and not over.query()
    over.synchronize()
    return is_made


@contextmanager
def no_waits(device: Device) -> Iterator[None]:
    if device.is_rehearsal:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
