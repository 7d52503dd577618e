"""What a look sees, against weights that are computed one query and one head at a time."""

import pytest
import torch

from stillroom.ops.attention import AttentionSpan
from stillroom.ops.attention_mass import attention_weights_reference
from stillroom.ops.attention_watch import AttentionWatch, mean_weights


def slow_weights(
    q_QHD: torch.Tensor, k_KGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Mean over heads."""
    return attention_weights_reference(q_QHD, k_KGD, scale, None, window, softcap).mean(0).float()


def tensors(num_queries: int, num_keys: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_queries, 6, 8, generator=generator), torch.randn(num_keys, 2, 8, generator=generator)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 20), (6, 20), (7, 7)])
def test_weights_equal_their_twin(num_queries: int, num_keys: int, window: int | None, softcap: float | None) -> None:
    q, k = tensors(num_queries, num_keys)
    found = mean_weights(q, k, 0.3, window, softcap)
    torch.testing.assert_close(found, slow_weights(q, k, 0.3, window, softcap))
    torch.testing.assert_close(found.sum(1), torch.ones(num_queries))


def test_layers_are_averaged_and_spans_kept_apart() -> None:
    context = torch.tensor([30, 4, 11, 2, 19])
    spans = [AttentionSpan(1, 3, context, 5), AttentionSpan(4, 5, slice(6, 9), 3)]
    watch, layers = AttentionWatch(spans), [tensors(6, 40, seed) for seed in range(3)]
    for q, k in layers:
        watch.see(q, k, 0.3, None, None)
    first, second = watch.shares()
    ours = torch.stack([slow_weights(q[1:3], k[context], 0.3, None, None) for q, k in layers]).mean(0)
    torch.testing.assert_close(torch.from_numpy(first), torch.stack([ours[-1], ours.mean(0)]))
    other = torch.stack([slow_weights(q[4:5], k[6:9], 0.3, None, None) for q, k in layers]).mean(0)
    torch.testing.assert_close(torch.from_numpy(second), other.expand(2, 3))
