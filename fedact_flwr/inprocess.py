"""Flower's apps in one process: no SuperLink, no Ray; a client runs when its reply is asked for."""

from collections.abc import Iterable, Mapping
from logging import ERROR
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RUN_ID = 1
SERVER_NODE_ID = 1
CLIENT_FAILED = 0  # Flower's error code for a failure that it does not know better


class InProcessGrid(Grid):
    """A grid of ``nodes`` virtual nodes that call ``client_app`` one after another, in the caller's thread.

    Contexts live as long as the grid, one per node, as on a SuperNode.
    """

    def __init__(self, client_app: ClientApp, nodes: int, run_config: Mapping[str, Any]) -> None:
        # Flower's Message takes its identity from the process, which the SuperLink sets otherwise
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, SERVER_NODE_ID, 1
        self._client_app = client_app
        self._unanswered: dict[str, Message] = {}
        self._contexts = {
            SERVER_NODE_ID + 1 + i: Context(
                run_id=RUN_ID,
                node_id=SERVER_NODE_ID + 1 + i,
                node_config=UserConfig({"partition-id": i, "num-partitions": nodes}),
                state=RecordDict(),
                run_config=UserConfig(run_config),
            )
            for i in range(nodes)
        }

    def set_run(self, run: Run) -> None:
        """There is one run."""

    @property
    def run(self) -> Run:
        return Run.create_empty(RUN_ID)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        new = {str(uuid4()): message for message in messages}
        for message_id, message in new.items():
            message.metadata.__dict__["_message_id"] = message_id
        self._unanswered |= new
        return list(new)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the clients; an exception in one becomes an error reply, as in Flower."""
        return [self._answer(self._unanswered.pop(i)) for i in message_ids if i in self._unanswered]

    def _answer(self, message: Message) -> Message:
        try:
            return self._client_app(message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:
            log(ERROR, "the client failed", exc_info=error)
            return Message(Error(CLIENT_FAILED, f"{type(error).__name__}: {error}"), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def run_inprocess(server_app: ServerApp, client_app: ClientApp, nodes: int, run_config: Mapping[str, Any]) -> None:
    """Run both apps to the end in this thread. What the ServerApp raises, this raises."""
    grid = InProcessGrid(client_app, nodes, run_config)
    context = Context(
        run_id=RUN_ID,
        node_id=SERVER_NODE_ID,
        node_config=UserConfig(),
        state=RecordDict(),
        run_config=UserConfig(run_config),
    )
    server_app(grid, context)
