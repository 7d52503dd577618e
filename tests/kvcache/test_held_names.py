"""A reader of the log knows exactly what the tree holds, whenever it asks and however much it has missed."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.kv import Tier
from stillroom.kvcache.held_names import HeldChanges, HeldNames
from tests.examples import most_examples


class Names:
    """Stands for the tree: names with tiers, changed by the test."""

    def __init__(self) -> None:
        self.tiers: dict[bytes, Tier] = {}
        self.changed: set[bytes] = set()

    def __iter__(self) -> object:
        return iter(())

    def watch_changes(self) -> set[bytes]:
        return self.changed

    def tier_of(self, name: bytes, *, only_prepared: bool = False) -> Tier | None:
        return self.tiers.get(name)

    def set(self, name: bytes, tier: Tier | None) -> None:
        self.changed.add(name)
        self.tiers.pop(name, None)
        if tier is not None:
            self.tiers[name] = tier


class Reader:
    def __init__(self) -> None:
        self.sequence = 0
        self.known: dict[bytes, Tier] = {}
        self.num_all = 0

    def ask(self, log: HeldNames) -> None:
        found = log.since(self.sequence)
        self.num_all += found.is_all
        if found.is_all:
            self.known = {}
        for name, tier in found.tiers.items():
            assert not (found.is_all and tier is None)
            self.known.pop(name, None)
            if tier is not None:
                self.known[name] = tier
        self.sequence = found.sequence


CHANGES = st.tuples(st.integers(0, 7), st.none() | st.sampled_from([Tier.DEVICE, Tier.DISK]))
ACTS = st.lists(CHANGES | st.sampled_from(["read", "a asks", "b asks"]), max_size=60)


@given(ACTS, st.integers(0, 4))
@settings(max_examples=most_examples(200))
def test_every_reader_knows_what_is_held_after_it_asked(acts: Sequence[object], max_lost: int) -> None:
    names, readers = Names(), {"a asks": Reader(), "b asks": Reader()}
    log = HeldNames(names, max_lost=max_lost)  # type: ignore[arg-type]
    as_read: dict[bytes, Tier] = {}
    for act in acts:
        if isinstance(act, tuple):
            names.set(bytes([act[0]]), act[1])
        elif act == "read":
            log.read()
            as_read = dict(names.tiers)
        else:
            readers[str(act)].ask(log)
            assert readers[str(act)].known == as_read


def test_a_reader_that_keeps_up_gets_each_change_once_and_never_everything_again() -> None:
    names, reader = Names(), Reader()
    log = HeldNames(names, max_lost=2)  # type: ignore[arg-type]
    names.set(b"x", Tier.DEVICE)
    log.read()
    reader.ask(log)
    assert reader.num_all == 1
    for number in range(20):
        names.set(bytes([number]), Tier.HOST)
        names.set(bytes([number - 1 if number else 99]), None)
        log.read()
        assert len(log.since(reader.sequence).tiers) <= 2
        reader.ask(log)
        assert reader.known == names.tiers
    assert reader.num_all == 1
    assert log.since(reader.sequence).tiers == {}
    assert log.since(10**9).is_all and log.since(1).is_all, "an unknown and an old number"


def test_a_name_that_comes_and_goes_between_two_reads_is_not_told() -> None:
    names = Names()
    log = HeldNames(names)  # type: ignore[arg-type]
    names.set(b"y", Tier.DEVICE)
    log.read()
    sequence = log.since(0).sequence
    names.set(b"x", Tier.DEVICE)
    names.set(b"x", None)
    names.set(b"y", Tier.HOST)
    names.set(b"y", Tier.DEVICE)
    log.read()
    assert log.since(sequence) == HeldChanges(sequence, False, {})
