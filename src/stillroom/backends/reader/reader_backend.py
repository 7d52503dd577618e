"""`ReaderBackend`: answers by quoting the sentence that answers the question, and loads the reader that finds it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from stillroom.backends.base import Load, PreparedPrompt
from stillroom.backends.conversation import NO_HISTORY, History
from stillroom.backends.num_threads import candidates, is_free_to_choose, most_threads
from stillroom.backends.num_threads import choose as choose_count
from stillroom.backends.reader.choose import ScoreScale, choose
from stillroom.backends.tool_chat import ToolChat
from stillroom.config.settings import RuntimeConfig, StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.request import SampleRequest
from stillroom.engine.corpora import CorpusView
from stillroom.engine.events import Listener
from stillroom.engine.reader_engine import ReaderAnswer, ReaderEngine, ReaderPrompt
from stillroom.errors import UsageError
from stillroom.models.bundled_models import short_name
from stillroom.models.checkpoint import read_json
from stillroom.models.device import torch_device
from stillroom.models.reader import Passage, Reader, load_reader
from stillroom.ops.bfloat16 import has_bfloat16
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.retrieval.model_files import PACKAGED_MODEL, locate_model
from stillroom.telemetry.catalogue import Readings

logger = logging.getLogger(__name__)

_NUM_EARLIER_TURNS = 2
"""Earlier turns of a conversation whose chunks are read too."""
_MAX_PIECES = 4096
"""More words than any answer has."""
_BATCH_SIZE = {"cpu": 16}
_GPU_BATCH_SIZE = 256
_REMEDY = "use a model that generates text: --model with a checkpoint's folder or a hub name, or engine.kind = 'openai'"


@dataclass(frozen=True, slots=True)
class ReaderBackend:
    """Passes questions and chunks to a reader. The same question with the same chunks has the same answer."""

    engine: ReaderEngine
    count_tokens: Callable[[str], int]
    name: str
    salt: str = ""
    """The tenant. Tenants share the thread; nothing is kept between questions."""
    owns_engine: bool = True

    @property
    def tokenizer(self) -> None:
        return None

    @property
    def max_model_len(self) -> None:
        return None

    @property
    def is_alive(self) -> bool:
        return self.engine.is_alive

    @property
    def device_problem(self) -> None:
        return None

    @property
    def load(self) -> Load:
        return Load(self.engine.num_waiting, self.engine.num_running)

    @property
    def may_speculate(self) -> bool:
        return False

    @property
    def writes_json(self) -> bool:
        return False

    @property
    def quotes(self) -> bool:
        return True

    @property
    def document_windows(self) -> None:
        return None

    def expect_question(self) -> None:
        """Nothing is prepared that it could interrupt."""

    def prepare_prompt(
        self,
        chunks: Sequence[Chunk],
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        """As `Backend.prepare_prompt`. The question's own chunks come first, then those of the last turns; a system
        message has no effect."""
        _refuse_schema(schema)
        if history.answer_start:
            raise UsageError(f"{self.name} quotes whole sentences and cannot continue an answer; {_REMEDY}")
        num_tokens = self.count_tokens(question)
        kept: dict[ChunkId, Chunk] = {}
        for chunk in _chunks_to_read(chunks, history):
            num_more = chunk.num_tokens or self.count_tokens(chunk.text)
            if chunk.chunk_id in kept or (max_tokens is not None and num_tokens + num_more > max_tokens):
                continue
            kept[chunk.chunk_id] = chunk
            num_tokens += num_more
        prompt = ReaderPrompt(question, tuple(kept.values()))
        return PreparedPrompt(prompt, tuple(kept), num_tokens, max_answer_tokens=_MAX_PIECES)

    def prepare_chat(
        self,
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        raise UsageError(f"{self.name} quotes documents and cannot answer without a search; {_REMEDY}")

    @property
    def call_format(self) -> None:
        return None

    def prepare_tool_chat(self, chat: ToolChat) -> PreparedPrompt:
        raise UsageError(f"{self.name} calls no tools; leave tools out")

    def prepare_raw(self, prompt: str | Sequence[int], schema: Mapping[str, Any] | None = None) -> PreparedPrompt:
        raise UsageError(f"{self.name} answers questions from documents and cannot continue a prompt; {_REMEDY}")

    def start(self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]) -> None:
        """As `Backend.start`. Sampling parameters other than `max_tokens` have no effect.

        Raises:
            UsageError: log probabilities are requested.
            QueueFullError, EngineClosedError: as `ReaderEngine.submit`.
        """
        prompt = prepared.prompt
        assert isinstance(prompt, ReaderPrompt), "another backend prepared this prompt"
        if samples[0].sampling.logprobs is not None:
            raise UsageError(f"{self.name} quotes documents and has no log probabilities of tokens; {_REMEDY}")
        self.engine.submit(prompt, samples, listeners, self.salt)

    def documents_changed(self, corpus: CorpusView) -> None:
        """Nothing to drop: the reader keeps nothing of documents."""

    def readings(self) -> Readings:
        return {}

    def for_tenant(self, salt: str, tenant: str) -> "ReaderBackend":
        return replace(self, salt=salt, owns_engine=False)

    def cancel(self, request_id: RequestId) -> None:
        self.engine.cancel(request_id)

    def stop(self) -> None:
        self.engine.close()

    def close(self) -> None:
        if self.owns_engine:
            self.engine.close()


def _chunks_to_read(chunks: Sequence[Chunk], history: History) -> list[Chunk]:
    latest = history.turns[-_NUM_EARLIER_TURNS:]
    return [*chunks, *(chunk for turn in reversed(latest) for chunk in turn.chunks)]


def _refuse_schema(schema: Mapping[str, Any] | None) -> None:
    if schema is not None:
        raise UsageError(f"the bundled reader quotes documents and cannot write JSON; {_REMEDY}")


def build_reader_backend(
    config: StillroomConfig, clock: Clock, folder: Path, *, measures_threads: bool = True
) -> ReaderBackend:
    """Load a reader and start its thread.

    Args:
        folder: the reader's `config.json` and `model.safetensors`.
        measures_threads: False computes with one thread, where the number is free, instead of the fastest number:
            finding that, and starting more threads, takes longer than an answer.

    Raises:
        ModelError: the reader, or the packaged embedder that it is built on, cannot be loaded.
        ConfigError: the device does not exist.
    """
    runtime = config.runtime
    device = torch_device(runtime.device)
    reader, num_threads = run_in_short_lived_thread(lambda: _loaded(runtime, folder, device, measures_threads))
    scale = ScoreScale.of(read_json(folder, "config.json"))
    engine = ReaderEngine(
        answerer(reader, scale),
        clock,
        max_waiting=runtime.max_waiting,
        batch_size=_BATCH_SIZE.get(device.type, _GPU_BATCH_SIZE),
        prepare=lambda: torch.set_num_threads(num_threads),  # torch keeps this setting per thread
    )
    return ReaderBackend(engine, reader.count_tokens, short_name(runtime.model))


def answerer(reader: Reader, scale: ScoreScale) -> Callable[[Sequence[ReaderPrompt]], list[ReaderAnswer]]:
    """Return the function that answers prompts with a reader."""

    def answer(prompts: Sequence[ReaderPrompt]) -> list[ReaderAnswer]:
        passages = [[Passage(chunk.text, chunk.heading) for chunk in prompt.chunks] for prompt in prompts]
        asked = [prompt.question for prompt in prompts]
        return [
            choose([passage.text for passage in own], readings, scale)
            for own, readings in zip(
                passages, reader.read_several(list(zip(asked, passages, strict=True))), strict=True
            )
        ]

    return answer


def _loaded(runtime: RuntimeConfig, folder: Path, device: torch.device, measures_threads: bool) -> tuple[Reader, int]:
    """The reader, and the number of threads to compute with."""
    dtype = torch.bfloat16 if has_bfloat16(device.type) else torch.float32
    if runtime.dtype != "auto":
        dtype = getattr(torch, runtime.dtype)
    reader = load_reader(folder, locate_model(PACKAGED_MODEL), dtype, device)
    if not is_free_to_choose(runtime.num_threads, device):
        return reader, runtime.num_threads or torch.get_num_threads()
    most = most_threads()
    if most == 1 or not measures_threads:
        return reader, 1
    return reader, choose_count(candidates(most), lambda count: _seconds(reader, count))


def _seconds(reader: Reader, num_threads: int) -> list[float]:
    """Seconds for five passages: the best of three."""
    torch.set_num_threads(num_threads)
    passages = [Passage("Stillroom answers questions from documents. " * size) for size in (4, 8, 12, 16, 20)]

    def once() -> float:
        began = perf_counter()
        reader.read("What does Stillroom answer?", passages)
        return perf_counter() - began

    return [min(once() for _ in range(3))]
