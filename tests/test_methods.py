"""Each method against its paper, in closed form, on models small enough to do by hand."""

import argparse
import copy
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import SMALL, same, weights
from diffusers import UNet2DModel
from peft import PeftModel
from safetensors.torch import load_file, save_file

import common
import runfolder
import streams
import train_ddim
from methods import _shared

METHODS = ["ncl", "noncl", "ensemble", "er", "gr", "kd", "l2", "ewc", "si", "mas", "agem", "clora"]
PENALTIES = ["l2", "ewc", "si", "mas"]
ARGS = dict(seed=1, batch_size=2, importance_samples=1000, memory_size=4, replay_size=2, si_damping=0.1,
            **{f"{m}_weight": 0.5 for m in (*PENALTIES, "kd")})  # fmt: skip
MAIN, LAZY = common.Phase("main", ("net",)), common.Phase("lazy", ("net",), main=False)


class Toy:
    """Two weights in two tensors, and one without a gradient; the data are pairs (x, t) of vectors of length 2."""

    device = "cpu"
    draws_an_image = 1

    def __init__(self, w, x, t):
        self.net = torch.nn.ParameterDict({"a": torch.tensor([float(w[0])]), "b": torch.tensor([float(w[1])])})
        self.net["unused"] = torch.ones(3)
        self.args = argparse.Namespace(batch_size=2)
        self.held = []  # what `hold` was called with
        self.modes = []  # whether the network was in training mode, for each output
        pairs = torch.tensor([x, t], dtype=torch.float32).movedim(0, 1).numpy()
        self.data = argparse.Namespace(images=pairs, labels=np.arange(len(pairs)))

    nets = property(lambda self: {"net": self.net})
    w = property(lambda self: torch.cat([self.net["a"], self.net["b"]]))

    def phases(self, step):
        return [MAIN, LAZY] if step == 0 else [MAIN]

    def params(self, phase):
        return {f"net.{k}": p for k, p in self.net.items()}

    def draw(self, images, labels, key):
        pairs = torch.as_tensor(images)
        return {"x": pairs[:, 0], "t": pairs[:, 1], "labels": torch.as_tensor(labels)}

    def hold(self, indices, key=None):
        self.held.append(indices)

    def outputs(self, phase, batch):
        self.modes.append(self.net.training)
        return batch["x"] @ self.w

    def frozen_copy(self):
        teacher = copy.copy(self)
        teacher.net = copy.deepcopy(self.net).eval().requires_grad_(False)
        return teacher

    def loss(self, phase, batch):
        batch["out"] = self.outputs(phase, batch)
        return 0.5 * (batch["out"] - batch["t"][:, 0]).square().mean()

    nll = loss

    def class_rows(self):
        return {}


def method_of(name, learner, **args):
    return runfolder.method_class(name)(argparse.Namespace(**{**ARGS, **args}), learner)


def task_of(learner, number=1):
    return streams.Task(number, [0], np.arange(len(learner.data.labels)))


def flat(tensors):
    return torch.cat([tensors["net.a"], tensors["net.b"]]).tolist()


def step(learner, method, batch, optimiser, clip=math.inf):
    """One step as the training loop takes it."""
    optimiser.zero_grad()
    learner.loss(MAIN, batch).backward()
    columns = method.after_backward(MAIN, batch)
    torch.nn.utils.clip_grad_norm_(learner.net.parameters(), clip)
    optimiser.step()
    method.after_step(MAIN)
    return columns


# ------------------------------------------------------------------------------------------- importance


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_fisher_is_the_mean_of_single_squared_gradients(batch_size):
    """w = 0, −log p = ½ (wx − t)², data (1, 1) and (1, −1): both gradients have size 1, and their mean is 0."""
    learner = Toy([0, 0], [[1, 0], [1, 0]], [[1, 0], [-1, 0]])
    ewc = method_of("ewc", learner, batch_size=batch_size)
    ewc.end_task(task_of(learner))
    assert flat(ewc.fisher) == [1.0, 0.0] and not ewc.fisher["net.unused"].any()
    assert all(p.grad is None for p in learner.net.values()) and learner.net.training
    assert learner.modes == [False, False]  # measured without dropout
    ewc.end_task(task_of(learner, 2))
    assert flat(ewc.fisher) == [2.0, 0.0]  # summed over tasks, none divided twice
    learner = Toy([0, 0], [[3, 0], [1, 0]], [[1, 0], [1, 0]])
    ewc = method_of("ewc", learner, batch_size=batch_size)
    ewc.end_task(task_of(learner))
    assert flat(ewc.fisher) == [5.0, 0.0]  # (3² + 1²) / 2


