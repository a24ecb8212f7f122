"""Does the shipped model answer from documents many times longer than its k?"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors import safe_open

import topkapi.demo
from topkapi import LLM, SamplingParams
from topkapi.demo.documents import is_right, make_document

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
WEIGHTS = Path(topkapi.demo.__file__).parent / "weights"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", dtype="fp32")


def right_answers(llm: LLM, seeds: range, tokens: int, questions: int) -> int:
    def count(text: str) -> int:
        return len(llm.tokenizer.encode(text, add_special_tokens=False))

    asked, conversations = [], []
    for seed in seeds:
        document = make_document(seed, num_tokens=tokens, count_tokens=count)
        for question in document.questions[:questions]:
            asked.append(question)
            conversations.append([{"role": "user", "content": document.prompt(question)}])
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    return sum(is_right(out.text, question) for out, question in zip(outputs, asked, strict=True))


def test_it_recalls_from_twelve_times_its_k(llm: LLM) -> None:
    """12 questions; at the measured recall of 0.97, fewer than 9 right has odds under 1e-3."""
    assert llm.config.index_topk == 128
    assert right_answers(llm, range(40, 43), 1536, 4) >= 9


def test_a_selection_of_four_tokens_is_not_enough() -> None:
    """The answers come through the selection: with next to nothing selected they are gone."""
    blind = LLM("demo", device="cpu", dtype="fp32", config_overrides={"index_topk": 4})
    assert right_answers(blind, range(40, 42), 700, 2) <= 1


def test_a_follow_up_question_is_answered_in_the_conversation(llm: LLM) -> None:
    document = make_document(
        50, num_tokens=900, count_tokens=lambda text: len(llm.tokenizer.encode(text))
    )
    first, second = document.questions[:2]
    messages = [{"role": "user", "content": document.prompt(first)}]
    messages += [{"role": "assistant", "content": first.reply}]
    messages += [{"role": "user", "content": second.text}]
    assert is_right(llm.chat(messages, GREEDY, use_tqdm=False)[0].text, second)


def test_the_package_ships_the_official_format_in_sixteen_megabytes(llm: LLM) -> None:
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) <= 16 * 10**6
    with safe_open(str(WEIGHTS / "model.safetensors"), "pt") as file:
        names = set(file.keys())
        numbers = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    mtp = f"model.layers.{llm.config.num_hidden_layers}."
    parts = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight")
    parts += ("shared_head.norm.weight", "shared_head.head.weight", "input_layernorm.weight")
    parts += ("self_attn.indexer.wq_b.weight", "mlp.experts.7.down_proj.weight")
    assert {mtp + part for part in parts} <= names
    assert numbers > 7 * 10**6
