"""Prometheus metrics of a gateway's requests.

Names, meanings and units are those of vLLM's metrics where they exist, with ``tandem_`` instead of
``vllm:``. Label values never come from clients.
"""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from tandem.cluster.gateway.admission import StreamWatcher
from tandem.core.answer import Finished, Piece

disable_created_metrics()  # an additional series per metric, which is not needed
SECONDS = tuple(digit * 10.0**power for power in range(-4, 3) for digit in (1, 2.5, 5))
"""Upper bounds of histogram buckets in seconds: 0.1 ms to 500 s."""
_HISTOGRAMS = {
    "time_to_first_token": "Time from the request to its first token, in seconds.",
    "inter_token_latency": "Time between two messages of a stream (1 or more tokens), in seconds.",
    "request_time_per_output_token": "Mean seconds per token of an answer after its first token.",
    "e2e_request_latency": "Time from the request to the end of its answer, in seconds.",
    "request_queue_time": "Wait on the prefill rank for the start of prefill, in seconds. The wait "
    "for a decode row is not included.",
    "request_prefill_time": "Duration of the prefill of a request, in seconds.",
    "request_decode_time": "Time from the first token to the last, in seconds.",
    "kv_transfer": "Duration of the KV cache transfer of a request, in seconds.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished answers.",
    "generation_tokens": "Generated tokens that were sent to clients.",
    "prefix_cache_queries": "Prompt tokens looked up in prefix caches.",
    "prefix_cache_hits": "Prompt tokens found in prefix caches.",
    "kv_transfer_bytes": "KV cache bytes transferred from prefill to decode ranks.",
    "request_incomplete": "Answers that ended early: the client disconnected or the call failed.",
    "spec_decode_num_drafts": "Decode steps that verified drafts, counted per answer.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
}


class RequestMetrics:
    """Metrics of one gateway since its start, in ``registry``. Owned by the gateway's loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(f"tandem_{name}_seconds", text, buckets=SECONDS, registry=self.registry)
            for name, text in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"tandem_{name}", text, registry=self.registry)
            for name, text in _COUNTERS.items()
        }
        self._ended = self._make_counter(
            "request_success", "Finished answers, by reason.", "finished_reason"
        )
        self._accepted = self._make_counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position.",
            "position",
        )
        self._failed = self._make_counter("rejections", "Calls that ended with an error.", "code")

    def watch_stream(self) -> "StreamMetrics":
        """Return the watcher of a stream that starts now."""
        return StreamMetrics(self)

    def on_call_failed(self, code: str) -> None:
        """Count a failed call by its gRPC code."""
        self._failed.labels(code).inc()

    def _make_counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"tandem_{name}", text, [label], registry=self.registry)

    def observe(self, name: str, seconds: float) -> None:
        """Add a value to a histogram."""
        self._histograms[name].observe(seconds)

    def increment(self, name: str, amount: float) -> None:
        """Increase a counter."""
        self._counters[name].inc(amount)

    def on_finished(self, finished: Finished) -> None:
        """Record the statistics of a finished answer."""
        ms = finished.timings_ms
        usage = finished.usage
        counts = finished.speculation
        pulled = finished.kv_transfer
        self._ended.labels(finished.finish_reason).inc()
        self.observe("e2e_request_latency", ms.total / 1e3)
        self.increment("prompt_tokens", usage.prompt)
        if not ms.first_token:
            return  # the answer ended before its first token, so the rest is undefined
        self.observe("request_queue_time", ms.queue / 1e3)
        self.observe("request_prefill_time", ms.prefill / 1e3)
        self.observe("request_decode_time", decode_s := (ms.total - ms.first_token) / 1e3)
        if usage.completion > 1:
            self.observe("request_time_per_output_token", decode_s / (usage.completion - 1))
        if pulled.bytes:
            self.observe("kv_transfer", pulled.seconds)
        self.increment("prefix_cache_queries", usage.prompt)
        self.increment("prefix_cache_hits", usage.cached)
        self.increment("kv_transfer_bytes", pulled.bytes)
        self.increment("spec_decode_num_drafts", sum(counts.drafted_per_position[:1]))
        self.increment("spec_decode_num_draft_tokens", counts.num_nodes)
        self.increment("spec_decode_num_accepted_tokens", counts.num_accepted)
        for position, num in enumerate(counts.accepted_per_position):
            self._accepted.labels(str(position)).inc(num)


class StreamMetrics(StreamWatcher):
    """Watcher that measures the gaps between messages of one stream."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._started_at = time.monotonic()
        self._last_at: dict[int, float] = {}
        self._num_finished = 0

    def on_end(self, num_answers: int) -> None:
        self._metrics.increment("request_incomplete", num_answers - self._num_finished)

    def on_piece(self, piece: Piece) -> None:
        if isinstance(piece, Finished):
            self._num_finished += 1
            self._metrics.on_finished(piece)
            return
        now = time.monotonic()
        last = self._last_at.get(piece.index)
        if last is None:
            self._metrics.observe("time_to_first_token", now - self._started_at)
        else:
            self._metrics.observe("inter_token_latency", now - last)
        self._last_at[piece.index] = now
        self._metrics.increment("generation_tokens", len(piece.token_ids))