def test_mas_takes_the_absolute_value_of_single_gradients():
    """f = a x₁ + b x₂ = 3 and −1: gradients of f² are (6, 6) and (2, −2)."""
    learner = Toy([2, 1], [[1, 1], [-1, 1]], [[9, 9], [9, 9]])  # targets play no part
    mas = method_of("mas", learner)
    mas.end_task(task_of(learner))
    assert flat(mas.omega) == [4.0, 4.0] and not mas.omega["net.unused"].any()
    mas.end_task(task_of(learner, 2))
    assert flat(mas.omega) == [8.0, 8.0]


def test_importance_takes_each_image_once_and_at_most_so_many():
    learner = Toy([1, 1], [[1, 0]] * 10, [[0, 0]] * 10)
    seen, draw = [], learner.draw
    learner.draw = lambda images, labels, key: seen.append((int(labels[0]), key)) or draw(images, labels, key)
    method_of("ewc", learner).end_task(task_of(learner))
    assert sorted(label for label, _ in seen) == list(range(10)) and len({key for _, key in seen}) == 10
    seen.clear()
    method_of("ewc", learner, importance_samples=3).end_task(task_of(learner))
    labels = [label for label, _ in seen]
    assert len({*labels}) == 3 and labels != [0, 1, 2]  # not the first: a data set may be sorted by class


@pytest.mark.parametrize("name", ["ewc", "mas"])
def test_importance_does_not_depend_on_the_resolution(name, cache):
    """A picture tiled to twice its side, with noise that is new in each pixel, gives the same importance."""

    class OneWeight(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(0.0 if name == "ewc" else 1.0))

        def forward(self, noisy, t, y):
            return argparse.Namespace(sample=self.w * noisy)

    rng, found = np.random.default_rng(0), []
    images = rng.integers(0, 256, (3000, 3, 4, 4)).astype(np.uint8)
    for some in (images, np.tile(images, (1, 1, 2, 2))):
        learner = train_ddim.DDIM(train_ddim.parse_args(SMALL), None, "cpu")
        learner.data, learner.unet = streams.Data("toy", some, np.zeros(3000, int), ["0"], ""), OneWeight()
        learner.scheduler.add_noise = lambda x, noise, t: x  # what the network cannot know is independent of its input
        method = method_of(name, learner, importance_samples=3000)
        method.end_task(task_of(learner))
        ((_, value),) = (method.fisher if name == "ewc" else method.omega).items()
        found.append(value.item())
    exact = np.square(images / 127.5 - 1).mean() * (1 if name == "ewc" else 2)
    assert found[0] == pytest.approx(exact, rel=0.1) and found[1] == pytest.approx(exact, rel=0.1)


def test_quadratic_penalty_is_what_autograd_makes_of_it():
    torch.manual_seed(0)
    params = {k: torch.randn(s, requires_grad=True) for k, s in {"a": (3, 2), "b": (4,), "none": (2,)}.items()}
    anchor = {k: torch.randn(p.shape) for k, p in params.items()}
    omega = {"a": torch.rand(3, 1), "b": torch.rand(4), "none": torch.rand(2)}
    task = {k: torch.randn(p.shape) for k, p in params.items() if k != "none"}
    for k, g in task.items():
        params[k].grad = g.clone()
    value = _shared.quadratic_penalty(params, anchor, omega, 0.7)
    wanted = 0.7 * sum((omega[k] * (params[k] - anchor[k]) ** 2).sum() for k in task)
    assert torch.isclose(value, wanted)
    for k, g in zip(task, torch.autograd.grad(wanted, [params[k] for k in task]), strict=True):
        assert torch.allclose(params[k].grad, task[k] + g, atol=1e-6)
    assert params["none"].grad is None


