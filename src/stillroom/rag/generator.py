"""A loaded model with a running engine: what turns a prompt into tokens. Built once, on first use."""

from dataclasses import dataclass

from stillroom.config.settings import RuntimeConfig
from stillroom.core.clock import Clock
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.engine import Engine
from stillroom.errors import ConfigError
from stillroom.kvcache.block_pool import BlockPool
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvstore.device import DeviceStore, KVShape
from stillroom.models.decoder import Decoder
from stillroom.models.json_constraint import JsonConstraints
from stillroom.models.loader import LoadedModel, load_model
from stillroom.rag.prompt import PromptBuilder, format_for
from stillroom.runner.torch_runner import TorchRunner
from stillroom.scheduler.scheduler import Scheduler, SchedulerLimits


@dataclass(frozen=True, slots=True)
class Generator:
    """The model's side of a pipeline."""

    model: LoadedModel
    engine: AsyncEngine
    prompts: PromptBuilder
    constraints: JsonConstraints

    @property
    def max_model_len(self) -> int:
        """Prompt plus answer, in tokens."""
        return self.model.decoder.spec.max_positions


def build_generator(config: RuntimeConfig, clock: Clock) -> Generator:
    """Load the model and start its engine.

    Raises:
        ModelError: the checkpoint cannot be used.
        ConfigError: the device does not exist, or the KV budget is too small for the model.
    """
    model = load_model(config.model, device=config.device, dtype=config.dtype, max_model_len=config.max_model_len)
    engine = build_engine(model.decoder, config, clock)
    prompts = PromptBuilder(model.tokenizer, format_for(model.tokenizer))
    constraints = JsonConstraints(model.tokenizer, model.decoder.spec.vocab_size, model.stop_token_ids)
    return Generator(model, AsyncEngine(engine), prompts, constraints)


def build_engine(decoder: Decoder, config: RuntimeConfig, clock: Clock) -> Engine:
    """Scheduler, KV and runner for a decoder; not running yet. Raises ConfigError as `build_generator`."""
    spec = decoder.spec
    shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, decoder.dtype)
    num_blocks = config.kv_bytes // (shape.bytes_per_token * config.block_size)
    if num_blocks < 1:
        raise ConfigError(
            f"runtime.kv_bytes={config.kv_bytes} holds no KV block of this model "
            f"({shape.bytes_per_token * config.block_size} bytes); raise it"
        )
    pool = BlockPool(num_blocks, config.block_size)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_model_len=spec.max_positions,
    )
    store = DeviceStore(shape, num_blocks, config.block_size, decoder.device)
    return Engine(Scheduler(KVCacheManager(pool), limits), TorchRunner(decoder, store), clock)
