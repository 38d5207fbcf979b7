"""Experience replay (ER): each batch is the current task's images and some from a memory of the past.

    loss = mean over (current ∪ replayed) rows of the network's own loss

Chaudhry et al., On Tiny Episodic Memories in Continual Learning, 2019 (arXiv:1902.10486), algorithm 1, with
reservoir sampling (Vitter, 1985; Riemer et al., 2019). Paper: CLoG, section 3.2 (4).

Deviations from algorithm 1, which sees each image once in a single pass: a task is trained for many epochs, and the
memory takes it up when it ends, in one pass, so no image is replayed beside itself and each image of the past is kept
with the same probability; replay starts with task 2. Replay is smaller than the batch (CLoG, table 18), and where the
memory is smaller still, an image is drawn again only after all the others. The released code of the benchmark adds
the whole task again at every new best checkpoint, and replays only behind a second flag.
"""

from methods._shared import Reservoir, append
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

    def stored(self, sizes, task):
        return sizes.model + self.memory.images.size

    def state_dict(self):
        return self.memory.state_dict()

    def load_state_dict(self, state):
        self.memory.load_state_dict(state)
