"""`LocalBackend`: a model loaded in this process with its running engine; and what measures its costs."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stillroom.backends.assembly import KVCache, build_cache, build_device
from stillroom.backends.base import Load, PreparedPrompt
from stillroom.backends.calibration import (
    CalibrationTarget,
    calibrate,
    check_logits,
    load_profile,
    profile_path,
    quick_profile,
    save_profile,
    sequence_seconds,
)
from stillroom.backends.conversation import NO_HISTORY, History
from stillroom.backends.document_windows import DocumentWindows
from stillroom.backends.num_threads import tune_threads
from stillroom.backends.placement_check import check_placement
from stillroom.backends.prompt_builder import PromptBuilder, ask_for_citations, format_for, raw_tokens
from stillroom.config.places import cache_root
from stillroom.config.settings import PrepareConfig, ReuseConfig, RuntimeConfig, StillroomConfig
from stillroom.core.clock import Clock, SystemClock
from stillroom.core.document import Chunk
from stillroom.core.ids import RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SampleRequest, SamplingParams, TokenConstraint
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.audit import Audit
from stillroom.engine.corpora import CorpusView
from stillroom.engine.engine import Engine
from stillroom.engine.events import Listener
from stillroom.engine.preparation import Preparation
from stillroom.errors import ModelError, UsageError
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvstore.files import KV_FOLDER
from stillroom.models.decoder import Decoder
from stillroom.models.json_constraint import JsonConstraints
from stillroom.models.loader import LoadedModel, load_model
from stillroom.models.source_numbers import source_number_grammar
from stillroom.models.tokenizer import Tokenizer
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.runner.torch_runner import TorchRunner
from stillroom.scheduler.limits import SchedulerLimits
from stillroom.scheduler.policy import POLICIES
from stillroom.scheduler.scheduler import Scheduler
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
    salt: str = ""
    """Cache salt of all requests: KV is not shared between salts."""
    owns_engine: bool = True
    knows_all_tokens: bool = True
    """Whether the model has an embedding for every token of its tokenizer."""
    asks_for_citations: bool = False
    """Whether answers shall name their sources as `[n]`, and no others (`generation.ask_for_citations`)."""
    prepare: PrepareConfig = field(default_factory=PrepareConfig)

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
    def document_windows(self) -> DocumentWindows | None:
        if self.cache.tree is None:
            return None
        pool = self.cache.manager.pool
        # half of the pool: a chunk may leave a part of its last block empty
        most = min(self.max_model_len, pool.num_blocks * pool.block_size // 2)
        return DocumentWindows(self.engine, self.cache, self.prompts, self.prepare, most, self.salt)

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

    def readings(self) -> Readings:
        return {
            **self.cache.readings(),
            catalogue.DEVICE_LOSSES: self.engine.num_device_losses,
            catalogue.FAILED_STEPS: self.engine.num_failed_steps,
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
    model, engine, cache, num_threads = run_in_short_lived_thread(lambda: _built(config, clock, kb_folder))
    prompts = PromptBuilder(model.tokenizer, format_for(model.tokenizer))
    constraints = JsonConstraints(model.tokenizer, model.decoder.spec.vocab_size, model.stop_token_ids)
    running = AsyncEngine(engine, config.runtime.max_waiting)
    running.run(lambda _: torch.set_num_threads(num_threads))  # torch keeps this setting per thread
    knows_all = max(model.tokenizer.hf_tokenizer.get_vocab().values()) < model.decoder.spec.vocab_size
    return LocalBackend(
        model,
        running,
        cache,
        prompts,
        constraints,
        knows_all_tokens=knows_all,
        asks_for_citations=config.generation.ask_for_citations,
        prepare=config.prepare,
    )


def _built(config: StillroomConfig, clock: Clock, kb_folder: Path | None) -> tuple[LoadedModel, Engine, KVCache, int]:
    """Model, engine, cache and the number of threads to compute with."""
    model = load_configured(config.runtime)
    engine, cache = build_engine(
        model.decoder,
        config.runtime,
        clock,
        reuse=config.reuse,
        fingerprint=model.fingerprint,
        kv_folder=None if kb_folder is None else kb_folder / KV_FOLDER,
        tunes_threads=True,
        prepare=config.prepare,
    )
    return model, engine, cache, torch.get_num_threads()


def calibrate_model(
    config: StillroomConfig,
    kb_folder: Path,
    *,
    repeat: int = 5,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Clock | None = None,
) -> tuple[CostProfile, Path]:
    """Measure the configured model's costs on this machine and save them; returns the profile and its file.

    Args:
        kb_folder: on the disk that KV is stored on; need not exist yet.

    Raises:
        ModelError: the checkpoint cannot be used.
        ConfigError, UsageError: the device does not exist, or there is too little memory to measure.
    """
    model = load_configured(config.runtime)
    pool, device = build_device(model.decoder, config.runtime)
    limits = _limits(model.decoder, config.runtime)
    target = _target(TorchRunner(model.decoder, device), pool, limits, clock or SystemClock())
    _use_threads(config.runtime, target)
    profile = calibrate(target, kb_folder, repeat=repeat, on_progress=on_progress)
    path = profile_path(cache_root(), model.fingerprint, model.decoder.device)
    save_profile(path, profile)
    return profile, path


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A loaded model and its costs on this machine."""

    model: LoadedModel
    profile: CostProfile
    is_calibrated: bool
    """True: the profile was saved by a calibration. False: a few points were measured now."""
    sequence_seconds: float
    """See `calibration.sequence_seconds`."""


