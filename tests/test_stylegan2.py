"""The GAN script: the published network number by number, its losses, and the promises of methods and loop."""

import argparse
import copy
import math
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from bench import grouped_convolutions
from conftest import ROOT, SMALL_GAN, assert_same_run, same, stopped, weights
from safetensors.torch import load_file
from test_methods import METHODS
from torch.nn import functional as F

import common
import runfolder
import streams
import train_stylegan2
from methods import _shared

GAN_METHODS = [m for m in METHODS if m != "clora"]
PENALTIES = ["l2", "ewc", "si", "mas"]


def networks(size, **changes):
    shape = dict(size=size, classes=5, latent=16, depth=2, channel_base=256, channel_max=16, residual=False,
                 mbstd_group=4)  # fmt: skip
    return train_stylegan2.build_networks(**{**shape, **changes})


def published(name):
    """A small network in the published layout: weights, inputs, outputs and gradients by their published names."""
    with np.load(ROOT / "tests" / "reference" / f"{name}.npz") as file:
        found = {key: torch.from_numpy(np.asarray(file[key])) for key in file.files}
    parts = {"G": {}, "D": {}, "in": {}, "out": {}, "gradG": {}, "gradD": {}}
    for key, value in found.items():
        part, name = key.split("/", 1)
        parts[part][name] = value
    return parts


