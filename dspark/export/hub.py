"""The upload of an exported draft to the Hugging Face hub, and what can stand in its way."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dspark
from dspark.errors import CheckpointError, ConfigError, HubError
from dspark.export.package import WEIGHTS, Package
from dspark.export.tensors import INDEX_NAME

__all__ = ["check_access", "check_branch", "push"]

_BRANCH = re.compile(r"[A-Za-z0-9][\w./-]*", re.ASCII)


def check_branch(branch: str) -> None:
    """Refuse what is no name of a branch.

    Raises:
        ConfigError: names it.
    """
    if not _BRANCH.fullmatch(branch) or ".." in branch or branch.startswith("refs/"):
        raise ConfigError(f"--branch must be the name of a branch, got '{branch}'")


def check_access(token: str | None) -> str:
    """The token, where the network may be used; nothing is asked of the hub.

    Raises:
        ConfigError: HF_HUB_OFFLINE is set, or HF_TOKEN holds no token.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            "HF_HUB_OFFLINE is set, which forbids the network: unset it to push, or use --dry-run"
        )
    token = (token or "").strip()
    if not token:
        raise ConfigError(
            "HF_TOKEN is not set: put a token with the right to write into the environment, or "
            "use --dry-run"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("HF_TOKEN is no token: it holds blanks or characters beyond ASCII")
    return token


def push(
    packed: Package,
    repo_id: str,
    *,
    token: str,
    private: bool = False,
    branch: str = "main",
    message: str | None = None,
) -> dict[str, Any]:
    """Upload in one commit; the repository and the branch are made where they are missing.

    Weights that lie there and are not among ours are removed in the same commit, since readers
    take every file of weights that they find.

    Raises:
        HubError: the hub refused, or cannot be reached; what it says, without the token.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(token=token, library_name="dspark", library_version=dspark.__version__)
    with _refusals(repo_id, branch, token):
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise HubError(
                f"{repo_id} is public already, and --private changes no repository that is there: "
                "nothing was uploaded"
            )
        if branch != "main":
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        ours = {item.path for item in packed.items}
        stale = [
            name
            for name in api.list_repo_files(repo_id, revision=branch)
            if "/" not in name and name.endswith((WEIGHTS, INDEX_NAME)) and name not in ours
        ]
        operations: list[Any] = [CommitOperationDelete(path_in_repo=name) for name in stale]
        for item in packed.items:
            one = CommitOperationAdd(path_in_repo=item.path, path_or_fileobj=item.content)
            if one.upload_info.sha256.hex() != item.sha256:
                raise CheckpointError(f"{item.path} has changed while it was being uploaded")
            operations.append(one)
        done = api.create_commit(
            repo_id,
            operations,
            commit_message=message or "DSpark draft",
            revision=branch,
        )
    return {"url": str(done.commit_url), "commit": done.oid, "removed": stale}


@contextmanager
def _refusals(repo_id: str, branch: str, token: str) -> Iterator[None]:
    """What the hub and the network say, as one sentence without the token."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = (error.server_message or "").replace(token, "HF_TOKEN").split("\n")[0][:200]
        said = f"{status}: {said}" if said else str(status)
        meaning = {
            401: f"the hub does not accept HF_TOKEN for {repo_id}",
            403: f"HF_TOKEN may not write to {repo_id}",
            404: f"the hub knows no {repo_id} with the branch {branch}",
        }.get(status, f"the hub refused the upload to {repo_id}")
        raise HubError(f"{meaning} ({said}); nothing was uploaded") from None
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        # the transport of large files raises RuntimeError
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        reason = reason.replace(token, "HF_TOKEN")
        raise HubError(f"cannot upload to {constants.ENDPOINT}: {reason}") from None
