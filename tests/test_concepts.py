"""The concepts script: sizes, words, loss, C-LoRA, methods, files that others read, and every way to be stopped."""

import argparse
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_model
import torch
from conftest import ROOT, Stop, assert_same_run, same, trainer, weights
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.attention_processor import CustomDiffusionAttnProcessor2_0
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import CLIPTextModel, CLIPTokenizer

import common
import concepts
import runfolder
import streams
import train_concepts
from train_concepts import CLASS

METHODS = ["ncl", "noncl", "kd", "l2", "ewc", "si", "mas", "ensemble", "er", "gr", "agem"]
PENALTIES = ["kd", "l2", "ewc", "si", "mas"]
BASES = ["dreambooth", "custom_diffusion"]
M = 2**20  # the paper's table 13 counts in these
SIZES = ["--steps", "6", "--batch_size", "2", "--replay_size", "2", "--memory_size", "3", "--class_images", "4",
         "--sampling_steps", "2", "--importance_draws", "2", "--save_every", "3"]  # fmt: skip


def write_pictures(folder, counts, size=(40, 52)):
    """JPEGs of several sizes, a folder a concept; the first one lies on its side and says so (EXIF)."""
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for k in range(count):
            rng = np.random.default_rng((number, k))
            coarse = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((size[1] + 7 * k, size[0] + 3 * k))
            exif = Image.Exif()
            exif[0x0112] = 6 if number == k == 0 else 1
            image.save(folder / name / f"{k}.jpg", quality=95, exif=exif)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return small_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def things(tmp_path_factory):
    folder = write_pictures(tmp_path_factory.mktemp("things") / "things", {"ball": 4, "duck_toy": 3, "star": 2})
    (folder / "concepts.json").write_text(json.dumps({"star": {"category": "star", "prompts": "live"}}))
    return folder


@pytest.fixture(scope="session")
def small(model, things):
    return ["--model", str(model), "--dataset", f"{things}:0-1", *SIZES]


def a_trainer(small, tmp_path, cache):
    def run(out, *flags):
        base = BASES["custom_diffusion" in flags]
        return trainer(train_concepts, base, small, tmp_path, cache)(out, *flags)

    return run


@pytest.fixture
def train(small, tmp_path, cache):
    """train(out, *flags): a small run of two concepts → its run folder."""
    return a_trainer(small, tmp_path, cache)


@pytest.fixture(scope="session")
def done(small, tmp_path_factory, cache):
    """done(*flags): the same, kept for all tests, which only read it."""
    run = a_trainer(small, tmp_path_factory.mktemp("runs"), cache)
    return lambda *flags: run("done", *flags)


@pytest.fixture(scope="session")
def build(small, cache):
    """build(*flags): a learner."""

    def make(*flags):
        args = train_concepts.parse_args([*small, "--data", str(cache), *flags])
        data = streams.load_data(streams.scenario(args.dataset), args.size, args.data)
        return train_concepts.Concepts(args, data, "cpu")

    return make


def method_of(learner):
    return runfolder.method_class(learner.args.method)(learner.args, learner)


def batch_of(learner, count, key=(1, 1, 0)):
    labels = np.arange(count) % learner.args.classes
    images = np.stack([learner.data.images[learner.data.labels == c][0] for c in labels])
    return learner.draw(images, labels, key)


def gradients(learner, loss):
    named = learner.params(learner.phases(0)[0])
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def assert_close(a, b, within=1e-5):
    assert a.keys() == b.keys() and a
    for name in a:
        assert (a[name] - b[name]).abs().max() < within, name


# -------------------------------------------------------------------------------------------------- sizes


@pytest.fixture(scope="session")
def paper():
    return concepts.build_on_meta(concepts.V1_4)


def test_parameter_counts_of_the_papers_model(paper):
    counts = {part: concepts.count(net) for part, net in paper.items()}
    assert counts == {"unet": 859_520_964, "text_encoder": 123_060_480, "vae": 83_653_863}
    assert concepts.sizes(paper, "dreambooth")[1] == 859_520_964 + 123_060_480
    assert concepts.sizes(paper, "custom_diffusion")[1] == 19_169_280 + 768  # one row of the table


@pytest.mark.parametrize(
    "base, trained, stored",
    [
        ("dreambooth", 937.06, dict(ncl=1016.84, noncl=1016.84, kd=1953.9, l2=1953.9, ewc=2890.97, si=2890.97,
                                    mas=2890.97, ensemble=5084.2)),
        ("custom_diffusion", 54.47, dict(ncl=1035.12, noncl=1035.12, kd=1990.47, l2=1089.59, ewc=1144.06, si=1144.06,
                                         mas=1144.06, ensemble=5175.6)),
    ],
)  # fmt: skip
def test_sizes_are_those_of_table_13(paper, base, trained, stored):
    sizes, _ = concepts.sizes(paper, base)
    assert sizes.trained / M == pytest.approx(trained, abs=0.006)
    for method, size in stored.items():
        found = runfolder.method_class(method).stored(None, sizes, 5) / M
        assert found == pytest.approx(size, abs=0.02), method  # the paper multiplies what it has rounded


def test_an_adapter_has_the_size_of_table_13():
    """The paper names no layers: 10.4 an adapter, 1068.84 for five of them and the model."""
    paper = concepts.build_on_meta(concepts.V1_4)  # its own, as adapters stay on it
    sizes, _ = concepts.sizes(paper, "dreambooth")
    nets = {name: paper[name] for name in ("unet", "text_encoder")}
    learner = argparse.Namespace(nets=nets, pretrained=True, class_rows=dict,
                                 adapts=lambda merge: train_concepts.Concepts.adapts(None, merge))  # fmt: skip
    args = argparse.Namespace(clora_mode="isolated", clora_rank=None, clora_alpha=None, seed=1)
    method = runfolder.method_class("clora")(args, learner)
    with torch.device("meta"):
        method.start_task(streams.Task(1, [0], np.arange(1)), [])
    trained = sum(p.numel() for net in nets.values() for p in net.parameters() if p.requires_grad)
    assert trained / M == pytest.approx(10.4, abs=0.02)
    assert method.stored(sizes, 5) == sizes.model + 5 * trained
    assert method.stored(sizes, 5) / M == pytest.approx(1068.84, abs=0.1)


def test_dry_run_says_what_the_papers_model_takes(things, cache, tmp_path, capsys):
    for base, trained in (("dreambooth", "982,581,444"), ("custom_diffusion", "19,170,048")):
        args = train_concepts.parse_args(["--base", base, "--model", concepts.V1_4, "--dataset", str(things),
                                          "--data", str(tmp_path / "data"), "--dry_run"])  # fmt: skip
        train_concepts.train(args)
        shown = capsys.readouterr().out
        assert f"trained: {trained} numbers" in shown and "unet: 859,520,964 parameters" in shown
    assert (args.size, args.steps, args.batch_size, args.lr, args.class_images) == (512, 250, 2, 4e-5, 200)
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------- loss, masks, prompts


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_loss_by_hand(build, monkeypatch, count):
    learner = build("--prior_weight", "0.3")
    learner.prepare_class_images()
    batches = (batch_of(learner, count, (1, 1, step)) for step in itertools.count())
    batch = next(batch for batch in batches if batch["masks"][0].mean() < 1)
    rng = np.random.default_rng(0)
    assert len(batch["latents"]) == 2 * count and batch["prompts"][count:].eq(CLASS).all()
    out = torch.from_numpy(rng.standard_normal(tuple(batch["noise"].shape))).float()
    monkeypatch.setattr(learner, "predict", lambda *a: out)
    error, masks = (out - batch["noise"]).double().square().numpy(), batch["masks"].numpy()
    own, prior = [], []
    for row in range(count):
        cells = [error[row, c, y, x] for c in range(4) for y in range(4) for x in range(4) if masks[row, 0, y, x]]
        own.append(sum(cells) / len(cells))
        prior.append(error[count + row].mean())
    wanted = sum(own) / count + 0.3 * sum(prior) / count
    assert learner.loss(learner.phases(0)[0], batch).item() == pytest.approx(wanted, rel=1e-5)
    assert batch["own"].item() == pytest.approx(sum(own) / count, rel=1e-5)
    assert batch["prior"].item() == pytest.approx(sum(prior) / count, rel=1e-5)


