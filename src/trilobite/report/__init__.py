"""The report: a page of HTML that shows what became of a checkpoint, and why."""
