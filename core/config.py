"""Configuration of a Tandem cluster: one frozen tree, read from YAML and ``--set a.b=c``."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import ValidationInfo

from tandem.core.config_source import (
    apply_override,
    explain_errors,
    format_type,
    format_value,
    read_yaml,
)
from tandem.core.draft_shapes import MAX_NODES
from tandem.core.info import COLOCATED, DECODE, PREFILL

AUTO = "auto"
TINY_MODEL = Path(__file__).parents[1] / "tiny-v3"
_MAX_CHUNK_BYTES = 16 << 20
Count = Annotated[int, Field(ge=1)]
Label = Annotated[str, Field(pattern=r"^[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?$")]


class Section(BaseModel):
    """Base class of all sections. Unknown keys and values of the wrong type are errors.

    The docstring of each key is its help text (``tandem serve --list-keys``).
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class CheckpointConfig(Section):
    path: Path = Field(default=TINY_MODEL, strict=False)
    """folder of the Hugging Face checkpoint; default: the tiny model shipped with Tandem"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of weights and KV cache; auto: float32 for float32 checkpoints, otherwise bfloat16"""
    kernels: Literal["auto", "native", "triton", "vendor", "torch"] = "auto"
    """native: C++ (cpu); triton, vendor (with FlashMLA): cuda; torch; auto: native or triton"""
    max_model_len: int | None = Field(default=None, ge=2)
    """maximum number of prompt and output tokens together; null: the checkpoint's own maximum"""
    think_tokens: tuple[str, str] = ("<think>", "</think>")
    """tokens that start and end the thinking phase, in which relaxed acceptance applies"""
    ignore_config_keys: tuple[str, ...] = Field(default=(), strict=False)
    """unknown keys of config.json to ignore, because they do not change the model; default: none"""

    @field_validator("think_tokens", mode="before")
    @classmethod
    def _is_two_tokens(cls, tokens: Any) -> Any:
        texts = list(tokens) if isinstance(tokens, (list, tuple)) else []
        if len(texts) != 2 or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(
                f"model.think_tokens={tokens!r}: give the two texts that begin and end thinking, "
                "such as ['<think>', '</think>']"
            )
        if texts[0] == texts[1]:
            raise ValueError(f"model.think_tokens={tokens!r}: use two different texts")
        return tuple(texts)


class SpeculationConfig(Section):
    max_depth: int = Field(default=3, ge=0, le=8)
    """maximum depth of drafts per step (length of a chain, depth of a tree); 0: no drafting"""
    handover_hidden: bool = True
    """true: hidden states for the first draft come with the KV cache; false: it uses zeros"""
    draft_length: Literal["adaptive", "fixed"] = "adaptive"
    """drafts per step; adaptive: as many as pay off at the current load; fixed: the maximum"""
    profile_at_startup: bool = True
    """true: idle ranks time all step sizes; false: draft_length=adaptive learns from traffic"""
    drafter: str = "auto"
    """auto (mtp or none), mtp, eagle, eagle3, draft_model, medusa, self, ngram[+X], module:Class"""
    draft_model_path: Path | None = Field(default=None, strict=False)
    """folder of the heads (medusa, eagle, eagle3) or of the checkpoint (draft_model); null: none"""
    max_tree_nodes: int | None = Field(default=None, ge=1, le=MAX_NODES)
    """maximum number of drafts per step in a draft tree; null: chains instead of trees"""
    top_k: int = Field(default=4, ge=1, le=MAX_NODES)
    """branching factor of draft trees (not medusa): nodes expanded per depth, children per node"""
    medusa_choices: Path | None = Field(default=None, strict=False)
    """JSON file with the draft tree of medusa; null: choices.json in draft_model_path"""
    draft_budget_pages: int = Field(default=8, ge=3)
    """KV cache pages that drafter=self reads: the first page and the most recent ones"""
    drafter_timeout_s: float = Field(default=0.02, gt=0, le=60)
    """seconds that a step waits for the drafts of a user-defined drafter (module:Class)"""
    max_matching_ngram_size: int = Field(default=3, ge=1, le=16)
    """maximum length, in tokens, of the suffix that drafter=ngram searches for in earlier text"""
    is_public_pool: bool = False
    """true: ngram also searches texts of other requests; response times can then reveal them"""
    is_keep_all: bool = True
    """true: ngram considers all earlier matches; false: only the oldest match"""
    is_use_oldest: bool = False
    """true: ngram drafts from the oldest match; false: from the newest (with is_keep_all)"""


