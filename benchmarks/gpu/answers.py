"""Whole answers of the shipped checkpoint, one sequence at a time.

Measures the gain from drafts with strict and with relaxed acceptance. Relaxed acceptance uses
TensorRT-LLM's settings for DeepSeek-R1.
"""

import statistics
import time
from dataclasses import replace

from benchmarks.gpu.device import Device
from benchmarks.gpu.say import Say
from benchmarks.harness.engines import Bench, greedy, load
from benchmarks.harness.held_out import held_out
from tandem.core.config import TINY_MODEL
from tandem.core.request import RELAXED, Request, Speculation
from tandem.model.loaded import LoadedModel

NUM_TOKENS, NUM_PROMPTS = 256, 5
RELAXED_SPECULATION = Speculation(acceptance=RELAXED, relaxed_top_n=10, relaxed_delta=0.6)


def run(device: Device, say: Say) -> None:
    sets = [] if device.is_rehearsal else ["decode.device=cuda"]
    loaded = load(TINY_MODEL, "model.dtype=bfloat16", *sets)
    num_tokens, num_prompts = (20, 1) if device.is_rehearsal else (NUM_TOKENS, NUM_PROMPTS)
    texts = held_out(num_prompts, 64, 128, seed=9)
    plain_s = 0.0
    for num_drafts in range(4):
        for kind in ("strict", "relaxed") if num_drafts else ("strict",):
            asked = [request(loaded, f"r{i}", ids, kind, num_tokens) for i, ids in enumerate(texts)]
            per_token_s, per_step = answered(loaded, asked, num_drafts, device)
            plain_s = plain_s or per_token_s
            told = {"faster": plain_s / per_token_s, "tokens_per_step": per_step}
            say(f"{kind}, n = {num_drafts}", ms_per_token=1e3 * per_token_s, **told)


def request(
    loaded: LoadedModel, name: str, prompt_ids: list[int], kind: str, num_tokens: int
) -> Request:
    """Return a request. For relaxed acceptance its prompt opens thinking, to which it is
    limited."""
    one = greedy(name, prompt_ids, num_tokens, ignore_eos=True)
    if kind == "strict":
        return one
    assert loaded.think_ids is not None, "the shipped checkpoint thinks"
    thinking = (prompt_ids[0], loaded.think_ids[0], *prompt_ids[2:])
    return replace(one, prompt_ids=thinking, speculation=RELAXED_SPECULATION)


def answered(
    loaded: LoadedModel, asked: list[Request], num_drafts: int, device: Device
) -> tuple[float, float]:
    """Return the median seconds per token after the first, and the tokens per step.

    One answer is generated before, so that the programs exist.
    """
    bench = Bench(loaded, num_drafts=num_drafts, max_rows=1, page_size=64, num_pages=64)
    times, steps = list[float](), list[int]()
    for one in (asked[0], *asked):
        bench.start(one)
        before = bench.decode.num_steps
        device.settle()
        began_at = time.perf_counter()
        while bench.decode.scheduler.sequences:
            bench.decode.step()
        device.settle()
        times.append((time.perf_counter() - began_at) / (one.sampling.max_tokens - 1))
        steps.append(bench.decode.num_steps - before)
        while bench.decode.has_work():
            bench.decode.step()
    bench.check_empty()
    num_tokens = sum(one.sampling.max_tokens - 1 for one in asked)
    return statistics.median(times[1:]), num_tokens / sum(steps[1:])
