"""The Hugging Face hub, for which a server on this machine stands."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fedact_flwr.settings import PROJECT

COMMIT = "0" * 40


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """Its address, and the paths that it was asked for; it has nothing."""
    asked: list[str] = []

    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Nothing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def load(home: Path, address: str) -> subprocess.CompletedProcess[str]:
    code = (
        "from transformers import AutoTokenizer\n"
        "from tasks.hub import load_pretrained\n"
        "print(load_pretrained(AutoTokenizer, 'somebody/words', 'tokenizer')('b a')['input_ids'])\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment | {"HF_HOME": str(home), "HF_ENDPOINT": address},
        capture_output=True, text=True, cwd=PROJECT, timeout=60,
    )  # fmt: skip


def test_the_hub_is_asked_only_for_what_is_not_here(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, asked = hub
    result = load(tmp_path, address)
    assert "BadData: somebody/words can't be loaded" in result.stderr
    assert any("somebody/words" in path for path in asked)

    repository = tmp_path / "hub" / "models--somebody--words"
    shutil.rmtree(repository, ignore_errors=True)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(repository / "snapshots" / COMMIT)
    (repository / "snapshots" / COMMIT / "config.json").write_text('{"model_type": "llama"}')
    asked.clear()
    result = load(tmp_path, address)
    assert result.stdout == "[1, 0]\n", result.stderr[-1500:]
    assert asked == []
