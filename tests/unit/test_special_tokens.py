"""Special tokens in stop strings and in the text of answers."""

from dataclasses import replace

import pytest

from tandem.cluster.client.options import GenerateOptions, build_request
from tandem.cluster.commands.generate import GenerateCommandOptions
from tandem.cluster.entrypoints.request_mapping import to_raw_request
from tandem.cluster.gateway.answer import Answer
from tandem.cluster.gateway.checks import check_request
from tandem.core.answer import Delta
from tandem.core.config import TINY_MODEL
from tandem.core.info import ModelInfo
from tandem.core.request import Request, SamplingParams, SequenceUpdate
from tandem.prefill_node.prefill_calls import PrefillReply
from tandem.text.tokenizer import TextStream, Tokenizer

TOKENIZER = Tokenizer(TINY_MODEL)
MODEL = ModelInfo("tiny", "deepseek_v3", 100, 2048, (1,), 3, True, "float32")
EOS = "<｜end▁of▁sentence｜>"


def asked(model: ModelInfo = MODEL, **options: object) -> SamplingParams:
    """Return the sampling of a request that a client makes with these options."""
    message = build_request([0], GenerateOptions(**options))  # type: ignore[typeddict-item]
    return check_request(to_raw_request(message), model, TOKENIZER).sampling


def test_a_stop_string_that_is_a_special_token_stops_by_its_id() -> None:
    """Regression test for vllm#2123: the answer never stopped, because special tokens have no
    text."""
    sampling = asked(stop=["</think>", "x", EOS], stop_token_ids=[9])
    assert sampling.stop_token_ids == (9, 3, 1)
    assert sampling.stop == ("</think>", "x", EOS), "other tokens may spell it"
    assert asked(stop=["x", "think", "<thin"]).stop_token_ids == ()


def test_a_special_token_that_the_model_has_no_row_for_stops_nothing() -> None:
    assert asked(replace(MODEL, vocab_size=3), stop=["</think>", "<think>"]).stop_token_ids == (2,)


@pytest.mark.parametrize("stop", ["a</think>", "</think>\n", "<think></think>"])
def test_a_stop_string_that_contains_a_special_token_is_refused(stop: str) -> None:
    with pytest.raises(ValueError, match=r"sampling\.stop\[1\]=.*contains the special token") as e:
        asked(stop=["x", stop])
    name = "<think>" if "<think>" in stop else "</think>"
    assert f"stop_token_ids=[{TOKENIZER.special_tokens[name]}]" in str(e.value)
    assert "skip_special_tokens" in str(e.value)
    kept = asked(stop=["x", stop], skip_special_tokens=False)
    assert (kept.stop, kept.stop_token_ids) == (("x", stop), ())


def test_too_long_stop_strings_are_refused_before_they_are_searched() -> None:
    with pytest.raises(ValueError, match="use at most 4096"):
        asked(stop=["x" * 4096 + "</think>"])


def test_special_tokens_are_skipped_unless_a_request_keeps_them() -> None:
    assert asked().skip_special_tokens and asked(skip_special_tokens=True).skip_special_tokens
    assert not asked(skip_special_tokens=False).skip_special_tokens
    for skips in (True, False):
        options = GenerateCommandOptions(prompt="x", skip_special_tokens=skips).request_options()
        assert options["skip_special_tokens"] is skips


def answer(ids: list[int], sampling: SamplingParams, num_resumed: int = 0) -> tuple[str, Answer]:
    """Return the text of an answer that is resumed after ``num_resumed`` of these tokens, and the
    answer."""
    request = Request("r", (0,), tuple(ids[:num_resumed]), replace(sampling, seed=0, max_tokens=99))
    stream = TextStream(TOKENIZER, skip_special_tokens=sampling.skip_special_tokens)
    made = Answer(request, stream, MODEL)
    text = ""
    for i, token in enumerate(ids[num_resumed:], start=num_resumed + 1):
        if made.is_finished:
            break
        last = "length" if i == len(ids) else None
        text += made.update(SequenceUpdate("r", (token,), last)).text
    return text, made


def ids_of(*parts: str) -> list[int]:
    return [token for part in parts for token in TOKENIZER.encode(part)[1:]]


IDS = ids_of("a😀") + [2] + ids_of("b") + [3] + ids_of("cd")


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ((), "a😀<think>b</think>cd"),
        (("</think>",), "a😀<think>b"),
        (("b</think>c",), "a😀<think>"),
        (("think>b</",), "a😀<"),
        (("d</",), "a😀<think>b</think>cd"),
    ],
)
def test_stop_strings_see_special_tokens_that_are_kept(stop: tuple[str, ...], text: str) -> None:
    """Stop strings match special tokens that are kept in the text, from every point that a client
    may resume from."""
    sampling = SamplingParams(stop=stop, skip_special_tokens=False)
    whole, ended = answer(IDS, sampling)
    assert whole == text
    assert ended.finish_reason == ("length" if text.endswith("cd") else "stop")
    for num in range(len(ended.token_ids)):
        before, _ = answer([*IDS[:num], IDS[num]], sampling)
        rest, resumed = answer(IDS, sampling, num)
        assert resumed.token_ids == ended.token_ids[num:]
        assert before.startswith(text[: len(text) - len(rest)])
    assert answer(IDS, SamplingParams())[0] == "a😀bcd"


def test_a_token_that_ends_an_answer_is_in_no_text() -> None:
    sampling = SamplingParams(skip_special_tokens=False)
    request = Request("r", (0,), sampling=replace(sampling, seed=0))
    made = Answer(request, TextStream(TOKENIZER, skip_special_tokens=False), MODEL)
    assert made.on_prefilled(PrefillReply(1, 0, 0.0, 0.0)) == Delta(0, (1,), "", ())


@pytest.mark.parametrize("stop", ["othere", "other thereX", "ther t"])
def test_text_held_for_a_stop_string_survives_a_move(stop: str) -> None:
    """Regression test for dynamo#14378, where the text was lost. The first token of each attempt
    comes from a prefill rank."""
    ids = ids_of("othe", "r the", "re")
    sampling = SamplingParams(stop=(stop,), seed=0, max_tokens=len(ids))
    for num_before in range(1, len(ids)):
        made = Answer(Request("r", (0,), sampling=sampling), TextStream(TOKENIZER), MODEL)
        text = made.on_prefilled(PrefillReply(ids[0], 0, 0.0, 0.0)).text
        for token in ids[1:num_before]:
            text += made.update(SequenceUpdate("r", (token,), None)).text
        if not made.is_finished:
            assert made.remaining_request().output_ids == tuple(ids[:num_before])
            text += made.on_prefilled(PrefillReply(ids[num_before], 0, 0.0, 0.0)).text
        for i in range(num_before + 1, len(ids)):
            if not made.is_finished:
                last = "length" if i == len(ids) - 1 else None
                text += made.update(SequenceUpdate("r", (ids[i],), last)).text
        assert text == ("o" if stop == "ther t" else "other there"), num_before
