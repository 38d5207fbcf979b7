"""Concepts: what is learnt from a few pictures, the words it is called by, and the text-to-image model it is taught to.

A concept is a folder of pictures, the plain noun of its kind (its category, "dog") and a word of its own. DreamBooth
calls it by a rare word that the model knows and hardly uses ("photo of a sks dog"), Custom Diffusion by a new word
("photo of a <new1> dog"). Words belong to concepts, not to places in the stream: every class order has the same.

Ruiz et al., DreamBooth: Fine Tuning Text-to-Image Diffusion Models for Subject-Driven Generation, 2023
(arXiv:2208.12242); Kumari et al., Multi-Concept Customization of Text-to-Image Diffusion, 2023 (arXiv:2212.04488);
CLoG, appendix C.4.

From top to bottom: concepts · words · the model's folder · class images.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

import common
import streams
from common import ROOT, fail

V1_4 = "CompVis/stable-diffusion-v1-4"  # the paper's model
RARE_WORDS = ("sks", "phol", "oxi", "mth", "nigh")  # CLoG, appendix C.4
KEYS_AND_VALUES = ("attn2.to_k", "attn2.to_v")  # of the cross-attention: what Custom Diffusion trains of a U-Net
STARTS = ("ktn", "pll", "ucd", "mth", "nigh")  # of new words
PARTS = {"unet": "UNet2DConditionModel", "text_encoder": "CLIPTextModel", "vae": "AutoencoderKL",
         "tokenizer": "CLIPTokenizer"}  # fmt: skip


class Concept(NamedTuple):
    name: str  # of its folder
    category: str  # the plain noun of its kind
    prompts: str  # its list in reference/prompts.json: object, live or tiny
    word: str  # rare (DreamBooth) or new (Custom Diffusion)
    start: str  # the word that a new one starts as

    @property
    def noun(self):
        return f"{self.word} {self.category}"


def concepts(scene, names, base, cache):
    """[Concept] in the order of the ids of a scenario whose classes have these names.

    Categories and lists of prompts stand in concepts.json beside the concept folders, {folder: {"category": …,
    "prompts": "object" or "live", "word": …}}; what is left out is the folder's name and "object".
    """
    if scene.dataset in streams.TOYS:
        import tiny_world

        facts = {name: {"category": c, "prompts": "tiny"} for name, c in tiny_world.CONCEPTS[scene.dataset].items()}
    else:
        own = (scene.folder or Path(cache) / "objects") / "concepts.json"
        path = own if own.is_file() else ROOT / "reference" / "concepts.json"
        facts = common.read_json(path)
        if not isinstance(facts, dict) or not all(isinstance(about, dict) for about in facts.values()):
            fail(f'{path} should read {{"folder": {{"category": "dog", "prompts": "live"}}, …}}')
        if path == own and (unknown := [name for name in facts if not (path.parent / name).is_dir()]):
            fail(f"{path} speaks of '{unknown[0]}', and there is no such concept folder beside it")
        for name, about in facts.items():
            if about.keys() - {"category", "prompts", "word"} or not all(isinstance(v, str) and v.strip() == v != ""
                                                                         for v in about.values()):  # fmt: skip
                fail(f'{path}: \'{name}\' takes "category", "prompts" and "word", each a text that is not empty')
    known = json.loads((ROOT / "reference" / "prompts.json").read_text())
    found = []
    for k, name in enumerate(names):
        about = facts.get(name, {})
        category, prompts = about.get("category", name.replace("_", " ").strip()), about.get("prompts", "object")
        if prompts not in known:
            fail(f"concept '{name}': there is no list '{prompts}' of prompts; choose from {', '.join(known)}")
        if base == "custom_diffusion":
            word, start = about.get("word", f"<new{k + 1}>"), STARTS[k % len(STARTS)]
        elif "word" in about or k < len(RARE_WORDS):
            word = start = about["word"] if "word" in about else RARE_WORDS[k]
        else:
            fail(f"concept '{name}' is number {k + 1}, and there are {len(RARE_WORDS)} rare words: give it a \"word\" "
                 "in concepts.json")  # fmt: skip
        found.append(Concept(name, category, prompts, word, start))
    words = [concept.word for concept in found]
    if twice := {word for word in words if words.count(word) > 1}:
        fail(f"two concepts have the word '{min(twice)}': give each its own")
    return found


# -------------------------------------------------------------------------------------------------- words


def check_words(concepts, base, tokenizer):
    """Ends the program over a word that would be taken for another without a word.

    A rare word must be one token: a longer one falls apart, and its parts are other words. A new word must be new.
    """
    spelt = {}  # CLIP reads capitals as small letters
    for concept in concepts:
        if (other := spelt.setdefault(concept.word.lower(), concept.name)) != concept.name:
            fail(f"'{concept.word}' of '{concept.name}' reads like the word of '{other}': give each its own")
        if len(concept.word.split()) > 1:
            fail(f"'{concept.word}' of '{concept.name}' is more than one word")
        ids = tokenizer(concept.word, add_special_tokens=False).input_ids
        alone = len(ids) == 1 and ids[0] not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
        if base == "custom_diffusion" and alone:
            fail(f"'{concept.word}', the new word of '{concept.name}', is a word that the model knows: choose another")
        if base == "dreambooth" and not alone:
            parts = " ".join(tokenizer.convert_ids_to_tokens(ids))
            fail(f"'{concept.word}', the rare word of '{concept.name}', is no single token of the model but {parts}")


def start_id(word, tokenizer):
    """The token id of a start word. `ktn` is a token within words alone, so the piece goes before the word."""
    vocabulary = tokenizer.get_vocab()
    for token in (word, f"{word}</w>"):
        if token in vocabulary:
            return vocabulary[token]
    return fail(f"the start word '{word}' is no single token of the model")


# ------------------------------------------------------------------------------------- the model's folder


def found(name):
    """The folder of a model that is there: a path, or what the hub's cache has of this name; None if nothing has."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def model_folder(name, cache):
    """The folder of a text-to-image model: the small world's own, or `found`. Nothing is downloaded."""
    if name == "tiny":
        import tiny_world

        return tiny_world.build(cache) / "model"
    return found(name) or fail(
        f"no model '{name}': it is neither a folder nor in the hub's cache; `hf download {name}` fetches it (5 GB for "
        f"{V1_4}), --model tiny needs none"
    )


