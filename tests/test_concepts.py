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
         "--sampling_steps", "2", "--importance_draws", "2"]  # fmt: skip


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
    whole = gradients(weighed, weighed.loss(phase, with_prior))
    own = gradients(alone, alone.loss(phase, without))
    prior = weighed.predict(weighed.scheduler.add_noise(*(with_prior[k][3:] for k in ("latents", "noise", "timesteps"))),
                            with_prior["timesteps"][3:], weighed.prompts[with_prior["labels"][3:], CLASS])  # fmt: skip
    prior = gradients(weighed, F.mse_loss(prior, with_prior["noise"][3:]))
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
        lambda groups, lr: adamw([g | {"weight_decay": 50 * g["weight_decay"]} for g in groups], lr),
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
