"""A front with two engines answers what one process answers."""

import json
import queue
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from stillroom.backends.cluster_backend import ClusterBackend, connect
from stillroom.backends.tool_chat import ToolChat
from stillroom.cluster.front_engines import engine_name
from stillroom.config.settings import EngineConfig, StillroomConfig
from stillroom.core.clock import SystemClock
from stillroom.core.ids import RequestId, format_chunk_id
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import SampleRequest, SamplingParams
from stillroom.engine.events import TokenEvent
from stillroom.errors import EngineRefusedError, PromptTooLongError, UsageError
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom.server.auth.tenants import Tenants
from tests.fakes import byte_tokenizer, random_checkpoint
from tests.server.engines import Served, engine_serving, settings_for
from tests.server.fakes import until
from tests.server.knowledge import QUESTION, write_knowledge
from tests.server.test_tools import ASKED, WEATHER, hf_tokenizer

pytestmark = pytest.mark.slow

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"company": {"enum": ["Yunder Bank", "Perint"]}, "year": {"enum": [1720, 1740]}},
    "required": ["company", "year"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "least tokens": SAMPLED | {"min_tokens": 12},
    "penalties": SAMPLED | {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "biased": {"logit_bias": {100: 50.0}, "max_tokens": 5},
    "JSON": SAMPLED | {"json_schema": SCHEMA, "max_tokens": 80},
    "log probabilities": SAMPLED | {"logprobs": 3},
    "stop string": SAMPLED | {"min_tokens": 12, "stop": (" ",)},
    "filtered": {"where": "team = legal"},
    "continued": {"answer_start": "Yunder"},
    "without documents": SAMPLED | {"search": False},
    "tools": {
        "search": False,
        "tool_chat": ToolChat(tuple(ASKED), (WEATHER,), is_call_demanded=True),
        "max_tokens": 60,
    },
}


def save_model(folder: Path) -> Path:
    """Save a random model with a template that knows tools."""
    tokenizer = hf_tokenizer("token")
    random_checkpoint(
        folder, "Llama", num_hidden_layers=1, eos_token_id=1, vocab_size=len(tokenizer), max_position_embeddings=4096
    )
    tokenizer.save_pretrained(folder)
    return folder


def cluster_of(config: StillroomConfig, *engines: Served) -> StillroomConfig:
    """Return the settings of a front of these engines."""
    return replace(config, engine=EngineConfig(kind="cluster", urls=", ".join(one.url for one in engines)))


def told(answer: Answer) -> tuple[Any, ...]:
    """Return what must not depend on the number of processes."""
    one = answer
    return one.text, one.token_ids, one.finish_reason, one.sources, one.citations, one.num_generated_tokens


def scores(answer: Answer) -> list[float]:
    """Return the log probabilities, whose last bits depend on what was computed together."""
    return [value for one in answer.logprobs or () for value in (one.logprob, *(top.logprob for top in one.top))]


@dataclass
class Cluster:
    """A front with its engines, and the answers of one process."""

    config: StillroomConfig
    """Of the engines."""
    front: Stillroom
    engines: list[Served]
    expected: dict[str, list[Answer]]

    @property
    def backend(self) -> ClusterBackend:
        backend = self.front._loader.backend
        assert isinstance(backend, ClusterBackend)
        return backend


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    kb, config = folder / "kb", settings_for(save_model(folder / "model"))
    with Stillroom.open(kb, config=config) as adding:
        adding.add(write_knowledge(folder / "docs"), metadata={"team": "legal"})
    with ExitStack() as opened:
        engines = [opened.enter_context(engine_serving(kb, config)) for _ in range(2)]
        single = engines[0].tenants.default  # the process of an engine can answer alone too
        expected = {name: single.ask_several(QUESTION, 2, AskOptions(**way)) for name, way in WAYS.items()}
        front = opened.enter_context(Stillroom.open(kb, config=cluster_of(config, *engines)))
        yield Cluster(config, front, engines, expected)


@pytest.mark.parametrize("name", WAYS)
def test_answers_are_those_of_one_process(cluster: Cluster, name: str) -> None:
    answers = cluster.front.ask_several(QUESTION, 2, AskOptions(**WAYS[name]))
    for answer, expected in zip(answers, cluster.expected[name], strict=True):
        assert told(answer) == told(expected)
        assert scores(answer) == pytest.approx(scores(expected), abs=1e-4)
        assert len(scores(answer)) == (4 * len(answer.token_ids) if "logprobs" in WAYS[name] else 0)
    if name == "JSON":
        assert all(json.loads(one.text)["company"] in ("Yunder Bank", "Perint") for one in answers)
    for answer in answers:
        assert answer.route is not None and answer.route.num_migrations == 0
        assert answer.timing.queue_seconds is not None and answer.timing.prefill_seconds is not None
        assert answer.reuse.segments


def test_engines_report_what_they_hold(cluster: Cluster) -> None:
    prepared = cluster.backend.prepare_raw([5 + number % 200 for number in range(300)])
    received: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    one = SampleRequest(request_id=RequestId("raw"), sampling=SamplingParams(max_tokens=1))
    cluster.backend.start(prepared, [one], [received.put])
    route = received.get(timeout=60).route
    assert route is not None and isinstance(prepared.prompt, SegmentedPrompt)
    info = cluster.backend.engine.infos[0]
    keys = {piece.key for piece in PrefixKeys(info.fingerprint, info.tail_tokens).pieces(prepared.prompt)}
    assert len(keys) == 4
    beliefs = cluster.backend.engine._engines._beliefs
    url = next(served.url for served in cluster.engines if engine_name(served.url) == route.engine)
    until(lambda: not beliefs._engines[url].unsettled)  # from then on the engine's reports count alone
    assert keys <= beliefs._engines[url].holdings.believed.keys()


def test_figures_of_engines(cluster: Cluster) -> None:
    cluster.front.ask(QUESTION)
    text = cluster.front.metrics.render().decode()
    for one in cluster.engines:
        assert f'stillroom_engine_alive{{engine="{one.url}",name="engine-' in text
    assert "stillroom_migrations_total 0.0" in text
    streams = [line for line in text.splitlines() if line.startswith("stillroom_engine_streams_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in streams) > 0
    assert cluster.front.num_blocks == sum(one.backend.engine.num_blocks for one in cluster.engines)
    assert cluster.front.is_ready and cluster.front.device_problem is None


def test_what_never_fits_is_refused_as_in_one_process(cluster: Cluster) -> None:
    with pytest.raises(PromptTooLongError, match="together more than the model's"):
        cluster.front.ask(QUESTION, AskOptions(search=False, max_tokens=100_000))
    with pytest.raises(UsageError, match="n=9 exceeds the 8 sequences"):
        cluster.front.ask_several(QUESTION, 9)
    with pytest.raises(UsageError, match="logit_bias names token"):
        cluster.front.ask(QUESTION, AskOptions(logit_bias={9_999_999: 1.0}))
    with pytest.raises(UsageError, match="engines do by themselves"):
        cluster.front.prepare()


def test_cancelled_answer_leaves_its_engine(cluster: Cluster) -> None:
    stream = cluster.front.stream(QUESTION, AskOptions(min_tokens=500, max_tokens=500))
    pieces = iter(stream)  # the request is cancelled when this is collected
    next(pieces)
    assert any(one.num_requests for one in cluster.engines)
    stream.cancel()
    until(lambda: not any(one.num_requests for one in cluster.engines))


def test_removed_document_is_forgotten_by_every_engine(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "passing.txt"
    path.write_text("Cirik Prurs bought the ship Wunwick in the year 1811 .\n" * 3, encoding="utf-8")
    cluster.front.add(path)
    question = "Which ship did Cirik Prurs buy in the year 1811 ?"
    chunks = {source.chunk_id for source in cluster.front.ask(question).sources if "passing" in source.document}
    assert chunks
    cluster.front.remove(str(path))
    answer = cluster.front.ask(question)
    assert not chunks & {source.chunk_id for source in answer.sources}
    trees = [one.backend.cache.tree for one in cluster.engines]
    until(lambda: not any(chunks & {format_chunk_id(one) for one in tree.chunk_ids()} for tree in trees if tree))


def test_tenants_have_their_own_documents_and_kv(cluster: Cluster, tmp_path: Path) -> None:
    kb, config = tmp_path / "kb", cluster.config
    folder = tmp_path / "tenants"
    docs = write_knowledge(tmp_path / "docs")
    with Stillroom.open(kb, config=config) as single:
        single.add(docs)
    with (
        engine_serving(kb, config, tenants_folder=folder) as engine,
        Stillroom.open(kb, config=cluster_of(config, engine)) as front,
    ):
        tenants = Tenants(front, folder)
        try:
            answers = []
            for name in ("a", "b"):
                tenant = tenants.stillroom(name)
                tenant.add(docs)
                answers.append(tenant.ask(QUESTION))
            again = tenants.stillroom("a").ask(QUESTION)
        finally:
            tenants.close()
    assert answers[0].text == answers[1].text
    assert [one.reuse.num_cached_tokens for one in answers] == [0, 0] and again.reuse.num_cached_tokens > 0


def test_front_of_another_model_or_knowledge_base_is_told(cluster: Cluster, tmp_path: Path) -> None:
    front = cluster_of(cluster.config, *cluster.engines)
    with pytest.raises(EngineRefusedError, match="another knowledge base"):
        connect(front, SystemClock(), "another")
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=1)
    byte_tokenizer().save_pretrained(tmp_path)
    other = replace(front, runtime=replace(front.runtime, model=str(tmp_path)))
    with pytest.raises(EngineRefusedError, match="whose tokens are not those of this front's model"):
        connect(other, SystemClock(), cluster.front._kb.identity)
