"""`LocalBackend`: a model loaded in this process with its running engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.backends.assembly import KVCache
from stillroom.backends.base import Load, PreparedPrompt
from stillroom.backends.chat_prompt import chat_prompt
from stillroom.backends.conversation import NO_HISTORY, History
from stillroom.backends.document_windows import DocumentWindows
from stillroom.backends.engine_building import build_engine, load_configured
from stillroom.backends.prompt_builder import PromptBuilder, ask_for_citations, format_for, raw_tokens
from stillroom.backends.thread_control import BeforeLoading, ThreadControl
from stillroom.backends.tool_chat import (
    NO_PARAMETERS,
    CallFormat,
    ToolChat,
    call_format,
    call_grammar,
    call_schema,
    tool_prompt,
)
from stillroom.config.settings import PrepareConfig, StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.document import Chunk
from stillroom.core.ids import RequestId
from stillroom.core.kv import OwnerTag
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SampleRequest, SamplingParams, TokenConstraint
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.corpora import CorpusView
from stillroom.engine.engine import Engine
from stillroom.engine.events import Listener
from stillroom.errors import ModelError, UsageError
from stillroom.kvstore.files import KV_FOLDER
from stillroom.models.json_constraint import JsonConstraints
from stillroom.models.loader import LoadedModel
from stillroom.models.source_numbers import source_number_grammar
from stillroom.models.tokenizer import Tokenizer
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import Readings

_NUM_CONTEXT = 8
"""Tokens before an answer that the text of its first token may depend on."""


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """Builds prompts as segments of tokens; the engine of this process continues them."""

    model: LoadedModel
    engine: AsyncEngine
    cache: KVCache
    prompts: PromptBuilder
    constraints: JsonConstraints
    threads: ThreadControl
    salt: str = ""
    """Cache salt of all requests: KV is not shared between salts."""
    owns_engine: bool = True
    knows_all_tokens: bool = True
    """Whether the model has an embedding for every token of its tokenizer."""
    asks_for_citations: bool = False
    """Whether answers shall name their sources as `[n]`, and no others (`generation.ask_for_citations`)."""
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    call_format: CallFormat | None = None

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.model.decoder.spec.max_positions

    @property
    def is_alive(self) -> bool:
        return self.engine.is_alive

    @property
    def device_problem(self) -> str | None:
        return self.engine.device_problem

    @property
    def load(self) -> Load:
        engine = self.engine
        return Load(
            engine.num_waiting, engine.num_running, engine.num_blocks, engine.num_free_blocks, engine.num_prefilling
        )

    @property
    def may_speculate(self) -> bool:
        return True

    @property
    def writes_json(self) -> bool:
        return self.constraints.are_possible

    @property
    def quotes(self) -> bool:
        return False

    @property
    def document_windows(self) -> DocumentWindows | None:
        if self.cache.tree is None:
            return None
        pool = self.cache.manager.pool
        # half of the pool: a chunk may leave a part of its last block empty
        most = min(self.max_model_len, pool.num_blocks * pool.block_size // 2)
        return DocumentWindows(self.engine, self.cache, self.prompts, self.prepare, most, self.salt)

    def expect_question(self) -> None:
        self.engine.run(Engine.expect_question)

    def prepare_prompt(
        self,
        chunks: Sequence[Chunk],
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        cites = self.asks_for_citations and schema is None
        prompt = self.prompts.build(chunks, ask_for_citations(question) if cites else question, max_tokens, history)
        if not self.knows_all_tokens:
            self._check_tokens(prompt)
        prepared = self._prepared(prompt, schema, len(self.tokenizer.encode_text(history.answer_start)))
        return replace(prepared, constraint=self._source_numbers(len(prompt.chunk_ids))) if cites else prepared

    def prepare_chat(
        self,
        question: str,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
        history: History = NO_HISTORY,
    ) -> PreparedPrompt:
        prompt = chat_prompt(self.tokenizer, question, max_tokens, history)
        if not self.knows_all_tokens:
            self._check_tokens(prompt)
        return self._prepared(prompt, schema, len(self.tokenizer.encode_text(history.answer_start)))

    def prepare_tool_chat(self, chat: ToolChat) -> PreparedPrompt:
        form = self.call_format
        if form is None:
            raise UsageError(f"the chat template of {self.name} knows no tools; leave tools out, or use another model")
        if not chat.tools:
            return self._prepared(tool_prompt(self.tokenizer, chat), None, 0)
        form = replace(form, is_demanded=chat.is_call_demanded)
        constraint = self._call_constraint(form, chat.tools)
        prompt = tool_prompt(self.tokenizer, chat, form.opening if form.is_demanded else "")
        return replace(self._prepared(prompt, None, 0), constraint=constraint, call_format=form)

    def _call_constraint(self, form: CallFormat, tools: Sequence[Mapping[str, Any]]) -> TokenConstraint:
        """Return the constraint to text and calls. Raises UsageError: a schema cannot be enforced; names its tool."""
        try:
            rule = self.constraints.lark_rule(call_schema(form, tools))
            return self.constraints.compile_lark(call_grammar(self.tokenizer, form, rule))
        except UsageError:
            for function in (tool["function"] for tool in tools):
                try:
                    self.constraints.compile(function.get("parameters") or NO_PARAMETERS)
                except UsageError as error:
                    raise UsageError(f"tools: the parameters of {function['name']!r}: {error}") from None
            raise

    def prepare_raw(self, prompt: str | Sequence[int], schema: Mapping[str, Any] | None = None) -> PreparedPrompt:
        ids = raw_tokens(self.tokenizer, prompt) if isinstance(prompt, str) else _integers(prompt)
        num_known = self.model.decoder.spec.vocab_size
        if not ids:
            raise UsageError("the prompt is empty")
        if not all(0 <= token_id < num_known for token_id in ids):
            raise UsageError(f"the prompt holds a token that the model does not have; it has 0 to {num_known - 1}")
        return self._prepared(SegmentedPrompt((Segment(SegmentKind.QUESTION, ids),)), schema, len(ids))

    def start(self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]) -> None:
        prompt = prepared.prompt
        assert isinstance(prompt, SegmentedPrompt), "another backend prepared this prompt"
        self._check_bias(samples[0].sampling)  # the same for all samples
        requests = [
            Request(
                request_id=sample.request_id,
                sampling=sample.sampling,
                priority=sample.priority,
                deadline=sample.deadline,
                may_see=sample.may_see,
                prompt=prompt,
                stop_token_ids=self.model.stop_token_ids,
                constraint=prepared.constraint,
                cache_salt=self.salt,
            )
            for sample in samples
        ]
        first, *others = zip(requests, listeners, strict=True)
        self.engine.submit(*first, *others)

    def for_tenant(self, salt: str) -> "LocalBackend":
        return replace(self, salt=salt, owns_engine=False)

    def cancel(self, request_id: RequestId) -> None:
        self.engine.cancel(request_id)

    def stop(self) -> None:
        self.engine.close()

    def close(self) -> None:
        if self.owns_engine:
            self.engine.close()
            self.cache.close(keeps_device=not self.engine.has_failed)
        self.engine.unfollow(self.salt)

    def documents_changed(self, corpus: CorpusView) -> bytes | None:
        self.engine.documents_changed(self.salt, corpus)
        disk = None if self.cache.tiers is None else self.cache.tiers.disk
        return disk.fingerprint if disk is not None and disk.is_writer else None

    def forget_shared(self, owners: Sequence[OwnerTag]) -> None:
        """Delete KV of tenants that no longer exist from the tier shared with other processes, if there is one."""
        shared = None if self.cache.tiers is None else self.cache.tiers.shared
        for owner in owners:
            if shared is not None:
                shared.forget(owner, None)

    def readings(self) -> Readings:
        lookup = self.engine.lookup_counts
        rejected = lookup.num_proposed - lookup.num_accepted
        return {
            **self.cache.readings(),
            catalogue.DEVICE_LOSSES: self.engine.num_device_losses,
            catalogue.FAILED_STEPS: self.engine.num_failed_steps,
            catalogue.COMPUTE_THREADS: self.threads.count,
            catalogue.PROPOSED_TOKENS: {"accepted": lookup.num_accepted, "rejected": rejected},
        }

    def _prepared(
        self, prompt: SegmentedPrompt, schema: Mapping[str, Any] | None, num_continued: int
    ) -> PreparedPrompt:
        """
        Args:
            num_continued: tokens at the end of the prompt that the answer continues as text.
        """
        constraint = None if schema is None else self.constraints.compile(schema)
        fitting = self.cache.manager.max_output_tokens([len(segment.token_ids) for segment in prompt.segments])
        max_answer_tokens = max(1, min(fitting, self.max_model_len - prompt.num_tokens))
        last = prompt.segments[-1].token_ids[::-1][: min(num_continued, _NUM_CONTEXT)]
        continues = tuple(takewhile(lambda token_id: token_id not in self.tokenizer.special_ids, last))[::-1]
        return PreparedPrompt(prompt, prompt.chunk_ids, prompt.num_tokens, max_answer_tokens, continues, constraint)

    def _source_numbers(self, num_sources: int) -> TokenConstraint | None:
        """Return the constraint to numbers of sources that exist; None for a model that writes no brackets."""
        if "[1]" not in self.tokenizer.decode(self.tokenizer.encode_text("[1]")):
            return None
        return self.constraints.compile_lark(source_number_grammar(num_sources))

    def _check_tokens(self, prompt: SegmentedPrompt) -> None:
        """Raises ModelError: a token has no embedding. Some checkpoints have such tokens, but do not use them."""
        vocab_size = self.model.decoder.spec.vocab_size
        if (last := max(prompt.token_ids, default=0)) >= vocab_size:
            raise ModelError(
                f"the tokenizer of {self.name} makes token {last} of this prompt, and its weights know 0 to "
                f"{vocab_size - 1}; the folder may hold the tokenizer of another model"
            )

    def _check_bias(self, sampling: SamplingParams) -> None:
        vocab_size = self.model.decoder.spec.vocab_size
        unknown = [token_id for token_id in sampling.logit_bias if not 0 <= token_id < vocab_size]
        if unknown:
            raise UsageError(f"logit_bias names token {unknown[0]}; the model has tokens 0 to {vocab_size - 1}")


def _integers(prompt: Sequence[int]) -> tuple[int, ...]:
    found = np.asarray(prompt)
    if found.size and (found.ndim != 1 or found.dtype.kind not in "iu"):
        raise UsageError("the prompt is neither text nor a list of tokens, which are whole numbers")
    return tuple(found.tolist())


def build_backend(config: StillroomConfig, clock: Clock, kb_folder: Path | None = None) -> LocalBackend:
    """Load the model and start its engine.

    Args:
        kb_folder: knowledge base in which KV is stored on disk; None stores none.

    Raises:
        ModelError: the checkpoint cannot be used.
        ConfigError: the device does not exist, or the KV budget is too small for the model or too large for the
            device.
    """
    model, prompts, engine, cache, threads = run_in_short_lived_thread(lambda: _built(config, clock, kb_folder))
    constraints = JsonConstraints(model.tokenizer, model.decoder.spec.vocab_size, model.stop_token_ids)
    running = AsyncEngine(engine, config.runtime.max_waiting, threads.adjust if threads.is_adaptive else None)
    running.run(lambda _: threads.apply())  # torch keeps this setting per thread
    knows_all = max(model.tokenizer.hf_tokenizer.get_vocab().values()) < model.decoder.spec.vocab_size
    return LocalBackend(
        model,
        running,
        cache,
        prompts,
        constraints,
        threads,
        knows_all_tokens=knows_all,
        asks_for_citations=config.generation.ask_for_citations,
        prepare=config.prepare,
        call_format=call_format(model.tokenizer),
    )


def _built(
    config: StillroomConfig, clock: Clock, kb_folder: Path | None
) -> tuple[LoadedModel, PromptBuilder, Engine, KVCache, ThreadControl]:
    """Model, its prompts, engine, cache and the control of its threads."""
    before = BeforeLoading.now(clock)
    model = load_configured(config.runtime)
    prompts = PromptBuilder(model.tokenizer, format_for(model.tokenizer), config.generation.chunk_order)
    engine, cache = build_engine(
        model.decoder,
        config.runtime,
        clock,
        reuse=config.reuse,
        fingerprint=model.fingerprint,
        kv_folder=None if kb_folder is None else kb_folder / KV_FOLDER,
        tunes_threads=True,
        prepare=config.prepare,
        document_prompt=prompts.build_documents,
    )
    return model, prompts, engine, cache, before.control(config.runtime, clock, model.decoder.device)
