"""Every message survives its way through JSON, and every damaged one is refused with a WireError that names a place."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.cluster.prediction import EngineCosts
from stillroom.cluster.wire import (
    AnswerRequest,
    Failure,
    FirstToken,
    WireEvent,
    WireSample,
    events_from_json,
    events_to_json,
)
from stillroom.cluster.wire_reading import dump, parse
from stillroom.cluster.wire_state import EngineInfo, EngineState
from stillroom.core.batch import TokenLogprobs
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Link, Tier
from stillroom.core.prompt import Segment, SegmentKind
from stillroom.core.request import FinishReason, LookupCounts, SamplingParams
from stillroom.core.reuse import PromptReuse, Reason, SegmentReuse, Variant
from stillroom.errors import (
    DeadlineExceededError,
    DeviceLostError,
    EngineClosedError,
    EngineError,
    NonFiniteError,
    PromptTooLongError,
    RequestTimeoutError,
    UsageError,
    WireError,
)
from stillroom.kvcache.tree.cost_model import CostProfile
from tests.examples import most_examples

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
NUMBERS = st.floats(-1e300, 1e300)
SECONDS = st.floats(0, 1e9)
CHUNKS = st.none() | st.integers(0, 2**63 - 1).map(ChunkId)
LOGPROBS = NUMBERS | st.just(-math.inf)
TEXTS = st.text(max_size=8)

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(6, 4096),
    min_tokens=st.integers(0, 6),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 10),
    presence_penalty=st.floats(-10, 10),
    frequency_penalty=st.floats(-10, 10),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    seed=st.integers(0, 2**63 - 1),
)
SAMPLES = st.builds(
    WireSample,
    request_id=TEXTS.map(RequestId),
    sampling=SAMPLING,
    priority=st.integers(-100, 100),
    seconds_left=st.none() | SECONDS,
    generated=TOKENS,
)
SEGMENTS = st.builds(Segment, st.sampled_from(SegmentKind), TOKENS.filter(len), CHUNKS)
REQUESTS = st.builds(
    AnswerRequest,
    segments=st.lists(SEGMENTS, min_size=1, max_size=3).map(tuple),
    samples=st.lists(SAMPLES, min_size=1, max_size=3, unique_by=lambda one: one.request_id).map(tuple),
    tenant=st.none() | TEXTS,
    salt=TEXTS | TEXTS.map(lambda name: f"{name}\0identity"),
    grammar=st.none() | TEXTS,
    only_own_chunks=st.booleans(),
    may_place=st.booleans(),
)
VARIANTS = st.builds(
    Variant,
    behind=st.lists(CHUNKS, max_size=3).map(tuple),
    first_position=st.integers(0, 1000),
    overlap=st.floats(0, 1),
    impact=st.none() | st.floats(0.5, 1),
    overhead=st.floats(0, 1),
    saved_seconds=NUMBERS,
    is_focused=st.none() | st.booleans(),
    bits=st.sampled_from([4, 8, 16]),
)
SEGMENT_REUSES = st.builds(
    SegmentReuse,
    st.sampled_from(SegmentKind),
    CHUNKS,
    st.integers(0, 1000),
    st.none() | st.sampled_from(Tier),
    st.sampled_from(Reason),
    st.integers(0, 1000),
    st.none() | VARIANTS,
)
REUSES = st.builds(PromptReuse, st.lists(SEGMENT_REUSES, max_size=3).map(tuple), SECONDS, NUMBERS, st.floats(0, 1))
TOKEN_LOGPROBS = st.builds(
    TokenLogprobs, LOGPROBS, st.lists(st.tuples(st.integers(0, 99), LOGPROBS), max_size=2).map(tuple)
)


@st.composite
def wire_events(draw: st.DrawFn) -> WireEvent:
    token_ids = draw(TOKENS)
    scores = [draw(TOKEN_LOGPROBS) for _ in token_ids] if draw(st.booleans()) else []
    failure = draw(st.none() | st.builds(Failure, st.sampled_from(["usage", "engine", "closed"]), TEXTS))
    return WireEvent(
        sample=draw(st.integers(0, 9)),
        tokens=token_ids,
        logprobs=tuple(scores),
        first=draw(st.none() | st.builds(FirstToken, SECONDS, SECONDS, SECONDS, st.none() | REUSES)),
        lookup=draw(st.none() | st.builds(LookupCounts, st.integers(0, 99), st.integers(0, 99))),
        end=draw(st.none() | st.sampled_from(FinishReason)) if failure is None else FinishReason.ABORTED,
        failure=failure,
    )


EVENTS = st.lists(wire_events(), max_size=3).map(tuple)
PROFILES = st.builds(
    CostProfile,
    st.just((0, 100)),
    st.just((1, 10, 100)),
    st.just(((0.1, 0.2, 0.30000000000000004), (0.2, 0.3, 1e-9))),
    st.dictionaries(st.sampled_from(Tier), st.builds(Link, SECONDS, st.floats(1, 1e12))),
)
COSTS = st.builds(
    EngineCosts,
    profile=PROFILES,
    bytes_per_token=st.integers(1, 10**6),
    recompute_share=st.none() | st.floats(0, 1),
    has_query_pass=st.booleans(),
)
COUNTS = st.integers(0, 10**9)
INFOS = st.builds(
    EngineInfo,
    run=TEXTS,
    version=TEXTS,
    model=TEXTS,
    fingerprint=st.binary(min_size=32, max_size=32),
    vocabulary=st.binary(min_size=32, max_size=32),
    knowledge_base=TEXTS,
    vocab_size=COUNTS,
    max_positions=COUNTS,
    num_blocks=COUNTS,
    block_size=st.integers(1, 256),
    stop_token_ids=st.frozensets(st.integers(0, 99), max_size=3),
    max_num_seqs=COUNTS,
    tail_tokens=COUNTS,
    places_computed=st.booleans(),
    costs=st.none() | COSTS,
)
STATES = st.builds(
    EngineState,
    run=TEXTS,
    sequence=COUNTS,
    is_all=st.booleans(),
    changes=st.dictionaries(st.binary(min_size=32, max_size=32), st.none() | st.sampled_from(Tier), max_size=5),
    queue_seconds=SECONDS,
    num_outstanding=COUNTS,
    num_waiting=COUNTS,
    num_running=COUNTS,
    num_blocks=COUNTS,
    num_free_blocks=COUNTS,
    kept_bytes=st.dictionaries(st.sampled_from(Tier), COUNTS),
    is_draining=st.booleans(),
)


def through_json(value: object) -> Any:
    return parse(dump(value), "the message")


@given(REQUESTS)
@settings(max_examples=most_examples(30))
def test_a_request_survives_its_way_through_json(request: AnswerRequest) -> None:
    assert AnswerRequest.from_json(through_json(request.to_json())) == request


@given(EVENTS)
@settings(max_examples=most_examples(30))
def test_events_survive_their_way_through_json(events: tuple[WireEvent, ...]) -> None:
    assert events_from_json(through_json(events_to_json(events))) == events


@given(INFOS)
@settings(max_examples=most_examples(20))
def test_an_engines_information_survives_its_way_through_json(info: EngineInfo) -> None:
    assert EngineInfo.from_json(through_json(info.to_json())) == info


@given(STATES)
@settings(max_examples=most_examples(20))
def test_an_engines_state_survives_its_way_through_json(state: EngineState) -> None:
    assert EngineState.from_json(through_json(state.to_json())) == state


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, one in entries for place in places(one, (*path, name)))]


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed: Any = deepcopy(value)
    parent = changed
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = new
    return changed


JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    2**70,
    1e308,
    "",
    "x" * 3_000_000,
    [],
    [[]],
    {},
    {"s": {}},
    "\ud800",
    -(10**400),
)
FIRST = FirstToken(
    0.1, 0.2, 0.3, PromptReuse((SegmentReuse(SegmentKind.CHUNK, ChunkId(7), 9, Tier.HOST, Reason.HIT),), 0.1, 0.2)
)
REQUEST = AnswerRequest(
    segments=(Segment(SegmentKind.CHUNK, (1, 2), ChunkId(7)), Segment(SegmentKind.QUESTION, (3,))),
    samples=(
        WireSample(
            request_id=RequestId("a"),
            sampling=SamplingParams(temperature=0.5, logit_bias={3: 1.0}, logprobs=2),
            priority=1,
            seconds_left=2.0,
            generated=(4, 5),
        ),
    ),
)
INFO = EngineInfo(
    run="r",
    version="1",
    model="m",
    fingerprint=bytes(32),
    vocabulary=bytes(32),
    knowledge_base="k",
    vocab_size=100,
    max_positions=1000,
    num_blocks=10,
    block_size=16,
    stop_token_ids=frozenset({2}),
    max_num_seqs=4,
    tail_tokens=64,
    places_computed=False,
    costs=EngineCosts(
        profile=CostProfile((0, 9), (1, 9), ((1.0, 2.0), (3.0, 4.0)), {Tier.HOST: Link(0.0, 1.0)}), bytes_per_token=4
    ),
)
LINE = (
    WireEvent(
        sample=0,
        tokens=(1,),
        logprobs=(TokenLogprobs(-1.0, ((1, -1.0),)),),
        first=FIRST,
        lookup=LookupCounts(2, 1),
    ),
    WireEvent(sample=0, end=FinishReason.ABORTED, failure=Failure("usage", "no")),
)
STATE = EngineState(
    run="r", sequence=1, changes={bytes(32): None, bytes(31) + b"x": Tier.DISK}, kept_bytes={Tier.HOST: 9}
)
MESSAGES: list[tuple[Any, Callable[[Any], object]]] = [
    (REQUEST.to_json(), AnswerRequest.from_json),
    (events_to_json(LINE), events_from_json),
    (INFO.to_json(), EngineInfo.from_json),
    (STATE.to_json(), EngineState.from_json),
]


@pytest.mark.parametrize(("message", "read"), MESSAGES)
def test_a_damaged_message_is_read_or_refused_and_never_fails_otherwise(
    message: Any, read: Callable[[Any], object]
) -> None:
    random = Random(0)
    read(message)
    num_refused = 0
    for path in places(message):
        for junk in JUNK:
            try:
                read(with_value(message, path, junk))
            except WireError as error:
                num_refused += 1
                assert len(str(error)) < 500
        if path and isinstance(path[-1], str):  # a field that is missing, and one that is unknown
            damaged = with_value(message, path, 0)
            parent = damaged
            for name in path[:-1]:
                parent = parent[name]
            parent[f"unknown-{random.random()}"] = parent.pop(path[-1])
            with pytest.raises(WireError):
                read(damaged)
    assert num_refused > 8 * len(places(message))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": NaN}', b"[Infinity]", b"9" * 5000, b'"\\ud800', b"nul"]
)
def test_bytes_that_are_no_json_are_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="the request is not JSON"):
        parse(body, "the request")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("wire",), 1, "version 1 of the engine's protocol, and this side version 2"),
        (("segments",), [], "the request.segments has 0 entries"),
        (("segments", 0, 2), [], r"the request.segments\[0\]\[2\] is empty"),
        (("segments", 0, 1), "7", r"segments\[0\]\[1\] is '7'; it must be a chunk id"),
        (("segments", 0, 1), "f" * 16, "it must be a chunk id"),
        (("segments", 0, 0), "poem", r"segments\[0\]\[0\] is 'poem', which is unknown"),
        (("samples",), [], "the request.samples has 0 entries"),
        (("samples", 0, "sampling", "temperature"), -1, r"samples\[0\].sampling: temperature=-1"),
        (("samples", 0, "sampling", "max_tokens"), 1, r"samples\[0\] has 2 tokens; max_tokens is 1"),
        (("samples", 0, "generated"), [1, -1], r"generated\[1\] is -1; it must be a token id"),
        (("samples", 0, "seconds_left"), -0.5, "seconds_left is -0.5; it must be at least 0"),
        (("tenant",), 5, "the request.tenant is 5; it must be text"),
    ],
)
def test_a_refusal_names_the_place_and_the_value(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        AnswerRequest.from_json(with_value(REQUEST.to_json(), path, value))


def test_samples_of_equal_ids_are_refused() -> None:
    twice = replace(REQUEST, samples=REQUEST.samples * 2)
    with pytest.raises(WireError, match="equal ids"):
        AnswerRequest.from_json(twice.to_json())


def test_tokens_that_the_model_lacks_are_refused() -> None:
    REQUEST.check_tokens(6)
    with pytest.raises(WireError, match=r"samples\[0\].generated names token 5; the model has tokens 0 to 4"):
        REQUEST.check_tokens(5)
    with pytest.raises(WireError, match=r"segments\[0\] names token 2"):
        REQUEST.check_tokens(2)
    biased = replace(REQUEST.samples[0], generated=(), sampling=SamplingParams(logit_bias={9: 1.0}))
    with pytest.raises(WireError, match=r"sampling.logit_bias names token 9"):
        replace(REQUEST, samples=(biased,)).check_tokens(6)


@pytest.mark.parametrize(
    ("error", "may_move"),
    [
        (PromptTooLongError("long"), False),
        (UsageError("wrong"), False),
        (EngineClosedError("closed"), True),
        (DeviceLostError("lost"), True),
        (NonFiniteError(), False),
        (DeadlineExceededError("late"), False),
        (RequestTimeoutError("slow"), False),
        (EngineError("failed"), False),
    ],
)
def test_an_error_keeps_its_class_and_message(error: Exception, may_move: bool) -> None:
    failure = Failure.of(error)
    assert type(failure.exception()) is type(error) and str(failure.exception()) == str(error)
    assert failure.may_move == may_move


def test_the_message_of_an_unexpected_error_is_not_sent() -> None:
    failure = Failure.of(ValueError("/home/secret"))
    assert "secret" not in failure.message and type(failure.exception()) is EngineError


def test_the_times_of_a_first_token_are_those_of_the_fronts_clock() -> None:
    admission = FirstToken(1.0, 2.0, 5.0).admission(at=105.0)
    assert (admission.admitted_at, admission.began_at) == (101.0, 102.0)


def test_output_tokens_are_those_of_the_engines_pool() -> None:
    assert INFO.max_output_tokens([17, 16, 5]) == (10 - 2 - 1) * 16 - 5


def test_many_names_are_short() -> None:
    random = Random(0)
    held = {random.randbytes(32): Tier.DEVICE for _ in range(1000)}
    written = json.dumps(EngineState(run="r", sequence=1, changes=held).to_json())
    assert len(written) < 1000 * 43 + 400
