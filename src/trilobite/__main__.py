"""The `trilobite` command, and `python -m trilobite`."""

from trilobite.signals import answer_signals


def main() -> None:
    """Answer signals before anything slow is imported, then run the command line."""
    answer_signals()
    from trilobite.cli import main as command

    command()


if __name__ == "__main__":
    main()
