"""Language models in one file each: training with schedules and accumulation, sampling with a cache, beams."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from tests.world.parts import state_of

VOCAB, BLOCK, WIDTH, HEADS = 32, 16, 32, 2


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = dropout

    def split(self, x: Any) -> Any:
        b, t, c = x.size()
        parts = self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        return [one.view(b, t, HEADS, c // HEADS).transpose(1, 2) for one in parts]

    def forward(self, x: Any) -> Any:
        b, t, c = x.size()
        q, k, v = self.split(x)
        p = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH), nn.Dropout(dropout)
        self.h = nn.ModuleList([Block(dropout) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Any, targets: Any = None) -> Any:
        _, t = idx.size()
        assert t <= BLOCK, f"Cannot forward sequence of length {t}"
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device)))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return self.lm_head(x[:, [-1], :]), None

    @torch.no_grad()
    def generate(self, idx: Any, max_new_tokens: int, temperature: float = 1.0, top_k: Any = None) -> Any:
        for _ in range(max_new_tokens):
            idx_cond = idx if idx.size(1) <= BLOCK else idx[:, -BLOCK:]
            logits, _ = self(idx_cond)
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
                logits[logits < v[:, [-1]]] = -float("Inf")
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)), dim=1)
        return idx


def _groups(model: nn.Module) -> Any:
    params = list(model.parameters())
    return [{"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip


def gpt_train(wrap: Any) -> Any:
    """A whole step: batches from an array, warmup and cosine by a function, micro steps, a scaler, clipping."""
    model = GPT(dropout=0.1)
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    data = np.random.RandomState(0).randint(0, VOCAB, 4096).astype(np.uint16)

    def get_batch() -> Any:
        ix = torch.randint(len(data) - BLOCK, (4,)).tolist()
        x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in ix])
        return x, torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in ix])

    def get_lr(it: int) -> float:
        if it < 10:
            return 1e-3 * (it + 1) / 11
        coeff = 0.5 * (1.0 + math.cos(math.pi * (it - 10) / 190))
        return 1e-4 + coeff * (1e-3 - 1e-4)

    @wrap
    def train_step(batches: Any) -> Any:
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, loss = model(x, y)
                loss = loss / len(batches)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss * len(batches)

    def step(n: int) -> Any:
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(n)
        loss = train_step([get_batch() for _ in range(2)])
        return loss.item() if n % 5 == 0 else None, state_of(model, optimizer)

    return step


def gpt_generate(wrap: Any) -> Any:
    """Sampling with temperature and top-k over a context that grows up to its block."""
    model = GPT().eval()
    model.forward = wrap(model.forward)

    def step(n: int) -> Any:
        return model.generate(torch.zeros(1, 12, dtype=torch.long), 6, temperature=0.8, top_k=5), state_of()

    return step


def gpt_cache(wrap: Any) -> Any:
    """One token at a time with a static cache; the position is a number, sampling is in the captured step."""
    model = GPT().eval()
    cache = [(torch.zeros(2, HEADS, BLOCK, 16), torch.zeros(2, HEADS, BLOCK, 16)) for _ in model.h]

    @wrap
    @torch.inference_mode()
    def decode_one(token: Any, input_pos: Any, temperature: float, top_k: int) -> Any:
        x = model.wte(token) + model.wpe(input_pos)
        mask = torch.arange(BLOCK)[None, None, None, :] <= input_pos
        for block, (k_cache, v_cache) in zip(model.h, cache, strict=True):
            q, k, v = block.split(x)
            k_cache[:, :, input_pos], v_cache[:, :, input_pos] = k, v
            y = F.scaled_dot_product_attention(q, k_cache, v_cache, attn_mask=mask)
            x = x + block.c_proj(y.transpose(1, 2).reshape(2, 1, WIDTH))
            x = x + block.mlp(block.ln_2(x))
        logits = model.lm_head(model.ln_f(x))[:, -1] / max(temperature, 1e-5)
        v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
        logits = torch.where(logits < v.select(-1, -1).unsqueeze(-1), -float("Inf"), logits)
        probs = F.softmax(logits, dim=-1)
        return torch.argmax(probs / torch.empty_like(probs).exponential_(1), dim=-1, keepdim=True)

    st = {"token": torch.zeros(2, 1, dtype=torch.long)}

    def step(n: int) -> Any:
        st["token"] = decode_one(st["token"], torch.tensor([n % BLOCK]), 0.8, 5).clone()
        return st["token"], cache, state_of()

    return step


def gpt_cache_position(wrap: Any) -> Any:
    """The same with a position that is a Python number, written into the cache by a slice."""
    model = GPT().eval()
    keys, values = torch.zeros(2, 1, HEADS, BLOCK, 16), torch.zeros(2, 1, HEADS, BLOCK, 16)

    @wrap
    @torch.no_grad()
    def decode(token: Any, start_pos: int) -> Any:
        x = model.wte(token) + model.wpe.weight[start_pos]
        for i, block in enumerate(model.h):
            q, k, v = block.split(x)
            keys[i, :, :, start_pos : start_pos + 1] = k
            values[i, :, :, start_pos : start_pos + 1] = v
            y = F.scaled_dot_product_attention(q, keys[i, :, :, : start_pos + 1], values[i, :, :, : start_pos + 1])
            x = x + block.c_proj(y.transpose(1, 2).reshape(1, 1, WIDTH))
            x = x + block.mlp(block.ln_2(x))
        return model.lm_head(model.ln_f(x))[:, -1]

    st = {"token": 0}

    def step(n: int) -> Any:
        logits = decode(torch.tensor([[st["token"]]]), n % BLOCK)
        st["token"] = torch.multinomial(F.softmax(logits / 0.7, -1), 1).item()
        return st["token"], keys

    return step


class RNNModel(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(VOCAB, 16)
        self.rnn, self.decoder = kind(16, 24, 2, dropout=0.2), nn.Linear(24, VOCAB)

    def forward(self, input: Any, hidden: Any) -> Any:  # noqa: A002 - as in the example
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, VOCAB), dim=1), hidden


def lstm_words(wrap: Any) -> Any:
    """The word model of torch's examples: truncated backpropagation, clipping, plain descent by hand."""
    model, criterion, lr, total = RNNModel(nn.LSTM), nn.NLLLoss(), 20.0, {"loss": 0.0, "lr": 20.0}
    source = torch.randint(0, VOCAB, (141, 4))

    def repackage_hidden(h: Any) -> Any:
        return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)

    @wrap
    def train(data: Any, targets: Any, hidden: Any) -> Any:
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-total["lr"])
        total["loss"] += loss.item()
        return repackage_hidden(hidden)

    st: dict[str, Any] = {"hidden": (torch.zeros(2, 4, 24), torch.zeros(2, 4, 24))}

    def step(n: int) -> Any:
        i = n * 7 % 140
        st["hidden"] = train(source[i : i + 7], source[i + 1 : i + 8].reshape(-1), st["hidden"])
        shown = None
        if n % 10 == 9:
            shown, total["loss"] = math.exp(min(total["loss"] / 10, 20)), 0.0
        if n % 60 == 59:
            total["lr"] = lr / 4
        return st["hidden"], shown, total["loss"], state_of(model)

    return step


