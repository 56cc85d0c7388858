"""Fetches a GGUF file from a Hugging Face repository, as llama-server's -hf does.

Files are kept in huggingface_hub's own cache, where other programs find them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from llamatrio.errors import ModelError

USUAL_QUANT = "Q4_K_M"


def fetch_from_hugging_face(
    repo: str, file: str | None = None, *, token: str | None = None, offline: bool = False, endpoint: str | None = None
) -> Path:
    """Path of a repository's model file, fetched where it is not here yet.

    repo: `user/model` or `user/model:quant`; without a quant Q4_K_M, or else the first file. file: takes its place.
    endpoint: another hub than huggingface.co.

    Raises:
        ModelError: the repository or its file cannot be had; one line that says why.
    """
    name, _, quant = repo.partition(":")
    try:
        if file is None:
            file = choose_file(_files(name, token, offline, endpoint), quant, name)
        return _fetch(name, file, token, offline, endpoint)
    except ModelError:
        raise
    except Exception as error:  # the library's own, its HTTP client's, the system's: all are for the user to read
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(f"cannot fetch {repo} from Hugging Face: {first_line or type(error).__name__}") from error


def choose_file(names: Iterable[str], quant: str, repo: str) -> str:
    """The model file of a quantization among a repository's files. Raises ModelError when there is none."""
    models = sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name.lower())
    if not models:
        raise ModelError(f"{repo} holds no GGUF model")
    wanted = re.compile(rf"(^|[-._/]){re.escape(quant or USUAL_QUANT)}(?=[-.])", re.IGNORECASE)
    found = [name for name in models if wanted.search(name)]
    if quant and not found:
        raise ModelError(f"{repo} holds no {quant}; it has {', '.join(models)}")
    return (found or models)[0]


def _files(repo: str, token: str | None, offline: bool, endpoint: str | None) -> list[str]:
    from huggingface_hub import HfApi, snapshot_download

    if not offline:
        return HfApi(endpoint=endpoint, token=token).list_repo_files(repo)
    folder = Path(snapshot_download(repo, local_files_only=True))
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*")]


def _fetch(repo: str, file: str, token: str | None, offline: bool, endpoint: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo, file, token=token, local_files_only=offline, endpoint=endpoint))