def close(ours, theirs):
    """Within 1e-4 of the largest entry."""
    return (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.fixture
def learner(cache):
    args = train_stylegan2.parse_args(SMALL_GAN)
    return train_stylegan2.StyleGAN2(args, streams.load_data(streams.scenario(args.dataset), 8, cache), "cpu")


@pytest.fixture
def gan(cache):
    """method name → (method in its second task, learner)."""

    def build(name, *flags):
        args = train_stylegan2.parse_args([*SMALL_GAN, "--method", name, *flags])
        data = streams.load_data(streams.scenario(args.dataset), 8, cache)
        learner = train_stylegan2.StyleGAN2(args, data, "cpu")
        tasks = streams.split(learner.data, [0, 1, 2, 3], 2)
        method = runfolder.method_class(name)(args, learner)
        method.start_task(tasks[0], [])
        if name in ("er", "agem"):
            method.end_task(tasks[0])
        method.start_task(tasks[1], tasks[:1])
        return method, learner

    return build


def some_of(learner, count=8):
    """A batch of images of task 2."""
    some = np.flatnonzero(learner.data.labels >= 2)[:count]
    return learner.draw(learner.data.images[some], learner.data.labels[some], (1, 2, 0))


# --------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize(
    "name, size, shape", [("stylegan2_32_orig", 32, {}), ("stylegan2_64_resnet", 64, {"depth": 8, "residual": True})]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_published_network_number_by_number(name, size, shape, layout):
    """Latents, images, logits, losses, R1 of each image and every gradient; weights load by name."""
    known = published(name)
    G, D = (net.to(memory_format=layout) for net in networks(size, **shape))
    G.load_state_dict(known["G"], strict=True)
    D.load_state_dict(known["D"], strict=True)
    z, labels, real = known["in"]["z"], known["in"]["label"], known["in"]["real"]
    assert close(G.mapping(labels, z), known["out"]["w"])
    images = G(z, labels)
    plain = G(z, labels, torch.zeros(8, G.noise_numbers))
    assert close(images, known["out"]["img_const_noise"]) and close(plain, known["out"]["img_no_noise"])
    assert close(D(real, labels), known["out"]["logits_real"])
    assert close(D(images, labels), known["out"]["logits_fake_const_noise"])

    args = argparse.Namespace(size=size, classes=5, latent=16, depth=2, channel_base=256, channel_max=16,
                              residual=False, mbstd_group=4, seed=1, compile=False, precision="fp32",
                              r1_gamma=3.0)  # fmt: skip
    learner = train_stylegan2.StyleGAN2(args, None, "cpu")
    learner.G, learner.D = G, D
    noise = torch.zeros(8, 2, G.noise_numbers)
    batch = {"images": real, "labels": labels, "latents": torch.stack([z, z], 1), "noise": noise}
    g, d, r1 = learner.phases(0)
    for phase, value, gradients in ((g, "loss_G", "gradG"), (d, "loss_D", "gradD")):
        G.zero_grad()
        D.zero_grad()
        loss = learner.loss(phase, batch)
        loss.backward()
        assert close(loss, known["out"][value])
        net, other = (G, D) if phase is g else (D, G)
        for key, wanted in known[gradients].items():
            found = net.get_parameter(key).grad
            assert close(torch.zeros(()) if found is None else found, wanted), key
        assert len(known[gradients]) == len(list(net.parameters()))
        assert all(p.grad is None and p.requires_grad for p in other.parameters())
    wanted = 16 * 3.0 / 2 * known["out"]["r1_per_image"].mean()
    assert torch.isclose(learner.loss(r1, batch), wanted, rtol=1e-4)


@pytest.mark.parametrize(
    "preset, classes, g, d",
    [("S", 10, 20_215_315, 23_089_664), ("L", 200, 29_693_725, 30_855_424), ("L", 196, 29_691_677, 30_853_376),
     ("L", 100, 29_642_525, 30_804_224)],
)  # fmt: skip
def test_parameter_counts(preset, classes, g, d):
    args = argparse.Namespace(**train_stylegan2.PRESETS[preset], classes=classes)
    with torch.device("meta"):
        nets = train_stylegan2.build_networks(**train_stylegan2.shape_of(args))
    assert [sum(p.numel() for p in net.parameters()) for net in nets] == [g, d]


def test_scaled_activations_are_modulated_weights():
    """The published formulation, a convolution of its own for each image, gives the same images and gradients."""
    torch.manual_seed(0)
    G, _ = networks(16)
    with torch.no_grad():
        for p in G.parameters():
            p.add_(0.3 * torch.randn_like(p))
    other = grouped_convolutions(copy.deepcopy(G))
    z, labels, noise = torch.randn(6, 16), torch.arange(6) % 5, torch.randn(6, G.noise_numbers)
    slope = torch.randn(6, 3, 16, 16)
    images = [net(z, labels, noise) for net in (G, other)]
    assert close(*images)
    for image in images:
        (image * slope).sum().backward()
    for (name, a), b in zip(G.named_parameters(), other.parameters(), strict=True):
        assert close(a.grad, b.grad), name


def test_a_fresh_network_keeps_the_variance():
    """Equalised learning rate and gains: no layer of a new network blows numbers up or lets them fade."""
    torch.manual_seed(0)
    G, D = networks(32, latent=128, channel_max=128, channel_base=4096, residual=True)
    sizes = {}
    for name, module in [*G.named_modules(), *D.named_modules()]:
        if isinstance(module, train_stylegan2.StyleLayer | train_stylegan2.Conv):
            module.register_forward_hook(lambda m, i, out, n=name: sizes.update({n: out.square().mean().item()}))
    with torch.no_grad():
        labels = torch.arange(16) % 5
        D(G(torch.randn(16, 128), labels, torch.randn(16, G.noise_numbers)), labels)
    assert len(sizes) == 7 + 3 * 3 + 1 + 1 and all(0.1 < size < 4 for size in sizes.values()), sizes


@pytest.mark.parametrize("count, group, used", [(16, 4, 4), (20, 16, 10), (8, 16, 8), (7, 4, 1), (1, 16, 1)])
def test_minibatch_standard_deviation(count, group, used):
    """Sample i of N is in group i mod (N / G); the deviation is that of the population, of one group of channels."""
    x = torch.randn(count, 3, 2, 2, dtype=torch.float64)
    found = train_stylegan2.minibatch_stddev(x, group)
    groups = count // used
    for i in range(count):
        members = x[[k for k in range(count) if k % groups == i % groups]].numpy()
        assert len(members) == used
        assert found[i].item() == pytest.approx(np.sqrt(members.var(0) + 1e-8).mean(), rel=1e-9)


def test_resampling_keeps_a_constant_picture_and_the_mean_of_any():
    taps = train_stylegan2.binomial()
    up = train_stylegan2.upsample(torch.ones(1, 2, 6, 6), taps)
    assert up.shape == (1, 2, 12, 12) and torch.allclose(up[..., 1:-1, 1:-1], torch.ones(1, 2, 10, 10))
    for padding, stride, inside in ((1, 1, 3), (2, 1, 3), (1, 2, 1)):
        low = train_stylegan2.blur(torch.ones(1, 2, 8, 8), taps, padding, stride)
        assert torch.allclose(low[..., inside:-inside, inside:-inside], torch.ones(()))
    picture = F.pad(torch.rand(1, 1, 4, 4), [3] * 4)
    assert torch.isclose(train_stylegan2.upsample(picture, taps).sum(), 4 * picture.sum())


def test_one_image_and_a_batch_that_does_not_divide(learner):
    batch = some_of(learner, 7)
    for phase in learner.phases(0):
        for count in (1, 7):
            assert learner.loss(phase, {k: v[:count] for k, v in batch.items()}).isfinite()


# ---------------------------------------------------------------------------------- losses and phases


def test_phases_come_in_order_and_r1_every_16_steps(learner):
    assert [[p.name for p in learner.phases(step)] for step in (0, 1, 8, 15, 16)] == [
        ["G", "D", "R1"], ["G", "D"], ["G", "D"], ["G", "D"], ["G", "D", "R1"],
    ]  # fmt: skip
    g, d, r1 = learner.phases(0)
    assert (g.main, d.main, r1.main) == (True, True, False) and (g.generator, d.generator) == (True, False)
    assert learner.params(d).keys() == learner.params(r1).keys()
    assert not learner.params(g).keys() & learner.params(d).keys()


def test_each_phase_trains_its_network_alone_and_fakes_have_the_labels_of_the_batch(learner, monkeypatch):
    batch, asked = some_of(learner), []
    for name, net in learner.nets.items():
        forward = net.forward
        monkeypatch.setattr(net, "forward", lambda *a, n=name, f=forward: asked.append((n, a)) or f(*a))
    for phase in learner.phases(0):
        for net in learner.nets.values():
            net.zero_grad()
        asked.clear()
        learner.loss(phase, batch).backward()
        moved = {name for name, net in learner.nets.items() if any(p.grad is not None for p in net.parameters())}
        assert moved == {*phase.nets}
        assert all(torch.equal(a[1], batch["labels"]) for _, a in asked)
        latents = [a[0] for name, a in asked if name == "G"]
        assert len(latents) == (phase.name != "R1")
        if latents:
            assert torch.equal(latents[0], batch["latents"][:, int(phase.name == "D")])
            noise = next(a[2] for name, a in asked if name == "G")
            assert torch.equal(noise, batch["noise"][:, int(phase.name == "D")])
    for name in ("latents", "noise"):
        rows = batch[name].flatten(0, 1)
        assert len(rows.unique(dim=0)) == 2 * 8  # all of them new
    assert learner.D.b4.out.bias.grad is None and learner.D.b4.out.weight.grad is not None  # of R1: constants have none


def test_logistic_loss_by_hand(learner, monkeypatch):
    batch = some_of(learner, 2)
    logits = iter([torch.tensor([[1.0], [-2.0]]), torch.tensor([[3.0], [0.0]]), torch.tensor([[1.0], [-1.0]])])
    monkeypatch.setattr(learner, "discriminate", lambda images, labels, kind: next(logits))
    g, d, _ = learner.phases(0)
    monkeypatch.setattr(learner, "generate", lambda batch, which: batch["images"].clone().requires_grad_())

    def softplus(x):
        return math.log(1 + math.exp(x))

    assert learner.loss(g, batch).item() == pytest.approx((softplus(-1) + softplus(2)) / 2)
    # D is asked for the real images first, as `out`, then for the fakes
    wanted = (softplus(1) + softplus(-1)) / 2 + (softplus(-3) + softplus(0)) / 2
    assert learner.loss(d, batch).item() == pytest.approx(wanted)


def test_optimisers_make_up_for_the_lazy_phase(learner):
    found = train_stylegan2.build_optimisers(learner, 2.5e-3)
    g, d = (found[name].param_groups[0] for name in ("G", "D"))
    assert (g["lr"], g["betas"], g["eps"], g["weight_decay"]) == (2.5e-3, (0.0, 0.99), 1e-8, 0)
    assert d["lr"] == pytest.approx(2.5e-3 * 16 / 17) and d["betas"] == (0.0, pytest.approx(0.99 ** (16 / 17)))


# ------------------------------------------------------------------------------------------ importance


@pytest.mark.parametrize("kind", ["real", "fake"])
def test_the_statistic_of_a_normal_batch_is_held_fixed(learner, kind):
    """One logit's gradient at a held statistic is that of its logit in the batch whose statistic does not move."""
    some = np.flatnonzero(learner.data.labels < 2)[:8]
    learner.hold(some, (1, 1))
    batch = learner.draw(learner.data.images[some], learner.data.labels[some], (1, 1))
    images = batch["images"] if kind == "real" else learner.generate(batch, 1).detach()
    usual = train_stylegan2.minibatch_stddev(learner.D.features(images), 16)[0].detach()
    assert torch.isclose(learner.held[kind], usual) and usual > 0.01
    phase = learner.phases(0)[1]
    params = list(learner.params(phase).values())
    losses = learner.nll(phase, {k: v[3:4] for k, v in batch.items()})
    assert len(losses) == 2 and all(loss.dim() == 0 for loss in losses)
    ours = torch.autograd.grad(losses[0 if kind == "fake" else 1], params, allow_unused=True)
    logits = learner.D.b4(learner.D.features(images), learner.D.mapping(batch["labels"]), usual)
    term = F.softplus((1 if kind == "fake" else -1) * logits[3, 0])
    for a, b in zip(ours, torch.autograd.grad(term, params, allow_unused=True), strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-5))
    learner.hold(None)
    assert learner.held == {"fake": None, "real": None}


