import socket

import pytest

from kbatch.search.distributed_script import (
    ChiefAddress,
    RemoteChief,
    free_local_address,
    parse_address,
)


@pytest.mark.parametrize("text", ["10.0.0.1:8000", "host.example:1"])
def test_an_address_is_read(text):
    address = parse_address(text)
    assert f"{address.host}:{address.port}" == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="a host and a port"):
        parse_address(text)


def test_a_free_address_answers_once_somebody_listens():
    address = free_local_address()
    assert not address.answers
    with socket.create_server(address):
        assert address.answers
    assert not ChiefAddress("no-such-host.invalid", 1).answers


def test_a_chief_is_dead_half_a_minute_after_it_was_last_heard():
    time_s, heard = [0.0], [False]
    chief = RemoteChief(lambda: heard[0], now=lambda: time_s[0])

    def status_at(now, answers):
        time_s[0], heard[0] = now, answers
        return chief.status

    assert status_at(0, False) is None
    assert status_at(600, False) is None  # It has not started yet.
    assert status_at(700, True) is None
    assert status_at(729, False) is None
    assert status_at(731, False) == 1
    assert status_at(732, True) is None
    assert status_at(761, False) is None
