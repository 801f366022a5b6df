"""Images and what makes them, in one file each: diffusion, GANs, flows, autoencoders, contrast, style, classifiers."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F

from tests.world.parts import mlp, state_of


class Noise(nn.Module):
    """The network that predicts the noise of a small image, for a time and a class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.time, self.label = nn.GroupNorm(2, 8), mlp(8, 16, 8), nn.Embedding(5, 8)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Any, t: Any, y: Any = None) -> Any:
        half = torch.exp(-math.log(10000) * torch.arange(4, dtype=torch.float32) / 4)
        args = t.float()[:, None] * half[None]
        emb = self.time(torch.cat([args.cos(), args.sin()], -1))
        if y is not None:
            emb = emb + self.label(y)
        h = F.silu(self.norm(self.first(x)) + emb[:, :, None, None])
        return self.last(F.silu(self.middle(h)) + h)


class Schedule:
    def __init__(self, steps: int = 20) -> None:
        self.T = steps
        self.betas = torch.linspace(1e-4, 0.02, steps)
        self.alphas_cumprod = torch.cumprod(1.0 - self.betas, 0)
        self.posterior_variance = (
            self.betas * (1 - F.pad(self.alphas_cumprod[:-1], (1, 0), value=1.0)) / (1 - self.alphas_cumprod)
        )


def extract(a: Any, t: Any, x_shape: Any) -> Any:
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))


class EMA:
    def __init__(self, beta: float) -> None:
        self.beta, self.step = beta, 0

    def step_ema(self, ema_model: Any, model: Any, step_start_ema: int = 5) -> None:
        if self.step < step_start_ema:
            ema_model.load_state_dict(model.state_dict())
            self.step += 1
            return
        for own, ema in zip(model.parameters(), ema_model.parameters(), strict=True):
            ema.data = ema.data * self.beta + (1 - self.beta) * own.data
        self.step += 1


