"""diffusers: a tiny UNet, a transformer and an autoencoder, with the library's own processors."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    UNet2DConditionModel,
    UNet2DModel,
)
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


def _denoise(wrap: Any, scheduler: Any) -> Any:
    model = _unet()
    model.forward = wrap(model.forward)

    def step(_: int) -> Any:
        scheduler.set_timesteps(5)
        latents, text = torch.randn(1, 4, 8, 8) * scheduler.init_noise_sigma, torch.randn(2, 3, 16)
        with torch.no_grad():
            for t in scheduler.timesteps:
                given = scheduler.scale_model_input(torch.cat([latents] * 2), t)
                plain, told = model(given, t, encoder_hidden_states=text, return_dict=False)[0].chunk(2)
                latents = scheduler.step(plain + 5.0 * (told - plain), t, latents).prev_sample
        return latents

    return step


def denoise_euler(wrap: Any) -> Any:
    return _denoise(wrap, EulerDiscreteScheduler(num_train_timesteps=100))


def denoise_dpm(wrap: Any) -> Any:
    return _denoise(wrap, DPMSolverMultistepScheduler(num_train_timesteps=100))


def euler_whole_step(wrap: Any) -> Any:
    model, scheduler = _unet(), EulerDiscreteScheduler(num_train_timesteps=100)

    @wrap
    def denoise(latents: Any, t: Any, text: Any) -> Any:
        given = scheduler.scale_model_input(torch.cat([latents] * 2), t)
        plain, told = model(given, t, encoder_hidden_states=text).sample.chunk(2)
        return scheduler.step(plain + 5.0 * (told - plain), t, latents).prev_sample

    def step(_: int) -> Any:
        scheduler.set_timesteps(4)
        latents, text = torch.randn(1, 4, 8, 8), torch.randn(2, 3, 16)
        with torch.no_grad():
            for t in scheduler.timesteps:
                latents = denoise(latents, t, text)
        return latents

    return step


def _unconditional() -> Any:
    return UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


def ddpm_pipeline(wrap: Any) -> Any:
    model = _unconditional().eval()
    model.forward = wrap(model.forward)
    pipeline = DDPMPipeline(unet=model, scheduler=DDPMScheduler(num_train_timesteps=50))
    pipeline.set_progress_bar_config(disable=True)
    return lambda _: pipeline(batch_size=1, num_inference_steps=4, output_type="np").images.tolist()


def ddpm_training(wrap: Any) -> Any:
    model, scheduler = _unconditional().train(), DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @wrap
    def loss_of(clean: Any) -> Any:
        noise = torch.randn_like(clean)
        at = torch.randint(0, 50, (clean.shape[0],))
        return torch.nn.functional.mse_loss(model(scheduler.add_noise(clean, noise, at), at).sample, noise)

    def step(_: int) -> Any:
        loss = loss_of(torch.randn(2, 3, 8, 8))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), next(model.parameters())

    return step


def unet_checkpointed(wrap: Any) -> Any:
    model = _unconditional().train()
    model.enable_gradient_checkpointing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @wrap
    def train(x: Any, at: Any) -> Any:
        loss = model(x, at).sample.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return lambda _: (train(torch.randn(1, 3, 8, 8), torch.tensor([3])), next(model.parameters()))


def vae_sample(wrap: Any) -> Any:
    model = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8).eval()

    @wrap
    def encode(image: Any) -> Any:
        return model.encode(image).latent_dist.sample() * model.config.scaling_factor

    decode = wrap(model.decode)

    def step(_: int) -> Any:
        with torch.no_grad():
            return decode(encode(torch.randn(1, 3, 8, 8)) / model.config.scaling_factor).sample

    return step


def dit(wrap: Any) -> Any:
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    ).eval()  # fmt: skip
    call = wrap(model)

    def step(n: int) -> Any:
        with torch.no_grad():
            return call(
                torch.randn(2, 4, 8, 8), timestep=torch.tensor([n % 50] * 2), class_labels=torch.tensor([1, 2])
            ).sample

    return step


PROGRAMS = {
    "unet": unet,
    "unet_step": unet_step,
    "autoencoder": autoencoder,
    "denoise_euler": denoise_euler,
    "denoise_dpm": denoise_dpm,
    "euler_whole_step": euler_whole_step,
    "ddpm_pipeline": ddpm_pipeline,
    "ddpm_training": ddpm_training,
    "unet_checkpointed": unet_checkpointed,
    "vae_sample": vae_sample,
    "dit": dit,
}
