"""The diffusion script: sizes, sampler, the promises of the training loop, and every way to be stopped."""

import argparse
import copy
import csv
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, assert_same_run, same, stopped, weights
from test_methods import METHODS

import common
import runfolder
import streams
import train_ddim


@pytest.fixture
def learner(cache):
    args = train_ddim.parse_args([*SMALL, "--ddim_steps", "10"])
    return train_ddim.DDIM(args, streams.load_data(streams.scenario(args.dataset), 8, cache), "cpu")


# --------------------------------------------------------------------------------------- network, sampler


@pytest.mark.parametrize(
    "preset, classes, count",
    [("S", 10, 37_196_291), ("M", 1000, 86_523_011), ("L", 200, 85_507_715), ("L", 196, 85_505_667),
     ("L", 100, 85_456_515), ("tiny", 10, 653_475)],
)  # fmt: skip
def test_parameter_counts(preset, classes, count):
    with torch.device("meta"):
        net = train_ddim.build_unet(argparse.Namespace(**train_ddim.PRESETS[preset], classes=classes))
    assert sum(p.numel() for p in net.parameters()) == count


def test_each_step_goes_to_the_next_time_and_the_last_to_the_data(learner, monkeypatch):
    """With a denoiser that knows x0, DDIM lands on x0, whatever the number of steps."""
    x0 = torch.rand(2, 3, 8, 8) * 2 - 1
    alphas, times = learner.scheduler.alphas_cumprod, []

    def knows(noisy, t, labels):
        times.append(int(t))
        return (noisy - alphas[t].sqrt() * x0) / (1 - alphas[t]).sqrt()

    monkeypatch.setattr(learner, "predict", knows)
    assert torch.allclose(learner.denoise(torch.randn(2, 3, 8, 8), None), x0, atol=1e-4)
    assert times == list(range(900, -1, -100))


def test_loss_is_the_mean_square_error_of_the_noise(learner, monkeypatch):
    batch = learner.draw(learner.data.images[:4], learner.data.labels[:4], (1, 1, 0))
    noisy = []
    monkeypatch.setattr(learner, "predict", lambda x, t, y: noisy.append(x) or torch.zeros_like(x))
    assert torch.isclose(learner.loss(learner.phases(0)[0], batch), batch["noise"].square().mean())
    a = learner.scheduler.alphas_cumprod[batch["timesteps"]][:, None, None, None]
    assert torch.allclose(noisy[0], a.sqrt() * batch["images"] + (1 - a).sqrt() * batch["noise"], atol=1e-6)
    assert batch["images"].min() == -1 and batch["images"].max() == 1 and batch["images"].shape == (4, 3, 8, 8)


def test_an_image_depends_on_its_seed_and_class_alone(learner):
    seeds, labels = common.sampling_seeds((0,), 8), [0, 1, 2, 3] * 2
    learner.unet.eval()
    x = common.sampling_noise(seeds, (3, 8, 8))
    with torch.no_grad():
        whole = learner.denoise(x, torch.tensor(labels))
        alone = torch.cat([learner.denoise(x[k : k + 1], torch.tensor(labels[k : k + 1])) for k in range(8)])
    assert (whole - alone).abs().max() < 1e-4
    learner.sample_batch = 3
    some = learner.sample(labels[5:], seeds[5:])
    learner.sample_batch = 8
    assert (learner.sample(labels, seeds)[5:].int() - some.int()).abs().max() <= 1


def test_class_labels_matter_and_are_checked(learner):
    seeds = common.sampling_seeds((0,), 1)
    assert not torch.equal(learner.sample([0], seeds), learner.sample([1], seeds))
    with pytest.raises(ValueError, match="class 4 is not one of the 4 classes"):
        learner.sample([4], seeds)


def test_sampling_leaves_mode_weights_and_training_noise_alone(learner):
    learner.unet.train()
    before, state = {k: v.clone() for k, v in learner.unet.state_dict().items()}, torch.get_rng_state()
    learner.sample([0], [1])
    assert torch.equal(state, torch.get_rng_state())
    assert learner.unet.training and same(before, learner.unet.state_dict())
    assert torch.equal(learner.sample([2], [7]), learner.sample([2], [7]))  # dropout is off