@pytest.mark.parametrize("name, factor", [("l2", 1), ("ewc", 0.5), ("si", 1), ("mas", 1)])
def test_penalty_of_each_method_by_hand(name, factor):
    """λ Σ Ω (θ − θ*)², halved for EWC; none in the first task, none in lazy phases."""
    learner = Toy([0, 0], [[1, 0]], [[1, 0]])
    method = method_of(name, learner)
    first, second = task_of(learner), task_of(learner, 2)
    sgd = torch.optim.SGD(learner.net.parameters(), 0.1)
    method.start_task(first, [])
    batch = learner.draw(learner.data.images, learner.data.labels, ())
    assert not (step(learner, method, batch, sgd) or {}).get("penalty")
    method.end_task(first)
    method.start_task(second, [first])
    if name != "l2":
        omega = method.fisher if name == "ewc" else method.omega
        omega["net.a"], omega["net.b"] = torch.tensor([3.0]), torch.tensor([5.0])
    importance = torch.tensor([1.0, 1.0] if name == "l2" else [3.0, 5.0])
    learner.net["a"].data += 0.2
    learner.net["b"].data -= 0.1
    moved = torch.tensor([0.2, -0.1])
    learner.net["a"].grad, learner.net["b"].grad = torch.tensor([1.0]), torch.tensor([1.0])
    (value,) = method.after_backward(MAIN, batch).values()
    assert value.item() == pytest.approx(factor * 0.5 * (importance * moved**2).sum().item(), rel=1e-4)
    gradient = torch.cat([learner.net["a"].grad, learner.net["b"].grad])
    assert torch.allclose(gradient, 1 + factor * importance * moved, atol=1e-5)
    assert not method.after_backward(LAZY, batch) and learner.net["unused"].grad is None
    assert torch.equal(gradient, torch.cat([learner.net["a"].grad, learner.net["b"].grad]))


# ------------------------------------------------------------------------------------------------- SI


@pytest.mark.parametrize("clip", [math.inf, 0.05])
def test_path_integral_is_the_decrease_of_the_task_loss(clip):
    """On ½ mean (a x₁ + b x₂ − t)² with orthogonal x the loss falls apart into one part for each weight."""
    learner = Toy([0, 0], [[2, 0], [0, 1]], [[2, 0], [1, 0]])
    si = method_of("si", learner)
    batch = learner.draw(learner.data.images, learner.data.labels, ())

    def parts():
        return [(2 * learner.w[0].item() - 2) ** 2 / 4, (learner.w[1].item() - 1) ** 2 / 4]

    past = []
    for number in (1, 2):
        si.start_task(task_of(learner, number), past)
        start, begun = parts(), learner.w.tolist()
        optimiser = torch.optim.SGD(learner.net.parameters(), 1e-3)
        columns = [step(learner, si, batch, optimiser, clip) for _ in range(800)]
        decrease = [a - b for a, b in zip(start, parts(), strict=True)]
        assert flat(si.path) == pytest.approx(decrease, rel=0.01)
        assert all(columns) == (number == 2)  # the penalty acts, and ω does not see it
        before = flat(si.omega) if past else [0, 0]
        change = [(e - s) ** 2 + 0.1 for s, e in zip(begun, learner.w.tolist(), strict=True)]
        si.end_task(task_of(learner, number))
        wanted = [b + d / c for b, d, c in zip(before, decrease, change, strict=True)]
        assert flat(si.omega) == pytest.approx(wanted, rel=0.01)
        assert flat(si.path) == [0, 0]
        past.append(task_of(learner, number))


def test_a_weight_that_raised_the_loss_has_no_importance():
    learner = Toy([0, 0], [[1, 0]], [[1, 0]])
    si = method_of("si", learner)
    si.start_task(task_of(learner), [])
    si.path["net.a"] -= 1
    si.path["net.b"] += 1
    si.end_task(task_of(learner))
    assert flat(si.omega) == [0.0, 10.0]
    si.start_task(task_of(learner, 2), [task_of(learner)])
    si.path["net.b"] -= 0.4
    si.end_task(task_of(learner, 2))
    assert flat(si.omega) == pytest.approx([0.0, 6.0])  # the ReLU is of the sum, as in the authors' code


def test_path_integral_takes_in_lazy_phases():
    learner = Toy([0, 0], [[1, 0]], [[1, 0]])
    si = method_of("si", learner)
    si.start_task(task_of(learner), [])
    learner.net["a"].grad = torch.tensor([-2.0])
    assert si.after_backward(LAZY, {}) is None
    learner.net["a"].data += 0.5
    si.after_step(LAZY)
    assert flat(si.path) == [1.0, 0.0]


# ---------------------------------------------------------------------------------------------- A-GEM


