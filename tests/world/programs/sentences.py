"""sentence-transformers: a tiny encoder with pooling, without files."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.models import Dense, Normalize, Pooling
from torch import nn
from transformers import BertConfig, BertModel


def pooled(wrap: Any) -> Any:
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    model = BertModel(config).eval()
    head = nn.Sequential(Pooling(32, pooling_mode="mean"), Dense(32, 8), Normalize())

    @wrap
    def encode(ids: Any, mask: Any) -> Any:
        tokens = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return head({"token_embeddings": tokens, "attention_mask": mask})["sentence_embedding"]

    def step(_: int) -> Any:
        with torch.no_grad():
            return encode(torch.randint(0, 64, (2, 8)), torch.ones(2, 8, dtype=torch.long))

    return step, [lambda: model.set_attn_implementation("eager")]


def contrastive(wrap: Any) -> Any:
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    model, pooling = BertModel(config).train(), Pooling(32, pooling_mode="cls")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @wrap
    def embed(features: Any) -> Any:
        features["token_embeddings"] = model(**features).last_hidden_state
        return pooling(features)["sentence_embedding"]

    def features() -> Any:
        return {"input_ids": torch.randint(0, 64, (4, 8)), "attention_mask": torch.ones(4, 8, dtype=torch.long)}

    def step(_: int) -> Any:
        one, other = embed(features()), embed(features())
        scores = nn.functional.normalize(one) @ nn.functional.normalize(other).T * 20
        loss = nn.functional.cross_entropy(scores, torch.arange(4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), next(model.parameters())

    return step


PROGRAMS = {
    "pooled": pooled,
    "contrastive": contrastive,
}
