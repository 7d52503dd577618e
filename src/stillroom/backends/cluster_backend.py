"""`ClusterBackend`: prepares prompts in this process; engines in other processes continue them (docs/cluster.md).

Loads the model's tokenizer, not its weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stillroom.backends.base import Load, PreparedPrompt
from stillroom.backends.engine_readings import cluster_readings, engine_readings
from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.backends.token_backend import TokenBackend
from stillroom.backends.tool_chat import call_format
from stillroom.cluster.directory import EngineDirectory
from stillroom.cluster.front_engines import Expected
from stillroom.config.engine_address import parse_engine_addresses
from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.ids import RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import SampleRequest
from stillroom.engine.cluster_client import ClusterClient
from stillroom.engine.cluster_engine import ClusterEngine, Patience
from stillroom.engine.corpora import CorpusView
from stillroom.engine.events import Listener
from stillroom.models.json_constraint import JsonConstraint, JsonConstraints
from stillroom.models.vocabulary import load_vocabulary
from stillroom.scheduler.limits import RequestLimits, check_fits
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import Readings


@dataclass(frozen=True, slots=True)
class ClusterBackend(TokenBackend):
    """Builds prompts as segments of tokens, and sends them to the engines of a cluster."""

    engine: ClusterEngine
    tenant: str | None = None
    """None: the default tenant."""
    owns_engine: bool = True

    @property
    def max_model_len(self) -> int:
        return min(info.max_positions for info in self.engine.infos)

    def max_output_tokens(self, segment_lengths: Sequence[int]) -> int:
        return min(info.max_output_tokens(segment_lengths) for info in self.engine.infos)

    @property
    def is_alive(self) -> bool:
        return self.engine.is_alive

    @property
    def device_problem(self) -> str | None:
        """Why no engine takes requests now; None if one does."""
        return self.engine.problem

    @property
    def load(self) -> Load:
        """Sums over the engines, as they last reported."""
        totals = self.engine.totals
        num_prefilling = max(0, self.engine.num_unbegun - totals["num_waiting"])
        return Load(**totals, num_prefilling=num_prefilling)

    @property
    def document_windows(self) -> None:
        """Engines prepare documents by themselves."""
        return None

    def expect_question(self) -> None:
        """Engines are not told of questions before their prompts."""

    def start(self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]) -> None:
        prompt = prepared.prompt
        assert isinstance(prompt, SegmentedPrompt), "another backend prepared this prompt"
        sampling = samples[0].sampling  # the same for all samples
        self.check_bias(sampling)
        for info in self.engine.infos:
            limits = RequestLimits(info.max_num_seqs, info.max_positions, info.num_blocks, info.block_size)
            check_fits(prompt, sampling.max_tokens, len(samples), limits)
        constraint = prepared.constraint
        assert constraint is None or isinstance(constraint, JsonConstraint)
        self.engine.submit(
            prompt,
            samples,
            listeners,
            salt=self.salt,
            tenant=self.tenant,
            grammar=None if constraint is None else constraint.grammar,
        )

    def for_tenant(self, salt: str, tenant: str) -> "ClusterBackend":
        return replace(self, salt=salt, tenant=tenant, owns_engine=False)

    def cancel(self, request_id: RequestId) -> None:
        self.engine.cancel(request_id)

    def stop(self) -> None:
        self.engine.close()

    def close(self) -> None:
        if self.owns_engine:
            self.engine.close()

    def documents_changed(self, corpus: CorpusView) -> None:
        """Nothing to do: engines follow the knowledge base themselves."""

    def readings(self) -> Readings:
        counts = self.engine.counts
        return {
            **engine_readings(counts, self.engine.alive),
            **cluster_readings(counts, self.engine.states),
            catalogue.MIGRATIONS: self.engine.num_moved,
        }


def connect(config: StillroomConfig, clock: Clock, knowledge_base: str) -> ClusterBackend:
    """Load the model's tokenizer, and connect to its engines.

    Args:
        knowledge_base: identity of the default tenant's knowledge base, which engines must have too.

    Raises:
        ModelError: the checkpoint has no usable tokenizer, or generates no text.
        EngineUnavailableError: no engine takes requests within `engine.wait_s`.
        EngineRefusedError: no engine has this model and this knowledge base.
    """
    vocabulary = load_vocabulary(config.runtime.model)
    prompts = PromptBuilder(vocabulary.tokenizer, format_for(vocabulary.tokenizer), config.generation.chunk_order)
    settings = config.engine
    engine = ClusterEngine(
        ClusterClient(
            config.cluster.secret, connect_timeout_s=settings.connect_timeout_s, silence_s=settings.silence_s
        ),
        EngineDirectory(parse_engine_addresses("engine.urls", settings.urls)),
        Expected(vocabulary.name, vocabulary.tokenizer.vocabulary_digest, knowledge_base),
        Patience(settings.max_migrations, settings.wait_s),
        clock,
    )
    try:
        engine.wait_until_ready()
    except BaseException:
        engine.close()
        raise
    return ClusterBackend(
        engine,
        vocabulary=vocabulary,
        prompts=prompts,
        constraints=JsonConstraints(vocabulary.tokenizer, vocabulary.size, vocabulary.stop_token_ids),
        call_format=call_format(vocabulary.tokenizer),
        asks_for_citations=config.generation.ask_for_citations,
    )