def test_frozen_copy_and_fresh(learner):
    start = {k: v.clone() for k, v in learner.unet.state_dict().items()}
    teacher = learner.frozen_copy()
    with torch.no_grad():
        for p in learner.unet.parameters():
            p.add_(1)
    assert same(start, teacher.unet.state_dict()) and not teacher.unet.training
    assert not any(p.requires_grad for p in teacher.unet.parameters()) and teacher.nets["unet"] is teacher.unet
    learner.fresh(learner.args.seed)
    assert same(start, learner.unet.state_dict())
    learner.fresh(2)
    assert not same(start, learner.unet.state_dict())
    ((name, dimension),) = learner.class_rows().items()
    assert learner.params(learner.phases(0)[0])[name].shape[dimension] == 4


def test_learning_rate():
    rates = [train_ddim.learning_rate(s, 4000, 2e-4) for s in range(4000)]
    assert rates[0] == 2e-4 / 500 and np.isclose(rates[499], 2e-4) and rates[500] == 2e-4
    assert rates[2250] == pytest.approx(1e-4) and rates[-1] < 1e-9
    assert max(train_ddim.learning_rate(s, 4, 1.0) for s in range(4)) == 1.0
    assert train_ddim.learning_rate(0, 1, 1.0) == 1.0


# ------------------------------------------------------------------------------------------ training loop


def test_twice_the_same(train):
    assert_same_run(train("a", "--method", "er"), train("b", "--method", "er"))


def test_another_seed_or_order_is_another_run(train):
    first = weights(train("a"), 1)
    assert not same(first, weights(train("a", "--seed", "2"), 1))
    assert not same(first, weights(train("a", "--order", "2"), 1))


def test_er_replays_the_past_and_remembers_it(train, monkeypatch):
    batches, loss = [], train_ddim.DDIM.loss
    monkeypatch.setattr(
        train_ddim.DDIM, "loss", lambda self, phase, batch: batches.append(dict(batch)) or loss(self, phase, batch)
    )
    train("spied", "--method", "er")
    assert all(len(batch["labels"]) == 8 for batch in batches[:6])  # nothing is replayed on task 1
    for batch in batches[6:]:
        labels, times = batch["labels"], batch["timesteps"]
        assert len(labels) == 8 + 4 and set(labels[:8].tolist()) <= {2, 3} and set(labels[8:].tolist()) <= {0, 1}
        assert not torch.equal(times[:4], times[8:])  # replayed rows have randomness of their own
    monkeypatch.undo()
    state = common.load_tensors(train("a", "--method", "er") / "task1" / "method.pt")
    assert state["images"].shape == (5, 3, 8, 8) and set(state["labels"].tolist()) <= {0, 1} and state["seen"] == 360


def test_noncl_trains_longer_on_the_pool(train, monkeypatch):
    drawn, draw = [], train_ddim.DDIM.draw
    monkeypatch.setattr(
        train_ddim.DDIM, "draw", lambda self, x, labels, key: drawn.append((key, labels)) or draw(self, x, labels, key)
    )
    rows = common.read_csv(train("a", "--method", "noncl") / "log.csv")
    assert [r["step"] for r in rows if r["task"] == "2"][-1] == "12"
    seen = [set(np.concatenate([labels for key, labels in drawn if key[1] == task]).tolist()) for task in (1, 2)]
    assert seen == [{0, 1}, {0, 1, 2, 3}]


@pytest.mark.parametrize("method, anew", [("ncl", False), ("er", False), ("noncl", True), ("ensemble", True)])
def test_who_starts_from_scratch_and_dropout_is_new_each_step(train, monkeypatch, method, anew):
    starts, masks, loss = [], [], train_ddim.DDIM.loss

    def spy(self, phase, batch):
        starts.append({k: v.clone() for k, v in self.unet.state_dict().items()})
        masks.append(torch.get_rng_state())
        return loss(self, phase, batch)

    monkeypatch.setattr(train_ddim.DDIM, "loss", spy)
    train("a", "--method", method)
    assert same(starts[0], starts[6]) == anew
    assert len({bytes(m.numpy()) for m in masks}) == len(masks)


