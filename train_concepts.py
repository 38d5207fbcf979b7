"""Continual learning of concepts: a text-to-image diffusion model is taught a stream of things, a few pictures each.

    python train_concepts.py --base dreambooth --method ewc
    python train_concepts.py --base custom_diffusion --model CompVis/stable-diffusion-v1-4 --dataset objects --dry_run

DreamBooth (Ruiz et al., 2023, arXiv:2208.12242) trains the U-Net and the whole text encoder and calls a concept by a
rare word; Custom Diffusion (Kumari et al., 2023, arXiv:2212.04488) trains the keys and values of the cross-attention
and one new word. Both beside class images, which the initial model draws once, so that "dog" does not become this dog.
--model is any folder of Stable Diffusion's architecture; `tiny` is a small one that is trained here, once, in ten
minutes. The same command again goes on where it was stopped, or says that it is done.

From top to bottom: presets and flags · the learner (words, augmentation, loss, sampling, files) · the training loop.
"""

from pathlib import Path

import common
import concepts
import readers
import runfolder
import streams

# CLoG, table 19 and appendix C.4; tiny is for the small world of tiny_world.py. adapter_lr is that of C-LoRA; smallest:
# side of the shrunk pictures, as a share of the canvas; zoom: range of the enlarged ones.
SD = dict(size=512, prior_weight=1.0, class_images=200, sampling_steps=50, guidance=6.0, smallest=0.4, zoom=[1.2, 1.4],
          importance_draws=200, memory_size=5)  # fmt: skip
TINY = dict(size=32, prior_weight=1.0, class_images=32, sampling_steps=20, guidance=4.0, smallest=0.8, zoom=[1.1, 1.3],
            importance_draws=20, memory_size=5)  # fmt: skip
PRESETS = {
    "sd-dreambooth": dict(SD, steps=800, batch_size=1, replay_size=1, lr=2e-6, adapter_lr=5e-5),
    "sd-custom_diffusion": dict(SD, steps=250, batch_size=2, replay_size=2, lr=4e-5),
    "tiny-dreambooth": dict(TINY, steps=100, batch_size=4, replay_size=4, lr=1e-3, adapter_lr=2e-3),
    "tiny-custom_diffusion": dict(TINY, steps=150, batch_size=4, replay_size=4, lr=5e-3),
}
SIZES = ["a far away ", "very small "], ["zoomed in ", "close up "]  # said before the prompt of a changed picture
CLASS = 5  # the last of a concept's prompts: itself, the four with SIZES, then its category alone


def parse_args(argv=None):
    parser, _ = runfolder.training_parser(__doc__, "toys", readers.CONCEPTS)
    add = parser.add_argument
    add("--base", choices=("dreambooth", "custom_diffusion"), default="dreambooth", help="how a concept is taught "
        "(default: dreambooth)")  # fmt: skip
    add("--model", default="tiny", help="folder in diffusers' format, or the hub's name of one in its cache, such as "
        f"{concepts.V1_4} (default: tiny, a small world that is trained here)")  # fmt: skip
    add("--prior_weight", type=common.non_negative, help="weight of the class images; 0: none (default: 1)")
    add("--class_images", type=common.whole(1), help="class images a category (default: 200; tiny: 32)")
    add("--importance_draws", type=common.whole(1), help="time steps and noises that each picture is taken with for "
        "ewc and mas (default: 200; tiny: 20)")  # fmt: skip
    add("--sampling_steps", type=common.divisor(1000), help="steps of the DDPM sampler, a divisor of 1000 (default: "
        "50; tiny: 20)")  # fmt: skip
    add("--guidance", type=common.positive, help="classifier-free guidance scale (default: 6; tiny: 4)")
    add("--select", choices=("last",), default="last", help="checkpoints are not chosen: a few pictures leave nothing "
        "to judge by (default: last)")  # fmt: skip
    peek = common.Parser(add_help=False)
    for flag, default in (("--base", "dreambooth"), ("--model", "tiny"), ("--dataset", "toys"), ("--method", "ncl")):
        peek.add_argument(flag, default=default)
    peeked = peek.parse_known_args(argv)[0]
    preset = f"{'tiny' if peeked.model == 'tiny' else 'sd'}-{peeked.base}"
    parser.set_defaults(preset=preset, tasks=streams.scenario(peeked.dataset).classes)
    if side := concepts.picture_side(peeked.model):
        parser.set_defaults(size=side)
    lr = "adapter_lr" if peeked.method == "clora" else "lr"
    args = runfolder.resolve(parser, argv, {k: dict(p, lr=p.get(lr, p["lr"])) for k, p in PRESETS.items()})
    if args.method == "clora" and args.base == "custom_diffusion":
        common.fail("--method clora adapts what DreamBooth trains: Custom Diffusion trains little already; choose "
                    "--base dreambooth or another method")  # fmt: skip
    if Path(args.model).is_dir():  # one spelling a model, as of a folder of pictures
        args.model = str(Path(args.model).resolve())
    if not args.preset.endswith(args.base):
        common.fail(f"--preset {args.preset} is not one of --base {args.base}: leave one of them out")
    return args