@pytest.mark.parametrize("name", ["ewc", "mas"])
def test_importance_by_a_plain_loop(gan, name):
    """Of D: squares of single logits' gradients (EWC), absolute gradients of single squared logits (MAS)."""
    method, learner = gan(name, "--importance_samples", "5")
    task = streams.split(learner.data, [0, 1, 2, 3], 2)[0]
    method.end_task(task)
    assert learner.held == {"fake": None, "real": None} and learner.G.training
    found = method.fisher if name == "ewc" else method.omega
    pick = common.numpy_rng((1, 1, "importance")).permutation(task.indices)
    learner.hold(pick[:8], (1, 1, "usual batch"))
    key, total = "D.b4.fc.weight", 0
    for k, index in enumerate(pick[:5]):
        batch = learner.draw(learner.data.images[[index]], learner.data.labels[[index]], (1, 1, k, "importance"))
        with torch.no_grad():
            fake = learner.generate(batch, 1)
        real = learner.D(batch["images"], batch["labels"], learner.held["real"])
        if name == "ewc":
            terms = [F.softplus(learner.D(fake, batch["labels"], learner.held["fake"])), F.softplus(-real)]
            total += sum(torch.autograd.grad(t.sum(), learner.D.b4.fc.weight)[0] ** 2 for t in terms)
        else:
            total += torch.autograd.grad((real**2).sum(), learner.D.b4.fc.weight)[0].abs()
    assert torch.allclose(found[key], total / 5, rtol=1e-4, atol=1e-12)
    assert found["G.synthesis.b8.conv0.weight"].any() and found.keys() == _shared.parameters(learner).keys()
    for table in learner.class_rows():
        assert found[table][:, :2].any() and not found[table][:, 2:].any()  # unseen classes are not held


