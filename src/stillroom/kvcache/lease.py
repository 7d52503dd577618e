"""What one sequence holds of the KV cache: its block table, and the path in the knowledge tree that it stands on."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import MaySee
from stillroom.core.reuse import PromptReuse
from stillroom.kvcache.blocks.table import BlockTable
from stillroom.kvcache.chunk_reuse.attention_sampling import AttentionMassSampler
from stillroom.kvcache.chunk_reuse.plan import Placement
from stillroom.kvcache.chunk_reuse.recompute import SelectiveRecompute
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvcache.tree.provenance import View


@dataclass(slots=True)
class Lease:
    """Empty for a sequence that waits.

    Pieces [0, num_committed) of the prompt are nodes of the tree, `nodes`, or were given up on; those from
    num_committed on are not computed yet, or nobody keeps them.
    """

    prompt: SegmentedPrompt
    table: BlockTable
    pieces: tuple[Piece, ...] = ()
    """Of the prompt; none where nothing is reused."""
    watched: tuple[bytes, ...] = ()
    """Keys of its pieces, and their contents if they may be placed: when copies of such nodes come or go, more or less
    of it may have to be computed. Each once."""
    nodes: list[Node] = field(default_factory=list)
    """Used by this sequence: neither they nor those above them are evicted. Behind the pieces that are its path come
    those that it has computed to be placed."""
    num_committed: int = 0
    num_keepable: int = 2**31
    """Pieces from here on are not handed to the tree: a document of theirs was removed meanwhile."""
    cost_per_token: float = 0.0
    """Seconds: what a computed token of the prompt costs, by the cost model (RAGCache Eq. 3)."""
    reuse: PromptReuse | None = None
    """As it was first admitted, or last if chunks were placed; None before."""
    may_place: bool = True
    """Whether KV of other places may be used."""
    may_see: MaySee | None = None
    """Of which chunks outside the prompt; None: of all of its tenant's."""
    view: View = field(init=False)
    """Which copies that leaves."""
    placements: tuple[Placement, ...] = ()
    """Pieces whose KV was taken from another place; behind the first of them nothing is exact."""
    recompute: SelectiveRecompute | None = None
    """How the prompt is completed then; None when it is."""
    mass_sampler: AttentionMassSampler | None = None
    """If it is measured how its chunks attend to each other: since it was last admitted."""
    is_protected: bool = False
    """Whether the tree was told that its pieces will be used."""
    prefetched: list[NodeKey] = field(default_factory=list)
    """Nodes that are read from disk for it while it waits."""

    def __post_init__(self) -> None:
        self.view = View(self.pieces, self.may_see)

    def seen(self) -> Iterator[tuple[int, set[ChunkId]]]:
        """Which chunks each piece has seen by itself, as text of the prompt or through a copy that was placed, by its
        index; in no order."""
        for index, piece in enumerate(self.pieces):
            if piece.chunk_id is not None:
                yield index, {piece.chunk_id}
        for placement in self.placements:
            yield placement.piece_index, placement.node.seen
