"""What ``tandem bench`` can be told, and which combinations make no sense."""

import ipaddress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from typer import Option

from cluster.commands.common import DEFAULT_ADDRESS, ConfigFile, Json, ListKeys, Sets

_load = partial(Option, rich_help_panel="Load")
_work = partial(Option, rich_help_panel="Workload")
_spec = partial(Option, rich_help_panel="Speculation")
_out = partial(Option, rich_help_panel="Output")
_ADDRESS = Option(metavar="HOST:PORT", help=f"The server. Default: {DEFAULT_ADDRESS}")
_TRACE = "JSONL of {arrival_s, prompt_tokens | prompt_ids | text, max_tokens}."


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Every option of the command, as typed; ``check`` says whether they fit together."""

    address: Annotated[str | None, _ADDRESS] = None
    own: Annotated[bool, Option("--own", help="Start a cluster for this run instead.")] = False
    allow_remote: Annotated[bool, Option("--allow-remote", help="Load another machine.")] = False
    config: ConfigFile = None
    sets: Sets = None
    list_keys: ListKeys = False

    rate: Annotated[float | None, _load(help="Open loop: requests/s, come what may.")] = None
    burstiness: Annotated[float, _load(help="Gamma shape: 1 Poisson, less is burstier.")] = 1.0
    concurrency: Annotated[
        int | None, _load(help="Closed loop: requests in flight. Default: 8.")
    ] = None
    num_requests: Annotated[int, _load(help="Most requests, of each compared run.")] = 64
    duration_s: Annotated[float, _load(help="No request is sent later, in all.")] = 300.0
    timeout_s: Annotated[float, _load(help="Of each request.")] = 120.0
    warm_up: Annotated[int, _load(help="Requests sent first and not counted.")] = 4

    workload: Annotated[Literal["random", "shared-prefix", "trace"], _work()] = "random"
    prompt_tokens: Annotated[str, _work(metavar="LOW:HIGH", help="After a prefix.")] = "64:256"
    output_tokens: Annotated[str, _work(metavar="LOW:HIGH")] = "32:96"
    num_prefixes: Annotated[int, _work(help="How many prefixes are shared.")] = 4
    prefix_tokens: Annotated[int, _work(help="Tokens of each shared prefix.")] = 256
    trace: Annotated[Path | None, _work(metavar="FILE", help=_TRACE)] = None
    temperature: Annotated[float, _work(help="0 is greedy.")] = 0.0
    seed: Annotated[int, _work(help="A repeat may find the prefix cache warm.")] = 0
    ignore_eos: Annotated[bool, _work("--ignore-eos", help="Write full lengths.")] = False

    max_drafts: Annotated[int | None, _spec(help="Most drafts per step.")] = None
    compare_drafts: Annotated[
        str | None, _spec(metavar="0,N,..", help="The same prompts with each, interleaved.")
    ] = None
    cost_ratio: Annotated[
        float | None, _spec(help="Extra time per draft, in steps, if it is known.")
    ] = None

    slo_ttft_ms: Annotated[float | None, _out(help="Goodput counts what keeps it.")] = None
    slo_tpot_ms: Annotated[float | None, _out(help="And this.")] = None
    as_json: Json = False
    output: Annotated[Path | None, _out(metavar="FILE.json", help="Also to a file.")] = None
    plot: Annotated[Path | None, _out(metavar="FILE.png", help="Needs matplotlib.")] = None

    @property
    def arms(self) -> list[int | None]:
        """``max_drafts`` of the runs that are compared, or of the one run."""
        if self.compare_drafts is None:
            return [self.max_drafts]
        return [int(text) for text in self.compare_drafts.split(",")]

    def check(self) -> None:
        """Raises ``ValueError`` naming the option, its value and what would be right."""
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                self._refuse(name, f"use {low:g} to {high:g}")
        if self.rate is not None and self.concurrency is not None:
            self._refuse("rate", "give it or --concurrency, not both")
        if (self.workload == "trace") != (self.trace is not None):
            self._refuse("trace", "goes with --workload trace, and only with it")
        if self.trace is not None and not self.trace.is_file():
            self._refuse("trace", "there is no such file")
        for name in ("output", "plot"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.absolute().parent.is_dir():
                self._refuse(name, "its folder does not exist")
        if self.plot is not None and find_spec("matplotlib") is None:
            self._refuse("plot", "matplotlib is missing: pip install matplotlib")
        self._check_address()
        if self.compare_drafts is not None:
            self._check_arms()

    def _check_address(self) -> None:
        if self.own and self.address is not None:
            self._refuse("address", "give it or --own, not both")
        if not self.own and (self.config is not None or self.sets):
            raise ValueError("--config and --set are for a cluster of one's own: add --own")
        if self.address is not None and not self.allow_remote and not is_loopback(self.address):
            self._refuse("address", "is not this machine; add --allow-remote if it is meant")

    def _check_arms(self) -> None:
        texts = (self.compare_drafts or "").split(",")
        numbers = {int(text) for text in texts if text.isdecimal()}
        if len(numbers) < len(texts) or 0 not in numbers or len(numbers) < 2:
            self._refuse("compare_drafts", "use 0 and others, such as 0,3")
        if self.max_drafts is not None:
            self._refuse("max_drafts", "give it or --compare-drafts, not both")

    def _refuse(self, name: str, remedy: str) -> NoReturn:
        raise ValueError(f"--{name.replace('_', '-')}={getattr(self, name)}: {remedy}")


_MOST, _DAY_S = 100_000, 86_400.0
_BOUNDS: dict[str, tuple[float, float]] = {
    "rate": (1e-3, 1e5),
    "burstiness": (1e-3, 1e3),
    "concurrency": (1, 4096),
    "num_requests": (1, _MOST),
    "duration_s": (1e-3, _DAY_S),
    "timeout_s": (1e-3, _DAY_S),
    "warm_up": (0, _MOST),
    "num_prefixes": (1, _MOST),
    "prefix_tokens": (1, _MOST),
    "seed": (0, 2**62),
    "max_drafts": (0, _MOST),
    "cost_ratio": (0, 100),
    "slo_ttft_ms": (0, _DAY_S * 1e3),
    "slo_tpot_ms": (0, _DAY_S * 1e3),
}


def is_loopback(address: str) -> bool:
    """Whether a gRPC address leads to this machine: ``127.x``, ``[::1]``, localhost, unix."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or address.startswith("unix:")
