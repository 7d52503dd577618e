"""The heap against a sorted list, in both directions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stillroom.core.indexed_heap import IndexedHeap

KEYS = st.integers(-3, 3).map(float)  # few values, so that ties are common


class HeapMachine(RuleBasedStateMachine):
    """Random operations on a heap and on a plain list of (key, arrival, item)."""

    is_max = False

    def __init__(self) -> None:
        super().__init__()
        self.heap: IndexedHeap[str] = IndexedHeap(is_max=self.is_max)
        self.model: dict[str, tuple[float, int]] = {}
        self.arrivals = 0

    def first(self) -> str:
        sign = -1 if self.is_max else 1
        return min(self.model, key=lambda item: (sign * self.model[item][0], self.model[item][1]))

    @rule(key=KEYS)
    def push(self, key: float) -> None:
        self.arrivals += 1
        item = f"item {self.arrivals}"
        self.heap.push(item, key)
        self.model[item] = (key, self.arrivals)

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        expected = self.first()
        assert self.heap.peek() == (expected, self.model[expected][0])
        assert self.heap.pop() == (expected, self.model.pop(expected)[0])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.model)))
        assert self.heap.remove(item) == self.model.pop(item)[0]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), key=KEYS)
    def update(self, data: st.DataObject, key: float) -> None:
        item = data.draw(st.sampled_from(sorted(self.model)))
        self.heap.update(item, key)
        self.model[item] = (key, self.model[item][1])

    @invariant()
    def invariants_hold(self) -> None:
        self.heap.check_integrity()
        assert set(self.heap) == set(self.model) and len(self.heap) == len(self.model)
        assert all(self.heap.key_of(item) == key for item, (key, _) in self.model.items())


class MaxHeapMachine(HeapMachine):
    is_max = True


TestMinHeap = HeapMachine.TestCase
TestMaxHeap = MaxHeapMachine.TestCase
TestMinHeap.settings = TestMaxHeap.settings = settings(max_examples=15, stateful_step_count=40)


@given(st.lists(KEYS, max_size=50))
def test_popping_all_items_is_a_stable_sort(keys: list[float]) -> None:
    heap: IndexedHeap[int] = IndexedHeap()
    for index, key in enumerate(keys):
        heap.push(index, key)
    assert [heap.pop()[0] for _ in keys] == sorted(range(len(keys)), key=lambda index: keys[index])


def test_missing_items_raise() -> None:
    heap: IndexedHeap[str] = IndexedHeap()
    with pytest.raises(IndexError):
        heap.pop()
    with pytest.raises(KeyError):
        heap.remove("missing")
    assert "missing" not in heap
