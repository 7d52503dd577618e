"""`LocalBackend`: a model loaded in this process with its running engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stillroom.backends.assembly import KVCache
from stillroom.backends.base import Load, PreparedPrompt
from stillroom.backends.document_windows import DocumentWindows
from stillroom.backends.engine_building import build_engine, load_configured
from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.backends.thread_control import BeforeLoading, ThreadControl
from stillroom.backends.token_backend import TokenBackend
from stillroom.backends.tool_chat import call_format
from stillroom.config.settings import PrepareConfig, StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.ids import RequestId
from stillroom.core.kv import OwnerTag
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import Request, SampleRequest
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.corpora import CorpusView
from stillroom.engine.engine import Engine
from stillroom.engine.events import Listener
from stillroom.kvstore.files import KV_FOLDER
from stillroom.models.json_constraint import JsonConstraints
from stillroom.models.loader import LoadedModel
from stillroom.models.vocabulary import Vocabulary
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import Readings


@dataclass(frozen=True, slots=True)
class LocalBackend(TokenBackend):
    """Builds prompts as segments of tokens; the engine of this process continues them."""

    model: LoadedModel
    engine: AsyncEngine
    cache: KVCache
    threads: ThreadControl
    owns_engine: bool = True
    prepare: PrepareConfig = field(default_factory=PrepareConfig)

    @property
    def max_model_len(self) -> int:
        return self.model.decoder.spec.max_positions

    def max_output_tokens(self, segment_lengths: Sequence[int]) -> int:
        return self.cache.manager.max_output_tokens(segment_lengths)

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
    def document_windows(self) -> DocumentWindows | None:
        if self.cache.tree is None:
            return None
        pool = self.cache.manager.pool
        # half of the pool: a chunk may leave a part of its last block empty
        most = min(self.max_model_len, pool.num_blocks * pool.block_size // 2)
        return DocumentWindows(self.engine, self.cache, self.prompts, self.prepare, most, self.salt)

    def expect_question(self) -> None:
        self.engine.run(Engine.expect_question)

    def start(self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]) -> None:
        prompt = prepared.prompt
        assert isinstance(prompt, SegmentedPrompt), "another backend prepared this prompt"
        self.check_bias(samples[0].sampling)  # the same for all samples
        requests = [
            Request(
                request_id=sample.request_id,
                sampling=sample.sampling,
                priority=sample.priority,
                deadline=sample.deadline,
                may_see=sample.may_see,
                prompt=prompt,
                stop_token_ids=self.vocabulary.stop_token_ids,
                constraint=prepared.constraint,
                cache_salt=self.salt,
            )
            for sample in samples
        ]
        first, *others = zip(requests, listeners, strict=True)
        self.engine.submit(*first, *others)

    def for_tenant(self, salt: str, tenant: str) -> "LocalBackend":
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
    vocabulary = Vocabulary(model.name, model.tokenizer, model.stop_token_ids, model.decoder.spec.vocab_size)
    running = AsyncEngine(engine, config.runtime.max_waiting, threads.adjust if threads.is_adaptive else None)
    running.run(lambda _: threads.apply())  # torch keeps this setting per thread
    return LocalBackend(
        model,
        running,
        cache,
        threads,
        prepare=config.prepare,
        vocabulary=vocabulary,
        prompts=prompts,
        constraints=JsonConstraints(model.tokenizer, vocabulary.size, model.stop_token_ids),
        call_format=call_format(model.tokenizer),
        asks_for_citations=config.generation.ask_for_citations,
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
