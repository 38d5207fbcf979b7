"""A small world that needs no download: captioned pictures, the text-to-image model that learnt them, and two judges.

    python tiny_world.py --data data --show pictures.png
    pipeline = StableDiffusionPipeline.from_pretrained(tiny_world.build("data") / "model")

Every picture (32 × 32) shows one object on a background and is a pure function of a key. Objects are of one colour or
have a pattern of two, but captions never name patterns: so the model can draw the *individuals* of `concept_pictures`
and knows no word for them. `build` trains, once and below <data>/tiny/<recipe>/:

    clip/    CLIPModel, tokenizer, image processor: reads and compares pictures and captions
    dino/    ViTModel, image processor: tells individuals apart, whatever their background, size and place
    vae/     AutoencoderKL: 32 × 32 pictures ↔ 8 × 8 × 4 latents
    model/   StableDiffusionPipeline of that VAE, a U-Net, and CLIP's tokenizer and text tower

From top to bottom: objects and backgrounds · pictures and captions · concepts · networks · training · building.
"""

import functools
import itertools
import json
import math
import multiprocessing
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

import common

SIDE, FINE = 32, 3  # pixels of a picture; each is the mean of FINE × FINE points
RECIPE = dict(version=2, pictures=16000, clip_steps=1800, vae_steps=900, model_steps=1300, dino_steps=700,
              save_every=250)  # fmt: skip
RARE_WORDS = [
    "sks",
    "phol",
    "oxi",
    "mth",
    "nigh",
    "ktn",
    "pll",
    "ucd",
]  # never in a caption: names for what is yet to be learnt


# ------------------------------------------------------------------------------------ objects and backgrounds
# An object is a set of points (u, v): its centre is (0, 0), its radius about 1, v points down. So is the second colour.


def polygon(*corners):
    """Whether (u, v) lies inside: the number of edges to the right of it is odd."""

    def inside(u, v):
        result = np.zeros(u.shape, bool)
        for (a, b), (c, d) in zip(corners, corners[1:] + corners[:1], strict=True):
            if b != d:
                result ^= ((b > v) != (d > v)) & (u < a + (v - b) * (c - a) / (d - b))
        return result

    return inside


def union(*parts):
    return lambda u, v: functools.reduce(np.logical_or, (part(u, v) for part in parts))


def disc(x=0.0, y=0.0, a=1.0, b=1.0):
    return lambda u, v: ((u - x) / a) ** 2 + ((v - y) / b) ** 2 < 1


def bands(w):
    """Bands of width 0.46, one of them around 0."""
    return np.floor(w / 0.46 + 0.5).astype(int) % 2 == 1


STAR = [(r * math.sin(k * math.pi / 5), -r * math.cos(k * math.pi / 5)) for k, r in enumerate([1.1, 0.5] * 5)]
SHAPES = {
    "ball": disc(),
    "box": lambda u, v: np.maximum(abs(u), abs(v)) < 0.85,
    "star": polygon(*STAR),
    "heart": lambda u, v: ((1.15 * u) ** 2 + (0.1 - 1.15 * v) ** 2 - 1) ** 3 < (1.15 * u) ** 2 * (0.1 - 1.15 * v) ** 3,
    "tree": polygon((0, -1.1), (0.85, 0.55), (0.25, 0.55), (0.25, 1), (-0.25, 1), (-0.25, 0.55), (-0.85, 0.55)),
    "boat": union(polygon((-1.1, 0.3), (1.1, 0.3), (0.65, 0.95), (-0.65, 0.95)),
                  polygon((-0.1, -1.05), (0.85, 0.15), (-0.1, 0.15))),
    "house": polygon((0, -1.05), (1, -0.1), (0.75, -0.1), (0.75, 0.95), (-0.75, 0.95), (-0.75, -0.1), (-1, -0.1)),
    "fish": union(disc(-0.2, 0, 0.85, 0.65), polygon((0.3, 0), (1.1, -0.65), (1.1, 0.65))),
    "kite": polygon((0, -1.1), (0.8, -0.15), (0, 1.1), (-0.8, -0.15)),
    "mushroom": union(lambda u, v: disc(0, 0.05, 1.05, 1)(u, v) & (v < 0.1), polygon(
        (-0.35, 0), (0.35, 0), (0.45, 1), (-0.45, 1))),
    "moon": lambda u, v: disc()(u, v) & ~disc(0.6, -0.1, 0.9, 0.9)(u, v),
    "ring": lambda u, v: disc()(u, v) & ~disc(0, 0, 0.5, 0.5)(u, v),
}  # fmt: skip
PATTERNS = {
    "plain": lambda u, v: np.zeros(u.shape, bool),
    "stripes": lambda u, v: bands(v),
    "bars": lambda u, v: bands(u),
    "slant": lambda u, v: bands((u + v) * 0.75),
    "checks": lambda u, v: bands(u + 0.23) ^ bands(v + 0.23),
    "dots": lambda u, v: np.hypot((u + 0.35) % 0.7 - 0.35, (v + 0.35) % 0.7 - 0.35) < 0.22,
    "halves": lambda u, v: u > 0,
    "target": lambda u, v: bands(np.hypot(u, v)),
    "belt": lambda u, v: abs(v) < 0.3,
}
COLOURS = {"red": (215, 40, 40), "green": (40, 165, 60), "blue": (50, 80, 220), "yellow": (245, 215, 40),
           "purple": (150, 50, 180), "pink": (255, 140, 190), "white": (245, 245, 245),
           "black": (25, 25, 25)}  # fmt: skip
