"""What we send past h2 is what h2 would have sent, and it knows of it."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatrio.server.h2_data import send_data

Connection = h2.connection.H2Connection


def connected(n_streams: int, *, is_request_over: bool = True) -> tuple[Connection, Connection]:
    """A client and a server that has sent the heads of its responses."""
    client = Connection(h2.config.H2Configuration(client_side=True))
    server = Connection(h2.config.H2Configuration(client_side=False))
    client.initiate_connection()
    server.initiate_connection()
    for i in range(n_streams):
        head = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
        client.send_headers(2 * i + 1, head, end_stream=is_request_over)
    server.receive_data(client.data_to_send())
    for i in range(n_streams):
        server.send_headers(2 * i + 1, [(":status", "200")])
    client.receive_data(server.data_to_send())
    return client, server


@given(
    pieces=st.lists(st.tuples(st.sampled_from([1, 3, 5]), st.binary(max_size=300)), max_size=20),
    is_request_over=st.booleans(),
)
def test_the_bytes_and_the_windows_are_those_of_h2(pieces: list[tuple[int, bytes]], is_request_over: bool) -> None:
    (_, ours), (client, theirs) = (connected(3, is_request_over=is_request_over) for _ in range(2))
    for stream_id, data in pieces:
        send_data(ours, stream_id, data)
        theirs.send_data(stream_id, data)
    for stream_id in (1, 3, 5):
        assert ours.local_flow_control_window(stream_id) == theirs.local_flow_control_window(stream_id)
        send_data(ours, stream_id, b"end", end_stream=True)
        theirs.send_data(stream_id, b"end", end_stream=True)
    sent = ours.data_to_send()
    assert sent == theirs.data_to_send()
    received = {1: b"", 3: b"", 5: b""}
    for event in client.receive_data(sent):
        if isinstance(event, h2.events.DataReceived):
            received[event.stream_id] += event.data
    for stream_id, whole in received.items():
        assert whole == b"".join(data for id, data in pieces if id == stream_id) + b"end"


def test_a_frame_longer_than_16_bits_has_the_right_length() -> None:
    client, server = connected(1)
    client.update_settings({h2.settings.SettingCodes.MAX_FRAME_SIZE: 1 << 18})
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
    client.increment_flow_control_window(1 << 20)
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())  # the settings are acknowledged
    send_data(server, 1, b"x" * 70_000)
    (event,) = (e for e in client.receive_data(server.data_to_send()) if isinstance(e, h2.events.DataReceived))
    assert len(event.data) == 70_000


@pytest.mark.parametrize("ending", ["reset by the peer", "reset by us", "ended", "goodbye", "never opened"])
def test_what_takes_no_data_refuses_as_h2_does(ending: str) -> None:
    client, server = connected(1)
    stream_id = 1
    match ending:
        case "reset by the peer":
            client.reset_stream(1)
            server.receive_data(client.data_to_send())
        case "reset by us":
            server.reset_stream(1)
        case "ended":
            server.end_stream(1)
        case "goodbye":
            server.close_connection()
        case _:
            stream_id = 9
    server.data_to_send()
    with pytest.raises((h2.exceptions.ProtocolError, KeyError)):
        send_data(server, stream_id, b"more")
    assert not server.data_to_send()
