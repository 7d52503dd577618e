"""What a decoder is given for one step: tokens packed back to back, and where keys and values live."""

from collections.abc import Callable

import torch

from stillroom.ops.attention import AttentionPlan, AttentionSpan, only_rows

# T packed tokens, B rows whose hidden states are wanted, S slots, G key/value heads, D head dimension

LayerKV = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Layer index -> its K and V, each [S, G, D], to be written and read by slot."""


class PackedInput:
    """One step's tokens of all sequences, back to back."""

    def __init__(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        spans: list[AttentionSpan],
        wanted: list[int],
    ) -> None:
        """
        Args:
            slots_T: where each token's K and V are written.
            spans: the sequences, in order.
            wanted: the rows whose hidden states are wanted, ascending; the last layer computes no others.
        """
        self.token_ids_T, self.positions_T, self.slots_T = token_ids_T, positions_T, slots_T
        self.plan = AttentionPlan(spans)
        self.wanted_B = torch.tensor(wanted, dtype=torch.int64, device=token_ids_T.device)
        is_all = len(wanted) == token_ids_T.shape[0]
        self.last_plan = self.plan if is_all else AttentionPlan(only_rows(spans, wanted))