@pytest.mark.parametrize(
    "gradient, reference, projected",
    [((1, -2), (1, 1), (1.5, -1.5)), ((2, 1), (1, 1), (2, 1)), ((1, -2), (0, 0), (1, -2)), ((-1, -1), (1, 1), (0, 0))],
)
def test_agem_projects_one_flat_vector(gradient, reference, projected):
    learner = Toy([0, 0], [[1, 0], [1, 0]], [[1, 0], [1, 0]])
    agem = method_of("agem", learner)
    agem.end_task(task_of(learner))
    batch = agem.mix({"labels": 1}, (1, 2, 0))
    assert batch == {"labels": 1} and len(agem.reference["labels"]) == 2
    learner.loss = lambda phase, batch: (learner.w * torch.tensor(reference)).sum() * len(batch["labels"]) / 2
    learner.net["a"].grad, learner.net["b"].grad = (torch.tensor([float(g)]) for g in gradient)
    before = [learner.net["a"].grad.clone(), learner.net["b"].grad.clone()]
    assert agem.after_backward(LAZY, batch) is None
    assert [learner.net["a"].grad, learner.net["b"].grad] == before
    columns = agem.after_backward(MAIN, batch)
    assert (learner.net["a"].grad.item(), learner.net["b"].grad.item()) == pytest.approx(projected)
    assert bool(columns["projected"]) == (gradient != projected) and learner.net["unused"].grad is None


# ------------------------------------------------------------------------------------------- teachers


@pytest.fixture
def ddim(cache):
    """method_name → (method in its second task, learner) on the real network."""

    def build(name, *flags):
        args = train_ddim.parse_args([*SMALL, "--method", name, *flags])
        learner = train_ddim.DDIM(args, streams.load_data(streams.scenario(args.dataset), 8, cache), "cpu")
        tasks = streams.split(learner.data, [0, 1, 2, 3], 2)
        method = runfolder.method_class(name)(args, learner)
        method.start_task(tasks[0], [])
        method.start_task(tasks[1], tasks[:1])
        learner.unet.train()
        return method, learner

    return build


def some_of(learner):
    """Images and labels of six images of task 2."""
    some = np.flatnonzero(learner.data.labels >= 2)[:6]
    return learner.data.images[some], learner.data.labels[some]


@pytest.mark.parametrize("labels", ["current", "past"])
def test_distillation_reaches_the_student_and_never_the_teacher(ddim, labels, monkeypatch):
    kd, learner = ddim("kd", "--kd_labels", labels, "--kd_weight", "3")
    (phase,) = learner.phases(0)
    with torch.no_grad():
        for p in learner.unet.parameters():
            p.add_(0.01 * torch.randn_like(p))
    asked, predict = [], train_ddim.DDIM.predict

    def spy(self, x, t, y):
        asked.append((self.unet.training, x, t, y))
        return predict(self, x, t, y)

    monkeypatch.setattr(train_ddim.DDIM, "predict", spy)
    batch = kd.mix(learner.draw(*some_of(learner), (1, 2, 0)), (1, 2, 0))
    teacher = copy.deepcopy(kd.teacher.unet.state_dict())
    learner.loss(phase, batch)
    penalty = kd.penalty(phase, batch)
    penalty.backward()
    assert all(p.grad is None for p in kd.teacher.unet.parameters()) and penalty > 0
    assert sum(p.grad.abs().sum() for p in learner.unet.parameters() if p.grad is not None) > 0
    assert len(asked) == (2 if labels == "current" else 3)
    (_, x, t, y), (mode, teacher_x, teacher_t, teacher_y) = asked[-2:]
    assert torch.equal(x, teacher_x) and torch.equal(t, teacher_t) and torch.equal(y, teacher_y) and not mode
    assert set(y.tolist()) <= ({2, 3} if labels == "current" else {0, 1})
    learner.unet.eval()  # without dropout the value can be computed again
    plain = learner.draw(*some_of(learner), (1, 2, 0)) | {"labels": y}
    learner.loss(phase, batch)
    wanted = (learner.outputs(phase, plain) - kd.teacher.outputs(phase, plain)).square().mean() * 3
    assert torch.isclose(kd.penalty(phase, batch), wanted)
    learner.unet.train()
    assert not kd.teacher.unet.training
    assert all(torch.equal(teacher[k], v) for k, v in kd.teacher.unet.state_dict().items())


