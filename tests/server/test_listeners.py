"""What the server listens on: all addresses of a host, on one port."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.operation.listeners import bound
from hamburger.server.serve import uvicorn_config
from real_server import free_port
from serving import serving, until

FIRST, SECOND, NOT_HERE = "127.0.0.1", "127.0.0.2", "192.0.2.1"  # the last is of RFC 5737, which nobody has


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a host's name resolves to."""
    addresses = [FIRST, SECOND]

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return addresses


def names(listeners: list[socket.socket]) -> list[tuple[str, int]]:
    return [listener.getsockname()[:2] for listener in listeners]


@pytest.mark.parametrize("is_free_port", [True, False])
def test_all_addresses_of_a_host_are_bound_on_one_port(resolved: list[str], is_free_port: bool) -> None:
    resolved.append(FIRST)  # files of hosts name an address twice
    asked = 0 if is_free_port else free_port()
    with bound("name", asked) as listeners:
        (_, port), _ = names(listeners)
        assert names(listeners) == [(FIRST, port), (SECOND, port)]
        assert port > 0
        assert asked in (0, port)
    assert [listener.fileno() for listener in listeners] == [-1, -1]


def test_a_free_port_is_free_on_all_of_them(resolved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Taken(socket.socket):
        def bind(self, address: Any) -> None:
            if address[0] == SECOND and len(taken) < 3:
                taken.append(address[1])
                raise OSError(98, "Address already in use")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Taken)
    with bound("name", 0) as listeners:
        (_, first), (_, second) = names(listeners)
    assert first == second
    assert len(taken) == 3
    taken.clear()
    with pytest.raises(
        SettingsError, match=r"cannot listen on name \(127.0.0.2\) port \d+: Address already in use\. Choose"
    ):
        bound("name", free_port()).__enter__()
    assert len(taken) == 1  # the port that was asked for, and no other


@pytest.mark.parametrize("addresses", [[NOT_HERE, FIRST], [FIRST, NOT_HERE]])
def test_an_address_that_this_machine_lacks_is_left_out_unless_it_is_the_only_one(
    resolved: list[str], addresses: list[str]
) -> None:
    resolved[:] = addresses
    with bound("name", 0) as listeners:
        assert [name for name, _ in names(listeners)] == [FIRST]
    resolved[:] = [NOT_HERE]
    with pytest.raises(
        SettingsError, match=r"cannot listen on name \(192.0.2.1\) .* Give an address of this machine as --host\."
    ):
        bound("name", 0).__enter__()


def test_ipv6_beside_ipv4_leaves_ipv4_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("This machine has no IPv6.")
    both = [(socket.AF_INET6, ("::", 0, 0, 0)), (socket.AF_INET, ("0.0.0.0", 0))]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(family, 1, 6, "", address) for family, address in both]
    )
    with bound("name", 0) as listeners:
        (_, first), (_, second) = names(listeners)
        assert first == second
    both.pop()
    with bound("::", 0) as [listener]:  # alone it takes both
        assert listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 0


async def test_what_is_written_leaves_at_once(resolved: list[str]) -> None:
    """Without TCP_NODELAY the system holds a body, or a stream's next event, until the client has said that it has what
    came before, which clients put off for 40 ms. asyncio sets it for sockets that say that they are TCP's."""
    settings, connected = list[int](), asyncio.Event()

    def connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        settings.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()
        connected.set()

    with bound("name", 0) as listeners:
        for listener, (address, port) in zip(listeners, names(listeners), strict=True):
            async with await asyncio.start_server(connection, sock=listener.dup()):
                connected.clear()
                _, writer = await asyncio.open_connection(address, port)
                await connected.wait()
                writer.close()
    assert len(settings) == 2
    assert all(settings)


async def test_a_client_is_served_on_each_address(resolved: list[str]) -> None:
    async with serving() as served:
        with bound("name", 0) as listeners:
            server = uvicorn.Server(uvicorn_config(served.app, ServeSettings(), lambda *error: None))
            task = asyncio.create_task(server.serve(sockets=listeners))
            await until(lambda: server.started)
            for address, port in names(listeners):
                async with httpx.AsyncClient() as client:
                    assert (await client.get(f"http://{address}:{port}/health")).status_code == 200
            server.should_exit = True
            await task
