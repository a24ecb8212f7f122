"""How is the demo model trained?

Dense from short to long sequences, then the indexer alone, then sparse. A stage ends when its share
of `--minutes` is used up; a checkpoint in `--state` lets a later call go on where this one ended.

    python train.py --corpus data/corpus.txt --model weights/ --state .ckpt --minutes 8
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import data
import evaluate
import model
import torch
from optim import make_optimisers
from torch import Tensor
from torch.nn import functional

Phase = Literal["dense", "indexer", "sparse"]
TEXT_WEIGHT, REPLY_WEIGHT, VALUE_WEIGHT, MTP_WEIGHT = 0.2, 0.3, 2.0, 0.3
KINDS = (data.TEXT, data.REPLY, data.VALUE)
ROUTER_BIAS_RATE = 1e-3
MUON_LR, ADAM_LR, WEIGHT_DECAY = 0.02, 3e-3, 0.02
ANSWER_ROW_WEIGHT = 8.0
SAVE_EVERY_S, LOG_EVERY = 100.0, 20


@dataclass(frozen=True)
class Stage:
    """One stretch of training: what runs, on which lengths, for which share of the time."""

    phase: Phase
    lengths: tuple[int, ...]
    share: float
    lr: tuple[float, float]  # factors at the start and at the end
    tokens: int  # per step

    @property
    def name(self) -> str:
        return f"{self.phase}-{max(self.lengths)}"


STAGES = (
    Stage("dense", (256,), 0.12, (1.0, 1.0), 65536),
    Stage("dense", (256, 512), 0.10, (1.0, 1.0), 65536),
    Stage("dense", (512, 1024), 0.10, (1.0, 1.0), 65536),
    Stage("dense", (512, 1024, 2048), 0.08, (1.0, 0.8), 65536),
    Stage("dense", (1024, 2048, 4096), 0.14, (0.8, 0.4), 65536),
    Stage("dense", (512, 1024, 2048, 4096), 0.13, (0.5, 0.3), 65536),
    Stage("indexer", (2048, 4096), 0.06, (0.6, 0.4), 65536),
    Stage("sparse", (1024, 2048, 4096), 0.195, (0.3, 0.12), 65536),
    Stage("sparse", (2048, 4096, 8192), 0.075, (0.12, 0.0), 65536),
)
TOY_STAGES = (
    Stage("dense", (160,), 0.6, (1.0, 0.6), 4096),
    Stage("indexer", (160,), 0.1, (1.0, 1.0), 4096),
    Stage("sparse", (160,), 0.3, (0.5, 0.0), 4096),
)
TOY = {"num_hidden_layers": 2, "hidden_size": 128, "kv_lora_rank": 128, "index_topk": 48}


@dataclass
class Progress:
    """Where training stands; saved with every checkpoint."""

    stage: int = 0
    stage_seconds: float = 0.0
    step: int = 0
    tokens: int = 0


class Trainer:
    """Holds what a step needs, and writes what came of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.stages = TOY_STAGES if args.toy else STAGES
        net = model.DemoModel(model.make_config(**(TOY if args.toy else {})))
        self.net = net.to(self.device).train()
        self.optimisers = make_optimisers(
            self.net, muon_lr=MUON_LR, adam_lr=ADAM_LR, weight_decay=WEIGHT_DECAY
        )
        self.progress = Progress()
        self.corpus = data.Corpus(args.model / "tokenizer.json", args.corpus)
        self.started = time.monotonic()
        self.state_file = args.state / "train.ckpt"
        args.out.mkdir(parents=True, exist_ok=True)
        args.state.mkdir(parents=True, exist_ok=True)
        if self.state_file.exists():
            self.restore()
        elif args.start_from:
            self.net.load_state_dict(model.load_model(args.start_from).state_dict())
            self.progress.stage = args.first_stage

    def seconds_left(self) -> float:
        return 60 * self.args.minutes - (time.monotonic() - self.started)

    def run(self) -> None:
        """All stages that are left, as far as the time goes."""
        while self.progress.stage < min(len(self.stages), self.args.last_stage + 1):
            stage = self.stages[self.progress.stage]
            self.run_stage(stage, 60 * self.args.schedule_minutes * stage.share)
            if self.seconds_left() <= 0:
                break
            self.progress.stage += 1
            self.progress.stage_seconds = 0.0
            self.save()
            self.report(stage)
        self.save()

    def run_stage(self, stage: Stage, budget: float) -> None:
        self.freeze_for(stage.phase)
        seed = self.args.seed + 1000 * self.progress.stage + self.progress.step
        batches = data.batch_loader(
            self.corpus, stage.lengths, stage.tokens, seed, self.args.workers
        )
        saved = last = time.monotonic()
        logged_tokens, logged_at = self.progress.tokens, last
        while self.progress.stage_seconds < budget and self.seconds_left() > 0:
            self.set_lr(stage, self.progress.stage_seconds / budget)
            figures = self.step(stage, batches)
            now = time.monotonic()
            self.progress.stage_seconds += now - last
            last = now
            if self.progress.step % LOG_EVERY == 0:
                values = {key: round(float(value), 4) for key, value in figures.items()}
                now = last = time.monotonic()
                speed = (self.progress.tokens - logged_tokens) / (now - logged_at)
                logged_tokens, logged_at = self.progress.tokens, now
                self.log(stage.name, tokens_per_s=round(speed), **values)
            if now - saved > SAVE_EVERY_S:
                self.save()
                saved = time.monotonic()

    def freeze_for(self, phase: Phase) -> None:
        for name, parameter in self.net.named_parameters():
            is_indexer = ".indexer." in name
            parameter.requires_grad_(
                {"dense": not is_indexer, "indexer": is_indexer}.get(phase, True)
            )
            parameter.grad = None

    def set_lr(self, stage: Stage, done: float) -> None:
        factor = stage.lr[0] + (stage.lr[1] - stage.lr[0]) * min(done, 1.0)
        warm = min(1.0, (self.progress.step + 1) / 50)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["initial_lr"] * factor * warm

    def step(self, stage: Stage, batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        ids, marks = (part.to(self.device) for part in next(batches))
        ids = ids.long()
        topk = self.net.config.index_topk if stage.phase == "sparse" else None
        rows = None if stage.phase == "dense" else sample_rows(marks, self.args.rows)
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            out = model.forward(self.net, ids, topk=topk, rows=rows)
        loss, figures = losses(out, ids, marks)
        (out.indexer_loss if stage.phase == "indexer" else loss).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if stage.phase != "indexer":
            balance(self.net, out.expert_load)
        self.progress.step += 1
        self.progress.tokens += ids.numel()
        return figures

    def report(self, stage: Stage) -> None:
        """Recall on fresh documents after a stage."""
        self.net.eval()
        trained = max(stage.lengths)
        lengths = self.args.eval_lengths if stage is self.stages[-1] else [trained - 128]
        if self.args.toy:
            lengths = [trained - 40]
        for length in lengths:
            began = time.monotonic()
            cases = evaluate.make_cases(
                self.corpus.tokenizer_file,
                length,
                self.args.eval_documents,
                num_facts=min(10, length // 40),
                workers=self.args.workers,
            )
            figures = {"recall_dense": evaluate.recall(self.net, cases, None)}
            if stage.phase != "dense":
                topk = self.net.config.index_topk
                figures["recall_sparse"] = evaluate.recall(self.net, cases, topk)
            took = round(time.monotonic() - began, 1)
            self.log(stage.name, document_tokens=length, eval_s=took, **figures)
        self.net.train()

    def log(self, stage: str, **figures: float) -> None:
        entry = {"step": self.progress.step, "stage": stage, "tokens": self.progress.tokens}
        entry["seconds"] = round(time.monotonic() - self.started, 1)
        line = json.dumps(entry | figures)
        print(line, flush=True)
        with (self.args.out / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")

    def save(self) -> None:
        """The resumable state, and the weights as they would be shipped."""
        state: dict[str, Any] = {
            "net": self.net.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "progress": vars(self.progress),
        }
        torch.save(state, self.state_file)
        model.save_model(self.net, self.args.out)

    def restore(self) -> None:
        state = torch.load(self.state_file, map_location=self.device, weights_only=True)
        self.net.load_state_dict(state["net"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.progress = Progress(**state["progress"])


def losses(out: model.Output, ids: Tensor, marks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The training loss, and figures for the log: means over text and over value tokens."""
    assert out.mtp_logits is not None
    total = out.indexer_loss
    figures: dict[str, Tensor] = {"indexer_kl": out.indexer_loss.detach()}
    heads = (("", out.logits, 1, 1.0), ("mtp_", out.mtp_logits, 2, MTP_WEIGHT))
    for prefix, logits, ahead, weight in heads:
        wanted, kind = ids[:, ahead:], marks[:, ahead:]
        logits = logits[:, :-ahead]
        each = functional.cross_entropy(
            logits.flatten(0, 1).float(), wanted.flatten(), reduction="none"
        ).view(wanted.shape)
        right = (logits.argmax(-1) == wanted).float()
        text_loss, reply_loss, value_loss = (mean_over(each, kind == k) for k in KINDS)
        mixed = TEXT_WEIGHT * text_loss + REPLY_WEIGHT * reply_loss + VALUE_WEIGHT * value_loss
        total = total + weight * mixed
        figures |= {
            f"{prefix}text_loss": text_loss.detach(),
            f"{prefix}value_loss": value_loss.detach(),
            f"{prefix}value_accuracy": mean_over(right, kind == data.VALUE),
        }
    return total, figures


def mean_over(values: Tensor, where: Tensor) -> Tensor:
    return (values * where).sum() / where.sum().clamp_min(1)


def sample_rows(marks: Tensor, count: int) -> Tensor:
    """Rows [B, R] that teach the indexer: any token, those that predict a reply more often."""
    predicts_reply = torch.zeros_like(marks, dtype=torch.bool)
    predicts_reply[:, :-1] = marks[:, 1:] >= data.REPLY
    weights = torch.where(predicts_reply, ANSWER_ROW_WEIGHT, 1.0)
    return torch.multinomial(weights, min(count, marks.shape[1] // 2))


@torch.no_grad()
def balance(net: model.DemoModel, loads: list[Tensor]) -> None:
    """DeepSeek-V3's balancing: nudge the router's bias towards the experts that got too little."""
    gates = [block.mlp.gate for block in net.blocks() if hasattr(block.mlp, "gate")]
    for gate, load in zip(gates, loads, strict=True):
        share = load.float()
        gate.e_score_correction_bias += ROUTER_BIAS_RATE * torch.sign(share.mean() - share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer files")
    parser.add_argument("--out", type=Path, default=Path("out"), help="weights and metrics go here")
    parser.add_argument("--state", type=Path, default=Path(".ckpt"), help="resumable checkpoint")
    parser.add_argument("--minutes", type=float, required=True, help="wall clock of this call")
    parser.add_argument("--schedule-minutes", type=float, help="of all stages; default --minutes")
    parser.add_argument("--start-from", type=Path, help="folder with weights, optimisers fresh")
    parser.add_argument("--first-stage", type=int, default=0, help="with --start-from")
    parser.add_argument("--last-stage", type=int, default=len(STAGES) - 1)
    parser.add_argument("--rows", type=int, default=256, help="rows a sequence for the indexer")
    parser.add_argument("--eval-documents", type=int, default=200)
    parser.add_argument("--eval-lengths", type=int, nargs="+", default=[1024, 2048, 4096, 7900])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--toy", action="store_true", help="two thin layers and short sequences")
    args = parser.parse_args()
    args.schedule_minutes = args.schedule_minutes or args.minutes
    if args.compile:
        model.compile_parts()
    Trainer(args).run()


if __name__ == "__main__":
    main()