BACKGROUNDS = {"grass": "on grass", "snow": "on snow", "sand": "on sand", "water": "on water", "bricks": "on bricks",
               "wood": "on wood", "tiles": "on tiles", "lava": "on lava", "night": "at night",
               "sky": "in the sky"}  # fmt: skip
SIZES = {"": (0.28, 0.38), "far away": (0.19, 0.23), "very small": (0.19, 0.23), "zoomed in": (0.42, 0.48),
         "close up": (0.42, 0.48)}  # words → radius of the object in sides of the picture  # fmt: skip


def background(name, rng):
    """float (SIDE, SIDE, 3) in 0..255."""
    y, x = np.mgrid[:SIDE, :SIDE]
    y, x, fine = y + rng.integers(SIDE), x + rng.integers(SIDE), rng.normal(size=(SIDE, SIDE))
    coarse = np.kron(rng.random((8, 8)), np.ones((4, 4)))
    shade, low, high = {
        "grass": lambda: (0.5 + 0.15 * fine, (60, 140, 60), (130, 200, 90)),
        "snow": lambda: (0.6 + 0.2 * fine, (215, 228, 245), (245, 250, 255)),
        "sand": lambda: (0.5 + 0.15 * fine, (205, 180, 120), (240, 220, 165)),
        "water": lambda: (0.5 + 0.5 * np.sin(y * 0.8 + np.sin(x * 0.4)), (60, 140, 205), (130, 200, 235)),
        "bricks": lambda: ((y % 8 > 0) & ((x + y // 8 % 2 * 8) % 16 > 0), (190, 140, 120), (165, 85, 65)),
        "wood": lambda: (0.5 + 0.5 * (y % 11 > 0) - 0.3 * (y // 11 % 2) + 0.04 * fine, (70, 40, 20), (150, 100, 60)),
        "tiles": lambda: ((x // 8 + y // 8) % 2, (150, 155, 160), (215, 218, 220)),
        "lava": lambda: (coarse, (85, 15, 20), (205, 70, 30)),
        "night": lambda: (rng.random((SIDE, SIDE)) < 0.012, (45, 45, 105), (255, 255, 200)),
        "sky": lambda: (coarse > 0.75, (150, 205, 250), (245, 250, 255)),
    }[name]()
    return np.clip(low + np.asarray(shade, float)[..., None] * np.subtract(high, low), 0, 255)


def draw(shape, pattern, colours, where, radius, place, rng):
    """One picture, uint8 (3, SIDE, SIDE). colours: two RGB triples; radius and place (x, y): in sides of a picture."""
    v, u = (
        (np.mgrid[: SIDE * FINE, : SIDE * FINE] + 0.5) / (SIDE * FINE) - np.reshape(place[::-1], (2, 1, 1))
    ) / radius
    body = SHAPES[shape](u, v)
    padded = np.pad(body, 2)  # a thin dark edge, or a white ball on snow were nothing
    inner = body & padded[4:, 2:-2] & padded[:-4, 2:-2] & padded[2:-2, 4:] & padded[2:-2, :-4]
    second = inner & PATTERNS[pattern](u, v)
    layers = [body & ~inner, inner & ~second, second]
    cover = np.stack(layers).reshape(3, SIDE, FINE, SIDE, FINE).mean((2, 4))
    paint = np.stack([(30.0, 30.0, 30.0), *colours])
    picture = background(where, rng) * (1 - cover.sum(0))[..., None] + np.einsum("lyx,lc->yxc", cover, paint)
    return picture.round().clip(0, 255).astype(np.uint8).transpose(2, 0, 1)


# ------------------------------------------------------------------------------------- pictures and captions


class Facts(NamedTuple):
    """What a picture shows; captions name shape and, some of them, size, colour and background."""

    shape: str
    pattern: str
    colours: tuple  # names of the first, which captions name, and the second
    where: str
    size: str  # a key of SIZES


def choose(rng, names):
    return list(names)[rng.integers(len(names))]


def two_colours(rng):
    return tuple(list(COLOURS)[k] for k in rng.permutation(len(COLOURS))[:2])


def jitter(colours, rng):
    return [tuple(np.clip(COLOURS[name] + rng.normal(0, 8, 3), 0, 255)) for name in colours]


def picture(*key):
    """(uint8 (3, SIDE, SIDE), Facts) of the world: two in three objects are plain, one in four is far or near."""
    rng, individual = common.numpy_rng(("tiny world", *key)), None
    while individual is None or individual in known():  # the concepts never occur
        pattern = choose(rng, PATTERNS) if rng.random() < 0.45 else "plain"
        individual = choose(rng, SHAPES), pattern, two_colours(rng)
    size = choose(rng, SIZES) if rng.random() < 0.15 else ""
    facts = Facts(*individual, choose(rng, BACKGROUNDS), size)
    radius = rng.uniform(*SIZES[size])
    place = 0.5 + rng.uniform(-0.05, 0.05, 2)
    return draw(facts.shape, pattern, jitter(facts.colours, rng), facts.where, radius, place, rng), facts


def caption(facts, named, rng):
    """Some words for a picture. named: whether to say (colour, background, size)."""
    colour, where, size = (
        s if say else "" for s, say in zip((facts.colours[0], BACKGROUNDS[facts.where], facts.size), named, strict=True)
    )
    head = ["photo of a", "picture of a", "a"][rng.integers(2 if size else 3)]
    words = [size, head, colour, facts.shape, where]
    return " ".join(filter(None, words))


def individuals(*key, count=4, pictures=4):
    """Pictures of one family of `count` individuals, uint8 (count, pictures, 3, SIDE, SIDE): the lesson of the judge.

    They are of one shape; each has pattern or colours of its own, of any hue, and some differ in one of them only.
    """
    rng = common.numpy_rng(("tiny world", "individuals", *key))
    shape, pattern, colours, family = choose(rng, SHAPES), choose(rng, PATTERNS), two_colours(rng), []
    for _ in range(count):
        other = choose(rng, PATTERNS), two_colours(rng)
        pattern, colours = [(pattern, other[1]), (other[0], colours), other][rng.integers(3)]
        rgb = jitter(colours, rng) if rng.random() < 0.5 else rng.uniform(10, 250, (2, 3))
        looks = []
        for _ in range(pictures):
            radius = rng.uniform(0.2, 0.45)
            place = 0.5 + max(0.06, 0.45 - radius) * rng.uniform(-1, 1, 2)
            looks.append(draw(shape, pattern, rgb, choose(rng, BACKGROUNDS), radius, place, rng))
        family.append(looks)
    return np.array(family)


# -------------------------------------------------------------------------------------------------- concepts

INDIVIDUALS = {  # scenario → name → (shape, pattern, colours); no shape twice
    "toys": {
        "halved_ball": ("ball", "halves", ("pink", "blue")),
        "belted_fish": ("fish", "belt", ("yellow", "purple")),
        "halved_house": ("house", "halves", ("white", "red")),
        "belted_heart": ("heart", "belt", ("green", "white")),
        "halved_mushroom": ("mushroom", "halves", ("yellow", "black")),
    },
    "more_toys": {
        "belted_box": ("box", "belt", ("purple", "yellow")),
        "halved_star": ("star", "halves", ("blue", "pink")),
        "belted_tree": ("tree", "belt", ("green", "red")),
        "halved_boat": ("boat", "halves", ("white", "purple")),
        "belted_kite": ("kite", "belt", ("black", "yellow")),
    },
}
CONCEPTS = {scenario: {name: facts[0] for name, facts in them.items()} for scenario, them in INDIVIDUALS.items()}


@functools.cache
def known():
    """The individuals that the world must not show, with their colours in either order."""
    them = [one for scenario in INDIVIDUALS.values() for one in scenario.values()]
    return {(shape, pattern, c) for shape, pattern, colours in them for c in (colours, colours[::-1])}


def concept_pictures(scenario):
    """(uint8 images (25, 3, 32, 32), int64 labels (25,), names, categories): five pictures of five individuals."""
    if scenario not in INDIVIDUALS:
        common.fail(f"unknown scenario '{scenario}' of the tiny world: choose {' or '.join(INDIVIDUALS)}")
    images = []
    for name, (shape, pattern, colours) in INDIVIDUALS[scenario].items():
        rng = common.numpy_rng(("tiny world", scenario, name))
        rgb = jitter(colours, rng)
        for where in rng.permutation(list(BACKGROUNDS))[:5]:
            radius, place = rng.uniform(0.28, 0.4), 0.5 + rng.uniform(-0.08, 0.08, 2)
            images.append(draw(shape, pattern, rgb, where, radius, place, rng))
    names = list(INDIVIDUALS[scenario])
    return np.array(images), np.repeat(np.arange(len(names)), 5), names, [*CONCEPTS[scenario].values()]


# -------------------------------------------------------------------------------------------------- networks


def vocabulary():
    """Every word that the text tower has a token for."""
    said = ["photo picture of a", *COLOURS, *SHAPES, *BACKGROUNDS.values(), *SIZES, *RARE_WORDS]
    return list(dict.fromkeys(" ".join(said).split()))


def build_tokenizer():
    """Byte-pair encoding of which each word of the vocabulary is one token, and any other is spelt.

    A word's pairs are merged by the rules of the words before it, then by further rules, which come after those: so
    they cannot change how an earlier word is read.
    """
    from transformers import CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    rules = {}
    for word in vocabulary():
        pieces = [*word[:-1], word[-1] + "</w>"]
        while len(pieces) > 1:
            pair = min(itertools.pairwise(pieces), key=lambda p: rules.get(p, math.inf))
            rules.setdefault(pair, len(rules))
            k = next(k for k, p in enumerate(itertools.pairwise(pieces)) if p == pair)
            pieces[k : k + 2] = ["".join(pair)]
        tokens.append(pieces[0])
    tokens = list(dict.fromkeys([*tokens, *map("".join, rules)]))
    return CLIPTokenizer(vocab={t: k for k, t in enumerate(tokens)}, merges=list(rules), model_max_length=16)


def build_clip(tokenizer):
    from transformers import CLIPConfig, CLIPModel

    size = dict(hidden_size=64, intermediate_size=192, num_attention_heads=4, projection_dim=64)
    text = dict(size, vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=16,
                bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id)  # fmt: skip
    vision = dict(size, hidden_size=96, intermediate_size=288, num_hidden_layers=3, image_size=SIDE, patch_size=8)
    wide = dict(initializer_range=0.1, initializer_factor=2.0)  # the usual ones are for 768 numbers a token
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision | wide, projection_dim=64))


def build_vae():
    from diffusers import AutoencoderKL

    blocks = dict(down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3)
    return AutoencoderKL(block_out_channels=(16, 16, 48), layers_per_block=1, norm_num_groups=8, latent_channels=4,
                         sample_size=SIDE, mid_block_add_attention=False, **blocks)  # fmt: skip


def build_unet():
    from diffusers import UNet2DConditionModel

    blocks = dict(down_block_types=["CrossAttnDownBlock2D"] * 2, up_block_types=["CrossAttnUpBlock2D"] * 2)
    return UNet2DConditionModel(sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
                                cross_attention_dim=64, attention_head_dim=2, **blocks)  # fmt: skip


def build_dino():
    from transformers import ViTConfig, ViTModel

    size = dict(hidden_size=96, intermediate_size=288, num_attention_heads=4, num_hidden_layers=3)
    noise = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1)
    return ViTModel(ViTConfig(image_size=SIDE, patch_size=8, **size, **noise), add_pooling_layer=False)


def image_processor(kind):
    """kind: CLIP or ViT. Shorter side to SIDE, middle cut out, 0..255 to -1..1."""
    import transformers

    return getattr(transformers, f"{kind}ImageProcessor")(
        do_resize=True, size={"shortest_edge": SIDE}, resample=3, do_center_crop=True,
        crop_size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3)  # fmt: skip


# -------------------------------------------------------------------------------------------------- training


@functools.lru_cache(maxsize=1)
def world(count):
    """The training set: float32 images (count, 3, SIDE, SIDE) in -1..1 and a list of Facts."""
    import torch

    images, facts = zip(*(picture("train", k) for k in range(count)), strict=True)
    return torch.from_numpy(np.array(images)).float() / 127.5 - 1, facts


def muon(weights, momenta, rate):
    """One step of Muon (Jordan, 2024): the momentum, with all its singular values made about 1 by five iterations.

    Needs half the steps of Adam here. weights: matrices, or filters that are taken as such.
    """
    for weight, momentum in zip(weights, momenta, strict=True):
        momentum.lerp_(weight.grad, 0.05)
        x = weight.grad.lerp(momentum, 0.95).flatten(1)
        tall = x.shape[0] > x.shape[1]
        x = x.T / x.norm().clamp(min=1e-7) if tall else x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
        step = (x.T if tall else x).reshape(weight.shape)
        weight.mul_(1 - 0.01 * rate).sub_(step, alpha=rate * max(1, weight.shape[0] / weight[0].numel()) ** 0.5)


def fit(part, folder, recipe, net, loss, peak=0.02):
    """Trains a network for recipe["<part>_steps"] steps and leaves the mean of its last weights in it.

    Muon for the matrices, AdamW for vectors and tables. loss: function of step → scalar tensor; its random numbers
    are torch's, seeded here by the step, or keyed: so a part that was stopped goes on with the same bits.
    """
    import torch

    steps, names = recipe[f"{part}_steps"], dict(net.named_parameters())
    matrices = [w for name, w in names.items() if w.ndim > 1 and "embedding" not in name]
    others = [w for name, w in names.items() if w.ndim < 2 or "embedding" in name]
    momenta, mean = [torch.zeros_like(w) for w in matrices], [w.detach().clone() for w in names.values()]
    optimiser = torch.optim.AdamW(others, weight_decay=0, fused=True)
    start, state = 0, folder / f"{part}.state"
    for kept in (state, state.with_name(state.name + ".old")):
        if not start and common.is_sound(kept):
            saved = common.load_tensors(kept / "state.pt")
            net.load_state_dict(saved["net"])
            optimiser.load_state_dict(saved["optimiser"])
            mean, momenta, start = saved["mean"], saved["momenta"], saved["step"]
    bar = common.tqdm(range(start, steps), f"tiny world: {part}", steps, initial=start, disable=None, leave=False,
                      position=int(part in ("vae", "dino")))  # fmt: skip
    for step in bar:
        torch.manual_seed(common.hash32(("tiny world", part, step)))
        value = loss(step)
        net.zero_grad()
        value.backward()
        part_of_peak = min((step + 1) / min(50, steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimiser.param_groups[0]["lr"] = 0.15 * peak * part_of_peak
        optimiser.step()
        with torch.no_grad():
            muon(matrices, momenta, peak * part_of_peak)
            torch._foreach_lerp_(mean, list(names.values()), max(0.02, 1 / (step + 1)))
        if step % 20 == 0:
            bar.set_postfix_str(f"loss {value.item():.3f}")
        if (step + 1) % recipe["save_every"] == 0 and step + 1 < steps:
            saved = dict(net=net.state_dict(), optimiser=optimiser.state_dict(), mean=mean, momenta=momenta)
            with common.new_folder(state) as target:
                common.save_tensors(saved | dict(step=step + 1), target / "state.pt")
    with torch.no_grad():
        for weight, average in zip(names.values(), mean, strict=True):
            weight.copy_(average)
    return net.eval().requires_grad_(False)


def train_clip(folder, recipe):
    """Contrastive, and by the shape; a caption that fits several pictures of a batch is right for each of them."""
    import torch

    torch.manual_seed(common.hash32(("tiny world", "clip")))
    (images, facts), tokenizer = world(recipe["pictures"]), build_tokenizer()
    clip, usual = build_clip(tokenizer), round(10 * SIZES[""][0])
    table = np.array([[list(COLOURS).index(f.colours[0]), list(BACKGROUNDS).index(f.where),
                       round(10 * SIZES[f.size][0]), list(SHAPES).index(f.shape)] for f in facts])  # fmt: skip

    def loss(step):
        rng = common.numpy_rng(("tiny world", "clip", step))
        pick = rng.integers(len(facts), size=64)
        named = rng.random((len(pick), 3)) < 0.65
        words = [caption(facts[k], n, rng) for k, n in zip(pick, named, strict=True)]
        tokens = tokenizer(words + [f"photo of a {s}" for s in SHAPES], padding=True, return_tensors="pt").input_ids
        mirrored = torch.from_numpy(rng.random((len(pick), 1, 1, 1)) < 0.5)
        pixels = torch.where(mirrored, images[pick].flip(3), images[pick])
        logits = clip(input_ids=tokens, pixel_values=pixels).logits_per_image
        logits, by_shape = logits[:, : len(pick)], logits[:, len(pick) :]
        said = np.pad(named, ((0, 0), (0, 1)), constant_values=True)  # the shape always is, the usual size never
        said[:, 2] &= table[pick, 2] != usual
        fits = ((table[pick, None] == table[None, pick]) | ~said[None]).all(2)  # (picture, caption)
        fits = torch.from_numpy(fits).float()
        by_picture = -(logits.log_softmax(1) * fits).sum(1) / fits.sum(1)
        by_caption = -(logits.log_softmax(0) * fits).sum(0) / fits.sum(0)
        shape = torch.nn.functional.cross_entropy(by_shape, torch.from_numpy(table[pick, 3]))
        return 0.1 * (by_picture.mean() + by_caption.mean()) + shape  # shapes are harder than all the rest

    fit("clip", folder, recipe, clip, loss)
    with common.new_folder(folder / "clip") as target:
        for what in (clip, tokenizer, image_processor("CLIP")):
            what.save_pretrained(target)
    pictures, facts = zip(*(picture("test", k) for k in range(500)), strict=True)
    shapes = read_shapes(clip, tokenizer, np.array(pictures))
    return (
        f"reads the shape of {np.mean([a == f.shape for a, f in zip(shapes, facts, strict=True)]):.1%} of new pictures"
    )


def read_shapes(clip, tokenizer, images):
    """The shape that CLIP sees in each picture (uint8 (n, 3, SIDE, SIDE)), by its caption "photo of a <shape>"."""
    import torch

    tokens = tokenizer([f"photo of a {s}" for s in SHAPES], padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = clip(input_ids=tokens, pixel_values=torch.from_numpy(images).float() / 127.5 - 1).logits_per_image
    return [list(SHAPES)[k] for k in logits.argmax(1)]


def train_vae(folder, recipe):
    """Squared error and a slight pull of the latents to the normal distribution; no adversary."""
    import torch

    torch.manual_seed(common.hash32(("tiny world", "vae")))
    images, vae = world(recipe["pictures"])[0], build_vae()
    with torch.no_grad():
        vae.quant_conv.bias[4:] -= 6  # latents are nearly free of noise at first

    def loss(step):
        x = images[torch.randint(len(images), (16,))]
        posterior = vae.encode(x).latent_dist
        return 3 * (vae.decode(posterior.sample()).sample - x).square().mean() + 1e-6 * posterior.kl().mean()

    fit("vae", folder, recipe, vae, loss)
    with torch.no_grad():
        x = images[:500]
        latents = vae.encode(x).latent_dist.mean
        error = (vae.decode(latents).sample - x).abs().mean() * 127.5
    vae.register_to_config(scaling_factor=1 / latents.std().item())
    with common.new_folder(folder / "vae") as target:
        vae.save_pretrained(target)
    return f"mean error {error:.1f} of 255"


def train_model(folder, recipe):
    """The U-Net predicts the noise of the latents; losses of the steps with little noise are cut (min-SNR, γ = 5)."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline
    from transformers import CLIPTextModel, CLIPTokenizer

    torch.manual_seed(common.hash32(("tiny world", "model")))
    images, facts = world(recipe["pictures"])
    vae, unet = AutoencoderKL.from_pretrained(folder / "vae").requires_grad_(False), build_unet()
    tokenizer = CLIPTokenizer.from_pretrained(folder / "clip")
    text = CLIPTextModel.from_pretrained(folder / "clip").requires_grad_(False)
    scheduler = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False,
                              steps_offset=1)  # fmt: skip
    rng = common.numpy_rng(("tiny world", "captions"))
    words = [caption(f, (rng.random() < 0.7, rng.random() < 0.8, True), rng) for f in facts]
    tokens = tokenizer(["", *words], padding="max_length", return_tensors="pt").input_ids
    said = torch.cat([text(some).last_hidden_state for some in tokens.split(500)])
    latents = torch.cat([vae.encode(x).latent_dist.mean for x in images.split(500)]) * vae.config.scaling_factor
    snr = scheduler.alphas_cumprod / (1 - scheduler.alphas_cumprod)

    def loss(step):
        pick, times = torch.randint(len(latents), (64,)), torch.randint(1000, (64,))
        noise = torch.randn(64, *latents.shape[1:])
        condition = said[torch.where(torch.rand(64) < 0.1, 0, pick + 1)]  # 0: no caption, for guidance
        error = unet(scheduler.add_noise(latents[pick], noise, times), times, condition).sample - noise
        return (error.square().mean((1, 2, 3)) * (5 / snr[times]).clamp(max=1)).mean()

    fit("model", folder, recipe, unet, loss)
    vae.register_to_config(_name_or_path="")  # or the model would hold the path it was built at
    pipeline = StableDiffusionPipeline(vae, text, tokenizer, unet, scheduler, safety_checker=None,
                                       feature_extractor=None, requires_safety_checker=False)  # fmt: skip
    with common.new_folder(folder / "model") as target:
        pipeline.save_pretrained(target)
    return f"{sum(w.numel() for w in unet.parameters()) / 1e6:.1f} million weights"


def train_dino(folder, recipe):
    """Contrastive: of 96 pictures of 48 individuals, four of each shape, each finds the other of its own."""
    import torch

    torch.manual_seed(common.hash32(("tiny world", "dino")))
    families = np.array([individuals("train", k) for k in range(max(12, recipe["pictures"] // 16))])
    dino = build_dino()

    def similarities(images):
        pixels = torch.from_numpy(np.ascontiguousarray(images)).float() / 127.5 - 1
        features = torch.nn.functional.normalize(dino(pixel_values=pixels).last_hidden_state[:, 0])
        return features @ features.T

    def loss(step):
        rng = common.numpy_rng(("tiny world", "dino", step))
        pick = families[rng.permutation(len(families))[:12]]
        a, b = rng.permutation(4)[:2]
        logits = similarities(np.concatenate([pick[:, :, a], pick[:, :, b]]).reshape(96, 3, SIDE, SIDE)) / 0.1
        logits = logits.masked_fill(torch.eye(96, dtype=torch.bool), -math.inf)
        return torch.nn.functional.cross_entropy(logits, (torch.arange(96) + 48) % 96)

    fit("dino", folder, recipe, dino, loss)
    with common.new_folder(folder / "dino") as target:
        dino.save_pretrained(target)
        image_processor("ViT").save_pretrained(target)
    them = np.concatenate([concept_pictures(scenario)[0] for scenario in INDIVIDUALS])
    with torch.no_grad():
        alike = similarities(them).reshape(10, 5, 10, 5).mean((1, 3))
    within, across = alike.diagonal().mean(), alike[~torch.eye(10, dtype=torch.bool)].mean()
    return f"pictures of one concept are {within:.2f} alike, of two {across:.2f}"


# -------------------------------------------------------------------------------------------------- building


def train_part(part, folder, recipe):
    """In a process of its own with one thread, so that the bits do not depend on the number of cores."""
    import torch
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
        library.set_verbosity_error()
    start = time.monotonic()
    result = globals()[f"train_{part}"](folder, recipe)
    print(f"tiny world: {part} is trained ({time.monotonic() - start:.0f} s): {result}", flush=True)


def build(cache, recipe=RECIPE):
    """The folder with clip/, dino/, vae/ and model/; trains what is missing, ten minutes on two cores.

    cache: the folder of --data. What was stopped goes on from its last saved state, with the same result to the bit;
    of several processes one builds and the others wait.
    """
    folder = Path(cache) / "tiny" / f"{common.hash32((json.dumps(recipe),)):08x}"
    with common.locked(folder, wait=True):
        missing = [part for part in ("clip", "vae", "dino", "model") if not common.is_sound(folder / part)]
        if missing:
            train_parts(missing, folder, recipe)
        for state in folder.glob("*.state*"):
            shutil.rmtree(state)
    return folder


def train_parts(missing, folder, recipe):
    """Two parts at a time; the model, which needs CLIP and the VAE and takes the longest, as soon as it can."""
    from streams import follow_parent, without_main

    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(common.cpu_count(), 2), context, follow_parent) as pool, without_main():
            first = {part: pool.submit(train_part, part, folder, recipe) for part in missing if part != "model"}
            for part in ("clip", "vae"):
                if part in first:
                    first[part].result()
            last = [pool.submit(train_part, "model", folder, recipe)] if "model" in missing else []
            for future in [*first.values(), *last]:
                future.result()
    except BrokenProcessPool:
        common.fail("a process that trains the tiny world was ended from outside (out of memory?); start again", code=1)


# --------------------------------------------------------------------------------------------------- showing


def show(folder, path):
    """Saves a grid: on the left pictures of the world and the concepts, on the right what the model draws; and says
    how many samples CLIP reads as the shape asked for."""
    import torch
    from diffusers import StableDiffusionPipeline
    from transformers import CLIPModel

    pipeline = StableDiffusionPipeline.from_pretrained(folder / "model")
    pipeline.set_progress_bar_config(disable=True)
    whole = list(zip(SHAPES, itertools.cycle(COLOURS), itertools.cycle(BACKGROUNDS), strict=False))
    prompts = [f"photo of a {colour} {shape} {BACKGROUNDS[where]}" for shape, colour, where in whole]
    drawn = pipeline(prompts * 8, height=SIDE, width=SIDE, num_inference_steps=25, guidance_scale=5.0,
                     generator=torch.Generator().manual_seed(0), output_type="np").images  # fmt: skip
    drawn = (drawn * 255).round().astype(np.uint8).transpose(0, 3, 1, 2)
    read = read_shapes(CLIPModel.from_pretrained(folder / "clip").eval(), pipeline.tokenizer, drawn)
    right = np.mean([a == b for a, b in zip(read, [*SHAPES] * 8, strict=True)])
    rows = [*np.array([picture("shown", k)[0] for k in range(24)]).reshape(2, 12, 3, SIDE, SIDE)]
    rows += [*np.concatenate([concept_pictures(s)[0] for s in INDIVIDUALS])[:48].reshape(4, 12, 3, SIDE, SIDE)]
    common.output_folder(Path(path).parent).mkdir(parents=True, exist_ok=True)
    grid = common.picture_grid([*rows, *drawn.reshape(8, 12, 3, SIDE, SIDE)])
    grid.resize((2 * grid.width, 2 * grid.height), 0).save(path)
    print(
        f"{path}: two rows of the world, four of the concepts, eight of samples, of which CLIP reads {right:.0%} right"
    )
    print("; ".join(prompts))


def main():
    parser = common.Parser(description=__doc__)
    parser.add_argument("--data", default="data", help="folder of data sets and caches (default: data)")
    parser.add_argument("--show", metavar="FILE", help="also draw pictures, samples and concepts (default: no)")
    args = parser.parse_args()
    folder = build(args.data)
    print(f"the tiny world is in {folder}")
    if args.show:
        show(folder, args.show)


if __name__ == "__main__":
    import tiny_world  # by its name, under which further processes find it

    with common.one_line_errors():
        tiny_world.main()
