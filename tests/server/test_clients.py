"""LangChain and LlamaIndex against a real server. Skipped if they are not installed:
`pip install 'stillroom[clients]'`.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from stillroom.rag.answer import Citation, Support
from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import serving

QUESTION = "How do I rotate keys?"
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of these libraries


@pytest.fixture
def stillroom() -> FakeStillroom:
    return FakeStillroom()


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client() as client:
        yield client


@pytest.fixture
def url(stillroom: FakeStillroom) -> Iterator[str]:
    with serving(as_stillroom(stillroom)) as address:
        yield address


def test_langchain_chat_stream_and_conversation(url: str, stillroom: FakeStillroom) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    chat = langchain_openai.ChatOpenAI(model="stillroom", base_url=f"{url}/v1", api_key="unused", max_retries=0)

    answer = chat.invoke(QUESTION)
    streamed = "".join(chunk.content for chunk in chat.stream(QUESTION))
    chat.invoke(
        [messages.SystemMessage("Be brief."), messages.HumanMessage(QUESTION), answer, ("user", "And how often?")]
    )

    assert answer.content == streamed == QUESTION
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 40
    question, options = stillroom.asked[-1]
    assert (question, options.system) == ("And how often?", "Be brief.")
    assert [(one.question, one.answer) for one in options.history] == [(QUESTION, QUESTION)]


def test_langchain_keeps_the_citations_of_responses_but_not_of_chat_completions(
    url: str, stillroom: FakeStillroom
) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    places = (3, 9, 0, 0, "Rotate keys", 0, 11, 0, len(QUESTION))
    stillroom.citations = (Citation(1, "docs/keys.md", "c1", "Rotation", *places, True, Support.SUPPORTED),)
    common = {"model": "stillroom", "base_url": f"{url}/v1", "api_key": "unused", "max_retries": 0}
    chat = langchain_openai.ChatOpenAI(**common)
    responses = langchain_openai.ChatOpenAI(use_responses_api=True, output_version="responses/v1", **common)

    bare = chat.invoke(QUESTION)  # http.md says that it keeps no sources: no longer true if this fails
    assert "annotations" not in repr(bare) and "stillroom" not in bare.response_metadata

    whole = responses.invoke(QUESTION)
    streamed = None
    for chunk in responses.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    for answer in (whole, streamed):
        assert answer.text == QUESTION
        [found] = [one for block in answer.content for one in block.get("annotations", ())]
        assert (found["type"], found["title"]) == ("url_citation", "Rotation")
        assert found["url"].startswith("/v1/documents/docs/keys.md/content")
        assert answer.response_metadata["id"].removeprefix("resp_").startswith("req-")


def test_langchain_embeddings_and_retriever(url: str, stillroom: FakeStillroom) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    documents = pytest.importorskip("langchain_core.documents")
    retrievers = pytest.importorskip("langchain_core.retrievers")

    class StillroomRetriever(retrievers.BaseRetriever):  # type: ignore[misc, name-defined]
        """Equals the class in docs/http.md."""

        url: str
        top_k: int = 5

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Any]:
            reply = httpx.post(f"{self.url}/v1/search", json={"query": query, "top_k": self.top_k}).raise_for_status()
            return [
                documents.Document(one.pop("text"), id=one["chunk_id"], metadata=one) for one in reply.json()["results"]
            ]

    embeddings = langchain_openai.OpenAIEmbeddings(
        model="stillroom", base_url=f"{url}/v1", api_key="unused", check_embedding_ctx_length=False
    )

    assert embeddings.embed_query("one") == pytest.approx(stillroom.embed(["one"])[0].tolist())
    [found] = StillroomRetriever(url=url, top_k=1).invoke("keys")
    assert found.page_content.startswith("Rotate keys") and found.metadata["document"] == "docs/keys.md"


def test_llamaindex_chat_stream_completion_and_conversation(
    url: str, stillroom: FakeStillroom, http: httpx.Client
) -> None:
    llms = pytest.importorskip("llama_index.llms.openai_like")
    core = pytest.importorskip("llama_index.core.llms")
    llm = llms.OpenAILike(
        model="stillroom",
        api_base=f"{url}/v1",
        api_key="unused",
        is_chat_model=True,
        context_window=2048,
        max_retries=0,
        http_client=http,
    )
    raw = llms.OpenAILike(model="stillroom", api_base=f"{url}/v1", api_key="unused", max_retries=0, http_client=http)

    asked = [core.ChatMessage(role="user", content=QUESTION)]
    assert llm.chat(asked).message.content == QUESTION
    assert "".join(piece.delta or "" for piece in llm.stream_chat(asked)) == QUESTION
    assert raw.complete("keys are rotated").text == "keys are rotated"
    assert "".join(piece.delta or "" for piece in raw.stream_complete("keys are")) == "keys are"
    llm.chat([*asked, core.ChatMessage(role="assistant", content="So."), core.ChatMessage(role="user", content="Why?")])
    question, options = stillroom.asked[-1]
    assert question == "Why?" and [one.answer for one in options.history] == ["So."]
