"""CLIP and DINO scores against plain sums; the judges' files; evaluation of runs of concepts."""

import contextlib
import json
import shutil
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import small_model
import torch
import transformers
from PIL import Image

import alignment
import common
import eval_metrics as em
import figures
import runfolder
import streams
import tables

LONG = "photo of a dog " * 30  # 120 words


def write_clip(folder, seed=6):  # one whose pictures and texts have cosines above 0
    torch.manual_seed(seed)
    words = small_model.tokenizer()
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, projection_dim=8)
    text = dict(size, vocab_size=len(words), max_position_embeddings=77, bos_token_id=words.bos_token_id,
                eos_token_id=words.eos_token_id)  # fmt: skip
    vision = dict(size, image_size=32, patch_size=8)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(folder)
    words.save_pretrained(folder)
    about = dict(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    transformers.CLIPImageProcessor(**about).save_pretrained(folder)
    return folder


def write_dino(folder, seed=1):
    torch.manual_seed(seed)
    size = dict(hidden_size=12, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.3)
    transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **size)).save_pretrained(folder)
    about = dict(size={"height": 32, "width": 32}, resample=3, image_mean=[0.485, 0.456, 0.406])
    transformers.ViTImageProcessor(**about, image_std=[0.229, 0.224, 0.225]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("judges")
    return write_clip(place / "clip"), write_dino(place / "dino")


@pytest.fixture
def judges(folders):
    return alignment.Clip(folders[0], "cpu"), alignment.Dino(folders[1], "cpu")


def pictures(count, side=32, seed=0):
    """Smooth ones: noise looks all alike after the resizing."""
    small = np.random.default_rng(seed).integers(0, 256, (count, 3, 4, 4), np.uint8)
    return torch.from_numpy(np.stack([streams.squash(one[None], side)[0] for one in small]))


def cosine(a, b):
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


# ------------------------------------------------------------------------------------------------- scores


def test_scores_by_hand():
    generated, real = np.array([[1.0, 0], [0, 3]]), np.array([[2.0, 0], [1, 1]])
    four = [1, 0.5**0.5, 0, 0.5**0.5]  # all pairs
    assert alignment.similarity(generated, real) == pytest.approx(25 * sum(four))
    assert alignment.similarity(generated[:1], real) == pytest.approx(50 * (1 + 0.5**0.5))
    assert alignment.pairwise(generated, real) == pytest.approx(50 * (1 + 0.5**0.5))
    texts = np.array([[-1.0, 0], [0, 1]])  # a negative cosine counts as 0
    assert alignment.text_score(generated, texts) == pytest.approx(100 * 2.5 * (0 + 1) / 2)
    assert alignment.similarity(real, 7 * real[:1]) == pytest.approx(50 * (1 + 0.5**0.5))  # lengths do not matter


def test_a_picture_against_itself_is_100(judges):
    one = pictures(1)
    for net in judges:
        assert alignment.similarity(net.images(one), net.images(one)) == pytest.approx(100, abs=1e-3)
        assert alignment.similarity(net.images(one), net.images(pictures(1, seed=3))) < 99


def test_features_are_those_of_the_networks(folders, judges):
    """Projected image features, the class token after the last norm, and text at its end token, by plain calls."""
    images = pictures(3, side=48)
    for folder, kind, net in zip(folders, (transformers.CLIPModel, transformers.ViTModel), judges, strict=True):
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        pixels = processor([Image.fromarray(x.permute(1, 2, 0).numpy()) for x in images], return_tensors="pt")
        plain = kind.from_pretrained(folder).eval()
        with torch.no_grad():
            if net.kind == "clip":
                ids = net.tokenizer(["photo of a dog", "photo of a cat"], return_tensors="pt").input_ids
                out = plain(input_ids=ids, **pixels)
                found = alignment.unit(net.texts(["photo of a dog", "photo of a cat"]))
                assert np.allclose(found, out.text_embeds.numpy(), atol=1e-5)
                assert np.allclose(alignment.unit(net.images(images)), out.image_embeds.numpy(), atol=1e-5)
            else:
                expected = plain(**pixels).last_hidden_state[:, 0].numpy()
                assert np.allclose(net.images(images), expected, atol=1e-5)


def test_pixels_are_what_the_processor_says_by_hand(judges):
    """Shorter side to 32 with PIL's bicubic filter, the middle, mean and deviation; DINO squashes."""
    image = np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8)  # higher frequencies than any antialias
    whole = Image.fromarray(image)
    clip, dino = judges
    wide = np.asarray(whole.resize((48, 32), Image.Resampling.BICUBIC))[:, 8:40]
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    chosen = torch.from_numpy(image.transpose(2, 0, 1))[None]
    assert np.abs(clip.pixels(chosen)[0].numpy() - ((wide / 255 - mean) / std).transpose(2, 0, 1)).max() < 1e-4
    square = np.asarray(whole.resize((32, 32), Image.Resampling.BICUBIC))
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    assert np.abs(dino.pixels(chosen)[0].numpy() - ((square / 255 - mean) / std).transpose(2, 0, 1)).max() < 1e-4


