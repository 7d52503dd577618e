"""The matcher beside its slow twin, and how many tokens the accounts propose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.scheduler.prompt_lookup import (
    LEAST_MATCHED,
    MOST_MATCHED,
    LookupAccounts,
    Proposal,
    SequenceLookup,
    find_continuation,
)

PROPOSAL = Proposal(np.arange(10, 17), 4)


def slow_twin(tokens: list[int], max_tokens: int) -> tuple[list[int], int]:
    for length in range(MOST_MATCHED, LEAST_MATCHED - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length :][:max_tokens], length
    return [], 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8))
def test_continuation_is_that_of_the_slow_twin(tokens: list[int], max_tokens: int) -> None:
    found = find_continuation(np.array(tokens), max_tokens)
    assert (found.token_ids.tolist(), found.num_matched) == slow_twin(tokens, max_tokens)


def test_longest_suffix_wins_over_a_more_recent_shorter_one() -> None:
    found = find_continuation(np.array([1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]), 2)
    assert (found.token_ids.tolist(), found.num_matched) == ([50, 9], 4)


def observe(accounts: LookupAccounts, lookup: SequenceLookup, token_ids: list[int], num_proposed: int = 0) -> None:
    lookup.proposal = PROPOSAL
    accounts.observe(lookup, num_proposed, token_ids)
    lookup.proposal = PROPOSAL


def learn(accounts: LookupAccounts, seconds_of_row: float, num_sequences: int = 1) -> None:
    for rows in range(num_sequences, num_sequences + 8):
        for _ in range(9):
            accounts.observe_step(num_sequences, rows, 1.0 + seconds_of_row * (rows - num_sequences))


def test_all_tokens_are_proposed_where_they_are_right_and_rows_are_cheap() -> None:
    accounts, lookup = LookupAccounts(), SequenceLookup()
    learn(accounts, 0.01)
    for _ in range(5):
        observe(accounts, lookup, PROPOSAL.token_ids.tolist(), 6)
    assert accounts.lengths([lookup], 100) == [7]
    assert (lookup.num_proposed, lookup.num_accepted) == (30, 30)


def test_nothing_is_proposed_where_proposals_are_wrong() -> None:
    accounts, lookup = LookupAccounts(), SequenceLookup()
    learn(accounts, 0.2)
    for _ in range(20):
        observe(accounts, lookup, [99])
    assert [accounts.lengths([lookup], 100) for _ in range(200)] == [[0]] * 200


def test_rate_rises_without_proposals_when_answer_begins_to_quote() -> None:
    accounts, lookup = LookupAccounts(), SequenceLookup()
    learn(accounts, 0.2)
    for _ in range(20):
        observe(accounts, lookup, [99])
    for _ in range(20):
        observe(accounts, lookup, [10])
    assert accounts.lengths([lookup], 100)[0] > 2
    assert accounts.num_proposed == 0


def test_expensive_rows_are_tried_again_once_in_a_while_only() -> None:
    accounts, lookup = LookupAccounts(), SequenceLookup()
    learn(accounts, 1.5)
    for _ in range(5):
        observe(accounts, lookup, PROPOSAL.token_ids.tolist(), 6)
    lengths = [accounts.lengths([lookup], 100)[0] for _ in range(640)]
    assert sum(length > 0 for length in lengths) == 10


def test_tokens_of_the_likelier_proposal_come_first_and_budget_holds() -> None:
    accounts, likely, unlikely = LookupAccounts(), SequenceLookup(), SequenceLookup()
    learn(accounts, 0.05, num_sequences=2)
    for _ in range(10):
        observe(accounts, likely, PROPOSAL.token_ids.tolist(), 6)
        observe(accounts, unlikely, [99])
    first, second = accounts.lengths([likely, unlikely], 100)
    assert first == 7 and second <= 1
    assert accounts.lengths([likely, unlikely], 3) == [3, 0]


@pytest.mark.parametrize("budget", [0, -1])
def test_nothing_is_proposed_without_budget(budget: int) -> None:
    accounts, lookup = LookupAccounts(), SequenceLookup(PROPOSAL)
    assert accounts.lengths([lookup], budget) == [0]


def test_unmeasured_steps_of_zero_seconds_leave_assumed_times() -> None:
    accounts, lookup = LookupAccounts(), SequenceLookup(PROPOSAL)
    before = accounts.lengths([lookup], 100)
    accounts.observe_step(1, 1, 0.0)
    assert accounts.lengths([lookup], 100) == before and before[0] > 0