def ddpm_train(wrap: Any) -> Any:
    """DDPM with labels that are dropped, and averaged weights that begin after some steps, in one step."""
    model, schedule, ema = Noise(), Schedule(), EMA(0.995)
    ema_model, optimizer = copy.deepcopy(model).eval().requires_grad_(False), optim.AdamW(model.parameters(), lr=3e-4)

    @wrap
    def train(images: Any, labels: Any) -> Any:
        t = torch.randint(low=1, high=schedule.T, size=(images.shape[0],))
        noise = torch.randn_like(images)
        scale = extract(schedule.alphas_cumprod, t, images.shape)
        x_t = scale.sqrt() * images + (1 - scale).sqrt() * noise
        if np.random.random() < 0.1:
            labels = None
        loss = F.mse_loss(noise, model(x_t, t, labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.step_ema(ema_model, model)
        return loss.item()

    def step(n: int) -> Any:
        np.random.seed(n)
        return train(torch.randn(4, 1, 6, 6), torch.randint(0, 5, (4,))), state_of(model, ema_model, optimizer)

    return step


def ddpm_sample(wrap: Any) -> Any:
    """DDPM's loop: the step asks for the index, a Python number, and draws no noise in the last one."""
    model, schedule = Noise().eval(), Schedule()

    @wrap
    @torch.no_grad()
    def p_sample(x: Any, t: Any, t_index: int) -> Any:
        betas_t = extract(schedule.betas, t, x.shape)
        mean = (x - betas_t * model(x, t) / (1 - extract(schedule.alphas_cumprod, t, x.shape)).sqrt()) / (
            1 - betas_t
        ).sqrt()
        if t_index == 0:
            return mean
        return mean + extract(schedule.posterior_variance, t, x.shape).sqrt() * torch.randn_like(x)

    def step(_: int) -> Any:
        img, imgs = torch.randn(2, 1, 6, 6), []
        for i in reversed(range(schedule.T)):
            img = p_sample(img, torch.full((2,), i, dtype=torch.long), i)
            imgs.append(img.cpu().numpy())
        return np.stack(imgs), torch.get_rng_state()

    return step


def ddim_guided(wrap: Any) -> Any:
    """DDIM with guidance: times and factors are Python numbers, read from the schedule in the step."""
    model, schedule = Noise().eval(), Schedule()

    @wrap
    @torch.no_grad()
    def step_ddim(x: Any, time: int, time_next: int, classes: Any, cond_scale: float, eta: float) -> Any:
        t = torch.full((x.shape[0],), time, dtype=torch.long)
        noise = model(x, t)
        noise = noise + (model(x, t, classes) - noise) * cond_scale
        alpha = schedule.alphas_cumprod[time]
        x_start = ((x - (1 - alpha).sqrt() * noise) / alpha.sqrt()).clamp(-1, 1)
        if time_next < 0:
            return x_start
        alpha_next = schedule.alphas_cumprod[time_next]
        sigma = eta * ((1 - alpha / alpha_next) * (1 - alpha_next) / (1 - alpha)).sqrt()
        c = (1 - alpha_next - sigma**2).sqrt()
        return x_start * alpha_next.sqrt() + c * noise + sigma * torch.randn_like(x)

    def step(_: int) -> Any:
        times = list(reversed(torch.linspace(-1, schedule.T - 1, steps=6).int().tolist()))
        img, classes = torch.randn(2, 1, 6, 6), torch.randint(0, 5, (2,))
        for time, time_next in itertools.pairwise(times):
            img = step_ddim(img, time, time_next, classes, 3.0, 0.5)
        return img, torch.get_rng_state()

    return step


def flow_matching(wrap: Any) -> Any:
    """Flow matching: a training step, and Euler's steps at times that are Python numbers."""
    net = mlp(3, 32, 32, 2)
    optimizer = optim.Adam(net.parameters(), lr=1e-2)

    @wrap
    def train(x_1: Any) -> Any:
        x_0, t = torch.randn_like(x_1), torch.rand(len(x_1), 1)
        x_t, dx_t = (1 - t) * x_0 + t * x_1, x_1 - x_0
        optimizer.zero_grad()
        loss = F.mse_loss(net(torch.cat((t, x_t), -1)), dx_t)
        loss.backward()
        optimizer.step()
        return loss.item()

    @wrap
    @torch.no_grad()
    def euler(x: Any, t_start: float, t_end: float) -> Any:
        middle = (t_start + t_end) / 2
        t = torch.full((len(x), 1), t_start)
        x_mid = x + net(torch.cat((t, x), -1)) * (t_end - t_start) / 2
        return x + (t_end - t_start) * net(torch.cat((torch.full_like(t, middle), x_mid), -1))

    def step(n: int) -> Any:
        loss, x = train(torch.randn(16, 2)), torch.randn(8, 2)
        steps = torch.linspace(0, 1.0, 5)
        if n % 10 == 0:
            for i in range(4):
                x = euler(x, steps[i].item(), steps[i + 1].item())
        return loss, x, state_of(net, optimizer)

    return step


def karras(wrap: Any) -> Any:
    """A sampler of second order over noise levels: tensors for levels, a last step of first order."""
    model = Noise().eval()

    def denoise(x: Any, sigma: Any) -> Any:
        c_skip, c_out = 0.25 / (sigma**2 + 0.25), sigma * 0.5 / (sigma**2 + 0.25).sqrt()
        inner = model(x / (sigma**2 + 0.25).sqrt(), (sigma.log() / 4).expand(len(x)))
        return c_skip * x + c_out * inner

    @wrap
    @torch.no_grad()
    def heun(x_cur: Any, t_cur: Any, t_next: Any, i: int, num_steps: int) -> Any:
        gamma = min(0.5 / num_steps, math.sqrt(2) - 1) if 0.05 <= t_cur <= 50 else 0
        t_hat = t_cur + gamma * t_cur
        x_hat = x_cur + (t_hat**2 - t_cur**2).sqrt() * torch.randn_like(x_cur)
        d_cur = (x_hat - denoise(x_hat, t_hat)) / t_hat
        x_next = x_hat + (t_next - t_hat) * d_cur
        if i < num_steps - 1:
            d_prime = (x_next - denoise(x_next, t_next)) / t_next
            x_next = x_hat + (t_next - t_hat) * (0.5 * d_cur + 0.5 * d_prime)
        return x_next

    def step(_: int) -> Any:
        indices = torch.arange(6)
        t_steps = (80 ** (1 / 7) + indices / 5 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
        t_steps = torch.cat([t_steps, torch.zeros(1)])
        x = torch.randn(2, 1, 6, 6) * t_steps[0]
        for i, (t_cur, t_next) in enumerate(itertools.pairwise(t_steps)):
            x = heun(x, t_cur, t_next, i, 6)
        return x, torch.get_rng_state()

    return step


def vae(wrap: Any) -> Any:
    """torch's example: a sum of losses that Python keeps, and a line now and then."""
    encoder, mu_head, logvar_head, decoder = mlp(16, 24), nn.Linear(24, 4), nn.Linear(24, 4), mlp(4, 24, 16)
    params = [p for part in (encoder, mu_head, logvar_head, decoder) for p in part.parameters()]
    optimizer, stats, lines = optim.Adam(params, lr=1e-3), {"train_loss": 0.0}, []

    @wrap
    def train(data: Any, batch_idx: int) -> None:
        optimizer.zero_grad()
        h = F.relu(encoder(data.view(-1, 16)))
        mu, logvar = mu_head(h), logvar_head(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        recon = torch.sigmoid(decoder(F.relu(z)))
        bce = F.binary_cross_entropy(recon, data.view(-1, 16), reduction="sum")
        loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss.backward()
        stats["train_loss"] += loss.item()
        optimizer.step()
        if batch_idx % 10 == 0:
            lines.append(f"{batch_idx}: {loss.item() / len(data):.6f}")

    def step(n: int) -> Any:
        train(torch.rand(8, 4, 4), n % 50)
        return stats["train_loss"], lines[-1], len(lines), state_of(encoder, mu_head, logvar_head, decoder, optimizer)

    return step


def dcgan(wrap: Any) -> Any:
    """torch's example: two updates in one step, with the numbers that it logs."""
    netg = nn.Sequential(nn.ConvTranspose2d(6, 8, 4), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 1, 1), nn.Tanh())
    netd = nn.Sequential(nn.Conv2d(1, 8, 2, 2), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 2), nn.Sigmoid())
    criterion, fixed = nn.BCELoss(), torch.randn(4, 6, 1, 1)
    optim_d, optim_g = (optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (netd, netg))

    @wrap
    def train(real: Any) -> Any:
        netd.zero_grad()
        label = torch.full((real.size(0),), 1.0, dtype=real.dtype)
        output = netd(real).view(-1)
        err_real = criterion(output, label)
        err_real.backward()
        d_x = output.mean().item()
        fake = netg(torch.randn(real.size(0), 6, 1, 1))
        label.fill_(0.0)
        output = netd(fake.detach()).view(-1)
        err_fake = criterion(output, label)
        err_fake.backward()
        d_g_z1 = output.mean().item()
        err_d = err_real + err_fake
        optim_d.step()
        netg.zero_grad()
        label.fill_(1.0)
        output = netd(fake).view(-1)
        err_g = criterion(output, label)
        err_g.backward()
        d_g_z2 = output.mean().item()
        optim_g.step()
        return err_d.item(), err_g.item(), d_x, d_g_z1, d_g_z2

    def step(n: int) -> Any:
        found = train(torch.randn(4, 1, 4, 4))
        shown = netg(fixed).detach() if n % 20 == 0 else None
        return found, shown, state_of(netg, netd, optim_d, optim_g)

    return step


def wgan_gp(wrap: Any) -> Any:
    """A critic with a penalty of its gradients; the generator learns every fifth time, inside of the step."""
    generator, critic = mlp(4, 24, 8), mlp(8, 24, 1)
    opt_g, opt_d = (optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for net in (generator, critic))

    @wrap
    def train(real: Any, i: int) -> Any:
        opt_d.zero_grad()
        fake = generator(torch.randn(len(real), 4))
        alpha = torch.rand(len(real), 1)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = critic(between)
        (gradients,) = torch.autograd.grad(
            score, between, torch.ones_like(score), create_graph=True, retain_graph=True, only_inputs=True
        )
        penalty = ((gradients.view(len(real), -1).norm(2, dim=1) - 1) ** 2).mean()
        d_loss = -critic(real).mean() + critic(fake).mean() + 10 * penalty
        d_loss.backward()
        opt_d.step()
        opt_g.zero_grad()
        if i % 5 == 0:
            g_loss = -critic(generator(torch.randn(len(real), 4))).mean()
            g_loss.backward()
            opt_g.step()
        return d_loss.item()

    def step(n: int) -> Any:
        return train(torch.randn(8, 8), n), state_of(generator, critic, opt_g, opt_d)

    return step


def realnvp(wrap: Any) -> Any:
    """Coupling layers with masks; the likelihood of a batch and samples."""
    masks = torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 2)
    scale, shift = (nn.ModuleList([mlp(2, 16, 2) for _ in range(4)]) for _ in range(2))
    optimizer = optim.Adam([*scale.parameters(), *shift.parameters()], lr=1e-3)
    prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))

    @wrap
    def train(x: Any) -> Any:
        log_det, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(4)):
            z_ = masks[i] * z
            s, t = torch.tanh(scale[i](z_)) * (1 - masks[i]), shift[i](z_) * (1 - masks[i])
            z = (1 - masks[i]) * (z - t) * torch.exp(-s) + z_
            log_det -= s.sum(dim=1)
        loss = -(prior.log_prob(z) + log_det).mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        return loss.item()

    @wrap
    @torch.no_grad()
    def sample(count: int) -> Any:
        x = prior.sample((count, 1)).squeeze(1)
        for i in range(4):
            x_ = x * masks[i]
            s, t = torch.tanh(scale[i](x_)) * (1 - masks[i]), shift[i](x_) * (1 - masks[i])
            x = x_ + (1 - masks[i]) * (x * torch.exp(s) + t)
        return x.numpy()

    def step(n: int) -> Any:
        loss = train(torch.randn(16, 2))
        if loss != loss:
            raise ValueError(loss)
        return loss, sample(8) if n % 10 == 0 else None, state_of(scale, shift, optimizer)

    return step


