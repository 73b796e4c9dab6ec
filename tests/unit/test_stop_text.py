"""Stop strings compared with an oracle that sees the whole text, and the counts of tokens cut
off."""

import sys
from types import FrameType
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.cluster.gateway.answer import Answer
from tandem.core.answer import SpeculationCounts, TokenLogprobs
from tandem.core.config import TINY_MODEL
from tandem.core.info import ModelInfo
from tandem.core.request import Request, SamplingParams, SequenceUpdate
from tandem.prefill_node.prefill_calls import PrefillReply
from tandem.text.stop_text import AnswerText, StopText
from tandem.text.tokenizer import TextStream, Tokenizer

TOKENIZER = Tokenizer(TINY_MODEL)
MODEL = ModelInfo("tiny", "deepseek_v3", 1000, 512, (), 3, True, "float32")
PIECES = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


def oracle(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, int | None]:
    """Return the emitted text and the number of the token that completed a stop string."""
    text = ""
    for number, piece in enumerate(pieces, start=1):
        for char in piece:
            text += char
            ending = [stop for stop in stops if text.endswith(stop)]
            if ending and number >= min_tokens:
                return text.removesuffix(max(ending, key=len)), number
    return text, None


@settings(max_examples=600, deadline=None)
@given(PIECES, STOPS, st.integers(0, 4))
@example(["ab", "a", "b"], ["abb", "b"], 0)
def test_text_is_cut_as_the_whole_text_would_be(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    expected, number = oracle(pieces, stops, min_tokens)
    stop_text, told = StopText(tuple(stops)), ""
    for i, piece in enumerate(pieces, start=1):
        text, stopped = stop_text.push(piece, may_stop=i >= min_tokens)
        told += text
        assert stopped == (i == number)
        if stopped:
            break
        whole = "".join(pieces[:i])
        starts = [n for n in range(1, len(whole) + 1) if begins(whole[-n:], stops)]
        assert told == whole[: len(whole) - max(starts, default=0)], "no more is held than must be"
    assert told + stop_text.finish() == expected


def begins(end: str, stops: list[str]) -> bool:
    return any(stop.startswith(end) and stop != end for stop in stops)


class SlowStopText:
    """The definition: it checks every suffix of the held text, so that its cost grows with the
    text."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        num_old, whole = len(self._held), self._held + text
        spans = [
            (start, start + len(stop))
            for stop in self._stops
            if (start := whole.find(stop, max(0, num_old - len(stop) + 1))) >= 0
        ]
        if may_stop and spans:
            self._held = ""
            return whole[: min(spans, key=lambda span: (span[1], span[0]))[0]], True
        ends = [whole[num_updates:] for num_updates in range(len(whole))]
        self._held = next((end for end in ends if begins(end, list(self._stops))), "")
        return whole.removesuffix(self._held), False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.tuples(st.text("ab", max_size=6), st.booleans()), max_size=16),
    st.lists(st.text("ab", min_size=1, max_size=7), max_size=5),
)
@example([("ab", False), ("b", True)], ["ab", "bb"])
@example([("aa", False), ("a", True)], ["aa", "aaa"])
@example([("abab", True), ("c", False), ("b", True)], ["ababb", "bab", "b"])
def test_push_by_push_it_tells_what_the_definition_tells(
    pushes: list[tuple[str, bool]], stops: list[str]
) -> None:
    """Covers phases that may not stop, text after them, and pushes after a stop."""
    fast, slow = StopText(tuple(stops)), SlowStopText(tuple(stops))
    for text, may_stop in pushes:
        assert fast.push(text, may_stop=may_stop) == slow.push(text, may_stop=may_stop)
    assert fast.finish() == slow.finish()


def lines_of(stops: tuple[str, ...], text: str) -> int:
    """Return the number of lines of Python that pushing ``text`` by characters executes."""
    stop_text, num_lines = StopText(stops), 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for char in text:
            assert stop_text.push(char) == ("", False)
    finally:
        sys.settrace(before)
    return num_lines


def test_a_token_costs_the_same_however_much_is_held() -> None:
    """A text that is a prefix of many long stop strings is held, character by character."""
    few, many = ("a" * 200 + "b",), tuple("a" * 200 + chr(0x100 + i) for i in range(32))
    assert lines_of(many, "a" * 200) <= lines_of(few, "a" * 200) <= 10 * lines_of(few, "a" * 20)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["é", "😀", "def ", "x", "\n", "return", "ab"]), max_size=12),
    st.lists(st.sampled_from(["😀x", "é", "return\n", "f x", "abab", "\n\n"]), max_size=2),
    st.integers(0, 30),
    st.lists(st.integers(1, 4), max_size=30),
)
def test_answers_and_their_resumption_stop_alike(
    words: list[str], stops: list[str], cut: int, sizes: list[int]
) -> None:
    """Uses real tokens: characters of several tokens, any runs of tokens, any point to resume
    from."""
    ids = tuple(TOKENIZER.encode("".join(words))[1:])
    whole = AnswerText(TextStream(TOKENIZER), tuple(stops), 0)
    told = [whole.push((token,))[0] for token in ids if not whole.is_stopped]
    text = "".join(told) + whole.finish()
    expected, number = oracle(["".join(words)], stops, 0)
    assert text == expected and whole.is_stopped == (number is not None)
    cut = min(cut, len(told))
    sampling = SamplingParams(seed=0, stop=tuple(stops), max_tokens=100)
    request = Request("r", (0,), ids[:cut], sampling)
    answer = Answer(request, TextStream(TOKENIZER), MODEL)
    rest, position = "".join(told[:cut]), cut
    for size in [*sizes, *[1] * len(ids)]:
        run = ids[position : position + size]
        if answer.is_finished or not run:
            break
        position += size
        last = "length" if position >= len(ids) else None
        rest += answer.update(SequenceUpdate("r", run, last)).text
    if answer.is_finished:
        assert rest == text and answer.token_ids == list(ids[cut : len(told)])
        assert answer.finish_reason == ("stop" if whole.is_stopped else "length")


def test_an_answer_that_goes_on_elsewhere_for_its_last_token_ends_with_it() -> None:
    ids = tuple(TOKENIZER.encode(char)[1] for char in "abc")
    sampling = SamplingParams(seed=0, max_tokens=len(ids))
    answer = Answer(Request("r", (0,), sampling=sampling), TextStream(TOKENIZER), MODEL)
    answer.on_prefilled(PrefillReply(ids[0], 0, 0.0, 0.0))
    answer.update(SequenceUpdate("r", ids[1:-1], None))
    assert not answer.is_finished and answer.remaining_request().output_ids == ids[:-1]
    answer.on_prefilled(PrefillReply(ids[-1], 0, 0.0, 0.0))
    assert answer.finish_reason == "length"


def test_a_cut_run_counts_what_was_kept() -> None:
    """Two steps of three accepted drafts; the stop string ends at the second token of the last."""
    ids = tuple(TOKENIZER.encode(char)[1] for char in "abcdefghi")
    sampling = SamplingParams(seed=0, stop=("g",))
    answer = Answer(Request("r", (0,), sampling=sampling), TextStream(TOKENIZER), MODEL)
    answer.on_prefilled(PrefillReply(ids[0], 0, 0.0, 0.0))
    answer.update(
        SequenceUpdate("r", ids[1:5], None, None, SpeculationCounts(1, 3, 3, (1, 1, 1), 3))
    )
    logprobs = tuple(TokenLogprobs(-float(i), (), ()) for i in range(4))
    counts = SpeculationCounts(2, 6, 6, (2, 2, 2), 3)
    delta = answer.update(SequenceUpdate("r", ids[5:9], None, None, counts, logprobs))
    assert (delta.token_ids, delta.text) == (ids[5:7], "f")
    assert delta.logprobs == logprobs[:2]
    finished = answer.make_finished()
    assert (finished.finish_reason, finished.usage.completion) == ("stop", 7)
    assert finished.speculation == SpeculationCounts(2, 6, 5, (2, 2, 1), 3)
    first = SpeculationCounts(1, 3, 3, (1, 1, 1), 3)
    assert first.truncate_last_run(SpeculationCounts(), 1) == SpeculationCounts(
        1, 3, 1, (1, 0, 0), 1
    )