def test_gradients_are_clipped_and_the_schedule_is_followed(train, monkeypatch):
    norms, rates, step = [], [], torch.optim.Adam.step

    def spy(self, *rest):
        grads = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.stack(grads).norm().item())
        rates.append(self.param_groups[0]["lr"])
        return step(self, *rest)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    rows = common.read_csv(train("a", "--steps", "20") / "log.csv")
    assert float(rows[0]["gradient_norm"]) > 1 and float(rows[0]["clipped"]) > 0  # before clipping
    assert max(norms) == pytest.approx(1, abs=1e-3)
    assert rates == [train_ddim.learning_rate(s, 20, 3e-3) for s in range(20)] * 2  # anew in each task


def test_ensemble_samples_task_1_from_its_own_network(train, cache):
    """The saved folders give what the network gave when it had just learnt task 1, bit for bit."""
    run = train("a", "--method", "ensemble")
    args = train_ddim.parse_args([*SMALL, "--method", "ensemble"])
    learner = train_ddim.DDIM(args, streams.load_data(streams.scenario(args.dataset), 8, cache), "cpu")
    method = runfolder.method_class("ensemble")(args, learner)
    seeds, images = common.sampling_seeds((0,), 4), []
    learner.load(run / "task1")
    images.append(learner.sample([0, 1, 0, 1], seeds))
    for trained_to, task in ((1, 1), (2, 1), (2, 2)):
        method.load(run, trained_to, task)
        images.append(learner.sample([0, 1, 0, 1], seeds))
    assert torch.equal(images[0], images[1]) and torch.equal(images[0], images[2])
    assert not torch.equal(images[0], images[3])


def test_scoring_between_steps_changes_nothing(train, monkeypatch):
    """The weights after the last step are the same with and without selection."""
    last = weights(train("a"), 1)
    seen = []
    load = runfolder.load_trained
    monkeypatch.setattr(
        runfolder,
        "load_trained",
        lambda modules, states: seen.append(copy.deepcopy(runfolder.trained_state(modules))) or load(modules, states),
    )
    train("a", "--select", "best")
    assert same(last, seen[0]["unet"])


def test_best_checkpoint_is_the_one_with_the_lowest_score(train, monkeypatch):
    scores = []
    distance = train_ddim.fid.frechet_distance
    monkeypatch.setattr(train_ddim.fid, "frechet_distance", lambda *a: scores.append(distance(*a)) or scores[-1])
    run = train("a", "--select", "best", "--lr", "0.02")
    assert len(scores) == 6
    for task in (1, 2):
        about, some = common.read_json(run / f"task{task}" / "cost.json"), scores[3 * task - 3 : 3 * task]
        assert about["selection_score"] == min(some) and about["kept_step"] == 2 * some.index(min(some)) + 2


def test_weights_that_are_not_finite_are_not_kept(train, monkeypatch, tmp_path):
    """The last update may break them after the last loss was taken."""
    steps = []

    def spoil(self, phase):
        steps.append(phase)
        if len(steps) == 6:
            next(self.learner.unet.parameters()).data.fill_(float("nan"))

    monkeypatch.setattr(runfolder.method_class("ncl"), "after_step", spoil)
    with pytest.raises(common.UserError, match="weights after task 1 are not finite") as end:
        train("a")
    assert end.value.code == 1 and not list(tmp_path.glob("a/*/*/*/*/task1*"))


def test_a_run_folder_says_what_made_it(train):
    run = train("a", "--method", "er")
    config = common.read_json(run / "config.json")
    assert config["flags"]["replay_size"] == 4 and config["isolated"] is False and config["threads"] >= 1
    assert set(config["code"]) == {"train_ddim.py", "common.py", "fid.py", "readers.py", "runfolder.py", "streams.py",
                                   "methods/er.py", "methods/ncl.py", "methods/_shared.py"}  # fmt: skip
    assert config["tasks"] == [[0, 1], [2, 3]] and config["scheduler"]["num_train_timesteps"] == 1000
    assert (run / "task2" / "samples.png").exists() and not (run / "resume").exists()
    cost = common.read_json(run / "task2" / "cost.json")
    net = config["parameters"]
    assert cost["parameters_trained"] == net and cost["parameters_stored"] == net + 5 * 3 * 8 * 8
    assert cost["seconds"].keys() == {"train", "replay", "importance", "selection"} and cost["peak_memory_bytes"] > 0
    ensemble = common.read_json(train("a", "--method", "ensemble") / "task2" / "cost.json")
    assert ensemble["parameters_stored"] == 2 * net
    with open(run / "log.csv") as file:
        assert next(csv.reader(file)) == ["task", "step", "loss_main", "penalty", "gradient_norm", "clipped", "lr",
                                          "seconds", "images_per_second"]  # fmt: skip