class RankConfig(Section):
    """Keys that prefill and decode nodes have in common."""

    replicas: Count = 1
    """number of nodes (gangs) of this kind"""
    dp_size: Count = 1
    """data-parallel size: ranks per node, which share its requests and its experts"""
    num_redundant_experts: int = Field(default=0, ge=0)
    """number of redundant expert replicas per MoE layer, over all ranks of a node"""
    dispatch: Literal["auto", "all_gather", "all_to_all"] = "auto"
    """transport of tokens to experts; auto: all_to_all for prefill, all_gather for decode"""
    device: Literal["cpu", "cuda"] = "cpu"
    """device that the ranks run on"""
    num_threads: Count = 1
    """CPU threads per rank"""
    node_group: Label | None = None
    """Ray label ray.io/node-group (KubeRay's worker group) of the machines to use; null: any"""


class PrefillConfig(RankConfig):
    max_num_batched_tokens: Count = 2048
    """maximum prompt tokens per prefill step of a rank; longer prompts take several steps"""


class DecodeConfig(RankConfig):
    max_num_seqs: Count = 16
    """maximum number of sequences per decode step of a rank"""
    overlap: Literal["auto"] | bool = "auto"
    """true: results of a step are read while the next step runs; auto: true on cuda, not on cpu"""
    batch_sizes: tuple[Count, ...] | None = Field(default=None, strict=False)
    """batch sizes that decode steps are padded to; null: all on cpu, about powers of two on cuda"""

    @property
    def num_rows(self) -> int:
        """Maximum number of sequences that all decode ranks together can run in their steps."""
        return self.replicas * self.dp_size * self.max_num_seqs


class KvConfig(Section):
    page_size: int = Field(default=64, ge=1, le=4096)
    """tokens per KV cache page"""
    num_pages: int | None = Field(default=None, ge=2)
    """pages per rank, one a dummy; null: for max_num_seqs sequences (cpu), free memory (cuda)"""


class KvTransferConfig(Section):
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """transport of the KV hand-over; auto: nccl between GPUs, otherwise gloo"""
    lease_s: float = Field(default=30.0, gt=0, le=3600)
    """seconds after which unrenewed KV pages, and sequences of a lost gateway, are freed"""
    staging_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """bytes of staging memory per rank, a bound on data in flight; chunks are at most 16 MiB"""
    host: str = Field(default=AUTO, min_length=1)
    """address that ranks listen on; auto: the address by which Ray knows the machine"""
    checksums: bool = False
    """true: decode ranks verify checksums of received pages, to detect flipped bits"""

    @property
    def chunk_bytes(self) -> int:
        """Maximum size of a transfer chunk in bytes. At least four chunks fit into the staging."""
        return min(_MAX_CHUNK_BYTES, self.staging_bytes // 4)


class ControlConfig(Section):
    max_consecutive_failures: Count = 3
    """consecutive failed starts of a gang after which a starting tandem serve exits"""
    failure_reset_s: float = Field(default=60.0, ge=0, le=86400)
    """seconds of serving after which a gang's consecutive failures are counted from 0 again"""
    startup_timeout_s: float = Field(default=120.0, gt=0, le=86400)
    """seconds without an answer or progress after which a starting rank is restarted"""
    stall_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """seconds without answer or progress until a rank is lost; at least 10 x longest recent step"""
    stop_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """seconds that ranks may take to stop by themselves before they are killed"""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """seconds that a draining gang may take to finish its answers before they migrate"""


class ServerConfig(Section):
    address: str = "127.0.0.1:50051"
    """HOST:PORT of the gRPC server; port 0: any free port"""
    http_address: str | None = None
    """HOST:PORT of /livez, /readyz and /metrics over HTTP; null: no HTTP server"""
    max_queued: Count = 256
    """maximum number of waiting requests; further ones are refused"""
    recovery_timeout_s: float = Field(default=60.0, ge=0, le=3600)
    """seconds that started answers wait for a rank when none is left"""
    write_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """seconds that a client may leave output unread before its stream is ended"""
    lame_duck_s: float = Field(default=0.0, ge=0, le=3600)
    """seconds at shutdown in which health is NOT_SERVING but new requests are still accepted"""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """seconds that open streams may take to finish at shutdown or on an expired connection"""
    max_connection_age_s: float | None = Field(default=None, gt=0, le=86400)
    """seconds after which clients must reconnect, possibly to another gateway; null: never"""

    @property
    def end_s(self) -> float:
        """Maximum seconds from a shutdown signal to the end of the server process."""
        return self.lame_duck_s + self.drain_timeout_s + 5.0

    @field_validator("address", "http_address")
    @classmethod
    def _is_host_and_port(cls, address: str | None, info: ValidationInfo) -> str | None:
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):(\d{1,5})", address or "")
        if address is not None and (match is None or int(match[2]) > 65535):
            raise ValueError(
                f"server.{info.field_name}={address!r}: write HOST:PORT with a port of 0 to 65535, "
                "such as 127.0.0.1:50051"
            )
        return address


