"""Scans lists of product-quantised codes with look-up tables (Jegou, Douze and Schmid 2011, 4.1).

VectorLiteRAG's three stages of a search after the coarse one (2.2): tables of partial products, a scan that sums their
entries for each code, and the selection of the best. The operators run on a CPU and a GPU. Only `best` waits for the
device, because its results differ in length.
"""

import torch

# Q queries, P probed lists, L lists, N codes, M subquantizers, C centroids of each (256), S dimensions of one (D / M)
# W codes of the query with most, K results

CENTROIDS = 256
"""Centroids per subquantizer: a code has one byte for each."""


def tables(queries_QD: torch.Tensor, centroids_MCS: torch.Tensor) -> torch.Tensor:
    """Return [M, Q, C]: the inner product of each part of each query with each centroid."""
    num_subquantizers, _, width = centroids_MCS.shape
    parts_MQS = queries_QD.view(len(queries_QD), num_subquantizers, width).transpose(0, 1)
    return torch.bmm(parts_MQS, centroids_MCS.transpose(1, 2))


def rows_of(
    lists_QP: torch.Tensor, starts_L: torch.Tensor, sizes_L: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [Q, W] of the codes in each query's probed lists, list after list, and the list of each row.

    Args:
        lists_QP: probed lists; -1 is no list.
        starts_L, sizes_L: int64, first row and number of codes of each list.
        num_rows: W, at least the most codes of a query.

    Returns:
        Rows, padded with -1, and the index in `lists_QP` of each row's list.
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
    """Return scores [Q, W]: an offset plus the tables' entries for the code of each row; -inf for row -1.

    Args:
        codes_MN: uint8.
        offsets_QW: product of the query and the list's centre, for codes of residuals.
    """
    is_row_QW = rows_QW >= 0
    rows_QW = rows_QW.clamp(min=0)
    scores_QW = offsets_QW.clone()
    for table_QC, codes_N in zip(tables_MQC, codes_MN, strict=True):
        scores_QW += table_QC.gather(1, codes_N[rows_QW].long())
    return scores_QW.masked_fill_(~is_row_QW, -torch.inf)


def best(scores_QW: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and column of each query's best `num` scores, and of all ties with the last of them, in order."""
    last_Q = scores_QW.topk(min(num, scores_QW.shape[1]), dim=1).values[:, -1:]
    return tuple((scores_QW.isfinite() & (scores_QW >= last_Q)).nonzero(as_tuple=True))  # type: ignore[return-value]
