"""Experience replay (ER): each batch is the current task's images and some from a memory of the past.

    loss = mean over (current ∪ replayed) rows of the network's own loss

Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019 (arXiv:1902.10486), algorithm 1, with
reservoir sampling (Vitter, 1985; Riemer et al., 2019). Paper: CLoG, section 3.2 (4).

Deviation from algorithm 1: the memory takes up a task when it ends, in one pass, so no image is replayed beside
itself and each image of the past is kept with the same probability; replay starts with task 2. The released
code of the benchmark adds the whole task again at every checkpoint, and replays only behind a second flag.
"""

from common import Reservoir, append
from methods.ncl import NCL


class ER(NCL):
    def __init__(self, args, learner):
        super().__init__(args, learner)
        self.memory = Reservoir(args.memory_size, learner.data)

    def mix(self, batch, key):
        images, labels = self.memory.draw(self.args.replay_size, (*key, "memory"))
        return append(batch, self.learner.draw(images, labels, (*key, "replay")))

    def end_task(self, task):
        self.memory.add(task.indices, (self.args.seed, task.number, "reservoir"))

    def state_dict(self):
        return self.memory.state_dict()

    def load_state_dict(self, state):
        self.memory.load_state_dict(state)