def test_a_task_smaller_than_a_batch_is_repeated_for_the_statistic(learner, monkeypatch):
    held, hold = [], learner.hold
    monkeypatch.setattr(learner, "hold", lambda indices, key=None: held.append(indices) or hold(indices, key))
    few = np.flatnonzero(learner.data.labels == 0)[:3]
    _shared.importance(learner, streams.Task(1, [0], few), 2, 1, learner.nll, lambda total, gradient: None)
    assert len(held[0]) == 8 and set(held[0]) == set(few) and held[1] is None


def test_l2_leaves_unseen_classes_alone(gan):
    l2, learner = gan("l2")
    for table in learner.class_rows():
        assert l2.importance[table].tolist() == [[1, 1, 0, 0]]
        assert l2.importance[table].expand_as(_shared.parameters(learner)[table]).shape[1] == 4


# ---------------------------------------------------------------------------- methods, phase by phase


@pytest.mark.parametrize("labels", ["current", "past"])
def test_distillation_matches_images_at_the_same_latent_and_noise(gan, labels):
    kd, learner = gan("kd", "--kd_labels", labels, "--kd_weight", "3")
    assert not kd.teacher.G.training and not any(p.requires_grad for p in kd.teacher.G.parameters())
    batch = kd.mix(some_of(learner), (1, 2, 0))
    with torch.no_grad():
        learner.G.synthesis.b8.conv1.noise_strength += 1
        kd.teacher.G.synthesis.b8.conv1.noise_strength += 1
    g, d, _ = learner.phases(0)
    learner.loss(g, batch)
    assert kd.penalty(g, batch).item() == 0  # equal weights, and the same noise
    with torch.no_grad():
        learner.G.synthesis.b8.torgb.bias += 0.5
    learner.loss(g, batch)
    assert kd.penalty(g, batch).item() == pytest.approx(3 * 0.25, rel=1e-4)
    asked = set(batch["labels"].tolist()) if labels == "current" else set(kd.asked.tolist())
    assert asked <= ({2, 3} if labels == "current" else {0, 1})
    with torch.no_grad():
        learner.D.b4.out.bias += 1
    learner.loss(d, batch)
    assert kd.penalty(d, batch) == 0


