"""Scanning lists of product-quantised codes by look-up tables, and its slow twin (Jegou, Douze and Schmid 2011, 4.1).

VectorLiteRAG's three stages of a search after the coarse one (2.2): tables of partial products, a scan that sums what
they say of each code, and the best of it. The same operators on a CPU and a GPU. Nothing here waits for the device
but `best`, whose results differ in length.
"""

import torch

# Q queries, P probed lists, L lists, N codes, M subquantizers, C centroids of each (256), S dimensions of one (D / M)
# W codes that the query with the most looks at, K results

CENTROIDS = 256
"""A code is one byte per subquantizer."""


def tables(queries_QD: torch.Tensor, centroids_MCS: torch.Tensor) -> torch.Tensor:
    """[M, Q, C]: the inner product of each part of each query with each centroid; one batch of matrix products."""
    num_subquantizers, _, width = centroids_MCS.shape
    parts_MQS = queries_QD.view(len(queries_QD), num_subquantizers, width).transpose(0, 1)
    return torch.bmm(parts_MQS, centroids_MCS.transpose(1, 2))


def rows_of(
    lists_QP: torch.Tensor, starts_L: torch.Tensor, sizes_L: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [Q, W] of the codes in the lists that each query probes, one list after the other, and which of its lists
    each is in. -1: no more; -1 as a list is no list.

    Args:
        starts_L, sizes_L: int64, where the codes of a list are, and how many.
        num_rows: W, at least the most that a query has.
    """
    sizes_QP = torch.where(lists_QP >= 0, sizes_L[lists_QP], 0)
    ends_QP = sizes_QP.cumsum(1)
    at_W = torch.arange(num_rows, device=lists_QP.device)
    place_QW = torch.searchsorted(ends_QP, at_W.expand(len(lists_QP), -1).contiguous(), right=True)
    is_row_QW = place_QW < lists_QP.shape[1]
    place_QW = place_QW.clamp(max=lists_QP.shape[1] - 1)
    begins_QP = starts_L[lists_QP] - (ends_QP - sizes_QP)
    return torch.where(is_row_QW, begins_QP.gather(1, place_QW) + at_W, -1), place_QW


def scan(
    tables_MQC: torch.Tensor, codes_MN: torch.Tensor, rows_QW: torch.Tensor, offsets_QW: torch.Tensor
) -> torch.Tensor:
    """Scores [Q, W]: an offset, and what the tables say of the code in each row; -inf where there is none.

    Args:
        codes_MN: uint8.
        offsets_QW: the product of query and centre of the list, where codes are of residuals.
    """
    is_row_QW = rows_QW >= 0
    rows_QW = rows_QW.clamp(min=0)
    scores_QW = offsets_QW.clone()
    for table_QC, codes_N in zip(tables_MQC, codes_MN, strict=True):
        scores_QW += table_QC.gather(1, codes_N[rows_QW].long())
    return scores_QW.masked_fill_(~is_row_QW, -torch.inf)


def best(scores_QW: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and place in `scores` of each query's best `num`, and of all that equal the last of them; by query, then
    place."""
    last_Q = scores_QW.topk(min(num, scores_QW.shape[1]), dim=1).values[:, -1:]
    return tuple((scores_QW.isfinite() & (scores_QW >= last_Q)).nonzero(as_tuple=True))  # type: ignore[return-value]
