"""Every error a user can cause, and nothing else.

    TrilobiteError
    ├── CheckpointError (ValueError)       a checkpoint on disk is missing, incomplete, corrupt or of an unknown kind
    │   └── FormatVersionError             written by a newer or unknown format version
    ├── ArchitectureError (ValueError)     tensors that match no role, or a model class nobody provides
    ├── RecipeError (ValueError)           a recipe that cannot be read, or that does not fit this checkpoint
    │   └── BudgetError                    bytes that no recipe comes to
    ├── ShapeError (ValueError)            tensors whose shapes, dtypes or devices do not fit together
    ├── WeightError (ValueError)           weights that cannot be quantized: NaN, infinite, out of range
    ├── DestinationError (OSError)         the place to write to is full, occupied, or made by something else
    ├── CalibrationError (ValueError)      a text, a model or activations that cannot calibrate a method
    ├── EvaluationError (ValueError)       a text or task that cannot be measured
    ├── SettingError (ValueError)          a setting of a run that does not exist or is out of range
    ├── PromptError (ValueError)           a prompt without tokens, or one that the model cannot take
    ├── DeviceError (RuntimeError)         a GPU that is missing, too old or has too little memory
    ├── TuningError (ValueError)           a table of tiles for GPU kernels that cannot be read
    ├── ResourceError (RuntimeError)       memory or threads that the system does not give
    ├── OffloadError (RuntimeError)        too little memory for a model that streams, or a disk that fails meanwhile
    └── MissingExtraError (ImportError)    an optional dependency is not installed

Each message says what was found, the rule, and what to do. The command line prints it as one line and exits with
status 1; a traceback means a bug of ours.
"""


class TrilobiteError(Exception):
    """Base class: catch this to catch everything that Trilobite raises on purpose."""


class CheckpointError(TrilobiteError, ValueError):
    """A checkpoint on disk is missing, incomplete, corrupt or of an unknown kind."""


class FormatVersionError(CheckpointError):
    """A packed checkpoint was written in a format version that this release does not read."""


class ArchitectureError(TrilobiteError, ValueError):
    """Tensors match no role, or no model class is known for the checkpoint."""


class RecipeError(TrilobiteError, ValueError):
    """A recipe cannot be read, or does not fit the checkpoint."""


class BudgetError(RecipeError):
    """A budget of bytes is one that no recipe for the checkpoint comes to."""


class ShapeError(TrilobiteError, ValueError):
    """Shapes, dtypes or devices of tensors do not fit together."""


class WeightError(TrilobiteError, ValueError):
    """Weights cannot be quantized because they are NaN, infinite or out of range."""


class DestinationError(TrilobiteError, OSError):
    """The destination is full, occupied, or was made by something else."""


class StoreError(TrilobiteError, OSError):
    """An object store fails, refuses, or holds something else than when it was opened."""


class CalibrationError(TrilobiteError, ValueError):
    """A text, a model or its activations cannot calibrate a method that needs data."""


class EvaluationError(TrilobiteError, ValueError):
    """A text or a task cannot be measured."""


class SettingError(TrilobiteError, ValueError):
    """A setting of a run does not exist or is out of range."""


class PromptError(TrilobiteError, ValueError):
    """A prompt has no tokens, or the model cannot take it."""


class DeviceError(TrilobiteError, RuntimeError):
    """A GPU is missing, too old or has too little memory."""


class TuningError(TrilobiteError, ValueError):
    """A table of tiles for the GPU kernels cannot be read."""


class OffloadError(TrilobiteError, RuntimeError):
    """Too little memory for a model whose experts stream from the disk, or the disk fails meanwhile."""


class ResourceError(TrilobiteError, RuntimeError):
    """The system gives no more memory or threads."""


class MissingExtraError(TrilobiteError, ImportError):
    """An optional dependency is not installed."""


NO_MORE = (
    "can't allocate memory",
    "annot allocate memory",
    "not enough memory",
    "bad_alloc",
    "failed to map segment",
    "can't start new thread",
    "could not create a primitive",
    "error return without exception set",
)
"""What Python, torch, oneDNN, numpy and the loader say in errors that are no MemoryError."""


def exhausted(e: BaseException) -> bool:
    """Whether an error says that the system gives no more memory or threads."""
    if isinstance(e, MemoryError):
        return True
    return isinstance(e, OSError | RuntimeError | ImportError | SystemError) and any(
        words in str(e) for words in NO_MORE
    )


def refuse_exhausted(what: object, e: BaseException) -> None:
    """Raise ResourceError where an error says that there is no more memory, or no more threads."""
    if exhausted(e):
        raise ResourceError(
            f"{what}: the system gives no more memory or threads ({one_line(e) or type(e).__name__}); end other "
            "programs, raise the limit of this process (ulimit -v), or ask for less (--jobs 1, a smaller --context)"
        ) from e


def one_line(e: BaseException) -> str:
    """What an error of others says, fit for a line of ours: 200 characters at most."""
    return " ".join(str(e).split())[:200]
