"""Continual learning of a label-conditioned diffusion model (DDIM): a stream of tasks, one method, one run folder.

    python train_ddim.py --dataset digits --method er
    python train_ddim.py --dataset path/to/class/folders --method ncl --dry_run

Denoising diffusion with the simple loss (Ho et al., Denoising Diffusion Probabilistic Models, 2020, equation 14) on
a U-Net that also gets the class id, sampled with DDIM (Song et al., Denoising Diffusion Implicit Models, 2021,
equation 12, eta 0). The same command again goes on where it was stopped, or says that it is done.

From top to bottom: presets and flags · the learner (network, loss, sampling) · the training loop.
"""

import common
import runfolder
import streams

# CLoG, table 18; the widths by level are those that give the paper's parameter counts. tiny is for the embedded digits:
# at its learning rate 300 steps from scratch are enough (accuracy of the first task: 0.73 at 1e-3, 0.93 at 3e-3).
PRESETS = {
    "tiny": dict(size=8, widths=[32, 64], layers=1, groups=8, batch_size=64, replay_size=32, memory_size=20,
                 lr=3e-3, steps=300, epochs=None, ddim_steps=20, val_samples=256, select="last"),
    "S": dict(size=32, widths=[128, 256, 256, 256], layers=2, groups=32, batch_size=256, replay_size=64,
              memory_size=200, lr=2e-4, steps=None, epochs=200, ddim_steps=50, val_samples=512, select="best"),
    "M": dict(size=64, widths=[128, 256, 384, 512], layers=2, groups=32, batch_size=320, replay_size=64,
              memory_size=5000, lr=2e-4, steps=None, epochs=100, ddim_steps=50, val_samples=512, select="best"),
    "L": dict(size=128, widths=[128, 128, 256, 384, 512], layers=2, groups=32, batch_size=32, replay_size=8,
              memory_size=200, lr=1e-4, steps=None, epochs=200, ddim_steps=50, val_samples=512, select="best"),
}  # fmt: skip


def parse_args(argv=None):
    parser = runfolder.label_parser(__doc__)
    parser.add_argument("--ddim_steps", type=common.divisor(1000), help="denoising steps of the sampler, a "
                        "divisor of 1000 (default: 20 for tiny, else 50)")  # fmt: skip
    return runfolder.resolve(parser, argv, PRESETS)


if __name__ == "__main__":  # a finished run is recognised before PyTorch is loaded
    with common.one_line_errors():
        ARGS = parse_args()
        runfolder.stop_if_finished(runfolder.run_folder(ARGS, "ddim"), ARGS, __file__)
        if not ARGS.dry_run:  # data that are missing, too
            streams.load_data(streams.scenario(ARGS.dataset), ARGS.size, ARGS.data)

import copy  # noqa: E402
import math  # noqa: E402

import torch  # noqa: E402
from diffusers import DDIMScheduler, UNet2DModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import fid  # noqa: E402


def build_unet(args):
    """U-Net of args.widths; attention at the third level, ResNet blocks for the up- and down-sampling."""
    levels = range(len(args.widths))
    return UNet2DModel(
        sample_size=args.size,
        layers_per_block=args.layers,
        block_out_channels=args.widths,
        norm_num_groups=args.groups,
        down_block_types=["AttnDownBlock2D" if i == 2 else "DownBlock2D" for i in levels],
        up_block_types=["AttnUpBlock2D" if i == 2 else "UpBlock2D" for i in reversed(levels)],
        downsample_type="resnet",
        upsample_type="resnet",
        dropout=0.1,
        num_class_embeds=args.classes,  # every class of the stream, from task 1
    )


