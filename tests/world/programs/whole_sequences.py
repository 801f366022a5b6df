"""Sequences that carry something on: a hidden state, a memory of the former segment, the tokens of a draft."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.world.parts import mlp, state_of


class CachedAttention(nn.Module):
    def __init__(self, d: Any, h: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.h = h

    def forward(self, x: Any, cache: Any = None, mask: Any = None) -> Any:
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=cache is None and mask is None)
        return self.o(y.transpose(1, 2).reshape(B, T, C)), (k, v)


class CachedLM(nn.Module):
    def __init__(self, v: Any = 31, d: Any = 16, h: Any = 2, layers: Any = 2) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(v, d), nn.Embedding(64, d)
        self.attn = nn.ModuleList(CachedAttention(d, h) for _ in range(layers))
        self.mlps = nn.ModuleList(mlp(d, 2 * d, d) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * layers))
        self.head = nn.Linear(d, v)

    def forward(self, ids: Any, past: Any = None) -> Any:
        start = 0 if past is None else past[0][0].shape[2]
        x = self.emb(ids) + self.pos(torch.arange(start, start + ids.shape[1], device=ids.device))
        present = []
        for i, (attn, m) in enumerate(zip(self.attn, self.mlps, strict=True)):
            a, kv = attn(self.norms[2 * i](x), None if past is None else past[i])
            x = x + a
            x = x + m(self.norms[2 * i + 1](x))
            present.append(kv)
        return self.head(x), tuple(present)


def lstm_carried(wrap: Any) -> Any:
    """A word language model on slices of a text: its hidden state is carried on, detached."""

    class RNNModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(23, 12)
            self.rnn, self.decoder = nn.LSTM(12, 12, 2, dropout=0.2), nn.Linear(12, 23)
            self.decoder.weight = self.encoder.weight

        def forward(self, ids: Any, hidden: Any) -> Any:
            output, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
            return F.log_softmax(self.decoder(self.drop(output)).view(-1, 23), dim=1), hidden

        def init_hidden(self, bsz: Any) -> Any:
            weight = next(self.parameters())
            return weight.new_zeros(2, bsz, 12), weight.new_zeros(2, bsz, 12)

    def repackage_hidden(h: Any) -> Any:
        return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)

    model, lr = RNNModel(), 0.5
    criterion = nn.NLLLoss()

    @wrap
    def train(data: Any, targets: Any, hidden: Any) -> Any:
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        return hidden, loss.item()

    st = {"hidden": model.init_hidden(3), "total": 0.0}
    text = torch.randint(23, (300, 3))

    def step(n: Any) -> Any:
        i = (n * 5) % 290
        seq_len = min(5, 299 - i) if n % 11 else 3
        st["hidden"], loss = train(text[i : i + seq_len], text[i + 1 : i + 1 + seq_len].reshape(-1), st["hidden"])
        st["total"] += loss
        if n % 10 == 0:
            cur, st["total"] = st["total"] / 10, 0.0
            return math.exp(min(cur, 20)), st["hidden"], state_of(model)
        return loss, st["hidden"], state_of(model)

    return step


def transformer_xl(wrap: Any) -> Any:
    """Transformer-XL: the memory of the former segment lies on the module."""

    class XL(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.q, self.kv, self.out = (
                nn.Embedding(20, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 32),
                nn.Linear(16, 20),
            )
            self.norm = nn.LayerNorm(16)
            self.mems = None
            self.mem_len = 6

        def forward(self, x: Any, y: Any) -> Any:
            h = self.emb(x)
            cat = h if self.mems is None else torch.cat([self.mems, h], 1)
            k, v = self.kv(cat).chunk(2, -1)
            T, S = h.shape[1], cat.shape[1]
            mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
            att = (self.q(h) @ k.transpose(1, 2) / 4).masked_fill(~mask, float("-inf")).softmax(-1)
            o = self.norm(h + att @ v)
            with torch.no_grad():
                self.mems = cat[:, -self.mem_len :].detach()
            return F.cross_entropy(self.out(o).transpose(1, 2), y)

    model = XL()
    opt = torch.optim.SGD(model.parameters(), 0.05)

    @wrap
    def train(x: Any, y: Any) -> Any:
        opt.zero_grad()
        loss = model(x, y)
        loss.backward()
        opt.step()
        return loss.detach()

    def step(n: Any) -> Any:
        if n % 25 == 0:
            model.mems = None
        loss = train(torch.randint(20, (2, 4)), torch.randint(20, (2, 4)))
        return loss, model.mems.clone(), state_of(model)

    return step


def speculative(wrap: Any) -> Any:
    """Speculative decoding: the host accepts or rejects what a draft proposed, token by token."""
    target, draft = CachedLM(layers=3).eval(), CachedLM(layers=1).eval()
    stats = {"accepted": 0, "proposed": 0}

    @wrap
    @torch.no_grad()
    def draft_step(ids: Any) -> Any:
        p = torch.softmax(draft(ids)[0][0, -1], -1)
        return torch.multinomial(p, 1), p

    @wrap
    @torch.no_grad()
    def verify(ids: Any, qs: Any, proposed: Any) -> Any:
        p = torch.softmax(target(ids)[0][0, -len(qs) - 1 :], -1)
        for i, q in enumerate(qs):
            token = proposed[i]
            if torch.rand(()) > torch.clamp(p[i, token] / q[token], max=1.0):
                rest = torch.clamp(p[i] - q, min=0)
                rest = rest / rest.sum()
                stats["proposed"] += len(qs)
                return torch.multinomial(rest, 1), i
            stats["accepted"] += 1
        stats["proposed"] += len(qs)
        return torch.multinomial(p[-1], 1), len(qs)

    def step(n: Any) -> Any:
        ids = torch.randint(31, (1, 8))
        qs, proposed, cur = [], [], ids
        for _ in range(3):
            t, q = draft_step(cur)
            qs.append(q.clone())
            proposed.append(t.clone())
            cur = torch.cat([cur, t[None]], 1)
        token, taken = verify(cur, qs, torch.cat(proposed))
        return token.clone(), taken, dict(stats), torch.get_rng_state()

    return step


PROGRAMS = {
    "lstm_carried": lstm_carried,
    "transformer_xl": transformer_xl,
    "speculative": speculative,
}
