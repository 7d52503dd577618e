"""The reader as backend: what it reads, what it refuses, and the same answers whatever is read together."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stillroom.backends.conversation import Exchange
from stillroom.backends.reader import reader_backend
from stillroom.backends.reader.choose import NO_ANSWER, ScoreScale
from stillroom.backends.reader.reader_backend import answerer
from stillroom.config.settings import GenerationConfig, RuntimeConfig, StillroomConfig
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.engine.reader_engine import ReaderPrompt
from stillroom.errors import EngineClosedError, ModelError, PromptTooLongError, UnsupportedModelError, UsageError
from stillroom.models.loader import load_model
from stillroom.models.reader import Reader, load_reader
from stillroom.rag.answer import AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom.retrieval.model_files import PACKAGED_MODEL, locate_model
from tests.random_reader import save_random_reader
from tests.server.knowledge import write_knowledge

QUESTIONS = ["Who founded the Yunder Bank?", "What did Dola Kenric buy?", "Where was Cirik Prurs born, and when?"]
HISTORY = [Exchange("Who is Jatha Jurlow?", "She chose logic.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_reader(tmp_path_factory.mktemp("reader") / "random")


@pytest.fixture(scope="module")
def knowledge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader-kb")
    with Stillroom.open(folder / "kb") as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
    return folder / "kb"


def opened(knowledge: Path, folder: Path, **settings: Any) -> Stillroom:
    return Stillroom.open(knowledge, config=StillroomConfig(runtime=RuntimeConfig(model=str(folder)), **settings))


@pytest.fixture(scope="module")
def stillroom(knowledge: Path, folder: Path) -> Iterator[Stillroom]:
    with opened(knowledge, folder) as found:
        yield found


@pytest.fixture(scope="module")
def reader(folder: Path) -> Reader:
    return load_reader(folder, locate_model(PACKAGED_MODEL), torch.float32)


def chunks(number: int) -> tuple[Chunk, ...]:
    """Chunks of different lengths."""
    texts = [f"In {1700 + word} the bank moved to house {word}. " * (3 * number + word) for word in range(1, 6)]
    return tuple(Chunk(ChunkId(word), DocumentId("a.md"), 0, text) for word, text in enumerate(texts))


def test_an_answer_quotes_a_source_and_names_it(stillroom: Stillroom) -> None:
    answer = stillroom.ask(QUESTIONS[0])
    text, _, number = answer.text.rpartition(" [")
    source = answer.sources[int(number.rstrip("]")) - 1]
    assert source.position == int(number.rstrip("]"))
    assert text in " ".join(source.text.split())
    assert answer.highlight is not None and answer.text[slice(*answer.highlight)] in text
    assert answer.confidence is not None and 0 <= answer.confidence <= 1
    assert answer.finish_reason == "stop" and answer.token_ids == ()
    assert answer.num_generated_tokens == len(answer.text.split())
    assert answer.reuse.num_prompt_tokens > 20 and answer.reuse.num_cached_tokens == 0
    assert stillroom.model_name.endswith("random")


def test_streamed_pieces_add_up_to_the_answer_of_ask(stillroom: Stillroom) -> None:
    stream = stillroom.stream(QUESTIONS[0])
    pieces = list(stream)
    assert len(pieces) > 2
    assert "".join(pieces) == stream.answer.text == stillroom.ask(QUESTIONS[0]).text


def test_sampling_changes_nothing_and_all_samples_are_the_same(stillroom: Stillroom) -> None:
    wild = AskOptions(temperature=5.0, top_p=0.1, seed=-1, logit_bias={3: 9.0}, repetition_penalty=3.0, system="Joke.")
    expected = stillroom.ask(QUESTIONS[1]).text
    assert [answer.text for answer in stillroom.ask_several(QUESTIONS[1], 3, wild)] == [expected] * 3


def test_stop_strings_and_max_tokens_hold(stillroom: Stillroom) -> None:
    whole = stillroom.ask(QUESTIONS[2])
    words = whole.text.split()
    cut = stillroom.ask(QUESTIONS[2], AskOptions(max_tokens=2))
    assert (cut.text.split(), cut.finish_reason) == (words[:2], "length")
    assert cut.highlight is None or cut.highlight[1] <= len(cut.text)
    stopped = stillroom.ask(QUESTIONS[2], AskOptions(stop=f" {words[2]}"))
    assert stopped.text == whole.text[: whole.text.index(f" {words[2]}")]
    assert (stopped.finish_reason, stopped.confidence) == ("stop", whole.confidence)
    assert stillroom.ask(QUESTIONS[2], AskOptions(max_tokens=-1)).text == whole.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (AskOptions(json_schema={"type": "object"}), "JSON"),
        (AskOptions(logprobs=2), "log probabilities"),
        (AskOptions(answer_start="It is"), "continue an answer"),
    ],
)
def test_what_needs_a_generating_model_is_refused_with_the_remedy(
    stillroom: Stillroom, options: AskOptions, reason: str
) -> None:
    with pytest.raises(UsageError, match=f"{reason}.*--model"):
        stillroom.ask(QUESTIONS[0], options)


def test_raw_prompts_are_refused_with_the_remedy(stillroom: Stillroom) -> None:
    for prompt in ("Once upon a time", [1, 2, 3]):
        with pytest.raises(UsageError, match=r"continue a prompt.*--model"):
            asyncio.run(stillroom.acontinue(prompt))
    with pytest.raises(UsageError, match=r"continue a prompt.*--model"):
        asyncio.run(stillroom.atext_of([1, 2, 3]))


def test_chunks_of_earlier_turns_are_read_after_the_questions_own(stillroom: Stillroom) -> None:
    alone = stillroom.ask("And what did she choose?", AskOptions(top_k=1))
    both = stillroom.ask("And what did she choose?", AskOptions(top_k=1, history=HISTORY))
    assert [source.turns_ago for source in both.sources] == sorted(source.turns_ago for source in both.sources)
    assert [source.position for source in both.sources] == list(range(1, len(both.sources) + 1))
    assert len({source.chunk_id for source in both.sources}) == len(both.sources) >= len(alone.sources)


def test_the_limit_of_a_prompt_leaves_out_chunks(knowledge: Path, folder: Path, stillroom: Stillroom) -> None:
    with opened(knowledge, folder, generation=GenerationConfig(max_prompt_tokens=45)) as limited:
        answer = limited.ask(QUESTIONS[0])
        assert 0 < len(answer.sources) < len(stillroom.ask(QUESTIONS[0]).sources)
        assert answer.reuse.num_prompt_tokens <= 45
        with pytest.raises(PromptTooLongError):
            limited.ask(" ".join(QUESTIONS * 3))


def test_below_its_threshold_it_says_that_the_documents_do_not_say(knowledge: Path, tmp_path: Path) -> None:
    with opened(knowledge, save_random_reader(tmp_path / "strict", threshold=1e9)) as strict:
        answer = strict.ask(QUESTIONS[0])
    assert (answer.text, answer.highlight) == (NO_ANSWER, None)
    assert answer.sources and answer.confidence is not None


def test_answers_are_the_same_whatever_is_read_together(reader: Reader) -> None:
    answer = answerer(reader, ScoreScale.of({"threshold": -1e9}))
    prompts = [ReaderPrompt(question, chunks(number)) for number, question in enumerate(QUESTIONS)]
    alone = [answer([prompt])[0] for prompt in prompts]
    assert answer(prompts) == alone
    assert answer(prompts[::-1] + prompts) == [*alone[::-1], *alone]
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert answer(prompts) == alone and torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


def test_concurrent_questions_have_the_answers_of_lone_ones(stillroom: Stillroom) -> None:
    async def texts(questions: list[str]) -> list[str]:
        streams = [await stillroom.astream(question) for question in questions]
        return ["".join([piece async for piece in stream]) for stream in streams]

    expected = [stillroom.ask(question).text for question in QUESTIONS]
    assert asyncio.run(texts(QUESTIONS * 3)) == expected * 3


def test_tenants_share_the_thread_and_keep_their_documents(knowledge: Path, folder: Path, tmp_path: Path) -> None:
    with opened(knowledge, folder) as owner, owner.for_tenant(tmp_path / "tenant", "other") as tenant:
        (tmp_path / "one.md").write_text("# Rivers\n\nThe river Anton ends in the lake Breg.\n", encoding="utf-8")
        tenant.add(tmp_path / "one.md")
        assert "Breg" in tenant.ask("Where does the river Anton end?").text
        tenant.close()
        assert owner.ask(QUESTIONS[0]).text


def test_a_closed_stillroom_answers_no_more_and_closing_is_idempotent(knowledge: Path, folder: Path) -> None:
    stillroom = opened(knowledge, folder)
    stream = stillroom.stream(QUESTIONS[0])
    stillroom.stop_generating()
    with pytest.raises(EngineClosedError):
        stillroom.ask(QUESTIONS[0])
    stillroom.close()
    stillroom.close()
    stream.cancel()


@pytest.mark.slow
def test_a_fork_refuses_instead_of_waiting_for_a_thread_that_it_does_not_have(knowledge: Path, folder: Path) -> None:
    script = (
        "import os, sys\n"
        "from stillroom.rag.stillroom import Stillroom\n"
        "from stillroom.errors import EngineClosedError\n"
        "stillroom = Stillroom.open(sys.argv[1], model=sys.argv[2])\n"
        "stillroom.warm_up()\n"
        "if child := os.fork():\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "    assert stillroom.ask('Who founded the bank?').text\n"
        "    stillroom.close()\n"
        "else:\n"
        "    try:\n"
        "        stillroom.ask('Who founded the bank?')\n"
        "    except EngineClosedError:\n"
        "        os._exit(7)\n"
        "    os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(knowledge), str(folder)], check=True, timeout=120)


@pytest.mark.parametrize("measures", [True, False])
def test_threads_are_measured_unless_few_questions_are_expected(
    folder: Path, measures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def seconds(_: object, count: int) -> list[float]:
        counts.append(count)
        return [float(count)]  # one thread is the fastest

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(reader_backend, "most_threads", lambda: 2)
    monkeypatch.setattr(reader_backend, "_seconds", seconds)
    _, chosen = reader_backend._loaded(RuntimeConfig(), folder, torch.device("cpu"), measures)
    assert (chosen, counts) == (1, [2, 1] if measures else [])


def test_loading_imports_no_library_that_the_reader_does_not_need(folder: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from stillroom.backends.reader.reader_backend import build_reader_backend\n"
        "from stillroom.config.settings import StillroomConfig\n"
        "from stillroom.core.clock import SystemClock\n"
        "build_reader_backend(StillroomConfig(), SystemClock(), Path(sys.argv[1])).close()\n"
        "found = {'transformers', 'sentence_transformers', 'numba', 'scipy'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, timeout=120)


def test_damaged_weights_are_an_error_that_says_what_to_do(knowledge: Path, tmp_path: Path) -> None:
    folder = save_random_reader(tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"damaged")
    with opened(knowledge, folder) as stillroom, pytest.raises(ModelError, match="install the package again"):
        stillroom.ask(QUESTIONS[0])


def test_a_reader_is_refused_where_a_decoder_is_needed(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="bundled:microworld"):
        load_model(str(folder))
