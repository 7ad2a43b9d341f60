"""All settings of a run: read from pyproject.toml, files and overrides, checked, and frozen."""

import difflib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError
from pydantic.fields import FieldInfo

from clients.local_optimizers import LOCAL_OPTIMIZERS
from clients.methods import CLIENT_METHODS
from clients.settings import LocalSettings
from fedact_flwr.sinks import SINKS
from strategies import STRATEGIES, ServerSettings, wire
from tasks import TASKS, TaskSettings
from tasks.split import SplitSettings
from tasks.task import ANY_MODEL, BadData

PROJECT = Path(__file__).resolve().parent.parent
AUTO = "auto"
SETTINGS_FILE = "settings.toml"  # in a run's record
LANGUAGE_AUTO = ("max_length", "lora_r", "lora_alpha")  # the task knows what its "auto" is
AUTO_KEYS = (
    "lr", "weight_decay", "beta1", "beta2", "server_lr", "weighting", "alpha", "gamma", "client_gpus", "finetune_lr",
    *LANGUAGE_AUTO
)  # fmt: skip


class SettingsError(ValueError):
    """A setting that can't be: one line with the key, its value and what is allowed."""


class Settings(ServerSettings, LocalSettings, SplitSettings, TaskSettings):
    """Every setting, flat: the sections that the server, the clients and the split read, and the run's own.

    pyproject.toml holds the defaults and explains each setting.
    """

    task: str
    holdout: Annotated[float, Field(ge=0, le=0.5)]
    evaluate_every: NonNegativeInt
    tokens_per_parameter: NonNegativeFloat
    client_gpus: NonNegativeFloat | None
    output: str
    name: str
    metrics_to: Annotated[
        str,
        Field(
            pattern=rf"^(({'|'.join(SINKS)})(, *({'|'.join(SINKS)}))*)?$",
            description=f'"" or any of {", ".join(SINKS)}, with commas between',
        ),
    ]
    checkpoint_every: NonNegativeInt
    checkpoints_kept: PositiveInt
    resume: str

    @property
    def sinks(self) -> list[str]:
        """The names in ``metrics_to``, each once."""
        return list(dict.fromkeys(name.strip() for name in self.metrics_to.split(",") if name))


def read_defaults() -> dict[str, Any]:
    """The table [tool.flwr.app.config] of the project's pyproject.toml. Raises `SettingsError` outside a clone."""
    path = PROJECT / "pyproject.toml"
    if not path.exists():
        raise SettingsError(f"{path}: not there; fedact runs from a clone, installed with pip install -e .")
    return dict(_config_of(path))


