"""Files that this process may hold open at once (``ulimit -n``)."""

from __future__ import annotations

import errno

from segspeed.types import SettingError

OURS = 256  # memory maps kept open, libraries, pipes, logs


def ensure_open_files(needed: int, cure: str) -> None:
    """Raise the soft limit as far as ``needed`` more files ask for.

    Raises SettingError, with ``cure``, where the hard limit forbids it.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + OURS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SettingError(
            f"this process may open {hard} files at once and needs about {wanted}: {cure}, or raise the limit "
            f"(ulimit -n {wanted}, or your container's --ulimit nofile={wanted})"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def too_many_open_files(error: BaseException) -> bool:
    """Whether an error says that this limit was met; torch's shared memory words it in its own way."""
    text = str(error)
    return getattr(error, "errno", None) == errno.EMFILE or "Too many open files" in text or "ancdata" in text
