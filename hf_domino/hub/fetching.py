"""Downloads a drafter and checks it before anything of it is loaded."""

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.hf_api import ModelInfo

from . import layout
from .checks import inspect_folder
from .checksums import sha256, wrong_checksums

_MAX_BYTES = 64 * 2**30


def fetch_drafter(
    repo_id: str, revision: str | None = None, token: str | bool | None = None, cache_dir: str | Path | None = None
) -> Path:
    """The folder of a drafter that was downloaded, compared with its checksums and looked over.

    The repo's code stays where it is: `DominoDraftModel.from_pretrained(fetch_drafter(repo_id))` runs this package's.
    A file that differs from its checksum is downloaded once more and is not left in the cache if it still does.

    Raises:
        ValueError: the repo holds what a drafter's repo must not, or is damaged; the message lists it.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses: not found, gated, private, no such revision.
    """
    info = HfApi(token=token).model_info(repo_id, revision=revision, files_metadata=True)
    files = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    wanted = [name for name in files if layout.is_data(name)]
    strange = sorted(name for name in files if not layout.is_data(name) and not layout.is_code(name))
    if strange:
        raise ValueError(f"{repo_id} holds {', '.join(strange)}, which a drafter's repo does not; nothing was loaded.")
    size = sum(files[name].size or 0 for name in wanted)
    if size > _MAX_BYTES:
        raise ValueError(f"{repo_id} holds {size:,} bytes, more than any drafter; nothing was downloaded.")

    where = {"revision": info.sha, "token": token, "cache_dir": cache_dir}
    folder = Path(snapshot_download(repo_id, allow_patterns=wanted, **where))
    if damaged := _damaged(folder, info, wanted):
        folder = Path(snapshot_download(repo_id, allow_patterns=damaged, force_download=True, **where))
        if damaged := _damaged(folder, info, wanted):
            for name in damaged:
                _forget(folder / name)
            raise ValueError(
                f"{repo_id}: {', '.join(damaged)} differ from their checksums, twice over; removed from the cache."
            )
    inspect_folder(folder).raise_if_refused()
    return folder


def _damaged(folder: Path, info: ModelInfo, names: list[str]) -> list[str]:
    """Files that differ from the Hub's own checksums or from the repo's."""
    expected = {sibling.rfilename: sibling.lfs.sha256 for sibling in info.siblings or () if sibling.lfs}
    wrong = {name for name in names if name in expected and sha256(folder / name) != expected[name]}
    if layout.CHECKSUMS in names:
        listed = wrong_checksums(folder, only_present=True)
        wrong |= {name for name in names if any(problem.startswith(f"{name} differs") for problem in listed)}
    return sorted(wrong)


def _forget(path: Path) -> None:
    """Removes a file of a snapshot and the blob behind it."""
    blob = path.resolve()
    path.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)
