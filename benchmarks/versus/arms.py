"""The engines that are compared: how each is started, and which rules hold for it."""

from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

TANDEM, VLLM, LLAMA, TRANSFORMERS = "tandem", "vllm", "llama", "transformers"
PEERS = {VLLM: "vLLM", LLAMA: "llama.cpp"}
"""Families that Tandem's figures are divided by, each separately."""
OFFLINE, SERVED, SPLIT = "offline", "served", "split"
"""Settings: the engine alone in its process, the engine with its server, and disaggregated
prefill."""
ENGINES = "benchmarks.versus.engines."
MLA_DISABLE = {"VLLM_MLA_DISABLE": "1"}
MAX_DRAFTS = 3


@dataclass(frozen=True)
class Arm:
    """One engine and its options.

    ``env`` and ``options`` are passed to its process. ``sequences`` restricts the batch sizes that
    it runs; None allows all.
    """

    name: str
    family: str
    setting: str
    module: str
    num_drafts: int = 0
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    with_zen: bool = False
    sequences: tuple[int, ...] | None = None
    samples: bool = True

    def takes(self, num_sequences: int, temperature: float, rate_per_s: float = 0.0) -> bool:
        fits = self.sequences is None or num_sequences in self.sequences
        arrives = rate_per_s == 0 or self.setting != OFFLINE
        return fits and arrives and (self.samples or temperature == 0)


def all_arms() -> list[Arm]:
    arms = []
    for n in range(MAX_DRAFTS + 1):
        arms += _tandem(n) + _vllm(n)
    arms.append(
        Arm(
            "transformers",
            TRANSFORMERS,
            OFFLINE,
            ENGINES + "transformers_offline",
            sequences=(1, 8),
            samples=False,
        )
    )
    arms.append(Arm("llama-n0", LLAMA, OFFLINE, ENGINES + "llama_offline"))
    return arms


def _tandem(n: int) -> list[Arm]:
    """Return Tandem's arms for n drafts.

    ``half`` is one rank with the number of threads of each rank of split. It shows the cost of
    splitting for a prompt. ``relaxed`` has prompts in thinking mode, with TensorRT-LLM's settings
    for DeepSeek-R1. Its texts differ, so its drafts cannot be compared with other arms.
    """
    served = ENGINES + "tandem_served"
    modes = (("colocated", SERVED, "colocated"), ("split", SPLIT, "disaggregated"))
    alone = ENGINES + "tandem_offline"
    arms = [Arm(f"tandem-n{n}", TANDEM, OFFLINE, alone, n)] + [
        Arm(f"tandem-{name}-n{n}", TANDEM, setting, served, n, options={"mode": mode})
        for name, setting, mode in modes
    ]
    half = {"mode": "colocated", "is_half": True}
    arms.append(Arm(f"tandem-colocated-half-n{n}", TANDEM, SERVED, served, n, options=half))
    if n:
        told = {"relaxed_top_n": 10, "relaxed_delta": 0.6}
        relaxed = Arm(f"tandem-relaxed-n{n}", TANDEM, OFFLINE, alone, n, {}, told, samples=False)
        arms.append(relaxed)
    return arms


def _vllm(n: int) -> list[Arm]:
    """Return vLLM's arms for n drafts.

    ``mha`` is VLLM_MLA_DISABLE=1: expanded keys for each head instead of latents. ``workers`` is
    that with scheduler and model in separate processes, like by vLLM's launcher. The other offline
    arms run in one process.
    """
    workers = MLA_DISABLE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    module, options = ENGINES + "vllm_offline", {"zen": False}
    arms = [Arm(f"vllm-mha-workers-n{n}", VLLM, OFFLINE, module, n, workers, options)]
    for suffix, env in (("", {}), ("-mha", MLA_DISABLE)):
        for zen in (False, True):
            name = f"vllm{'-zen' if zen else ''}{suffix}-n{n}"
            module = ENGINES + "vllm_offline"
            arms.append(Arm(name, VLLM, OFFLINE, module, n, env, {"zen": zen}, with_zen=zen))
        for setting in (SERVED, SPLIT):
            options = {"is_split": setting == SPLIT}
            name, module = f"vllm-{setting}{suffix}-n{n}", ENGINES + "vllm_served"
            arms.append(Arm(name, VLLM, setting, module, n, env, options))
    return arms


def choose(patterns: list[str], drafts: list[int]) -> list[Arm]:
    """Return the arms whose name matches one of the patterns, with or without its ``-nN``.

    Raises ValueError for a pattern that matches none.
    """
    found = []
    for pattern in patterns:
        matching = [arm for arm in all_arms() if _matches(arm, pattern)]
        if not matching:
            names = ", ".join(
                sorted({arm.name.rpartition("-n")[0] or arm.name for arm in all_arms()})
            )
            raise ValueError(f"--arms {pattern!r} matches none of: {names}")
        found += [arm for arm in matching if arm not in found and arm.num_drafts in drafts]
    if not found:
        raise ValueError(f"no arm of --arms {','.join(patterns)} has --drafts {drafts}")
    return found


def _matches(arm: Arm, pattern: str) -> bool:
    stem = arm.name.removesuffix(f"-n{arm.num_drafts}")
    return fnmatch(arm.name, pattern) or fnmatch(stem, pattern)