def check_model(folder):
    """Ends the program over a folder that is no model of Stable Diffusion's architecture, or holds pickles alone."""
    if not (folder / "model_index.json").is_file():
        fail(f"{folder} has no model_index.json: --model takes a folder that diffusers' save_pretrained wrote")
    index = common.read_json(folder / "model_index.json")
    kind = index.get("_class_name") if isinstance(index, dict) else None
    for part, wanted in PARTS.items():
        found = (index.get(part) if kind else None) or ("", "nothing")
        # the parts of an SDXL or an inpainting model have these classes, too
        if kind != "StableDiffusionPipeline" or found[-1] not in (wanted, f"{wanted}Fast"):
            fail(f"{folder} is a {kind} with {found[-1]} as {part}: want Stable Diffusion's architecture, a "
                 f"StableDiffusionPipeline with {wanted}")  # fmt: skip
        needed = folder / part / ("tokenizer_config.json" if part == "tokenizer" else "config.json")
        if not needed.is_file():
            fail(f"{needed} is missing: get a whole copy of this model")
        stem = folder / part / ("model" if part == "text_encoder" else "diffusion_pytorch_model")
        whole = any(stem.with_suffix(end).is_file() for end in (".safetensors", ".safetensors.index.json"))
        if part != "tokenizer" and not whole:
            pickles = [p.name for kind in ("*.bin", "*.ckpt", "*.pt") for p in (folder / part).glob(kind)]
            fail(f"{folder / part} holds no {stem.name}.safetensors" + (f" but {pickles[0]}, a pickle, which may run "
                 "code" if pickles else "") + ": get the safetensors of this model")  # fmt: skip
    kind = common.read_json(folder / "scheduler" / "scheduler_config.json").get("prediction_type", "epsilon")
    if kind != "epsilon":
        fail(f"{folder} predicts {kind}: want a model that predicts the noise (epsilon)")


def picture_side(name):
    """Pixels along a side of the pictures that a model is for, if it is there; else None."""
    if name == "tiny":
        return 32
    try:
        folder = found(name)
        side = json.loads((folder / "unet" / "config.json").read_text())["sample_size"]
        return side * 2 ** (len(json.loads((folder / "vae" / "config.json").read_text())["block_out_channels"]) - 1)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def model_digest(folder):
    """Short hash of a model's weights, by samples from each file: 4 GB need not be read."""
    digest = hashlib.sha256()
    for part in ("unet", "text_encoder", "vae"):
        for path in sorted((folder / part).glob("*.safetensors")):
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                digest.update(f"{part}/{path.name} {size}".encode())
                for start in sorted({*range(0, size, 2**24), max(0, size - 2**18)}):
                    file.seek(start)
                    digest.update(file.read(2**18))
    return digest.hexdigest()[:12]


# ------------------------------------------------------------------------------------------- class images


