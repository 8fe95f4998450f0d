"""Fetches a checkpoint from the Hugging Face hub: configs, tokenizer files and safetensors; never pickles or code."""

from __future__ import annotations

import re
from pathlib import Path

from jaxsqueeze.checkpoint.hf import TOKENIZER_FILES
from jaxsqueeze.checkpoint.source import SourceError

HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
# Not every *.safetensors: some repositories carry the same weights a second time under another name.
_PATTERNS = ["config.json", "model*.safetensors", "model.safetensors.index.json", *TOKENIZER_FILES]


def fetch(repo: str, revision: str | None) -> Path:
    """The snapshot's folder in the hub's own cache; the hub's client shows its progress."""
    from huggingface_hub import errors, snapshot_download

    label = repo if revision is None else f"{repo}@{revision}"
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=["*/*"]))
    except errors.GatedRepoError as error:
        raise SourceError(f"{label}: gated on the hub; accept its terms there and run `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(
            f"{label}: no such model on the hub, or it is private; check the name, or log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"{label}: the hub has no such revision; check the part after @") from error
    except errors.LocalEntryNotFoundError as error:
        raise SourceError(
            f"{label}: not in the local hub cache and the hub cannot be reached; connect to the network (with "
            "HF_HUB_OFFLINE unset), or copy the checkpoint here and give its folder"
        ) from error
    except Exception as error:  # the client's HTTP library differs between its releases
        reason = " ".join(str(error).split())[:200]
        raise SourceError(
            f"{label}: cannot be fetched from the hub ({type(error).__name__}: {reason}); "
            "try again, or copy the checkpoint here and give its folder"
        ) from error
