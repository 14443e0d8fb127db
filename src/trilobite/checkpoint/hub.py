"""Checkpoints of the Hugging Face hub: safetensors and the small files beside them."""

import re
from collections.abc import Collection
from pathlib import Path

from trilobite.errors import CheckpointError, one_line


def download(repo: str, revision: str | None, companions: Collection[str]) -> Path:
    """The folder of a hub model's files in the local cache, downloaded if need be: weights and `companions`, no code.

    companions: suffixes of the small files    Raises CheckpointError: no such model, no access, no connection.
    """
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo) or repo.startswith("."):
        raise CheckpointError(f"{repo}: no such folder; expected a checkpoint's folder or a hub id")

    # Imported here: a local folder needs neither the hub client nor its start-up time.
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", *(f"*{suffix}" for suffix in sorted(companions)), "README.md"]
    try:
        # Subfolders and `consolidated` hold the same weights again, in the layout of another program.
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"]
        )
    except hub.GatedRepoError as e:
        raise CheckpointError(
            f"{repo}: a gated model; accept its terms on huggingface.co/{repo} and run `hf auth login`"
        ) from e
    except hub.RevisionNotFoundError as e:
        raise CheckpointError(f"{repo}: the hub has no revision {revision!r}; check --revision") from e
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as e:
        raise CheckpointError(
            f"{repo}: no such folder, and no such model on the hub (or a private one); check the name, "
            "or run `hf auth login`"
        ) from e
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as e:
        raise CheckpointError(
            f"{repo}: no such folder, not in the local cache, and the hub cannot be reached; check the path, "
            "or connect (and unset HF_HUB_OFFLINE)"
        ) from e
    except (OSError, hub.HTTPError) as e:
        raise CheckpointError(f"{repo}: the download failed ({one_line(e)}); run again to continue it") from e
    return Path(folder)