def test_generative_replay_asks_a_frozen_copy_for_past_classes(ddim):
    gr, learner = ddim("gr", "--replay_size", "5")
    before = copy.deepcopy(gr.teacher.unet.state_dict())
    with torch.no_grad():
        for p in learner.unet.parameters():
            p.zero_()
    asked, counts = [], Counter()
    sample = gr.teacher.sample
    gr.teacher.sample = lambda labels, seeds: asked.append((labels, seeds)) or sample(labels, seeds)
    current = learner.draw(*some_of(learner), (1, 2, 0))
    for k in range(20):
        batch = gr.mix(current, (1, 2, k))
        assert len(batch["labels"]) == 6 + 5 and torch.equal(batch["images"][:6], current["images"])
        assert batch["images"].min() >= -1 and batch["images"].max() <= 1
        assert sorted(Counter(batch["labels"][6:].tolist()).values()) == [2, 3]
        counts.update(batch["labels"][6:].tolist())
        assert torch.equal(batch["images"][6:], gr.mix(current, (1, 2, k))["images"][6:])
    assert set(counts) == {0, 1} and min(counts.values()) > 40
    assert len({seed for _, seeds in asked for seed in seeds}) == 20 * 5  # fresh images at each step
    assert not gr.teacher.unet.training and not any(p.requires_grad for p in gr.teacher.unet.parameters())
    assert all(torch.equal(before[k], v) for k, v in gr.teacher.unet.state_dict().items())


@pytest.mark.parametrize("name", ["l2", "ewc", "si", "mas", "kd", "gr"])
def test_a_third_task_is_anchored_where_the_second_ended(name):
    """Anchors and teachers are those of the task before, whatever came earlier; past classes are those of all."""
    learner = Toy([0, 0], [[1, 0]], [[1, 0]])
    method, tasks = method_of(name, learner), [streams.Task(k, [2 * k, 2 * k + 1], np.arange(1)) for k in (1, 2, 3)]
    for k, task in enumerate(tasks):
        method.start_task(task, tasks[:k])
        if k == 2:
            break
        learner.net["a"].data += 1
        method.end_task(task)
    held = method.teacher.net["a"] if name in ("kd", "gr") else method.anchor["net.a"]
    assert held.item() == 2
    assert name not in ("kd", "gr") or method.past == [2, 3, 4, 5]
    learner.net["a"].data += 1
    assert held.item() == 2


@pytest.mark.parametrize("name", ["ewc", "si", "mas"])
def test_state_holds_the_importance_of_all_tasks(name):
    learner = Toy([2, 1], [[1, 1], [-1, 1]], [[9, 9], [9, 9]])
    method, past = method_of(name, learner), []
    for number in (1, 2):
        method.start_task(task_of(learner, number), past)
        if name == "si":
            method.path["net.a"] += 1
        method.end_task(task_of(learner, number))
        past.append(task_of(learner, number))
    state, resumed = method.state_dict(), method_of(name, learner)
    first = method.fisher if name == "ewc" else method.omega
    resumed.load_state_dict(state)
    second = resumed.fisher if name == "ewc" else resumed.omega
    assert same(first, second) and first["net.a"].item() > 0
    second["net.a"] += 1  # neither the state nor the method it came from changes with it
    assert not same(first, second) and torch.equal(method.state_dict().popitem()[1], state.popitem()[1])


# -------------------------------------------------------------------- the promises, on the real script


def test_end_task_comes_after_the_best_weights_and_state_are_back(train, monkeypatch):
    """SI's path integral and the weights that end_task sees are those of the step that was kept."""
    si, seen, ended = runfolder.method_class("si"), {}, []
    after_step, end_task = si.after_step, si.end_task

    def spy_step(self, phase):
        after_step(self, phase)
        path = sum(v.double().sum().item() for v in self.path.values())
        seen[len(seen) + 1] = path, {k: v.clone() for k, v in self.learner.unet.state_dict().items()}

    def spy_end(self, task):
        ended.append(sum(v.double().sum().item() for v in self.path.values()))
        ended.append({k: v.clone() for k, v in self.learner.unet.state_dict().items()})
        end_task(self, task)

    monkeypatch.setattr(si, "after_step", spy_step)
    monkeypatch.setattr(si, "end_task", spy_end)
    scores = iter([3.0, 1.0, 2.0, 3.0, 1.0, 2.0])  # the middle one of three is kept
    monkeypatch.setattr(train_ddim.fid, "frechet_distance", lambda *_: next(scores))
    run = train("a", "--method", "si", "--select", "best")
    assert common.read_json(run / "task1" / "cost.json")["kept_step"] == 4
    for task in (0, 1):
        path, state = seen[6 * task + 4]
        assert ended[2 * task] == path and same(ended[2 * task + 1], state)


