"""PEFT: adapters added, switched, scaled, merged and turned off."""

from __future__ import annotations

from typing import Any

import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def _lora() -> Any:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config).eval(), adapter)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model.eval()


def _base() -> Any:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def lora_forward(wrap: Any) -> Any:
    model = _lora()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(input_ids=torch.randint(0, 64, (2, 8)), use_cache=False).logits

    return step, [
        lambda: model.set_adapter("other"),
        lambda: model.set_adapter("default"),
        lambda: model.base_model.disable_adapter_layers(),
        lambda: model.base_model.enable_adapter_layers(),
        lambda: [layer.set_scale("default", 3.0) for layer in model.modules() if hasattr(layer, "set_scale")],
        lambda: model.merge_adapter(),
        lambda: model.unmerge_adapter(),
    ]


def lora_training(wrap: Any) -> Any:
    model = _lora().train()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)

    @wrap
    def train(ids: Any) -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return lambda _: (
        train(torch.randint(0, 64, (2, 8))),
        next(parameter for parameter in model.parameters() if parameter.requires_grad),
    )


def lora_reference(wrap: Any) -> Any:
    """A step of preference tuning: the same batch with the adapters and without."""
    model = _lora()
    call = wrap(model)

    def step(_: int) -> Any:
        ids = torch.randint(0, 64, (2, 8))
        with torch.no_grad():
            with model.disable_adapter():
                plain = call(input_ids=ids, use_cache=False).logits
            return call(input_ids=ids, use_cache=False).logits - plain

    return step


def lora_switching(wrap: Any) -> Any:
    """Requests of a server that has an adapter for each customer."""
    model = _lora()
    call = wrap(model)

    def step(n: int) -> Any:
        model.set_adapter("other" if n % 3 == 0 else "default")
        with torch.no_grad():
            return call(input_ids=torch.randint(0, 64, (2, 8)), use_cache=False).logits

    return step


def ia3_forward(wrap: Any) -> Any:
    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(_base(), config).eval()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(input_ids=torch.randint(0, 64, (2, 8)), use_cache=False).logits

    return step, [lambda: model.merge_adapter(), lambda: model.unmerge_adapter()]


def prompt_tuning(wrap: Any) -> Any:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(_base(), config).eval()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(
                input_ids=torch.randint(0, 64, (2, 8)), attention_mask=torch.ones(2, 8).long(), use_cache=False
            ).logits

    return step


def dora_training(wrap: Any) -> Any:
    model = get_peft_model(_base(), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, lora_dropout=0.1)).train()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    forward = wrap(model)

    def step(_: int) -> Any:
        ids = torch.randint(0, 64, (2, 8))
        loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), [parameter for parameter in model.parameters() if parameter.requires_grad]

    return step


PROGRAMS = {
    "lora_forward": lora_forward,
    "lora_training": lora_training,
    "lora_reference": lora_reference,
    "lora_switching": lora_switching,
    "ia3_forward": ia3_forward,
    "prompt_tuning": prompt_tuning,
    "dora_training": dora_training,
}
