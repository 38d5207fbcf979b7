"""What the README says can be pasted: each of its commands, its example of a method, run_all.sh."""

import os
import re
import shlex
import subprocess
import sys

from conftest import ROOT, SMALL, SMALL_GAN
from test_methods import METHODS

import common
import runfolder
import train_concepts
import train_ddim
import train_stylegan2

SCRIPTS = {"train_ddim.py": train_ddim, "train_stylegan2.py": train_stylegan2, "train_concepts.py": train_concepts}
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)


def commands():
    lines = [line.split("#")[0].strip() for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
    return [line for line in lines if line]


def test_readme_commands_parse_and_name_what_is_there():
    """The two install-and-run commands are run by .ci/run as they stand; the others are parsed here."""
    found = commands()
    assert [c for c in found if c.startswith("pip install -r requirements.txt && ")] == [
        "pip install -r requirements.txt && bash run_all.sh",
        "pip install -r requirements.txt && python -m pytest",
    ]
    for command in found:
        words = shlex.split(command)
        module = SCRIPTS.get(words[1] if words[1:] else "")
        if module and "--help" not in words and "growing" not in words and "objects" not in words:
            assert module.parse_args(words[2:]).preset.split("-")[0] == "tiny"


def test_readme_example_is_a_method(train):
    (code,) = (block for kind, block in BLOCKS if kind == "python")
    assert len(code.splitlines()) < 15
    path = ROOT / "methods" / "growing_in_a_test.py"
    path.write_text(code)
    try:
        run, plain = train("a", "--method", path.stem), train("a", "--method", "er")
    finally:
        path.unlink()
    # with one past task it is ER
    assert runfolder.checkpoint_hash(run / "task2") == runfolder.checkpoint_hash(plain / "task2")


def test_readme_map_names_every_file():
    for path in ROOT.glob("*.py"):
        assert f"`{path.name}`" in README
    for method in METHODS:
        assert f"`{method}`" in README


def test_help_and_dry_run_write_nothing(script, tmp_path):
    for name in (*SCRIPTS, "eval_metrics.py"):
        text = script(name, "--help")
        assert text.returncode == 0 and "--device" in text.stdout
    shown = script("train_ddim.py", *SMALL, "--dry_run")
    assert shown.returncode == 0 and "task 2: classes [2, 3] (2 3), 360 images" in shown.stdout
    assert "652,707 parameters" in shown.stdout and not list(tmp_path.iterdir())


def test_every_flag_says_what_it_is():
    for script in SCRIPTS:
        text = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True).stdout
        flags = re.split(r"\n  (?=--?\w)", text.split("options:")[1].split("flags of")[0])[1:]
        assert len(flags) > 20
        for flag in flags:
            about = " ".join(flag.split())
            assert "default" in about or re.match(r"(-h|--compile|--dry_run)", about), about


def test_train_then_again_then_evaluate(script, tmp_path):
    for name, flags in (("train_stylegan2.py", SMALL_GAN), ("train_ddim.py", SMALL)):
        first = script(name, *flags, "--method", "er")
        assert first.returncode == 0 and first.stdout.count("er task") == 2
        again = script(name, *flags, "--method", "er", env={"PYTHONPROFILEIMPORTTIME": "1"})
        assert again.returncode == 0 and "is finished" in again.stdout
        assert "torch" not in again.stderr.split()  # answered before PyTorch is loaded
    (run,) = tmp_path.glob("runs/*/ddim/*/*")
    config = common.read_json(run / "config.json")
    config["code"]["common.py"] = "changed"
    common.write_file(run / "config.json", str(config).replace("'", '"').replace("None", "null")
                      .replace("True", "true").replace("False", "false").encode())  # fmt: skip
    assert "common.py changed since" in script("train_ddim.py", *SMALL, "--method", "er").stdout


def test_gpu_check_ends_on_a_cpu(tmp_path):
    """All but the compiled networks, which take minutes."""
    code = "import gpu_check; gpu_check.LIMIT = 0; gpu_check.main()"
    flags = ["--device", "cpu", "--tiny"]
    shown = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, cwd=tmp_path,
                           env={**os.environ, "PYTHONPATH": str(ROOT / "tests")})  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    rows = [line.split(" | ")[0].strip("| ") for line in shown.stdout.splitlines() if line.startswith("| tiny")]
    assert {
        "tiny, gradient, cpu against cpu",
        "tiny, ddim, er, stopped and resumed against unbroken",
        "tiny, stylegan2, er, stopped and resumed against unbroken",
        "tiny, gr, step",
        "tiny, stylegan2, loss of R1, cpu against cpu",
        "tiny, stylegan2, bf16, G",
    } <= {*rows}
    assert "FAIL" not in shown.stdout and shown.stdout.count("left out") == 2


def test_strengths_figure(train, script, tmp_path):
    for method in ("ncl", "kd", "l2", "ewc", "si", "mas"):
        train("runs", "--method", method)
    script("eval_metrics.py", "runs", "--num_samples", "4", "--out", "results", "--data", train.cache)
    figure = script("docs/strengths.py", "runs", "--out", "strengths.png")
    assert figure.returncode == 0 and figure.stdout.count("best AFQ") == 5 and (tmp_path / "strengths.png").exists()
    nothing = script("docs/strengths.py", tmp_path / "results")
    assert nothing.returncode == 2 and nothing.stderr.count("\n") == 1 and "run_all.sh strengths" in nothing.stderr


def test_run_all_lists_its_commands(tmp_path):
    listed = subprocess.run(["bash", str(ROOT / "run_all.sh"), "--list"], capture_output=True, text=True, cwd=tmp_path)
    lines = listed.stdout.splitlines()
    assert listed.returncode == 0 and len(lines) == 4
    assert sorted(re.search(r"--method (\w+)", line)[1] for line in lines) == ["ensemble", "er", "ncl", "noncl"]
    assert all(line.startswith("python train_ddim.py") and "--order 1 --seed 1" in line for line in lines)
    for line in lines:
        train_ddim.parse_args(shlex.split(line)[2:])
    count = {"digits_ddim": 12, "digits_gan": 11, "strengths": 41, "concepts_demo": 17,
             "paper": 12 * (6 * 5 + 1) + 11 * 6 * 5 + 17 * 5}  # fmt: skip
    for profile, number in count.items():
        listed = subprocess.run(["bash", str(ROOT / "run_all.sh"), "--list", profile], capture_output=True, text=True,
                                env={**os.environ, "PYTHON": sys.executable})  # fmt: skip
        lines = listed.stdout.splitlines()
        assert len(lines) == len(set(lines)) == number, listed.stderr
        for line in lines:
            _, name, *flags = shlex.split(line)
            SCRIPTS[name].parse_args(flags)
    wrong = subprocess.run(["bash", str(ROOT / "run_all.sh"), "nonsense"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: unknown profile") and not wrong.stdout
