"""A small character-level GPT in plain PyTorch, with a static key-value cache. Nothing here knows of capture.

Shapes: L layers, B batch, T time (tokens), S cache slots, H heads, D width of a head, C width of the model,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int
    layers: int = 4
    heads: int = 4
    width: int = 64
    context: int = 256

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


@dataclass
class Cache:
    """Keys and values, both ``LBHSD``, of the tokens so far. Written in place, never replaced."""

    k: Tensor
    v: Tensor
    pos: Tensor
    """Position of the next token, int64 of one element on the device: the host never needs to know it."""

    @classmethod
    def empty(cls, shape: Shape, *, batch: int, device: torch.device) -> Cache:
        """A cache with all slots free."""
        size = (shape.layers, batch, shape.heads, shape.context, shape.head_width)
        pos = torch.zeros(1, dtype=torch.int64, device=device)
        return cls(torch.zeros(size, device=device), torch.zeros(size, device=device), pos)

    def clear(self) -> None:
        """Free all slots. Same tensors, same addresses."""
        self.k.zero_()
        self.v.zero_()
        self.pos.zero_()


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm2 = nn.RMSNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def split(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``BHTD``."""
        qkv = self.qkv(self.norm1(x_BTC)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return qkv[0], qkv[1], qkv[2]

    def merge(self, x_BTC: Tensor, attended_BHTD: Tensor) -> Tensor:
        """The rest of the block."""
        x_BTC = x_BTC + self.out(attended_BHTD.transpose(1, 2).flatten(2))
        down_BTC: Tensor = self.down(F.gelu(self.up(self.norm2(x_BTC))))
        return x_BTC + down_BTC


class GPT(nn.Module):
    """``forward`` sees whole sequences and is for training; ``step`` sees one token and a cache."""

    slots_S: Tensor
    slopes_H11: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.register_buffer("slots_S", torch.arange(shape.context), persistent=False)
        self.register_buffer("slopes_H11", 2.0 ** -torch.arange(shape.heads).view(-1, 1, 1), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def bias(self, pos_T: Tensor) -> Tensor:
        """What attention from these positions adds for every slot, ``1HTS``: the further back the less (ALiBi), and
        nothing of what comes later or is not filled yet."""
        back_TS = pos_T[:, None] - self.slots_S
        return (self.slopes_H11 * -back_TS).masked_fill(back_TS < 0, -torch.inf)[None]

    @override
    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits ``BTV`` of every next token."""
        num_tokens = ids_BT.shape[1]
        x_BTC = self.token(ids_BT)
        bias = self.bias(self.slots_S[:num_tokens])[..., :num_tokens]
        for block in self.blocks:
            assert isinstance(block, Block)
            q, k, v = block.split(x_BTC)
            x_BTC = block.merge(x_BTC, F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
        return F.linear(self.norm(x_BTC), self.token.weight)

    def step(self, ids_B1: Tensor, cache: Cache, temperature: float = 0.8) -> Tensor:
        """Take one token in, draw the next one, ``B1``.

        Every shape is the same at every position: attention runs over all slots of the cache. Nothing is read on the
        host, and the draw comes from torch's own generator.
        """
        x_B1C = self.token(ids_B1)
        bias = self.bias(cache.pos)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            q, k, v = block.split(x_B1C)
            keys, values = cache.k[index], cache.v[index]
            keys.index_copy_(2, cache.pos, k)
            values.index_copy_(2, cache.pos, v)
            x_B1C = block.merge(x_B1C, F.scaled_dot_product_attention(q, keys, values, attn_mask=bias))
        cache.pos += 1
        logits_B1V = F.linear(self.norm(x_B1C), self.token.weight)
        odds = (logits_B1V / temperature).softmax(-1)
        return (odds / torch.empty_like(odds).exponential_(1.0)).argmax(-1)
