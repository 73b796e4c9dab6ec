"""Options of ``tandem bench``, and the checks of their combinations."""

import ipaddress
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from typer import Option

from tandem.cluster.commands.common import DEFAULT_ADDRESS, ConfigFile, Json, ListKeys, SetOptions

_MAX_COUNT = 100_000
_DAY_S = 86_400.0
_load = partial(Option, rich_help_panel="Load")
_work = partial(Option, rich_help_panel="Workload")
_spec = partial(Option, rich_help_panel="Speculation")
_out = partial(Option, rich_help_panel="Output")
_ADDRESS = Option(metavar="HOST:PORT", help=f"Address of the server. Default: {DEFAULT_ADDRESS}")
_TRACE = "JSONL file of {arrival_s, prompt_tokens | prompt_ids | text, max_tokens}."


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """All options of ``tandem bench``.

    The command line checks the bounds of each option, and ``check`` verifies combinations.
    """

    address: Annotated[str | None, _ADDRESS] = None
    launch: Annotated[
        bool,
        Option(
            "--launch", help="Temporary local cluster, started for this run and used as the server."
        ),
    ] = False
    allow_remote: Annotated[
        bool, Option("--allow-remote", help="Permission to put load on another machine.")
    ] = False
    config: ConfigFile = None
    sets: SetOptions = None
    list_keys: ListKeys = False

    rate: Annotated[
        float | None,
        _load(min=1e-3, max=1e5, help="Open loop: mean requests per second. Default: closed loop."),
    ] = None
    burstiness: Annotated[
        float,
        _load(
            min=1e-3,
            max=1e3,
            help="Shape of gamma-distributed arrival gaps: 1 is Poisson, lower is burstier.",
        ),
    ] = 1.0
    concurrency: Annotated[
        int | None, _load(min=1, max=4096, help="Closed loop: requests in flight. Default: 8.")
    ] = None
    num_requests: Annotated[
        int, _load(min=1, max=_MAX_COUNT, help="Maximum number of requests per compared setting.")
    ] = 64
    duration_s: Annotated[
        float,
        _load(
            min=1e-3, max=_DAY_S, help="Total seconds in which requests are sent, over all runs."
        ),
    ] = 300.0
    timeout_s: Annotated[
        float, _load(min=1e-3, max=_DAY_S, help="Deadline of each request in seconds.")
    ] = 120.0
    warm_up: Annotated[
        int,
        _load(
            min=0,
            max=_MAX_COUNT,
            help="Warm-up requests per compared setting, excluded from the results.",
        ),
    ] = 4

    workload: Annotated[
        Literal["random", "shared-prefix", "trace"],
        _work(help="Source of the prompts: random, random after shared prefixes, or a trace."),
    ] = "random"
    prompt_tokens: Annotated[
        str, _work(metavar="LOW:HIGH", help="Tokens of random prompts, without a shared prefix.")
    ] = "64:256"
    output_tokens: Annotated[
        str, _work(metavar="LOW:HIGH", help="Output tokens of random requests.")
    ] = "32:96"
    num_prefixes: Annotated[
        int, _work(min=1, max=_MAX_COUNT, help="Number of shared prefixes.")
    ] = 4
    prefix_tokens: Annotated[
        int, _work(min=1, max=_MAX_COUNT, help="Tokens of each shared prefix.")
    ] = 256
    trace: Annotated[
        Path | None, _work(metavar="FILE", exists=True, dir_okay=False, help=_TRACE)
    ] = None
    temperature: Annotated[float, _work(help="Sampling temperature; 0 is greedy.")] = 0.0
    seed: Annotated[
        int,
        _work(
            min=0,
            max=2**62,
            help="Seed of prompts and sampling. Reusing a seed may hit prefix caches.",
        ),
    ] = 0
    ignore_eos: Annotated[
        bool,
        _work("--ignore-eos", help="Outputs of full length: end-of-sequence tokens are ignored."),
    ] = False

    acceptance: Annotated[
        Literal["strict", "rejection", "rejection_greedy"],
        _spec(help="Acceptance rule for drafts; rejection measures alpha at any temperature."),
    ] = "strict"
    max_drafts: Annotated[
        int | None,
        _spec(
            min=0, max=_MAX_COUNT, help="Maximum drafts per step. Default: the server's maximum."
        ),
    ] = None
    compare_drafts: Annotated[
        str | None,
        _spec(metavar="0,N,..", help="Draft counts to compare on the same prompts, interleaved."),
    ] = None
    compare: Annotated[
        list[str] | None,
        _spec(
            metavar="KEY=VALUE,..",
            help="Speculation keys of one compared cluster, such as drafter=mtp,max_tree_nodes=16. "
            "Repeatable: the clusters are started one after another.",
        ),
    ] = None
    cost_ratio: Annotated[
        float | None,
        _spec(
            min=0,
            max=100,
            help="Extra time per draft divided by the time of a step. Default: measured.",
        ),
    ] = None
    draft_flops_ratio: Annotated[
        float,
        _spec(
            min=0,
            max=100,
            help="FLOPs of one draft token divided by FLOPs of one main-model token.",
        ),
    ] = 0.0

    slo_ttft_ms: Annotated[
        float | None,
        _out(min=0, max=_DAY_S * 1e3, help="Maximum ms to the first token, for goodput."),
    ] = None
    slo_tpot_ms: Annotated[
        float | None, _out(min=0, max=_DAY_S * 1e3, help="Maximum ms per later token, for goodput.")
    ] = None
    as_json: Json = False
    output: Annotated[
        Path | None, _out(metavar="FILE.json", help="File to which the JSON result is written.")
    ] = None
    plot: Annotated[
        Path | None,
        _out(metavar="FILE.png", help="File for a plot of the result; needs matplotlib."),
    ] = None

    @property
    def arms(self) -> list[int | None]:
        """Values of ``max_drafts`` to compare, or the only one."""
        if self.compare_drafts is None:
            return [self.max_drafts]
        return [int(text) for text in self.compare_drafts.split(",")]

    @property
    def is_alpha_known(self) -> bool:
        """Whether the share of accepted drafts estimates alpha.

        Alpha is the overlap of the model's and the drafter's distributions.
        """
        return self.temperature == 0 or self.acceptance == "rejection"

    def check(self) -> None:
        """Check that the options fit together.

        Raises:
            ValueError: Names the option, its value and what would be valid.
        """
        for option in fields(self):
            if (value := getattr(self, option.name)) != value:
                self._refuse(option.name, "use a number")
        if self.rate is not None and self.concurrency is not None:
            self._refuse("rate", "cannot be combined with --concurrency; use one of them")
        if (self.workload == "trace") != (self.trace is not None):
            self._refuse("trace", "use it together with --workload trace")
        for name in ("output", "plot"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.absolute().parent.is_dir():
                self._refuse(name, "the folder of this file does not exist; create it")
        if self.plot is not None and find_spec("matplotlib") is None:
            self._refuse("plot", "matplotlib is missing: pip install matplotlib")
        self._check_address()
        if self.compare_drafts is not None:
            self._check_arms()
        if self.compare is not None:
            self._check_compared()

    def _check_address(self) -> None:
        if self.launch and self.address is not None:
            self._refuse("address", "cannot be combined with --launch; use one of them")
        if not self.launch and (self.config is not None or self.sets):
            raise ValueError(
                "--config and --set configure a cluster that this command starts: add --launch"
            )
        if self.address is not None and not self.allow_remote and not is_loopback(self.address):
            self._refuse("address", "is another machine; add --allow-remote to put load on it")

    def _check_arms(self) -> None:
        texts = (self.compare_drafts or "").split(",")
        numbers = {int(text) for text in texts if text.isdecimal()}
        if len(numbers) < len(texts) or 0 not in numbers or len(numbers) < 2:
            self._refuse("compare_drafts", "list 0 and at least one other number, such as 0,3")
        if self.max_drafts is not None:
            self._refuse("max_drafts", "cannot be combined with --compare-drafts; use one of them")

    def _check_compared(self) -> None:
        if not self.launch:
            self._refuse("compare", "needs clusters that this command starts; add --launch")
        if self.compare is not None and len(self.compare) < 2:
            self._refuse("compare", "repeat it for at least two settings, one of them drafter=none")
        for name in ("compare_drafts", "max_drafts", "plot"):
            if getattr(self, name) is not None:
                self._refuse(name, "cannot be combined with --compare; use one of them")

    def _refuse(self, name: str, remedy: str) -> NoReturn:
        raise ValueError(f"--{name.replace('_', '-')}={getattr(self, name)}: {remedy}")


def is_loopback(address: str) -> bool:
    """Return whether a gRPC address is local: ``127.x``, ``[::1]``, localhost or a unix socket."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or address.startswith("unix:")
