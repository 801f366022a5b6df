"""Real architectures with random weights. transformers and torchvision are imported when a model is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.setting import Setting

Step = Callable[[Tensor], Tensor]
PROMPT = 32  # tokens


def transformers() -> Any:
    """The package transformers, with its log turned off."""
    package = importlib.import_module("transformers")
    package.logging.set_verbosity_error()
    return package


def llama(setting: Setting, *, seed: int = 0) -> Any:
    """Llama-shaped, 1.2 billion parameters, bfloat16, input and output embeddings tied."""
    big = setting.pick(True, False)
    config = transformers().LlamaConfig(
        hidden_size=2048 if big else 64, num_hidden_layers=16 if big else 2, num_attention_heads=32 if big else 4,
        num_key_value_heads=8 if big else 2, intermediate_size=8192 if big else 128,
        vocab_size=128_256 if big else 256, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return made("AutoModelForCausalLM", config, torch.bfloat16, setting, seed)


def gpt2(setting: Setting) -> Any:
    """GPT-2 small, 124 million parameters, float32."""
    tiny = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256}
    config = transformers().GPT2Config(**setting.pick({}, tiny))
    return made("AutoModelForCausalLM", config, torch.float32, setting, 1)


def mamba(setting: Setting) -> Any:
    """Mamba, 130 million parameters, bfloat16."""
    small = {"hidden_size": 768, "num_hidden_layers": 24}
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256}
    config = transformers().MambaConfig(**setting.pick(small, tiny))
    return made("AutoModelForCausalLM", config, torch.bfloat16, setting, 2)


def t5(setting: Setting) -> Any:
    """T5 small, 60 million parameters, float32."""
    tiny = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
    config = transformers().T5Config(decoder_start_token_id=0, **setting.pick({}, tiny))
    return made("AutoModelForSeq2SeqLM", config, torch.float32, setting, 3)


def mixtral(setting: Setting, experts: str) -> Any:
    """A small Mixtral: 4 layers of 8 experts, 2 a token, bfloat16. ``experts``: how transformers computes them."""
    small = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
             "intermediate_size": 1024, "vocab_size": 32_000}  # fmt: skip
    tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 128, "vocab_size": 256}  # fmt: skip
    config = transformers().MixtralConfig(
        num_local_experts=8, experts_implementation=experts, **setting.pick(small, tiny)
    )
    return made("AutoModelForCausalLM", config, torch.bfloat16, setting, 4)


def made(family: str, config: Any, dtype: torch.dtype, setting: Setting, seed: int) -> Any:
    """A model of transformers that needs no gradients. ``family``: name of the class that makes it of its config."""
    torch.manual_seed(seed)
    with torch.device(setting.device):
        model = getattr(transformers(), family).from_config(config, dtype=dtype)
    return model.to(setting.device).eval().requires_grad_(False)


def vision(name: str, setting: Setting) -> Any:
    """A torchvision model without its weights, float32: ``resnet50``, ``vit_b_16``."""
    models = importlib.import_module("torchvision.models")
    torch.manual_seed(5)
    with torch.device(setting.device):
        if not setting.tiny:
            model = getattr(models, name)(weights=None)
        elif name == "resnet50":
            blocks = importlib.import_module("torchvision.models.resnet")
            model = blocks.ResNet(blocks.Bottleneck, [1, 1, 1, 1], num_classes=10)
        else:
            model = models.VisionTransformer(
                image_size=32, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
            )
        for head in model.modules():  # torchvision's ViT has a head of zeros, which would hide every difference
            if isinstance(head, torch.nn.Linear) and not head.weight.any():
                torch.nn.init.normal_(head.weight, std=0.02)
    return model.eval().requires_grad_(False)


def static_cache(model: Any, length: int, setting: Setting) -> Any:
    """An empty ``StaticCache`` whose tensors exist from the start. ``length`` in tokens."""
    config = model.config
    cache = transformers().StaticCache(config=config, max_cache_len=length)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, heads, width, model.dtype, torch.device(setting.device))
    return cache


def prompt(model: Any, setting: Setting, *, length: int = PROMPT) -> Tensor:
    """Random tokens, the same for all: 1 x ``length``."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator).to(setting.device)


def token_step(model: Any, cache: Any) -> Step:
    """One whole step: token (1 x 1) to next token."""

    def step(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids, past_key_values=cache, use_cache=True).logits
        return logits[:, -1:].argmax(-1)

    return step


def logits_step(model: Any, cache: Any) -> Step:
    """Token (1 x 1) to logits (1 x vocabulary)."""

    def step(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids, past_key_values=cache, use_cache=True).logits
        return logits[:, -1]

    return step
