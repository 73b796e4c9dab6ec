"""End of an answer: one pure rule for the first token and for runs of accepted tokens."""

from tandem.core.request import LENGTH, STOP, SamplingParams


def stop_ids(sampling: SamplingParams, eos_ids: tuple[int, ...]) -> frozenset[int]:
    """Return the token ids that end the answer.

    These are the request's stop tokens and, unless ignored, the model's end-of-sequence tokens.
    """
    return frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_ids))


def truncate_at_stop(
    token_ids: tuple[int, ...], stops: frozenset[int], num_budget: int
) -> tuple[tuple[int, ...], str | None]:
    """Keep ``token_ids`` up to and including the first stop token, at most ``num_budget`` (> 0).

    Returns the kept ids and the finish reason, None while the answer continues. The reason is STOP
    if a stop token is also the last token of the budget.
    """
    assert num_budget > 0, f"num_budget={num_budget}: must be above 0"
    kept_ids = token_ids[:num_budget]
    for i, token in enumerate(kept_ids):
        if token in stops:
            return kept_ids[: i + 1], STOP
    return kept_ids, LENGTH if len(kept_ids) == num_budget else None


def remaining_budget(num_prompt: int, num_output: int, max_tokens: int, max_model_len: int) -> int:
    """Return the number of tokens that a sequence may still emit."""
    return min(max_tokens - num_output, max_model_len - num_prompt - num_output)
