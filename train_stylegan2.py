"""Continual learning of a label-conditioned GAN (StyleGAN2): a stream of tasks, one method, one run folder.

    python train_stylegan2.py --dataset digits --method er
    python train_stylegan2.py --dataset cifar10 --method ewc --dry_run

The networks are those of Karras et al., Analyzing and Improving the Image Quality of StyleGAN, 2020 (arXiv:1912.04958),
in the configuration of Karras et al., Training Generative Adversarial Networks with Limited Data, 2020
(arXiv:2006.06676), with the parameter names of its release, whose weights load by name: a generator with skip output,
a plain or residual discriminator, both conditioned on the class. Without augmentation, style mixing, path length
regularisation and moving average of the weights, as in CLoG, appendix C. The same command again goes on where it was
stopped, or says that it is done.

From top to bottom: presets and flags · generator · discriminator · the learner (losses, sampling) · the training loop.
"""

import common
import runfolder
import streams

# CLoG, table 17. The minibatch statistic has groups that divide the batch with and without its replayed rows (the
# paper's 32 does not). tiny is for the embedded digits.
PRESETS = {
    "tiny": dict(size=8, latent=64, depth=2, channel_base=32768, channel_max=64, residual=False, batch_size=32,
                 replay_size=16, memory_size=20, mbstd_group=16, r1_gamma=1.0, lr=2.5e-3, steps=600, epochs=None,
                 val_samples=256, select="last"),
    "S": dict(size=32, latent=512, depth=2, channel_base=32768, channel_max=512, residual=False, batch_size=64,
              replay_size=16, memory_size=200, mbstd_group=16, r1_gamma=0.01, lr=2.5e-3, steps=None, epochs=200,
              val_samples=512, select="best"),
    "L": dict(size=128, latent=512, depth=8, channel_base=32768, channel_max=512, residual=True, batch_size=16,
              replay_size=4, memory_size=200, mbstd_group=4, r1_gamma=1.0, lr=2.5e-3, steps=None, epochs=200,
              val_samples=512, select="best"),
}  # fmt: skip
R1_EVERY = 16  # steps between two R1 phases


def parse_args(argv=None):
    parser = runfolder.label_parser(__doc__)
    parser.add_argument("--r1_gamma", type=common.non_negative, help="weight γ of the R1 penalty (default: the "
                        "preset's)")  # fmt: skip
    parser.add_argument("--mbstd_group", type=common.whole(1), help="images a group of the minibatch standard "
                        "deviation; the largest divisor of the batch up to it (default: the preset's)")  # fmt: skip
    args = runfolder.resolve(parser, argv, PRESETS)
    if args.method == "clora":
        common.fail("--method clora adapts the attention and residual layers of a U-Net, which StyleGAN2 has not: "
                    "choose another method, or train_ddim.py")  # fmt: skip
    return args


if __name__ == "__main__":  # a finished run is recognised before PyTorch is loaded
    with common.one_line_errors():
        ARGS = parse_args()
        runfolder.stop_if_finished(runfolder.run_folder(ARGS, "stylegan2"), ARGS, __file__)
        if not ARGS.dry_run:  # data that are missing, too
            streams.load_data(streams.scenario(ARGS.dataset), ARGS.size, ARGS.data)

import contextlib  # noqa: E402
import copy  # noqa: E402
import json  # noqa: E402

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fid  # noqa: E402

# Weights are stored with unit variance and scaled when they are used, so that one learning rate suits all layers
# (Karras et al., Progressive Growing of GANs, 2018, section 4.1); √2 keeps the second moment through a leaky ReLU.


def leaky(x, gain=2**0.5):
    return F.leaky_relu(x, 0.2) * gain


def normalise(x):
    """Each row of (N, C) to a mean square of 1."""
    return x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt()


def binomial():
    """The low-pass filter of all resampling: (4, 4), of sum 1."""
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    return torch.outer(taps, taps)


def blur(x, taps, padding, stride=1):
    """Low-pass filter of each channel of (N, C, H, W); zeros beyond the border."""
    kernel = taps.to(x.dtype).expand(x.shape[1], 1, -1, -1)
    return F.conv2d(x, kernel, padding=padding, stride=stride, groups=x.shape[1])


