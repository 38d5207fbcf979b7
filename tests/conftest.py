import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is loaded: the workers of pytest-xdist share the cores

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import common
import runfolder
import train_ddim
import train_stylegan2

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--dataset", "digits:0-3", "--tasks", "2", "--steps", "6", "--batch_size", "8", "--replay_size", "4",
         "--memory_size", "5", "--eval_every", "2", "--val_samples", "8"]  # fmt: skip
SMALL_GAN = SMALL
SMALL = [*SMALL, "--ddim_steps", "2"]


def weights(run, task):
    """{name: tensor} of all that a task folder holds: the network, or an adapter with its class rows; "G.…", "D.…"."""
    files = sorted((run / f"task{task}").rglob("*.safetensors"))
    prefix = {file: f"{file.stem}." if file.stem in ("G", "D") else "" for file in files}  # they share names
    return {prefix[file] + name: tensor for file in files for name, tensor in load_file(file).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Stop(Exception):
    """Stands for the end of a process in the middle of its work."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One --data folder for all tests: the classifiers are trained once."""
    return tmp_path_factory.mktemp("data")


def assert_same_run(a, b):
    """Weights, states of the method and log of two runs of two tasks, to the bit."""
    for task in (1, 2):
        assert same(weights(a, task), weights(b, task)), f"weights of task {task}"
        states = [common.load_tensors(run / f"task{task}" / "method.pt") for run in (a, b)]
        for key, value in states[0].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][key])), key
    timing = ("seconds", "images_per_second")
    rows = [[{k: v for k, v in r.items() if k not in timing} for r in common.read_csv(run / "log.csv")]
            for run in (a, b)]  # fmt: skip
    final = [{(r["task"], r["step"]): r for r in some} for some in rows]
    assert all(final[0][k] == final[1][k] for k in final[0].keys() & final[1].keys())
    assert final[0].keys() & {("2", "6"), ("2", "12")} and len(rows[1]) == len(final[1])


def stopped(train, monkeypatch, where, nth, *flags):
    """Starts a run that is stopped at the nth call of `where`, then starts it again → its run folder."""
    module, name = where
    original, calls = getattr(module, name), 0

    def counting(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise Stop
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, counting)
        with pytest.raises(Stop):
            train("stopped", *flags)
    return train("stopped", *flags)


def trainer(module, backbone, small, tmp_path, cache):
    """train(out, *flags): a small run of two tasks in this process → its run folder."""

    def run(out, *flags):
        if {"ewc", "mas"} & {*flags}:
            flags += ("--importance_samples", "4")
        args = module.parse_args([*small, "--out", str(tmp_path / out), "--data", str(cache), *flags])
        folder = runfolder.run_folder(args, backbone)
        if not (folder / "DONE").exists():
            module.train(args)
        return folder

    run.cache = cache
    return run


@pytest.fixture
def train(tmp_path, cache):
    return trainer(train_ddim, "ddim", SMALL, tmp_path, cache)


@pytest.fixture
def train_gan(tmp_path, cache):
    return trainer(train_stylegan2, "stylegan2", SMALL_GAN, tmp_path, cache)


@pytest.fixture
def script(tmp_path, cache):
    """script("train_ddim.py", *flags): a child process, in an empty folder → CompletedProcess."""

    def run(name, *flags, **options):
        command = [sys.executable, str(ROOT / name), *map(str, flags)]
        if name.startswith("train"):
            command += ["--data", str(cache)]
        environment = {**os.environ, **options.pop("env", {})}
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300, **options
        )

    return run


@pytest.fixture(scope="session")
def inception_file(tmp_path_factory):
    """Random weights in pytorch-fid's file format."""
    from unittest.mock import patch

    from pytorch_fid import inception

    class Found(Exception):
        pass

    def keep(module, state, *args, **kwargs):
        raise Found(module)

    torch.manual_seed(0)
    # pytorch-fid builds its network, and is about to fill it with the weights that it has downloaded
    with (
        patch.object(inception, "load_state_dict_from_url", lambda *a, **k: {}),
        patch.object(torch.nn.Module, "load_state_dict", keep),
        pytest.raises(Found) as found,
    ):
        inception.fid_inception_v3()
    net = found.value.args[0]
    for p in net.parameters():
        if p.dim() == 4:  # so that the features have the size of the pictures' numbers
            torch.nn.init.normal_(p, std=(2 / p[0].numel()) ** 0.5)
    path = tmp_path_factory.mktemp("weights") / "random.pth"
    torch.save(net.state_dict(), path)
    return path
