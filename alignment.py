"""How well pictures of a concept agree with its own pictures and with their prompts, by CLIP and by DINO.

    CLIP-I, DINO-I   100 · mean cosine over all pairs of a generated and a real picture
    CLIP-T           100 · mean of 2.5 · max(cosine, 0) between a picture and its prompt, without the concept's word
    CLIP, DINO       (CLIP-I + CLIP-T) / 2, (DINO-I + CLIP-T) / 2

Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021 (CLIP); Caron et al.,
Emerging Properties in Self-Supervised Vision Transformers, 2021 (DINO); Ruiz et al., DreamBooth, 2023, section 4
(the mean over all pairs); Hessel et al., CLIPScore, 2021, equation 1 (2.5); CLoG, section 3.3. And, beyond them:

    drift DINO, drift CLIP-I   100 · mean cosine of picture k of the plain class ("photo of a dog") by the initial model
                               and by the one that has learnt, both from the same noise; 100 = the class is untouched
    pair DINO                  two concepts in one prompt, this and the next of the stream: the smaller of their DINO-I

Larger is better. Text is scored without the word ("photo of a dog on a beach"), which CLIP cannot know. The real
pictures are those that are trained on, at training size.

From top to bottom: scores · CLIP and DINO · their files · the judge of a run.
"""

import functools
import hashlib
import json
from pathlib import Path

import numpy as np

import common
import fid

PUBLISHED = {"clip": "openai/clip-vit-base-patch32", "dino": "facebook/dino-vits16"}
KINDS = {"clip": ("CLIP", "clip"), "dino": ("DINO", "vit")}  # what it is called, and its model_type in config.json
METRICS = ("CLIP", "DINO", "CLIP-I", "CLIP-T", "DINO-I", "drift CLIP-I", "drift DINO")  # of every cell
BLOCK = 128  # pictures sampled before they are scored: a thousand of 512² would be 800 MB
SHOWN, SHOWN_SIDE = 4, 128  # samples of a cell that are kept, one a prompt, and their largest side


# ------------------------------------------------------------------------------------------------- scores


def unit(features):
    """Rows of length 1, float64."""
    features = np.asarray(features, np.float64)
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def similarity(generated, real):
    """100 · mean cosine over all pairs of a row of `generated` (N, D) and one of `real` (M, D), in -100..100."""
    return 100 * float((unit(generated) @ unit(real).T).mean())


def pairwise(a, b):
    """100 · mean cosine of row k of a and row k of b, both (N, D), in -100..100."""
    return 100 * float((unit(a) * unit(b)).sum(1).mean())


def text_score(images, texts):
    """CLIPScore, 100 · mean of 2.5 · max(cosine, 0) of picture k and text k, both (N, D), in 0..250."""
    return 100 * float((2.5 * (unit(images) * unit(texts)).sum(1).clip(0)).mean())


# ------------------------------------------------------------------------------------------ CLIP and DINO


class Dino:
    """Features of pictures: the class token of the last layer of a vision transformer."""

    kind = "dino"

    def __init__(self, folder, device):
        from transformers import ViTModel

        self.device, self.processor = device, image_processor(folder)
        self.net = network(ViTModel, folder, device, add_pooling_layer=False)

    def images(self, images):
        """uint8 images (N, 3, H, W) → float64 features (N, D)."""
        return in_batches(lambda x: self.net(pixel_values=self.pixels(x)).last_hidden_state[:, 0], images)

    def pixels(self, images):
        """uint8 images (N, 3, H, W) → what the network takes, as its own image processor says: size, crop, scale."""
        arrays = [*np.asarray(images).transpose(0, 2, 3, 1)]
        found = self.processor(images=arrays, input_data_format="channels_last", return_tensors="pt")
        return found.pixel_values.to(self.device)


