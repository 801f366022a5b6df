"""diffusers: a tiny UNet, a transformer and an autoencoder, with the library's own processors."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0


def _unet() -> Any:
    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4,
    ).eval()  # fmt: skip


def unet(wrap: Any) -> Any:
    model = _unet()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(torch.randn(1, 4, 8, 8), torch.tensor(7), encoder_hidden_states=torch.randn(1, 3, 16)).sample

    return step, [
        lambda: model.set_attn_processor(AttnProcessor()),
        lambda: model.set_attn_processor(AttnProcessor2_0()),
        lambda: model.fuse_qkv_projections(),
        lambda: model.unfuse_qkv_projections(),
    ]


def unet_step(wrap: Any) -> Any:
    model, scheduler = _unet(), DDIMScheduler(num_train_timesteps=100)
    scheduler.set_timesteps(20)

    @wrap
    def guided(sample: Any, at: Any, text: Any) -> Any:
        plain, told = model(torch.cat([sample] * 2), at, encoder_hidden_states=text).sample.chunk(2)
        return plain + 7.5 * (told - plain)

    def step(n: int) -> Any:
        at = scheduler.timesteps[n % 20]
        sample = torch.randn(1, 4, 8, 8)
        with torch.no_grad():
            return scheduler.step(guided(sample, at, torch.randn(2, 3, 16)), at, sample).prev_sample

    return step


def autoencoder(wrap: Any) -> Any:
    model = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8).eval()
    call = wrap(model)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(torch.randn(1, 3, 8, 8)).sample

    return step, [lambda: model.enable_slicing(), lambda: model.enable_tiling(), lambda: model.disable_tiling()]


PROGRAMS = {
    "unet": unet,
    "unet_step": unet_step,
    "autoencoder": autoencoder,
}
