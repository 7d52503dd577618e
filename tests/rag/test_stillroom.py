"""`Stillroom` from Python: refused arguments and their messages, streams, and its life from open to close."""

import asyncio
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from stillroom.backends.conversation import Exchange
from stillroom.config.settings import GenerationConfig, RuntimeConfig, StillroomConfig
from stillroom.core.ids import DocumentId
from stillroom.errors import EngineClosedError, ModelError, NothingFoundError, PromptTooLongError, UsageError
from stillroom.rag.answer import Answer, AskOptions, Support
from stillroom.rag.stillroom import Stillroom
from tests.fakes import byte_tokenizer, random_checkpoint
from tests.server.fakes import until
from tests.server.knowledge import ANSWER, QUESTION, write_knowledge

pytestmark = pytest.mark.microworld

T = TypeVar("T")

HALF = "half of \ud800"
"""A lone surrogate: a valid Python string, but not valid Unicode text."""


async def _awaited(one: Awaitable[T]) -> T:
    return await one


@pytest.fixture(scope="module")
def knowledge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stillroom")
    with Stillroom.open(folder / "kb") as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
    return folder / "kb"


@pytest.fixture(scope="module")
def stillroom(knowledge: Path) -> Iterator[Stillroom]:
    with Stillroom.open(knowledge) as opened:
        yield opened


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("use one of", lambda stillroom: stillroom.ask(QUESTION, AskOptions(mode="foo"))),  # type: ignore[arg-type]
        ("use one of", lambda stillroom: stillroom.search(QUESTION, mode="foo")),
        ("top_k=2.5", lambda stillroom: stillroom.search(QUESTION, top_k=2.5)),
        ("where", lambda stillroom: stillroom.search(QUESTION, where=None)),
        ("query", lambda stillroom: stillroom.search(HALF)),
        ("query", lambda stillroom: stillroom.search_staged(None)),
        ("question", lambda stillroom: stillroom.ask(HALF)),
        ("question", lambda stillroom: stillroom.ask(7)),
        ("options", lambda stillroom: stillroom.ask(QUESTION, {"max_tokens": 3})),
        ("options", lambda stillroom: asyncio.run(stillroom.astream(QUESTION, {"max_tokens": 3}))),
        ("options", lambda stillroom: asyncio.run(stillroom.acontinue(QUESTION, {"max_tokens": 3}))),
        ("question", lambda stillroom: asyncio.run(stillroom.acontinue(HALF))),
        ("whole numbers", lambda stillroom: asyncio.run(stillroom.acontinue([1.5]))),
        ("n=1.5", lambda stillroom: stillroom.ask_several(QUESTION, 1.5)),
        ("list", lambda stillroom: stillroom.embed("abc")),
        ("text", lambda stillroom: stillroom.embed([HALF])),
    ],
)
def test_invalid_arguments_are_refused_by_name(stillroom: Stillroom, named: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(UsageError, match=named):
        call(stillroom)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1.5},
        {"min_tokens": "1"},
        {"top_k": True},
        {"logprobs": True},
        {"seed": 1.5},
        {"priority": "x"},
        {"temperature": "hot"},
        {"deadline_seconds": "1"},
        {"where": None},
        {"system": HALF},
        {"stop": 3},
        {"stop": ["a", 3]},
        {"history": [("a", "b")]},
        {"logit_bias": {"a": 1.0}},
        {"json_schema": "{}"},
    ],
)
def test_options_of_a_wrong_type_are_refused_by_name(stillroom: Stillroom, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        stillroom.ask(QUESTION, AskOptions(**options))


def test_numpy_numbers_are_accepted(stillroom: Stillroom) -> None:
    many: Any = np.int64(2)
    assert len(stillroom.search(QUESTION, top_k=many).results) == 2
    answer = stillroom.ask(QUESTION, AskOptions(top_k=many, max_tokens=np.int64(1), logprobs=many))  # type: ignore[arg-type]
    assert len(answer.token_ids) == 1 and answer.logprobs is not None


def test_minus_one_means_no_limit_all_tokens_and_a_random_seed(stillroom: Stillroom) -> None:
    assert stillroom.ask(QUESTION, AskOptions(max_tokens=-1)).text == ANSWER
    wild: dict[str, Any] = {"temperature": 50.0, "max_tokens": 12}
    every = [stillroom.ask(QUESTION, AskOptions(sample_top_k=many, seed=5, **wild)).token_ids for many in (-1, 0, 1)]
    assert every[0] == every[1] != every[2]
    assert len({stillroom.ask(QUESTION, AskOptions(seed=-1, **wild)).token_ids for _ in range(3)}) == 3


@pytest.mark.parametrize("options", [{"max_tokens": -2}, {"max_tokens": 0}, {"sample_top_k": -2}, {"seed": -2}])
def test_other_negative_numbers_are_refused(stillroom: Stillroom, options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(UsageError, match=f"{name.removeprefix('sample_')}={value}"):
        stillroom.ask(QUESTION, AskOptions(**options))


def test_answer_cites_the_words_of_its_source(stillroom: Stillroom) -> None:
    answer = stillroom.ask(QUESTION)

    async def read() -> Answer:
        stream = await stillroom.astream(QUESTION)
        assert "".join([piece async for piece in stream]) == answer.text
        return stream.answer

    [citation] = answer.citations
    [source] = [source for source in answer.sources if source.position == citation.source]
    assert citation.support is Support.SUPPORTED
    assert "employed by Yunder Bank" in citation.quote
    assert source.text[citation.quote_start : citation.quote_end] == citation.quote
    assert ANSWER in answer.text[citation.start : citation.end]
    assert asyncio.run(read()).citations == answer.citations
    [recorded] = stillroom.records.get(answer.request_id)["citations"]
    assert (recorded["source"], recorded["support"]) == (citation.source, "supported")


def test_answer_warns_of_a_cited_file_that_has_changed(tmp_path: Path) -> None:
    docs = write_knowledge(tmp_path / "docs")
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(docs)
        before = stillroom.ask(QUESTION)
        [cited] = {one.document for one in before.citations if one.source}
        with open(cited, "a", encoding="utf-8") as file:
            file.write("One line more.\n")
        after = stillroom.ask(QUESTION)
        [added] = set(after.warnings) - set(before.warnings)
        assert after.text == before.text and added.startswith(f"{cited}: the file has changed since it was indexed")
        stillroom.add(docs)
        assert stillroom.ask(QUESTION).warnings == before.warnings


def test_citations_can_be_switched_off(knowledge: Path) -> None:
    config = StillroomConfig(generation=GenerationConfig(citations=False))
    with Stillroom.open(knowledge, config=config) as plain:
        assert plain.ask(QUESTION).citations == ()


def test_answer_without_limit_is_bounded_by_the_kv_pool(knowledge: Path) -> None:
    config = StillroomConfig(runtime=RuntimeConfig(kv_bytes=2**21))
    with Stillroom.open(knowledge, config=config) as small:
        assert small.ask(QUESTION).text == ANSWER
        num_tokens = small.num_blocks * config.runtime.block_size
        answer = small.ask(QUESTION, AskOptions(max_tokens=-1, logit_bias={1: -100.0}, temperature=50.0, seed=1))
        assert len(answer.token_ids) + answer.reuse.num_prompt_tokens <= num_tokens


@pytest.mark.parametrize(
    ("options", "remedy"),
    [(AskOptions(where="type = pdf"), "leave out the filter"), (AskOptions(mode="sparse"), "mode hybrid")],
)
def test_question_without_results_is_refused(stillroom: Stillroom, options: AskOptions, remedy: str) -> None:
    question = "zyzzyva" if options.mode else QUESTION
    with pytest.raises(NothingFoundError, match=f"nothing was generated.*{remedy}"):
        stillroom.ask(question, options)
    with pytest.raises(NothingFoundError):
        asyncio.run(_awaited(stillroom.astream(question, options)))
    until(lambda: stillroom.num_free_blocks == stillroom.num_blocks)  # a cancelled request ends in a step of its own


def test_question_that_leaves_no_room_for_a_document_is_refused(stillroom: Stillroom) -> None:
    num_tokens = stillroom.ask(QUESTION, AskOptions(top_k=1, max_tokens=1)).reuse.num_prompt_tokens
    with pytest.raises(PromptTooLongError, match="no document that was found fits"):
        stillroom.ask(QUESTION, AskOptions(top_k=1, max_tokens=2049 - num_tokens))


def test_turn_without_results_is_answered_from_the_conversation(stillroom: Stillroom) -> None:
    earlier = (Exchange(QUESTION, ANSWER),)
    answer = stillroom.ask("zyzzyva", AskOptions(mode="sparse", history=earlier, max_tokens=2))
    assert answer.sources


def test_answer_start_is_continued(stillroom: Stillroom) -> None:
    first = ANSWER.split(" ", 1)[0]
    assert first + stillroom.ask(QUESTION, AskOptions(answer_start=first)).text == ANSWER
    with pytest.raises(UsageError, match="answer_start"):
        AskOptions(answer_start=first, json_schema={})


def test_stream_is_read_piece_by_piece(stillroom: Stillroom) -> None:
    stream = stillroom.stream(QUESTION)
    assert "".join([next(stream), *stream]) == stream.answer.text == ANSWER
    assert next(stream, None) is None, "the end of the stream does not block"

    async def pieces() -> str:
        stream = await stillroom.astream(QUESTION)
        return "".join([await anext(stream), *[piece async for piece in stream]])

    assert asyncio.run(pieces()) == ANSWER


def test_stream_is_refused_in_another_event_loop(stillroom: Stillroom) -> None:
    stream = asyncio.run(_awaited(stillroom.astream(QUESTION, AskOptions(max_tokens=500, min_tokens=500))))

    async def read() -> list[str]:
        return [piece async for piece in stream]

    with pytest.raises(UsageError, match="event loop"):
        asyncio.run(read())
    assert stillroom.ask(QUESTION).text == ANSWER
    assert stillroom.num_free_blocks == stillroom.num_blocks, "the unreadable stream was cancelled"


USES: dict[str, Callable[[Stillroom], object]] = {
    "ask": lambda stillroom: stillroom.ask(QUESTION),
    "stream": lambda stillroom: stillroom.stream(QUESTION),
    "astream": lambda stillroom: asyncio.run(_awaited(stillroom.astream(QUESTION))),
    "search": lambda stillroom: stillroom.search(QUESTION),
    "search_staged": lambda stillroom: next(stillroom.search_staged(QUESTION)),
    "add": lambda stillroom: stillroom.add("."),
    "remove": lambda stillroom: stillroom.remove("people.md"),
    "upload": lambda stillroom: stillroom.upload([]),
    "discard": lambda stillroom: stillroom.discard("people.md"),
    "documents": lambda stillroom: stillroom.documents(),
    "chunks_of": lambda stillroom: stillroom.chunks_of(DocumentId("people.md")),
    "num_documents": lambda stillroom: stillroom.num_documents,
    "digest": lambda stillroom: stillroom.digest(),
    "verify": lambda stillroom: stillroom.verify(),
    "embed": lambda stillroom: stillroom.embed(["a text"]),
    "warm_up": lambda stillroom: stillroom.warm_up(),
    "enter": lambda stillroom: stillroom.__enter__(),
}


@pytest.fixture(scope="module")
def closed(knowledge: Path) -> Stillroom:
    stillroom = Stillroom.open(knowledge)
    assert stillroom.ask(QUESTION).text == ANSWER
    stillroom.close()
    return stillroom


@pytest.mark.parametrize("use", USES)
def test_every_call_after_close_is_refused(closed: Stillroom, use: str) -> None:
    with pytest.raises(EngineClosedError, match="open it again"):
        USES[use](closed)


def test_staged_search_ends_when_the_stillroom_is_closed(knowledge: Path) -> None:
    stillroom = Stillroom.open(knowledge)
    stages = stillroom.search_staged(QUESTION)
    stillroom.close()
    with pytest.raises(EngineClosedError, match="closed"):
        list(stages)


FORKING = """
import gc, os, sys
from stillroom import AskOptions, Stillroom
from stillroom.errors import EngineClosedError

kb, question, other = sys.argv[1:]
stillroom = Stillroom.open(kb, model="bundled:reader")
stillroom.ask(question)
child = os.fork()
if not child:
    options = AskOptions(deadline_seconds=5)
    for use in (lambda: stillroom.ask(question, options), lambda: stillroom.search(other), stillroom.__enter__):
        try:
            use()
        except EngineClosedError as error:
            print(error, flush=True)
    stillroom.close()
    del stillroom, use
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(stillroom.ask(other).text, stillroom.verify().is_clean)
stillroom.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_fork_is_refused_and_does_not_harm_the_parent(knowledge: Path) -> None:
    """A fork has no threads, so a call that waited for one would block for ever."""
    command = [sys.executable, "-c", FORKING, str(knowledge), QUESTION, "Where was Cirik Prurs born ?"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    *refused, last = done.stdout.splitlines()
    assert len(refused) == 3 and all("opened in another process" in line for line in refused)
    assert "Tunstead" in last and last.endswith(" True")


def test_prompt_with_tokens_without_embedding_is_refused(knowledge: Path, tmp_path: Path) -> None:
    """Checkpoints with tokens beyond their embedding can be used for prompts without these tokens."""
    random_checkpoint(tmp_path / "model", "Llama", vocab_size=270)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with Stillroom.open(knowledge, model=tmp_path / "model") as stillroom:
        with pytest.raises(ModelError, match="weights know 0 to 269"):
            stillroom.ask("Who is the lazy dog ?")
        with pytest.raises(UsageError, match="0 to 269"):
            asyncio.run(stillroom.acontinue('"name": "the lazy dog"'))


def test_garbage_collected_stillroom_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a notebook, when a cell that opens a Stillroom runs again."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("stillroom")}

    before = threads()
    stillroom = Stillroom.open(tmp_path / "kb")
    stillroom.add(write_knowledge(tmp_path / "docs"))
    assert stillroom.ask(QUESTION).text == ANSWER
    with pytest.warns(ResourceWarning, match="was not closed"):
        stillroom = Stillroom.open(tmp_path / "kb")
    until(lambda: threads() <= before)
    with stillroom:
        assert stillroom.ask(QUESTION).text == ANSWER
    assert "only reads" not in caplog.text


def test_stream_and_tenant_keep_their_stillroom_open(knowledge: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        assert "".join(Stillroom.open(knowledge).stream(QUESTION)) == ANSWER
        with Stillroom.open(tmp_path / "owner").for_tenant(knowledge, "tenant") as tenant:
            assert tenant.ask(QUESTION).text == ANSWER
        del tenant
