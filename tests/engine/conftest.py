"""A tiny random DSA model with a tiny real tokenizer, saved to disk once for all engine tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, PreTrainedTokenizerFast

from topkapi.config import BackendOptions
from topkapi.engine.llm import LLM

CONTEXT = 160
TOPK = 16
TEXT = ["für die Größe des Textes 🙂 日本語", "the answer is 42, and the question is unknown"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('user', 'assistant') %}{{ raise_exception('role') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> Any:
    """Byte-level BPE: characters outside ASCII come in pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<bos>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<end>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(vocab_size: int, seed: int = 0) -> Any:
    """Two layers, one of them with experts, contexts well past `index_topk`."""
    torch.manual_seed(seed)
    config = DeepseekV32Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        # Enough heads that no score is exactly 0: Transformers breaks such ties by chance.
        index_n_heads=16,
        index_head_dim=12,
        index_topk=TOPK,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    return DeepseekV32ForCausalLM(config).float().eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a user would have it."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = make_tokenizer()
    make_model(len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_llm(checkpoint: Path, **options: Any) -> LLM:
    options = {"page_size": 8, "max_running_requests": 8, "max_batch_tokens": 64, **options}
    return LLM(checkpoint, device="cpu", dtype="fp32", backend_options=BackendOptions(), **options)


@pytest.fixture(scope="session")
def llm(checkpoint: Path) -> LLM:
    """Roomy; every test must leave it empty (`idle`)."""
    return make_llm(checkpoint)


@pytest.fixture
def idle(llm: LLM) -> Any:
    """Checks after a test that the shared engine has given everything back."""
    before = free_pages(llm)
    yield
    assert not llm.engine.has_work
    assert free_pages(llm) == before


def free_pages(llm: LLM) -> int:
    return llm.engine.scheduler.free_pages
