"""An engine answers fronts as it answers in one process, refuses everything else, and tells what it holds."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stillroom.cluster.wire import MAX_BODY_BYTES, WIRE_VERSION, AnswerRequest
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId, RequestId
from stillroom.core.kv import Tier, salt_of
from stillroom.core.request import FinishReason, Request
from stillroom.core.reuse import Reason
from stillroom.engine.engine import Engine
from stillroom.engine.engine_reports import queue_seconds
from stillroom.errors import DeviceLostError
from stillroom.models.json_constraint import JsonConstraints
from stillroom.rag.stillroom import Stillroom
from tests.engine.harness import Run, engine_on
from tests.server.engines import (
    EOS,
    Answered,
    EngineClient,
    Served,
    asking,
    collected,
    engine_serving,
    resumed,
    sample,
    settings_for,
    small_model,
)
from tests.server.fakes import until

CHUNKS = [[10, 11, 12, 13, 14], [20, 21, 22] * 7, [30, 31, 32, 33] * 4]
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "top_k": 8, "seed": 7, "logprobs": 2},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.9, "presence_penalty": 0.5, "min_tokens": 10, "seed": 3},
    {"repetition_penalty": 1.2, "logit_bias": {EOS: 4.0}},
    {"frequency_penalty": 0.4, "temperature": 2.0, "top_k": 8, "seed": 11, "max_tokens": 3},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with engine_serving(tmp_path_factory.mktemp("engine") / "kb", settings_for(model)) as one:
        yield one


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[EngineClient]:
    one = served.client()
    yield one
    one.http.close()


def alone(model: Path, served: Served, request: AnswerRequest) -> list[tuple[list[int], FinishReason]]:
    """Answer in an engine of this process, without kept KV."""
    driven = Run(engine_on(model, dtype="float32"))
    constraint = None if request.grammar is None else served.backend.constraints.compile_grammar(request.grammar)
    driven.submit_samples(
        *(
            Request(
                request_id=one.request_id,
                sampling=one.sampling,
                prompt=request.prompt,
                stop_token_ids=frozenset({EOS}),
                constraint=constraint,
            )
            for one in request.samples
        )
    )
    driven.finish()
    return [(driven.tokens[one.request_id], driven.reasons[one.request_id]) for one in request.samples]


def results(answers: list[Answered]) -> list[tuple[list[int], FinishReason]]:
    return [one.result for one in answers]


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_that_of_one_process_whole_and_resumed_anywhere(
    model: Path, served: Served, client: EngineClient, way: dict[str, Any]
) -> None:
    request = asking(sample(**way), chunks=CHUNKS)
    expected = alone(model, served, request)
    whole = client.ask(request)
    assert results(whole) == expected
    if "logprobs" in way:
        assert [len(one.top) for one in whole[0].logprobs] == [2] * len(whole[0].tokens)
    for cut in range(len(whole[0].tokens) + 1):
        rest = client.ask(resumed(request, whole, [cut]))
        tokens, end = expected[0]
        assert results(rest) == [(tokens[cut:], end)]


def test_samples_share_their_prefill_and_resume_each_from_its_own_place(
    model: Path, served: Served, client: EngineClient
) -> None:
    samples = [sample(f"s{index}", temperature=1.5, top_k=8, seed=index) for index in range(4)]
    request = asking(*samples, chunks=CHUNKS[:1], seed=6)
    expected = alone(model, served, request)
    whole = client.ask(request)
    assert results(whole) == expected
    reasons = [
        segment.reason for one in whole[1:] if one.first and one.first.reuse for segment in one.first.reuse.segments
    ]
    assert Reason.SHARED in reasons
    cuts = [0, 0, 5, len(expected[3][0])]
    rest = client.ask(resumed(request, whole, cuts))
    assert results(rest) == [(tokens[cut:], end) for (tokens, end), cut in zip(expected, cuts, strict=True)]


def test_a_grammar_holds_for_whole_and_resumed_answers(model: Path, served: Served, client: EngineClient) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    constraints = JsonConstraints(
        served.backend.tokenizer, served.backend.model.decoder.spec.vocab_size, frozenset({EOS})
    )
    grammar = constraints.compile(schema).grammar
    request = asking(sample(max_tokens=40, temperature=1.0, top_k=8, seed=2), grammar=grammar)
    expected = alone(model, served, request)
    whole = client.ask(request)
    assert results(whole) == expected
    assert isinstance(json.loads(served.backend.tokenizer.decode(whole[0].tokens))["ok"], bool)
    for cut in (1, len(whole[0].tokens) - 1, len(whole[0].tokens)):
        rest = client.ask(resumed(request, whole, [cut]))
        assert results(rest) == [(whole[0].tokens[cut:], whole[0].ends[0])]
    wrong = replace(request, samples=(sample(generated=[50], max_tokens=40),))
    assert client.refusal(wrong.to_json()) == (
        400,
        "invalid_value",
        "the request's samples[0].generated[0] is 50, which the grammar does not allow",
    )


def test_an_answer_tells_its_times_and_its_reuse_once(client: EngineClient) -> None:
    request = asking(chunks=CHUNKS, seed=8)
    client.ask(request)
    [again] = client.ask(request)
    assert again.first is not None and again.first.reuse is not None
    assert 0 <= again.first.admitted <= again.first.began <= again.first.computed
    assert again.first.reuse.num_cached_tokens >= sum(map(len, CHUNKS))


def test_only_own_chunks_and_may_place_reach_the_engine(client: EngineClient, served: Served) -> None:
    seen: list[Request] = []
    engine = served.backend.engine
    submit = engine.submit
    engine.submit = lambda *both: (seen.append(both[0]), submit(*both))[1]  # type: ignore[method-assign, func-returns-value]
    try:
        client.ask(asking(chunks=CHUNKS))
        client.ask(asking(chunks=CHUNKS, only_own_chunks=True, may_place=False))
        client.ask(asking(replace(sample(), priority=-3, seconds_left=100.0)))
    finally:
        engine.submit = submit  # type: ignore[method-assign]
    assert [one.may_place for one in seen] == [True, False, True]
    assert seen[0].may_see is None and seen[1].may_see is not None and not seen[1].may_see({ChunkId(1)})
    assert seen[2].priority == -3 and seen[2].deadline is not None


def test_a_deadline_that_has_passed_ends_the_answer_with_its_error(client: EngineClient) -> None:
    [one] = client.ask(asking(replace(sample(max_tokens=3000), seconds_left=0.0)))
    assert one.ends == [FinishReason.ABORTED] and one.failure is not None
    assert one.failure.kind == "deadline" and not one.failure.may_move


GOOD = asking(chunks=CHUNKS[:1]).to_json()


def changed(**fields: Any) -> dict[str, Any]:
    return {**GOOD, **fields}


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        (b"", 400, "invalid_value", "the request is not JSON"),
        (b"\xff\xfe", 400, "invalid_value", "the request is not JSON"),
        (b"[" * 200_000, 400, "invalid_value", "the request is not JSON"),
        (b'{"wire": 2, "wire": NaN}', 400, "invalid_value", "NaN is not a number"),
        ([], 400, "invalid_value", "the request is []; it must be an object"),
        (changed(wire=WIRE_VERSION + 1), 400, "invalid_value", f"version {WIRE_VERSION + 1} of the engine's protocol"),
        (changed(colour="red"), 400, "invalid_value", "unknown field 'colour'"),
        (changed(segments=[["question", None, [301]]]), 400, "invalid_value", "the model has tokens 0 to 300"),
        (changed(samples=[{"id": "a", "sampling": {}, "generated": [EOS]}]), 400, "invalid_value", "a stop token"),
        (changed(grammar="{"), 400, "invalid_value", "the grammar cannot be enforced"),
        (changed(salt="x"), 409, "other_knowledge_base", "give both the same"),
        (changed(tenant="legal"), 404, "tenant_not_served", "start it with --tenants"),
        (
            changed(samples=[{"id": "a", "sampling": {"max_tokens": 5000}}]),
            400,
            "context_length_exceeded",
            "more than the model's 4096",
        ),
        (
            changed(samples=[{"id": str(number), "sampling": {}} for number in range(9)]),
            400,
            "invalid_value",
            "exceeds the 8 sequences",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_with_its_reason(
    served: Served, client: EngineClient, body: Any, status: int, code: str, message: str
) -> None:
    found = client.refusal(body)
    assert found[:2] == (status, code) and message in found[2]
    assert served.num_requests == 0 and client.state().num_outstanding == 0


def test_bodies_of_junk_are_refused_and_the_engine_answers_on(client: EngineClient) -> None:
    random, text = Random(3), json.dumps(GOOD)
    for _ in range(40):
        damaged = bytearray(text.encode())
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(damaged))
            if random.random() < 0.5:
                damaged[place] = random.randrange(32, 127)
            else:
                del damaged[place : place + random.randint(1, 9)]
        response = client.http.post("/engine/v1/answers", content=bytes(damaged))
        assert response.status_code in (200, 400, 404, 409), response.text
    assert client.ask(asking())[0].tokens


def test_a_request_that_is_too_large_is_refused(client: EngineClient) -> None:
    response = client.http.post("/engine/v1/answers", content=b" " * (MAX_BODY_BYTES + 1))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert client.state().num_outstanding == 0


def test_closing_the_connection_cancels_all_samples(served: Served, client: EngineClient) -> None:
    samples = [
        sample(f"long{index}", max_tokens=2000, temperature=1.0, seed=index, logit_bias={EOS: -50.0})
        for index in range(3)
    ]
    samples[2] = replace(samples[2], generated=(40,))
    with client.http.stream("POST", "/engine/v1/answers", json=asking(*samples).to_json()) as response:
        lines = response.iter_lines()
        next(lines)
        until(lambda: served.backend.engine.num_running == 3)
        assert client.state().num_outstanding == 1
    until(lambda: served.num_requests == 0)
    until(lambda: client.state().num_outstanding == 0)
    pool = served.backend.cache.manager.pool
    until(lambda: served.backend.engine.num_free_blocks == pool.num_blocks)


def test_reports_tell_exactly_what_the_tree_holds(served: Served, client: EngineClient) -> None:
    client.ask(asking(chunks=CHUNKS, seed=20))
    tree = served.backend.cache.tree
    assert tree is not None
    first = client.state()
    assert first.is_all and first.run == "the-run"
    assert first.changes == {name: node.tier for node in tree for name in (node.key, node.content)}
    client.ask(asking(chunks=[[60, 61, 62]], seed=21))
    second = client.state(first.run, first.sequence)
    assert not second.is_all and second.sequence > first.sequence
    assert set(second.changes.values()) <= {Tier.DEVICE, None}
    assert {**first.changes, **second.changes} == client.state().changes
    assert client.state("another", first.sequence).is_all
    assert client.state(first.run, second.sequence).changes == {}
    assert (second.num_waiting, second.num_running, second.num_outstanding, second.is_draining) == (0, 0, 0, False)
    assert 0 < first.kept_bytes[Tier.DEVICE] < second.kept_bytes[Tier.DEVICE] == tree.num_bytes(Tier.DEVICE)


@pytest.mark.parametrize("num_waiting", [3, 70])
def test_the_queue_is_predicted_from_the_prompts_that_wait(
    served: Served, client: EngineClient, num_waiting: int
) -> None:
    """Nothing runs while the engine's thread is held, so that all requests wait."""
    client.ask(asking())  # keeps the system prompt
    engine, tree = served.backend.engine, served.backend.cache.tree
    assert tree is not None
    prompt = asking(chunks=[[40 + index for index in range(200)]]).prompt
    asked = [
        Request(request_id=RequestId(f"w{number}"), sampling=sample().sampling, prompt=prompt)
        for number in range(num_waiting)
    ]
    found: list[float] = []

    def look(held: Engine) -> None:
        for one in asked:
            held.submit(one)
        found.append(queue_seconds(held))
        for one in asked:
            held.cancel(one.request_id)

    engine.run(look)
    until(lambda: bool(found))
    num_kept = len(prompt.segments[0].token_ids)
    alone = tree.profile.prefill_seconds(num_kept, prompt.num_tokens - num_kept)
    assert found == [pytest.approx(num_waiting * alone)]


