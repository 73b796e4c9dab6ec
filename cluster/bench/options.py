"""What ``tandem bench`` can be told, and which combinations make no sense."""

import ipaddress
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from typer import Option

from tandem.cluster.commands.common import DEFAULT_ADDRESS, ConfigFile, Json, ListKeys, SetOptions

_MAX_COUNT, _DAY_S = 100_000, 86_400.0
_load = partial(Option, rich_help_panel="Load")
_work = partial(Option, rich_help_panel="Workload")
_spec = partial(Option, rich_help_panel="Speculation")
_out = partial(Option, rich_help_panel="Output")
_ADDRESS = Option(metavar="HOST:PORT", help=f"The server. Default: {DEFAULT_ADDRESS}")
_TRACE = "JSONL of {arrival_s, prompt_tokens | prompt_ids | text, max_tokens}."


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Every option of the command, within its bounds; ``check`` says whether they fit together."""

    address: Annotated[str | None, _ADDRESS] = None
    launch: Annotated[bool, Option("--launch", help="Start a cluster for this run instead.")] = (
        False
    )
    allow_remote: Annotated[bool, Option("--allow-remote", help="Load another machine.")] = False
    config: ConfigFile = None
    sets: SetOptions = None
    list_keys: ListKeys = False

    rate: Annotated[
        float | None, _load(min=1e-3, max=1e5, help="Open loop: requests/s, come what may.")
    ] = None
    burstiness: Annotated[
        float, _load(min=1e-3, max=1e3, help="Gamma shape: 1 Poisson, less is burstier.")
    ] = 1.0
    concurrency: Annotated[
        int | None, _load(min=1, max=4096, help="Closed loop: requests in flight. Default: 8.")
    ] = None
    num_requests: Annotated[
        int, _load(min=1, max=_MAX_COUNT, help="Most requests, of each compared run.")
    ] = 64
    duration_s: Annotated[
        float, _load(min=1e-3, max=_DAY_S, help="No request is sent later, in all.")
    ] = 300.0
    timeout_s: Annotated[float, _load(min=1e-3, max=_DAY_S, help="Of each request.")] = 120.0
    warm_up: Annotated[
        int, _load(min=0, max=_MAX_COUNT, help="Requests sent first and not counted.")
    ] = 4

    workload: Annotated[Literal["random", "shared-prefix", "trace"], _work()] = "random"
    prompt_tokens: Annotated[str, _work(metavar="LOW:HIGH", help="After a prefix.")] = "64:256"
    output_tokens: Annotated[str, _work(metavar="LOW:HIGH")] = "32:96"
    num_prefixes: Annotated[
        int, _work(min=1, max=_MAX_COUNT, help="How many prefixes are shared.")
    ] = 4
    prefix_tokens: Annotated[
        int, _work(min=1, max=_MAX_COUNT, help="Tokens of each shared prefix.")
    ] = 256
    trace: Annotated[
        Path | None, _work(metavar="FILE", exists=True, dir_okay=False, help=_TRACE)
    ] = None
    temperature: Annotated[float, _work(help="0 is greedy.")] = 0.0
    seed: Annotated[
        int, _work(min=0, max=2**62, help="A repeat may find the prefix cache warm.")
    ] = 0
    ignore_eos: Annotated[bool, _work("--ignore-eos", help="Write full lengths.")] = False

    acceptance: Annotated[
        Literal["strict", "rejection", "rejection_greedy"],
        _spec(help="When a draft is accepted; rejection tells alpha at any temperature."),
    ] = "strict"
    max_drafts: Annotated[
        int | None, _spec(min=0, max=_MAX_COUNT, help="Most drafts per step.")
    ] = None
    compare_drafts: Annotated[
        str | None, _spec(metavar="0,N,..", help="The same prompts with each, interleaved.")
    ] = None
    compare: Annotated[
        list[str] | None,
        _spec(
            metavar="KEY=VALUE,..",
            help="Of speculation, such as drafter=mtp,max_tree_nodes=16; once for each that is "
            "compared. A cluster of its own is started for each, one after the other.",
        ),
    ] = None
    cost_ratio: Annotated[
        float | None, _spec(min=0, max=100, help="Extra time per draft, in steps, if it is known.")
    ] = None
    draft_flops_ratio: Annotated[
        float, _spec(min=0, max=100, help="Of a draft, by the model's of a token.")
    ] = 0.0

    slo_ttft_ms: Annotated[
        float | None, _out(min=0, max=_DAY_S * 1e3, help="Goodput counts what keeps it.")
    ] = None
    slo_tpot_ms: Annotated[float | None, _out(min=0, max=_DAY_S * 1e3, help="And this.")] = None
    as_json: Json = False
    output: Annotated[Path | None, _out(metavar="FILE.json", help="Also to a file.")] = None
    plot: Annotated[Path | None, _out(metavar="FILE.png", help="Needs matplotlib.")] = None

    @property
    def arms(self) -> list[int | None]:
        """``max_drafts`` of the runs that are compared, or of the one run."""
        if self.compare_drafts is None:
            return [self.max_drafts]
        return [int(text) for text in self.compare_drafts.split(",")]

    @property
    def is_alpha_known(self) -> bool:
        """What is accepted is the overlap of what tokens and drafts are drawn from."""
        return self.temperature == 0 or self.acceptance == "rejection"

    def check(self) -> None:
        """Raises ``ValueError`` naming the option, its value and what would be right."""
        for option in fields(self):
            if (value := getattr(self, option.name)) != value:
                self._refuse(option.name, "use a number")
        if self.rate is not None and self.concurrency is not None:
            self._refuse("rate", "give it or --concurrency, not both")
        if (self.workload == "trace") != (self.trace is not None):
            self._refuse("trace", "goes with --workload trace, and only with it")
        for name in ("output", "plot"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.absolute().parent.is_dir():
                self._refuse(name, "its folder does not exist")
        if self.plot is not None and find_spec("matplotlib") is None:
            self._refuse("plot", "matplotlib is missing: pip install matplotlib")
        self._check_address()
        if self.compare_drafts is not None:
            self._check_arms()
        if self.compare is not None:
            self._check_compared()

    def _check_address(self) -> None:
        if self.launch and self.address is not None:
            self._refuse("address", "give it or --launch, not both")
        if not self.launch and (self.config is not None or self.sets):
            raise ValueError("--config and --set are for a cluster of one's own: add --launch")
        if self.address is not None and not self.allow_remote and not is_loopback(self.address):
            self._refuse("address", "is not this machine; add --allow-remote if it is meant")

    def _check_arms(self) -> None:
        texts = (self.compare_drafts or "").split(",")
        numbers = {int(text) for text in texts if text.isdecimal()}
        if len(numbers) < len(texts) or 0 not in numbers or len(numbers) < 2:
            self._refuse("compare_drafts", "use 0 and others, such as 0,3")
        if self.max_drafts is not None:
            self._refuse("max_drafts", "give it or --compare-drafts, not both")

    def _check_compared(self) -> None:
        if not self.launch:
            self._refuse("compare", "starts clusters of its own: add --launch")
        if self.compare is not None and len(self.compare) < 2:
            self._refuse("compare", "give it for each of several, drafter=none among them")
        for name in ("compare_drafts", "max_drafts", "plot"):
            if getattr(self, name) is not None:
                self._refuse(name, "give it or --compare, not both")

    def _refuse(self, name: str, remedy: str) -> NoReturn:
        raise ValueError(f"--{name.replace('_', '-')}={getattr(self, name)}: {remedy}")


def is_loopback(address: str) -> bool:
    """Whether a gRPC address leads to this machine: ``127.x``, ``[::1]``, localhost, unix."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or address.startswith("unix:")