def upsample(image, taps):
    """(N, C, H, W) → (N, C, 2H, 2W): zeros between the pixels, then the low-pass filter."""
    kernel = (4 * taps).to(image.dtype).expand(image.shape[1], 1, -1, -1)
    return F.conv_transpose2d(image, kernel, stride=2, padding=1, groups=image.shape[1])


class Linear(nn.Module):
    def __init__(self, inputs, outputs, active=False, lr_multiplier=1.0, bias=0.0):
        super().__init__()
        self.active, self.lr_multiplier = active, lr_multiplier
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / lr_multiplier)
        self.bias = nn.Parameter(torch.full((outputs,), bias))

    def forward(self, x):
        gain = self.lr_multiplier / self.weight.shape[1] ** 0.5
        x = F.linear(x, self.weight * gain, self.bias * self.lr_multiplier)
        return leaky(x) if self.active else x


class ClassTable(Linear):
    """A linear layer of one-hot class ids: labels (N,) → (N, outputs). Its weight has a column a class."""

    def forward(self, labels):
        return F.embedding(labels, self.weight.t()) / self.weight.shape[1] ** 0.5 + self.bias


class Mapping(nn.Module):
    """Class ids, and latents if latent > 0 → (N, width). Layers learn at 0.01 of the rate."""

    def __init__(self, latent, classes, width, depth):
        super().__init__()
        self.embed, self.depth = ClassTable(classes, width), depth
        for k in range(depth):
            setattr(self, f"fc{k}", Linear(latent + width if k == 0 else width, width, True, lr_multiplier=0.01))
        if latent:  # of the published layout: the mean of w, which truncation needs and we do not
            self.register_buffer("w_avg", torch.zeros(width))

    def forward(self, labels, z=None):
        x = normalise(self.embed(labels))
        x = x if z is None else torch.cat([normalise(z), x], 1)
        for k in range(self.depth):
            x = getattr(self, f"fc{k}")(x)
        return x


# ---------------------------------------------------------------------------------------------- generator


