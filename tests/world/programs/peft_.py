"""PEFT: adapters added, switched, scaled, merged and turned off."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
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
        lambda: [one.set_scale("default", 3.0) for one in model.modules() if hasattr(one, "set_scale")],
        lambda: model.merge_adapter(),
        lambda: model.unmerge_adapter(),
    ]


def lora_training(wrap: Any) -> Any:
    model = _lora().train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)

    @wrap
    def train(ids: Any) -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return lambda _: (train(torch.randint(0, 64, (2, 8))), next(one for one in model.parameters() if one.requires_grad))


PROGRAMS = {
    "lora_forward": lora_forward,
    "lora_training": lora_training,
}