def test_an_unknown_number_of_changes_is_refused(client: EngineClient) -> None:
    for since in ("-1", "x", "9" * 30, "1.5"):
        response = client.http.get("/engine/v1/state", params={"since": since})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "since")


def test_health_and_metrics_are_served(client: EngineClient) -> None:
    assert client.http.get("/healthz").json() == {"status": "ok"}
    assert client.http.get("/readyz").json()["status"] == "ready"
    assert "stillroom_http_requests_total" in client.http.get("/metrics").text
    assert client.http.get("/v1/models").status_code == 404


def test_info_tells_what_fits_and_what_it_costs(served: Served, client: EngineClient) -> None:
    info, kv = client.info(), served.backend.cache.manager
    assert info == client.info(), "constant while the engine runs"
    lengths = [7, 30, 9]
    assert info.max_output_tokens(lengths) == kv.max_output_tokens(lengths)
    assert kv.reuse is not None and info.costs is not None
    assert info.fingerprint == kv.reuse.keys.fingerprint and info.tail_tokens == kv.reuse.keys.tail_tokens
    assert info.costs.profile == kv.reuse.tree.profile and info.costs.recompute_share is None
    assert info.vocabulary == served.backend.tokenizer.vocabulary_digest
    assert info.stop_token_ids == {EOS} and info.max_num_seqs == 8 and not info.places_computed
    assert "/" not in info.model, "no folder of this machine"


