"""The ServerApp: one run from its settings to its record."""

import secrets
from importlib.util import find_spec
from logging import INFO, WARNING

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from clients.client import exchanged_state, load_state, trainable_parameters
from clients.device import UnavailableDevice, prepare_device
from clients.diagnostics import DirectionConsistency
from clients.methods import CLIENT_METHODS
from fedact_flwr.budget import with_budget
from fedact_flwr.record import RunRecord
from fedact_flwr.settings import Settings, SettingsError, check_own_settings, check_task, parse
from strategies import STRATEGIES, RunFailed, wire
from strategies.seeds import derive_seed
from tasks import TASKS
from tasks.blocks import parameter_blocks
from tasks.split import ImpossibleSplit, label_histograms, split_indices

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    run(parse(context.run_config), grid)


def run(settings: Settings, grid: Grid) -> None:
    """Train as the settings say, over ``grid``.

    Raises `SettingsError` before anything starts, `strategies.RunFailed` where the run can't go on.
    """
    check(settings)
    settings, budget = with_budget(settings)
    if budget:
        log(INFO, budget)
    task = TASKS[settings.task].configured(settings)
    device = prepare_device(settings.device, settings.threads)
    if note := CLIENT_METHODS[settings.method].note(settings):
        log(WARNING, note)
    with RunRecord(settings, task) as record:
        log(INFO, "record: %s", record.folder)
        if settings.split != "nodes":
            record.write_clients(client_labels(settings))
        model = task.make_model(derive_seed(settings.seed, "model")).to(device)
        evaluates = settings.evaluate_every > 0
        test = {name: tensor.to(device) for name, tensor in task.test_examples().items()} if evaluates else {}
        trainable = {name for name, _ in trainable_parameters(model)}
        state = exchanged_state(model)
        strategy = STRATEGIES[settings.method](
            settings,
            buffers=frozenset(state.keys() - trainable),
            diagnose=DirectionConsistency if settings.diagnostics else None,
            blocks=parameter_blocks(model),
            # beside the record where clients are on this machine; on any other no run has the same
            state_folder=f"{record.folder.name}/clients-{secrets.token_hex(4)}",
        )

        def end_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            """Flower calls this before the first round, as round 0, and after each."""
            metrics = {}
            if evaluates and (server_round % settings.evaluate_every == 0 or server_round == settings.rounds):
                if server_round > 0:
                    load_state(model, strategy.model)
                metrics = task.evaluate(model, test)
            record.write_round({"round": server_round} | strategy.round_metrics | metrics, strategy.failed)
            return MetricRecord(dict(metrics)) if metrics else None

        try:
            strategy.start(
                grid,
                wire.to_record({name: tensor.detach().cpu().numpy() for name, tensor in state.items()}),
                num_rounds=settings.rounds,
                timeout=settings.round_timeout,
                evaluate_fn=end_round,
            )
        except RunFailed:
            record.write_round(strategy.round_metrics, strategy.failed)  # of the round that was one too many
            raise
        finally:
            if strategy.model:  # of a run that was cut short, the model of its last good round
                load_state(model, strategy.model)
                record.write_model(model)


def check(settings: Settings) -> None:
    """What only the machine and the data can tell about the settings. Raises `SettingsError`."""
    check_own_settings(settings)
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise SettingsError("tensorboard = true: the package tensorboard is not installed; allowed is false")
    own_data = settings.split == "nodes"  # the nodes check theirs
    check_task(settings, train=not own_data, test=settings.evaluate_every > 0)
    try:
        prepare_device(settings.device, settings.threads)
        if not own_data:
            client_labels(settings)
    except (UnavailableDevice, ImpossibleSplit) as error:
        raise SettingsError(str(error)) from None


def client_labels(settings: Settings) -> NDArray:
    """How many examples of each class each client has, shape (clients, classes).

    Raises `tasks.task.BadData` and `tasks.split.ImpossibleSplit`.
    """
    if settings.split == "nodes":
        raise ImpossibleSplit('split = "nodes": each node has data of its own, and it alone knows which')
    labels = TASKS[settings.task].configured(settings).train_labels()
    return label_histograms(split_indices(settings, labels, derive_seed(settings.seed, "split")), labels)