def gru_packed(wrap: Any) -> Any:
    """A classifier of texts of many lengths, packed; lengths come as a list."""
    embed, rnn, head = nn.Embedding(VOCAB, 16, padding_idx=0), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 2)
    optimizer = torch.optim.Adam([*embed.parameters(), *rnn.parameters(), *head.parameters()], lr=1e-3)
    rng = random.Random(0)

    @wrap
    def train(texts: Any, lengths: Any, labels: Any) -> Any:
        packed = pack_padded_sequence(embed(texts), lengths, batch_first=True, enforce_sorted=False)
        output, hidden = rnn(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True)
        loss = F.cross_entropy(head(hidden[-1] + padded.mean(1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def step(_: int) -> Any:
        lengths = rng.choice([[5, 3, 4], [6, 6, 2], [4, 5, 3]])
        texts = pad_sequence([torch.randint(1, VOCAB, (n,)) for n in lengths], batch_first=True)
        return train(texts, lengths, torch.randint(0, 2, (3,))), state_of(embed, rnn, head, optimizer)

    return step


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, 16), nn.Embedding(VOCAB, 16)
        self.encoder, self.decoder = nn.GRU(16, 24, batch_first=True), nn.GRUCell(16 + 24, 24)
        self.attend, self.out = nn.Linear(24, 24), nn.Linear(48, VOCAB)

    def one(self, token: Any, hidden: Any, memory: Any) -> Any:
        scores = torch.bmm(memory, self.attend(hidden).unsqueeze(2)).squeeze(2)
        context = torch.bmm(F.softmax(scores, 1).unsqueeze(1), memory).squeeze(1)
        hidden = self.decoder(torch.cat([self.target(token), context], 1), hidden)
        return self.out(torch.cat([hidden, context], 1)), hidden


def seq2seq_train(wrap: Any) -> Any:
    """Teacher forcing by a coin of Python's generator, thrown for each token."""
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    @wrap
    def train(src: Any, trg: Any, teacher_forcing_ratio: float = 0.5) -> Any:
        memory, hidden = model.encoder(model.source(src))
        hidden, token, loss = hidden[0], trg[:, 0], 0
        for t in range(1, trg.shape[1]):
            logits, hidden = model.one(token, hidden, memory)
            loss = loss + F.cross_entropy(logits, trg[:, t])
            token = trg[:, t] if random.random() < teacher_forcing_ratio else logits.argmax(1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        return loss.item() / trg.shape[1]

    def step(n: int) -> Any:
        random.seed(n)
        return train(torch.randint(0, VOCAB, (4, 5)), torch.randint(0, VOCAB, (4, 4))), state_of(model, optimizer)

    return step


def beam_search(wrap: Any) -> Any:
    """Beams in Python's lists: the step of the decoder is captured, scores are read."""
    model = Seq2Seq().eval()

    @wrap
    @torch.no_grad()
    def encode(src: Any) -> Any:
        memory, hidden = model.encoder(model.source(src))
        return memory, hidden[0]

    @wrap
    @torch.no_grad()
    def decode(token: Any, hidden: Any, memory: Any, beam: int) -> Any:
        logits, hidden = model.one(token, hidden, memory)
        scores, tokens = F.log_softmax(logits, 1).topk(beam)
        return scores, tokens, hidden

    def step(_: int) -> Any:
        memory, hidden = encode(torch.randint(0, VOCAB, (1, 5)))
        beams: list[Any] = [(0.0, [1], hidden)]
        for _ in range(4):
            grown = []
            for score, words, state in beams:
                scores, tokens, after = decode(torch.tensor([words[-1]]), state, memory, 3)
                for token_score, token in zip(scores[0], tokens[0], strict=True):
                    grown.append((score + token_score.item(), [*words, int(token)], after))
            beams = sorted(grown, key=lambda beam: -beam[0])[:3]
        return [beam[:2] for beam in beams], beams[0][2]

    return step


def noam(wrap: Any) -> Any:
    """A transformer as it was annotated: smoothed labels by a criterion with state, a schedule in the step."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True)
    embed, encoder, head = nn.Embedding(VOCAB, WIDTH), nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, VOCAB)
    params = [*embed.parameters(), *encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(params, lr=0.5, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: WIDTH**-0.5 * min(max(n, 1) ** -0.5, max(n, 1) * 40**-1.5)
    )
    counts = {"tokens": 0, "steps": 0}

    @wrap
    def run_batch(src: Any, ntokens: int) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(src.size(1))
        x = head(encoder(embed(src) * math.sqrt(WIDTH), mask=mask, is_causal=True))
        x = F.log_softmax(x, -1).view(-1, VOCAB)
        true_dist = torch.full_like(x, 0.1 / (VOCAB - 2))
        true_dist.scatter_(1, src.view(-1, 1), 0.9)
        true_dist[:, 0] = 0
        loss = F.kl_div(x, true_dist, reduction="sum") / ntokens
        loss.backward()
        counts["steps"] += 1
        counts["tokens"] += ntokens
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        return loss.detach()

    def step(_: int) -> Any:
        return run_batch(torch.randint(1, VOCAB, (3, 6)), 18), counts, state_of(embed, encoder, head, optimizer)

    return step


PROGRAMS = {
    "gpt_train": gpt_train,
    "gpt_generate": gpt_generate,
    "gpt_cache": gpt_cache,
    "gpt_cache_position": gpt_cache_position,
    "lstm_words": lstm_words,
    "gru_packed": gru_packed,
    "seq2seq_train": seq2seq_train,
    "beam_search": beam_search,
    "noam": noam,
}
