"""A TCP proxy on this machine that can cut, black-hole and delay what goes through it. Any protocol."""

import socket
import threading
from contextlib import suppress
from typing import Literal, Self

Way = Literal["to_server", "from_server"]

_CHUNK_BYTES = 1 << 16


class _Pipe:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.closed = threading.Event()
        for side in (client, server):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self.closed.set()
        for side in (self.client, self.server):
            # shutdown wakes the thread that reads; close alone does not
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()


class TcpProxy:
    """Forwards 127.0.0.1:`port` to a server until told otherwise. Also a context manager.

    `cut` ends every connection and every new one at once; `cut_after` ends all once, in the middle of what
    goes through; `blackhole` accepts connections and takes what is sent, but nothing gets through either
    way; `delay` holds every piece back for a time; `resume` ends all of these, and held pieces go on.
    """

    def __init__(self, host: str, port: int, listen_port: int = 0) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", listen_port))
        self.port = int(self._listener.getsockname()[1])
        self.accepted = 0  # connections over the proxy's whole life
        self._changed = threading.Condition()  # guards the rest
        self._pipes: set[_Pipe] = set()
        self._cut = self._black = self._closed = False
        self._delay_s = 0.0
        self._cut_after: tuple[Way, int] | None = None
        self._thread = threading.Thread(target=self._accept_all, name="proxy", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        with self._changed:
            self._cut = True
            self._close_all()

    def cut_after(self, way: Way, count: int) -> None:
        """End all connections once, when `count` more bytes have gone that way (0: before the next one)."""
        with self._changed:
            self._cut_after = way, count

    def blackhole(self) -> None:
        with self._changed:
            self._black = True

    def delay(self, seconds: float) -> None:
        with self._changed:
            self._delay_s = seconds

    def resume(self) -> None:
        with self._changed:
            self._cut = self._black = False
            self._delay_s, self._cut_after = 0.0, None
            self._changed.notify_all()

    @property
    def cut_pending(self) -> bool:
        """Whether `cut_after` has not come to pass yet."""
        return self._cut_after is not None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._close_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the proxy's threads

    def _accept_all(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._cut:
                raise ConnectionRefusedError
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        pipe = _Pipe(client, server)
        with self._changed:
            self.accepted += 1
            self._pipes.add(pipe)
            if self._cut or self._closed:
                self._close_all()
        for source, target, way in ((client, server, "to_server"), (server, client, "from_server")):
            threading.Thread(target=self._pump, args=(pipe, source, target, way), daemon=True).start()

    def _pump(self, pipe: _Pipe, source: socket.socket, target: socket.socket, way: Way) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self._hold(pipe)
                target.sendall(self._allowed(data, way))
                if pipe.closed.is_set() or self._cut_now(way):
                    break
        with self._changed:
            self._pipes.discard(pipe)
        pipe.close()

    def _hold(self, pipe: _Pipe) -> None:
        """Until what was read may go on, or the connection is gone."""
        with self._changed:
            if self._delay_s:
                self._changed.wait_for(lambda: pipe.closed.is_set() or not self._delay_s, self._delay_s)
            self._changed.wait_for(lambda: pipe.closed.is_set() or not self._black)

    def _allowed(self, data: bytes, way: Way) -> bytes:
        with self._changed:
            if self._cut_after is None or self._cut_after[0] != way:
                return data
            left = self._cut_after[1]
            self._cut_after = way, max(0, left - len(data))
            return data[:left]

    def _cut_now(self, way: Way) -> bool:
        with self._changed:
            if self._cut_after != (way, 0):
                return False
            self._cut_after = None
            self._close_all()
            return True

    def _close_all(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        self._changed.notify_all()