if __name__ == "__main__":  # a finished run is recognised before PyTorch is loaded
    with common.one_line_errors():
        ARGS = parse_args()
        runfolder.stop_if_finished(runfolder.run_folder(ARGS, ARGS.base), ARGS, __file__)
        if not ARGS.dry_run:  # pictures, words or a model that are missing, too
            concepts.check_model(concepts.model_folder(ARGS.model, ARGS.data))
            SCENE = streams.scenario(ARGS.dataset)
            NAMES = streams.load_data(SCENE, ARGS.size, ARGS.data, read=False).classes
            concepts.concepts(SCENE, NAMES, ARGS.base, ARGS.data)
            streams.load_data(SCENE, ARGS.size, ARGS.data)

import contextlib  # noqa: E402
import copy  # noqa: E402

import torch  # noqa: E402
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel  # noqa: E402
from peft import get_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import AddedToken, CLIPTextModel, CLIPTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

logging.disable_progress_bar()  # of reading and writing a few files


def whole(kind, folder):
    """A network from the safetensors of its folder, all of it: what a file lacks, the libraries fill with chance."""
    about = dict(use_safetensors=True, local_files_only=True, torch_dtype=torch.float32, output_loading_info=True)
    try:
        net, found = kind.from_pretrained(folder, **about)
    except Exception as error:  # torn files, other shapes: half a dozen kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0][:150]
        common.fail(f"{folder} cannot be read as a {kind.__name__}: {reason}")
    if missing := sorted(found["missing_keys"]):
        common.fail(
            f"{folder} lacks {len(missing)} weights of a {kind.__name__}, such as {missing[0]}: get a whole copy"
        )
    return net


class Words(torch.nn.Module):
    """The table of a text encoder's words, frozen, and behind it a row for each new word.

    So a new word is a parameter of its own, and no optimiser, decay or penalty can reach another row. Those that are
    not `learning` get no gradient either, when a word of the past stands in a replayed prompt.
    """

    def __init__(self, table, starts, first):
        """table: nn.Embedding; starts: token ids that the new rows start as; first: token id of the first new word."""
        super().__init__()
        self.table, self.first = table, first
        self.new = torch.nn.Embedding(len(starts), table.embedding_dim)
        self.new.weight.data.copy_(table.weight[starts])
        self.register_buffer("learning", torch.ones(len(starts), dtype=torch.bool), persistent=False)

    def forward(self, ids):
        new = ids - self.first
        is_new = (new >= 0) & (new < self.new.num_embeddings)
        rows = self.new(new * is_new)
        rows = torch.where(self.learning[new * is_new][..., None], rows, rows.detach())
        return torch.where(is_new[..., None], rows, self.table(ids * ~is_new))


def resized(image, size):
    """(3, H, W) → (3, size, size), the same kind of tensor."""
    return F.interpolate(image[None], (size, size), mode="bilinear", antialias=True)[0]


