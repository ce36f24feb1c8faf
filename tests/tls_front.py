"""TLS in front of a server that has none: a real handshake ends here, and the bytes go on."""

import asyncio
import ssl
import threading
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.certificates import Certificate

_CHUNK_BYTES = 1 << 16


class TlsFront:
    """Listens on 127.0.0.1:`port`. With `client_cafile` only clients with a certificate of that authority get in."""

    def __init__(self, host: str, port: int, certificate: Certificate, client_cafile: Path | None = None) -> None:
        self._target = (host, port)
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_cafile)
        self._context.load_cert_chain(certificate.certificate, certificate.key)
        self._context.verify_mode = ssl.CERT_REQUIRED if client_cafile else ssl.CERT_NONE
        self.port = 0
        self.versions: set[str | None] = set()  # of the protocol, of the connections that got through
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context))
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.versions.add(writer.get_extra_info("ssl_object").version())
        with suppress(OSError):
            inner_reader, inner_writer = await asyncio.open_connection(*self._target)
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
