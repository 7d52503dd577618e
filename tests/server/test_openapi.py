"""The server conforms to its OpenAPI document: schemathesis sends valid and invalid requests and checks the replies.

The application runs with a fake Stillroom, and in slow tests with the bundled model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from pydantic import BaseModel
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

from stillroom.config.settings import SearchConfig, StillroomConfig
from stillroom.rag.stillroom import Stillroom
from stillroom.server.app import create_app
from stillroom.server.auth.key_ring import KeyRing
from stillroom.server.schemas.replies import ChatCompletionChunk, CompletionChunk
from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import QUESTION, events
from tests.server.knowledge import write_knowledge
from tests.server.test_keys import add

pytestmark = pytest.mark.microworld

load_all_checks()
UNFIT = {
    "positive_data_acceptance",  # schemas cannot express non-blank questions or served models
    "ignored_auth",  # there is no file of keys
    "object_level_authorization",
    "max_response_time",
}
FITTING = [check for check in CHECKS.get_all() if check.__name__ not in UNFIT]
OF_THE_LATE = [check for check in FITTING if check.__name__ != "not_a_server_error"]
"""A request with a deadline may get 504."""
PATIENCE = 120.0
OWN = {"host": "127.0.0.1:8321"}
"""A `Host` that the server accepts."""
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/search"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/v1/documents"),
    ("GET", "/v1/documents"),
    ("GET", "/v1/documents/{document}"),
    ("GET", "/v1/documents/{document}/content"),
    ("GET", "/v1/documents/{document}/pages/{page}.png"),
    ("DELETE", "/v1/documents/{document}"),
    ("GET", "/v1/jobs"),
    ("GET", "/v1/jobs/{job_id}"),
    ("DELETE", "/v1/jobs/{job_id}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/requests"),
    ("GET", "/v1/requests/{request_id}"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    config = StillroomConfig(search=SearchConfig(reranker="fake-reranker"))
    return create_app(as_stillroom(FakeStillroom(config=config)))


@pytest.fixture(scope="module")
def real_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    folder = tmp_path_factory.mktemp("openapi")
    with Stillroom.open(folder / "kb") as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
        stillroom.warm_up()
        yield create_app(stillroom)


@pytest.fixture(scope="module")
def schema(app: FastAPI) -> Any:
    """The document as schemathesis reads it, once."""
    return schema_of(app)


@pytest.fixture(scope="module")
def real_schema(real_app: FastAPI) -> Any:
    return schema_of(real_app)


def schema_of(app: FastAPI) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers=OWN)


def has_deadline(case: Any) -> bool:
    return isinstance(case.body, dict) and case.body.get("deadline_seconds") is not None


def attack(schema: Any, method: str, path: str, max_examples: int) -> None:
    """Generate valid and invalid requests."""
    operation = schema[path][method]
    quick = settings(
        max_examples=max_examples,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=max_examples < 100,
    )
    for mode in GenerationMode:

        @quick
        @given(case=operation.as_strategy(generation_mode=mode))
        def holds(case: Any) -> None:
            response = case.call(headers=OWN, timeout=PATIENCE)
            is_late = response.status_code == 504 and has_deadline(case)
            case.validate_response(response, checks=OF_THE_LATE if is_late else FITTING)

        try:
            holds()
        except Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, "some operations accept any input"


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_server_conforms_to_the_openapi_document(schema: Any, method: str, path: str) -> None:
    attack(schema, method, path, 2)


@pytest.mark.parametrize(
    ("path", "event"), [("chat/completions", ChatCompletionChunk), ("completions", CompletionChunk)]
)
def test_events_have_the_documented_type(any_client: httpx.Client, path: str, event: type[BaseModel]) -> None:
    options = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    logprobs = {"logprobs": True, "top_logprobs": 1} if path.startswith("chat") else {"logprobs": 1}

    response = any_client.post(f"/v1/{path}", json=QUESTION | {"prompt": "keys"} | options | logprobs)

    *found, _ = events(response)
    assert len(found) > 4
    for one in found:
        assert event.model_validate(one).model_dump(mode="json", exclude_unset=True) == one


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_server_conforms_to_the_openapi_document_with_more_examples(schema: Any, method: str, path: str) -> None:
    attack(schema, method, path, 300)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_server_with_a_model_conforms_to_the_openapi_document(real_schema: Any, method: str, path: str) -> None:
    attack(real_schema, method, path, 100)


def test_document_states_keys_and_limits(app: FastAPI, tmp_path: Path) -> None:
    add(tmp_path / "keys.json", "anna")
    guarded = create_app(as_stillroom(FakeStillroom()), keys=KeyRing(tmp_path / "keys.json")).openapi()
    assert guarded["components"]["securitySchemes"]["apiKey"]["scheme"] == "bearer"
    assert guarded["security"] == [{"apiKey": []}] and app.openapi()["security"] == [{"apiKey": []}, {}]

    paths = guarded["paths"]
    for path in ("/healthz", "/readyz"):
        assert paths[path]["get"]["security"] == [] and not {"401", "429"} & set(paths[path]["get"]["responses"])
    assert {"401", "408", "429"} <= set(paths["/v1/search"]["post"]["responses"])
    assert "401" in paths["/v1/models"]["get"]["responses"]


def test_every_operation_is_described_and_tested(app: FastAPI) -> None:
    document = app.openapi()
    told = {(method.upper(), path): one for path, item in document["paths"].items() for method, one in item.items()}

    assert set(told) == set(OPERATIONS)
    for (method, path), operation in told.items():
        where = f"{method} {path}"
        assert operation["tags"] and operation["description"], where
        for status, response in operation["responses"].items():
            schemas = [content["schema"] for content in response["content"].values()]
            assert schemas and all(schemas), f"{where}: {status} has a type"
            if int(status) >= 400 and (status, path) not in (("422", "/v1/documents"), ("503", "/readyz")):
                assert schemas == [{"$ref": "#/components/schemas/ErrorReply"}], f"{where}: {status}"
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert content["schema"]
    assert "HTTPValidationError" not in str(document)
