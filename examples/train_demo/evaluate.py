"""Does the demo model recall facts from documents it has never seen?

Asks one question a fresh document (held-out text, names never trained on) and counts replies that
are right token for token, sparse (the indexer's top k) and dense (the whole context).

    python evaluate.py --model weights/ --lengths 1024 2048 4096 7900 --documents 200
    python evaluate.py --model weights/ --lengths 4096 --documents 8 --generate
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import data
import model
import torch
from torch import Tensor
from transformers import AutoTokenizer, DeepseekV32ForCausalLM

from topkapi.demo.documents import Question, RecallDocument, is_right, make_document

TOKENS_A_BATCH = 65536


@dataclass(frozen=True)
class Case:
    """One asked document: the prompt's tokens and the reply's, `<|end|>` included."""

    document: RecallDocument
    prompt: list[int]
    reply: list[int]

    @property
    def question(self) -> Question:
        return self.document.questions[0]


def make_case(tokenizer_file: Path, length: int, num_facts: int, seed: int) -> Case:
    encoder = data.Encoder(tokenizer_file)
    document = make_document(
        random.Random(seed), num_tokens=length, count_tokens=encoder.count, num_facts=num_facts
    )
    ids, marks = data.encode_chat(encoder, document, 1)
    split = marks.index(data.REPLY)
    return Case(document, ids[:split], ids[split:])


def make_cases(
    tokenizer_file: Path, length: int, count: int, *, num_facts: int = 10, workers: int = 1
) -> list[Case]:
    make = partial(make_case, tokenizer_file, length, num_facts)
    seeds = range(1_000_000, 1_000_000 + count)
    if workers < 2:
        return [make(seed) for seed in seeds]
    with multiprocessing.Pool(workers) as pool:
        return pool.map(make, seeds, chunksize=max(1, count // (4 * workers)))


@torch.no_grad()
def recall(net: model.DemoModel, cases: list[Case], topk: int | None) -> float:
    """Share of cases whose whole reply, `<|end|>` included, is what greedy decoding writes.

    One forward pass over prompt and reply: greedy decoding writes the reply exactly when every
    token of it is the argmax at its place.
    """
    device = next(net.parameters()).device
    longest = max(len(case.prompt) + len(case.reply) for case in cases)
    right = 0
    batch_size = max(1, TOKENS_A_BATCH // longest)
    for start in range(0, len(cases), batch_size):
        batch = cases[start : start + batch_size]
        ids = torch.full((len(batch), longest), data.PAD)
        for row, case in enumerate(batch):
            ids[row, : len(case.prompt) + len(case.reply)] = torch.tensor(case.prompt + case.reply)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model.forward(net, ids.to(device), topk=topk, with_mtp=False)
        best = out.logits.argmax(-1).cpu()
        right += sum(_is_recalled(case, best[row]) for row, case in enumerate(batch))
    return right / len(cases)


def _is_recalled(case: Case, best: Tensor) -> bool:
    first = len(case.prompt) - 1
    return best[first : first + len(case.reply)].tolist() == case.reply


@torch.no_grad()
def generate(folder: Path, cases: list[Case], turns: int) -> float:
    """Share of replies right through Transformers' own `generate()`, several turns a document."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    causal = DeepseekV32ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    right = asked = 0
    for case in cases:
        messages: list[dict[str, str]] = []
        for i, question in enumerate(case.document.questions[:turns]):
            content = question.text if i else case.document.prompt(question)
            messages.append({"role": "user", "content": content})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            out = causal.generate(**inputs, max_new_tokens=40, do_sample=False)
            new = out[0, inputs["input_ids"].shape[1] :]
            said = tokenizer.decode(new, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": said})
            ok = is_right(said, question)
            right, asked = right + ok, asked + 1
            print(f"{'right' if ok else 'WRONG'}  {question.text}  ->  {said}", flush=True)
    return right / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--facts", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2, help="questions a document (--generate)")
    parser.add_argument("--generate", action="store_true", help="through Transformers' generate()")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    net = model.load_model(args.model).to(args.device).eval()
    for length in args.lengths:
        cases = make_cases(
            args.model / "tokenizer.json",
            length,
            args.documents,
            num_facts=args.facts,
            workers=args.workers,
        )
        result: dict[str, float] = {"document_tokens": length, "documents": len(cases)}
        if args.generate:
            result["generate"] = generate(args.model, cases, args.turns)
        else:
            result["sparse"] = recall(net, cases, net.config.index_topk)
            result["dense"] = recall(net, cases, None)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