def test_class_images_do_not_touch_the_pictures_of_the_concept(build):
    """Weight 0 is no class rows at all, and the gradient is what is left of that with them."""
    phase = build().phases(0)[0]
    weighed, alone = build("--prior_weight", "0.5"), build("--prior_weight", "0")
    weighed.prepare_class_images()
    alone.prepare_class_images()
    assert alone.moments == {}
    with_prior, without = batch_of(weighed, 3), batch_of(alone, 3)
    assert len(without["labels"]) == 3 and same({k: v[:3] for k, v in with_prior.items()}, without)
    rows = {name: value[3:] for name, value in with_prior.items()}
    whole = gradients(weighed, weighed.loss(phase, with_prior))
    own = gradients(alone, alone.loss(phase, without))
    prior = gradients(weighed, F.mse_loss(weighed.outputs(phase, rows), rows["noise"]))
    assert_close(whole, {name: own[name] + 0.5 * prior[name] for name in own})
    assert max(g.abs().max() for g in prior.values()) > 1e-3


def test_class_rows_show_their_own_category(build):
    learner = build()
    learner.prepare_class_images()
    batch, batch_size = batch_of(learner, 4), 4
    for row in range(batch_size, 2 * batch_size):
        category = ["ball", "duck toy"][batch["labels"][row]]
        latent = batch["latents"][row] / learner.vae.config.scaling_factor
        means, deviations = learner.moments[category].chunk(2, 1)
        distances = ((latent - means) / deviations).square().mean((1, 2, 3)).sqrt()
        assert distances.min() < 1.6  # within the noise of one of its own pictures
    assert batch["labels"].tolist() == [0, 1, 0, 1] * 2 and batch["masks"][4:].eq(1).all()


@pytest.mark.parametrize("side", [64, 8, 4])
def test_the_mask_is_the_picture_less_a_border_and_never_empty(side):
    cell, size = 8, 8 * side
    for length in range(round(0.4 * size), size + 1):
        for start in range(size - length + 1):
            found = range(side)[train_concepts.inner_cells(start, length, cell, side)]
            # the cell before holds a pixel of the picture, the cell behind lies in it
            inner = [c for c in range(1, side) if cell * c > start and cell * (c + 2) <= start + length]
            assert list(found) == inner if inner else len(found) == 1
            assert all(cell * (c + 1) > start and cell * c < start + length for c in found)


@pytest.mark.parametrize("side, zoom, smallest", [(64, (1.2, 1.4), 0.4), (8, (1.2, 1.4), 0.4), (4, (1.1, 1.3), 0.7)])
def test_augmentation(side, zoom, smallest):
    size = 8 * side
    learner = argparse.Namespace(args=argparse.Namespace(size=size, zoom=zoom, smallest=smallest), cell=8, device="cpu")
    ramp = torch.linspace(0.2, 1, size).expand(3, size, size)
    seen, zoomed = set(), 0
    for k in range(300 if side < 64 else 40):
        rng = common.numpy_rng((side, k))
        image, mask, prompt = train_concepts.Concepts.augment(learner, ramp, rng)
        assert image.isfinite().all() and image.shape == ramp.shape and mask.shape == (1, side, side) and mask.any()
        slope = (image[0, :, 1:] - image[0, :, :-1]).median() * (size - 1) / 0.8
        if prompt >= 3:
            zoomed += 1
            assert mask.all() and image.min() > 0.19
            assert 1 / zoom[1] - 0.05 < slope < 1 / zoom[0] + 0.05
        else:
            rows, columns = (image[0] > 0).any(1).nonzero(), (image[0] > 0).any(0).nonzero()
            scale = len(rows)
            assert scale == len(columns) == rows[-1] - rows[0] + 1 and smallest * size - 1 < scale <= size
            assert prompt in ((1, 2) if scale < 0.6 * size else (0,))
            y, x = mask[0].nonzero().unbind(1)
            assert image[0, 8 * y + 4, 8 * x + 4].gt(0).float().mean() > 0.5  # on the picture
        seen.add(prompt)
    assert seen == ({0, 3, 4} if smallest > 0.6 else {0, 1, 2, 3, 4})
    assert side == 64 or 0.25 < zoomed / 300 < 0.42


def test_prompts_say_what_the_pictures_show(build):
    for base, word in (("dreambooth", "phol"), ("custom_diffusion", "<new2>")):
        learner = build("--base", base)
        plain = f"photo of a {word} duck toy"
        texts = [plain, f"a far away {plain}", f"very small {plain}", f"zoomed in {plain}", f"close up {plain}",
                 "photo of a duck toy"]  # fmt: skip
        asked = learner.tokenizer(texts, padding="max_length", max_length=77, return_tensors="pt").input_ids
        assert torch.equal(learner.prompts[1], asked) and learner.prompts.shape == (2, CLASS + 1, 77)
        long = learner.tokens([" ".join(["a"] * 100)])
        assert long.shape == (1, 77) and long[0, -1] == learner.tokenizer.eos_token_id


def test_pictures_are_upright(build, things):
    """R17: the picture that lies on its side is turned before it is squashed."""
    learner = build()
    with Image.open(things / "ball" / "0.jpg") as image:
        assert image.size == (52, 40)
        upright = np.asarray(image.transpose(Image.Transpose.ROTATE_270).resize((32, 32), Image.Resampling.BICUBIC))
    found = learner.data.images[0].transpose(1, 2, 0)
    assert np.abs(found.astype(int) - upright).mean() < 4 and len(learner.data.images) == 7


# -------------------------------------------------------------------------------------------------- words


def words_of(run, task):
    files = sorted((run / f"task{task}" / "words").glob("*.safetensors"))
    return {word: row for path in files for word, row in load_file(path).items()}


@pytest.mark.parametrize("tasks", ["1", "3"])
def test_new_words_change_and_no_other_row_does(train, build, things, model, monkeypatch, tasks):
    """Also with a decay that would be seen, and after a word was saved and loaded."""
    learners, adamw = [], torch.optim.AdamW
    learn = train_concepts.Concepts.learn
    monkeypatch.setattr(train_concepts.Concepts, "learn", lambda self, c: learners.append(self) or learn(self, c))
    monkeypatch.setattr(
        torch.optim,
        "AdamW",
        lambda groups, lr, **how: adamw([g | {"weight_decay": 50 * g["weight_decay"]} for g in groups], lr, **how),
    )
    run = train("a", "--base", "custom_diffusion", "--dataset", str(things), "--tasks", tasks, "--steps", "3",
                "--lr", "0.01")  # fmt: skip
    table = CLIPTextModel.from_pretrained(model / "text_encoder").get_input_embeddings().weight
    words = learners[-1].text_encoder.get_input_embeddings()
    assert torch.equal(words.table.weight, table) and not words.table.weight.requires_grad
    starts = table[learners[-1].starts]
    assert (words.new.weight - starts).abs().amax(1).gt(0.001).all()
    last = words_of(run, int(tasks))
    assert torch.equal(torch.stack([last[f"<new{k}>"] for k in (1, 2, 3)]), words.new.weight)
    for task in range(1, int(tasks)):
        assert len(words_of(run, task)) == task
        assert all(torch.equal(row, last[word]) for word, row in words_of(run, task).items())
    again = build("--base", "custom_diffusion", "--dataset", str(things))
    again.load(run / f"task{tasks}")
    assert same(again.text_encoder.state_dict(), learners[-1].text_encoder.state_dict())
    if tasks == "3":
        again.load(run / "task1")
        assert torch.equal(again.text_encoder.get_input_embeddings().new.weight[1:], starts[1:])


def test_words_belong_to_concepts(build, things, tmp_path):
    flags = "--dataset", str(things)
    orders = [streams.scenario(str(things)).order(k) for k in (1, 3)]
    assert orders[0] != orders[1]
    for base, words in (("dreambooth", ["sks", "phol", "oxi"]), ("custom_diffusion", ["<new1>", "<new2>", "<new3>"])):
        one, three = (build(*flags, "--base", base, "--order", order) for order in ("1", "3"))
        assert [c.word for c in one.concepts] == words and one.concepts == three.concepts
        assert torch.equal(one.prompts, three.prompts) and one.starts == three.starts


