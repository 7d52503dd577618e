"""The connector in vLLM's scheduling process: which KV of a prompt is loaded, and which is saved. Knows no vLLM.

Requests are vLLM's `Request` objects; the few fields that are read are in `_can_share` and `finished`.
"""

from collections.abc import Sequence
from typing import Any

from stillroom.backends.vllm.connector_options import ConnectorOptions
from stillroom.backends.vllm.piece_uses import PieceUses
from stillroom.backends.vllm.prefix_loads import PrefixLoads
from stillroom.backends.vllm.step_work import BlockLoad, LayoutNote, PieceSave, StepWork
from stillroom.core.clock import Clock
from stillroom.core.kv import NodeRecord
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.kvcache.tree.pieces import Piece, PrefixKeys
from stillroom.kvstore.shared.shared_tier import SharedTier

_UNKNOWN_COST = 1e-6
"""Seconds per token in a record's header: vLLM tells a connector no times."""


class SchedulingSide:
    def __init__(  # noqa: PLR0913  the parts, once
        self,
        options: ConnectorOptions,
        tier: SharedTier,
        layout: LayoutNote,
        block_size: int,
        clock: Clock,
        *,
        loads: bool = True,
        saves: bool = True,
    ) -> None:
        """
        Args:
            tier: of the fingerprint in `layout`.
            block_size: tokens.
            loads, saves: vLLM's role of the connector.
        """
        self._tier = tier
        self._block_size = block_size
        self._keys = PrefixKeys(layout.fingerprint, options.piece_size(block_size))
        self._uses = PieceUses(options.save_at_use)
        self._loads = PrefixLoads(tier, block_size, layout.bytes_per_block, self._uses, clock, options.max_wait_s)
        self._may_load, self._may_save = loads, saves
        self._pieces: dict[str, tuple[Piece, ...]] = {}
        self._work = StepWork()

    def num_matched(self, request: Any, num_computed: int) -> int | None:
        """Return how many tokens after the first `num_computed` can be loaded; None: that is not known yet."""
        if not self._may_load or request.skip_reading_prefix_cache:
            return 0
        return self._loads.num_ready(request.request_id, self._pieces_of(request), num_computed)

    def allocated(self, request: Any, block_ids: Sequence[int], num_tokens: int) -> None:
        """Plan to load `num_tokens` tokens, as `num_matched` told, into these blocks of the request's prompt."""
        for load in self._loads.take(request.request_id, num_tokens):
            end = load.first_block + len(load.content_BN)
            self._work.loads.append(BlockLoad(list(block_ids[load.first_block : end]), load.content_BN))

    def finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """Plan to save pieces of a request that has ended, or was cancelled; return whether its blocks must be held
        until that is done."""
        self._loads.drop(request.request_id)
        pieces = self._pieces_of(request)
        del self._pieces[request.request_id]
        if not self._may_save or not self._tier.is_usable:
            return False
        num_computed = request.num_computed_tokens - request.num_in_flight_tokens
        due = [piece for piece in pieces if piece.end <= num_computed and self._uses.use(piece.key)]
        for piece in due:
            first, end = piece.start // self._block_size, piece.end // self._block_size
            self._work.saves.append(PieceSave(_record(piece), list(block_ids[first:end])))
        if due:
            self._work.held.add(request.request_id)
        return bool(due)

    def stop(self) -> None:
        """Load and save nothing from now on."""
        self._may_load = self._may_save = False

    def step(self) -> StepWork:
        """Return what the next step has to do; it is planned no longer."""
        work, self._work = self._work, StepWork()
        return work

    def _pieces_of(self, request: Any) -> tuple[Piece, ...]:
        """The pieces of a request's prompt; none if more than tokens and salt decides about its KV."""
        pieces = self._pieces.get(request.request_id)
        if pieces is None:
            pieces = ()
            if _can_share(request):
                prompt = SegmentedPrompt((Segment(SegmentKind.QUESTION, tuple(request.prompt_token_ids)),))
                pieces = self._keys.pieces(prompt, request.cache_salt or "")
            self._pieces[request.request_id] = pieces
        return pieces


def _can_share(request: Any) -> bool:
    is_text = bool(request.prompt_token_ids) and request.prompt_embeds is None and not request.mm_features
    return is_text and request.lora_request is None and request.pooling_params is None and not request.resumable


def _record(piece: Piece) -> NodeRecord:
    return NodeRecord(
        key=piece.key,
        parent=piece.parent if piece.start else piece.key,
        first_position=piece.start,
        num_tokens=piece.num_tokens,
        chunk_id=None,
        avg_cost=_UNKNOWN_COST,
        frequency=1.0,
        content=piece.content,
        owner=piece.owner,
    )
