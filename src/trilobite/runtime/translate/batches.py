"""Which sentences go through the model together."""

from collections.abc import Sequence


def batches(lengths: Sequence[int], *, most: int, tokens: int | None = None) -> list[list[int]]:
    """Places of sentences of about one length, the longest first: where memory does not suffice, it shows at once.

    lengths: tokens of each sentence    most: sentences in a batch    tokens: also at most so many in a batch, padding
    included; a longer sentence goes alone
    """
    made: list[list[int]] = []
    longest = 0
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = not made or len(made[-1]) >= most
        if not full and tokens is not None:
            full = (len(made[-1]) + 1) * longest > tokens
        if full:
            made.append([])
            longest = max(1, lengths[place])
        made[-1].append(place)
    return made