def test_penalties_and_projections_come_before_clipping(train, monkeypatch):
    norms, clip = [], torch.nn.utils.clip_grad_norm_
    si, raw = runfolder.method_class("si"), []
    after_backward = si.after_backward

    def spy(self, phase, batch):
        raw.append(
            torch.stack([p.grad.norm() for p in self.learner.params(phase).values() if p.grad is not None]).norm()
        )
        return after_backward(self, phase, batch)

    monkeypatch.setattr(si, "after_backward", spy)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: norms.append(clip(*a)) or norms[-1])
    train("a", "--method", "si", "--si_weight", "10000")
    assert max(raw[:6]) > 1  # not clipped yet
    assert any(after > 1.01 * before for before, after in zip(raw[7:], norms[7:], strict=True))  # with the penalty


def test_task_1_is_that_of_ncl(train):
    ncl = train("a")
    for method in METHODS[1:]:
        assert same(weights(ncl, 1), weights(train("a", "--method", method), 1)), method


@pytest.mark.parametrize(
    "method, flag",
    [*((m, f"--{m}_weight") for m in ("kd", *PENALTIES)), ("er", "--memory_size"), ("agem", "--memory_size"),
     ("gr", "--replay_size"), ("er", "--replay_size"), ("agem", "--replay_size")],
)  # fmt: skip
def test_strength_0_is_ncl_to_the_bit(train, method, flag):
    ncl, nothing, run = train("a"), train("a", "--method", method, flag, "0"), train("a", "--method", method)
    assert same(weights(ncl, 1), weights(nothing, 1)) and same(weights(ncl, 2), weights(nothing, 2))
    assert same(weights(ncl, 1), weights(run, 1))
    assert method == "agem" or not same(weights(ncl, 2), weights(run, 2))  # A-GEM met no conflict in so few steps
    for some, positive in ((run, flag.endswith("_weight")), (nothing, False)):
        rows = {row["task"]: float(row["penalty"]) for row in common.read_csv(some / "log.csv")}
        assert rows["1"] == 0 and (rows["2"] > 0) == positive
    if method == "kd":
        past = train("a", "--method", "kd", flag, "0", "--kd_labels", "past")
        assert same(weights(ncl, 1), weights(past, 1)) and same(weights(ncl, 2), weights(past, 2))


def test_projections_are_counted(train):
    run = train("a", "--method", "agem", "--steps", "20")
    assert not same(weights(run, 2), weights(train("a", "--steps", "20"), 2))
    rows = common.read_csv(run / "log.csv")
    assert [float(r["projected"]) > 0 for r in rows][:2] == [False, False]
    assert sum(float(r["projected"]) for r in rows) > 0 and all(0 <= float(r["projected"]) <= 1 for r in rows)


@pytest.mark.parametrize("method", ["l2", "ewc", "si", "mas"])
def test_the_stronger_the_nearer_to_the_anchor(train, method):
    scale = {"l2": 1, "ewc": 100, "si": 1, "mas": 10}[method]
    distances = []
    for strength in (0, scale, 100 * scale):
        run = train("a", "--method", method, f"--{method}_weight", str(strength), "--steps", "20")
        first, second = weights(run, 1), weights(run, 2)
        distances.append(sum((first[k] - second[k]).square().sum().item() for k in first))
    assert distances[0] > distances[1] > distances[2] > 0


def test_l2_leaves_unseen_classes_alone(ddim):
    l2, _ = ddim("l2")
    rows = l2.importance["unet.class_embedding.weight"]
    assert rows.flatten().tolist() == [1, 1, 0, 0]
    assert all(v.item() == 1 for k, v in l2.importance.items() if "class_embedding" not in k)


def test_ewc_and_mas_do_not_hold_unseen_classes(train):
    for method, key in (("ewc", "fisher"), ("mas", "omega")):
        state = common.load_tensors(train("a", "--method", method) / "task1" / "method.pt")
        table = state[f"{key}/unet.class_embedding.weight"]
        assert table[:2].any() and not table[2:].any()
        assert all(v.min() >= 0 and v.isfinite().all() for v in state.values())


