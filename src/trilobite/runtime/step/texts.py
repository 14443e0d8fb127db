"""Steps of several texts: a list for each number of them that is met often, since sentences leave a batch one by one."""

from collections import Counter, OrderedDict
from collections.abc import Callable

from trilobite.runtime.step.step_list import StepList

WORTH = 8
"""Steps of so many texts before a list for them is made."""
MOST_TEXTS = 64
"""Of which there are lists: with more, a step is products, and numbers of texts come again too rarely."""
MOST_BYTES = 1 << 28
"""Of all lists: the eldest go first."""


class Others:
    """Those for more than one text. running: the number of texts of the newest step."""

    def __init__(self) -> None:
        """None yet."""
        self.steps: OrderedDict[int, StepList] = OrderedDict()
        self.met: Counter[int] = Counter()
        self.running = 1

    def of(self, texts: int, make: Callable[[int], StepList]) -> StepList | None:
        """The one for so many texts, once there were enough of them."""
        self.met[texts] += texts <= MOST_TEXTS
        if self.met[texts] <= WORTH:
            return None
        if texts not in self.steps:
            self.steps[texts] = make(texts)
        return self.steps[texts]

    def know_one(self, one: StepList, but: StepList) -> bool:
        """Whether a list is right already, of another number of texts than `but`'s. one: the one for one text."""
        return any(step.right for step in (one, *self.steps.values()) if step is not but)

    def turn_to(self, texts: int, one: StepList) -> None:
        """The next step is of so many texts. one: the one for one text."""
        if texts == self.running:
            return
        before = one if self.running == 1 else self.steps.get(self.running)
        if before is not None and before.rest():
            self.met[self.running] = 0
        self.running = texts
        if texts in self.steps:
            self.steps.move_to_end(texts)
        sizes = {n: step.ready.nbytes for n, step in self.steps.items() if step.ready is not None}
        used = sum(sizes.values())
        for n, size in sizes.items():
            if used > MOST_BYTES and n != texts:
                del self.steps[n]
                used -= size
