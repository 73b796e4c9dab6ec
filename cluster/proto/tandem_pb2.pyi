from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Acceptance(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_STRICT: _ClassVar[Acceptance]
    ACCEPTANCE_RELAXED: _ClassVar[Acceptance]
    ACCEPTANCE_REJECTION: _ClassVar[Acceptance]
    ACCEPTANCE_RELAXED_LOG_PROBS: _ClassVar[Acceptance]
    ACCEPTANCE_REJECTION_GREEDY: _ClassVar[Acceptance]
    ACCEPTANCE_TYPICAL: _ClassVar[Acceptance]
ACCEPTANCE_STRICT: Acceptance
ACCEPTANCE_RELAXED: Acceptance
ACCEPTANCE_REJECTION: Acceptance
ACCEPTANCE_RELAXED_LOG_PROBS: Acceptance
ACCEPTANCE_REJECTION_GREEDY: Acceptance
ACCEPTANCE_TYPICAL: Acceptance

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "sampling", "speculation", "resume_token_ids", "resume_model", "resume_proof")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_MODEL_FIELD_NUMBER: _ClassVar[int]
    RESUME_PROOF_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    sampling: Sampling
    speculation: Speculation
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resume_model: str
    resume_proof: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., resume_model: _Optional[str] = ..., resume_proof: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "max_tokens", "ignore_eos", "logprobs", "n", "skip_special_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    max_tokens: int
    ignore_eos: bool
    logprobs: int
    n: int
    skip_special_tokens: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("max_drafts", "acceptance", "relaxed_top_n", "relaxed_delta", "typical_epsilon", "typical_alpha")
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    RELAXED_TOP_N_FIELD_NUMBER: _ClassVar[int]
    RELAXED_DELTA_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_EPSILON_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_ALPHA_FIELD_NUMBER: _ClassVar[int]
    max_drafts: int
    acceptance: Acceptance
    relaxed_top_n: int
    relaxed_delta: float
    typical_epsilon: float
    typical_alpha: float
    def __init__(self, max_drafts: _Optional[int] = ..., acceptance: _Optional[_Union[Acceptance, str]] = ..., relaxed_top_n: _Optional[int] = ..., relaxed_delta: _Optional[float] = ..., typical_epsilon: _Optional[float] = ..., typical_alpha: _Optional[float] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("delta", "finished", "model", "proof")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    delta: Delta
    finished: Finished
    model: str
    proof: str
    def __init__(self, delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., model: _Optional[str] = ..., proof: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "token_ids", "text", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    class TopEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.ScalarMap[int, float]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("index", "finish_reason", "usage", "speculation", "timings_ms", "kv_transfer", "seed", "error")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_MS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish_reason: str
    usage: Usage
    speculation: SpeculationStats
    timings_ms: TimingsMs
    kv_transfer: KvTransferStats
    seed: int
    error: str
    def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., timings_ms: _Optional[_Union[TimingsMs, _Mapping]] = ..., kv_transfer: _Optional[_Union[KvTransferStats, _Mapping]] = ..., seed: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt", "cached", "completion")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    prompt: int
    cached: int
    completion: int
    def __init__(self, prompt: _Optional[int] = ..., cached: _Optional[int] = ..., completion: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("num_steps", "num_drafted", "num_accepted", "accepted_per_position", "first_step_accepted", "drafted_per_position", "num_nodes")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_drafted: int
    num_accepted: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    first_step_accepted: int
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    num_nodes: int
    def __init__(self, num_steps: _Optional[int] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., first_step_accepted: _Optional[int] = ..., drafted_per_position: _Optional[_Iterable[int]] = ..., num_nodes: _Optional[int] = ...) -> None: ...

class TimingsMs(_message.Message):
    __slots__ = ("queue", "prefill", "transfer", "first_token", "total")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    queue: float
    prefill: float
    transfer: float
    first_token: float
    total: float
    def __init__(self, queue: _Optional[float] = ..., prefill: _Optional[float] = ..., transfer: _Optional[float] = ..., first_token: _Optional[float] = ..., total: _Optional[float] = ...) -> None: ...

class KvTransferStats(_message.Message):
    __slots__ = ("bytes", "tokens", "backend", "seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    tokens: int
    backend: str
    seconds: float
    def __init__(self, bytes: _Optional[int] = ..., tokens: _Optional[int] = ..., backend: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "max_model_len", "vocab_size", "eos_token_ids", "num_draft_tokens", "has_mtp", "dtype", "think_token_ids", "has_trees", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_MTP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    THINK_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_TREES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    has_mtp: bool
    dtype: str
    think_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_trees: bool
    digest: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., has_mtp: _Optional[bool] = ..., dtype: _Optional[str] = ..., think_token_ids: _Optional[_Iterable[int]] = ..., has_trees: _Optional[bool] = ..., digest: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Status(_message.Message):
    __slots__ = ("state", "mode", "num_running", "ranks")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STARTING: _ClassVar[Status.State]
        SERVING: _ClassVar[Status.State]
        DRAINING: _ClassVar[Status.State]
        NOT_SERVING: _ClassVar[Status.State]
        DEGRADED: _ClassVar[Status.State]
    STARTING: Status.State
    SERVING: Status.State
    DRAINING: Status.State
    NOT_SERVING: Status.State
    DEGRADED: Status.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    state: Status.State
    mode: str
    num_running: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    def __init__(self, state: _Optional[_Union[Status.State, str]] = ..., mode: _Optional[str] = ..., num_running: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("name", "kind", "epoch", "alive", "num_active_rows", "num_free_tokens", "max_tokens", "num_open_leases", "num_channels", "counters", "rows_by_layer", "balance_ratio", "kernels", "num_quarantined", "cause", "process_epoch")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_BY_LAYER_FIELD_NUMBER: _ClassVar[int]
    BALANCE_RATIO_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    epoch: int
    alive: bool
    num_active_rows: int
    num_free_tokens: int
    max_tokens: int
    num_open_leases: int
    num_channels: int
    counters: _containers.ScalarMap[str, float]
    rows_by_layer: _containers.RepeatedScalarFieldContainer[int]
    balance_ratio: float
    kernels: str
    num_quarantined: int
    cause: str
    process_epoch: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., epoch: _Optional[int] = ..., alive: _Optional[bool] = ..., num_active_rows: _Optional[int] = ..., num_free_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., num_open_leases: _Optional[int] = ..., num_channels: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., rows_by_layer: _Optional[_Iterable[int]] = ..., balance_ratio: _Optional[float] = ..., kernels: _Optional[str] = ..., num_quarantined: _Optional[int] = ..., cause: _Optional[str] = ..., process_epoch: _Optional[int] = ...) -> None: ...
