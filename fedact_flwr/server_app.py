"""The ServerApp: one run from its settings to its record."""

import secrets
import sys
from importlib.util import find_spec
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.exit import add_exit_handler
from numpy.typing import NDArray

from clients.client import exchanged_state, load_state, trainable_parameters
from clients.device import UnavailableDevice, prepare_device
from clients.diagnostics import DirectionConsistency
from clients.methods import CLIENT_METHODS
from clients.personal import is_in, personal_layers
from fedact_flwr.budget import with_budget
from fedact_flwr.checkpoint import MAY_CHANGE, Checkpoint, Checkpoints
from fedact_flwr.orphan import end_with_flower
from fedact_flwr.personal import measured, spread_over_clients, write_clients
from fedact_flwr.record import RunRecord, record_to_resume
from fedact_flwr.settings import (
    AUTO,
    SETTINGS_FILE,
    Settings,
    SettingsError,
    check_own_settings,
    check_task,
    dump,
    parse,
    read_defaults,
    read_file,
)
from strategies import STRATEGIES, RunFailed, wire
from strategies.seeds import derive_seed
from tasks import TASKS
from tasks.blocks import parameter_blocks
from tasks.split import ImpossibleSplit, label_histograms, split_indices
from tasks.task import BadData

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    end_with_flower()
    run(parse(context.run_config), grid)


def run(settings: Settings, grid: Grid) -> None:
    """Train as the settings say, over ``grid``; with ``resume``, go on with that run.

    Raises `SettingsError` before anything starts, `strategies.RunFailed` where the run can't go on.
    """
    check(settings)
    resumed = None
    if settings.resume:
        settings, resumed = to_resume(settings)
    settings, budget = with_budget(settings)
    if budget:
        log(INFO, budget)
    task = TASKS[settings.task].configured(settings)
    device = prepare_device(settings.device, settings.threads)
    if note := CLIENT_METHODS[settings.method].note(settings):
        log(WARNING, note)
    with RunRecord(settings, task, resumed.rounds if resumed else ()) as record:
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
            measured=measured(task, own_models=CLIENT_METHODS[settings.method].take_up is not None),
        )
        checkpoints = Checkpoints(record.folder, settings, task)
        # Flower ends a run that is stopped by handlers of its own, and may kill the process before they return here: it
        # joins its threads, and one that was told that the run is stopped sleeps for longer than the process has
        add_exit_handler(record.interrupt, run_before_force_exit=True)
        add_exit_handler(checkpoints.close, run_before_force_exit=True)
        if resumed:
            log(INFO, "resumed after round %s of %s", resumed.round, settings.rounds)
            checkpoints.remove_after(resumed.round)
            strategy.load_state_dict(resumed.state)
            strategy.state_folder = _clients_folder(record.folder, strategy.state_folder, settings)
            strategy.pinned = checkpoints.pinned()
            resumed = None  # what was read is the strategy's by now

        def end_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            """The strategy calls this before the first round, as round 0, and after each."""
            metrics = {}
            if evaluates and (server_round % settings.evaluate_every == 0 or server_round == settings.rounds):
                if server_round > 0:
                    load_state(model, strategy.model)
                metrics = task.evaluate(model, test)
            if strategy.personal:
                metrics = metrics | spread_over_clients(strategy.personal, task)
                write_clients(record.folder, server_round, strategy.personal)
            record.write_round({"round": server_round} | strategy.round_metrics | metrics, strategy.failed)
            if checkpoints.after_round(Checkpoint(strategy.state_dict(), list(record.rounds), dump(settings))):
                strategy.pinned = checkpoints.pinned()
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
            checkpoints.close()
            ending = isinstance(sys.exception(), SystemExit)  # Flower kills this process soon; a checkpoint has it all
            if strategy.model and not (ending and settings.checkpoint_every):
                # of a run that was cut short, the model of its last good round
                load_state(model, strategy.model)
                record.write_model(model)