def class_images(folder, count, prompt, size, sample):
    """uint8 (count, 3, size, size): pictures of a category, drawn from the initial model, kept as PNG in `folder`.

    sample(prompts, seeds): uint8 images. Image k depends on its number and prompt alone, so what was interrupted goes
    on; pictures that are there already (any names) are taken in the order of their names, at most `count` of them. A
    black one, which is what a safety filter leaves, is drawn again. The size of a batch can move a last bit, so 16
    numbers are always drawn together (what is there already of them is not written again), and a black one alone.
    """

    def pictures():
        return sorted(p for p in folder.glob("*") if p.suffix.lower() in streams.PICTURES and p.name[0] != ".")[:count]

    with common.locked(folder, wait=True):
        free = [k for k in range(count) if not (folder / f"{k:04d}.png").exists()]
        left = {*free[: count - len(pictures())]}
        bar = common.tqdm(total=len(left), desc=f"class images: {prompt}", unit="img", disable=None, leave=False)
        for first in range(0, count, 16):
            together = range(first, first + 16)
            if left.isdisjoint(together):
                continue
            seeds = [common.hash32(("class image", prompt, k, 0)) for k in together]
            for k, image in zip(together, sample([prompt] * 16, seeds), strict=True):
                attempt = 0
                while k in left and not image.any():
                    if (attempt := attempt + 1) == 10:
                        fail(f"the model draws black for '{prompt}', ten times: is it whole?", 1)
                    image = sample([prompt], [common.hash32(("class image", prompt, k, attempt))])[0]
                if k in left:
                    common.write_picture(folder / f"{k:04d}.png", image)
                    bar.update()
        bar.close()
    return np.stack([streams.read_picture(path, size) for path in pictures()])


# --------------------------------------------------------------------------------------------------- sizes


def adapters(merge):
    """({network: names of the layers that C-LoRA's adapter goes to}, its rank by default).

    Isolated: all attention of both networks, of a rank by which an adapter has the paper's size (10.4, table 13,
    counts in 2²⁰; it names no layers). Merged: keys and values of the cross-attention, as the original has them.
    """
    if merge:
        return {"unet": [*KEYS_AND_VALUES]}, 16
    return {
        "unet": ["to_q", "to_k", "to_v", "to_out.0"],
        "text_encoder": ["q_proj", "k_proj", "v_proj", "out_proj"],
    }, 40


def build_on_meta(name):
    """{part: network without numbers} of a model by its configuration; of the paper's, it need not be there."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    folder = found(name)
    if folder and (folder / "model_index.json").is_file():
        shapes = {part: common.read_json(folder / part / "config.json") for part in ("unet", "text_encoder", "vae")}
    elif name == V1_4:
        shapes = common.read_json(ROOT / "reference" / "stable_diffusion_v1-4.json")
    else:
        return {}
    with torch.device("meta"):
        return {
            "unet": UNet2DConditionModel.from_config(shapes["unet"]),
            "text_encoder": CLIPTextModel(CLIPTextConfig.from_dict(shapes["text_encoder"])),
            "vae": AutoencoderKL.from_config(shapes["vae"]),
        }


def count(net):
    return sum(p.numel() for p in net.parameters())


def sizes(nets, base):
    """(common.Sizes as the paper's table 13 counts them, numbers that the optimiser gets) of `build_on_meta`'s parts.

    The paper's Custom Diffusion holds keys and values twice and trains the whole table of words, with one more row.
    Here they are held once, and of the table the row of the new word alone is trained.
    """
    both = count(nets["unet"]) + count(nets["text_encoder"])
    whole = both + count(nets["vae"])
    if base == "dreambooth":
        return common.Sizes(whole, both, both), both
    kv = sum(p.numel() for name, p in nets["unet"].named_parameters() if ".attn2.to_k" in name or ".attn2.to_v" in name)
    rows, width = nets["text_encoder"].get_input_embeddings().weight.shape
    return common.Sizes(whole + kv, kv + (rows + 1) * width, both + kv), kv + width


def plan(args):
    """What --dry_run says of the model: {network: parameters}, and lines about memory and disk."""
    nets = build_on_meta(args.model)
    if not nets:
        return {}, [f"{args.model} is not there yet, so its size is not known"]
    paper, trained = sizes(nets, args.base)
    held = {"kd": 1, "gr": 1, "l2": 1, "ewc": 2, "mas": 2, "si": 5}.get(args.method, 0)  # copies of what is trained
    kept = {"ewc": 1, "mas": 1, "si": 2}.get(args.method, 0)  # in the state of the method
    written = trained * (1 if args.base == "dreambooth" else 2)
    if args.method == "clora":
        layers, rank = adapters(args.clora_mode == "merge")
        ends = [(net, module) for net, names in layers.items() for name, module in nets[net].named_modules()
                if name.endswith(tuple(names))]  # fmt: skip
        rank = args.clora_rank or rank
        trained = written = sum(rank * (module.in_features + module.out_features) for _, module in ends)
    # three states may lie beside each other while one replaces another
    memory = 4 * (sum(map(count, nets.values())) + (3 + held) * trained) / 2**30
    disk = 4 * (args.tasks * (written + kept * trained) + 3 * (3 + kept) * trained) / 2**30
    lines = [
        f"trained: {trained:,} numbers; as the paper counts, in 2^20: {paper.trained / 2**20:.2f} of "
        f"{paper.model / 2**20:.2f}",
        f"memory: about {memory:.1f} GiB for weights, gradients, Adam and {args.method}, activations apart",
        f"disk: about {disk:.1f} GiB for {args.tasks} tasks and the state inside one",
    ]
    return {name: count(net) for name, net in nets.items()}, lines