def test_generative_replay_asks_a_frozen_generator(gan):
    gr, learner = gan("gr")
    teacher = copy.deepcopy(gr.teacher.G.state_dict())
    with torch.no_grad():
        for p in learner.G.parameters():
            p.zero_()
    batch = gr.mix(some_of(learner), (1, 2, 0))
    assert len(batch["labels"]) == 8 + 4 and set(batch["labels"][8:].tolist()) == {0, 1}
    assert batch["images"][8:].std() > 0.01 and len(batch["latents"]) == 12
    assert not torch.equal(batch["images"][8:], gr.mix(some_of(learner), (1, 2, 1))["images"][8:])
    assert same(teacher, gr.teacher.G.state_dict()) and not gr.teacher.G.training


def test_replayed_rows_are_real_and_fake(gan):
    er, learner = gan("er")
    batch = er.mix(some_of(learner), (1, 2, 0))
    assert set(batch["labels"][:8].tolist()) == {2, 3} and set(batch["labels"][8:].tolist()) <= {0, 1}
    assert {len(v) for v in batch.values()} == {12}


def test_agem_projects_g_and_d_apart_and_never_r1(gan):
    agem, learner = gan("agem")
    batch = agem.mix(some_of(learner), (1, 2, 0))
    assert len(batch["labels"]) == 8 and set(agem.reference["labels"].tolist()) <= {0, 1}
    for phase in learner.phases(0):
        params = learner.params(phase)
        for net in learner.nets.values():
            net.zero_grad()
        reference = torch.autograd.grad(learner.loss(phase, agem.reference), list(params.values()), allow_unused=True)
        learner.loss(phase, batch).backward()
        before = {k: None if p.grad is None else p.grad.clone() for k, p in params.items()}
        if phase.main:  # in conflict on purpose
            for p, r in zip(params.values(), reference, strict=True):
                if p.grad is not None and r is not None:
                    p.grad.copy_(before[next(k for k, q in params.items() if q is p)] - 5 * r)
            before = {k: None if p.grad is None else p.grad.clone() for k, p in params.items()}
        columns = agem.after_backward(phase, batch)
        if not phase.main:
            assert columns is None
            assert all(p.grad is None or torch.equal(p.grad, before[k]) for k, p in params.items())
            continue
        pairs = [(before[k], r, p.grad) for (k, p), r in zip(params.items(), reference, strict=True) if r is not None]
        dot, square = (sum((a * b).sum() for a, b in ((x, y) for x, y in some)) for some in
                       ([(g, r) for g, r, _ in pairs], [(r, r) for _, r, _ in pairs]))  # fmt: skip
        assert columns["projected"] and dot < 0
        assert all(torch.allclose(now, g - dot / square * r, atol=1e-5) for g, r, now in pairs)
        assert abs(sum((now * r).sum() for _, r, now in pairs)) < 1e-3 * square


def test_si_integrates_all_three_phases(train_gan, monkeypatch):
    """ω of D takes in R1's update too: the sum over phases of −g Δθ, g without the penalty."""
    si, seen = runfolder.method_class("si"), []
    after_backward, after_step = si.after_backward, si.after_step

    def spy_backward(self, phase, batch):
        self.spied = {k: (p.grad.clone(), p.detach().clone()) for k, p in self.learner.params(phase).items()
                      if p.grad is not None}  # fmt: skip
        columns = after_backward(self, phase, batch)
        assert phase.main or not columns
        return columns

    def spy_step(self, phase):
        before = {k: v.clone() for k, v in self.path.items()}
        after_step(self, phase)
        for k, p in self.learner.params(phase).items():
            wanted = before[k]
            if k in self.spied:
                gradient, start = self.spied[k]
                wanted = wanted + gradient * (start - p.detach())
            assert torch.allclose(self.path[k], wanted, atol=1e-7), k
        seen.append(phase.name)

    monkeypatch.setattr(si, "after_backward", spy_backward)
    monkeypatch.setattr(si, "after_step", spy_step)
    train_gan("a", "--method", "si")
    assert seen == ["G", "D", "R1", *["G", "D"] * 5] * 2


def test_a_frozen_weight_stays_frozen(learner):
    """As a method of one's own may want it: the phase of G fixes D, and gives back what it took alone."""
    frozen = learner.D.b8.conv0.weight.requires_grad_(False)
    g, d, _ = learner.phases(0)
    learner.loss(g, some_of(learner)).backward()
    assert not frozen.requires_grad and learner.D.b4.out.weight.requires_grad
    assert "D.b8.conv0.weight" not in learner.params(d) and "D.b8.conv1.weight" in learner.params(d)
    with pytest.raises(ZeroDivisionError), train_stylegan2.fixed(learner.D):
        assert not learner.D.b4.out.weight.requires_grad
        _ = 1 / 0
    assert learner.D.b4.out.weight.requires_grad