class Clip(Dino):
    """Features of pictures and texts in one space, which their cosine compares."""

    kind = "clip"

    def __init__(self, folder, device):
        from transformers import CLIPModel, CLIPTokenizer

        self.device, self.processor = device, image_processor(folder)
        self.net = network(CLIPModel, folder, device)
        self.tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        self.length = self.net.config.text_config.max_position_embeddings  # the tokenizer's own may be lost

    def images(self, images):
        return in_batches(lambda x: self.net.get_image_features(self.pixels(x)).pooler_output, images)

    def texts(self, texts):
        """Texts → float64 features (N, D)."""
        return in_batches(self.text_features, texts)

    def text_features(self, texts):
        tokens = self.tokens(texts).to(self.device)
        return self.net.get_text_features(tokens.input_ids, attention_mask=tokens.attention_mask).pooler_output

    def tokens(self, texts):
        """input_ids and attention_mask (N, length). What is too long is cut before its end token, at which CLIP reads.

        Filled up to the full length, so that a text's features do not depend on those beside it.
        """
        for text in texts:
            if len(self.tokenizer.tokenize(text)) + 2 > self.length:
                common.note(
                    f"'{text[:50]}…' is longer than the {self.length} tokens that CLIP reads: its end is cut off"
                )
        asked = dict(padding="max_length", truncation=True, max_length=self.length, return_tensors="pt")
        return self.tokenizer(texts, **asked)


def network(kind, folder, device, **options):
    """A network in evaluation mode, all of whose weights come from the safetensors of a folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # of reading one file
    logging.set_verbosity_error()  # its table of what a file holds more than is asked for; what is missing is said here
    about = dict(use_safetensors=True, local_files_only=True, output_loading_info=True)
    try:
        net, found = kind.from_pretrained(folder, **about, **options)
    except Exception as error:  # torn files, other shapes: half a dozen kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0][:150]
        common.fail(f"{folder} cannot be read as a {kind.__name__}: {reason}")
    if missing := sorted(found["missing_keys"]):  # they would be random numbers
        common.fail(f"{folder} lacks {len(missing)} weights of a {kind.__name__}, such as {missing[0]}")
    return net.to(device).float().eval()


def image_processor(folder):
    """As published with the model. PIL resizes, which is what the published networks were trained with."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    except (OSError, ValueError, KeyError) as error:
        return common.fail(f"{folder} has no readable preprocessor_config.json: {str(error).splitlines()[0]}")


def in_batches(function, items, batch=64):
    """function(some items) → tensor (n, D), over batches of them → one float64 NumPy array; no gradients, no TF32."""
    import torch

    with torch.no_grad(), fid.full_float32():
        parts = [function(items[k : k + batch]).double().cpu().numpy() for k in range(0, len(items), batch)]
    return np.concatenate(parts)


# -------------------------------------------------------------------------------------------- their files


def model_folder(kind, name):
    """The folder of CLIP or DINO in transformers' format: a path, or what the hub's cache has of this name.

    Ends the program if it is not there or cannot be used. Nothing is downloaded, and nothing unpickled.
    """
    title, architecture = KINDS[kind]
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from huggingface_hub.constants import HF_HUB_CACHE

        repository = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
        try:
            main = (repository / "refs" / "main").read_text().strip()
        except OSError:
            main = ""
        # safetensors of old models are often in another revision than the main one, a pull request on the hub
        revisions = sorted(
            repository.glob("snapshots/*"), key=lambda r: (not [*r.glob("*.safetensors")], r.name != main)
        )
        if not revisions:
            common.fail(
                f"no {title} '{name}': neither a folder nor in the hub's cache; `hf download {name}` fetches it (its "
                "safetensors, which may be in a pull request on the hub: --revision refs/pr/N), or name a folder with "
                f"--{kind}"
            )
        folder = revisions[0]
    if not (folder / "config.json").is_file():
        common.fail(f"{folder} has no config.json: --{kind} takes a folder that transformers' save_pretrained wrote")
    found = common.read_json(folder / "config.json").get("model_type")
    if found != architecture:
        common.fail(f"{folder} holds a model of type '{found}': --{kind} wants a {title}, of type '{architecture}'")
    if not [*folder.glob("*.safetensors")]:
        pickles = sorted(p.name for end in ("bin", "pt", "pth", "ckpt") for p in folder.glob(f"*.{end}"))
        has = f"{pickles[0]} alone, a pickle, which may run code" if pickles else "no weights"
        common.fail(f"{folder} holds {has}: get the safetensors of this {title} (on the hub: its revision refs/pr/N)")
    wanted = [("preprocessor_config.json", "processor_config.json")]
    wanted += [("tokenizer.json", "vocab.json")] if kind == "clip" else []
    for names in wanted:
        if not any((folder / file).is_file() for file in names):
            common.fail(f"{folder} has no {' or '.join(names)}, which belongs to a {title}: get the whole folder")
    return folder