def test_a_text_that_is_too_long_keeps_its_end_token(judges, capsys):
    clip, _ = judges
    common.note.cache_clear()
    ids = clip.tokens([LONG]).input_ids[0]
    assert len(ids) == 77 and ids[-1] == clip.tokenizer.eos_token_id and clip.tokenizer.eos_token_id not in ids[:-1]
    clip.tokens([LONG])
    assert capsys.readouterr().err.count("longer than the 77 tokens") == 1
    # the text that is left is that of its first 75 tokens, so the score is that of its beginning
    begins = "photo of a dog " * 18 + "photo of a"
    assert np.allclose(clip.texts([LONG]), clip.texts([begins]), atol=1e-6)
    sixty = clip.texts(["photo of a dog " * 15])[0]
    assert cosine(clip.texts([LONG])[0], sixty) > 0.9
    with torch.no_grad():  # as it would be without its end
        ids = clip.tokens([LONG]).input_ids
        ids[0, -1] = ids[0, 1]
        assert cosine(clip.net.get_text_features(ids).pooler_output[0].numpy(), sixty) < 0.8
    assert capsys.readouterr().err == ""


def test_features_of_a_text_do_not_depend_on_its_neighbours(judges):
    clip, _ = judges
    both = clip.texts(["photo of a dog", "photo of a cat on a very long sofa"])
    assert np.allclose(both[:1], clip.texts(["photo of a dog"]), atol=1e-6)


def test_prompts():
    listed = alignment.templates()
    assert {*listed} == {"object", "live", "tiny"} and all(len({*texts}) == 20 for texts in listed.values())
    assert all(text.count("{}") == 1 for texts in listed.values() for text in texts)
    concept = Concept("my_dog", "dog", "live", "sks")
    drawn = alignment.prompts(concept, "sks dog", 45)
    assert len(drawn) == 45 and drawn[40] == drawn[0] and "sks dog" in drawn[0]
    read = alignment.prompts(concept, "dog", 45)
    assert all(a.replace("sks ", "") == b and "sks" not in b for a, b in zip(drawn, read, strict=True))
    assert (alignment.samples("sd-dreambooth"), alignment.samples("tiny-custom_diffusion")) == (1000, 20)
    assert alignment.following([[2], [0], [1]], 1) == 2 and alignment.following([[2], [0], [1]], 2) == 0


# ------------------------------------------------------------------------------------------- their files


def refused(capsys, *flags):
    """What the script says of these flags: one line, code 2."""
    with pytest.raises(SystemExit) as end, common.one_line_errors():
        em.main(["runs", *map(str, flags)])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and error.startswith("error: "), error
    return error


