"""What a Tandem cluster can be told: one frozen tree, read from YAML and ``--set a.b=c``."""

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
    """A part of the tree: unknown keys and loosely typed values are errors. The docstring of a key
    is what users are told of it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class CheckpointConfig(Section):
    path: Path = Field(default=TINY_MODEL, strict=False)
    """folder of the Hugging Face checkpoint"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of weights and cache; auto is the checkpoint's own; float16 is read as bfloat16"""
    kernels: Literal["auto", "native", "triton", "vendor", "torch"] = "auto"
    """native: C++ for CPUs; triton: for GPUs; vendor: that and FlashMLA; torch: on any device"""
    max_model_len: int | None = Field(default=None, ge=2)
    """most tokens of prompt and answer; null is the checkpoint's own"""
    think_tokens: tuple[str, str] = ("<think>", "</think>")
    """tokens that begin and end thinking, where acceptance may be relaxed"""
    ignore_config_keys: tuple[str, ...] = Field(default=(), strict=False)
    """keys of config.json that Tandem does not know, and that change nothing in the model"""

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
            raise ValueError(f"model.think_tokens={tokens!r}: the two have to differ")
        return tuple(texts)


class SpeculationConfig(Section):
    max_depth: int = Field(default=3, ge=0, le=8)
    """most drafts per step, one behind the other; 0 turns drafting off"""
    handover_hidden: bool = True
    """whether the hand-over carries the hidden state that the first draft needs"""
    draft_length: Literal["adaptive", "fixed"] = "adaptive"
    """drafts of a step: as many as pay at this load, or always num_tokens"""
    profile_at_startup: bool = True
    """time steps of every size and length while idle after the start, for adaptive to know costs"""
    drafter: str = "auto"
    """mtp, eagle, eagle3, draft_model, medusa, self, ngram, ngram+X, none, auto, or module:Class"""
    draft_model_path: Path | None = Field(default=None, strict=False)
    """of medusa, eagle and eagle3: the folder of the heads; of draft_model: its checkpoint"""
    max_tree_nodes: int | None = Field(default=None, ge=1, le=MAX_NODES)
    """most drafts per step where they are a tree, num_tokens deep at most; null drafts chains"""
    top_k: int = Field(default=4, ge=1, le=MAX_NODES)
    """of trees but medusa's: nodes of a depth that are drafted on from, and tokens after each"""
    medusa_choices: Path | None = Field(default=None, strict=False)
    """of trees of medusa: a JSON list of paths; null is choices.json in that folder"""
    draft_budget_pages: int = Field(default=8, ge=3)
    """of self: pages of the cache that drafts read, the first one and the newest"""
    drafter_timeout_s: float = Field(default=0.02, gt=0, le=60)
    """of a class of one's own: how long a step waits for its drafts"""
    max_matching_ngram_size: int = Field(default=3, ge=1, le=16)
    """of ngram: most tokens at the end of the text that are looked for in it"""
    is_public_pool: bool = False
    """of ngram: what a text lacks is looked for in all texts of the rank; tells others by timing"""
    is_keep_all: bool = True
    """of ngram: every place where they stand counts, not the first alone"""
    is_use_oldest: bool = False
    """of ngram: the first of these places is taken, not the latest"""


class RankConfig(Section):
    """What both kinds of nodes have."""

    replicas: Count = 1
    """number of nodes of this kind"""
    dp_size: Count = 1
    """ranks per node: requests are spread over them, and so are the experts"""
    num_redundant_experts: int = Field(default=0, ge=0)
    """copies of busy experts beside the experts themselves, over all ranks of a node"""
    dispatch: Literal["auto", "all_gather", "all_to_all"] = "auto"
    """how tokens reach experts of other ranks; auto is all_to_all for prefill, else all_gather"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where these ranks run"""
    num_threads: Count = 1
    """CPU threads per rank"""
    node_group: Label | None = None
    """machines for these ranks: Ray's label ray.io/node-group, KubeRay's worker group; null: any"""


class PrefillConfig(RankConfig):
    max_num_batched_tokens: Count = 2048
    """most prompt tokens in one prefill step"""


class DecodeConfig(RankConfig):
    max_num_seqs: Count = 16
    """most sequences in one decode step of a rank"""
    overlap: Literal["auto"] | bool = "auto"
    """read the results of a step while the device runs the next; auto: except on cpu"""
    batch_sizes: tuple[Count, ...] | None = Field(default=None, strict=False)
    """batch sizes that a decode step is padded to; null suits the device"""

    @property
    def num_rows(self) -> int:
        """Number of rows of all decode ranks together."""
        return self.replicas * self.dp_size * self.max_num_seqs


