"""Tests routers by properties, and the cost router against hand-computed seconds."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.cluster.engine_belief import EngineBelief
from stillroom.cluster.placing import by_hash, max_outstanding, min_hash
from stillroom.cluster.prediction import EngineCosts, predict
from stillroom.cluster.routed_request import RoutedPiece, RoutedRequest
from stillroom.cluster.routers import (
    MAX_AGE_SECONDS,
    BoundedHash,
    CostRouter,
    LeastLoaded,
    PrefixScore,
    PrefixThreshold,
    RoundRobin,
    Router,
)
from stillroom.core.kv import Link, Tier
from stillroom.errors import EngineUnavailableError
from stillroom.kvcache.tree.cost_model import linear_profile

PROFILE = linear_profile(1.0, 0.01, 0.0, {Tier.HOST: Link(0.0, 200.0), Tier.DISK: Link(0.0, 50.0)})
EXACT = EngineCosts(profile=PROFILE, bytes_per_token=1)
ANYWHERE = EngineCosts(profile=PROFILE, bytes_per_token=1, recompute_share=0.25, has_query_pass=False)
BOUNDED: list[BoundedHash | CostRouter] = [
    BoundedHash(),
    BoundedHash(uses_set=True),
    CostRouter(EXACT),
    CostRouter(ANYWHERE, load_factor=1.0),
]
ROUTERS: list[Router] = [RoundRobin(), LeastLoaded(), PrefixThreshold(), PrefixScore(), *BOUNDED]
NAMES = [bytes([number]) for number in range(12)]


def request_of(contents: Sequence[int], number: int = 0, num_tokens: int = 100) -> RoutedRequest:
    """Make a request of chunks; the key of each names the path to it."""
    pieces = tuple(
        RoutedPiece(b"path" + bytes(contents[: place + 1]), NAMES[content], num_tokens)
        for place, content in enumerate(contents)
    )
    return RoutedRequest(number, pieces, 10)


REQUESTS = st.builds(
    request_of, st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True), number=st.integers(0, 100)
)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[RoutedRequest, list[EngineBelief]]:
    """A request, and engines of which at least the first is alive."""
    request = draw(REQUESTS)
    names = [name for piece in request.pieces for name in (piece.key, piece.content)] + NAMES
    engines = [
        EngineBelief(
            engine_id=f"engine-{number}",
            held=draw(st.dictionaries(st.sampled_from(names), st.sampled_from(Tier), max_size=8)),
            queue_seconds=draw(st.floats(0.0, 20.0)),
            num_outstanding=draw(st.integers(0, 200)),
            age_seconds=draw(st.sampled_from([0.0, 0.5, 2 * MAX_AGE_SECONDS])) if number else 0.0,
            is_alive=number == 0 or draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 6)))
    ]
    return request, engines


def is_candidate(engine: EngineBelief) -> bool:
    return engine.is_alive and engine.age_seconds <= MAX_AGE_SECONDS


@pytest.mark.parametrize("router", ROUTERS, ids=lambda one: type(one).__name__)
@settings(max_examples=15)
@given(cluster=clusters(), random=st.randoms(use_true_random=False))
def test_choice_does_not_depend_on_the_order_of_engines(
    router: Router, cluster: tuple[RoutedRequest, list[EngineBelief]], random: Random
) -> None:
    request, engines = cluster
    shuffled = list(engines)
    random.shuffle(shuffled)

    assert router.choose(request, engines) == router.choose(request, shuffled)


@pytest.mark.parametrize("router", ROUTERS, ids=lambda one: type(one).__name__)
@settings(max_examples=15)
@given(cluster=clusters())
def test_dead_engine_is_never_chosen_and_never_counts(
    router: Router, cluster: tuple[RoutedRequest, list[EngineBelief]]
) -> None:
    request, engines = cluster
    chosen = router.choose(request, engines)

    assert is_candidate(chosen)
    assert router.choose(request, list(filter(is_candidate, engines))) == chosen


@pytest.mark.parametrize("router", ROUTERS, ids=lambda one: type(one).__name__)
def test_without_a_live_engine_the_error_says_so(router: Router) -> None:
    silent = EngineBelief(engine_id="a", age_seconds=MAX_AGE_SECONDS + 1)
    with pytest.raises(EngineUnavailableError, match="none of 2 engines is alive"):
        router.choose(request_of([1]), [silent, EngineBelief(engine_id="b", is_alive=False)])


@pytest.mark.parametrize("router", BOUNDED, ids=lambda one: type(one).__name__)
@settings(max_examples=15)
@given(cluster=clusters())
def test_load_bound_holds(router: BoundedHash | CostRouter, cluster: tuple[RoutedRequest, list[EngineBelief]]) -> None:
    request, engines = cluster
    live = list(filter(is_candidate, engines))

    assert router.choose(request, engines).num_outstanding + 1 <= max_outstanding(live, router.load_factor)


@pytest.mark.parametrize("costs", [EXACT, ANYWHERE], ids=["exact", "anywhere"])
@settings(max_examples=15)
@given(cluster=clusters(), data=st.data())
def test_better_belief_of_the_chosen_engine_keeps_the_choice(
    costs: EngineCosts, cluster: tuple[RoutedRequest, list[EngineBelief]], data: st.DataObject
) -> None:
    """Better: a shorter queue, more KV, or KV on a faster tier.

    Where chunks are placed, only KV at other positions: an engine that learns of a longer exact prefix uses it, also
    where placing its chunks would have been faster (`plan_reuse` comes before `plan_placements`).
    """
    router = CostRouter(costs, load_factor=math.inf)
    request, engines = cluster
    chosen = router.choose(request, engines)
    piece = data.draw(st.sampled_from(request.pieces))
    better = replace(
        chosen,
        queue_seconds=chosen.queue_seconds * data.draw(st.floats(0.0, 1.0)),
        held={**chosen.held, (piece.key if costs is EXACT else piece.content): Tier.DEVICE},
    )
    changed = [better if one is chosen else one for one in engines]

    gain = predict(request, chosen.held, costs).seconds - predict(request, better.held, costs).seconds
    assert gain >= -0.02, "tokens to recompute are whole"
    if gain >= 0.0:
        assert router.choose(request, changed) == better


@settings(max_examples=15)
@given(cluster=clusters(), queue=st.floats(0.0, 40.0))
def test_cost_router_equals_brute_force_within_the_tie(
    cluster: tuple[RoutedRequest, list[EngineBelief]], queue: float
) -> None:
    request, engines = cluster
    router = CostRouter(EXACT, load_factor=math.inf, tie_share=0.0)
    seconds = {
        one.engine_id: one.queue_seconds + brute_exact_seconds(request, one) for one in engines if is_candidate(one)
    }

    assert seconds[router.choose(request, engines).engine_id] == pytest.approx(min(seconds.values()))


def brute_exact_seconds(request: RoutedRequest, engine: EngineBelief) -> float:
    """Try every cut of the prompt whose pieces are all held."""
    found = []
    for cut in range(len(request.pieces) + 1):
        used = request.pieces[:cut]
        if all(piece.key in engine.held for piece in used):
            cached = sum(piece.num_tokens for piece in used)
            loads = sum(PROFILE.load_seconds(t, piece.num_tokens) for piece in used if (t := engine.held[piece.key]))
            found.append(loads + PROFILE.prefill_seconds(cached, request.num_tokens - cached))
    return min(found)


@settings(max_examples=15)
@given(contents=st.lists(st.integers(0, 11), min_size=1, max_size=24), num_engines=st.integers(2, 5))
def test_equal_engines_with_long_answers_get_nearly_equal_numbers(contents: list[int], num_engines: int) -> None:
    """Every prompt is computed before the next one comes, and no answer ends."""
    engines = [EngineBelief(engine_id=f"{number}") for number in range(num_engines)]
    for sent, content in enumerate(contents, start=1):
        chosen = CostRouter(EXACT).choose(request_of([content]), engines)
        engines = [replace(one, num_outstanding=one.num_outstanding + (one == chosen)) for one in engines]

        assert max(one.num_outstanding for one in engines) <= math.ceil(1.25 * sent / num_engines)


def test_tie_goes_home_while_its_home_has_room() -> None:
    request = request_of([1])
    home, other = by_hash(NAMES[1], [EngineBelief(engine_id=name) for name in "ab"])
    router = CostRouter(EXACT)

    assert router.choose(request, [home, replace(other, num_outstanding=1)]).engine_id == home.engine_id
    assert router.choose(request, [replace(home, num_outstanding=1), other]).engine_id == home.engine_id
    assert router.choose(request, [replace(home, num_outstanding=2), other]).engine_id == other.engine_id
    full = [replace(home, num_outstanding=9), replace(other, queue_seconds=9.0)]
    assert router.choose(request, full).engine_id == home.engine_id, "an engine that is later is not tied"


def test_predictions_equal_hand_computed_seconds() -> None:
    """A prompt of 310 tokens: 1 s and 0.01 s a token; the host takes 0.5 s a chunk, the disk 2 s, computing it 1 s."""
    request = request_of([1, 2, 3])
    first, second = request.pieces[0].key, request.pieces[1].key

    def seconds(held: dict[bytes, Tier], costs: EngineCosts = EXACT) -> float:
        return predict(request, held, costs).seconds

    assert seconds({}) == pytest.approx(1 + 3.1)
    assert seconds({first: Tier.DEVICE}) == pytest.approx(1 + 2.1)
    assert seconds({second: Tier.DEVICE}) == pytest.approx(1 + 3.1), "its prefix is missing"
    assert seconds({first: Tier.HOST, second: Tier.DISK}) == pytest.approx(0.5 + 1 + 2.1), "the disk is too slow"
    assert seconds({NAMES[3]: Tier.DEVICE}) == pytest.approx(1 + 3.1), "exact reuse uses no other position"
    assert seconds({NAMES[3]: Tier.DEVICE}, ANYWHERE) == pytest.approx(1 + 3.1 - 0.75)
    assert seconds({NAMES[3]: Tier.HOST}, ANYWHERE) == pytest.approx(0.5 + 1 + 3.1 - 0.75)
    assert seconds({NAMES[3]: Tier.DISK}, ANYWHERE) == pytest.approx(1 + 3.1)
    with_query_pass = replace(ANYWHERE, has_query_pass=True)
    assert seconds({NAMES[3]: Tier.DEVICE}, with_query_pass) == pytest.approx(1 + 3.1), "the pass costs more"
    all_three = dict.fromkeys(NAMES[1:4], Tier.DEVICE)
    assert seconds(all_three, with_query_pass) == pytest.approx(1 + 3.1 - 2.25 + 1 + 0.1)


def test_cost_router_waits_for_kept_kv_only_as_long_as_that_pays() -> None:
    request = request_of([1, 2, 3])
    held = {piece.content: Tier.DEVICE for piece in request.pieces}
    idle = EngineBelief(engine_id="idle")
    router = CostRouter(ANYWHERE)  # the KV saves 2.25 s

    for queue_seconds, chosen in [(2.0, "holder"), (2.5, "idle")]:
        holder = EngineBelief(engine_id="holder", held=held, queue_seconds=queue_seconds)
        assert router.choose(request, [idle, holder]).engine_id == chosen


def test_prefix_threshold_follows_a_long_prefix_unless_its_engine_is_overloaded() -> None:
    request = request_of([1, 2, 3])
    long = {piece.key: Tier.DEVICE for piece in request.pieces[:2]}
    short = {request.pieces[0].key: Tier.DEVICE, b"other": Tier.DEVICE}
    a, b = EngineBelief(engine_id="a", held=long, num_outstanding=60), EngineBelief(engine_id="b", held=short)
    router = PrefixThreshold()

    assert router.choose(request, [a, b]) is a
    assert router.choose(request, [replace(a, num_outstanding=65), b]) is b
    assert router.choose(request, [replace(a, held=short), replace(b, held={})]).engine_id == "a", "a third is enough"
    assert PrefixThreshold(0.4).choose(request, [replace(a, held=short), replace(b, held={})]).engine_id == "b"


def test_prefix_score_weighs_prefix_against_queue() -> None:
    request = request_of([1, 2, 3])
    whole = {piece.key: Tier.DEVICE for piece in request.pieces}
    busy = EngineBelief(engine_id="busy", held=whole, num_outstanding=9)

    assert PrefixScore().choose(request, [busy, EngineBelief(engine_id="idle")]) is busy
    part = replace(busy, held={request.pieces[0].key: Tier.DEVICE})
    assert PrefixScore().choose(request, [part, EngineBelief(engine_id="idle")]).engine_id == "idle"


def test_round_robin_takes_each_live_engine_in_turn() -> None:
    engines = [EngineBelief(engine_id=name, is_alive=name != "b") for name in "cab"]
    chosen = [RoundRobin().choose(request_of([1], number), engines).engine_id for number in range(4)]

    assert chosen == ["a", "c", "a", "c"]


def test_lost_engine_moves_only_its_own_names() -> None:
    engines = [EngineBelief(engine_id=f"{number}") for number in range(8)]
    names = [b"%d" % number for number in range(400)]
    before = {name: by_hash(name, engines)[0].engine_id for name in names}
    after = {name: by_hash(name, engines[1:])[0].engine_id for name in names}

    assert {name for name in names if before[name] != after[name]} == {name for name in names if before[name] == "0"}
    counts = [list(before.values()).count(one.engine_id) for one in engines]
    assert min(counts) > 25 and max(counts) < 80, "about 50 each"


def test_min_hash_of_a_set_does_not_depend_on_its_order_and_often_agrees_for_similar_sets() -> None:
    sets = [[b"%d-%d" % (topic, chunk) for chunk in range(5)] for topic in range(300)]
    changed = [[b"new-%d" % number, *one[1:]] for number, one in enumerate(sets)]

    assert all(min_hash(one) == min_hash(one[::-1]) for one in sets)
    agree = sum(min_hash(one) == min_hash(other) for one, other in zip(sets, changed, strict=True)) / len(sets)
    assert agree == pytest.approx(4 / 6, abs=0.08), "their Jaccard similarity"