def test_judges_that_cannot_be_used(folders, tmp_path, capsys, monkeypatch):
    clip, dino = folders
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    said = refused(capsys, "--clip", "openai/clip-vit-base-patch32")
    assert "hf download openai/clip-vit-base-patch32" in said and "neither a folder" in said
    assert "wants a CLIP" in refused(capsys, "--clip", dino) and "wants a DINO" in refused(capsys, "--dino", clip)
    pickled = shutil.copytree(dino, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/hacked'\ntR.")
    assert "pytorch_model.bin alone, a pickle" in refused(capsys, "--dino", pickled)
    bare = shutil.copytree(clip, tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    assert "no preprocessor_config.json" in refused(capsys, "--clip", bare)
    (bare / "config.json").unlink()
    assert "no config.json" in refused(capsys, "--clip", bare)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bare", "pickled"]


def test_weights_that_are_missing_are_not_made_up(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    torn = shutil.copytree(folders[1], tmp_path / "torn")
    state = load_file(torn / "model.safetensors")
    lost = next(name for name in state if "layer" in name)
    save_file({k: v for k, v in state.items() if k != lost}, torn / "model.safetensors", {"format": "pt"})
    with pytest.raises(common.UserError, match=r"lacks 1 weights of a ViTModel"):
        alignment.Dino(torn, "cpu")
    (torn / "model.safetensors").write_bytes((folders[1] / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(common.UserError, match="cannot be read as a ViTModel"):
        alignment.Dino(torn, "cpu")


def test_the_hubs_cache_and_names(folders, tmp_path, monkeypatch):
    """The revision that holds safetensors is taken, wherever it came from; others than the published carry a hash."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--facebook--dino-vits16"
    shutil.copytree(folders[1], place / "snapshots" / "bbb")
    shutil.copytree(folders[1], place / "snapshots" / "aaa")
    (place / "snapshots" / "aaa" / "model.safetensors").rename(place / "snapshots" / "aaa" / "pytorch_model.bin")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("aaa")
    assert alignment.model_folder("dino", "facebook/dino-vits16").name == "bbb"
    assert alignment.model_name("dino", "facebook/dino-vits16") == "dino-vits16"
    first = alignment.model_name("dino", str(folders[1]))
    assert first.startswith("dino-") and len(first) == 13
    other = shutil.copytree(folders[1], tmp_path / "other" / "dino")
    assert alignment.model_name("dino", str(other)) == first  # what is in it counts, not where it lies
    config = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(config | {"resample": 2}))
    assert alignment.model_name("dino", str(other)) != first


# --------------------------------------------------------------------------- evaluation, with a learner of no network


@dataclass
class Concept:
    name: str
    category: str
    prompts: str
    word: str


class Learner:
    """Draws a concept by its first picture, as much as it has strength for it, and else what the seed says."""

    calls = []

    def __init__(self, args, data, device):
        self.args, self.data, self.device, self.nets, self.sample_batch = args, data, device, {}, 4
        facts = zip(data.classes, ("dog", "ball", "cat"), ("sks", "phol", "oxi"), strict=True)
        self.concepts = [Concept(name, category, "tiny", word) for name, category, word in facts]
        self.strengths = [0.0] * 3

    def noun(self, c):
        return f"{self.concepts[c].word} {self.concepts[c].category}"

    def load(self, folder):
        self.strengths = json.loads((folder / "weights.safetensors").read_text())

    def identity(self):
        return {}

    @contextlib.contextmanager
    def initial_weights(self):
        kept, self.strengths = self.strengths, [0.0] * 3
        yield
        self.strengths = kept

    def sample(self, texts, seeds):
        self.calls.append(list(texts))
        drawn = []
        for text, seed in zip(texts, seeds, strict=True):
            image = pictures(1, seed=seed)[0].float()
            for c, strength in enumerate(self.strengths):
                if self.noun(c) in text:
                    own = torch.as_tensor(self.data.images[self.data.labels == c][0]).float()
                    image = strength * own + (1 - strength) * image
            drawn.append(image.round().to(torch.uint8))
        return torch.stack(drawn)


@pytest.fixture
def concept_run(tmp_path, monkeypatch, folders):
    """concept_run(method, …) → a finished run of three concepts that fades what is older; nothing is trained."""
    monkeypatch.setitem(sys.modules, "train_concepts", types.SimpleNamespace(Learner=Learner))
    monkeypatch.setattr(Learner, "calls", [])
    for k, name in enumerate(("a_dog", "b_ball", "c_cat")):
        (tmp_path / "things" / name).mkdir(parents=True, exist_ok=True)
        for j, image in enumerate(pictures(2 + k, seed=100 + k)):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "things" / name / f"{j}.png")
    data = streams.load_data(streams.scenario(str(tmp_path / "things")), 32, tmp_path / "data")

    def make(method="ncl", fade=(0.9, 0.5, 0.2), order=(2, 0, 1), **flags):
        about = {"dataset": str(tmp_path / "things"), "size": 32, "method": method, "order": 1, "seed": 1}
        about |= {"preset": "tiny-dreambooth", "select": "last", "base": "dreambooth", "model": str(tmp_path / "model")}
        about |= {"sampling_steps": 5, "guidance": 4.0, "precision": "fp32", "data": str(tmp_path / "data")} | flags
        config = {"flags": about, "data": {"name": data.name, "digest": data.digest, "classes": data.classes}}
        config |= {"backbone": "dreambooth", "isolated": method == "ensemble", "device": "cpu", "code": {}}
        config |= {"tasks": [[c] for c in order], "model": "0123"}
        run = tmp_path / "runs" / f"{method}-{about['seed']}"
        for t in range(1, 4):
            strengths = [0.0] * 3
            for i in range(1, t + 1):
                if not config["isolated"] or i == t:
                    strengths[order[i - 1]] = fade[t - i]
            with common.new_folder(run / f"task{t}") as new:
                (new / "weights.safetensors").write_text(json.dumps(strengths))
        (run / "config.json").write_text(json.dumps(config))
        (run / "DONE").touch()
        return run

    make.data = data
    return make


@pytest.fixture
def evaluate(tmp_path, folders, capsys):
    def run(*flags):
        em.main([str(tmp_path / "runs"), "--out", str(tmp_path / "results"), "--data", str(tmp_path / "data"),
                 "--num_samples", "6", "--clip", str(folders[0]), "--dino", str(folders[1]), *flags])  # fmt: skip
        return common.read_csv(tmp_path / "results" / "summary.csv"), capsys.readouterr().out

    return run


def cell(run, metric, t, i, **more):
    wanted = {"metric": metric, "trained_to": str(t), "task": str(i)} | more
    (value,) = (float(r["value"]) for r in common.read_csv(run / "quality.csv") if wanted.items() <= r.items())
    return value


def test_a_cell_by_hand(concept_run, evaluate, judges):
    run, data = concept_run(), concept_run.data
    evaluate()
    clip, dino = judges
    learner = Learner(None, data, "cpu")
    learner.load(run / "task3")
    real = data.images[data.labels == 2]  # task 1 of this order is the third concept
    texts = [t.replace("{}", "oxi cat") for t in alignment.templates()["tiny"][:6]]
    images = learner.sample(texts, common.sampling_seeds((0, 2, "report"), 6))
    hand = {}
    for net in (clip, dino):
        pairs = [cosine(a, b) for a in net.images(images) for b in net.images(real)]
        assert len(pairs) == 6 * 4
        hand[net.kind] = 100 * sum(pairs) / len(pairs)
    read = [t.replace("{}", "cat") for t in alignment.templates()["tiny"][:6]]
    hand["text"] = 100 * np.mean([
        2.5 * max(cosine(a, b), 0) for a, b in zip(clip.images(images), clip.texts(read), strict=True)])  # fmt: skip
    assert hand["text"] > 1
    assert cell(run, "CLIP-I", 3, 1) == pytest.approx(hand["clip"], rel=1e-5)
    assert cell(run, "DINO-I", 3, 1) == pytest.approx(hand["dino"], rel=1e-5)
    assert cell(run, "CLIP-T", 3, 1) == pytest.approx(hand["text"], rel=1e-5)
    assert cell(run, "CLIP", 3, 1) == pytest.approx((hand["clip"] + hand["text"]) / 2, rel=1e-5)
    assert cell(run, "DINO", 3, 1) == pytest.approx((hand["dino"] + hand["text"]) / 2, rel=1e-5)
    row = next(r for r in common.read_csv(run / "quality.csv") if r["task"] == "1")
    assert row["reference_images"] == "4" and row["sampler_steps"] == "5" and row["generated"] == "6"
    # two concepts in one prompt: this and the next of the stream, the smaller of the two
    for task, (one, other) in enumerate(((2, 0), (0, 1), (1, 2)), 1):
        text = f"photo of a {learner.noun(one)} and a {learner.noun(other)}"
        features = dino.images(learner.sample([text] * 4, common.sampling_seeds((0, one, other, "pair"), 4)))
        both = [100 * np.mean([cosine(a, b) for a in features for b in dino.images(data.images[data.labels == c])])
                for c in (one, other)]  # fmt: skip
        assert cell(run, "pair DINO", 3, task) == pytest.approx(min(both), rel=1e-5) != pytest.approx(max(both))


def test_summary_tables_and_figures(concept_run, evaluate, tmp_path):
    ncl, ensemble = concept_run(), concept_run("ensemble")
    rows, shown = evaluate("--paper")
    found = {(r["variant"], r["metric"]): r for r in rows}
    assert {m for _, m in found} == {*alignment.METRICS, "pair DINO"} and ("ensemble", "pair DINO") not in found
    assert "pair DINO" not in {r["metric"] for r in common.read_csv(ensemble / "quality.csv")}  # no model has both
    forgets = found["ncl", "DINO-I"]  # the older, the fainter
    m = {(t, i): cell(ncl, "DINO-I", t, i) for t in (1, 2, 3) for i in range(1, t + 1)}
    assert float(forgets["FR"]) == pytest.approx(((m[1, 1] - m[3, 1]) + (m[2, 2] - m[3, 2])) / 2, rel=1e-3)
    assert float(forgets["FR"]) > 0 and float(found["ensemble", "DINO-I"]["FR"]) == 0
    pair = found["ncl", "pair DINO"]
    assert pair["AIQ"] == pair["FR"] == "" and float(pair["AFQ"]) == pytest.approx(
        np.mean([cell(ncl, "pair DINO", 3, i) for i in (1, 2, 3)]), rel=1e-4
    )
    assert "pair DINO" in (tmp_path / "results" / "table_AFQ.md").read_text()
    assert "pair DINO" not in (tmp_path / "results" / "table_FR.md").read_text()
    assert "dreambooth, DINO (clip-" in shown and "larger is better" in shown
    # what this learner draws for the plain class does not change: drift is that of an untouched model
    for metric in ("drift DINO", "drift CLIP-I"):
        values = [r["value"] for r in common.read_csv(ncl / "quality.csv") if r["metric"] == metric]
        assert values == ["100"] * 6
    for name in ("AQ_things_dreambooth", "quality_matrix_things_dreambooth", "samples_things_dreambooth",
                 "concepts_things_dreambooth_ncl", "concepts_things_dreambooth_ensemble"):  # fmt: skip
        assert (tmp_path / "results" / f"{name}.png").stat().st_size > 0
    shown = {p.name.split("_n")[0] for p in ncl.glob("*.png")}
    assert shown == {"final_task1", "final_task2", "final_task3", "after1_task1", "after2_task1", "after2_task2"}
    protocol = dict(zip(tables.PROTOCOL, ("x", "6", "train", "5", "0"), strict=True))
    with Image.open(ncl / figures.picture_name(1, protocol, 2)) as image:
        assert image.size == (5 * 33 - 1, 32)
        last = np.asarray(image)[:, 4 * 33 :].transpose(2, 0, 1)
    assert np.array_equal(last, concept_run.data.images[concept_run.data.labels == 2][0])  # beside samples, a real one
    assert {p.name.split("_n")[0] for p in ensemble.glob("*.png")} == {"final_task1", "final_task2", "final_task3"}


def test_drift_is_less_than_100_once_the_class_changes(concept_run, evaluate, monkeypatch, judges):
    run = concept_run()
    sample = Learner.sample
    monkeypatch.setattr(Learner, "noun", lambda self, c: self.concepts[c].category)  # "photo of a cat" changes too
    evaluate()
    learner = Learner(None, concept_run.data, "cpu")
    seeds = common.sampling_seeds((0, "photo of a cat", "drift"), 4)
    before = sample(learner, ["photo of a cat"] * 4, seeds)
    learner.load(run / "task3")
    after = sample(learner, ["photo of a cat"] * 4, seeds)
    for net, metric in zip(judges, ("drift CLIP-I", "drift DINO"), strict=True):
        pairs = [cosine(a, b) for a, b in zip(net.images(before), net.images(after), strict=True)]
        assert cell(run, metric, 3, 1) == pytest.approx(100 * np.mean(pairs), rel=1e-5)
        assert cell(run, metric, 3, 1) < 99.99


def test_twice_the_same_and_other_seeds_others(concept_run, evaluate, monkeypatch, tmp_path):
    run = concept_run()
    first, _ = evaluate()
    rows = common.read_csv(run / "quality.csv")
    assert len(rows) == 6 * 7 + 3
    with monkeypatch.context() as patch:
        patch.setattr(em, "score", None)  # nothing is sampled again
        assert evaluate()[0] == first
    (run / "quality.csv").unlink()
    texts = [text for call in Learner.calls for text in call]
    Learner.calls.clear()
    assert evaluate()[0] == first and common.read_csv(run / "quality.csv") == rows
    again = [text for call in Learner.calls for text in call]
    assert len(texts) - len(again) == 3 * 4  # what the initial model draws, four a class, was kept
    shutil.rmtree(tmp_path / "data" / "features")
    (run / "quality.csv").unlink()
    assert evaluate()[0] == first
    evaluate("--sampling_seed", "7")
    other = [r for r in common.read_csv(run / "quality.csv") if r["sampling_seed"] == "7"]
    pairs = [(a["value"], b["value"]) for a, b in zip(rows, other, strict=True) if a["metric"] == "DINO-I"]
    assert len(pairs) == 6 and all(a != b for a, b in pairs)
    assert {r["value"] for r in other if r["metric"] == "drift DINO"} == {"100"}  # against its own noise


def test_a_stopped_evaluation_goes_on(concept_run, evaluate, monkeypatch):
    run = concept_run()
    evaluate()
    whole = (run / "quality.csv").read_bytes()
    (run / "quality.csv").unlink()
    drift, calls = alignment.Alignment.drift, []

    def stop(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return drift(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(alignment.Alignment, "drift", stop)
        evaluate()
    assert len(common.read_csv(run / "quality.csv")) == 2 * 7  # two cells, whole
    evaluate()
    assert (run / "quality.csv").read_bytes() == whole


def test_other_judges_never_meet(concept_run, evaluate, tmp_path):
    run = concept_run()
    evaluate()
    rows, _ = evaluate("--dino", str(write_dino(tmp_path / "judge" / "dino", seed=5)))
    assert len({r["extractor"] for r in rows}) == 2 and len(rows) == 2 * 8
    assert len({tables.feature_kind(r["extractor"]) for r in rows}) == 2 and run


def test_missing_judges_are_said_before_anything_is_sampled(concept_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    run = concept_run()
    with pytest.raises(common.UserError, match=r"could not be scored.*hf download openai/clip") as end:
        em.main([str(tmp_path / "runs"), "--out", str(tmp_path / "results"), "--data", str(tmp_path / "data")])
    assert end.value.code == 2 and not Learner.calls
    assert not (tmp_path / "results").exists() and not (run / "quality.csv").exists()


def test_the_real_learner(concept_run, evaluate, tmp_path, monkeypatch):
    """On a random model of the real architecture: what does not learn does not drift, and what learns does."""
    monkeypatch.delitem(sys.modules, "train_concepts")
    import train_concepts

    small_model.write(tmp_path / "model")
    runs = {}
    for base, lr in (("custom_diffusion", "1e-30"), ("dreambooth", "1e-2")):
        args = train_concepts.parse_args([
            "--dataset", str(tmp_path / "things"), "--model", str(tmp_path / "model"), "--base", base, "--lr", lr,
            "--steps", "2", "--prior_weight", "0", "--sampling_steps", "2", "--out", str(tmp_path / "runs"), "--data",
            str(tmp_path / "data")])  # fmt: skip
        train_concepts.train(args)
        runs[base] = runfolder.run_folder(args, base)
    rows, _ = evaluate()
    assert {(r["backbone"], r["tasks"], r["sampler_steps"]) for r in rows} == {(base, "3", "2") for base in runs}
    for metric in ("drift DINO", "drift CLIP-I"):
        assert [cell(runs["custom_diffusion"], metric, t, i) for t in (1, 2, 3) for i in range(1, t + 1)] == [100] * 6
        assert max(cell(runs["dreambooth"], metric, t, 1) for t in (1, 2, 3)) < 100
    assert len(list((tmp_path / "data" / "features").glob("*-initial/*/dino.npy"))) == 3  # shared by both
    assert evaluate()[0] == rows


# ------------------------------------------------------------------------------------- the paper's numbers


def scored(**changes):
    flags = {"method": "ncl", "model": "CompVis/stable-diffusion-v1-4", "guidance": 6.0, "sampling_steps": 50}
    flags |= changes.pop("flags", {})
    config = {"flags": flags, "data": {"name": changes.get("dataset", "objects")}, "tasks": [[c] for c in range(5)]}
    config["backbone"] = changes.get("backbone", "dreambooth")
    made = {"config": config, "dataset": config["data"]["name"], "backbone": config["backbone"], "variant": "ncl"}
    made |= {"extractor": "clip-vit-base-patch32+dino-vits16", "generated": "1000", "reference": "train"}
    made |= {"sampler_steps": "50", "sampling_seed": "0", "method": flags["method"], "metric": "DINO"}
    return made | {"AFQ": 70.0, "AIQ": 71.0, "FR": 1.0} | changes


def test_the_papers_numbers_of_concepts(tmp_path):
    paper = tables.read_paper()
    ensemble = dict(variant="ensemble", flags={"method": "ensemble"})
    texts = tables.write_tables([scored(), scored(**ensemble), scored(metric="CLIP")], tmp_path, paper)
    assert "| ncl | 70.00 (1) | 70.81 ± 0.72 |" in texts["AFQ"] and "| 78.54 ± 0.53 |" in texts["AFQ"]
    assert "| ncl | 71.00 (1) | 73.66 |" in texts["AIQ"] and "| ncl | 1.00 (1) | 2.5382 |" in texts["FR"]
    assert "| ensemble | 71.00 (1) | 0 †1 |" in texts["AIQ"] and "it was not computed" in texts["AIQ"]
    texts = tables.write_tables([scored(backbone="custom_diffusion")], tmp_path, paper)
    assert "| 67.43 ± 0.71 |" in texts["AFQ"]
    for other in (scored(extractor="clip-1234+dino-5678"), scored(metric="CLIP-I"), scored(metric="drift DINO")):
        assert "paper |" not in tables.write_tables([other], tmp_path, paper)["AFQ"]
    for other in ({"flags": {"model": "tiny"}}, {"dataset": "toys"}):  # another world than the paper's
        assert "70.81" not in tables.write_tables([scored(**other)], tmp_path, paper)["AFQ"]
    assert "70.81" not in tables.write_tables([scored(sampler_steps="25")], tmp_path, paper)["AFQ"]


def test_the_papers_costs_of_concepts():
    row = tables.paper_costs(scored()["config"], tables.read_paper())
    assert row["paper_parameters_millions"] == "1066.23"  # 1016.84 · 2²⁰
    assert row["paper_trained_millions"] == "982.58" and row["paper_hours"] == "0.45"  # 26.76 minutes
    assert not any(value for key, value in row.items() if key.endswith("doubt"))
