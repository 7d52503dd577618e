"""How many examples a property test tries."""

from hypothesis import settings


def most_examples(number: int) -> int:
    """A number of examples, or a quarter of it under the profile `quick` of `make test`, whose runs draw others each
    time; for `settings(max_examples=...)`, which a profile does not change."""
    return max(1, number // 4) if settings.get_current_profile_name() == "quick" else number