def model_name(kind, name):
    """What scores by it are called: the published one by its name, others by theirs and a hash of what is in them."""
    if name == PUBLISHED[kind]:
        return name.split("/")[1]
    folder = model_folder(kind, name)
    files = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*processor_config.json"))]
    sums = [fid.sum_of(p, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return f"{Path(name).name}-{hashlib.sha256(' '.join(sums).encode()).hexdigest()[:8]}"


def judges_name(models):
    """What scores by {kind: name or folder} are called: those by other models never meet."""
    return "+".join(model_name(kind, name) for kind, name in models.items())


def check_models(models):
    """Ends the program if one of {kind: name or folder} is missing or of no use."""
    for kind, name in models.items():
        model_folder(kind, name)


def wanted_models(args, model):
    """{kind: name or folder}; args: with clip, dino and data. The small world has judges of its own."""
    asked = {kind: getattr(args, kind) for kind in KINDS}
    if model == "tiny" and None in asked.values():
        import tiny_world

        world = tiny_world.build(args.data)
        return {kind: name or str(world / kind) for kind, name in asked.items()}
    return {kind: name or PUBLISHED[kind] for kind, name in asked.items()}


def add_flags(parser):
    for kind, (title, _) in KINDS.items():
        about = f"{title} that judges concepts: a folder in transformers' format, or a name in the hub's cache"
        default = f"(default: {PUBLISHED[kind]}; tiny: the small world's own)"
        parser.add_argument(f"--{kind}", metavar="MODEL", help=f"{about} {default}")


# -------------------------------------------------------------------------------------- the judge of a run


@functools.cache
def templates():
    """{list of prompts: [text with {} where the concept is called]}"""
    return json.loads((common.ROOT / "reference" / "prompts.json").read_text())


def prompts(concept, noun, count):
    """`count` prompts of a concept by this noun phrase, its templates again and again."""
    listed = templates()[concept.prompts]
    return [listed[k % len(listed)].replace("{}", noun) for k in range(count)]


class Alignment:
    """What scores a run of concepts; fid.Distances is that of the others, and has the same methods."""

    def __init__(self, config, args):
        """Loads nothing; the small world is built if it is not there, for its judges are named by what is in them."""
        flags = config["flags"]
        self.args, self.samples, self.nets = args, samples(flags["preset"]), {}
        self.models = wanted_models(args, flags["model"])

    @functools.cached_property
    def name(self):
        return judges_name(self.models)

    def metrics(self, config, trained_to):
        """Those that a cell of the quality matrix has."""
        alone = config["isolated"] or sum(map(len, config["tasks"])) == 1
        return METRICS if alone or trained_to < len(config["tasks"]) else (*METRICS, "pair DINO")

    def check(self):
        """Ends the program if the weights are not there."""
        check_models(self.models)

    def load(self, config, data, reference, device):
        """data: what the run was trained on, with which its samples are compared."""
        self.data, self.device = data, device
        if not self.nets:
            kinds = {"clip": Clip, "dino": Dino}
            self.nets = {k: kinds[k](model_folder(k, name), device) for k, name in self.models.items()}
            self.real = functools.cache(self.features_of_real)

    def features_of_real(self, concept):
        """{kind: features} of a concept's own pictures."""
        images = self.data.images[self.data.labels == concept]
        return {kind: net.images(images) for kind, net in self.nets.items()}

    def score(self, learner, config, trained_to, task, protocol):
        """One cell: ({metric: value}, number of real pictures, rows of pictures to show, None).

        A row: samples, then a real one. Of a task of several concepts the mean; each has as many samples as one alone.
        """
        ids, count, seed = config["tasks"][task - 1], int(protocol["generated"]), int(protocol["sampling_seed"])
        few = max(4, count // 10)  # samples for drift and pair
        scores, shown = [], []
        for c in ids:
            values, images = self.concept(learner, c, count, seed)
            values |= self.drift(learner, config, learner.concepts[c].category, few, seed)
            if "pair DINO" in self.metrics(config, trained_to):
                values["pair DINO"] = self.pair(learner, c, following(config["tasks"], c), few, seed)
            scores.append(values)
            shown.append(np.concatenate([images, small(self.data.images[self.data.labels == c][:1])]))
        means = {metric: float(np.mean([values[metric] for values in scores])) for metric in scores[0]}
        return means, int(np.isin(self.data.labels, ids).sum()), shown, None

    def concept(self, learner, c, count, seed):
        """The scores of the paper → ({metric: value}, the first samples, small)."""
        concept, seeds = learner.concepts[c], common.sampling_seeds((seed, c, "report"), count)
        drawn, read = (prompts(concept, noun, count) for noun in (learner.noun(c), concept.category))
        common.note(f"CLIP-T reads '{read[0]}' where '{drawn[0]}' is drawn")
        features, shown = {kind: [] for kind in self.nets}, None
        for k in range(0, count, BLOCK):
            images = learner.sample(drawn[k : k + BLOCK], seeds[k : k + BLOCK])
            shown = small(images[:SHOWN]) if shown is None else shown
            for kind, net in self.nets.items():
                features[kind].append(net.images(images))
        features, real = {kind: np.concatenate(parts) for kind, parts in features.items()}, self.real(c)
        texts = {text: self.nets["clip"].texts([text])[0] for text in dict.fromkeys(read)}
        clip_i, dino_i = (similarity(features[kind], real[kind]) for kind in ("clip", "dino"))
        clip_t = text_score(features["clip"], [texts[text] for text in read])
        values = {"CLIP": (clip_i + clip_t) / 2, "DINO": (dino_i + clip_t) / 2}
        return values | {"CLIP-I": clip_i, "CLIP-T": clip_t, "DINO-I": dino_i}, shown

    def drift(self, learner, config, category, count, seed):
        """How much of the plain class is as the initial model draws it."""
        prompt = f"photo of a {category}"
        seeds = common.sampling_seeds((seed, prompt, "drift"), count)
        before = self.before(learner, config, prompt, seeds)
        images = learner.sample([prompt] * count, seeds)
        values = {kind: pairwise(before[kind], net.images(images)) for kind, net in self.nets.items()}
        return {"drift CLIP-I": values["clip"], "drift DINO": values["dino"]}

    def before(self, learner, config, prompt, seeds):
        """{kind: features} of what the initial model draws, kept in <data>/features/ for all runs on it.

        The key is the model, its sampler, prompt and seeds.
        """
        flags = config["flags"]
        key = [config["model"], *(flags[k] for k in ("size", "sampling_steps", "guidance", "precision")), prompt, seeds]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
        folder = Path(self.args.data) / "features" / f"{self.name}-initial"
        with common.locked(folder, wait=True):
            if not common.is_sound(folder / digest):
                with learner.initial_weights():
                    images = learner.sample([prompt] * len(seeds), seeds)
                with common.new_folder(folder / digest) as new:
                    for kind, net in self.nets.items():
                        np.save(new / f"{kind}.npy", net.images(images))
        return {kind: np.load(folder / digest / f"{kind}.npy") for kind in self.nets}

    def pair(self, learner, one, other, count, seed):
        """Both in one picture, asked for by their ids; the smaller DINO-I, so that one alone does not do."""
        text = f"photo of a {learner.noun(one)} and a {learner.noun(other)}"
        seeds = common.sampling_seeds((seed, one, other, "pair"), count)
        features = self.nets["dino"].images(learner.sample([text] * count, seeds))
        return min(similarity(features, self.real(c)["dino"]) for c in (one, other))


def samples(preset):
    """Pictures of a concept by default: 20 prompts, 50 times or, of the small world, once."""
    return 20 if preset.startswith("tiny") else 1000


def following(tasks, concept):
    """The next concept of the stream; after the last one the first."""
    stream = [c for task in tasks for c in task]
    return stream[(stream.index(concept) + 1) % len(stream)]


def small(images):
    """uint8 (n, 3, H, W) with a side of SHOWN_SIDE at most, as a NumPy array."""
    import streams

    images = np.asarray(images)
    return images if images.shape[-1] <= SHOWN_SIDE else streams.squash(images, SHOWN_SIDE)