def vqvae(wrap: Any) -> Any:
    """A codebook that follows its codes, and the perplexity for the log."""
    encoder, decoder = mlp(8, 16, 4), mlp(4, 16, 8)
    codes, counts, sums = torch.randn(12, 4), torch.zeros(12), torch.randn(12, 4)
    optimizer, log = optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3), {"perplexity": []}

    @wrap
    def train(x: Any) -> Any:
        z = encoder(x)
        distances = z.pow(2).sum(1, keepdim=True) + codes.pow(2).sum(1) - 2 * z @ codes.t()
        indices = distances.argmin(1).unsqueeze(1)
        encodings = torch.zeros(indices.shape[0], 12)
        encodings.scatter_(1, indices, 1)
        quantized = encodings @ codes
        with torch.no_grad():
            counts.mul_(0.99).add_(encodings.sum(0), alpha=0.01)
            n = counts.sum()
            counts.copy_((counts + 1e-5) / (n + 12 * 1e-5) * n)
            sums.mul_(0.99).add_(encodings.t() @ z, alpha=0.01)
            codes.copy_(sums / counts.unsqueeze(1))
        loss = 0.25 * F.mse_loss(quantized.detach(), z)
        quantized = z + (quantized - z).detach()
        avg = encodings.mean(0)
        recon_error = F.mse_loss(decoder(quantized), x)
        optimizer.zero_grad()
        (loss + recon_error).backward()
        optimizer.step()
        log["perplexity"].append(torch.exp(-torch.sum(avg * torch.log(avg + 1e-10))).item())
        return recon_error.item()

    def step(_: int) -> Any:
        return train(torch.randn(16, 8)), log["perplexity"][-1], codes, state_of(encoder, decoder, optimizer)

    return step


