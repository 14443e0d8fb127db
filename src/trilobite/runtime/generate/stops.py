"""Strings that end a text."""


class Stops:
    """Looks for stop strings in a text that comes in pieces; what may be the beginning of one is held back.

    stops: they end the text and do not belong to it
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        """Before the first piece."""
        self.stops = stops
        self.held = ""
        self.stopped = False

    def take(self, text: str, last: bool = False) -> str:
        """What of the text is sure now that this piece of it came; after a stop string, nothing any more."""
        if self.stopped:
            return ""
        text = self.held + text
        ends = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(ends)
        sure = min(ends) if ends else len(text) - (0 if last else self._begun(text))
        self.held = text[sure:]
        return text[:sure]

    def _begun(self, text: str) -> int:
        """Length of the longest end of a text with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        lengths = range(1, min(longest, len(text)) + 1)
        return max((n for n in lengths if any(s.startswith(text[-n:]) for s in self.stops)), default=0)
