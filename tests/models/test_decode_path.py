"""Steps of few rows in one compiled call per layer equal the decoder's general path."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stillroom.models import decode_path
from stillroom.models.decode_path import DecodePath
from stillroom.ops import block_attention
from tests.models.test_prefill_path import load, run


@pytest.fixture(autouse=True)
def kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels, even if torch is faster on this processor."""
    monkeypatch.setattr("stillroom.ops.linear.most_rows_of_kernel", lambda: 64)
    monkeypatch.setattr(block_attention, "is_faster_than_torch", lambda: True)
    monkeypatch.setattr(block_attention, "is_torch_fastest_in_bfloat16", lambda: False)


@pytest.mark.parametrize("wanted", [[19, 28, 29], [28], [], list(range(30))])
@pytest.mark.parametrize("window", [None, 8])
def test_questions_behind_kept_tokens_equal_the_general_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[int], window: int | None
) -> None:
    size = {"head_dim": 16, "hidden_size": 96, "intermediate_size": 96}
    settings: dict[str, Any] = size if window is None else {"kind": "Mistral", "sliding_window": window, **size}
    decoder = load(tmp_path, **settings)
    calls, step = [], decode_path.DecodePath.run

    def counted(path: DecodePath, x_TM: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(x_TM))
        return step(path, x_TM, *rest)

    monkeypatch.setattr(decode_path.DecodePath, "run", counted)
    hidden, store = run(decoder, wanted)
    assert calls == [30]
    monkeypatch.setattr(decoder, "_decode_path", None)
    expected, expected_store = run(decoder, wanted)
    assert hidden.shape == expected.shape
    pairs = [(hidden, expected), (store.k_LSGD, expected_store.k_LSGD), (store.v_LSGD, expected_store.v_LSGD)]
    for found, other in pairs:  # a single query of the step is rounded to bfloat16 as the others are
        assert (found.float() - other.float()).norm() <= 1e-2 * other.float().norm()


def test_several_queries_of_a_float32_model_take_the_general_path(tmp_path: Path) -> None:
    decoder = load(tmp_path, dtype="float32", head_dim=16)
    path = decoder._decode_path
    assert path is not None
    hidden, store = run(decoder, [3])
    assert hidden.shape[0] == 1
    assert not block_attention.is_supported(store.k_LSGD[0])
