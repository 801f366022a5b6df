"""transformers: tiny models with random weights, forward, with caches and trained."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    get_linear_schedule_with_warmup,
)

IDS = 64


def _llama(**more: Any) -> Any:
    config = LlamaConfig(
        vocab_size=IDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _bert() -> Any:
    config = BertConfig(
        vocab_size=IDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


def _gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=IDS, n_embd=32, n_layer=2, n_head=4, n_positions=64))


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, IDS, shape)


def llama_forward(wrap: Any) -> Any:
    model = _llama()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(input_ids=_ids(2, 8), use_cache=False).logits

    return step, [lambda: model.set_attn_implementation("eager"), lambda: model.train(), lambda: model.eval()]


def llama_mask(wrap: Any) -> Any:
    call, mask = wrap(_llama()), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(input_ids=_ids(2, 8), attention_mask=mask, use_cache=False).logits

    return step, [lambda: mask.fill_(1)]


def llama_decode_static(wrap: Any) -> Any:
    model = _llama()
    call = wrap(model)
    cache = StaticCache(config=model.config, max_cache_len=48)

    def step(number: int) -> Any:
        if number % 40 == 0:
            cache.reset()
        with torch.no_grad():
            return call(input_ids=_ids(1, 1), past_key_values=cache, use_cache=True).logits

    return step, [cache.reset]


def llama_decode_dynamic(wrap: Any) -> Any:
    model = _llama()
    call = wrap(model)

    def step(_: int) -> Any:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            return [call(input_ids=_ids(1, 1), past_key_values=cache, use_cache=True).logits for _ in range(3)]

    return step


def bert_forward(wrap: Any) -> Any:
    model = _bert()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(input_ids=_ids(2, 8), attention_mask=torch.ones(2, 8, dtype=torch.long)).logits

    def outputs() -> None:
        model.config.output_hidden_states = True

    return step, [lambda: model.set_attn_implementation("eager"), outputs]


def bert_batch_encoding(wrap: Any) -> Any:
    model = _bert()

    @wrap
    def forward(batch: Any) -> Any:
        return model(**batch).logits

    def step(_: int) -> Any:
        with torch.no_grad():
            return forward(BatchEncoding({"input_ids": _ids(2, 8), "token_type_ids": torch.zeros(2, 8).long()}))

    return step, [lambda: model.train(), lambda: model.eval()]


def bert_output(wrap: Any) -> Any:
    model = _bert()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return dict(call(input_ids=_ids(2, 8)))

    return step


def _trained(wrap: Any, model: Any, loss_of: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(*inputs: Any) -> Any:
        loss = loss_of(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return wrap(train)


def gpt2_training(wrap: Any) -> Any:
    model = _gpt2().train()
    train = _trained(wrap, model, lambda ids: model(input_ids=ids, labels=ids).loss)
    return lambda _: (train(_ids(2, 8)), next(model.parameters()))


def bert_training(wrap: Any) -> Any:
    model = _bert().train()
    train = _trained(wrap, model, lambda ids, labels: model(input_ids=ids, labels=labels).loss)
    return lambda _: (train(_ids(2, 8), torch.randint(0, 2, (2,))), next(model.parameters()))


def t5_forward(wrap: Any) -> Any:
    config = T5Config(vocab_size=IDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(input_ids=_ids(2, 8), decoder_input_ids=_ids(2, 4), use_cache=False).logits

    return step


def vit_forward(wrap: Any) -> Any:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4
    )
    model = ViTForImageClassification(config).eval()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(pixel_values=torch.randn(2, 3, 16, 16)).logits

    return step, [lambda: model.set_attn_implementation("eager")]


def gpt2_forward_hook(wrap: Any) -> Any:
    model, seen = _gpt2().eval(), []
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(input_ids=_ids(2, 8), use_cache=False).logits, len(seen)

    def hook() -> None:
        model.transformer.h[0].register_forward_hook(lambda *_: seen.append(1))

    return step, [hook]


def llama_generate_static(wrap: Any) -> Any:
    model = _llama()
    model.generation_config.pad_token_id = 0
    model.forward = wrap(model.forward)

    def step(_: int) -> Any:
        with torch.no_grad():
            return model.generate(
                _ids(1, 4), attention_mask=torch.ones(1, 4).long(), max_new_tokens=6, do_sample=False,
                cache_implementation="static", eos_token_id=None, disable_compile=True,
            )  # fmt: skip

    return step


def llama_generate_sampled(wrap: Any) -> Any:
    model = _llama()
    model.generation_config.pad_token_id = 0
    model.forward = wrap(model.forward)

    def step(_: int) -> Any:
        return model.generate(
            _ids(2, 4), attention_mask=torch.ones(2, 4).long(), max_new_tokens=4, do_sample=True, top_k=8,
            eos_token_id=None,
        )  # fmt: skip

    return step


def llama_checkpointed(wrap: Any) -> Any:
    model = _llama().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    train = _trained(wrap, model, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss)
    return lambda _: (train(_ids(2, 8)), next(model.parameters()))


def llama_checkpointed_reentrant(wrap: Any) -> Any:
    model = _llama().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    train = _trained(wrap, model, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss)
    return lambda _: (train(_ids(2, 8)), next(model.parameters()))


def trainer_loss(wrap: Any) -> Any:
    model = _gpt2().train()
    trainer = Trainer(model=model, args=TrainingArguments(output_dir="/tmp/out", use_cpu=True, report_to=[]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = wrap(trainer.compute_loss)

    def step(_: int) -> Any:
        ids = _ids(2, 8)
        loss = loss_of(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), next(model.parameters())

    return step


def bert_finetune(wrap: Any) -> Any:
    model = _bert().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, 400)

    def step(_: int) -> Any:
        batch = {
            "input_ids": _ids(2, 8),
            "attention_mask": torch.ones(2, 8).long(),
            "labels": torch.randint(0, 2, (2,)),
        }
        loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach(), next(model.parameters())

    forward = wrap(model)
    return step


def mixtral_forward(wrap: Any) -> Any:
    config = MixtralConfig(
        vocab_size=IDS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
    )  # fmt: skip
    call = wrap(MixtralForCausalLM(config).eval())

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(input_ids=_ids(2, 8), use_cache=False).logits

    return step


def clip_forward(wrap: Any) -> Any:
    text = {"vocab_size": IDS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 4, "max_position_embeddings": 16, "eos_token_id": 63}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(input_ids=_ids(2, 8), pixel_values=torch.randn(2, 3, 16, 16)).logits_per_image

    return step


def reward_pairs(wrap: Any) -> Any:
    model = _bert().eval()
    call = wrap(model)

    def step(n: int) -> Any:
        with torch.inference_mode():
            return call(**BatchEncoding({"input_ids": _ids(2, 4 + n % 3)})).logits

    return step


PROGRAMS = {
    "llama_forward": llama_forward,
    "llama_mask": llama_mask,
    "llama_decode_static": llama_decode_static,
    "llama_decode_dynamic": llama_decode_dynamic,
    "bert_forward": bert_forward,
    "bert_batch_encoding": bert_batch_encoding,
    "bert_output": bert_output,
    "gpt2_training": gpt2_training,
    "bert_training": bert_training,
    "t5_forward": t5_forward,
    "vit_forward": vit_forward,
    "gpt2_forward_hook": gpt2_forward_hook,
    "llama_generate_static": llama_generate_static,
    "llama_generate_sampled": llama_generate_sampled,
    "llama_checkpointed": llama_checkpointed,
    "llama_checkpointed_reentrant": llama_checkpointed_reentrant,
    "trainer_loss": trainer_loss,
    "bert_finetune": bert_finetune,
    "mixtral_forward": mixtral_forward,
    "clip_forward": clip_forward,
    "reward_pairs": reward_pairs,
}