class KvConfig(Section):
    page_size: int = Field(default=64, ge=1, le=4096)
    """tokens per page"""
    num_pages: int | None = Field(default=None, ge=2)
    """pages per rank, the dummy page included; null is what rows need, or fits on a GPU"""


class KvTransferConfig(Section):
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto is nccl between GPUs, gloo otherwise"""
    lease_s: float = Field(default=30.0, gt=0, le=3600)
    """how long offered KV stays without renewal"""
    staging_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """staging memory per rank, of which a transfer takes 16 MB at most; bounds what is in flight"""
    host: str = Field(default=AUTO, min_length=1)
    """address that nodes listen on; auto is that by which Ray knows the machine"""
    checksums: bool = False
    """find flipped bits: decode compares sums of its pages with prefill's before it begins"""

    @property
    def chunk_bytes(self) -> int:
        """Of one transfer: at least four of them fit in staging."""
        return min(_MAX_CHUNK_BYTES, self.staging_bytes // 4)


class ControlConfig(Section):
    max_consecutive_failures: Count = 3
    """serve gives up waiting for a gang that died this often in a row; the gang is tried again"""
    failure_reset_s: float = Field(default=60.0, ge=0, le=86400)
    """a gang that served this long begins a new row"""
    startup_timeout_s: float = Field(default=120.0, gt=0, le=86400)
    """a rank that starts and neither answers nor gets on for this long is begun anew"""
    stall_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """a rank that does not answer or step for this long, and 10 times its longest step, is lost"""
    stop_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """how long ranks may take to stop by themselves"""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """how long answers may end in a gang that makes way, before they go on elsewhere"""


class ServerConfig(Section):
    address: str = "127.0.0.1:50051"
    """HOST:PORT of the gRPC server; port 0 takes any free one"""
    http_address: str | None = None
    """HOST:PORT of /livez, /readyz and /metrics over HTTP; null opens none"""
    max_queued: Count = 256
    """requests waiting before new ones are refused"""
    recovery_timeout_s: float = Field(default=60.0, ge=0, le=3600)
    """how long begun answers wait for a node when none is left"""
    write_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """how long a client may leave an answer unread before its stream is ended"""
    lame_duck_s: float = Field(default=0.0, ge=0, le=3600)
    """how long at shutdown health says that requests belong elsewhere before they are refused"""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=3600)
    """how long running streams may finish at shutdown, and on a connection that is too old"""
    max_connection_age_s: float | None = Field(default=None, gt=0, le=86400)
    """after which a client is to connect anew, maybe to another gateway; null is never"""

    @property
    def end_s(self) -> float:
        """In which a signal ends the server, whatever it waits for."""
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
    """The whole tree. ``load`` gives better errors than calling this."""

    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """prefill and decode on different nodes, or both in one rank"""
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
        """Of its nodes, in the order in which they are begun."""
        return (COLOCATED,) if self.mode == "colocated" else (PREFILL, DECODE)

    @property
    def num_threads(self) -> int:
        """Of all ranks together."""
        nodes = map(self.of_kind, self.kinds)
        return sum(node.replicas * node.dp_size * node.num_threads for node in nodes)

    def of_kind(self, kind: str) -> RankConfig:
        """The section of a rank of this kind; colocated ranks follow the decode section."""
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
                    f"{kind}.num_redundant_experts={num} needs several ranks, got "
                    f"{kind}.dp_size=1; set it to 0"
                )
        return self


def load(path: Path | None = None, sets: list[str] | None = None) -> TandemConfig:
    """Read the YAML file ``path`` (None: defaults), then apply ``a.b=c`` overrides in order.

    Values are parsed as YAML. Raises ``ValueError`` naming each wrong key or value and what
    would be right.
    """
    tree = {} if path is None else read_yaml(path)
    for item in sets or []:
        apply_override(tree, item)
    return validate_config(tree)


def validate_config(tree: Any) -> TandemConfig:
    """Raises ``ValueError`` naming each wrong key or value and what would be right."""
    try:
        return TandemConfig.model_validate(tree)
    except ValidationError as error:
        fields = {name: field.description or "" for name, field in iter_keys()}
        raise ValueError(explain_errors(error, fields)) from error


def iter_keys() -> Iterator[tuple[str, FieldInfo]]:
    """Every key that takes a value, dotted, in the order of the tree."""
    for name, field in TandemConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            for leaf, inner in section.model_fields.items():
                yield f"{name}.{leaf}", inner
        else:
            yield name, field


def describe_keys() -> str:
    """One line per key: its name, default, type and meaning."""
    rows = [
        (name, f"{format_value(field.default)} ({format_type(field.annotation)})", field)
        for name, field in iter_keys()
    ]
    wide, wider = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return "\n".join(f"{a:<{wide}}  {b:<{wider}}  {field.description}" for a, b, field in rows)
