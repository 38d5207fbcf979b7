"""The small world: its pictures, words and concepts, and that what is trained of it is the same to the bit."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, Stop, same
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file
from transformers import AutoImageProcessor, CLIPModel, ViTModel

import common
import tiny_world

RECIPE = dict(version=0, pictures=192, clip_steps=6, vae_steps=6, model_steps=6, dino_steps=6, save_every=2)
PARTS = ("clip", "vae", "dino", "model")


def trained(folder, parts=PARTS):
    for part in parts:
        tiny_world.train_part(part, folder, RECIPE)
    return folder


def weights(folder):
    files = [*folder.glob("*/*.safetensors"), *folder.glob("model/*/*.safetensors")]
    return {f"{file.relative_to(folder)}/{k}": v for file in files for k, v in load_file(file).items()}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("world"))


def test_a_picture_depends_on_its_key_alone():
    first, facts = tiny_world.picture("train", 5)
    tiny_world.picture("train", 6)
    again, same_facts = tiny_world.picture("train", 5)
    assert np.array_equal(first, again) and facts == same_facts and first.shape == (3, 32, 32)
    assert not np.array_equal(first, tiny_world.picture("test", 5)[0])


def test_the_world_never_shows_a_concept():
    seen = {(f.shape, f.pattern, f.colours) for _, f in (tiny_world.picture("train", k) for k in range(600))}
    assert not seen & tiny_world.known() and len(tiny_world.known()) == 20
    assert {shape for shape, _, _ in seen} == {*tiny_world.SHAPES}  # but all their categories


def test_concepts_are_five_pictures_each_and_share_no_category():
    toys, more = (tiny_world.concept_pictures(scenario) for scenario in ("toys", "more_toys"))
    for images, labels, names, categories in (toys, more):
        assert images.shape == (25, 3, 32, 32) and labels.tolist() == [k for k in range(5) for _ in range(5)]
        assert len({*names}) == 5 and {*categories} <= {*tiny_world.SHAPES}
        assert len({picture.tobytes() for picture in images}) == 25
    assert not {*toys[3]} & {*more[3]} and len({*toys[3], *more[3]}) == 10
    with pytest.raises(common.UserError, match="unknown scenario"):
        tiny_world.concept_pictures("nothing")


def test_every_word_of_world_and_prompts_is_one_token():
    tokenizer = tiny_world.build_tokenizer()
    for word in tiny_world.vocabulary():
        assert len(tokenizer(word, add_special_tokens=False).input_ids) == 1, word
    prompts = json.loads((ROOT / "reference" / "prompts.json").read_text())["tiny"]
    words = {word for prompt in prompts for word in prompt.replace("{}", "").split()}
    assert len({*prompts}) == 20 and words <= {*tiny_world.vocabulary()}
    rng = np.random.default_rng(0)
    said = [tiny_world.caption(tiny_world.picture("train", k)[1], (True, True, True), rng) for k in range(200)]
    known = {*tiny_world.vocabulary()} - {*tiny_world.RARE_WORDS}
    assert {word for text in said for word in text.split()} <= known  # the rare words are never said
    assert {"sks", "phol", "oxi", "mth", "nigh", "ktn", "pll", "ucd"} == {*tiny_world.RARE_WORDS}
    assert len(tokenizer("unheard").input_ids) > 3


def test_trained_again_it_is_the_same_to_the_bit(world, tmp_path):
    """Every file, configurations too: none holds the path it was built at."""
    trained(tmp_path)
    files = [p.relative_to(world) for p in sorted(world.rglob("*")) if p.is_file()]
    assert [file for file in files if (world / file).read_bytes() != (tmp_path / file).read_bytes()] == []
    assert len(files) > 20 and len(weights(world)) > 300


@pytest.mark.parametrize("part", PARTS)
def test_stopped_it_goes_on_and_ends_the_same(world, tmp_path, monkeypatch, part):
    for needed in ("clip", "vae") if part == "model" else ():
        (tmp_path / needed).symlink_to(world / needed)
    save, calls, steps = common.save_tensors, [], []
    step = torch.optim.AdamW.step

    def stop(*args):
        calls.append(args)
        if len(calls) == 2:  # while the state of step 4 is written
            raise Stop
        return save(*args)

    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: steps.append(1) or step(self, *a))
    with monkeypatch.context() as patch:
        patch.setattr(common, "save_tensors", stop)
        with pytest.raises(Stop):
            trained(tmp_path, [part])
    assert len(steps) == 4
    trained(tmp_path, [part])
    assert len(steps) == 4 + 4  # from step 2 on
    first, again = weights(world), weights(tmp_path)
    assert any(key.startswith(part) for key in again) and all(torch.equal(again[k], first[k]) for k in again)


def test_killed_by_the_system(world, tmp_path):
    code = f"import common, tiny_world\nfrom pathlib import Path\ntiny_world.train_part('vae', Path({str(tmp_path)!r}), {RECIPE})"  # noqa: E501
    slow = "import time, torch; s = torch.optim.AdamW.step\n"
    slow += "torch.optim.AdamW.step = lambda self, *a: time.sleep(0.3) or s(self, *a)\n"
    with subprocess.Popen([sys.executable, "-c", slow + code], cwd=ROOT) as process:
        while not (tmp_path / "vae.state" / "SHA256SUMS").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "vae").exists()
    trained(tmp_path, ["vae"])
    assert same(weights(tmp_path), {k: v for k, v in weights(world).items() if k.startswith("vae")})


def test_its_folders_are_those_of_diffusers_and_transformers(world):
    pipeline = StableDiffusionPipeline.from_pretrained(world / "model", use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline("photo of a red ball", height=32, width=32, num_inference_steps=2, output_type="np").images
    assert drawn.shape == (1, 32, 32, 3) and pipeline.safety_checker is None
    clip, text = CLIPModel.from_pretrained(world / "clip"), pipeline.text_encoder.state_dict()
    own = {k.removeprefix("text_model."): v for k, v in clip.state_dict().items() if k.startswith("text_model.")}
    assert same(own, {k.removeprefix("text_model."): v for k, v in text.items()})
    images = [tiny_world.picture("train", 0)[0].transpose(1, 2, 0)]
    for kind, net in (("clip", clip), ("dino", ViTModel.from_pretrained(world / "dino", add_pooling_layer=False))):
        pixels = AutoImageProcessor.from_pretrained(world / kind)(images, return_tensors="pt").pixel_values
        assert pixels.shape == (1, 3, 32, 32) and net.config.model_type == {"clip": "clip", "dino": "vit"}[kind]
        assert torch.allclose(pixels[0], torch.tensor(images[0]).permute(2, 0, 1) / 127.5 - 1, atol=1e-5)


def test_build_trains_what_is_missing_and_nothing_else(world, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(tiny_world, "train_parts", lambda missing, folder, recipe: asked.append(missing))
    folder = tiny_world.build(tmp_path, RECIPE)
    assert asked == [[*PARTS]] and folder.parent == tmp_path / "tiny"
    for part in PARTS:
        (folder / part).symlink_to(world / part)
    assert tiny_world.build(tmp_path, RECIPE) == folder and len(asked) == 1
    assert tiny_world.build(tmp_path, RECIPE | {"version": 9}) != folder  # another recipe, another place
