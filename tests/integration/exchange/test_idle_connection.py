"""Between two slots the control path is idle; a new connection for each would cost every exchange a round trip."""

import queue
import socket
import time
from concurrent.futures import Future

import psutil

from torchtitan_diloco.exchange.control import IDLE_S, PEER_TIMEOUT_S, ControlServer, Outbox
from torchtitan_diloco.exchange.hedge import LINES
from torchtitan_diloco.exchange.messages import Ask, Message
from torchtitan_diloco.outer.policy import Member

PAUSE_S = 7.0  # the libraries' own limits are five seconds


def test_a_message_after_a_pause_takes_the_connection_of_the_one_before():
    assert PAUSE_S < IDLE_S
    arrived: queue.Queue[Message] = queue.Queue()
    deliver = lambda sender, message: arrived.put(message)
    server = ControlServer("127.0.0.1", 0, "run", {}, deliver, lambda member: Future())
    outbox = Outbox(Member(0, "first"), "run", PEER_TIMEOUT_S)

    def near_ports() -> set[int]:
        """Ports of this process from which it is connected to the server."""
        links = psutil.Process().net_connections("tcp")
        return {
            link.laddr.port
            for link in links
            if link.status == psutil.CONN_ESTABLISHED and link.raddr and link.raddr.port == server.port
        }

    try:
        used = []
        for round_ in range(2):
            for slot in range(2 * LINES):  # they take turns
                outbox.send(Member(1, "first"), server.url, Ask("epoch", slot))
                assert arrived.get(timeout=10) == Ask("epoch", slot)
                assert outbox.flush(10)
            used.append(near_ports())
            if round_ == 0:
                time.sleep(PAUSE_S)
        assert len(used[0]) == LINES and used[0] == used[1]
    finally:
        outbox.close()
        server.close()


def test_a_message_does_not_wait_behind_one_that_is_stuck():
    """A confirmation behind an announcement that a full link had lost came a quarter of a second late, in each slot."""
    arrived: queue.Queue[Message] = queue.Queue()

    def deliver(sender: Member, message: Message) -> None:
        arrived.put(message)

    server = ControlServer("127.0.0.1", 0, "run", {}, deliver, lambda member: Future())
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        outbox = Outbox(Member(0, "first"), "run", PEER_TIMEOUT_S)
        try:
            outbox.send(Member(1, "first"), f"http://127.0.0.1:{silent.getsockname()[1]}", Ask("epoch", 0))
            outbox.send(Member(1, "first"), server.url, Ask("epoch", 1))
            assert arrived.get(timeout=PEER_TIMEOUT_S / 2) == Ask("epoch", 1)
        finally:
            outbox.close()
            server.close()
