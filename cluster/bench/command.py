"""``tandem bench``: put load on a server and report latency, throughput and draft acceptance."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.cluster.bench import compare
from tandem.cluster.bench.experiment import Arm, Trial, speedups
from tandem.cluster.bench.options import BenchOptions
from tandem.cluster.bench.report import as_json, show
from tandem.cluster.client.client import AsyncClient
from tandem.cluster.commands.common import (
    DEFAULT_ADDRESS,
    fail,
    run_command,
    temporary_server,
    with_options_of,
)


@with_options_of(BenchOptions)
def bench(**values: Any) -> None:
    """Put load on a server and report latency, throughput and draft acceptance.

        --concurrency keeps a fixed number of requests in flight (closed loop).
        --rate, or a trace with arrival times, sends on schedule (open loop). Latency
        counts from the scheduled time, so it includes delays of server and generator.
        Failed requests are counted; the exit code is 1 only if all of them fail.

        Acceptance on random prompts says little about real text: use a trace.
        Compared runs share their prompts, so a prefix cache helps the later ones.

        \b
        Examples:
          tandem bench --concurrency 8 --num-requests 32
          tandem bench --rate 4 --burstiness 0.5 --slo-ttft-ms 500 --slo-tpot-ms 50
          tandem bench --compare-drafts 0,3 --ignore-eos --plot drafts.png
          tandem bench --workload shared-prefix --num-prefixes 2 --prefix-tokens 512
          tandem bench --workload trace --trace day.jsonl --max-drafts 2 --json
          tandem bench --launch --set speculation.max_depth=2
          tandem bench --launch --workload trace --trace mine.jsonl --ignore-eos \\
            --compare drafter=none --compare drafter=mtp --compare drafter=ngram
        \b
        A line of a trace:
          {"arrival_s": 0.25, "text": "def f(", "max_tokens": 64}
    """
    run_command(_bench(BenchOptions(**values)))


async def _bench(options: BenchOptions) -> None:
    options.check()
    if options.compare is not None:
        await _compare(options)
        return
    if not options.launch:
        await _report(options.address or DEFAULT_ADDRESS, options)
        return
    async with temporary_server(options.config, options.sets) as address:
        await _report(address, options)


async def _report(address: str, options: BenchOptions) -> None:
    # A retry would hide a failure and stretch a latency.
    async with AsyncClient(address, retry_s=0) as client:
        model = await client.model_info()
        with _progress() as progress:
            arms = await Trial(client=client, model=model, options=options, progress=progress).run()
    ratios = speedups(arms, options.cost_ratio, options.draft_flops_ratio)
    text = as_json(options=options, model=model, arms=arms, ratios=ratios)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    if options.plot is not None:
        from tandem.cluster.bench.plot import save_plot

        save_plot(options.plot, f"{model.name} at {address}", arms)
    if options.as_json:
        print(text, flush=True)
    else:
        console = Console(highlight=False)
        show(console=console, model=model, arms=arms, ratios=ratios, options=options)
    _report_failures(arms)


async def _compare(options: BenchOptions) -> None:
    with _progress() as progress:
        found = await compare.compare(options, progress)
    text = compare.as_json(options, found)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    if options.as_json:
        print(text, flush=True)
    else:
        compare.show(Console(highlight=False), found)
    _report_failures([comparison.arm for comparison in found])


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))


def _report_failures(arms: Sequence[Arm]) -> None:
    """Print the most common error code of the failed requests, with an example, to stderr.

    Exits with code 1 if no request succeeded.
    """
    records = [record for arm in arms for record in arm.records]
    failed = [record for record in records if record.error is not None]
    if not records:
        fail("DEADLINE_EXCEEDED", "no request could be sent in time; raise --duration-s")
    if not failed:
        return
    code = Counter(record.code for record in failed).most_common(1)[0][0] or ""
    example = next(record.error or "" for record in failed if record.code == code)
    details = f"{len(failed)} of {len(records)} requests failed, such as {example}"
    if len(failed) == len(records):
        fail(code, details)
    print(f"warning: {code}: {details}", file=sys.stderr, flush=True)
