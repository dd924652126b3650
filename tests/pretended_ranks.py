"""Ranks that are only pretended: their work is done one after the other, and sent as if to other processes."""

import pickle
from contextlib import contextmanager

from segcal.parallel import ranks


class Pretended(ranks.Ranks):
    """All ranks in one process, which merge their answers in the same pairs as true ones."""

    def run(self, function, calls, merge, progress):
        options = {} if progress is None else {"progress": progress}
        content, answers = pickle.dumps((function, calls)), []
        for rank in range(len(calls)):
            function, sent = pickle.loads(content)
            with ranks.alone():
                answers.append(pickle.loads(pickle.dumps(function(*sent[rank], **options))))
        step = 1
        while step < len(answers):
            for rank in range(0, len(answers) - step, 2 * step):
                answers[rank] = merge(answers[rank], answers[rank + step])
            step *= 2
        return answers[0]


@contextmanager
def pretended_ranks(monkeypatch, world):
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "_this", Pretended(0, world, None))
        patch.setattr(ranks, "_free", True)
        yield