def test_r1_moves_d_by_its_own_gradient(train_gan, monkeypatch):
    si, seen = runfolder.method_class("si"), []
    after_backward, after_step = si.after_backward, si.after_step

    def spy_backward(self, phase, batch):
        columns = after_backward(self, phase, batch)
        if phase.name == "R1":  # the logit's last bias has no part in the slope, but in D's loss
            assert self.learner.D.b4.out.bias.grad is None
            self.spied = self.learner.D.b4.out.weight.detach().clone()
        return columns

    def spy_step(self, phase):
        after_step(self, phase)
        if phase.name == "R1":
            seen.append(torch.equal(self.spied, self.learner.D.b4.out.weight))

    monkeypatch.setattr(si, "after_backward", spy_backward)
    monkeypatch.setattr(si, "after_step", spy_step)
    train_gan("a", "--method", "si")
    assert seen == [False, False]
    monkeypatch.undo()
    assert not same(weights(train_gan("a"), 1), weights(train_gan("a", "--r1_gamma", "100"), 1))


# ----------------------------------------------------------------------------------------------- sampling


def test_samples_are_rounded_and_clamped(learner, monkeypatch):
    values = torch.tensor([-2.0, -1.0, 0.0039, 0.9999, 2.0])
    monkeypatch.setattr(learner.G, "forward", lambda z, labels: values[: len(z), None, None, None].expand(-1, 3, 8, 8))
    assert learner.sample([0] * 5, [1] * 5)[:, 0, 0, 0].tolist() == [0, 0, 128, 255, 255]


def test_an_image_depends_on_its_seed_and_class_alone(learner):
    seeds, labels = common.sampling_seeds((0,), 8), [0, 1, 2, 3] * 2
    state = torch.get_rng_state()
    with torch.no_grad():
        for layer in learner.G.synthesis.style_layers:
            layer.noise_strength += 1
    whole = learner.sample(labels, seeds)
    learner.sample_batch = 3
    assert (whole.int() - learner.sample(labels, seeds).int()).abs().max() <= 1
    assert (whole[5:].int() - learner.sample(labels[5:], seeds[5:]).int()).abs().max() <= 1
    assert torch.equal(state, torch.get_rng_state()) and whole.shape == (8, 3, 8, 8)
    assert not torch.equal(learner.sample([0], seeds[:1]), learner.sample([1], seeds[:1]))
    with pytest.raises(ValueError, match="class 4 is not one of the 4 classes"):
        learner.sample([4], seeds[:1])


def test_frozen_copy_fresh_save_and_load(learner, tmp_path):
    start = {f"{n}.{k}": v.clone() for n, net in learner.nets.items() for k, v in net.state_dict().items()}

    def now(some):
        return {f"{n}.{k}": v for n, net in some.nets.items() for k, v in net.state_dict().items()}

    teacher = learner.frozen_copy()
    learner.save(tmp_path)
    with torch.no_grad():
        for p in _shared.parameters(learner).values():
            p.add_(1)
    assert same(start, now(teacher)) and not any(p.requires_grad for net in teacher.nets.values()
                                                 for p in net.parameters())  # fmt: skip
    learner.fresh(learner.args.seed)
    assert same(start, now(learner))
    learner.fresh(2)
    assert not same(start, now(learner))
    learner.load(tmp_path)
    assert same(start, now(learner))
    other = tmp_path / "other"
    other.mkdir()
    (other / "G.safetensors").write_bytes((tmp_path / "D.safetensors").read_bytes())
    with pytest.raises(common.UserError, match=r"G\.safetensors does not fit this network"):
        learner.load(other)
    nets = train_stylegan2.build_networks(**common.read_json(tmp_path / "networks.json"))
    for net, name in zip(nets, ("G", "D"), strict=True):
        net.load_state_dict(load_file(tmp_path / f"{name}.safetensors"), strict=True)
    assert {re.sub(r"b\d+", "b", k) for k in nets[0].state_dict()} == {
        re.sub(r"b\d+", "b", k) for k in published("stylegan2_32_orig")["G"]
    }


# ------------------------------------------------------------------------------------- the whole script


def test_task_1_is_that_of_ncl(train_gan):
    ncl = train_gan("a")
    for method in GAN_METHODS[1:]:
        assert same(weights(ncl, 1), weights(train_gan("a", "--method", method), 1)), method
    assert train_gan("a", "--method", "ncl") == ncl


