"""Which node hosts which partition of the data: node ids are random in every run, partitions are not."""

import time
from collections.abc import Iterable, Sequence
from logging import INFO, WARNING
from typing import Any, cast

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from strategies import wire
from strategies.exchange import exchange
from strategies.reply import last_line
from strategies.versions import versions

POLL_SECONDS = 1.0
ANSWER_SECONDS = 120.0  # a node may have to start Python and import torch before it can answer


class Hosts:
    """Asks each node once which partitions it hosts, and keeps the answer while the node is connected."""

    def __init__(self, clients: int, node_timeout: float) -> None:
        self.clients = clients
        self.node_timeout = node_timeout
        self._hosted: dict[int, list[int]] = {}  # node id -> partitions; none where it gave no good answer
        self._waited = False

    def find(self, partitions: Iterable[int], grid: Grid) -> dict[int, int]:
        """The node that hosts each of ``partitions``; partitions that no connected node hosts are left out.

        The first call waits up to ``node_timeout`` seconds until all partitions are hosted, since a run may start
        before its nodes. Later calls don't: a node that has gone is a lost reply, not a stalled run.
        """
        deadline = time.monotonic() + (0.0 if self._waited else self.node_timeout)
        self._waited = True
        while True:
            self._ask_new_nodes(grid)
            # of two nodes with one partition the newer: the older may be gone and not yet missed
            nodes = {partition: node for node, hosted in self._hosted.items() for partition in hosted}
            missing = self.clients - len(nodes)
            if not missing or time.monotonic() >= deadline:
                return {partition: nodes[partition] for partition in partitions if partition in nodes}
            log(INFO, "waiting for nodes: %s of %s partitions are not hosted", missing, self.clients)
            time.sleep(POLL_SECONDS)

    def _ask_new_nodes(self, grid: Grid) -> None:
        connected = set(grid.get_node_ids())
        self._hosted = {node: hosted for node, hosted in self._hosted.items() if node in connected}
        new = sorted(connected - self._hosted.keys())
        if not new:
            return
        self._hosted |= {node: [] for node in new}
        questions = [Message(RecordDict(), node, wire.HOSTED_QUERY) for node in new]
        for answer in exchange(grid, questions, ANSWER_SECONDS):
            if answer is None:
                continue
            node = answer.metadata.src_node_id
            try:
                config = cast(ConfigRecord, answer.content[wire.CONFIG])
                hosted = [p for p in cast(list[Any], config[wire.HOSTED]) if p in range(self.clients)]
                theirs = cast(list[Any], config[wire.VERSIONS])
            except (KeyError, TypeError, ValueError) as error:
                reason = last_line(answer.error.reason) if answer.has_error() else repr(error)
                log(WARNING, "node %s does not say what it hosts and is left out: %s", node, reason)
                continue
            del self._hosted[node]  # so that it is the newest
            self._warn_of(node, hosted, theirs)
            self._hosted[node] = hosted

    def _warn_of(self, node: int, hosted: Sequence[int], theirs: Sequence[str]) -> None:
        ours = [f"{name} {number}" for name, number in versions().items()]
        if others := [version for version in theirs if version not in ours]:
            log(
                WARNING,
                "node %s has %s, the server %s: it takes part, but the run's bits depend on it",
                node, ", ".join(map(str, others)), ", ".join(version for version in ours if version not in theirs),
            )  # fmt: skip
        for other, its in self._hosted.items():
            if both := sorted(set(its) & set(hosted)):
                log(
                    WARNING,
                    "nodes %s and %s both host partition %s, and the latter is asked; if it is not the former, started "
                    "anew, give each node a partition-id of its own",
                    other, node, both[0],
                )  # fmt: skip