def test_stored_numbers_are_those_of_table_12(train):
    """P, 2P, 3P, T·P, images of the memory, and the adapters of all tasks but the first."""
    net, task = 652_707, 2
    adapter = 82_176
    wanted = {"ncl": net, "noncl": net, "ensemble": task * net, "er": net + 5 * 192, "agem": net + 5 * 192,
              "gr": 2 * net, "kd": 2 * net, "l2": 2 * net, "ewc": 3 * net, "si": 3 * net, "mas": 3 * net,
              "clora": net + adapter}  # fmt: skip
    for method, numbers in wanted.items():
        run = train("a", "--method", method)
        assert common.read_json(run / "task2" / "cost.json")["parameters_stored"] == numbers, method
    trained = common.read_json(train("a", "--method", "clora") / "task2" / "cost.json")["parameters_trained"]
    assert trained == adapter + 4 * 128  # and the class table, of which the task's rows move


@pytest.mark.parametrize(
    "preset, classes, numbers", [("S", 10, 1_163_264), ("M", 1000, 1_715_200), ("L", 200, 1_763_328)]
)
def test_size_of_an_adapter(preset, classes, numbers):
    args = argparse.Namespace(**train_ddim.PRESETS[preset], classes=classes, seed=1, clora_rank=None, clora_alpha=None,
                              clora_mode="isolated")  # fmt: skip
    with torch.device("meta"):
        net = train_ddim.build_unet(args)
        size = sum(p.numel() for p in net.parameters())
        learner = argparse.Namespace(nets={"unet": net}, class_rows=lambda: {"unet.class_embedding.weight": 0},
                                     pretrained=False,
                                     adapts=lambda merge: train_ddim.DDIM.adapts(None, merge))  # fmt: skip
        method = runfolder.method_class("clora")(args, learner)
        method.start_task(argparse.Namespace(number=2, classes=[2, 3]), [None])
    sizes = common.Sizes(size, size, size)
    assert method.stored(sizes, 1 + 1) == size + numbers and method.stored(sizes, 5) == size + 4 * numbers


# --------------------------------------------------------------------------------------------- C-LoRA


def test_clora_never_changes_what_it_learnt(train, cache):
    run = train("a", "--method", "clora", "--tasks", "4")
    args = train_ddim.parse_args([*SMALL, "--method", "clora", "--tasks", "4"])
    learner = train_ddim.DDIM(args, streams.load_data(streams.scenario(args.dataset), 8, cache), "cpu")
    method = runfolder.method_class("clora")(args, learner)
    seeds, layers = common.sampling_seeds((0,), 4), []
    images = {}
    for trained_to in (4, 1, 3, 2):
        for task in range(1, trained_to + 1):
            method.load(run, trained_to, task)
            drawn = learner.sample([task - 1] * 4, seeds)
            assert torch.equal(drawn, images.setdefault(task, drawn))
            wrapped = [n for n, m in learner.unet.named_modules() if hasattr(m, "base_layer")]
            layers.append(len(wrapped))
            assert not any("base_layer" in name for name in wrapped)  # no wrapper in a wrapper
    assert set(layers) == {0, 20} and len({bytes(x.numpy()) for x in images.values()}) == 4
    adapters = [weights(run, task) for task in (2, 3, 4)]
    assert all(a.keys() == adapters[0].keys() for a in adapters)
    assert [a["classes"].tolist() for a in adapters] == [[1], [2], [3]]
    assert any(v.any() for k, v in adapters[0].items() if "lora_B" in k)


def test_clora_draws_from_its_folder_what_it_drew_in_training(train, monkeypatch, cache):
    drawn, clora, base = [], runfolder.method_class("clora"), []
    save = clora.save

    def spy(self, folder):
        drawn.append(self.learner.sample(self.classes * 2, [1, 2]))
        base.append({k.replace("base_layer.", ""): v.clone() for k, v in self.learner.unet.state_dict().items()})
        save(self, folder)

    monkeypatch.setattr(clora, "save", spy)
    run = train("a", "--method", "clora", "--tasks", "4", "--lr", "0.02")
    args = train_ddim.parse_args([*SMALL, "--method", "clora", "--tasks", "4"])
    learner = train_ddim.DDIM(args, streams.load_data(streams.scenario(args.dataset), 8, cache), "cpu")
    method = clora(args, learner)
    for task in (1, 3, 2, 4):
        method.load(run, 4, task)
        assert torch.equal(learner.sample([task - 1] * 2, [1, 2]), drawn[task - 1])
        frozen = {k: v for k, v in base[task - 1].items() if "lora_" not in k and "class_embedding" not in k}
        assert len(frozen) > 100 and all(torch.equal(v, base[0][k]) for k, v in frozen.items())
    assert not torch.equal(drawn[1], drawn[0])