def inner_cells(start, length, cell, side):
    """The latents along one side that lie within pixels start … start + length, less one at each end; one at least."""
    first = min(start // cell + 1, side - 1)
    return slice(first, max(first + 1, (start + length) // cell - 1))


def detach_first(module, inputs, output):
    """Forward hook on keys and values: the first position says that a text begins, and is the same for all texts."""
    return torch.cat([output[:, :1].detach(), output[:, 1:]], 1) if torch.is_grad_enabled() else output


class Concepts:
    """The learner: all that a method may touch. Images in model range are float32 in [-1, 1].

    A class id is a concept; its prompts are the rows of `prompts`: "photo of a sks dog", that with each of SIZES, and
    "photo of a dog". A row of a batch is a picture's latent with the number of its prompt.
    """

    pretrained = True  # C-LoRA adapts the model as it came, in the first task too

    def __init__(self, args, data, device):
        self.args, self.data, self.device = args, data, device
        self.draws_an_image, self.held = args.importance_draws, False
        self.sample_batch = common.images_at_once(device, args.size)  # in `sample`; no image depends on it
        self.folder = concepts.model_folder(args.model, args.data)
        self.concepts = concepts.concepts(streams.scenario(args.dataset), data.classes, args.base, args.data)
        self.tokenizer = CLIPTokenizer.from_pretrained(self.folder / "tokenizer")
        concepts.check_words(self.concepts, args.base, self.tokenizer)
        self.starts = [concepts.start_id(concept.start, self.tokenizer) for concept in self.concepts]
        self.vae = whole(AutoencoderKL, self.folder / "vae").requires_grad_(False).eval()
        self.unet = whole(UNet2DConditionModel, self.folder / "unet")
        self.text_encoder = whole(CLIPTextModel, self.folder / "text_encoder")
        # whatever the sampler it came with; latents are not confined to [-1, 1], DDPMScheduler's default
        self.scheduler = DDPMScheduler.from_pretrained(self.folder / "scheduler", clip_sample=False)
        parts = {"unet": self.unet, "text_encoder": self.text_encoder, "vae": self.vae}
        self.sizes, _ = concepts.sizes(parts, args.base)
        if args.base == "custom_diffusion":
            self.unet.requires_grad_(False)
            self.text_encoder.requires_grad_(False)
            table, first = self.text_encoder.get_input_embeddings(), len(self.tokenizer)
            # single_word: "do" as a new word must not take "dog" apart
            self.tokenizer.add_tokens([AddedToken(concept.word, single_word=True) for concept in self.concepts])
            self.text_encoder.set_input_embeddings(Words(table, self.starts, first))
            for name, module in self.unet.named_modules():
                if name.endswith(concepts.KEYS_AND_VALUES):
                    module.requires_grad_(True)
                    module.register_forward_hook(detach_first)
        for net in (self.unet, self.text_encoder, self.vae):
            net.to(device)
        if torch.device(device).type == "cuda":
            self.unet.to(memory_format=torch.channels_last)
            torch.set_float32_matmul_precision("high")  # TF32
        if args.compile:
            self.unet.compile()  # in place: the names of the parameters stay
        self.cell = 2 ** (len(self.vae.config.block_out_channels) - 1)  # pixels along a side of a latent
        texts = [text for concept in self.concepts for text in self.texts_of(concept)]
        self.prompts = self.tokens(texts).unflatten(0, (len(self.concepts), CLASS + 1))

    @property
    def nets(self):
        return {"unet": self.unet, "text_encoder": self.text_encoder}

    def phases(self, step):
        """What a step trains, in order."""
        return [common.Phase("main", ("unet", "text_encoder"))]

    def params(self, phase):
        """{"unet.…": Parameter}: what this phase trains."""
        named = [(f"{net}.{name}", p) for net in phase.nets for name, p in self.nets[net].named_parameters()]
        return {name: p for name, p in named if p.requires_grad}

    # ---- words

    @staticmethod
    def texts_of(concept):
        """The prompts of a concept; the last is that of its class images."""
        prompt = f"photo of a {concept.noun}"
        return [prompt, *(size + prompt for sizes in SIZES for size in sizes), f"photo of a {concept.category}"]

    def noun(self, concept):
        """How a prompt calls the concept with this id: "sks dog"."""
        return self.concepts[concept].noun

    def tokens(self, texts):
        """Token ids (N, length) of texts, filled up or cut to the length of the model, the end token kept."""
        # a tokenizer without a configuration of its own says 10³⁰
        length = min(self.tokenizer.model_max_length, self.text_encoder.config.max_position_embeddings)
        asked = dict(padding="max_length", truncation=True, max_length=length)
        for text in texts:
            if len(self.tokenizer.tokenize(text)) + 2 > length:
                common.note(f"'{text}' is longer than the {length} tokens that the model reads: its end is cut off")
        return self.tokenizer(texts, return_tensors="pt", **asked).input_ids.to(self.device)

    def learn(self, concepts):
        """These concepts (ids) are what is trained now: the new words of all others stay as they are."""
        if self.args.base == "custom_diffusion":
            learning = self.text_encoder.get_input_embeddings().learning
            learning.fill_(False)[torch.as_tensor(concepts, device=self.device)] = True

    # ---- pictures

    def augment(self, image, rng):
        """One picture (3, size, size) in model range → itself, changed, where the loss looks, which prompt it goes by.

        One time in three it is enlarged and cropped, else it is shrunk and put somewhere on an empty canvas; the mask
        (1, side, side) holds the latents within it, less a border of one. CLoG, appendix C.4; the numbers are those of
        Custom Diffusion's code.
        """
        size, side = self.args.size, self.args.size // self.cell
        if rng.random() < 1 / 3:
            low, high = (round(factor * size) for factor in self.args.zoom)
            scale = int(rng.integers(low, high + 1))
            top, left = rng.integers(0, scale - size + 1, 2)
            image = resized(image, scale)[:, top : top + size, left : left + size]
            return image, torch.ones(1, side, side, device=self.device), 3 + int(rng.integers(2))
        scale = int(rng.integers(round(self.args.smallest * size), size + 1))
        top, left = rng.integers(0, size - scale + 1, 2)
        canvas = torch.zeros(3, size, size, device=self.device)
        canvas[:, top : top + scale, left : left + scale] = resized(image, scale)
        mask = torch.zeros(1, side, side, device=self.device)
        rows, columns = (inner_cells(int(start), scale, self.cell, side) for start in (top, left))
        mask[:, rows, columns] = 1
        return canvas, mask, 1 + int(rng.integers(2)) if scale < 0.6 * size else 0

    def draw(self, images, labels, key):
        """A batch with its randomness: uint8 images (N, 3, size, size) and concept ids (N,) → dict of tensors.

        Its rows are the N pictures, augmented, and behind them N class images, if they have a weight.
        """
        images, labels = torch.as_tensor(images).to(self.device).float() / 127.5 - 1, torch.as_tensor(labels)
        rng = common.numpy_rng((*key, "augmentation"))
        rows = [self.augment(image, rng) for image in images]
        side = self.args.size // self.cell
        pixels = torch.stack([row[0] for row in rows]) if rows else images
        masks = torch.stack([row[1] for row in rows]) if rows else images.new_zeros(0, 1, side, side)
        prompts = torch.tensor([row[2] for row in rows], dtype=torch.long)
        batch = self.noised(self.encode(pixels), labels, prompts, masks, (*key, "noise"))
        if not (self.args.prior_weight and len(labels)) or self.held:
            return batch
        picks = common.numpy_rng((*key, "class images")).integers(0, self.args.class_images, len(labels))
        known = torch.stack([self.class_moments(int(c))[k] for c, k in zip(labels, picks, strict=True)])
        whole, prompts = torch.ones_like(masks), torch.full_like(prompts, CLASS)
        prior = self.noised(known, labels, prompts, whole, (*key, "class noise"))  # its own: none moves the pictures'
        return {name: torch.cat([rows, prior[name]]) for name, rows in batch.items()}

    def noised(self, moments, labels, prompts, masks, key):
        """Rows of a batch: latents drawn from their mean and deviation (N, 8, side, side), with a time and noise."""
        mean, std = moments.chunk(2, 1)
        size = dict(generator=common.torch_rng(key, self.device), device=self.device)
        return {
            "latents": self.vae.config.scaling_factor * (mean + std * torch.randn(mean.shape, **size)),
            "labels": labels.to(self.device),
            "prompts": prompts.to(self.device),
            "masks": masks,
            "timesteps": torch.randint(self.scheduler.config.num_train_timesteps, (len(mean),), **size),
            "noise": torch.randn(mean.shape, **size),
        }

    def hold(self, indices, key=None):
        """For importance, which is that of a concept's own pictures: until None comes, no class images are drawn."""
        self.held = indices is not None

    @torch.no_grad()
    def encode(self, pixels):
        """Images in model range (N, 3, size, size) → mean and deviation of their latents (N, 8, side, side)."""
        if not len(pixels):  # an empty memory
            side = self.args.size // self.cell
            return pixels.new_zeros(0, 2 * self.unet.config.in_channels, side, side)
        found = self.vae.encode(pixels).latent_dist
        return torch.cat([found.mean, found.std], 1)

    def prepare_class_images(self):
        """Draws the class images of all concepts that are not there yet, before the initial model changes.

        They are kept in <data>/class_images/ by model, sampler and category, and shared by methods, orders and seeds.
        """
        args, self.moments = self.args, {}
        name = f"{concepts.model_digest(self.folder)}-{args.size}-{args.sampling_steps}steps-{args.guidance:g}"
        name += "" if args.precision == "fp32" else f"-{args.precision}"
        for category in sorted({concept.category for concept in self.concepts} if args.prior_weight else ()):
            folder = common.output_folder(args.data) / "class_images" / name / category.replace("/", "_")
            prompt = f"photo of a {category}"
            images = concepts.class_images(folder, args.class_images, prompt, args.size, self.sample)
            parts = torch.from_numpy(images).split(self.sample_batch)
            self.moments[category] = torch.cat([self.encode(p.to(self.device).float() / 127.5 - 1) for p in parts])

    def class_moments(self, concept):
        return self.moments[self.concepts[concept].category]

    # ---- loss

    def outputs(self, phase, batch):
        """The predicted noise (N, 4, side, side), float32."""
        noisy = self.scheduler.add_noise(batch["latents"], batch["noise"], batch["timesteps"])
        return self.predict(noisy, batch["timesteps"], self.prompts[batch["labels"], batch["prompts"]])

    def predict(self, noisy, timesteps, ids):
        """The noise in noisy latents (N, 4, side, side), float32; `timesteps` one for all, or (N,); ids (N, length)."""
        with self.autocast():
            return self.unet(noisy, timesteps, self.text_encoder(ids).last_hidden_state).sample.float()

    def autocast(self):
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.args.precision == "bf16")

    def loss(self, phase, batch):
        """Mean over the pictures of the mean squared error within their masks, and prior_weight × that of class images.

        Leaves the predicted noise in batch["out"], and the two parts in batch["own"] and batch["prior"].
        """
        batch["out"] = self.outputs(phase, batch)
        error = ((batch["out"] - batch["noise"]).square() * batch["masks"]).mean((1, 2, 3))
        error = error / batch["masks"].mean((1, 2, 3))
        prior = batch["prompts"] == CLASS
        own, others = (error * ~prior).sum() / (~prior).sum(), (error * prior).sum() / prior.sum().clamp(min=1)
        batch["own"], batch["prior"] = own.detach(), others.detach()
        return own + self.args.prior_weight * others

    def nll(self, phase, batch):
        """½ Σ (ε − ε̂)² over the D numbers of one latent, divided by √D: the −log p of its noise. Where the mask leaves
        something out, the mean within it stands for all."""
        return 0.5 * batch["noise"][0].numel() ** 0.5 * self.loss(phase, batch)

    # ---- sampling

    @torch.no_grad()
    def sample(self, conditions, seeds):
        """uint8 images (N, 3, size, size). A condition is a text, or a concept's id for its own prompt.

        DDPM with classifier-free guidance; image k depends on its seed and text alone.
        """
        texts = [c if isinstance(c, str) else f"photo of a {self.noun(c)}" for c in conditions]
        modes = {net: net.training for net in self.nets.values()}
        for net in modes:
            net.eval()
        images = [torch.zeros(0, 3, self.args.size, self.args.size, dtype=torch.uint8)]
        for start in range(0, len(seeds), self.sample_batch):
            some = slice(start, start + self.sample_batch)
            images.append(self.denoise(self.tokens(texts[some]), seeds[some]))
        for net, training in modes.items():
            net.train(training)
        return torch.cat(images)

    def denoise(self, ids, seeds):
        """Token ids (N, length) and N seeds → uint8 images; each has a generator of its own, on the CPU."""
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        side = self.args.size // self.cell
        shape = (self.unet.config.in_channels, side, side)
        x = torch.stack([torch.randn(shape, generator=g) for g in generators]).to(self.device)
        ids = torch.cat([self.tokens([""]).expand_as(ids), ids])
        with self.autocast():
            text = self.text_encoder(ids).last_hidden_state
        self.scheduler.set_timesteps(self.args.sampling_steps)
        times = self.scheduler.timesteps
        for t in times[times < self.scheduler.config.num_train_timesteps]:  # 1000 steps begin one beyond it
            with self.autocast():
                plain, asked = self.unet(torch.cat([x, x]), t, text).sample.float().chunk(2)
            noise = plain + self.args.guidance * (asked - plain)
            x = self.scheduler.step(noise, t, x, generator=generators).prev_sample
        x = self.vae.decode(x / self.vae.config.scaling_factor).sample
        return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu()

    # ---- weights

    def identity(self):
        """What a run's weights mean nothing without: the model that they change, the words of its concepts."""
        return {"model": concepts.model_digest(self.folder), "concepts": [[*c] for c in self.concepts]}

    def initial(self):
        """Another learner, of the model as it came."""
        return type(self)(self.args, self.data, self.device)

    def fresh(self, seed):
        """Back to the model as it came, in place; it is the same for every seed."""
        start = self.initial()
        for name, net in self.nets.items():
            net.load_state_dict(start.nets[name].state_dict())

    @contextlib.contextmanager
    def initial_weights(self):
        """Inside, the learner is the initial model."""
        kept, start = (self.unet, self.text_encoder), self.initial()
        self.unet, self.text_encoder = start.unet, start.text_encoder
        try:
            yield
        finally:
            self.unet, self.text_encoder = kept

    def frozen_copy(self):
        """A teacher: the same weights now, eval mode, no gradients. What is not trained is shared."""
        teacher, shared = copy.copy(self), {}
        for net in self.nets.values():
            shared |= {id(p): p for p in net.parameters() if not p.requires_grad}
        teacher.unet, teacher.text_encoder = (copy.deepcopy(net, shared) for net in self.nets.values())
        for net in teacher.nets.values():
            net.eval().requires_grad_(False)
        return teacher

    def class_rows(self):
        """{parameter: dimension of its table of concepts}: the new words."""
        named = [name for name in self.params(self.phases(0)[0]) if name.endswith("token_embedding.new.weight")]
        return dict.fromkeys(named, 0)

    def save(self, folder):
        """What was trained, as diffusers and transformers read it (the docs show how).

        DreamBooth: unet/ and text_encoder/. Custom Diffusion: keys_and_values.safetensors by their plain names; the
        same as diffusers' load_attn_procs wants them; words/, a file a word for load_textual_inversion.
        """
        if self.args.base == "dreambooth":
            self.unet.save_pretrained(folder / "unet")
            self.text_encoder.save_pretrained(folder / "text_encoder")
            return
        trained = {name: p.detach().cpu().contiguous() for name, p in self.unet.named_parameters() if p.requires_grad}
        save_file(trained, folder / "keys_and_values.safetensors")
        theirs = {name.replace("attn2.to_", "attn2.processor.to_").replace(".weight", "_custom_diffusion.weight"): value
                  for name, value in trained.items()}  # fmt: skip
        theirs |= {
            f"{name}.processor": torch.empty(0) for name, _ in self.unet.named_modules() if name.endswith("attn1")
        }
        save_file(theirs, folder / "pytorch_custom_diffusion_weights.safetensors")
        (folder / "words").mkdir()
        words = self.text_encoder.get_input_embeddings()
        for concept, row, start in zip(self.concepts, words.new.weight, words.table.weight[self.starts], strict=True):
            if not torch.equal(row, start):  # not learnt yet
                row = row.detach().cpu().clone()
                save_file({concept.word: row}, folder / "words" / f"{concept.name}.safetensors")

    def load(self, folder):
        if self.args.base == "dreambooth":
            for net, kind in ((self.unet, UNet2DConditionModel), (self.text_encoder, CLIPTextModel)):
                name = "unet" if net is self.unet else "text_encoder"
                net.load_state_dict(kind.from_pretrained(folder / name, use_safetensors=True).state_dict())
            return
        state = load_file(folder / "keys_and_values.safetensors")
        wanted = {name for name, p in self.unet.named_parameters() if p.requires_grad}
        if state.keys() != wanted:
            shared = len(wanted & state.keys())
            common.fail(
                f"{folder}: keys_and_values.safetensors has {shared} of the {len(wanted)} names of this U-Net", 1
            )
        self.unet.load_state_dict(state, strict=False)
        words = self.text_encoder.get_input_embeddings()
        words.new.weight.data.copy_(words.table.weight[self.starts])
        for k, concept in enumerate(self.concepts):
            path = folder / "words" / f"{concept.name}.safetensors"
            if path.exists():
                words.new.weight.data[k] = load_file(path)[concept.word]

    # ---- C-LoRA

    def adapts(self, merge):
        """{network: names of the layers that an adapter goes to}, and the rank by default."""
        return concepts.adapters(merge)

    def save_adapters(self, folder, adapted):
        """pytorch_lora_weights.safetensors, which a pipeline's load_lora_weights reads, with its alpha."""
        parts = {}
        for name, model in adapted.items():
            state = get_peft_model_state_dict(model)
            parts[f"{name}_lora_layers"] = {k.removeprefix("base_model.model."): v.cpu() for k, v in state.items()}
            # a pipeline's U-Net, in eval mode, gets layers in training mode: a dropout would act in its pictures
            parts[f"{name}_lora_adapter_metadata"] = model.peft_config["default"].to_dict() | {"lora_dropout": 0.0}
        StableDiffusionPipeline.save_lora_weights(folder, **parts)

    def adapter_states(self, folder):
        """{network: {name: tensor}} of what `save_adapters` wrote, by peft's names."""
        states = {}
        for name, value in load_file(folder / "pytorch_lora_weights.safetensors").items():
            net, _, rest = name.partition(".")
            states.setdefault(net, {})[f"base_model.model.{rest}"] = value
        return states


Learner = Concepts  # the name by which eval_metrics.py finds it


def train(args):
    device = common.pick_device(args.device)
    scene = streams.scenario(args.dataset)
    data = streams.load_data(scene, args.size, args.data, read=not args.dry_run)
    tasks = streams.split(data, scene.order(args.order), args.tasks, least=1)
    if args.dry_run:
        return runfolder.print_plan(args, args.base, data, tasks, *concepts.plan(args))

    learner = Concepts(args, data, device)
    method = runfolder.method_class(args.method)(args, learner)
    about = {"scheduler": dict(learner.scheduler.config)} | learner.identity()

    with runfolder.Run(__file__, args.base, method, tasks, None, about, learner.prepare_class_images) as run:
        for task, past in run.tasks_left():
            method.start_task(task, past)
            indices = method.training_data(task, past)
            learner.learn(data.labels[indices])
            params = {phase.name: learner.params(phase) for phase in learner.phases(0)}
            rows = learner.class_rows()  # new words: a decay would move those of other concepts, too
            optimisers = {
                name: torch.optim.AdamW(
                    [{"params": [p for n, p in named.items() if n not in rows], "weight_decay": 0.01},
                     {"params": [p for n, p in named.items() if n in rows], "weight_decay": 0.0}],
                    args.lr, fused=device != "cpu",
                ) for name, named in params.items()
            }  # fmt: skip

            for step in run.steps(task, indices, optimisers):
                key = (args.seed, task.number, step)
                for net in learner.nets.values():
                    net.train(any(p.requires_grad for p in net.parameters()))
                images, labels = run.batch(step)
                batch = learner.draw(images, labels, key)
                with run.clocked("replay"):
                    batch = method.mix(batch, key)
                record = {}
                for phase in learner.phases(step):
                    optimiser, weights = optimisers[phase.name], params[phase.name].values()
                    optimiser.zero_grad()
                    torch.manual_seed(common.hash32((*key, phase.name)))  # dropout
                    loss = learner.loss(phase, batch)
                    penalty = method.penalty(phase, batch) if phase.main else 0.0
                    (loss + penalty).backward()
                    columns = method.after_backward(phase, batch) or {}
                    norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
                    optimiser.step()
                    method.after_step(phase)
                    record |= {"loss_main": loss.detach(), "loss_own": batch["own"], "loss_prior": batch["prior"]}
                    record |= {"penalty": penalty, "gradient_norm": norm, "clipped": norm > 1.0, **columns}
                run.log(step, args.lr, record)
            run.keep()


if __name__ == "__main__":
    with common.one_line_errors():
        train(ARGS)