def moco(wrap: Any) -> Any:
    """MoCo: a queue with a pointer in a buffer, a key encoder that follows."""
    m, t, size = 0.99, 0.07, 32

    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder_q, self.encoder_k = mlp(8, 16, 4), mlp(8, 16, 4)
            for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                k.data.copy_(q.data)
                k.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(4, size), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def _dequeue_and_enqueue(self, keys: Any) -> None:
            batch_size, ptr = keys.shape[0], int(self.queue_ptr)
            assert size % batch_size == 0
            self.queue[:, ptr : ptr + batch_size] = keys.T
            self.queue_ptr[0] = (ptr + batch_size) % size

        def forward(self, im_q: Any, im_k: Any) -> Any:
            q = F.normalize(self.encoder_q(im_q), dim=1)
            with torch.no_grad():
                for a, b in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                    b.data = b.data * m + a.data * (1.0 - m)
                idx_shuffle = torch.randperm(im_k.shape[0])
                k = F.normalize(self.encoder_k(im_k[idx_shuffle]), dim=1)[torch.argsort(idx_shuffle)]
            l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
            l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
            logits = torch.cat([l_pos, l_neg], dim=1) / t
            self._dequeue_and_enqueue(k)
            return logits, torch.zeros(logits.shape[0], dtype=torch.long)

    model = MoCo()
    optimizer = optim.SGD(model.encoder_q.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)

    @wrap
    def train(im_q: Any, im_k: Any) -> Any:
        output, target = model(im_q, im_k)
        loss = F.cross_entropy(output, target)
        correct = output.topk(1, 1)[1].t().eq(target.view(1, -1)).reshape(-1).float().sum(0) * (100.0 / 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), correct.item()

    def step(_: int) -> Any:
        x = torch.randn(8, 8)
        return train(x + 0.1 * torch.randn(8, 8), x), state_of(model, optimizer)

    return step


