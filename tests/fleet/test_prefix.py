"""Tests of the gateway's knowledge of the replicas' prefix caches."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llmops.gateway.routing.placement.prefix_index import PrefixIndex, tenant_cache_salt

REPLICAS = st.sampled_from(["a", "b", "c"])
HASHES = st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True)


def names(index: PrefixIndex, hashes: list[int]) -> list[tuple[int, list[str]]]:
    return [(blocks, sorted(index.names(bits))) for blocks, bits in index.held(hashes)]


class Caches(RuleBasedStateMachine):
    """The index beside plain sets, with room for all."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(entries=1000)
        self.sets: dict[str, set[int]] = {"a": set(), "b": set(), "c": set()}

    @rule(replica=REPLICAS, hashes=HASHES)
    def store(self, replica: str, hashes: list[int]) -> None:
        self.index.store(replica, hashes)
        self.sets[replica] |= set(hashes)

    @rule(replica=REPLICAS, hashes=HASHES)
    def remove(self, replica: str, hashes: list[int]) -> None:
        self.index.remove(replica, hashes)
        self.sets[replica] -= set(hashes)

    @rule(replica=REPLICAS)
    def forget(self, replica: str) -> None:
        self.index.forget(replica)
        self.sets[replica] = set()

    @rule(hashes=HASHES)
    def look(self, hashes: list[int]) -> None:
        def depth(known: set[int]) -> int:
            return next((at for at, name in enumerate(hashes) if name not in known), len(hashes))

        depths = {name: depth(known) for name, known in self.sets.items()}
        found = {name: blocks for blocks, some in names(self.index, hashes) for name in some}
        assert found == {name: blocks for name, blocks in depths.items() if blocks}

    @invariant()
    def each_block_is_where_it_is(self) -> None:
        for block in range(1, 13):
            held = sorted(name for name, known in self.sets.items() if block in known)
            assert names(self.index, [block]) == ([(1, held)] if held else [])

    @invariant()
    def longest_first(self) -> None:
        depths = [blocks for blocks, _ in self.index.held([1, 2, 3, 4])]
        assert depths == sorted(depths, reverse=True)


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_what_is_used_stays_and_the_rest_makes_room() -> None:
    index = PrefixIndex(entries=100)
    index.store("a", [1, 2, 3])
    for start in range(100, 10_000, 10):
        index.store("b", range(start, start + 10))
        assert names(index, [1, 2, 3]) == [(3, ["a"])]
    assert len(index) <= 120
    assert index.held([100]) == []


@given(st.lists(st.tuples(REPLICAS, st.booleans()), max_size=60))
def test_a_replica_that_comes_back_has_none_of_what_its_number_had(happened: list[tuple[str, bool]]) -> None:
    index = PrefixIndex(entries=8)
    for at, (replica, leaves) in enumerate(happened):
        if leaves:
            index.forget(replica)
            assert all(replica not in some for _, some in names(index, [1, 2]))
        else:
            index.store(replica, [1, 2])
            index.store(replica, [100 + 3 * at, 101 + 3 * at, 102 + 3 * at])
    assert index.bit("a") < 1 << 32


def test_tenants_have_salts_of_their_own_and_nobody_has_none() -> None:
    assert tenant_cache_salt("") == 0
    assert len({tenant_cache_salt("acme"), tenant_cache_salt("globex"), 0}) == 3


def test_of_a_replica_that_does_not_report_the_blocks_that_were_used_last_are_known() -> None:
    index = PrefixIndex(entries=1000)
    index.limit("a", 4)
    index.store("a", [1, 2, 3])
    index.store("b", [1, 2, 3])
    index.store("a", [7])
    index.store("a", [1, 2])
    # the end of a prompt is given up before its beginning, and what is used again stays
    index.store("a", [8])
    assert (names(index, [1, 2, 3]), names(index, [7])) == ([(3, ["b"]), (2, ["a"])], [(1, ["a"])])
    index.limit("a", 1)
    assert (names(index, [8]), names(index, [1])) == ([(1, ["a"])], [(1, ["b"])])
