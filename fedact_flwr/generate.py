"""Answers from the model of a finished run."""

from pathlib import Path

import torch

from fedact_flwr.settings import SETTINGS_FILE, SettingsError, parse, read_file
from tasks import TASKS
from tasks.adapter import load_model
from tasks.hub import load_pretrained
from tasks.language import MODEL_FOLDER, LanguageTask
from tasks.task import BadData


def generate(record: Path, prompt: str, max_tokens: int) -> str:
    """The likeliest continuation of the prompt in the task's template, up to ``max_tokens`` tokens or the end token.

    Raises `SettingsError` where ``record`` is no finished run of a language task.
    """
    settings = parse(read_file(record / SETTINGS_FILE))
    task = TASKS[settings.task].configured(settings)
    if not isinstance(task, LanguageTask):
        raise SettingsError(f"{record}: its task, {settings.task}, writes no text")
    folder = record / MODEL_FOLDER
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not there: the run has not ended")

    from transformers import AutoTokenizer

    try:
        tokenizer = load_pretrained(AutoTokenizer, str(folder), "model")
        model = load_model(str(folder), settings.base_precision)
    except BadData as error:
        raise SettingsError(str(error)) from error
    ids = tokenizer(task.prompt(prompt), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        answer = model.eval().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    return str(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))
