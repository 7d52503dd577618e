"""BERT's encoder: attention in parts."""

import pytest
import torch

from stillroom.ops import bert
from stillroom.ops.bert import BertEncoder, BertSpec
from tests.random_reader import drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_do_not_depend_on_the_rows_computed_at_a_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    spec = BertSpec(vocab_size=50, hidden_size=64, num_layers=2, num_heads=2, inner_size=96, max_positions=64)
    encoder = drawn(BertEncoder(spec), 3).to(dtype).eval()
    token_ids = torch.randint(50, (7, 64))
    is_token = torch.arange(64) < torch.randint(1, 65, (7, 1))
    found = []
    for num_rows in (1, 3, 7):
        monkeypatch.setattr(bert, "_SCORES_AT_ONCE", num_rows * 2 * 64**2)
        with torch.inference_mode():
            found.append(encoder.encode(token_ids, torch.zeros_like(token_ids), is_token))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
