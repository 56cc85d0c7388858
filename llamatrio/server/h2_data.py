"""DATA frames on an h2 connection, without what h2 does for each of them.

A step sends one small frame on every stream, and h2 takes it through two state machines that stay where they are, a
frame object and three debug messages: half of what HTTP/2 costs a token. Here the same bytes go to the same buffer, and
the same windows shrink, if the states are those in which nothing else would happen; otherwise h2 does it, or refuses.
This leans on names that h2 does not promise: `tests/server/test_h2_data.py` holds it against h2 itself.
"""

from __future__ import annotations

import struct
from typing import Any

from h2.connection import ConnectionState, H2Connection
from h2.stream import StreamState

_HEADER = struct.Struct(">BHBBI")
"""Length in 24 bits, type 0 (DATA), no flags, stream (RFC 9113, 4.1)."""
_SENDING = (StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE)


def send_data(connection: H2Connection, stream_id: int, data: bytes, *, end_stream: bool = False) -> None:
    """As H2Connection.send_data, for data that the windows and the frame size have room for.

    Raises:
        h2.exceptions.ProtocolError, KeyError: the stream or the connection takes no data any more.
    """
    internals: Any = connection
    stream = internals.streams.get(stream_id)
    is_plain = not end_stream and internals.state_machine.state is ConnectionState.SERVER_OPEN
    if not is_plain or stream is None or stream.state_machine.state not in _SENDING:
        connection.send_data(stream_id, data, end_stream=end_stream)
        return
    size = len(data)
    assert size <= min(stream.outbound_flow_control_window, connection.outbound_flow_control_window)
    internals._data_to_send += _HEADER.pack(size >> 16, size & 0xFFFF, 0, 0, stream_id) + data
    stream.outbound_flow_control_window -= size
    connection.outbound_flow_control_window -= size
