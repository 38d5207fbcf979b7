"""A user's mistake ends in one line that says what to do, with exit code 2, and leaves nothing behind."""

import resource
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL, Stop
from PIL import Image

import common
import runfolder
import streams
import train_ddim


def one_line(result, code, *words):
    assert result.returncode == code, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0], lines[0]


def message(capsys, argv, *words):
    """In this process, for speed: the same path as the script's."""
    with pytest.raises(SystemExit) as end, common.one_line_errors():
        train_ddim.train(train_ddim.parse_args([str(a) for a in argv]))
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and error.startswith("error: "), error
    for word in words:
        assert word in error, error


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--dataset", "nonsense"], ["nonsense", "digits"]),
        (["--dataset", "digits:3-12"], ["3-12", "0-9"]),
        (["--dataset", "digits:7-3"], ["7-3"]),
        (["--method", "nonsense"], ["nonsense", "ncl, noncl"]),
        (["--method", "../er"], ["../er"]),
        (["--order", "0"], ["order", "between 1 and 5"]),
        (["--order", "6"], ["order", "between 1 and 5"]),
        (["--tasks", "11"], ["--tasks 11", "10 classes"]),
        (["--tasks", "3"], ["--tasks 3", "does not divide"]),
        (["--preset", "XL"], ["XL", "tiny, S, M, L"]),
        (["--method", "ewc", "--ewc_weight", "-1"], ["ewc_weight", "at least 0"]),
        (["--method", "l2", "--l2_weight", "nan"], ["l2_weight", "at least 0 and at most 1e30"]),
        (["--method", "ewc", "--ewc_weight", "1e300"], ["ewc_weight", "at most 1e30"]),
        (["--method", "si", "--si_damping", "0"], ["si_damping", "above 0"]),
        (["--method", "mas", "--importance_samples", "0"], ["importance_samples", "between 1 and"]),
        (["--method", "kd", "--kd_labels", "old"], ["kd_labels", "current", "past"]),
        (["--method", "clora", "--clora_rank", "0"], ["clora_rank", "between 1 and"]),
        (["--method", "ncl", "--ewc_weight", "1"], ["unrecognized", "ewc_weight"]),
        (["--lr", "0"], ["lr", "above 0"]),
        (["--lr", "inf"], ["lr", "finite"]),
        (["--dataset", ""], ["--dataset is empty"]),
        (["--val_samples", "99999999999999"], ["val_samples", "between 2 and"]),
        (["--out", __file__], ["--out", "is a file"]),
        (["--steps", "ten"], ["steps", "ten"]),
        (["--ddim_steps", "1001"], ["ddim_steps", "divisor of 1000"]),
        (["--ddim_steps", "600"], ["ddim_steps", "divisor of 1000"]),
        (["--method", "__init__"], ["__init__"]),
        (["--device", "abacus"], ["abacus", "cpu, cuda"]),
        (["--stepz", "3"], ["--stepz"]),
        (["--meth", "er"], ["--meth"]),
    ],
)
def test_flags(tmp_path, capsys, flags, words):
    out = tmp_path / "runs"
    message(capsys, ["--out", out, "--data", tmp_path / "data", *flags], *words)
    assert not list(tmp_path.iterdir())


def folder_of(path, *classes):
    for c in classes:
        (path / c).mkdir(parents=True)
        for k in range(3):
            Image.new("RGB", (8, 8), (k, 0, 0)).save(path / c / f"{k}.png")
    return path


def test_picture_folders(tmp_path, capsys):
    out = ["--out", tmp_path / "runs", "--data", tmp_path / "data", "--dataset"]
    (tmp_path / "empty").mkdir()
    message(capsys, [*out, tmp_path / "missing"], "missing")
    message(capsys, [*out, tmp_path / "empty"], "empty", "sub-folder")
    pictures = folder_of(tmp_path / "pictures", "a", "b")
    (pictures / "c").mkdir()
    message(capsys, [*out, pictures], str(pictures / "c"), "no picture")
    (pictures / "c").rmdir()
    content = (pictures / "b" / "1.png").read_bytes()
    (pictures / "b" / "1.png").write_bytes(content[: len(content) // 2])
    message(capsys, [*out, pictures], str(pictures / "b" / "1.png"))
    assert not (tmp_path / "runs").exists() and not list((tmp_path / "data").rglob("*.npy"))


def test_changed_pictures_do_not_go_on_in_the_old_run(tmp_path, capsys, monkeypatch):
    pictures = folder_of(tmp_path / "pictures", "a", "b")
    flags = ["--out", str(tmp_path / "runs"), "--data", str(tmp_path), "--dataset", str(pictures), "--steps", "2",
             "--ddim_steps", "1"]  # fmt: skip
    monkeypatch.setattr(runfolder, "finish", lambda run: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        train_ddim.train(train_ddim.parse_args(flags))
    capsys.readouterr()
    Image.new("RGB", (8, 8)).save(pictures / "a" / "new.png")
    streams.class_folders.cache_clear()  # as in a new process
    message(capsys, flags, "changed since")


def test_scripts_answer_in_one_line(script, tmp_path):
    one_line(script("train_ddim.py", "--dataset", "nonsense"), 2, "nonsense")
    one_line(script("train_ddim.py", "--order", "6"), 2, "between 1 and 5")
    one_line(script("eval_metrics.py", "nowhere"), 2, "nowhere")
    (tmp_path / "empty").mkdir()
    one_line(script("eval_metrics.py", "empty"), 2, "empty", "train first")
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


def test_a_loss_that_is_not_finite(script, tmp_path):
    result = script("train_ddim.py", *SMALL, "--lr", "1e30")
    one_line(result, 1, "loss_main of task 1 is", "at step", "--lr")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_folder_in_use(train, script, tmp_path):
    args = train_ddim.parse_args(SMALL)
    with common.locked(tmp_path / runfolder.run_folder(args, "ddim")):
        one_line(script("train_ddim.py", *SMALL), 2, "in use by another process")


def test_a_full_disk_loses_nothing(train, tmp_path, cache, monkeypatch):
    """A limit on the size of a file in the child stands for a full disk."""
    unbroken = train("unbroken")
    with monkeypatch.context() as patch:
        patch.setattr(runfolder, "finish", lambda run: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            train("full")
    run = tmp_path / "full" / unbroken.relative_to(tmp_path / "unbroken")
    (run / "task2").rename(tmp_path / "away")
    for flags in ([], ["--save_every", "2"]):  # the weights of the task; the state inside it
        command = [sys.executable, str(ROOT / "train_ddim.py"), *SMALL, "--data", str(cache), "--out",
                   str(tmp_path / "full"), *flags]  # fmt: skip
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)),
        )
        one_line(result, 1, "cannot write", "intact")
        assert common.is_sound(run / "task1") and not list(run.glob("*.tmp"))
        assert sorted(p.name for p in run.glob("task*")) == ["task1"]
    train("full")
    assert runfolder.checkpoint_hash(run / "task2") == runfolder.checkpoint_hash(unbroken / "task2")