def test_a_word_has_one_new_id_for_good(build, done):
    first = build("--base", "custom_diffusion")
    known = len(CLIPTokenizer.from_pretrained(first.folder / "tokenizer"))
    again = build("--base", "custom_diffusion")
    again.load(done("--base", "custom_diffusion") / "task1")
    for learner in (first, again):
        ids = learner.tokenizer(["<new1>", "<new2>", "a <new1> dog"], add_special_tokens=False).input_ids
        assert ids[:2] == [[known], [known + 1]] and ids[2][1] == known and len(ids[2]) == 3
        assert learner.text_encoder.get_input_embeddings().new.weight.shape == (2, 16)
        assert len(learner.tokenizer) == known + 2


def concept(word, name="thing", start="sks"):
    return concepts.Concept(name, name, "object", word, start)


def test_words_that_would_be_taken_for_others():
    words = small_model.tokenizer()

    def refuses(base, match, *found):
        with pytest.raises(common.UserError, match=match) as error:
            concepts.check_words(found, base, words)
        assert error.value.code == 2 and "\n" not in str(error.value)

    refuses("custom_diffusion", "'dog'.* is a word that the model knows", concept("dog"))
    refuses("dreambooth", "'zork'.* is no single token of the model but z o r k</w>", concept("zork"))
    refuses("dreambooth", "'<.endoftext.>'.* is no single token", concept("<|endoftext|>"))
    refuses("dreambooth", "'ktn'.* is no single token", concept("ktn"))
    refuses("custom_diffusion", "more than one word", concept("<new1> <new2>"))
    refuses("custom_diffusion", "reads like the word of 'a'", concept("<New>", "a"), concept("<new>", "b"))
    concepts.check_words([concept("sks", "a"), concept("mth", "b")], "dreambooth", words)
    concepts.check_words([concept("<new1>", "a"), concept("zork", "b")], "custom_diffusion", words)


def test_start_words():
    words = small_model.tokenizer()
    assert words.tokenize("ktn") == ["kt", "n</w>"] or len(words.tokenize("ktn")) > 1
    assert concepts.start_id("ktn", words) == words.get_vocab()["ktn"]  # the piece within words
    assert concepts.start_id("mth", words) == words.get_vocab()["mth</w>"] != words.eos_token_id
    with pytest.raises(common.UserError, match="start word 'two words' is no single token"):
        concepts.start_id("two words", words)


def test_a_new_word_takes_no_other_apart(build, things, tmp_path):
    folder = shutil.copytree(things, tmp_path / "things")
    (folder / "concepts.json").write_text(json.dumps({"ball": {"word": "st"}}))
    learner = build("--base", "custom_diffusion", "--dataset", str(folder))
    plain = small_model.tokenizer()
    assert learner.tokenizer.tokenize("photo of a star") == plain.tokenize("photo of a star")
    assert "st" in learner.tokenizer.tokenize("photo of a st ball")


def test_an_unbound_tokenizer_reads_as_much_as_the_text_encoder(model, build, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    path = folder / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in common.read_json(path).items() if k != "model_max_length"}))
    learner = build("--model", str(folder))
    assert learner.tokenizer.model_max_length > 10**9 and learner.prompts.shape[-1] == 77


# ------------------------------------------------------------------------------------------------ oracles


def plain_loss(batch, count, out, weight):
    """Upstream's lines: the sum over the mask, divided by its cells and channels, and a plain mean of the prior's."""
    error = F.mse_loss(out[:count], batch["noise"][:count], reduction="none") * batch["masks"][:count]
    own = (error.sum((1, 2, 3)) / (4 * batch["masks"][:count].sum((1, 2, 3)))).mean()
    return own + weight * F.mse_loss(out[count:], batch["noise"][count:])


def plain_parts(model):
    """U-Net, text encoder, tokenizer, and add_noise of the paper's schedule, all by diffusers and transformers."""
    schedule = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    unet = UNet2DConditionModel.from_pretrained(model / "unet")
    text_encoder = CLIPTextModel.from_pretrained(model / "text_encoder")
    return unet, text_encoder, CLIPTokenizer.from_pretrained(model / "tokenizer"), schedule.add_noise


def texts(learner, batch):
    """The prompts of a batch, written out."""
    names = ["ball", "duck toy"]
    before = ["", "a far away ", "very small ", "zoomed in ", "close up "]
    words = [c.word for c in learner.concepts]
    return [f"photo of a {names[c]}" if p == CLASS else f"{before[p]}photo of a {words[c]} {names[c]}"
            for c, p in zip(batch["labels"].tolist(), batch["prompts"].tolist(), strict=True)]  # fmt: skip


def test_latents_are_those_of_the_vae(build, model):
    learner = build("--prior_weight", "0")
    batch = batch_of(learner, 2)
    rows = [learner.augment(image, rng) for rng in [common.numpy_rng((1, 1, 0, "augmentation"))]
            for image in torch.from_numpy(learner.data.images[[0, 4]]).float() / 127.5 - 1]  # fmt: skip
    vae = AutoencoderKL.from_pretrained(model / "vae")
    with torch.no_grad():
        found = vae.encode(torch.stack([row[0] for row in rows])).latent_dist
    noise = (batch["latents"] / 0.18215 - found.mean) / found.std
    assert torch.equal(batch["masks"], torch.stack([row[1] for row in rows]))
    wanted = torch.randn(found.mean.shape, generator=common.torch_rng((1, 1, 0, "noise")))
    assert (noise - wanted).abs().max() < 1e-3 and not any(p.requires_grad for p in learner.vae.parameters())