class TandemConfig(Section):
    """The whole configuration tree.

    Use ``load`` instead of the constructor: its errors name the wrong keys and the remedy.
    """

    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """disaggregated: separate prefill and decode ranks; colocated: both in each decode rank"""
    model: CheckpointConfig = CheckpointConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    kv: KvConfig = KvConfig()
    kv_transfer: KvTransferConfig = KvTransferConfig()
    control: ControlConfig = ControlConfig()
    server: ServerConfig = ServerConfig()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of nodes in this mode, in the order in which they are started."""
        return (COLOCATED,) if self.mode == "colocated" else (PREFILL, DECODE)

    @property
    def num_threads(self) -> int:
        """Total CPU threads of all ranks."""
        nodes = map(self.of_kind, self.kinds)
        return sum(node.replicas * node.dp_size * node.num_threads for node in nodes)

    def of_kind(self, kind: str) -> RankConfig:
        """Return the configuration section of ranks of ``kind``.

        Colocated ranks use the decode section.
        """
        return self.prefill if kind == PREFILL else self.decode

    @model_validator(mode="after")
    def _fits_together(self) -> "TandemConfig":
        devices = self.prefill.device, self.decode.device
        if self.kv_transfer.backend == "nccl" and "cpu" in devices:
            raise ValueError(
                "kv_transfer.backend='nccl' needs prefill.device and decode.device 'cuda', got "
                f"{devices[0]!r} and {devices[1]!r}; use 'auto' or 'gloo'"
            )
        if self.mode == "colocated" and (self.prefill.dp_size, self.decode.dp_size) != (1, 1):
            raise ValueError(
                f"mode='colocated' has one rank per node, got prefill.dp_size="
                f"{self.prefill.dp_size} and decode.dp_size={self.decode.dp_size}; set both to 1 "
                "or use mode='disaggregated'"
            )
        for kind in (PREFILL, DECODE):
            section = self.of_kind(kind)
            if section.dp_size == 1 and (num := section.num_redundant_experts):
                raise ValueError(
                    f"{kind}.num_redundant_experts={num}: needs several ranks, got "
                    f"{kind}.dp_size=1; set {kind}.num_redundant_experts to 0"
                )
        return self


def load(path: Path | None = None, sets: list[str] | None = None) -> TandemConfig:
    """Read the YAML file ``path`` and then apply the ``a.b=c`` overrides in ``sets``, in order.

    ``path`` None stands for the defaults. Values of overrides are parsed as YAML. Raises ValueError
    naming each wrong key or value and the remedy.
    """
    tree = {} if path is None else read_yaml(path)
    for item in sets or []:
        apply_override(tree, item)
    return validate_config(tree)


def validate_config(tree: Any) -> TandemConfig:
    """Build the configuration from a plain tree.

    Raises ValueError naming each wrong key or value and the remedy.
    """
    try:
        return TandemConfig.model_validate(tree)
    except ValidationError as error:
        fields = {name: field.description or "" for name, field in iter_keys()}
        raise ValueError(explain_errors(error, fields)) from error


def iter_keys() -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the field of every key, in the order of the tree."""
    for name, field in TandemConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            for leaf, inner in section.model_fields.items():
                yield f"{name}.{leaf}", inner
        else:
            yield name, field


def describe_keys() -> str:
    """Return one line per key: its name, default, type and help text."""
    rows = [
        (name, f"{format_value(field.default)} ({format_type(field.annotation)})", field)
        for name, field in iter_keys()
    ]
    wide = max(len(row[0]) for row in rows)
    wider = max(len(row[1]) for row in rows)
    return "\n".join(f"{a:<{wide}}  {b:<{wider}}  {field.description}" for a, b, field in rows)
