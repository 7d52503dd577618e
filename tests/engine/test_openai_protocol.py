"""OpenAI's protocol without sockets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.request import FinishReason, SamplingParams
from stillroom.engine.events import RemoteUsage
from stillroom.engine.openai_protocol import EventDelta, SseDecoder, read_event, sampling_fields
from stillroom.errors import EngineError, UsageError

STREAM = b": hello\r\ndata: a\r\n\r\nevent: x\ndata:b\ndata: c\n\n\n\rdata: \xc3\xa4\x0b\r\r"


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_do_not_depend_on_how_bytes_are_cut(cuts: list[int]) -> None:
    decoder = SseDecoder("http://host")
    places = [0, *sorted(cuts), len(STREAM)]
    found = [data for start, end in zip(places, places[1:], strict=False) for data in decoder.push(STREAM[start:end])]
    found += decoder.push(b"\n")

    assert found == ["a", "b\nc", "\u00e4\x0b"]


def test_too_large_event_is_an_error() -> None:
    decoder = SseDecoder("http://host")
    with pytest.raises(EngineError, match="http://host sent an event of more than 4194304 bytes"):
        for _ in range(5):
            list(decoder.push(b"x" * 1024**2))


@pytest.mark.parametrize(
    ("data", "progress"),
    [
        ('{"choices": [{"delta": {"role": "assistant"}}]}', EventDelta()),
        ('{"choices": [{"delta": {"content": null, "reasoning_content": "hm"}}]}', EventDelta()),
        ('{"choices": [{"text": "a", "finish_reason": null}]}', EventDelta("a")),
        ('{"choices": [{"text": "", "finish_reason": "length"}]}', EventDelta("", FinishReason.LENGTH)),
        ('{"choices": [{"delta": {}, "finish_reason": "eos"}]}', EventDelta("", FinishReason.STOP)),
        ('{"choices": [], "usage": {"prompt_tokens": 3}}', EventDelta(usage=RemoteUsage(3, 0, 0))),
        (
            '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": null}}',
            EventDelta(usage=RemoteUsage(3, 0, 1)),
        ),
    ],
)
def test_events(data: str, progress: EventDelta) -> None:
    assert read_event(data, "http://host", "m") == progress


def test_neutral_sampling_values_are_sent() -> None:
    params = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, seed=3)
    asked = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3}
    asked |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    neutral = {"top_k": 2**20, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0}

    assert sampling_fields(params, has_extra=True) == asked | neutral
    assert sampling_fields(params, has_extra=False) == asked


def test_unsupported_sampling_parameters_are_refused() -> None:
    params = SamplingParams(min_p=0.1, repetition_penalty=1.2, min_tokens=2)

    wire = sampling_fields(params, has_extra=True)
    assert (wire["min_p"], wire["repetition_penalty"], wire["repeat_penalty"], wire["min_tokens"]) == (0.1, 1.2, 1.2, 2)
    with pytest.raises(UsageError, match="cannot be sent to this engine"):
        sampling_fields(params, has_extra=False)
    for unknown in (SamplingParams(logprobs=3), SamplingParams(logit_bias={1: 2.0})):
        with pytest.raises(UsageError, match="cannot be sent to this engine"):
            sampling_fields(unknown, has_extra=True)
