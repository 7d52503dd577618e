"""KV that one sequence holds: its block table and its path in the knowledge tree."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey, SharedLookup
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import MaySee
from stillroom.core.reuse import PromptReuse
from stillroom.kvcache.blocks.block_table import BlockTable
from stillroom.kvcache.chunk_reuse.attention_sampling import AttentionMassSampler
from stillroom.kvcache.chunk_reuse.plan import Placement
from stillroom.kvcache.chunk_reuse.recompute import SelectiveRecompute
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvcache.tree.provenance import PlaceableNodes


@dataclass(slots=True)
class SharedWait:
    """What a waiting sequence has asked the shared tier for."""

    lookup: SharedLookup
    pieces: Sequence[Piece]
    until: float
    """Time at which it is computed without the tier."""
    attached: list[NodeKey] | None = None
    """Nodes that the tier holds; None until that is known."""
    fetched: list[NodeKey] = field(default_factory=list)
    """Those that are being read, or have been."""
    has_ended: bool = False
    """Whether the sequence waits no longer."""


@dataclass(slots=True)
class Lease:
    """Empty while the sequence waits.

    Pieces [0, num_committed) of the prompt are nodes of the tree, in `nodes`, or will not become nodes. Pieces from
    num_committed on are not computed yet or are not kept.
    """

    prompt: SegmentedPrompt
    table: BlockTable
    pieces: tuple[Piece, ...] = ()
    """Of the prompt; empty while reuse is off."""
    watched: tuple[bytes, ...] = ()
    """Keys of its pieces, and their contents if they may be placed, each once. When such nodes gain or lose copies, the
    number of tokens to compute may change."""
    nodes: list[Node] = field(default_factory=list)
    """Nodes that this sequence uses, which are not evicted: its path, then detached nodes that it has computed."""
    num_committed: int = 0
    num_keepable: int = 2**31
    """Pieces from this index on are not kept, because a document was removed while they were computed."""
    cost_per_token: float = 0.0
    """Seconds per computed token of the prompt, by the cost model (RAGCache Eq. 3)."""
    reuse: PromptReuse | None = None
    """Report of the first admission, or of the last if chunks were placed; None before."""
    may_place: bool = True
    """Whether KV of other positions may be used."""
    most_exact: int | None = None
    """Most pieces at its beginning whose kept exact KV may be used; None: all."""
    may_see: MaySee | None = None
    """Which chunks outside the prompt such KV may have seen; None: every chunk of the tenant."""
    before: Mapping[ChunkId, tuple[ChunkId, ...]] = field(default_factory=dict)
    """The chunks before each of its chunks in its document (`Request.before`)."""
    prepares: frozenset[ChunkId] = frozenset()
    """Chunks that it computes for later prompts (`Request.prepares`); empty: it is a question."""
    placements: tuple[Placement, ...] = ()
    """Pieces whose KV was taken from another position; KV behind the first of them is not exact."""
    recompute: SelectiveRecompute | None = None
    """How the rest of a prompt with placements is computed; None once it is."""
    mass_sampler: AttentionMassSampler | None = None
    """Measures how its chunks attend to each other since it was last admitted; None: not measured."""
    is_protected: bool = False
    """Whether the tree evicts its pieces last."""
    prefetched: list[NodeKey] = field(default_factory=list)
    """Nodes read from disk while it waits."""
    shared_wait: SharedWait | None = None
    """What it asked the shared tier for while it waits."""
    _placeable: PlaceableNodes | None = None

    @property
    def placeable(self) -> PlaceableNodes:
        """Which nodes `may_see` allows to place."""
        if self._placeable is None:
            self._placeable = PlaceableNodes(self.pieces, self.may_see)
        return self._placeable

    def seen(self) -> Iterator[tuple[int, set[ChunkId]]]:
        """Yield pieces by index with the chunks each has seen: its own, and those of its placed copy; unordered."""
        for index, piece in enumerate(self.pieces):
            if piece.chunk_id is not None:
                yield index, {piece.chunk_id}
        for placement in self.placements:
            yield placement.piece_index, placement.node.seen