@pytest.mark.parametrize(
    "method, flag",
    [*((m, f"--{m}_weight") for m in ("kd", *PENALTIES)), ("er", "--memory_size"), ("agem", "--memory_size"),
     ("gr", "--replay_size")],
)  # fmt: skip
def test_strength_0_is_ncl_to_the_bit(train_gan, method, flag):
    flags = ("--method", method, "--steps", "20")  # R1 has its phase in the middle of a task too
    ncl = train_gan("a", "--steps", "20")
    nothing, run = train_gan("a", *flags, flag, "0"), train_gan("a", *flags)
    assert same(weights(ncl, 1), weights(nothing, 1)) and same(weights(ncl, 2), weights(nothing, 2))
    assert not same(weights(ncl, 2), weights(run, 2))
    for some, positive in ((run, flag.endswith("_weight")), (nothing, False)):
        rows = common.read_csv(some / "log.csv")
        for net in "GD":
            last = {row["task"]: float(row[f"penalty_{net}"]) for row in rows}
            assert last["1"] == 0 and (last["2"] > 0) == (positive and (method, net) != ("kd", "D"))
    if method == "kd":
        assert same(weights(ncl, 2), weights(train_gan("a", *flags, flag, "0", "--kd_labels", "past"), 2))


@pytest.mark.parametrize("method", GAN_METHODS)
def test_stopped_anywhere_and_resumed_is_unbroken(train_gan, monkeypatch, tmp_path, method):
    flags = ["--method", method, "--save_every", "2", "--select", "best" if method in ("si", "er") else "last"]
    unbroken = train_gan("unbroken", *flags)
    loss, grid = (train_stylegan2.StyleGAN2, "loss"), (runfolder, "picture_grid")
    for where, nth in [(loss, 11), (loss, 24), (grid, 1)]:  # 13 phases a task
        run = stopped(train_gan, monkeypatch, where, nth, *flags)
        assert_same_run(unbroken, run)
        assert not (run / "resume").exists()
        run.rename(tmp_path / f"{where[1]}{nth}")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_by_the_system(train_gan, tmp_path, cache):
    flags = ["--method", "si", "--save_every", "1", "--steps", "20"]
    unbroken = train_gan("unbroken", *flags)
    command = [sys.executable, str(ROOT / "train_stylegan2.py"), *SMALL_GAN, "--data", str(cache),
               "--out", str(tmp_path / "killed"), *flags]  # fmt: skip
    run = tmp_path / "killed" / unbroken.relative_to(tmp_path / "unbroken")
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    logged = []
    while sum(row.get("task") == "2" for row in logged) < 3:  # a row may be read while it is written
        assert child.poll() is None, "ended before it could be killed"
        logged = common.read_csv(run / "log.csv")
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (run / "DONE").exists()
    subprocess.run(command, env=environment, check=True)
    assert same(weights(unbroken, 1), weights(run, 1)) and same(weights(unbroken, 2), weights(run, 2))


def test_a_run_is_scored_by_the_same_evaluation(train_gan, script, tmp_path):
    run = train_gan("runs", "--method", "ensemble")
    shown = script("eval_metrics.py", "runs", "--num_samples", "16", "--out", "results", "--data", train_gan.cache)
    assert shown.returncode == 0 and "stylegan2, FID" in shown.stdout, shown.stderr
    rows = common.read_csv(run / "quality.csv")
    assert {(r["trained_to"], r["task"]) for r in rows} == {("1", "1"), ("2", "2")}  # isolated: once a task
    assert {r["metric"] for r in rows} == {"FID", "KID", "accuracy"} and {r["sampler_steps"] for r in rows} == {""}
    assert (tmp_path / "results" / "summary.csv").exists()
    config, log = common.read_json(run / "config.json"), common.read_csv(run / "log.csv")
    assert config["backbone"] == "stylegan2" and config["isolated"] and "train_stylegan2.py" in config["code"]
    assert list(log[0]) == ["task", "step", "loss_G", "penalty_G", "loss_D", "penalty_D", "loss_R1", "lr", "seconds",
                            "images_per_second"]  # fmt: skip
    files = {f.name for f in (run / "task2").iterdir()}
    assert files == {"G.safetensors", "D.safetensors", "networks.json", "method.pt", "samples.png", "cost.json",
                     "SHA256SUMS"}  # fmt: skip
    cost = common.read_json(run / "task2" / "cost.json")
    assert cost["parameters_stored"] == 2 * config["parameters"] == 2 * cost["parameters_trained"]
    assert load_file(run / "task2" / "G.safetensors")["mapping.w_avg"].eq(0).all()  # no truncation, so never updated


