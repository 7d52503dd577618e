"""Limits of a step and of a request, and the check of a request against them."""

from dataclasses import dataclass

from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import Request
from stillroom.errors import PromptTooLongError, UsageError
from stillroom.kvcache.blocks.block_table import num_blocks_for
from stillroom.kvcache.manager import KVCacheManager


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int
    """Sequences that run at the same time."""
    max_num_batched_tokens: int
    """Tokens computed in one step; at least `max_num_seqs`, so that every decode fits."""
    max_model_len: int
    """Prompt plus answer, in tokens."""
    batch_delay_s: float = 0.0
    """Longest time that the oldest waiting request is delayed to fill a batch, while no request runs."""
    preparing_tokens: int = 64
    """Most tokens of a preparing prompt or an audit in one step, so that a question that arrives does not wait long."""
    max_proposed_tokens: int = 0
    """Most tokens that prompt lookup proposes for a sequence in a step. None with fixed shapes."""
    fixed_tail_tokens: int = 0
    """If not 0, shapes are fixed: each piece of a prompt is computed in a step of its own, whether the pieces before it
    were kept or computed. The last segment is cut into pieces of this many tokens."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request must fit into, on any engine."""

    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    """Of the KV pool."""
    block_size: int


def check_request(request: Request, num_samples: int, limits: SchedulerLimits, kv: KVCacheManager) -> None:
    """Refuse a request that can never run; raises as `check_fits`. Reads only constants, so any thread may call it."""
    pool = kv.pool
    fits_into = RequestLimits(limits.max_num_seqs, limits.max_model_len, pool.num_blocks, pool.block_size)
    check_fits(request.prompt, request.sampling.max_tokens, num_samples, fits_into)


def check_fits(prompt: SegmentedPrompt, max_tokens: int, num_samples: int, limits: RequestLimits) -> None:
    """Refuse a prompt with its answers that can never run.

    Raises:
        PromptTooLongError: it exceeds the model's length or the whole KV pool.
        UsageError: so many samples cannot run at the same time.
    """
    if num_samples > limits.max_num_seqs:
        raise UsageError(
            f"n={num_samples} exceeds the {limits.max_num_seqs} sequences that run at the same time; "
            "lower n or raise runtime.max_num_seqs"
        )
    num_prompt = prompt.num_tokens
    if num_prompt + max_tokens > limits.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together more than the model's "
            f"{limits.max_model_len}; retrieve fewer chunks (top_k) or lower max_tokens"
        )
    lengths = list(prompt.lengths)
    lengths[-1] += max_tokens
    if num_blocks_for(lengths, limits.block_size) > limits.num_blocks:
        raise PromptTooLongError(
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} do not fit into the KV pool of "
            f"{limits.num_blocks} blocks of {limits.block_size} tokens; raise runtime.kv_bytes or shorten the prompt"
        )
