"""Tests of replica addresses: valid settings, and the results of DNS."""

import asyncio
import logging
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.errors import InputError
from llmops.gateway.replica_address import DnsAddress, ReplicaAddress, format_address, parse_replica
from llmops.gateway.routing.discovery import ADDRESS_HOLD_TIME, MAX_ADDRESSES_PER_NAME, AddressResolver, StableAddresses
from llmops.gateway.settings import GatewaySettings, load_settings

MOCK = "127.0.0.1:8001", "mock-3-tensorrt_llm"
REPLICAS = {one: (one,) for one in ("10.0.0.1:8001", "[::1]:8001")}
REPLICAS |= {"/".join(MOCK): MOCK, f"mock={'/'.join(MOCK)}": (*MOCK, "mock")}


@pytest.mark.parametrize("text", REPLICAS)
def test_what_a_replica_is_written_as(text: str) -> None:
    meant = ReplicaAddress(*REPLICAS[text])
    assert (parse_replica(text), format_address(meant)) == (meant, text)
    assert parse_replica("dns:llama-leaders:8001") == DnsAddress("llama-leaders", 8001)


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", "::1:8001", "dns:8001", "http://host:8001", "a=host:1", "h:1/"],
)
def test_what_is_no_replica_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not the address of a replica|names no engine model"):
        parse_replica(text)


def test_flags_and_environment_say_several_with_commas(monkeypatch) -> None:
    monkeypatch.setenv("LLMOPS_REPLICAS", "a:1, dns:b:2")
    assert load_settings().replicas == ["a:1", "dns:b:2"]
    assert GatewaySettings(replicas=["c:3"]).replicas == ["c:3"]
    with pytest.raises(InputError, match=r"`replicas\.1`.*'http://b' is not the address of a replica"):
        load_settings(replicas=["a:1", "http://b"])


def test_an_address_leaves_only_when_it_was_missing_for_long() -> None:
    damped = StableAddresses()
    # an empty answer says nothing
    answers = [("ab", 0.0, "ab"), ("bc", 1.0, "abc"), ("", ADDRESS_HOLD_TIME * 10, "abc")]
    for answer, now, found in (*answers, ("c", ADDRESS_HOLD_TIME, "bc"), ("c", ADDRESS_HOLD_TIME + 1, "c")):
        assert damped.update([*answer], now) == [*found]


@given(st.lists(st.lists(st.integers(0, 2000), max_size=40), max_size=60))
def test_answers_that_change_each_second_stay_bounded(answers: list[list[int]]) -> None:
    damped = StableAddresses()
    for second, answer in enumerate(answers):
        found = damped.update(map(str, answer), float(second))
        assert len(found) == len(set(found)) <= MAX_ADDRESSES_PER_NAME
        assert not answer or len(found) == MAX_ADDRESSES_PER_NAME or set(map(str, answer)) <= set(found)


async def test_dns_that_fails_leaves_the_last_known_and_says_so_once(caplog) -> None:
    answers: list = [["10.0.0.1:8001", "10.0.0.2:8001"], OSError("no such name"), [], ["10.0.0.2:8001"]]
    resolve = AsyncMock(side_effect=answers)
    places = AddressResolver([ReplicaAddress("c:1"), ReplicaAddress("c:1"), DnsAddress("llama", 8001)], resolve)
    first = [ReplicaAddress("c:1"), ReplicaAddress("10.0.0.1:8001"), ReplicaAddress("10.0.0.2:8001")]
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert await places.find() == first
    assert [record.getMessage() for record in caplog.records] == [
        "DNS has no answer for llama (no such name); the last known replicas stay in use",
        "DNS answers for llama again",
    ]


async def test_dns_that_never_answers_holds_up_nobody(monkeypatch) -> None:
    monkeypatch.setattr("llmops.gateway.routing.discovery.DNS_TIMEOUT", 0.01)

    async def hang(host: str, port: int) -> list[str]:
        return await asyncio.sleep(3600, [])

    places = AddressResolver([ReplicaAddress("c:1"), DnsAddress("llama", 8001)], hang)
    assert await places.find() == [ReplicaAddress("c:1")]