def style_transfer(wrap: Any) -> Any:
    """torch's tutorial: an image is fitted, the closure counts its runs in a list."""
    cnn = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()).eval()
    cnn.requires_grad_(False)

    def gram_matrix(x: Any) -> Any:
        a, b, c, d = x.size()
        features = x.view(a * b, c * d)
        return torch.mm(features, features.t()).div(a * b * c * d)

    content, style = torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8)
    content_target, style_target = cnn(content).detach(), gram_matrix(cnn[:2](style)).detach()
    input_img = content.clone().requires_grad_(True)
    optimizer, run, log = optim.Adam([input_img], lr=0.02), [0], []

    @wrap
    def closure() -> Any:
        with torch.no_grad():
            input_img.clamp_(0, 1)
        optimizer.zero_grad()
        first = cnn[:2](input_img)
        style_score = F.mse_loss(gram_matrix(first), style_target) * 1000000
        content_score = F.mse_loss(cnn[2:](first), content_target)
        loss = style_score + content_score
        loss.backward()
        run[0] += 1
        if run[0] % 50 == 0:
            log.append(f"run {run}: {style_score.item():4f} {content_score.item():4f}")
        optimizer.step()
        return loss.detach()

    def step(_: int) -> Any:
        return closure(), run, log, input_img.detach(), state_of(optimizer)

    return step


PROGRAMS = {
    "ddpm_train": ddpm_train,
    "ddpm_sample": ddpm_sample,
    "ddim_guided": ddim_guided,
    "flow_matching": flow_matching,
    "karras": karras,
    "vae": vae,
    "dcgan": dcgan,
    "wgan_gp": wgan_gp,
    "realnvp": realnvp,
    "vqvae": vqvae,
    "moco": moco,
    "style_transfer": style_transfer,
}