def test_bf16_trains(train):
    rows = common.read_csv(train("a", "--precision", "bf16") / "log.csv")
    exact = common.read_csv(train("a") / "log.csv")
    assert 0 < abs(float(rows[0]["loss_main"]) - float(exact[0]["loss_main"])) < 0.05
    assert weights(train("a", "--precision", "bf16"), 1)["conv_in.weight"].dtype == torch.float32


def test_a_copied_method_file_is_a_method(train):
    copy = ROOT / "methods" / "copied_for_a_test.py"
    copy.write_text((ROOT / "methods" / "er.py").read_text())
    try:
        assert_same_run(train("a", "--method", "er"), train("a", "--method", "copied_for_a_test"))
    finally:
        copy.unlink()


def test_which_flags_make_another_run():
    def name(*flags):
        return runfolder.run_folder(train_ddim.parse_args([*SMALL, *flags]), "ddim").name

    plain = name()
    for flags in (["--device", "cpu"], ["--inception_weights", "x"], ["--save_every", "7"], ["--data", "x"],
                 ["--val_samples", "9"], ["--eval_every", "3"], ["--lr", "3e-3"], ["--tasks", "2"]):  # fmt: skip
        assert name(*flags) == plain, flags
    others = [["--lr", "1e-3"], ["--steps", "7"], ["--batch_size", "9"], ["--precision", "bf16"],
              ["--select", "best"], ["--ddim_steps", "4"], ["--memory_size", "6"], ["--replay_size", "3"],
              ["--tasks", "4"], ["--dataset", "digits:4-7"], ["--select", "best", "--eval_every", "3"],
              ["--select", "best", "--val_samples", "9"]]  # fmt: skip
    assert len({plain, *(name(*flags) for flags in others)}) == 1 + len(others)
    assert name("--order", "2", "--seed", "5") == plain.replace("order1-seed1", "order2-seed5")


# ------------------------------------------------------------------------------------------ stop, resume


@pytest.mark.parametrize("select", ["last", "best"])
@pytest.mark.parametrize("method", METHODS)
def test_stopped_anywhere_and_resumed_is_unbroken(train, monkeypatch, tmp_path, method, select):
    flags = ["--method", method, "--select", select, "--save_every", "2"]
    unbroken = train("unbroken", *flags)
    loss, save, grid = (train_ddim.DDIM, "loss"), (runfolder, "save_tensors"), (runfolder, "picture_grid")
    cases = [(loss, 4), (loss, 9), (save, 3), (grid, 1), (grid, 2)]  # grid: after end_task, before its state is kept
    if method in ("ncl", "er"):
        cases += [(loss, n) for n in (1, 2, 6, 7, 11)] + [(save, 1), (save, 4)]
    for where, nth in cases:
        run = stopped(train, monkeypatch, where, nth, *flags)
        assert_same_run(unbroken, run)
        assert not (run / "resume").exists() and not list(run.glob("*.tmp"))
        run.rename(tmp_path / f"{where[1]}{nth}")


def test_stopped_as_the_run_ends(train, monkeypatch):
    assert_same_run(train("unbroken"), stopped(train, monkeypatch, (runfolder, "finish"), 1))


def test_a_broken_task_folder_is_trained_again(train, capsys):
    unbroken, run = train("unbroken"), train("broken")
    (run / "DONE").unlink()
    (run / "task2" / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"cut")
    assert_same_run(unbroken, train("broken"))
    assert "task2 is broken" in capsys.readouterr().err and (run / "task2.broken").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_by_the_system(train, tmp_path, cache):
    flags = ["--method", "er", "--save_every", "1", "--steps", "30"]
    unbroken = train("unbroken", *flags)
    command = [sys.executable, str(ROOT / "train_ddim.py"), *SMALL, "--data", str(cache),
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
    final = [weights(r, t) for t in (1, 2) for r in (unbroken, run)]
    assert same(final[0], final[1]) and same(final[2], final[3])