def to_resume(settings: Settings) -> tuple[Settings, Checkpoint]:
    """The settings of the run that ``resume`` names, with what has changed and may, and its newest good checkpoint.

    Raises `SettingsError` where there is none, or where settings have changed that may not.
    """
    record = record_to_resume(settings)
    before = parse(read_defaults() | read_file(record / SETTINGS_FILE))
    old, new = dump(before), dump(settings)
    for key in old:
        if key not in MAY_CHANGE and _here(key, old[key]) != _here(key, new[key]):
            raise SettingsError(
                f"{key} = {new[key]!r}: the run that is to be resumed has {old[key]!r}, which is what is allowed; "
                f"what may change is {', '.join(MAY_CHANGE)}"
            )
    if settings.rounds < before.rounds:
        raise SettingsError(
            f"rounds = {settings.rounds}: the run that is to be resumed has {before.rounds}; allowed is at least that"
        )
    checkpoint = Checkpoints(record, before, TASKS[settings.task].configured(settings)).newest()
    if checkpoint is None:
        raise SettingsError(f"resume = {settings.resume!r}: it has no checkpoint that can be used; the log says why")
    _clients_folder(record, checkpoint.state["state_folder"], settings)
    changes = {key: getattr(settings, key) for key in MAY_CHANGE}
    return before.model_copy(update=changes | {"resume": str(record)}), checkpoint


def _here(key: str, value: Any) -> Any:
    """What "auto" stands for on this machine, where a device is meant."""
    return prepare_device(value, 1).type if key == "device" and value == AUTO else value


def _clients_folder(record: Path, folder: str, settings: Settings) -> str:
    """Where clients find what they keep: in the record, if it lies there, which may have been moved since."""
    kept = Path(folder).name
    if not (record / kept).is_dir():
        return folder  # on the nodes
    if Path(settings.output).expanduser().resolve() != record.parent:
        raise SettingsError(
            f"output = {settings.output!r}: clients keep their state in the record; allowed is {str(record.parent)!r}"
        )
    return f"{record.name}/{kept}"


def check(settings: Settings) -> None:
    """What only the machine and the data can tell about the settings. Raises `SettingsError`."""
    check_own_settings(settings)
    # a folder of that name, such as W&B makes, can be imported too, but has no origin
    if missing := [name for name in settings.sinks if getattr(find_spec(name), "origin", None) is None]:
        raise SettingsError(
            f"metrics_to = {settings.metrics_to!r}: it needs packages that are not installed, {', '.join(missing)}; "
            f"see the optional dependencies in pyproject.toml"
        )
    own_data = settings.split == "nodes"  # the nodes check theirs
    check_task(settings, train=not own_data, test=settings.evaluate_every > 0)
    if settings.personal_layers != AUTO:
        _check_layers(settings)
    try:
        prepare_device(settings.device, settings.threads)
        if not own_data:
            client_labels(settings)
    except (UnavailableDevice, ImpossibleSplit) as error:
        raise SettingsError(str(error)) from None


def _check_layers(settings: Settings) -> None:
    try:
        model = TASKS[settings.task].configured(settings).make_model(seed=0)
    except BadData as error:
        raise SettingsError(f"{error.key} = {getattr(settings, error.key)!r}: {error}") from None
    names = [name for name, _ in trainable_parameters(model)]
    for layer in personal_layers(settings, names):
        if not any(is_in(name, [layer]) for name in names):
            modules = dict.fromkeys(name.split(".")[0] for name in names)
            raise SettingsError(
                f"personal_layers = {settings.personal_layers!r}: the model has no parameter {layer!r} or below; "
                f"allowed are {', '.join(modules)}, names below these, or {AUTO!r}"
            )


def client_labels(settings: Settings) -> NDArray:
    """How many examples of each class each client has, shape (clients, classes).

    Raises `tasks.task.BadData` and `tasks.split.ImpossibleSplit`.
    """
    if settings.split == "nodes":
        raise ImpossibleSplit('split = "nodes": each node has data of its own, and it alone knows which')
    labels = TASKS[settings.task].configured(settings).train_labels()
    return label_histograms(split_indices(settings, labels, derive_seed(settings.seed, "split")), labels)