def test_best_checkpoint_is_the_one_with_the_lowest_score(train_gan, monkeypatch):
    scores, seen, step = iter([3.0, 1.0, 2.0, 3.0, 2.0, 1.0]), [], train_stylegan2.StyleGAN2.loss
    monkeypatch.setattr(train_stylegan2.fid, "frechet_distance", lambda *_: next(scores))

    def spy(self, phase, batch):
        if phase.name == "G":
            seen.append(self.G.synthesis.b4.const.detach().clone())
        return step(self, phase, batch)

    monkeypatch.setattr(train_stylegan2.StyleGAN2, "loss", spy)
    run = train_gan("a", "--select", "best")
    about = [common.read_json(run / f"task{t}" / "cost.json") for t in (1, 2)]
    assert [a["kept_step"] for a in about] == [4, 6] and [a["selection_score"] for a in about] == [1.0, 1.0]
    assert torch.equal(weights(run, 1)["G.synthesis.b4.const"], seen[4])  # as they were before step 5
    assert torch.equal(seen[6], seen[4])  # and the second task starts there


def test_noncl_trains_longer_on_the_pool(train_gan, monkeypatch):
    drawn, draw = [], train_stylegan2.StyleGAN2.draw
    monkeypatch.setattr(
        train_stylegan2.StyleGAN2, "draw", lambda self, x, y, key: drawn.append((key, y)) or draw(self, x, y, key)
    )
    rows = common.read_csv(train_gan("a", "--method", "noncl") / "log.csv")
    assert [r["step"] for r in rows if r["task"] == "2"][-1] == "12"
    seen = [set(np.concatenate([labels for key, labels in drawn if key[1] == task]).tolist()) for task in (1, 2)]
    assert seen == [{0, 1}, {0, 1, 2, 3}]


def test_a_lost_log_is_begun_anew_with_all_its_columns(train_gan, tmp_path, monkeypatch):
    """R1 comes in each 16th step alone: the first rows after a resume lack it."""
    flags = ["--steps", "20", "--save_every", "2", "--tasks", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(train_stylegan2.runfolder, "keep_task", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_gan("a", *flags)
    (log,) = tmp_path.glob("a/*/*/*/*/log.csv")
    whole = common.read_csv(log)
    log.unlink()
    state = common.load_tensors(log.parent / "resume" / "state.pt")
    state["step"] = 2  # as if it had been saved there
    runfolder.save_state(log.parent, state)
    rows = common.read_csv(train_gan("a", *flags) / "log.csv")
    assert [r["step"] for r in rows] == [r["step"] for r in whole][1:] and set(rows[0]) == set(whole[0])
    assert rows[0]["loss_R1"] == "" and rows[-1]["loss_D"] and sum(r["loss_R1"] != "" for r in rows) == 1


def test_bf16_trains_and_differs(train_gan, monkeypatch):
    slopes, features = set(), train_stylegan2.Discriminator.features

    def spy(self, images):
        if images.requires_grad and images.is_leaf:  # R1
            slopes.add(torch.is_autocast_enabled("cpu"))
        return features(self, images)

    monkeypatch.setattr(train_stylegan2.Discriminator, "features", spy)
    rows, exact = (common.read_csv(train_gan("a", *flags) / "log.csv") for flags in (["--precision", "bf16"], []))
    assert slopes == {False}
    assert 0 < abs(float(rows[0]["loss_D"]) - float(exact[0]["loss_D"])) < 0.05
    assert all(p.dtype == torch.float32 for p in weights(train_gan("a", "--precision", "bf16"), 1).values())


def test_other_flags_are_other_runs_and_what_cannot_be_is_refused(script, tmp_path):
    def name(*flags):
        return runfolder.run_folder(train_stylegan2.parse_args([*SMALL_GAN, *flags]), "stylegan2").name

    others = [["--r1_gamma", "2"], ["--mbstd_group", "4"], ["--lr", "1e-3"], ["--precision", "bf16"]]
    assert len({name(), *(name(*flags) for flags in others)}) == 5 and name("--data", "x") == name()
    for flags, words in (
        (["--method", "clora"], ["clora", "U-Net"]), (["--dataset", "imagenet64"], ["imagenet64", "tiny, S, L"]),
        (["--mbstd_group", "0"], ["mbstd_group"]), (["--r1_gamma", "-1"], ["r1_gamma", "at least 0"]),
        (["--ddim_steps", "5"], ["unrecognized", "ddim_steps"]),
    ):  # fmt: skip
        with pytest.raises(common.UserError) as error:
            train_stylegan2.parse_args(flags)
        assert error.value.code == 2 and all(word in str(error.value) for word in words), error.value
    shown = script("train_stylegan2.py", "--dataset", "cifar10", "--dry_run")
    assert "G: 20,215,315 parameters" in shown.stdout and "D: 23,089,664 parameters" in shown.stdout
    assert not list(tmp_path.iterdir())