class StyleLayer(nn.Module):
    """3×3 convolution, modulated and demodulated by w (StyleGAN2, section 2.2), noise, bias, leaky ReLU.

    Modulation scales what goes into the convolution, demodulation what comes out of it (equations 1 and 3): the same
    numbers as weights of its own for each image, of which a convolution in groups is 4 times as slow on a CPU.
    """

    def __init__(self, inputs, outputs, width, resolution, up):
        super().__init__()
        self.resolution, self.up = resolution, up
        self.affine = Linear(width, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.noise_strength = nn.Parameter(torch.zeros(()))
        self.register_buffer("resample_filter", binomial())
        self.register_buffer("noise_const", torch.randn(resolution, resolution))

    def forward(self, x, w, noise):
        """x (N, inputs, H, W), w (N, width), noise (N or 1, 1, resolution, resolution)."""
        with torch.autocast(x.device.type, enabled=False):  # a few numbers, on which all others depend
            style = self.affine(w)
            norm = (style.square() @ self.weight.square().sum((2, 3)).t() + 1e-8).rsqrt()
        x = x * style[:, :, None, None].to(x.dtype)
        if self.up:
            x = F.conv_transpose2d(x, self.weight.transpose(0, 1), stride=2)
            x = blur(x, 4 * self.resample_filter, padding=1)
        else:
            x = F.conv2d(x, self.weight, padding=1)
        x = x * norm[:, :, None, None].to(x.dtype) + (noise * self.noise_strength).to(x.dtype)
        return leaky(x + self.bias[:, None, None].to(x.dtype))


class ToRGB(nn.Module):
    """1×1 convolution to an image, modulated and not demodulated."""

    def __init__(self, inputs, width):
        super().__init__()
        self.affine = Linear(width, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(3, inputs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x, w):
        with torch.autocast(x.device.type, enabled=False):
            style = self.affine(w) / self.weight.shape[1] ** 0.5
        return F.conv2d(x * style[:, :, None, None].to(x.dtype), self.weight, self.bias).float()


class SynthesisBlock(nn.Module):
    """One resolution: the layers conv0 (twice the side; not in the first) and conv1, and the skip to the image."""

    def __init__(self, inputs, outputs, width, resolution):
        super().__init__()
        self.layers = ["conv0", "conv1"] if inputs else ["conv1"]
        if inputs:
            self.conv0 = StyleLayer(inputs, outputs, width, resolution, up=True)
        else:
            self.const = nn.Parameter(torch.randn(outputs, resolution, resolution))
        self.conv1 = StyleLayer(outputs, outputs, width, resolution, up=False)
        self.torgb = ToRGB(outputs, width)
        self.register_buffer("resample_filter", binomial())

    def forward(self, x, image, w, noise):
        """noise: a list to take from, a tensor a layer."""
        if x is None:
            x = self.const.expand(len(w), -1, -1, -1)
        for name in self.layers:
            x = getattr(self, name)(x, w, noise.pop(0))
        rgb = self.torgb(x, w)
        with torch.autocast(x.device.type, enabled=False):  # the image stays float32
            return x, rgb if image is None else rgb + upsample(image, self.resample_filter)


class Synthesis(nn.Module):
    def __init__(self, width, channels):
        super().__init__()
        self.blocks, inputs = [f"b{resolution}" for resolution in channels], 0
        for resolution, outputs in channels.items():
            setattr(self, f"b{resolution}", SynthesisBlock(inputs, outputs, width, resolution))
            inputs = outputs
        self.style_layers = [layer for layer in self.modules() if isinstance(layer, StyleLayer)]

    def forward(self, w, noise=None):
        """w (N, width) → (N, 3, size, size). noise (N, noise_numbers): None for the constant noise of the weights."""
        layers = self.style_layers
        if noise is None:
            noise = [layer.noise_const[None, None] for layer in layers]
        else:
            parts = noise.split([layer.resolution**2 for layer in layers], 1)
            noise = [p.view(-1, 1, k.resolution, k.resolution) for p, k in zip(parts, layers, strict=True)]
        x = image = None
        for name in self.blocks:
            x, image = getattr(self, name)(x, image, w, noise)
        return image


class Generator(nn.Module):
    def __init__(self, classes, latent, depth, channels):
        super().__init__()
        self.mapping = Mapping(latent, classes, latent, depth)
        self.synthesis = Synthesis(latent, channels)
        self.noise_numbers = sum(layer.resolution**2 for layer in self.synthesis.style_layers)

    def forward(self, z, labels, noise=None):
        """z (N, latent), labels (N,), noise (N, noise_numbers) or None → images (N, 3, size, size), about [-1, 1]."""
        with torch.autocast(z.device.type, enabled=False):
            w = self.mapping(labels, z)
        return self.synthesis(w, noise)


# ------------------------------------------------------------------------------------------ discriminator


class Conv(nn.Module):
    """Convolution, bias, leaky ReLU; `down`: low-pass filter and every other pixel; `gain`: of what comes out."""

    def __init__(self, inputs, outputs, kernel, down=False, active=True, gain=1.0):
        super().__init__()
        self.down, self.active, self.gain = down, active, gain
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs)) if active else None
        self.register_buffer("resample_filter", binomial())

    def forward(self, x):
        kernel = self.weight.shape[-1]
        weight = self.weight / self.weight[0].numel() ** 0.5
        if self.down and kernel == 1:  # first the fewer pixels
            x = F.conv2d(blur(x, self.resample_filter, padding=1, stride=2), weight, self.bias)
        elif self.down:
            x = F.conv2d(blur(x, self.resample_filter, padding=2), weight, self.bias, stride=2)
        else:
            x = F.conv2d(x, weight, self.bias, padding=kernel // 2)
        return leaky(x, self.gain * 2**0.5) if self.active else x * self.gain


class DiscriminatorBlock(nn.Module):
    # the published layout has a resample_filter here too, and in every Conv, used or not
    def __init__(self, inputs, outputs, first, residual):
        super().__init__()
        self.first, self.residual = first, residual
        gain = 0.5**0.5 if residual else 1.0  # a sum of two keeps the variance
        if first:
            self.fromrgb = Conv(3, inputs, 1)
        self.conv0 = Conv(inputs, inputs, 3)
        self.conv1 = Conv(inputs, outputs, 3, down=True, gain=gain)
        if residual:
            self.skip = Conv(inputs, outputs, 1, down=True, active=False, gain=gain)
        self.register_buffer("resample_filter", binomial())

    def forward(self, x):
        x = self.fromrgb(x) if self.first else x
        y = self.conv1(self.conv0(x))
        return self.skip(x) + y if self.residual else y


def minibatch_stddev(x, group):
    """How much the images of a group differ (Progressive Growing of GANs, section 3): (N, C, H, W) → (N,).

    The standard deviation over a group, averaged over its numbers. Image i of N is in group i mod (N / group); of a
    batch that `group` does not divide, groups have its largest divisor below.
    """
    group = max(g for g in range(1, min(group, len(x)) + 1) if len(x) % g == 0)
    x = x.unflatten(0, (group, -1))
    return ((x.var(0, correction=0) + 1e-8).sqrt().mean((1, 2, 3))).repeat(group)


class Last(nn.Module):
    """4×4 features and the mapped class → logit (N, 1): a projection discriminator (Miyato and Koyama, 2018)."""

    def __init__(self, inputs, group):
        super().__init__()
        self.group = group
        self.conv = Conv(inputs + 1, inputs, 3)
        self.fc = Linear(inputs * 16, inputs, active=True)
        self.out = Linear(inputs, inputs)

    def forward(self, x, mapped, statistic=None):
        statistic = minibatch_stddev(x, self.group) if statistic is None else statistic.expand(len(x))
        x = torch.cat([x, statistic[:, None, None, None].expand(-1, 1, 4, 4)], 1)
        x = self.out(self.fc(self.conv(x).flatten(1)))
        return (x * mapped).sum(1, keepdim=True) / mapped.shape[1] ** 0.5


class Discriminator(nn.Module):
    def __init__(self, classes, channels, residual, group):
        super().__init__()
        resolutions = sorted(channels, reverse=True)
        self.blocks = [f"b{resolution}" for resolution in resolutions[:-1]]
        for k, resolution in enumerate(resolutions[:-1]):
            block = DiscriminatorBlock(channels[resolution], channels[resolution // 2], k == 0, residual)
            setattr(self, f"b{resolution}", block)
        self.b4 = Last(channels[4], group)
        self.mapping = Mapping(0, classes, channels[4], depth=8)

    def features(self, images):
        """(N, 3, size, size) → float32 (N, C, 4, 4)."""
        for name in self.blocks:
            images = getattr(self, name)(images)
        return images.float()

    def forward(self, images, labels, statistic=None):
        """Logits (N, 1), float32; `statistic`: a number in place of the minibatch's standard deviations."""
        x = self.features(images)
        with torch.autocast(x.device.type, enabled=False):
            return self.b4(x, self.mapping(labels), statistic)


def build_networks(size, classes, latent, depth, channel_base, channel_max, residual, mbstd_group):
    """Generator and discriminator; a resolution r has channel_base / r channels, channel_max at most."""
    channels = {2**k: min(channel_base // 2**k, channel_max) for k in range(2, size.bit_length())}
    return Generator(classes, latent, depth, channels), Discriminator(classes, channels, residual, mbstd_group)


def shape_of(args):
    """The arguments of `build_networks` among the flags."""
    names = ("size", "classes", "latent", "depth", "channel_base", "channel_max", "residual", "mbstd_group")
    return {name: getattr(args, name) for name in names}


# ---------------------------------------------------------------------------------------------- the learner


@contextlib.contextmanager
def fixed(net):
    """What is computed here gives the weights of `net` no gradient."""
    trained = [p for p in net.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


class StyleGAN2:
    """The learner: all that a method may touch. Images in model range are float32, about [-1, 1]."""

    draws_an_image = 1  # importance looks at each image once

    def __init__(self, args, data, device):
        self.args, self.data, self.device = args, data, device
        self.sample_batch = common.images_at_once(device, args.size)  # in `sample`; no image depends on it
        self.held = {"fake": None, "real": None}  # minibatch statistic for importance, one image at a time
        self.G, self.D = (net.to(device, memory_format=torch.channels_last) for net in self.initial(args.seed))
        if torch.device(device).type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32
        self.sizes = common.Sizes(*[sum(p.numel() for net in self.nets.values() for p in net.parameters())] * 3)
        if args.compile:
            self.G.compile()  # in place: the names of the parameters stay
            self.D.compile()

    @property
    def nets(self):
        return {"G": self.G, "D": self.D}

    def phases(self, step):
        """What a step trains, in order."""
        lazy = [common.Phase("R1", ("D",), main=False, generator=False)] if step % R1_EVERY == 0 else []
        return [common.Phase("G", ("G",)), common.Phase("D", ("D",), generator=False), *lazy]

    def params(self, phase):
        """{"G.…": Parameter}: what this phase trains."""
        named = [(f"{net}.{name}", p) for net in phase.nets for name, p in self.nets[net].named_parameters()]
        return {name: p for name, p in named if p.requires_grad}

    def draw(self, images, labels, key):
        """A batch with its randomness: uint8 images (N, 3, H, W) and labels (N,) → dict of tensors with N rows.

        A row has its latent and noise for the phase of G and others for that of D, both for its own class: fake
        labels come from the same mixture as real ones.
        """
        rng = common.torch_rng((*key, "noise"), self.device)
        images = torch.as_tensor(images).to(self.device, memory_format=torch.channels_last).float() / 127.5 - 1
        latents = torch.randn(len(images), 2, self.args.latent, generator=rng, device=self.device)
        noise = torch.randn(len(images), 2, self.G.noise_numbers, generator=rng, device=self.device)
        labels = torch.as_tensor(labels).to(self.device)
        return {"images": images, "labels": labels, "latents": latents, "noise": noise}

    def autocast(self):
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.args.precision == "bf16")

    def generate(self, batch, which):
        """Images (N, 3, size, size) of a batch; `which` of its latents: 0 for the phase of G, 1 for that of D."""
        with self.autocast():
            return self.G(batch["latents"][:, which], batch["labels"], batch["noise"][:, which])

    def discriminate(self, images, labels, kind):
        """Logits (N, 1) of fake or real images."""
        with self.autocast():
            return self.D(images, labels, self.held[kind])

    def outputs(self, phase, batch):
        """What MAS measures and KD matches: images of G, logits (N, 1) of D for real images."""
        if phase.name == "G":
            return self.generate(batch, 0)
        return self.discriminate(batch["images"], batch["labels"], "real")

    def losses(self, phase, batch):
        """Terms of the loss (StyleGAN2-ADA's non-saturating logistic loss), each (N, 1): of G one, of D two."""
        if phase.name == "G":
            batch["out"] = self.outputs(phase, batch)
            # KD's gradient lies otherwise in memory: a weight of 0 would still change the last bits
            batch["out"].register_hook(lambda g: g.contiguous(memory_format=torch.channels_last))
            with fixed(self.D):
                return (F.softplus(-self.discriminate(batch["out"], batch["labels"], "fake")),)
        with torch.no_grad():
            fakes = self.generate(batch, 1)
        batch["out"] = self.outputs(phase, batch)
        return F.softplus(self.discriminate(fakes, batch["labels"], "fake")), F.softplus(-batch["out"])

    def loss(self, phase, batch):
        """Scalar. R1: γ/2 E‖∂D/∂x‖² over real images (Mescheder et al., 2018), times the steps that it stands for."""
        if phase.name != "R1":
            return sum(term.sum() for term in self.losses(phase, batch)) / len(batch["labels"])
        images = batch["images"].detach().requires_grad_()
        # float32 whatever --precision, and not compiled: torch.compile has no second derivatives
        (slope,) = torch.autograd.grad(self.D.forward(images, batch["labels"]).sum(), images, create_graph=True)
        return R1_EVERY * self.args.r1_gamma / 2 * slope.square().sum((1, 2, 3)).mean()

    def nll(self, phase, batch):
        """−log p of one image's logits, which are independent: one scalar in the phase of G, two in that of D."""
        return tuple(term.sum() for term in self.losses(phase, batch))

    @torch.no_grad()
    def hold(self, indices, key=None):
        """For importance, which looks at one image at a time: D's minibatch statistic is from now on the mean of that
        of these images and of as many fakes. None: again that of what D sees."""
        self.held = {"fake": None, "real": None}
        if indices is not None:
            batch = self.draw(self.data.images[indices], self.data.labels[indices], key)
            for kind, images in (("fake", self.generate(batch, 1)), ("real", batch["images"])):
                with self.autocast():
                    features = self.D.features(images)
                self.held[kind] = minibatch_stddev(features, self.D.b4.group).mean()

    @torch.no_grad()
    def sample(self, conditions, seeds):
        """uint8 images (N, 3, H, W) of the class ids `conditions`; image k depends on its seed and class alone."""
        wrong = [c for c in conditions if not 0 <= c < self.args.classes]
        if wrong:
            raise ValueError(f"class {wrong[0]} is not one of the {self.args.classes} classes of this network")
        images = [torch.zeros(0, 3, self.args.size, self.args.size, dtype=torch.uint8)]
        for start in range(0, len(seeds), self.sample_batch):
            some = slice(start, start + self.sample_batch)
            z = common.sampling_noise(seeds[some], (self.args.latent,)).to(self.device)
            with self.autocast():
                x = self.G(z, torch.tensor(conditions[some], device=self.device))
            images.append(((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu())
        return torch.cat(images)

    def initial(self, seed):
        torch.manual_seed(common.hash32((seed, "init")))
        return build_networks(**shape_of(self.args))

    def fresh(self, seed):
        """Re-initialises the weights in place: the same start for the same seed."""
        for net, start in zip(self.nets.values(), self.initial(seed), strict=True):
            net.load_state_dict(start.state_dict())

    def frozen_copy(self):
        """A teacher: the same weights now, eval mode, no gradients."""
        teacher = copy.copy(self)
        teacher.G, teacher.D = (copy.deepcopy(net).eval().requires_grad_(False) for net in (self.G, self.D))
        if self.args.compile:
            teacher.G.compile()
        return teacher

    def class_rows(self):
        """{parameter: dimension of its class table}."""
        return {"G.mapping.embed.weight": 1, "D.mapping.embed.weight": 1}

    def save(self, folder):
        """G.safetensors and D.safetensors, by the published names; networks.json holds `build_networks`' arguments."""
        for name, net in self.nets.items():
            save_file({k: v.contiguous() for k, v in net.state_dict().items()}, folder / f"{name}.safetensors")
        (folder / "networks.json").write_text(json.dumps(shape_of(self.args), indent=1))

    def load(self, folder):
        for name, net in self.nets.items():
            common.load_weights(net, folder / f"{name}.safetensors")


Learner = StyleGAN2  # the name by which eval_metrics.py finds it


def build_optimisers(learner, lr):
    """Adam without momentum for each network. D's stands for 17 updates where there are 16 steps (StyleGAN2,
    appendix B: lazy regularisation): its rate and its decay are corrected for it."""
    lazy = R1_EVERY / (R1_EVERY + 1)
    return {
        "G": torch.optim.Adam(learner.G.parameters(), lr, (0.0, 0.99), fused=True),
        "D": torch.optim.Adam(learner.D.parameters(), lr * lazy, (0.0, 0.99**lazy), fused=True),
    }


def train(args):
    device = common.pick_device(args.device)
    scene = streams.scenario(args.dataset)
    data = streams.load_data(scene, args.size, args.data, read=not args.dry_run)
    tasks = streams.split(data, scene.order(args.order), args.tasks)
    if args.dry_run:
        with torch.device("meta"):
            sizes = [sum(p.numel() for p in net.parameters()) for net in build_networks(**shape_of(args))]
        return runfolder.print_plan(args, "stylegan2", data, tasks, dict(zip(("G", "D"), sizes, strict=True)))

    judge = fid.Selection(args, data, device) if args.select == "best" else None
    learner = StyleGAN2(args, data, device)
    method = runfolder.method_class(args.method)(args, learner)

    with runfolder.Run(__file__, "stylegan2", method, tasks, judge) as run:
        for task, past in run.tasks_left():
            method.start_task(task, past)
            indices = method.training_data(task, past)
            optimisers = build_optimisers(learner, args.lr)

            for step in run.steps(task, indices, optimisers):
                key = (args.seed, task.number, step)
                for net in learner.nets.values():
                    net.train()
                images, labels = run.batch(step)
                batch = learner.draw(images, labels, key)
                with run.clocked("replay"):
                    batch = method.mix(batch, key)
                record = {}
                for phase in learner.phases(step):
                    (net,) = phase.nets
                    optimisers[net].zero_grad()
                    torch.manual_seed(common.hash32((*key, phase.name)))
                    loss = learner.loss(phase, batch)
                    penalty = method.penalty(phase, batch) if phase.main else 0.0
                    (loss + penalty).backward()
                    columns = method.after_backward(phase, batch) or {}
                    optimisers[net].step()
                    method.after_step(phase)
                    record[f"loss_{phase.name}"] = loss.detach()
                    if phase.main:
                        columns = {"penalty": penalty} | columns
                        record |= {f"{name}_{phase.name}": value for name, value in columns.items()}
                run.log(step, args.lr, record)
            run.keep()


if __name__ == "__main__":
    with common.one_line_errors():
        train(ARGS)
