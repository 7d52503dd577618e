"""Who is let in where there is no room left: tenants apart, each with an equal share."""

from collections import Counter


def is_below_share(tenant: str, held: Counter[str], limit: float) -> bool:
    """Whether one more leaves a tenant within an equal share of `limit` places; who holds none is, always.

    Args:
        held: places by tenant; of whom has none there is nothing in it.
    """
    num_tenants = len(held) + (tenant not in held)
    return tenant not in held or (held[tenant] + 1) * num_tenants <= limit
