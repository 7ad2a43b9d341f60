"""Which node hosts which partition of the data: node ids are random in every run, partitions are not."""

import time
from collections.abc import Iterable
from logging import INFO, WARNING

from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from strategies import wire

POLL_SECONDS = 1.0


class Hosts:
    """Asks nodes once which partitions they host, and keeps the answer while they are connected."""

    def __init__(self, node_timeout: float) -> None:
        self.node_timeout = node_timeout
        self._hosted: dict[int, tuple[int, ...]] = {}  # node id -> partitions
        self._waited = False

    def find(self, partitions: Iterable[int], grid: Grid) -> dict[int, int]:
        """The node that hosts each of ``partitions``; partitions that no connected node hosts are left out.

        The first call waits up to ``node_timeout`` seconds for nodes to connect, since a run may start before
        its nodes. Later calls never wait: a node that has gone is a lost reply, not a stalled run.
        """
        wanted = set(partitions)
        deadline = time.monotonic() + (0.0 if self._waited else self.node_timeout)
        while True:
            self._refresh(grid)
            nodes = {p: node for node, hosted in sorted(self._hosted.items()) for p in hosted if p in wanted}
            if len(nodes) == len(wanted) or time.monotonic() >= deadline:
                break
            log(INFO, "waiting for nodes that host partitions %s", sorted(wanted - nodes.keys()))
            time.sleep(POLL_SECONDS)
        self._waited = True
        return nodes

    def _refresh(self, grid: Grid) -> None:
        connected = set(grid.get_node_ids())
        self._hosted = {node: hosted for node, hosted in self._hosted.items() if node in connected}
        # sorted: the order in which nodes are asked must not depend on the set's hashing
        questions = [Message(RecordDict(), node, wire.HOSTED_QUERY) for node in sorted(connected - self._hosted.keys())]
        if not questions:
            return
        for answer in grid.send_and_receive(questions, timeout=self.node_timeout):
            node = answer.metadata.src_node_id
            if answer.has_error():
                log(WARNING, "node %s does not say what it hosts: %s", node, answer.error.reason)
                continue
            self._hosted[node] = tuple(answer.content.config_records[wire.CONFIG][wire.HOSTED])  # type: ignore[arg-type]