@cache
def _config_of(path: Path) -> Mapping[str, Any]:
    """Read once in a process: to read it takes as long as all else about a run's settings."""
    with path.open("rb") as file:
        return tomllib.load(file)["tool"]["flwr"]["app"]["config"]


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises `SettingsError`."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        hint = f" (did you mean --set {path}?)" if "=" in str(path) else ""
        raise SettingsError(f"{path}: {error.strerror}; allowed is a TOML file of settings{hint}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error


def read_override(text: str) -> tuple[str, Any]:
    """``key=value`` with a TOML value; a bare word is a string. Raises `SettingsError`."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise SettingsError(f"--set {_in_line(text)}: expected key=value")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def read_settings(files: Sequence[Path], overrides: Sequence[str], resume: Path | None = None) -> Settings:
    """Defaults, then those of the record that is resumed, then files, then overrides. Raises `SettingsError`."""
    config = read_defaults()
    for path in [resume / SETTINGS_FILE, *files] if resume else files:
        config |= read_file(path)
    config |= dict(read_override(text) for text in overrides)
    if resume:  # where it is now, and not where it was when it was written
        folder = resume.expanduser().resolve()
        config |= {"resume": str(folder), "output": str(folder.parent), "name": folder.name}
    return parse(config)


def parse(config: Mapping[str, Any]) -> Settings:
    """Check a complete run config and resolve what stands at "auto". Raises `SettingsError`."""
    fields = Settings.model_fields
    for key, value in config.items():
        if isinstance(value, dict):
            raise SettingsError(f"[{_in_line(key)}]: a table; allowed are plain keys, those in pyproject.toml")
        if key not in fields:
            raise SettingsError(
                f"{_in_line(key)} = {value!r}: no such setting{_hint(key, list(fields))}; "
                f"allowed are those in pyproject.toml"
            )
    for key, registry in (
        ("task", list(TASKS)),
        ("method", list(STRATEGIES)),
        ("local_optimizer", [AUTO, *LOCAL_OPTIMIZERS]),
    ):
        if not isinstance(config[key], str) or config[key] not in registry:
            raise SettingsError(
                f"{key} = {config[key]!r}: allowed is one of {', '.join(registry)}{_hint(str(config[key]), registry)}"
            )

    resolved = dict(config)
    for key, value in _defaults(config["task"], config["method"], config["local_optimizer"]).items():
        if resolved[key] == AUTO:
            resolved[key] = value
    for key in ("lr", "weight_decay"):
        if resolved[key] == AUTO:
            raise SettingsError(
                f"{key} = {AUTO!r}: task {config['task']!r} has no value for method {config['method']!r} or its "
                f"family; allowed is a number"
            )
    for key in ("alpha", "gamma", "client_gpus", "finetune_lr", *LANGUAGE_AUTO):
        if resolved[key] == AUTO:
            resolved[key] = None
    try:
        settings = Settings(**resolved)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        auto = f' or "{AUTO}"' if key in AUTO_KEYS else ""
        raise SettingsError(f"{key} = {config.get(key)!r}: allowed is {_allowed(fields[key])}{auto}") from None
    _check_together(settings)
    return settings


def _defaults(task: str, method: str, local_optimizer: str) -> dict[str, Any]:
    """What "auto" stands for: the task's values for the method before those for its family, before anybody's."""
    client = CLIENT_METHODS[method]
    anybody: dict[str, Any] = {
        "model": TASKS[task].models[0],
        "server_lr": STRATEGIES[method].default_server_lr,
        "weighting": STRATEGIES[method].default_weighting,
        "beta1": 0.9,
        "beta2": 0.999,
    }
    if client.local_optimizer:
        anybody["local_optimizer"] = client.local_optimizer
    for_family, for_method = (
        TASKS[task].defaults.get(key, {}) for key in (client.family_with(local_optimizer), method)
    )
    return {**anybody, **for_family, **for_method}


def dump(settings: Settings) -> dict[str, Any]:
    """The settings as a run config that `parse` takes."""
    return {key: AUTO if value is None else value for key, value in settings.model_dump().items()}


def method_settings(method: str, local_optimizer: str = AUTO) -> tuple[str, ...]:
    """The settings that the halves of a method read and not every method has."""
    return (*CLIENT_METHODS[method].settings_with(local_optimizer), *STRATEGIES[method].settings_used)


def check_own_settings(settings: Settings) -> None:
    """Refuse what was set for another method or task: it would have no effect. Raises `SettingsError`."""
    optimizers = (AUTO, *LOCAL_OPTIMIZERS)
    methods = {m: {key for o in optimizers for key in method_settings(m, o)} for m in STRATEGIES}
    who, own = settings.method, method_settings(settings.method, settings.local_optimizer)
    if "local_optimizer" in own:
        who += f" with local_optimizer = {settings.local_optimizer!r}"
    _refuse_foreign(settings, who, own, "methods", methods)
    tasks = {name: set(task.settings_used) for name, task in TASKS.items()}
    _refuse_foreign(settings, settings.task, TASKS[settings.task].settings_used, "tasks", tasks)


def check_task(settings: Settings, train: bool, test: bool) -> None:
    """Refuse a task that can't train, or be tested, with what is on this machine. Raises `SettingsError`."""
    task = TASKS[settings.task]
    if missing := [package for package in task.requires if find_spec(package) is None]:
        raise SettingsError(
            f"task = {settings.task!r}: it needs packages that are not installed, {', '.join(missing)}; "
            f"see the optional dependencies in pyproject.toml"
        )
    try:
        task.configured(settings).check(train, test)
    except BadData as error:
        raise SettingsError(f"{error.key} = {getattr(settings, error.key)!r}: {error}") from None


def _refuse_foreign(
    settings: Settings, who: str, own: Sequence[str], kind: str, owners: Mapping[str, Collection[str]]
) -> None:
    """Refuse a setting that only others of ``kind`` have and that is not at its default. ``owners`` have which ones."""
    defaults = read_defaults()
    config, untouched = dump(settings), dump(parse(defaults | {"task": settings.task, "method": settings.method}))
    for key in sorted(set().union(*owners.values()) - set(own)):
        if config[key] != untouched[key]:
            raise SettingsError(
                f"{key} = {config[key]!r}: {who} has no such setting{_hint(key, own)}; "
                f"allowed is the default, {defaults[key]!r}; "
                f"{kind} with it: {', '.join(name for name, keys in owners.items() if key in keys)}; "
                f"its own are {', '.join(own) or 'none'}"
            )


def _in_line(text: str) -> str:
    """Foreign text as part of a line: what would break it is escaped."""
    return text if text.isprintable() else repr(text)


def _hint(given: str, names: Sequence[str]) -> str:
    """The nearest of ``names``, in words, or nothing; capitals and hyphens don't count, and a part of a name does."""
    plain = given.lower().replace("-", "_")
    parts = [name for name in names if plain and (plain in name or name in plain)]
    near = [plain] if plain in names else difflib.get_close_matches(plain, names, 1, cutoff=0.7) or parts
    return f" (did you mean {near[0]}?)" if near else ""


def _check_together(s: Settings) -> None:
    """What one setting allows given another."""
    models = TASKS[s.task].models
    if s.model not in models and ANY_MODEL not in models:
        raise SettingsError(f"model = {s.model!r}: allowed with task = {s.task!r} is one of {', '.join(models)}")
    if s.clients_per_round > s.clients:
        raise SettingsError(
            f"clients_per_round = {s.clients_per_round}: allowed is 1 to {s.clients}, the number of clients"
        )
    if s.min_replies > s.clients_per_round:
        raise SettingsError(
            f"min_replies = {s.min_replies}: allowed is 1 to {s.clients_per_round}, the clients_per_round"
        )
    if s.split == "nodes" and "data" not in TASKS[s.task].settings_used:
        raise SettingsError(f"split = 'nodes': task {s.task!r} has its data built in; allowed is another task or split")
    if not s.output:
        raise SettingsError("output = '': allowed is a folder to write to")
    if s.name in ("", ".", "..") or Path(s.name).name != s.name:
        raise SettingsError(f'name = {s.name!r}: allowed is the name of a folder, without a path, or "{AUTO}"')
    if s.aggregation != "mean" and s.weighting != "uniform":
        raise SettingsError(f"weighting = {s.weighting!r}: allowed with aggregation = {s.aggregation!r} is 'uniform'")
    if s.wire_second_moment != "float32" and s.second_moment != "full":
        raise SettingsError(
            f"wire_second_moment = {s.wire_second_moment!r}: allowed with second_moment = {s.second_moment!r}, which "
            f"is a few numbers, is 'float32'"
        )
    if s.wire_delta == "int8" and s.aggregation != "mean":
        raise SettingsError(
            f"wire_delta = 'int8': rounding at random is right in the mean alone; allowed with aggregation = "
            f"{s.aggregation!r} is 'float32' or 'bfloat16'"
        )
    if s.derives_correction and wire.CORRECTION in STRATEGIES[s.method].returned:
        raise SettingsError(
            f"wire_correction = 'derived': {s.method}'s Delta_G does not follow from the model; allowed is one of "
            f"'float32', 'bfloat16', 'int8'"
        )
    if s.derives_correction and s.local_epochs:
        raise SettingsError(
            f"wire_correction = 'derived': clients that do different numbers of steps (local_epochs = "
            f"{s.local_epochs}) can't derive Delta_G; allowed is one of 'float32', 'bfloat16', 'int8'"
        )
    if s.lr_min > s.lr:
        raise SettingsError(f"lr_min = {s.lr_min}: allowed is 0 to {s.lr}, the lr")
    if s.holdout > 0 and s.min_samples < 2:
        raise SettingsError(f"min_samples = {s.min_samples}: allowed is at least 2 where holdout = {s.holdout}")
    if s.holdout == 0 and (s.client_evaluation or s.personal_every):
        asks = "client_evaluation" if s.client_evaluation else "personal_every"
        raise SettingsError(f"holdout = 0.0: {asks} needs held-out examples; allowed is above 0, to 0.5")


def _allowed(field: FieldInfo) -> str:
    """What a field takes, in words made from its type and bounds."""
    annotation = field.annotation
    options = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(option) for option in options)
    kind = next((t for t in (*options, annotation) if t in (int, float, str, bool)), None)
    if kind is None:  # Annotated[...] | None keeps its bounds inside the union
        inner = next(option for option in options if option is not type(None))
        kind, bounds = get_args(inner)[0], get_args(inner)[1:]
    else:
        bounds = tuple(field.metadata)
    if any(getattr(bound, "pattern", None) for bound in bounds):
        return field.description or "a string"
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind]
    signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most", "multiple_of": "a multiple of"}
    limits = [
        f"{word} {getattr(bound, sign):g}"
        for bound in bounds
        for sign, word in signs.items()
        if getattr(bound, sign, None) is not None
    ]
    return " ".join([words, " and ".join(limits)]).strip()
