"""A token budget, turned into rounds."""

from fedact_flwr.settings import Settings, SettingsError, read_defaults
from tasks import TASKS
from tasks.pretrain import PretrainC4


def with_budget(settings: Settings) -> tuple[Settings, str | None]:
    """The settings with the rounds that ``tokens_per_parameter`` asks for, and a sentence for people; or as they are.

    Raises `SettingsError` where the task does not count tokens, the number of steps is not known, or rounds are given
    that the budget does not give.
    """
    s = settings
    if s.tokens_per_parameter == 0 or s.resume:  # a run that goes on has its rounds, or more
        return s, None
    task = TASKS[s.task].configured(s)
    if not isinstance(task, PretrainC4):
        raise SettingsError(f"tokens_per_parameter = {s.tokens_per_parameter:g}: allowed with task = {s.task!r} is 0")
    if s.local_epochs:
        raise SettingsError(f"local_epochs = {s.local_epochs}: allowed with tokens_per_parameter is 0")
    per_round = s.clients_per_round * s.local_steps * s.batch_size * task.max_length
    rounds = max(1, round(s.tokens_per_parameter * task.parameters / per_round))
    if s.rounds not in (rounds, read_defaults()["rounds"]):
        given = f"tokens_per_parameter = {s.tokens_per_parameter:g}"
        raise SettingsError(f"rounds = {s.rounds}: allowed is the default, or what {given} gives, {rounds}")
    budget = f"{s.tokens_per_parameter:g} tokens for each of {task.parameters:,} parameters"
    words = f"{budget}: {rounds} rounds of {per_round:,} tokens"
    return s.model_copy(update={"rounds": rounds}), words
