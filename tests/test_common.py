"""Keys, streams, batches, reservoir, pictures and files: each against what can be worked out by hand."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import common
import runfolder
import streams
from methods import _shared


def toy_data(n, classes=2):
    images = np.arange(n, dtype=np.uint8)[:, None, None, None] * np.ones((1, 3, 2, 2), np.uint8)
    return streams.Data("toy", images, np.arange(n) % classes, [str(c) for c in range(classes)], "none")


def test_keys_never_change():
    """Frozen: another value would change every published number."""
    assert common.hash32((1, 2, 3, "noise")) == 1368746796
    assert common.hash32((np.int64(1), 2, 3, "noise")) == common.hash32((1, 2, 3, "noise"))
    assert common.epoch_permutation(1, 1, 0, 6).tolist() == [3, 5, 4, 1, 0, 2]


def test_class_orders():
    digits = streams.scenario("digits")
    assert digits.order(1) == list(range(10))
    assert digits.order(2) == [3, 9, 1, 8, 0, 2, 6, 4, 5, 7]  # CLoG, table 16
    half = streams.scenario("digits:5-9")
    assert half.order(2) == [4, 3, 1, 0, 2]  # 9 8 6 5 7, numbered from 0
    assert (half.classes, half.tasks, half.name) == (5, 5, "digits_5-9")


def test_orders_of_folders_are_frozen(tmp_path):
    for c in "abcdef":
        (tmp_path / c).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / c / "1.png")
    scene = streams.scenario(str(tmp_path))
    assert scene.order(1) == [0, 1, 2, 3, 4, 5]
    assert scene.order(2) == [0, 1, 2, 5, 4, 3]
    assert all(sorted(scene.order(k)) == list(range(6)) for k in range(1, 6))
    assert scene.tasks == 6  # five tasks do not divide six classes: one class a task


def test_tasks_cover_every_image_once():
    scene = streams.scenario("digits")
    data = streams.load_data(scene, 8, "unused")
    assert data.images.shape == (1797, 3, 8, 8) and data.images.dtype == np.uint8 and data.images.max() == 255
    tasks = streams.split(data, scene.order(2), 5)
    assert [t.classes for t in tasks] == [[3, 9], [1, 8], [0, 2], [6, 4], [5, 7]]
    assert sorted(np.concatenate([t.indices for t in tasks])) == list(range(1797))
    assert all(set(data.labels[t.indices]) == set(t.classes) for t in tasks)
    part = streams.load_data(streams.scenario("digits:5-9"), 8, "unused")
    assert part.classes == ["5", "6", "7", "8", "9"] and set(part.labels) == {0, 1, 2, 3, 4}
    assert (part.images == data.images[data.labels >= 5]).all()


def test_epochs_are_laid_end_to_end():
    seen = np.concatenate([common.batch_positions(10, step, 4, 1, 1) for step in range(5)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()
    assert len(common.batch_positions(3, 7, 8, 1, 1)) == 8  # a batch larger than the task is still full
    assert common.batch_positions(10, 1, 4, 1, 2).tolist() != common.batch_positions(10, 1, 4, 1, 1).tolist()


def test_labels_in_proportion_in_every_prefix():
    labels = common.proportional_labels(np.repeat([3, 5], [30, 10]), 8)
    assert sorted(labels) == [3] * 6 + [5] * 2
    assert 5 in labels[:4] and labels[:4].count(3) == 3
    assert len(common.proportional_labels(np.repeat([0, 1, 2], [5, 5, 5]), 10)) == 10


def test_sampling_noise_of_an_image_is_its_own():
    seeds = common.sampling_seeds((0, 1, "report"), 8)
    whole = common.sampling_noise(seeds, (3, 8, 8))
    assert torch.equal(whole[5:], common.sampling_noise(seeds[5:], (3, 8, 8)))
    assert len(set(seeds)) == 8 and abs(whole.mean()) < 0.1 and abs(whole.std() - 1) < 0.1


def test_a_folder_named_like_a_range(tmp_path):
    for folder, classes in (("a:0-1", "xyz"), ("a", "pqr")):
        for c in classes:
            (tmp_path / folder / c).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / folder / c / "1.png")
    whole = streams.scenario(str(tmp_path / "a:0-1"))
    assert whole.folder == tmp_path / "a:0-1" and whole.classes == 3
    part = streams.scenario(str(tmp_path / "a:0-1") + ":1-2")
    assert part.folder == tmp_path / "a:0-1" and (part.first, part.last) == (1, 2)


def test_a_task_needs_two_pictures():
    data = toy_data(3)
    with pytest.raises(common.UserError, match=r"task 2 \(1\) has 1 picture"):
        streams.split(data, [0, 1], 2)


# ---------------------------------------------------------------------------------------------- reservoir


def test_reservoir_keeps_each_image_with_equal_probability():
    data, kept = toy_data(20), np.zeros(20)
    for trial in range(2000):
        memory = _shared.Reservoir(5, data)
        memory.add(np.arange(3), (trial, "a"))
        memory.add(np.arange(3, 12), (trial, "b"))  # fills in the middle
        resumed = _shared.Reservoir(5, data)
        resumed.load_state_dict(memory.state_dict())
        resumed.add(np.arange(12, 20), (trial, "c"))
        assert resumed.seen == 20 and len(resumed.labels) == 5
        kept[resumed.images[:, 0, 0, 0]] += 1
    assert abs(kept / 2000 - 5 / 20).max() < 4 * np.sqrt(0.25 * 0.75 / 2000)


def test_reservoir_labels_travel_and_room_is_used():
    data = toy_data(9, classes=3)
    memory = _shared.Reservoir(20, data)
    memory.add(np.array([8, 1, 3]), (0,))
    assert memory.images[:, 0, 0, 0].tolist() == [8, 1, 3] and memory.labels.tolist() == [2, 1, 0]
    memory.add(np.array([4, 5]), (1,))
    assert len(memory.labels) == 5
    images, labels = memory.draw(13, (2,))
    assert (images[:, 0, 0, 0] % 3 == labels).all()
    _, counts = np.unique(images[:, 0, 0, 0], return_counts=True)
    assert sorted(counts) == [2, 2, 3, 3, 3]  # none a third time before all were there twice


@pytest.mark.parametrize("size", [0, 4])
def test_empty_memory_draws_nothing(size):
    memory = _shared.Reservoir(size, toy_data(4))
    if size == 0:
        memory.add(np.arange(4), (0,))
    images, labels = memory.draw(8, (1,))
    assert images.shape == (0, 3, 2, 2) and len(labels) == 0


# ------------------------------------------------------------------------------------------------ pictures


@pytest.fixture
def mixed(tmp_path):
    """A picture of every kind that people keep, in two class folders, among what does not belong there."""
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
    a, b = tmp_path / "pictures" / "a", tmp_path / "pictures" / "b"
    a.mkdir(parents=True)
    b.mkdir()
    rgb.save(a / "rgb.png")
    rgb.convert("L").save(a / "gray.png")
    rgb.convert("P").save(a / "palette.png")
    rgb.convert("CMYK").save(a / "cmyk.jpg")
    rgb.convert("1").save(a / "onebit.png")
    rgb.convert("LA").save(b / "la.png")
    ramp = np.linspace(0, 65535, 1600).reshape(40, 40).astype(np.uint16)
    Image.fromarray(ramp).save(b / "gray16.png")
    rgb.save(b / "UPPER.JPEG", "JPEG")
    Image.fromarray(rng.integers(0, 256, (31, 57, 3), dtype=np.uint8)).save(b / "odd.png")
    for junk in (a / ".DS_Store", a / "Thumbs.db", b / "notes.txt"):
        junk.write_bytes(b"not a picture")
    (tmp_path / "pictures" / ".ipynb_checkpoints").mkdir()
    return tmp_path / "pictures"


def test_folder_of_every_kind_of_picture(mixed, tmp_path, capsys):
    scene = streams.scenario(str(mixed))
    data = streams.load_data(scene, 32, tmp_path)
    assert data.images.shape == (9, 3, 32, 32) and data.labels.tolist() == [0] * 5 + [1] * 4
    assert data.classes == ["a", "b"] and capsys.readouterr().err.count("2 entries") == 1
    names = sorted(p.name for p in (mixed / "b").iterdir() if p.suffix.lower() in streams.PICTURES)
    gray16 = data.images[5 + names.index("gray16.png")]
    assert abs(gray16.mean() - 127.5) < 2  # scaled, not clipped
    gray = data.images[sorted(["rgb.png", "gray.png", "palette.png", "cmyk.jpg", "onebit.png"]).index("gray.png")]
    assert (gray[0] == gray[1]).all() and (gray[0] == gray[2]).all()
    again = streams.load_data(streams.scenario(str(mixed)), 32, tmp_path)
    assert (again.images == data.images).all() and again.digest == data.digest


def test_pictures_are_turned_upright(tmp_path):
    picture = np.zeros((20, 40, 3), np.uint8)
    picture[:, :20, 0], picture[:, 20:, 2] = 255, 255
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.fromarray(picture).transpose(Image.Transpose.ROTATE_90)
    turned.save(tmp_path / "tagged.jpg", quality=100, subsampling=0, exif=exif)
    Image.fromarray(picture).save(tmp_path / "upright.png")
    tagged, upright = (streams.read_picture(tmp_path / n, 8).astype(int) for n in ("tagged.jpg", "upright.png"))
    assert abs(tagged - upright).max() <= 4
    assert upright[0, 0, 0] > 250 and upright[2, 0, -1] > 250


# --------------------------------------------------------------------------------------------------- files


def test_broken_state_is_set_aside_and_the_one_before_is_used(tmp_path, capsys):
    for step in (1, 2):
        with common.new_folder(tmp_path / "resume") as folder:
            common.save_tensors({"task": 1, "step": step, "w": torch.ones(100)}, folder / "state.pt")
    assert runfolder.resume_state(tmp_path, 1)["step"] == 2
    assert runfolder.resume_state(tmp_path, 2) is None
    state = tmp_path / "resume" / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    state.write_bytes(content)
    assert runfolder.resume_state(tmp_path, 1)["step"] == 1
    assert "resume is broken (state.pt)" in capsys.readouterr().err


def test_killed_between_the_two_renames(tmp_path):
    with common.new_folder(tmp_path / "resume") as folder:
        common.save_tensors({"task": 1, "step": 1}, folder / "state.pt")
    (tmp_path / "resume").rename(tmp_path / "resume.old")
    assert runfolder.resume_state(tmp_path, 1)["step"] == 1
    with common.new_folder(tmp_path / "resume") as folder:
        common.save_tensors({"task": 1, "step": 2}, folder / "state.pt")
    assert runfolder.resume_state(tmp_path, 1)["step"] == 2


def test_what_came_after_a_broken_task_is_set_aside_too(tmp_path):
    for name in ("task1", "task2", "task3", "resume"):
        with common.new_folder(tmp_path / name) as folder:
            (folder / "x").write_text(name)
    assert runfolder.finished_tasks(tmp_path, 4) == 3 and (tmp_path / "resume").exists()
    (tmp_path / "task2" / "SHA256SUMS").write_text("")
    assert runfolder.finished_tasks(tmp_path, 4) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["resume.broken", "task1", "task2.broken", "task3.broken"]


def test_interrupted_save_leaves_the_old_state(tmp_path):
    with common.new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("old")
    with pytest.raises(KeyboardInterrupt), common.new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("new")
        raise KeyboardInterrupt
    assert (tmp_path / "a" / "x").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_log_cuts_and_averages(tmp_path):
    log = runfolder.Log(tmp_path / "log.csv", 1, 0)
    for step in range(4):
        log.add(step, {"loss_main": torch.tensor(float(step)), "penalty": 0.0})
        if step % 2:
            log.flush(2, 0.1, 0.0)
    rows = common.read_csv(tmp_path / "log.csv")
    assert [(r["step"], r["loss_main"]) for r in rows] == [("2", "0.5"), ("4", "2.5")]
    with open(tmp_path / "log.csv", "a") as file:
        file.write("1,5,0.")  # torn by a kill
    runfolder.Log(tmp_path / "log.csv", 1, 2)
    assert [r["step"] for r in common.read_csv(tmp_path / "log.csv")] == ["2"]


@pytest.mark.parametrize(
    "content", [b"tazk,step\n1,2\n", b"task,step,images_per_second\nx,2,3\n", b"\xff\xfe,\n1,\xff\n"]
)
def test_a_damaged_log_does_not_stop_a_run(tmp_path, content, capsys):
    (tmp_path / "log.csv").write_bytes(content)
    runfolder.Log(tmp_path / "log.csv", 1, 2)
    assert (tmp_path / "log.csv.broken").read_bytes() == content and "begun anew" in capsys.readouterr().err


def test_log_names_the_step_that_is_not_finite(tmp_path):
    log = runfolder.Log(tmp_path / "log.csv", 3, 0)
    for step in range(10):
        log.add(step, {"loss_main": torch.tensor(float("nan") if step >= 6 else 1.0)})
    with pytest.raises(common.UserError, match="loss_main of task 3 is nan at step 6") as end:
        log.flush(10, 0.1, 0.0)
    assert end.value.code == 1
    log = runfolder.Log(tmp_path / "log.csv", 3, 0)  # a finite loss, but the step has spoilt the weights
    log.add(0, {"loss_main": torch.tensor(1.0), "gradient_norm": torch.tensor(float("inf"))})
    with pytest.raises(common.UserError, match="gradient_norm of task 3 is inf"):
        log.flush(10, 0.1, 0.0)


def test_class_orders_are_those_of_the_paper():
    orders = json.loads((common.ROOT / "reference" / "class_orders.json").read_text())
    assert orders["ten"][4] == [1, 5, 7, 2, 0, 3, 4, 6, 8, 9]
    for name, n in (("ten", 10), ("flowers", 102), ("imagenet", 1000), ("classes200", 200), ("objects", 5)):
        assert all(sorted(order) == list(range(n)) for order in orders[name])


def test_images_at_once():
    """The memory of sampling: 256 images at once, but few large ones on a CPU."""
    assert [common.images_at_once("cpu", side) for side in (8, 16, 32, 64, 128, 512)] == [256, 256, 64, 16, 4, 1]
    assert [common.images_at_once("cuda:1", side) for side in (64, 128)] == [256, 64]