class DDIM:
    """The learner: all that a method may touch. Images in model range are float32 in [-1, 1]."""

    pretrained = False  # C-LoRA trains the whole network in the first task
    draws_an_image = 1  # importance looks at each image once

    def __init__(self, args, data, device):
        self.args, self.data, self.device = args, data, device
        self.sample_batch = common.images_at_once(device, args.size)  # in `sample`; no image depends on it
        # linear betas, epsilon-prediction, leading spacing; the sampler clips its estimate of the image to [-1, 1]
        self.scheduler = DDIMScheduler(num_train_timesteps=1000)
        self.unet = self.initial(args.seed).to(device)
        if torch.device(device).type == "cuda":
            self.unet.to(memory_format=torch.channels_last)
            torch.set_float32_matmul_precision("high")  # TF32
        self.sizes = common.Sizes(*[sum(p.numel() for p in self.unet.parameters())] * 3)
        if args.compile:
            self.unet.compile()  # in place: the names of the parameters stay

    @property
    def nets(self):
        return {"unet": self.unet}

    def phases(self, step):
        """What a step trains, in order."""
        return [common.Phase("main", ("unet",))]

    def params(self, phase):
        """{"unet.…": Parameter}: what this phase trains."""
        return {f"unet.{name}": p for name, p in self.unet.named_parameters() if p.requires_grad}

    def draw(self, images, labels, key):
        """A batch with its randomness: uint8 images (N, 3, H, W) and labels (N,) → dict of tensors with N rows."""
        images = torch.as_tensor(images).to(self.device).float() / 127.5 - 1
        rng = common.torch_rng((*key, "noise"), self.device)
        return {
            "images": images,
            "labels": torch.as_tensor(labels).to(self.device),
            "timesteps": torch.randint(1000, (len(images),), generator=rng, device=self.device),
            "noise": torch.randn(images.shape, generator=rng, device=self.device),
        }

    def outputs(self, phase, batch):
        """The predicted noise (N, 3, H, W), float32."""
        noisy = self.scheduler.add_noise(batch["images"], batch["noise"], batch["timesteps"])
        return self.predict(noisy, batch["timesteps"], batch["labels"])

    def loss(self, phase, batch):
        """Mean squared error of the predicted noise; leaves the prediction in batch["out"]."""
        batch["out"] = self.outputs(phase, batch)
        return torch.nn.functional.mse_loss(batch["out"], batch["noise"])

    def nll(self, phase, batch):
        """Negative log-likelihood of the noise, ½ Σ (ε − ε̂)² over the D numbers of one image, divided by √D.

        So the Fisher information, which is the mean of its squared gradient, is that of the likelihood divided by D
        and does not grow with the resolution.
        """
        return 0.5 * batch["noise"][0].numel() ** 0.5 * self.loss(phase, batch)

    def hold(self, indices, key=None):
        """For importance, which looks at one image at a time. Here none depends on the others of a batch."""

    def predict(self, noisy, timesteps, labels):
        """The noise in noisy images (N, 3, H, W), float32; `timesteps` one for all, or (N,)."""
        with torch.autocast(noisy.device.type, torch.bfloat16, enabled=self.args.precision == "bf16"):
            return self.unet(noisy, timesteps, labels).sample.float()

    @torch.no_grad()
    def denoise(self, x, labels):
        """Noise (N, 3, H, W) → images in model range, by --ddim_steps deterministic steps."""
        self.scheduler.set_timesteps(self.args.ddim_steps)
        for t in self.scheduler.timesteps:
            x = self.scheduler.step(self.predict(x, t, labels), t, x, eta=0.0).prev_sample
        return x

    def sample(self, conditions, seeds):
        """uint8 images (N, 3, H, W) of the class ids `conditions`; image k depends on its seed and class alone."""
        wrong = [c for c in conditions if not 0 <= c < self.args.classes]
        if wrong:
            raise ValueError(f"class {wrong[0]} is not one of the {self.args.classes} classes of this network")
        training = self.unet.training
        self.unet.eval()
        shape = (3, self.args.size, self.args.size)
        images = [torch.zeros(0, *shape, dtype=torch.uint8)]
        for start in range(0, len(seeds), self.sample_batch):
            some = slice(start, start + self.sample_batch)
            x = common.sampling_noise(seeds[some], shape).to(self.device)
            x = self.denoise(x, torch.tensor(conditions[some], device=self.device))
            images.append(((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu())
        self.unet.train(training)
        return torch.cat(images)

    def initial(self, seed):
        torch.manual_seed(common.hash32((seed, "init")))
        return build_unet(self.args)

    def fresh(self, seed):
        """Re-initialises the weights in place: the same start for the same seed."""
        self.unet.load_state_dict(self.initial(seed).state_dict())

    def frozen_copy(self):
        """A teacher: the same weights now, eval mode, no gradients."""
        teacher = copy.copy(self)
        teacher.unet = copy.deepcopy(self.unet).eval().requires_grad_(False)
        if self.args.compile:
            teacher.unet.compile()
        return teacher

    def class_rows(self):
        """{parameter: dimension of its class table}."""
        return {"unet.class_embedding.weight": 0}

    def save(self, folder):
        """diffusers' own format: UNet2DModel.from_pretrained(folder / "unet") reads it."""
        self.unet.save_pretrained(folder / "unet")
        self.scheduler.save_pretrained(folder / "scheduler")

    def load(self, folder):
        common.load_weights(self.unet, folder / "unet" / "diffusion_pytorch_model.safetensors")

    def adapts(self, merge):
        """{network: names of the layers that C-LoRA's adapter goes to}, and its rank by default."""
        return {"unet": ["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2"]}, 8

    def save_adapters(self, folder, adapted):
        """peft's own format: on the unet of task1/, PeftModel.from_pretrained(unet, folder / "adapter") reads it."""
        adapted["unet"].save_pretrained(folder / "adapter")
        (folder / "adapter" / "README.md").unlink(missing_ok=True)  # a form to fill in

    def adapter_states(self, folder):
        """{network: {name: tensor}} of what `save_adapters` wrote."""
        return {"unet": load_file(folder / "adapter" / "adapter_model.safetensors")}


Learner = DDIM  # the name by which eval_metrics.py finds it


def learning_rate(step, steps, peak):
    """Linear warm-up over 500 steps (a quarter of a short task), then a half cosine to 0."""
    warm_up = min(500, steps // 4)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def train(args):
    device = common.pick_device(args.device)
    scene = streams.scenario(args.dataset)
    data = streams.load_data(scene, args.size, args.data, read=not args.dry_run)
    tasks = streams.split(data, scene.order(args.order), args.tasks)
    if args.dry_run:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in build_unet(args).parameters())
        return runfolder.print_plan(args, "ddim", data, tasks, {"U-Net": parameters})

    judge = fid.Selection(args, data, device) if args.select == "best" else None
    learner = DDIM(args, data, device)
    method = runfolder.method_class(args.method)(args, learner)
    about = {"scheduler": dict(learner.scheduler.config)}

    with runfolder.Run(__file__, "ddim", method, tasks, judge, about) as run:
        for task, past in run.tasks_left():
            method.start_task(task, past)
            indices = method.training_data(task, past)
            params = {phase.name: learner.params(phase) for phase in learner.phases(0)}
            optimisers = {name: torch.optim.Adam(p.values(), args.lr, fused=True) for name, p in params.items()}

            for step in run.steps(task, indices, optimisers):
                key = (args.seed, task.number, step)
                learner.unet.train()
                images, labels = run.batch(step)
                batch = learner.draw(images, labels, key)
                with run.clocked("replay"):
                    batch = method.mix(batch, key)
                lr, record = learning_rate(step, run.length, args.lr), {}
                for phase in learner.phases(step):
                    optimiser, weights = optimisers[phase.name], params[phase.name].values()
                    optimiser.zero_grad()
                    torch.manual_seed(common.hash32((*key, phase.name)))  # dropout
                    loss = learner.loss(phase, batch)
                    penalty = method.penalty(phase, batch) if phase.main else 0.0
                    (loss + penalty).backward()
                    columns = method.after_backward(phase, batch) or {}
                    norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
                    for group in optimiser.param_groups:
                        group["lr"] = lr
                    optimiser.step()
                    method.after_step(phase)
                    record[f"loss_{phase.name}"] = loss.detach()
                    record |= {"penalty": penalty, "gradient_norm": norm, "clipped": norm > 1.0, **columns}
                run.log(step, lr, record)
            run.keep()


if __name__ == "__main__":
    with common.one_line_errors():
        train(ARGS)