def measured_costs(config: StillroomConfig, kb_folder: Path, clock: Clock) -> ModelCosts:
    """The configured model with its saved profile, or a quick one. Raises as `calibrate_model`."""
    model = load_configured(config.runtime)
    pool, device = build_device(model.decoder, config.runtime)
    target = _target(TorchRunner(model.decoder, device), pool, _limits(model.decoder, config.runtime), clock)
    _use_threads(config.runtime, target)
    kept = load_profile(profile_path(cache_root(), model.fingerprint, model.decoder.device))
    profile = kept or quick_profile(target, kb_folder)
    return ModelCosts(model, profile, kept is not None, sequence_seconds(target))


def build_engine(  # noqa: PLR0913  the parts, once
    decoder: Decoder,
    config: RuntimeConfig,
    clock: Clock,
    *,
    reuse: ReuseConfig | None = None,
    fingerprint: bytes = b"",
    profile: CostProfile | None = None,
    kv_folder: Path | None = None,
    tunes_threads: bool = False,
    prepare: PrepareConfig | None = None,
) -> tuple[Engine, KVCache]:
    """Build scheduler, KV cache and runner for a decoder; starts no thread. Raises as `build_backend`.

    Args:
        reuse: None reuses nothing.
        fingerprint: of the model; names its KV on disk.
        profile: costs of computing and loading; None takes the saved one, or measures for about a second.
        tunes_threads: set the number of threads of the process: the configured one, or the fastest.
        prepare: how documents are prepared; None takes the defaults.
    """
    prepare = prepare or PrepareConfig()
    pool, device = build_device(decoder, config)
    runner = TorchRunner(decoder, device)
    limits = _limits(decoder, config, reuse)
    target = _target(runner, pool, limits, clock)
    check_logits(target)
    if tunes_threads:
        _use_threads(config, target)
    reuse = reuse or ReuseConfig(mode="off")
    if profile is None and reuse.keeps_kv:
        kept = load_profile(profile_path(cache_root(), fingerprint, decoder.device))
        profile = kept or quick_profile(target, kv_folder if reuse.disk_bytes else None)
    inv_freq_LP = None
    if reuse.allows_any_position:
        check_placement(decoder, config.block_size)
        inv_freq_LP = decoder.inv_freq_LP
    cache = build_cache(
        pool,
        device,
        reuse,
        fingerprint=fingerprint,
        profile=profile,
        folder=kv_folder,
        clock=clock,
        inv_freq_LP=inv_freq_LP,
        prepare=prepare,
    )
    if profile is not None:
        seconds = decoder.spec.num_layers * prepare.layer_ms / 1000
        limits = replace(limits, preparing_tokens=_tokens_within(profile, seconds, limits))
    audit = None
    anywhere = cache.manager.reuse.anywhere if cache.manager.reuse else None
    if anywhere is not None and reuse.audit_share and not anywhere.only_prepared:
        audit = Audit(
            anywhere,
            cache.manager.allow_anywhere,
            share=reuse.audit_share,
            max_disagreement=reuse.max_disagreement,
            randomness=random.Random(0),
        )
    scheduler = Scheduler(cache.manager, limits, POLICIES[config.scheduling], config.starvation_window)
    engine = Engine(scheduler, runner, clock, config.request_timeout_s, audit, Preparation(prepare.idle_s))
    return engine, replace(cache, audit=audit)


def _tokens_within(profile: CostProfile, seconds: float, limits: SchedulerLimits) -> int:
    """Return how many tokens of a prompt a step computes in this time, a power of two and at least 16."""
    num_tokens = 16
    while 2 * num_tokens <= limits.max_num_batched_tokens and profile.prefill_seconds(0, 2 * num_tokens) <= seconds:
        num_tokens *= 2
    return num_tokens


def load_configured(runtime: RuntimeConfig) -> LoadedModel:
    """Load the model with the settings of `runtime`. Raises as `load_model`."""
    return load_model(
        runtime.model,
        device=runtime.device,
        dtype=runtime.dtype,
        weights=runtime.weights,
        max_model_len=runtime.max_model_len,
    )


def _limits(decoder: Decoder, config: RuntimeConfig, reuse: ReuseConfig | None = None) -> SchedulerLimits:
    tail_blocks = ReuseConfig().tail_blocks if reuse is None else reuse.tail_blocks
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_model_len=decoder.spec.max_positions,
        batch_delay_s=config.batch_delay_ms / 1000,
        fixed_tail_tokens=tail_blocks * config.block_size if config.fixed_shapes else 0,
    )


def _target(runner: TorchRunner, pool: BlockPool, limits: SchedulerLimits, clock: Clock) -> CalibrationTarget:
    return CalibrationTarget(
        runner, runner.store, pool.num_blocks, limits.max_model_len, limits.max_num_batched_tokens, clock
    )


def _use_threads(config: RuntimeConfig, target: CalibrationTarget) -> None:
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    else:
        tune_threads(target)
