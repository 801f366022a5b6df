"""Small versions of more than twenty real architectures of transformers, with random weights: real widths but four
layers, so that launches take most of the time and compiling takes little."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from benchmarks.gpu.nets import made, transformers
from benchmarks.gpu.setting import Setting

LENGTH, BATCH, PIXELS = 64, 1, 64
WIDTH, LAYERS, HEADS = (768, 64), (4, 2), (12, 4)  # full size, tiny size


@frozen
class Net:
    """``family`` and ``config`` name classes of transformers; ``sizes``: settings of the config; ``takes``: what its
    inputs are."""

    name: str
    family: str
    config: str
    sizes: dict[str, Any]
    takes: str = "tokens"

    def build(self, setting: Setting) -> Any:
        """The model, without dropout, float32."""
        sizes = {key: _sized(value, setting) for key, value in self.sizes.items()}
        config = getattr(transformers(), self.config)(**sizes)
        return made(self.family, config, torch.float32, setting, 0).requires_grad_()

    def inputs(self, setting: Setting, seed: int) -> dict[str, torch.Tensor]:
        """Values that follow from the seed."""
        generator = torch.Generator().manual_seed(seed)
        if self.takes == "pixels":
            side = setting.pick(PIXELS, 32)
            values = {"pixel_values": torch.randn(BATCH, 3, side, side, generator=generator)}
        else:
            # No token comes twice: Inductor's kernels would add the gradients of its row in any order.
            ids = torch.randperm(195, generator=generator)[None, : setting.pick(LENGTH, 16)] + 5
            values = {"input_ids": ids}
            if self.takes == "both":
                values["decoder_input_ids"] = ids.flip(1)
        return {key: value.to(setting.device) for key, value in values.items()}


def _sized(value: Any, setting: Setting) -> Any:
    return setting.pick(*value) if isinstance(value, tuple) else value


_USUAL = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_WIDE = {**_USUAL, "intermediate_size": (3072, 128)}
_VOCABULARY = {"vocab_size": (32_000, 256)}
_LLAMA = {**_WIDE, **_VOCABULARY, "num_key_value_heads": (4, 2)}
_PICTURE = {**_WIDE, "image_size": (PIXELS, 32), "patch_size": 16}
_MASKED, _CAUSAL, _PICTURES = "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForImageClassification"

NETS = (
    Net("BERT", _MASKED, "BertConfig", _WIDE),
    Net("RoBERTa", _MASKED, "RobertaConfig", _WIDE),
    Net("ELECTRA", _MASKED, "ElectraConfig", {**_WIDE, "embedding_size": WIDTH}),
    Net("ALBERT", _MASKED, "AlbertConfig", {**_WIDE, "embedding_size": 128}),
    Net("DistilBERT", _MASKED, "DistilBertConfig", {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS,
                                                    "hidden_dim": (3072, 128)}),
    Net("GPT-2", _CAUSAL, "GPT2Config", {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}),
    Net("GPT-NeoX", _CAUSAL, "GPTNeoXConfig", _WIDE),
    Net("GPT-J", _CAUSAL, "GPTJConfig", {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "rotary_dim": (64, 16)}),
    Net("OPT", _CAUSAL, "OPTConfig", {**_USUAL, "ffn_dim": (3072, 128), "word_embed_proj_dim": WIDTH}),
    Net("BLOOM", _CAUSAL, "BloomConfig", {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, **_VOCABULARY}),
    Net("Llama", _CAUSAL, "LlamaConfig", _LLAMA),
    Net("Mistral", _CAUSAL, "MistralConfig", _LLAMA),
    Net("Qwen2", _CAUSAL, "Qwen2Config", _LLAMA),
    Net("Qwen3", _CAUSAL, "Qwen3Config", {**_LLAMA, "head_dim": (64, 16)}),
    Net("Gemma", _CAUSAL, "GemmaConfig", {**_LLAMA, "head_dim": (64, 16)}),
    Net("Phi", _CAUSAL, "PhiConfig", {**_WIDE, **_VOCABULARY}),
    Net("StableLM", _CAUSAL, "StableLmConfig", _LLAMA),
    Net("OLMo", _CAUSAL, "OlmoConfig", _LLAMA),
    Net("Falcon", _CAUSAL, "FalconConfig", {**_USUAL, **_VOCABULARY}),
    Net("T5", "AutoModelForSeq2SeqLM", "T5Config", {
        "d_model": WIDTH, "d_kv": (64, 16), "d_ff": (3072, 128), "num_layers": LAYERS, "num_heads": HEADS,
        "decoder_start_token_id": 0,
    }, takes="both"),
    Net("BART", "AutoModelForSeq2SeqLM", "BartConfig", {
        "d_model": WIDTH, "encoder_layers": (2, 1), "decoder_layers": (2, 1), "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS, "encoder_ffn_dim": (3072, 128), "decoder_ffn_dim": (3072, 128),
    }, takes="both"),
    Net("ViT", _PICTURES, "ViTConfig", _PICTURE, takes="pixels"),
    Net("DINOv2", _PICTURES, "Dinov2Config", {**_USUAL, "image_size": (PIXELS, 32), "patch_size": 16}, takes="pixels"),
    Net("ConvNeXt", _PICTURES, "ConvNextConfig", {"depths": ([1, 1, 2, 1], [1, 1, 1, 1]),
                                                  "hidden_sizes": ([96, 192, 384, 768], [8, 16, 32, 64])},
        takes="pixels"),
    Net("ResNet", _PICTURES, "ResNetConfig", {"depths": ([2, 2, 2, 2], [1, 1, 1, 1]), "layer_type": "basic",
                                              "hidden_sizes": ([64, 128, 256, 512], [8, 16, 32, 64])},
        takes="pixels"),
)  # fmt: skip