def test_web_pages_may_not_use_an_engine_without_a_secret(client: EngineClient) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        response = client.http.get("/engine/v1/info", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine with a secret, which the last test of it stops."""
    with engine_serving(tmp_path_factory.mktemp("guarded") / "kb", settings_for(model, secret="a-long-secret")) as one:
        yield one


@pytest.fixture
def friend(guarded: Served) -> Iterator[EngineClient]:
    """A client that has the secret."""
    one = guarded.client(headers={"Authorization": "Bearer a-long-secret"})
    yield one
    one.http.close()


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}])
def test_a_secret_is_asked_of_every_caller(guarded: Served, headers: dict[str, str]) -> None:
    with guarded.client(headers=headers).http as http:
        for method, path in (("GET", "info"), ("POST", "answers"), ("GET", "state"), ("POST", "drain")):
            response = http.request(method, f"/engine/v1/{path}")
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_secret")
            assert "STILLROOM_CLUSTER__SECRET" in response.json()["error"]["message"]
        assert http.get("/metrics").status_code == 401
        assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200


def test_a_draining_engine_completes_what_runs_until_it_is_stopped(guarded: Served, friend: EngineClient) -> None:
    short, endless = (asking(sample(max_tokens=count, logit_bias={EOS: -50.0})) for count in (100, 3500))
    http, answers = friend.http, "/engine/v1/answers"
    with http.stream("POST", answers, json=endless.to_json()) as cut_off:
        cut_lines = cut_off.iter_lines()
        begun = next(cut_lines)
        with http.stream("POST", answers, json=short.to_json()) as completed:
            lines = completed.iter_lines()
            first = next(lines)
            assert http.post("/engine/v1/drain").status_code == 202
            assert friend.refusal(GOOD)[:2] == (503, "shutting_down")
            assert http.post(answers, json=GOOD).headers["retry-after"]
            ready = http.get("/readyz")
            assert (ready.status_code, ready.json()["reasons"]) == (503, ["the engine is draining"])
            assert friend.state().is_draining
            [whole] = collected([first, *filter(None, lines)], 1)
        assert len(whole.tokens) == 100 and whole.ends == [FinishReason.LENGTH]
        guarded.server.stop()
        guarded.server.stop()  # without the grace period
        [ended] = collected([begun, *filter(None, cut_lines)], 1)
    assert ended.ends == [FinishReason.ABORTED] and ended.failure is not None and ended.failure.may_move


def test_a_lost_device_and_a_full_queue_are_refusals_that_another_engine_may_take(
    served: Served, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: Engine) -> None:
        raise DeviceLostError("the model's device was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "check_device", lost)
        response = client.http.post("/engine/v1/answers", json=GOOD)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "device_lost")
        assert response.headers["retry-after"]
    backlog = served.backend.engine._backlog
    with monkeypatch.context() as patch:
        patch.setattr(backlog, "_max_waiting", 1)
        patch.setattr(type(served.backend.engine), "num_waiting", property(lambda _: 1))
        patch.setattr(type(served.backend.engine._engine.scheduler), "waiting_tenants", property(lambda _: [""]))
        response = client.http.post("/engine/v1/answers", json=GOOD)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
    assert client.state().num_outstanding == 0


@pytest.mark.slow
def test_kv_of_a_removed_document_is_dropped_and_reported(model: Path, tmp_path: Path) -> None:
    """The document is removed by another process, here by another `Stillroom`."""
    config, text = settings_for(model), tmp_path / "keys.md"
    text.write_text("Keys are rotated every month.", encoding="utf-8")
    with Stillroom.open(tmp_path / "kb", config=config) as front:
        front.add(text)
        [found] = front.search("keys", mode="sparse").results
        chunk: Chunk = found.chunk
        with engine_serving(tmp_path / "kb", config) as served:
            client = served.client()
            request = asking(chunks=CHUNKS[:1])
            system, passage, question = request.segments
            request = replace(request, segments=(system, replace(passage, chunk_id=chunk.chunk_id), question))
            client.ask(request)
            before = client.state()
            assert before.changes
            front.discard(chunk.document_id)
            assert front.num_documents == 0
            until(lambda: served.backend.cache.tree is not None and not list(_of(served, chunk.chunk_id)))
            after = client.state(before.run, before.sequence)
            assert None in after.changes.values()
            client.http.close()


def _of(served: Served, chunk_id: ChunkId) -> Iterator[object]:
    tree = served.backend.cache.tree
    assert tree is not None
    return (node for node in list(tree) if node.chunk_id == chunk_id)


def test_tenants_share_no_kv_and_only_existing_ones_are_opened(model: Path, tmp_path: Path) -> None:
    config, folder = settings_for(model), tmp_path / "tenants"
    salts = {}
    for name in ("legal", "sales"):
        with Stillroom.open(folder / name, config=config) as one:
            salts[name] = salt_of(name, one.identity)
    with engine_serving(tmp_path / "kb", config, tenants_folder=folder) as served:
        client = served.client()
        legal = asking(chunks=CHUNKS, tenant="legal", salt=salts["legal"])
        sales = replace(legal, tenant="sales", salt=salts["sales"])
        [first], [again], [other] = client.ask(legal), client.ask(legal), client.ask(sales)
        assert first.result == again.result == other.result
        cached = [one.first.reuse.num_cached_tokens for one in (first, again, other) if one.first and one.first.reuse]
        assert cached[0] == cached[2] == 0 < cached[1]
        assert client.refusal(replace(sales, salt=salts["legal"]).to_json())[:2] == (409, "other_knowledge_base")
        assert client.refusal(replace(sales, tenant=None).to_json())[:2] == (409, "other_knowledge_base")
        assert client.refusal(replace(legal, tenant="unknown").to_json())[:2] == (404, "tenant_not_found")
        for name in ("../kb", "a/b", "", "x" * 500):
            assert client.refusal(replace(legal, tenant=name).to_json())[0] in (400, 404)
        assert sorted(os.listdir(folder)) == ["legal", "sales"]
        client.http.close()


@pytest.mark.slow
def test_each_document_is_prepared_by_one_of_the_engines_that_a_front_knows(model: Path, tmp_path: Path) -> None:
    config = settings_for(model, mode="prepared")
    config = replace(config, prepare=replace(config.prepare, when_idle="auto", idle_s=0.0))
    with Stillroom.open(tmp_path / "kb", config=config) as front:
        for number in range(6):
            (tmp_path / f"{number}.md").write_text(f"Key {number} is rotated every month.", encoding="utf-8")
            front.add(tmp_path / f"{number}.md")
        documents = {one.document_id: one.num_chunks for one in front.documents()}
    with engine_serving(tmp_path / "kb", config) as one, engine_serving(tmp_path / "kb", config) as other:
        engines = [one, other]
        assert not any(_num_in_document(served) for served in engines), "no front has told them of each other yet"
        shares: list[set[DocumentId]] = []
        for served in engines:
            told = {"engines": ",".join(each.url for each in engines), "me": served.url}
            with served.client().http as http:
                http.get("/engine/v1/state", params=told).raise_for_status()
            preparing = served.tenants.default.preparing
            shares.append({document for document in documents if preparing.share.has(document)})
        assert not shares[0] & shares[1] and shares[0] | shares[1] == set(documents)
        for served, share in zip(engines, shares, strict=True):
            wanted = sum(documents[document] for document in share)
            until(lambda served=served, wanted=wanted: _num_in_document(served) == wanted)  # type: ignore[misc]


def _num_in_document(served: Served) -> int:
    """Chunks that an engine holds in their document's context."""
    tree = served.backend.cache.tree
    assert tree is not None
    return len({node.chunk_id for node in list(tree) if node.document_path})
