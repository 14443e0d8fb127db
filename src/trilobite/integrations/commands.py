"""`trilobite-transformers`, `trilobite-lm-eval`: commands of others, which find no plugin by themselves."""

import sys

import trilobite  # noqa: F401 - registers the quantizer and the model classes


def transformers() -> None:
    """`transformers`, which reads packed checkpoints now."""
    from transformers.cli.transformers import main

    main()


def lm_eval() -> None:
    """`lm_eval`, whose `--model hf` reads packed checkpoints now. Exit status 1 where it is not installed."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        sys.exit("error: trilobite-lm-eval needs lm_eval: pip install 'trilobite[eval]'")
    cli_evaluate()
