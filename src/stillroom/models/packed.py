"""Input of the decoder for one step: tokens packed back to back, and the slots of their keys and values."""

from collections.abc import Callable

import torch

from stillroom.ops.attention import AttentionPlan, AttentionSpan, spans_of_rows
from stillroom.ops.device_attention import DevicePlan
from stillroom.ops.transfer import to_device

# T packed tokens, B rows whose hidden states are wanted, S slots, G key/value heads, D head dimension

LayerKV = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Returns K and V of a layer, each [S, G, D], written and read by slot."""


class PackedInput:
    """Tokens of all sequences of a step, back to back."""

    def __init__(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        spans: list[AttentionSpan] | DevicePlan,
        wanted: list[int],
    ) -> None:
        """
        Args:
            slots_T: slot where each token's K and V are written.
            spans: the sequences in order; or a plan on the device, for which all rows must be wanted.
            wanted: rows whose hidden states are wanted, ascending; the last layer computes only these.
        """
        self.token_ids_T, self.positions_T, self.slots_T = token_ids_T, positions_T, slots_T
        self.plan = spans if isinstance(spans, DevicePlan) else AttentionPlan(spans)
        self.wanted_B = to_device(wanted, token_ids_T.device)
        self.last_plan = self.plan
        if len(wanted) < token_ids_T.shape[0]:
            assert not isinstance(spans, DevicePlan), "a plan on the device is for all rows"
            self.last_plan = AttentionPlan(spans_of_rows(spans, wanted))
