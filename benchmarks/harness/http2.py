"""An HTTP/2 client that can misbehave: it sends parts of messages and reads as it likes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

PSEUDO_HEADERS = ((":method", "POST"), (":scheme", "http"), (":authority", "test"))
HEADERS = (("te", "trailers"), ("content-type", "application/grpc"))


class Connection:
    """An HTTP/2 connection to a gRPC server.

    Attributes:
        ended: Trailers of the streams that the server has ended.
        num_received: Bytes that have arrived on each stream.
        is_closed: Whether the server has closed the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.ended: dict[int, dict[str, str]] = {}
        self.num_received: dict[int, int] = {}
        self.is_closed = False
        self._reader = reader
        self._writer = writer
        self._event = asyncio.Event()
        self._trailers: dict[int, dict[str, str]] = {}

    def open(self, path: str) -> int:
        """Start a call and return its stream."""
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, [*PSEUDO_HEADERS, (":path", path), *HEADERS])
        self._flush()
        return stream

    async def upload(self, stream: int, data: bytes, *, is_end: bool = False) -> int:
        """Send ``data`` as far as the server's windows allow, and return the number of bytes sent.

        It is smaller than ``data`` if the server ends the stream.

        Raises:
            ConnectionError: The server closed the connection.
        """
        num_sent = 0
        while num_sent < len(data) and stream not in self.ended:
            try:
                room = self.h2.local_flow_control_window(stream)
            except h2.exceptions.StreamClosedError:
                break
            size = min(room, self.h2.max_outbound_frame_size, len(data) - num_sent)
            if size <= 0:
                await self._next_event()
                continue
            self.h2.send_data(stream, data[num_sent : num_sent + size])
            num_sent += size
            self._flush()
            await self._writer.drain()
        if is_end and stream not in self.ended:
            self.h2.end_stream(stream)
            self._flush()
        return num_sent

    async def wait_ended(self, stream: int) -> dict[str, str]:
        """Wait until the server ends a stream and return its trailers.

        Raises:
            ConnectionError: The server closed the connection.
        """
        while stream not in self.ended:
            await self._next_event()
        return self.ended[stream]

    def allow(self, stream: int, num_bytes: int) -> None:
        """Let the server send ``num_bytes`` more on a stream."""
        with suppress(h2.exceptions.StreamClosedError):
            self.h2.increment_flow_control_window(num_bytes, stream)
            self._flush()

    async def run(self) -> None:
        """Receive until the connection ends."""
        try:
            while data := await self._reader.read(65536):
                for event in self.h2.receive_data(data):
                    self._note(event)
                self._flush()
        finally:
            self.is_closed = True
            self._event.set()

    async def _next_event(self) -> None:
        if self.is_closed:
            raise ConnectionResetError("the server closed the connection")
        self._event.clear()
        await self._event.wait()

    def _note(self, event: h2.events.Event) -> None:
        self._event.set()
        match event:
            case h2.events.DataReceived(stream_id=stream, flow_controlled_length=length):
                self.num_received[stream] = self.num_received.get(stream, 0) + length
                self.h2.increment_flow_control_window(length)  # reopen only the connection's window
            case h2.events.ResponseReceived(stream_id=stream, headers=headers):
                self._trailers[stream] = {str(name): str(value) for name, value in headers}
            case h2.events.TrailersReceived(stream_id=stream, headers=headers):
                self._trailers[stream] = {str(name): str(value) for name, value in headers}
            case h2.events.StreamEnded(stream_id=stream) | h2.events.StreamReset(stream_id=stream):
                self.ended[stream] = self._trailers.get(stream, {})

    def _flush(self) -> None:
        self._writer.write(self.h2.data_to_send())


@asynccontextmanager
async def connection(address: str, stream_window: int = 65535) -> AsyncIterator[Connection]:
    """Connect to a server, which may send ``stream_window`` bytes on a stream until ``allow``."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    made = Connection(reader, writer)
    made.h2.initiate_connection()
    window: dict[h2.settings.SettingCodes | int, int] = {
        h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: stream_window
    }
    made.h2.update_settings(window)
    made._flush()
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        writer.transport.abort()