def test_a_dreambooth_step_by_plain_lines(build, model):
    learner = build()
    learner.prepare_class_images()
    batch = batch_of(learner, 3)
    ours = gradients(learner, learner.loss(learner.phases(0)[0], batch))
    unet, text_encoder, tokenizer, add_noise = plain_parts(model)
    ids = tokenizer(texts(learner, batch), padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    noisy = add_noise(batch["latents"], batch["noise"], batch["timesteps"])
    out = unet(noisy, batch["timesteps"], text_encoder(ids.input_ids)[0]).sample
    plain_loss(batch, 3, out, 1.0).backward()
    theirs = {f"unet.{n}": p.grad for n, p in unet.named_parameters()}
    theirs |= {f"text_encoder.{n}": p.grad for n, p in text_encoder.named_parameters()}
    assert_close(ours, theirs)
    assert max(g.abs().max() for n, g in theirs.items() if n.startswith("text")) > 1e-3


def kv(name):
    return ".attn2.to_k." in name or ".attn2.to_v." in name


def test_a_custom_diffusion_step_by_plain_lines(build, model):
    learner = build("--base", "custom_diffusion")
    learner.prepare_class_images()
    batch = batch_of(learner, 3)
    ours = gradients(learner, learner.loss(learner.phases(0)[0], batch))
    unet, text_encoder, tokenizer, add_noise = plain_parts(model)
    known = tokenizer.add_tokens(["<new1>", "<new2>"]) and len(tokenizer) - 2
    start = tokenizer.get_vocab()["ktn"], tokenizer.get_vocab()["pll</w>"]
    text_encoder.resize_token_embeddings(known + 2, mean_resizing=False)
    table = text_encoder.get_input_embeddings().weight
    with torch.no_grad():
        table[known:] = table[list(start)]
    ids = tokenizer(texts(learner, batch), padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    assert (ids.input_ids == known).any() and (ids.input_ids == known + 1).any()
    processors = {}
    for name in unet.attn_processors:
        block = unet.get_submodule(name.removesuffix(".processor"))
        about = dict(train_q_out=False, hidden_size=block.to_q.in_features, cross_attention_dim=16)
        processors[name] = CustomDiffusionAttnProcessor2_0("attn2" in name, **about)
        if "attn2" in name:
            processors[name].to_k_custom_diffusion.weight.data.copy_(block.to_k.weight)
            processors[name].to_v_custom_diffusion.weight.data.copy_(block.to_v.weight)
    unet.set_attn_processor(processors)
    noisy = add_noise(batch["latents"], batch["noise"], batch["timesteps"])
    out = unet(noisy, batch["timesteps"], text_encoder(ids.input_ids)[0]).sample
    plain_loss(batch, 3, out, 1.0).backward()
    theirs = {f"unet.{n}".replace("processor.", "").replace("_custom_diffusion", ""): p.grad
              for n, p in unet.named_parameters() if "custom_diffusion" in n}  # fmt: skip
    rows = [n for n in ours if n.endswith("new.weight")]
    theirs[rows[0]] = table.grad[known:]
    assert_close(ours, theirs)
    assert set(ours) == {*rows, *(f"unet.{n}" for n, _ in unet.named_parameters() if kv(n))} | set(theirs)
    assert min(theirs[rows[0]].abs().amax(1)) > 1e-4
    # by plain lines again, the first position cut off by hand
    plain, *_ = plain_parts(model)
    for name, module in plain.named_modules():
        if name.endswith(("attn2.to_k", "attn2.to_v")):
            module.register_forward_hook(lambda m, i, y: torch.cat([y[:, :1].detach(), y[:, 1:]], 1))
    text = text_encoder(ids.input_ids)[0].detach()
    plain_loss(batch, 3, plain(noisy, batch["timesteps"], text).sample, 1.0).backward()
    cut = {f"unet.{n}": p.grad for n, p in plain.named_parameters() if kv(n)}
    assert_close(cut, {n: g for n, g in ours.items() if n in cut})
    # and it matters: with the first position the gradient is another one
    whole, *_ = plain_parts(model)
    plain_loss(batch, 3, whole(noisy, batch["timesteps"], text).sample, 1.0).backward()
    assert max((p.grad - cut[f"unet.{n}"]).abs().max() for n, p in whole.named_parameters() if kv(n)) > 1e-4


# ------------------------------------------------------------------------------------------------- C-LoRA


THREE = ["--method", "clora", "--steps", "3", "--lr", "0.01"]


@pytest.fixture(scope="session")
def isolated(done, things):
    return done(*THREE, "--dataset", str(things), "--clora_rank", "4", "--clora_alpha", "8")


@pytest.fixture(scope="session")
def merged(done, things):
    return done(*THREE, "--dataset", str(things), "--clora_mode", "merge", "--clora_rank", "4")


def clora_of(build, run, *flags):
    its = common.read_json(run / "config.json")["flags"]
    learner = build("--method", "clora", "--dataset", its["dataset"], "--clora_mode", its["clora_mode"],
                    "--clora_rank", "4", "--clora_alpha", str(its["clora_alpha"] or 4.0), *flags)  # fmt: skip
    return learner, method_of(learner)


def products(run, task, scale):
    """{layer: (α/r) B A} from the file of a task."""
    state = load_file(run / f"task{task}" / "pytorch_lora_weights.safetensors")
    downs = [name for name in state if name.endswith("lora_A.weight")]
    return {n.removesuffix(".lora_A.weight"): scale * state[n.replace("lora_A", "lora_B")] @ state[n] for n in downs}


def test_isolated_concepts_are_drawn_as_they_were(build, isolated):
    learner, method = clora_of(build, isolated)
    seeds, base = [1, 2], learner.sample([0, 0], [1, 2])
    for concept in (1, 2, 3):
        images = []
        for trained_to in range(concept, 4):
            method.load(isolated, trained_to, concept)
            images.append(learner.sample([concept - 1] * 2, seeds))
        assert all(torch.equal(images[0], image) for image in images)
    assert not torch.equal(base, images[0])
    method.load(isolated, 3, 1)
    assert not torch.equal(base, learner.sample([0, 0], seeds))
    assert not torch.equal(learner.sample([2, 2], seeds), images[0])  # of another adapter


@pytest.mark.parametrize("mode", ["isolated", "merge"])
def test_an_adapter_a_task_each_beside_the_same_layers(train, things, monkeypatch, mode):
    """R47. In training: names and number of what is wrapped, what is trained; no wrapper within another."""
    seen, loss = [], train_concepts.Concepts.loss

    def spy(self, phase, batch):
        wrapped = [f"{net}.{n}" for net, m in self.nets.items() for n, x in m.named_modules() if hasattr(x, "lora_A")]
        trained = {f"{net}.{n}" for net, m in self.nets.items() for n, p in m.named_parameters() if p.requires_grad}
        seen.append((wrapped, trained, {net: m.training for net, m in self.nets.items()}))
        return loss(self, phase, batch)

    monkeypatch.setattr(train_concepts.Concepts, "loss", spy)
    train("a", *THREE, "--dataset", str(things), "--clora_mode", mode, "--steps", "1")
    layers, trained, modes = seen[0]
    assert len(seen) == 3 and all(other == seen[0] for other in seen)
    assert trained == {f"{layer}.lora_{ab}.default.weight" for layer in layers for ab in "AB"}
    assert not any(a != b and b.startswith(a + ".") for a in layers for b in layers)
    # small U-Net: 5 blocks of attention, each with attn1 and attn2; text encoder: 2 layers; 4 matrices each
    transformers = len([x for x in layers if "attn2.to_k" in x])
    if mode == "merge":
        assert transformers > 2 and len(layers) == 2 * transformers and all("attn2.to_" in x for x in layers)
        assert modes == {"unet": True, "text_encoder": False}
    else:
        assert len(layers) == 8 * transformers + 2 * 4 and modes == {"unet": True, "text_encoder": True}


def test_merged_is_the_sum_of_the_files_and_not_twice(build, merged, model):
    learner, method = clora_of(build, merged)
    base = UNet2DConditionModel.from_pretrained(model / "unet").state_dict()
    noisy, times = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([10, 900])
    method.load(merged, 3, 3)
    with torch.no_grad():
        attached = learner.predict(noisy, times, learner.prompts[:2, 0])
        method.detach()
        taken_off = learner.predict(noisy, times, learner.prompts[:2, 0])
    assert (attached - taken_off).abs().max() < 1e-5
    changes = [products(merged, task, 1.0) for task in (1, 2, 3)]
    wanted = dict(base)
    for layer in changes[0]:
        wanted[f"{layer.removeprefix('unet.')}.weight"] = base[f"{layer.removeprefix('unet.')}.weight"] + sum(
            change[layer] for change in changes
        )
    assert_close(learner.unet.state_dict(), wanted, 1e-6)
    assert not any(torch.equal(base[f"{x.removeprefix('unet.')}.weight"], wanted[f"{x.removeprefix('unet.')}.weight"])
                   for x in changes[0])  # fmt: skip
    method.detach()  # nothing left to merge
    method.load(merged, 3, 3)
    method.detach()
    assert_close(learner.unet.state_dict(), wanted, 1e-6)
    method.load(merged, 3, 1)  # all so far, whatever is asked
    with torch.no_grad():
        assert torch.equal(learner.predict(noisy, times, learner.prompts[:2, 0]), attached)


def test_merged_pictures_are_those_of_training(train, build, things, monkeypatch):
    asked, sample = [], train_concepts.Concepts.sample
    monkeypatch.setattr(
        train_concepts.Concepts, "sample", lambda self, *a: asked.append((a, sample(self, *a))) or asked[-1][1]
    )
    run = train("a", *THREE, "--dataset", str(things), "--clora_mode", "merge", "--clora_rank", "4")
    monkeypatch.undo()
    kept = [(a, images) for a, images in asked if not isinstance(a[0][0], str)]
    learner, method = clora_of(build, run)
    assert len(kept) == 3 and len(kept[2][0][0]) == 24  # of all three concepts
    for task, (question, images) in enumerate(kept, 1):
        method.load(run, task, task)
        assert torch.equal(learner.sample(*question), images)
    learner, _ = clora_of(build, run)
    assert not torch.equal(learner.sample(*question), images)


def test_the_penalty_by_hand(build, merged):
    learner, method = clora_of(build, merged, "--clora_weight", "7")
    method.load(merged, 2, 2)
    method.detach()
    state = load_file(merged / "task3" / "pytorch_lora_weights.safetensors")
    past = [products(merged, task, 1.0) for task in (1, 2)]
    method.attach(0)
    method.fill(merged / "task3")
    value, norm = 0.0, 0.0
    leaves = {name: tensor.double().requires_grad_() for name, tensor in state.items()}
    for layer in past[0]:
        change = leaves[f"{layer}.lora_B.weight"] @ leaves[f"{layer}.lora_A.weight"]
        before = (past[0][layer] + past[1][layer]).double()
        value = value + 7 * (before.abs() * change).square().sum()
        norm = norm + change.square().sum()
    value.backward()
    found = method.penalty(learner.phases(0)[0], None)
    assert found.item() == pytest.approx(value.item(), rel=1e-4) and value.item() > 0
    ours = {name.replace(".default", ""): g for name, g in gradients(learner, found).items()}
    theirs = {name: leaf.grad.float() for name, leaf in leaves.items()}
    scale = max(g.abs().max() for g in theirs.values())
    assert_close({n: g / scale for n, g in ours.items()}, {n: g / scale for n, g in theirs.items()})
    assert method.after_backward(None, None)["adapter_norm"].item() == pytest.approx(norm.sqrt().item(), rel=1e-4)


def test_a_penalty_of_weight_0_is_none_and_a_heavy_one_acts(train, merged, things, monkeypatch):
    flags = [*THREE, "--dataset", str(things), "--clora_mode", "merge", "--clora_rank", "4"]
    zero = train("a", *flags, "--clora_weight", "0")
    rows = common.read_csv(merged / "log.csv")
    assert all(float(row["adapter_norm"]) > 0 for row in rows) and float(rows[-1]["penalty"]) > 0
    assert [float(row["penalty"]) for row in rows if row["task"] == "1"] == [0]
    assert same(weights(zero, 1), weights(merged, 1)) and not same(weights(zero, 2), weights(merged, 2))
    clora = runfolder.method_class("clora")
    monkeypatch.setattr(clora, "penalty", lambda self, *a: 0.0)
    monkeypatch.setattr(clora, "after_backward", lambda self, *a: None)
    none = train("b", *flags)
    assert all(same(weights(zero, task), weights(none, task)) for task in (1, 2, 3))


def test_merging_is_right_for_every_kind_of_layer(build, monkeypatch):
    """R46: linear, 1 × 1, 3 × 3 and strided; a second time adds nothing."""
    learner = build("--method", "clora", "--clora_mode", "merge", "--clora_rank", "3", "--clora_alpha", "6")
    kinds = ["to_q", "to_v", "proj_in", "conv1", "conv_shortcut", "downsamplers.0.conv"]
    monkeypatch.setattr(learner, "adapts", lambda merge: ({"unet": kinds}, 3))
    method = method_of(learner)
    noisy, times = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([500])

    def predict():
        with torch.no_grad():
            return learner.predict(noisy, times, learner.prompts[:1, 0])

    before = {name: p.clone() for name, p in learner.unet.state_dict().items()}
    method.attach(1)
    for name, p in learner.unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    learner.unet.eval()
    changes = {name: change.detach() for name, change in method.changes()}
    assert all(any(f".{kind}" in name for name in changes) for kind in kinds)
    attached = predict()
    method.detach()
    merged = predict()
    assert (attached - merged).abs().max() < 1e-5 and method.past.keys() == changes.keys()
    wanted = {f"{name.removeprefix('unet.base_model.model.')}.weight": change for name, change in changes.items()}
    after = learner.unet.state_dict()
    assert_close({n: after[n] - before[n] for n in before}, {n: wanted.get(n, torch.zeros(1)) for n in before}, 1e-6)
    method.detach()
    assert torch.equal(predict(), merged)


def test_unloading_restores_every_bit(build, isolated, model):
    learner, method = clora_of(build, isolated)
    method.load(isolated, 3, 2)
    method.detach()
    assert same(learner.unet.state_dict(), UNet2DConditionModel.from_pretrained(model / "unet").state_dict())
    assert same(learner.text_encoder.state_dict(), CLIPTextModel.from_pretrained(model / "text_encoder").state_dict())


def test_adapters_that_do_not_fit(build, isolated, tmp_path, monkeypatch):
    """R48: other names in the file are an error, not a base model without a word."""
    learner, method = clora_of(build, isolated)
    folder = shutil.copytree(isolated / "task1", tmp_path / "task1")
    state = load_file(folder / "pytorch_lora_weights.safetensors")
    save_file({f"other.{n}": t for n, t in state.items()}, folder / "pytorch_lora_weights.safetensors")
    with pytest.raises(common.UserError, match="does not fit the network"):
        method.load(tmp_path, 1, 1)
    monkeypatch.setattr(learner, "adapts", lambda merge: ({"unet": ["nothing"]}, 4))
    with pytest.raises(ValueError, match="nothing"):
        method.start_task(streams.Task(1, [0], np.arange(4)), [])


def test_custom_diffusion_refuses_clora(small):
    with pytest.raises(common.UserError, match="--base dreambooth or another method") as error:
        train_concepts.parse_args([*small, "--base", "custom_diffusion", "--method", "clora"])
    assert error.value.code == 2 and "\n" not in str(error.value)


# ------------------------------------------------------------------------------------ files, as others read them


def pipeline_of(model, **parts):
    pipe = StableDiffusionPipeline.from_pretrained(model, safety_checker=None, **parts)
    pipe.scheduler = DDPMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def assert_draws_the_same(pipe, learner, text):
    """Text embeddings, predicted noise and pictures of a plain pipeline and of the learner."""
    learner.unet.eval(), learner.text_encoder.eval()
    ids = pipe.tokenizer([text], padding="max_length", max_length=77, return_tensors="pt").input_ids
    noisy = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = pipe.text_encoder(ids)[0], learner.text_encoder(learner.tokens([text])).last_hidden_state
        assert (theirs - ours).abs().max() < 1e-5
        ours = learner.predict(noisy, torch.tensor([500]), learner.tokens([text]))
        assert (pipe.unet(noisy, torch.tensor([500]), theirs).sample - ours).abs().max() < 1e-5
    seeds = [5, 6]
    about = dict(num_inference_steps=learner.args.sampling_steps, guidance_scale=learner.args.guidance)
    about |= dict(generator=[torch.Generator().manual_seed(seed) for seed in seeds], output_type="np")
    images = pipe([text] * 2, **about).images
    ours = learner.sample([text] * 2, seeds).permute(0, 2, 3, 1).numpy()
    assert np.abs((images * 255).round() - ours).max() <= 1 and ours.std() > 1


def prediction(learner, text):
    noisy = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return learner.predict(noisy, torch.tensor([500]), learner.tokens([text]))


def test_dreambooth_in_a_plain_pipeline(build, done, model):
    run = done("--lr", "0.001")
    learner = build()
    text = "photo of a sks ball"
    before = prediction(learner, text)
    learner.load(run / "task2")
    assert (prediction(learner, text) - before).abs().max() > 1e-3
    folder = run / "task2"
    parts = dict(unet=UNet2DConditionModel.from_pretrained(folder / "unet"),
                 text_encoder=CLIPTextModel.from_pretrained(folder / "text_encoder"))  # fmt: skip
    assert_draws_the_same(pipeline_of(model, **parts), learner, text)


@pytest.mark.parametrize("loader", ["plain", "theirs"])
def test_custom_diffusion_in_a_plain_pipeline(build, done, model, loader):
    run = done("--base", "custom_diffusion", "--lr", "0.01")
    learner, pipe, folder = build("--base", "custom_diffusion"), pipeline_of(model), run / "task2"
    text = "photo of a <new2> duck toy"
    before = prediction(learner, text)
    learner.load(folder)
    assert (prediction(learner, text) - before).abs().max() > 1e-3
    if loader == "plain":
        missing, unexpected = pipe.unet.load_state_dict(load_file(folder / "keys_and_values.safetensors"), strict=False)
        assert not unexpected and not any(kv(name) for name in missing)
    else:
        name = "pytorch_custom_diffusion_weights.safetensors"
        pipe.unet.load_attn_procs(str(folder), weight_name=name, _pipeline=pipe)
    pipe.load_textual_inversion(str(folder / "words"), weight_name="duck_toy.safetensors")
    assert_draws_the_same(pipe, learner, text)
    assert sorted(p.name for p in (folder / "words").iterdir()) == ["ball.safetensors", "duck_toy.safetensors"]


def test_an_adapter_in_a_plain_pipeline(build, isolated, model):
    """Its alpha is not its rank: what is left out on saving would come back as 1."""
    learner, method = clora_of(build, isolated)
    text, pipe = "photo of a oxi star", pipeline_of(model)
    before = prediction(learner, text)
    method.load(isolated, 3, 3)
    assert (prediction(learner, text) - before).abs().max() > 1e-3
    assert method.args.clora_alpha == 2 * method.args.clora_rank
    pipe.load_lora_weights(isolated / "task3", weight_name="pytorch_lora_weights.safetensors")
    assert_draws_the_same(pipe, learner, text)


def test_keys_and_values_of_another_model(build, done, tmp_path):
    folder = shutil.copytree(done("--base", "custom_diffusion", "--lr", "0.01") / "task2", tmp_path / "task2")
    state = load_file(folder / "keys_and_values.safetensors")
    save_file({f"module.{n}": t for n, t in state.items()}, folder / "keys_and_values.safetensors")
    with pytest.raises(common.UserError, match="has 0 of the"):
        build("--base", "custom_diffusion").load(folder)


# ------------------------------------------------------------------------------------ the shape of the paper's model


@pytest.mark.parametrize("base", BASES)
def test_a_model_of_the_papers_shape(tmp_path_factory, build, base):
    """Four levels, latents of 64 × 64, pictures of 512 and of several sizes, texts of 77; widths of 8."""
    home = tmp_path_factory.getbasetemp() / "of-512"
    if not home.exists():
        small_model.write(home / "model", side=64, widths=(8, 8, 8, 8))
        write_pictures(home / "things", {"ball": 2, "box": 1}, (600, 480))
    args = ["--model", str(home / "model"), "--dataset", str(home / "things"), "--data", str(home), "--base", base,
            "--class_images", "1", "--sampling_steps", "1", "--batch_size", "1"]  # fmt: skip
    learner = build(*args)
    assert learner.args.size == 512 and learner.data.images.shape == (3, 3, 512, 512) and learner.cell == 8
    learner.sample = lambda prompts, seeds: torch.full((len(seeds), 3, 512, 512), 90).byte()  # sampled once below
    learner.prepare_class_images()
    del learner.sample
    batch = batch_of(learner, 1)
    assert batch["latents"].shape == (2, 4, 64, 64) and batch["masks"].shape == (2, 1, 64, 64)
    assert all(value.isfinite().all() for value in batch.values())
    optimiser = torch.optim.SGD([*learner.params(learner.phases(0)[0]).values()], 0.1)
    loss = learner.loss(learner.phases(0)[0], batch)
    loss.backward()
    before = [p.clone() for p in optimiser.param_groups[0]["params"]]
    optimiser.step()
    assert loss.isfinite() and all(p.isfinite().all() for p in learner.unet.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, optimiser.param_groups[0]["params"], strict=True)
                   if b.grad is not None and b.grad.any())  # fmt: skip
    if base == "dreambooth":
        image = learner.sample([0], [1])
        assert image.shape == (1, 3, 512, 512) and image.float().std() > 1


# ----------------------------------------------------------------------------------------- modes and sampling


@pytest.fixture(scope="session")
def dropping(model, tmp_path_factory):
    """The model with dropout everywhere."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("dropping") / "model")
    for part, about in (("unet", {"dropout": 0.5}), ("text_encoder", {"attention_dropout": 0.5})):
        path = folder / part / "config.json"
        path.write_text(json.dumps(common.read_json(path) | about))
    return folder


@pytest.mark.parametrize("flags", [["--base", "dreambooth"], ["--base", "custom_diffusion"],
                                   ["--method", "clora", "--clora_mode", "merge"]])  # fmt: skip
def test_modes_in_training_sampling_and_after(train, dropping, monkeypatch, flags):
    """R45: what is trained trains with dropout; frozen parts and all sampling without; each mode comes back."""
    concepts_class, seen = train_concepts.Concepts, {"loss": [], "denoise": [], "after": []}
    loss, denoise, log = concepts_class.loss, concepts_class.denoise, runfolder.Run.log

    def modes(learner):
        return learner.unet.training, learner.text_encoder.training, learner.vae.training

    def logged(self, *rest):
        learner = self.learner
        state = torch.get_rng_state()
        seeds = [1, 2]
        assert torch.equal(learner.sample([0, 1], seeds), learner.sample([0, 1], seeds))
        assert torch.equal(torch.get_rng_state(), state)
        seen["after"].append(modes(learner))
        return log(self, *rest)

    monkeypatch.setattr(concepts_class, "loss", lambda self, *a: seen["loss"].append(modes(self)) or loss(self, *a))
    monkeypatch.setattr(
        concepts_class, "denoise", lambda self, *a: seen["denoise"].append(modes(self)) or denoise(self, *a)
    )
    monkeypatch.setattr(runfolder.Run, "log", logged)
    train("a", "--model", str(dropping), "--steps", "2", "--tasks", "2", *flags)
    whole = (True, "merge" not in flags, False)
    assert set(seen["loss"]) == set(seen["after"]) == {whole} and len(seen["loss"]) == 4
    assert set(seen["denoise"]) == {(False, False, False)}


def test_dropout_acts_in_training(build, dropping):
    learner = build("--model", str(dropping))
    learner.prepare_class_images()
    batch, losses = batch_of(learner, 2), []
    for training, seed in ((True, 1), (True, 1), (True, 2), (False, 1), (False, 2)):
        for net in learner.nets.values():
            net.train(training)
        torch.manual_seed(seed)
        losses.append(learner.loss(learner.phases(0)[0], batch).item())
    assert losses[0] == losses[1] != losses[2] and losses[3] == losses[4]


def test_an_image_depends_on_its_seed_and_text_alone(build):
    learner = build("--base", "custom_diffusion")
    asked, seeds = [0, 1, "photo of a tree", 0, 1], [3, 1, 4, 1, 5]
    whole = learner.sample(asked, seeds)
    alone = torch.cat([learner.sample([a], [s]) for a, s in zip(asked, seeds, strict=True)])
    learner.sample_batch = 2
    some = learner.sample(asked, seeds)
    assert (whole.int() - alone.int()).abs().max() <= 1 and (whole.int() - some.int()).abs().max() <= 1
    assert torch.equal(whole, build("--base", "custom_diffusion").sample(asked, seeds))
    text = f"photo of a {learner.noun(0)}"
    assert torch.equal(learner.sample([0], [3]), learner.sample([text], [3])) and text == "photo of a <new1> ball"
    assert not torch.equal(learner.sample([0], [3]), learner.sample([0], [4]))
    assert not torch.equal(learner.sample([0], [3]), learner.sample([1], [3]))
    assert learner.sample([], []).shape == (0, 3, 32, 32)


def test_1000_steps_and_latents_are_not_clipped(build):
    learner = build("--sampling_steps", "1000")
    learner.scheduler.set_timesteps(1000)
    times = []
    learner.unet.register_forward_pre_hook(lambda m, inputs: times.append(int(inputs[1])))
    learner.unet.forward = lambda x, t, text: argparse.Namespace(sample=torch.zeros_like(x))
    learner.sample([0], [1])
    assert times == list(range(999, 0, -1))
    assert learner.scheduler.config.clip_sample is False


# ------------------------------------------------------------------------------------------------ methods


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("method", METHODS)
def test_task_1_is_that_of_ncl_and_task_2_is_not(done, method, base):
    run, ncl = done("--base", base, "--method", method), done("--base", base)
    assert same(weights(run, 1), weights(ncl, 1))
    assert same(weights(run, 2), weights(ncl, 2)) == (method == "ncl")
    rows = common.read_csv(run / "log.csv")
    assert [r["step"] for r in rows if r["task"] == "1"] == ["3", "6"]
    assert all(float(r[name]) > 0 for r in rows for name in ("loss_own", "loss_prior", "gradient_norm"))
    assert float(rows[0]["penalty"]) == 0 and (float(rows[-1]["penalty"]) > 0) == (method in PENALTIES)
    assert rows[-1]["step"] == ("14" if method == "noncl" else "6")  # 6 steps · 7 pictures / 3
    if base == "custom_diffusion" and method not in ("noncl", "ensemble"):
        words = words_of(run, 1), words_of(run, 2)
        assert [*words[0]] == ["<new1>"] and {*words[1]} == {"<new1>", "<new2>"}
        assert torch.equal(words[0]["<new1>"], words[1]["<new1>"])
    if base == "custom_diffusion" and method == "ensemble":
        assert [*words_of(run, 2)] == ["<new2>"]
    if base == "custom_diffusion":
        count = sum(
            load_file(run / "task1" / "keys_and_values.safetensors")[n].numel() for n in weights(run, 1) if kv(n)
        )
        assert common.read_json(run / "task1" / "cost.json")["parameters_trained"] == count + 2 * 16


def test_a_word_of_the_past_is_asked_for_and_stays(done):
    """kd with past labels asks the student for the first word, in every row."""
    run, kd = (done("--base", "custom_diffusion", "--method", "kd", *flags) for flags in (["--kd_labels", "past"], []))
    assert torch.equal(words_of(run, 1)["<new1>"], words_of(run, 2)["<new1>"])
    assert not same(weights(run, 2), weights(kd, 2))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("method", PENALTIES)
def test_strength_0_is_ncl(train, done, method, base):
    run = train("a", "--base", base, "--method", method, f"--{method}_weight", "0")
    assert same(weights(run, 2), weights(done("--base", base), 2))


@pytest.mark.parametrize(
    "method, flag",
    [("er", "--memory_size"), ("er", "--replay_size"), ("gr", "--replay_size"), ("agem", "--memory_size")],
)
def test_nothing_replayed_is_ncl(train, done, method, flag):
    run = train("a", "--method", method, flag, "0")
    assert same(weights(run, 2), weights(done(), 2))


def test_replayed_rows_are_of_the_past(train, monkeypatch):
    batches, loss = [], train_concepts.Concepts.loss
    monkeypatch.setattr(
        train_concepts.Concepts,
        "loss",
        lambda self, phase, batch: batches.append(dict(batch)) or loss(self, phase, batch),
    )
    train("a", "--method", "er")
    for step, batch in enumerate(batches):
        labels, own = batch["labels"], batch["prompts"] != CLASS
        assert labels.tolist() == ([0] * 4 if step < 6 else [1] * 4 + [0] * 4)
        assert own.tolist() == [True, True, False, False] * (1 if step < 6 else 2)
        assert batch["timesteps"].unique().numel() > 2


def test_class_images_of_a_task_are_its_own(train, monkeypatch):
    seen, draw = [], train_concepts.Concepts.draw

    def spy(self, images, labels, key):
        batch = draw(self, images, labels, key)
        seen.append((key[1], {*batch["labels"][batch["prompts"] == CLASS].tolist()}))
        return batch

    monkeypatch.setattr(train_concepts.Concepts, "draw", spy)
    train("a", "--steps", "2")
    assert {task: {c for t, classes in seen if t == task for c in classes} for task in (1, 2)} == {1: {0}, 2: {1}}
    seen.clear()
    train("b", "--method", "noncl", "--steps", "2")
    assert set.union(*(classes for task, classes in seen if task == 2)) == {0, 1}
    seen.clear()
    train("c", "--method", "ewc", "--steps", "2")
    assert sum(not classes for _, classes in seen) == 8  # importance is that of the pictures alone
    assert sum(bool(classes) for _, classes in seen) == 4


def test_one_kind_of_run_folder_says_what_made_it(done):
    run = done("--method", "ewc")
    config, cost = (common.read_json(run / name) for name in ("config.json", "task2/cost.json"))
    both = config["parameters"] - sum(t.numel() for t in load_file(
        Path(config["flags"]["model"]) / "vae" / "diffusion_pytorch_model.safetensors").values())  # fmt: skip
    assert cost["parameters_trained"] == both and cost["parameters_stored"] == config["parameters"] + 2 * both
    assert config["backbone"] == "dreambooth" and config["isolated"] is False and len(config["model"]) == 12
    assert {"concepts.py", "train_concepts.py", "methods/ewc.py"} <= set(config["code"])
    assert config["scheduler"]["clip_sample"] is False and config["tasks"] == [[0], [1]]
    assert (run / "task2" / "samples.png").exists() and not (run / "resume").exists()


def test_r44_batches_of_three(train, things, cache):
    """4 pictures, 5 class images, 3 of each a step."""
    run = train("a", "--batch_size", "3", "--class_images", "5", "--steps", "3", "--dataset", f"{things}:0-0")
    rows = common.read_csv(run / "log.csv")
    assert rows[-1]["step"] == "3" and all(0 < float(r[name]) < 10 for r in rows for name in ("loss_own", "loss_prior"))
    for row in rows:
        assert float(row["loss_main"]) == pytest.approx(float(row["loss_own"]) + float(row["loss_prior"]), rel=1e-4)


# ------------------------------------------------------------------------------------------------ stop, resume


def chain(train, monkeypatch, stops, *flags):
    """Starts a run that is stopped again and again → its run folder. stops: (module, name, when(arguments))."""
    for module, name, when in stops:
        original = getattr(module, name)

        def stopping(*args, original=original, when=when, **kwargs):
            if when(*args):
                raise Stop
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, stopping)
            with pytest.raises(Stop):
                train("stopped", *flags)
    return train("stopped", *flags)


def drawing(task, step):
    return train_concepts.Concepts, "draw", lambda self, images, labels, key: key[1:] == (task, step)


ENDED = runfolder, "picture_grid", lambda *a: True  # after end_task, before its state is kept
STOPS = [(runfolder, "save_tensors", lambda *a: True), drawing(1, 4), ENDED, drawing(2, 0), drawing(2, 4), ENDED]


@pytest.mark.parametrize(
    "method, base", [*itertools.product(METHODS, BASES), ("isolated", "dreambooth"), ("merge", "dreambooth")]
)
def test_stopped_anywhere_and_resumed_is_unbroken(train, done, monkeypatch, method, base):
    flags = ["--base", base, "--method", method]
    if method in ("isolated", "merge"):
        flags = ["--method", "clora", "--clora_mode", method, "--clora_weight", "100"]
    many = (method, base) in [("merge", "dreambooth"), ("ncl", "custom_diffusion"), ("si", "custom_diffusion")]
    stops = STOPS if many else [ENDED, drawing(2, 4)]
    run = chain(train, monkeypatch, stops, *flags)
    assert_same_run(done(*flags), run)
    assert not (run / "resume").exists() and not list(run.glob("*.tmp"))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_by_the_system(train, small, tmp_path, cache):
    flags = ["--base", "custom_diffusion", "--method", "er", "--save_every", "1", "--steps", "12"]
    unbroken = train("unbroken", *flags)
    command = [sys.executable, str(ROOT / "train_concepts.py"), *small, "--data", str(cache),
               "--out", str(tmp_path / "killed"), *flags]  # fmt: skip
    run = tmp_path / "killed" / unbroken.relative_to(tmp_path / "unbroken")
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    logged = []  # a row a step, each written just before the state of that step is saved
    while sum(row.get("task") == "2" for row in logged) < 3:  # a row may be read while it is written
        assert child.poll() is None, "ended before it could be killed"
        logged = common.read_csv(run / "log.csv")
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (run / "DONE").exists()
    subprocess.run(command, env=environment, check=True)
    assert all(same(weights(unbroken, task), weights(run, task)) for task in (1, 2))
    again = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert f"{run} is finished" in again.stdout


# ---------------------------------------------------------------------------------------------- class images


def files_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*.png"))}


def test_class_images_resumed_are_unbroken_and_shared(build, tmp_path, monkeypatch):
    """Stopped after 5 and again after 19 of 20 images of the first category; the second run draws none."""
    whole = build("--data", str(tmp_path / "whole"), "--class_images", "20")
    whole.prepare_class_images()
    write, left = common.write_picture, []

    def counted(path, image):
        if not left.pop():
            raise Stop
        write(path, image)

    with monkeypatch.context() as patch:
        patch.setattr(common, "write_picture", counted)
        for good in (5, 14):
            left[:] = [False, *[True] * good]
            with pytest.raises(Stop):
                build("--data", str(tmp_path / "broken"), "--class_images", "20").prepare_class_images()
    assert len(files_of(tmp_path / "broken")) == 19
    broken = build("--data", str(tmp_path / "broken"), "--class_images", "20")
    broken.prepare_class_images()
    files = files_of(tmp_path / "broken")
    assert files == files_of(tmp_path / "whole") and len(files) == len({*files.values()}) == 40
    assert all(torch.equal(whole.moments[c], broken.moments[c]) for c in ("ball", "duck toy"))

    def never(*args):
        raise AssertionError("drawn again")

    for flags in (["--order", "3", "--seed", "2"], ["--method", "kd"], ["--base", "custom_diffusion"]):
        other = build("--data", str(tmp_path / "broken"), "--class_images", "20", *flags)
        other.sample = never
        other.prepare_class_images()
        assert torch.equal(other.moments["ball"], whole.moments["ball"])
    fewer = build("--data", str(tmp_path / "broken"), "--class_images", "4")
    fewer.sample = never
    fewer.prepare_class_images()
    assert torch.equal(fewer.moments["ball"], whole.moments["ball"][:4]) or len(fewer.moments["ball"]) == 4


def test_class_images_come_from_the_initial_model(train, tmp_path, monkeypatch):
    """Also when they are missing as a run goes on that has learnt a task."""
    flags = ["--data", str(tmp_path / "data"), "--lr", "0.01"]
    train("a", *flags)
    first = files_of(tmp_path / "data")
    draw = train_concepts.Concepts.draw

    def stopping(self, images, labels, key):
        if key[1:] == (2, 3):
            shutil.rmtree(tmp_path / "data" / "class_images")
            raise Stop
        return draw(self, images, labels, key)

    with monkeypatch.context() as patch:
        patch.setattr(train_concepts.Concepts, "draw", stopping)
        with pytest.raises(Stop):
            train("b", *flags)
    train("b", *flags)
    assert files_of(tmp_path / "data") == first and len(first) == 8


def black_every_second_time(size):
    calls, shown = [], itertools.count()

    def sample(prompts, seeds):
        calls.append(list(prompts))
        return torch.stack([torch.full((3, size, size), 100 + s % 100 if next(shown) % 2 else 0) for s in seeds]).byte()

    return sample, calls


def test_class_images_by_a_generator_that_draws_black(tmp_path):
    """R43. Black ones are drawn again; missing ones are made, surplus ones left, the same each time."""
    sample, calls = black_every_second_time(8)
    images = concepts.class_images(tmp_path / "five", 5, "photo of a dog", 8, sample)
    assert images.shape == (5, 3, 8, 8) and images.any((1, 2, 3)).all()
    assert sorted(p.name for p in (tmp_path / "five").glob("*.*") if p.name[0] != ".") == [
        f"{k:04d}.png" for k in range(5)
    ]
    assert {prompt for some in calls for prompt in some} == {"photo of a dog"}
    for there, made in ((3, 2), (8, 0)):
        folder = tmp_path / str(there)
        folder.mkdir()
        for k in range(there):
            Image.fromarray(np.full((20, 30, 3), 200 + k, np.uint8)).save(folder / f"mine{k}.png")
        (folder / ".DS_Store").write_bytes(b"no picture")
        images = concepts.class_images(folder, 5, "photo of a dog", 8, sample)
        assert len(files_of(folder)) == there + made
        assert {*images[:, 0, 0, 0].tolist()} >= {200 + k for k in range(min(there, 5))} and len(images) == 5
        assert np.array_equal(images, concepts.class_images(folder, 5, "photo of a dog", 8, None))
    with pytest.raises(common.UserError, match="draws black for 'photo of a dog'"):
        concepts.class_images(
            tmp_path / "black", 2, "photo of a dog", 8, lambda p, s: torch.zeros(len(s), 3, 8, 8).byte()
        )


def test_each_category_has_its_own_prompt(build, tmp_path):
    learner, asked = build("--data", str(tmp_path)), []
    learner.sample = lambda prompts, seeds: asked.append(prompts) or torch.full((len(seeds), 3, 32, 32), 90).byte()
    learner.prepare_class_images()
    assert [{*prompts} for prompts in asked] == [{"photo of a ball"}, {"photo of a duck toy"}]
    (kind,) = (tmp_path / "class_images").iterdir()
    assert sorted(p.name for p in kind.iterdir()) == ["ball", "duck toy"]
    other = build("--data", str(tmp_path), "--guidance", "2", "--precision", "bf16")
    other.sample = learner.sample
    other.prepare_class_images()
    assert len([*(tmp_path / "class_images").iterdir()]) == 2 and len(asked) == 4


# ---------------------------------------------------------------------------------------------------- mistakes


class Bomb:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def edited(path, **changes):
    path.write_text(json.dumps(common.read_json(path) | changes))


def pickle_alone(model):
    (model / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    (model / "unet" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Bomb(model / "BANG")))


def cut(path):
    path.write_bytes(path.read_bytes()[:200])


MISTAKES = {  # what: (what is done to model and pictures, further flags, what is said)
    "no model": (lambda m, t: shutil.rmtree(m), [], "no model '"),
    "a folder that is none": (lambda m, t: (m / "model_index.json").unlink(), [], "has no model_index.json"),
    "sdxl": (lambda m, t: edited(m / "model_index.json", _class_name="StableDiffusionXLPipeline"), [],
             "is a StableDiffusionXLPipeline"),
    "no unet": (lambda m, t: edited(m / "model_index.json", unet=None), [], "with nothing as unet"),
    "another unet": (lambda m, t: edited(m / "model_index.json", unet=["diffusers", "UNet2DModel"]), [],
                     "with UNet2DModel as unet"),
    "index of a list": (lambda m, t: (m / "model_index.json").write_text("[]"), [], "want Stable Diffusion's"),
    "no unet folder": (lambda m, t: shutil.rmtree(m / "unet"), [], "unet/config.json is missing"),
    "no tokenizer": (lambda m, t: shutil.rmtree(m / "tokenizer"), [], "tokenizer_config.json is missing"),
    "v-prediction": (lambda m, t: edited(m / "scheduler" / "scheduler_config.json", prediction_type="v_prediction"),
                     [], "predicts v_prediction"),
    "pickle": (lambda m, t: pickle_alone(m), [], "but diffusion_pytorch_model.bin, a pickle, which may run code"),
    "no pictures": (lambda m, t: [p.unlink() for p in (t / "ball").iterdir()], [], "ball holds no picture"),
    "damaged picture": (lambda m, t: cut(t / "duck_toy" / "1.jpg"), [], "duck_toy/1.jpg"),
    "no objects": (lambda m, t: None, ["--dataset", "objects"], "objects/dog is missing"),
    "no such folder": (lambda m, t: None, ["--dataset", "nothing"], "unknown data set 'nothing'"),
    "concepts.json cut": (lambda m, t: (t / "concepts.json").write_text("{"), [], "concepts.json"),
    "concepts.json of a list": (lambda m, t: (t / "concepts.json").write_text("[1]"), [], "should read"),
    "concepts.json of another": (lambda m, t: (t / "concepts.json").write_text('{"hat": {}}'), [], "speaks of 'hat'"),
    "category of a number": (lambda m, t: (t / "concepts.json").write_text('{"ball": {"category": 3}}'), [],
                             "each a text that is not empty"),
    "list of prompts": (lambda m, t: (t / "concepts.json").write_text('{"ball": {"prompts": "x"}}'), [],
                        "there is no list 'x' of prompts"),
    "one word for two": (lambda m, t: (t / "concepts.json").write_text('{"ball": {"word": "phol"}}'), [],
                         "two concepts have the word 'phol'"),
    "base": (lambda m, t: None, ["--base", "lora"], "--base: invalid choice: 'lora'"),
    "preset of the other base": (lambda m, t: None, ["--preset", "sd-custom_diffusion"], "is not one of --base"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_one_line_before_anything(script, model, things, tmp_path, what):
    do, flags, said = MISTAKES[what]
    mine, theirs = (
        shutil.copytree(model, tmp_path / "in" / "model"),
        shutil.copytree(things, tmp_path / "in" / "things"),
    )
    do(mine, theirs)
    result = script("train_concepts.py", "--model", mine, "--dataset", theirs, *flags, "--data", tmp_path / "data",
                    *SIZES)  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert said in result.stderr.splitlines()[-1] and result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr and not (mine / "BANG").exists()
    assert not (tmp_path / "runs").exists() and not list((tmp_path / "data").rglob("*.png"))
    assert not list((tmp_path / "data").rglob("*.npy"))
