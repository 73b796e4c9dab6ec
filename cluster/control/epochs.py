"""Numbers that no two lives of any gang have in common."""

import time


class Epochs:
    """``seen`` is (incarnation of the controller, latest epoch): both go on from the largest that
    any rank has seen, and from the wall clock's seconds where none has."""

    def __init__(self) -> None:
        self.seen = (0, 0)

    def next_epoch(self) -> int:
        incarnation, epoch = self.seen
        self.seen = incarnation, max(epoch + 1, int(time.time()))
        return self.seen[1]