def test_clora_refuses_an_adapter_of_other_names(train, cache):
    run = train("a", "--method", "clora")
    file = run / "task2" / "adapter" / "adapter_model.safetensors"
    save_file({k.replace("conv1", "conv9"): v for k, v in load_file(file).items()}, file)
    args = train_ddim.parse_args([*SMALL, "--method", "clora"])
    learner = train_ddim.DDIM(args, streams.load_data(streams.scenario(args.dataset), 8, cache), "cpu")
    with pytest.raises(common.UserError, match="does not fit"):
        runfolder.method_class("clora")(args, learner).load(run, 2, 2)


@pytest.mark.parametrize("method", ["clora", "agem", "ewc", "kd"])
def test_methods_train_in_bf16(train, method):
    rows = common.read_csv(train("a", "--method", method, "--precision", "bf16") / "log.csv")
    assert len(rows) == 2 and all(math.isfinite(float(r["loss_main"])) for r in rows)


def test_clora_adapters_load_with_peft(train, cache):
    run = train("a", "--method", "clora")
    args = train_ddim.parse_args([*SMALL, "--method", "clora"])
    learner = train_ddim.DDIM(args, streams.load_data(streams.scenario(args.dataset), 8, cache), "cpu")
    method = runfolder.method_class("clora")(args, learner)
    method.load(run, 2, 2)
    unet = UNet2DModel.from_pretrained(run / "task1" / "unet")
    # trainable, as in training: PyTorch multiplies by a weight with a gradient in another order, to other last bits
    model = PeftModel.from_pretrained(unet, run / "task2" / "adapter", is_trainable=True).eval()
    rows = weights(run, 2)
    model.get_base_model().class_embedding.weight.data[rows["classes"]] = rows["unet.class_embedding.weight"]
    x, t, y = torch.randn(2, 3, 8, 8), torch.tensor([5, 500]), torch.tensor([2, 3])
    learner.unet.eval()
    with torch.no_grad():
        ours, theirs = learner.predict(x, t, y), model(x, t, y).sample
        merged = model.merge_and_unload()(x, t, y).sample
    assert torch.equal(ours, theirs) and (merged - ours).abs().max() < 1e-5


def test_clora_trains_the_adapter_and_its_class_rows_alone(ddim, monkeypatch):
    method, learner = ddim("clora")
    names = set(learner.params(learner.phases(0)[0]))
    assert {n for n in names if "lora_" not in n} == {"unet.class_embedding.weight"}
    assert len(names) == 1 + 2 * 20
    monkeypatch.setattr(learner, "adapts", lambda merge: ({"unet": ["nothing"]}, 8))
    with pytest.raises(ValueError, match="nothing"):
        method.start_task(streams.Task(2, [2, 3], np.arange(4)), [streams.Task(1, [0, 1], np.arange(4))])


# ------------------------------------------------------------------------------------------ it helps


def test_the_old_task_is_kept_better_with_a_memory(train, cache):
    """The loss on task 1 after task 2, on images, times and noise that are the same for both."""
    args = train_ddim.parse_args(SMALL)
    learner = train_ddim.DDIM(args, streams.load_data(streams.scenario(args.dataset), 8, cache), "cpu")
    old = np.flatnonzero(learner.data.labels < 2)
    batch, losses = learner.draw(learner.data.images[old], learner.data.labels[old], (0, "test")), []
    for method in ("er", "ncl"):
        run = train("a", "--method", method, "--steps", "60", "--batch_size", "16", "--replay_size", "16",
                    "--memory_size", "50")  # fmt: skip
        learner.load(run / "task2")
        learner.unet.eval()
        with torch.no_grad():
            losses.append(learner.loss(learner.phases(0)[0], batch).item())
    assert losses[0] < losses[1]


def test_every_method_says_what_to_search():
    for name in METHODS:
        search = runfolder.method_class(name).search
        strengths = [values for flag, values in search.items() if flag.endswith("_weight")]
        assert len(strengths) == (name in ("kd", *PENALTIES))
        for values in strengths:
            assert len(values) == 8 and all(b == pytest.approx(10 * a) for a, b in itertools.pairwise(values))
            args = train_ddim.parse_args(["--method", name])
            assert getattr(args, f"{name}_weight") in values
